"""What was measured, by workload and system, one figure for each round; as a file, and read back."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from bench.harness import Measured

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass
class Results:
    about: dict[str, Any]  # server, sizes, versions
    missing: dict[str, str]  # systems that could not be installed
    rounds: dict[str, dict[str, list[Measured]]] = field(default_factory=dict)
    notes: dict[str, dict[str, str]] = field(default_factory=dict)  # why a figure is not there

    def add(self, workload: str, system: str, measured: Measured) -> None:
        self.rounds.setdefault(workload, {}).setdefault(system, []).append(measured)

    def note(self, workload: str, system: str, reason: str) -> str:
        self.notes.setdefault(workload, {})[system] = reason
        return reason

    def of(self, workload: str, system: str) -> list[Measured]:
        return self.rounds.get(workload, {}).get(system, [])

    def has_failed(self, *systems: str) -> bool:
        reasons = [reason for by_system in self.notes.values() for name, reason in by_system.items() if name in systems]
        return any(reason.startswith("failed") for reason in reasons)

    def figures(self, workload: str, system: str, name: str = "value") -> list[float]:
        """Round by round; `name` is the value, or one of what else was seen."""
        measured = self.of(workload, system)
        return [each.value if name == "value" else each.also[name] for each in measured if has(each, name)]

    def median(self, workload: str, system: str, name: str = "value") -> float | None:
        figures = self.figures(workload, system, name)
        return statistics.median(figures) if figures else None

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Results:
        """Several are put together, workload by workload: what one is compared with must be in the same file."""
        found = cls({}, {})
        for path in paths:
            each = json.loads(path.read_text())
            found.about |= each["about"]
            found.missing |= each["missing"]
            found.notes |= each["notes"]
            for workload, by_system in each["rounds"].items():
                found.rounds[workload] = {
                    name: [Measured(**one) for one in measured] for name, measured in by_system.items()
                }
        return found


def has(measured: Measured, name: str) -> bool:
    return name == "value" or name in measured.also
