"""What campaigns measure: how long things took, and what a family of processes costs. The figures of the processes come
from Linux's /proc.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_TICKS = os.sysconf("SC_CLK_TCK")


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many per cent of all values do not exceed; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)] if ordered else 0.0


def shown(values: Sequence[float], unit: str = "s") -> str:
    """In a line of a report."""
    points = {"p50": 50, "p95": 95, "p99": 99, "max": 100}
    figures = ", ".join(f"{name} {percentile(values, percent):.3f}" for name, percent in points.items())
    return f"{figures} {unit} (of {len(values)})"


def load() -> str:
    """Beside every figure: this machine may have had other things to do."""
    return "load average " + " ".join(f"{each:.1f}" for each in os.getloadavg())


class Process(NamedTuple):
    pid: int
    parent: int
    cpu_seconds: float  # of its own
    reaped_seconds: float  # of its children that have ended


def family(root: int) -> dict[int, Process]:
    """It, its children and theirs, as long as they live."""
    everybody = {each.pid: each for each in map(_process, _pids()) if each is not None}
    found = {root: everybody[root]} if root in everybody else {}
    while more := {pid: one for pid, one in everybody.items() if one.parent in found and pid not in found}:
        found |= more
    return found


def cpu_seconds(root: int) -> float:
    """Since the family began, those included that have ended."""
    return sum(each.cpu_seconds + each.reaped_seconds for each in family(root).values())


class Meter:
    """The time on a processor that a family of processes takes from now on."""

    def __init__(self, name: str, root: int) -> None:
        self._name = name
        self._root = root
        self._began = time.monotonic()
        self._before = cpu_seconds(root)
        self._members = family(root)

    def percent(self) -> float:
        return 100 * (cpu_seconds(self._root) - self._before) / (time.monotonic() - self._began)

    def __str__(self) -> str:
        seconds, now = time.monotonic() - self._began, family(self._root)
        used = {pid: now[pid].cpu_seconds - self._members[pid].cpu_seconds for pid in now if pid in self._members}
        parts = ", ".join(f"{name_of(pid)} {100 * each / seconds:.2f}" for pid, each in used.items() if each > 0)
        return f"{self._name}: {self.percent():.2f} % of a core in {seconds:.0f} s ({parts})"


def pss_bytes(pids: Iterable[int]) -> dict[int, int]:
    """Memory, with what several processes share divided among them."""
    return {pid: _pss(pid) for pid in pids}


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text("utf-8").strip()
    return "gone"


def _pids() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]


def _process(pid: int) -> Process | None:
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        own, reaped = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
        return Process(pid, int(fields[1]), own / _TICKS, reaped / _TICKS)
    return None


def _pss(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
