"""The limits of a suspect that runs in a process of its own. Its worker's supervisor does not see that process, so the
worker holds it to what the supervisor allows a worker.
"""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import NamedTuple

from tasklib.clock import time

LOOK_SECONDS = 1.0  # between two looks at a process
ABORT_SECONDS = 2.0  # for a process that is killed to write its stacks to the log


class SuspectLimits(NamedTuple):
    megabytes: int | None = None  # of memory
    grace_seconds: float = 0.0  # for which it may use more
    stall_seconds: float | None = None  # without a sign of life: it holds the interpreter lock, or was stopped


class Excess(NamedTuple):
    """Why a process has to be killed, and how."""

    reason: str
    signal: signal.Signals
    kill_after_seconds: float


class LimitCheck:
    """Of one process."""

    def __init__(self, limits: SuspectLimits) -> None:
        self._limits = limits
        self._silent_looks = 0  # since its last message
        self._too_large_since = math.inf

    def look(self, pid: int, *, is_silent: bool) -> Excess | None:
        """Counts looks, not seconds: a worker that was frozen together with the process has not looked."""
        self._silent_looks = self._silent_looks + 1 if is_silent else 0
        silent_seconds = self._silent_looks * LOOK_SECONDS
        used, (most, grace_seconds, stall_seconds) = _resident_megabytes(pid), self._limits
        is_too_large = most is not None and used > most
        self._too_large_since = min(self._too_large_since, time.monotonic()) if is_too_large else math.inf
        if time.monotonic() - self._too_large_since > grace_seconds:
            return Excess(f"was killed: it used {used:.0f} MB, and {most} are allowed", signal.SIGTERM, 0.0)
        if stall_seconds is not None and silent_seconds > stall_seconds:
            reason = f"was killed: it has stood still for {silent_seconds:.0f} s"
            return Excess(reason, signal.SIGABRT, ABORT_SECONDS)
        return None


def _resident_megabytes(pid: int) -> float:
    """0: it is gone, or this is not Linux."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024**2
