"""What was found, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Severity(StrEnum):
    """From the best to the worst."""

    OK = "ok"
    NOTE = "note"  # worth knowing, or not to be seen from here; nothing has to be done now
    WARNING = "warning"  # works, but not for long, or not as well as it should
    CRITICAL = "critical"  # tasks do not run, or may be lost

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


# As monitoring systems read them (Nagios and its kin).
EXIT_CODES = {Severity.OK: 0, Severity.NOTE: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}
UNKNOWN_EXIT_CODE = 3  # there was nothing to look at


@dataclass(frozen=True, slots=True)
class Finding:
    """The remedy is what to do, mostly a command to copy. The details are for programs."""

    severity: Severity
    summary: str
    remedy: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    check: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "severity": self.severity,
            "summary": self.summary,
            "remedy": self.remedy,
            "details": dict(self.details),
        }


def ok(summary: str) -> Finding:
    return Finding(Severity.OK, summary)


def note(summary: str, remedy: str, **details: Any) -> Finding:
    return Finding(Severity.NOTE, summary, remedy, details)


def warning(summary: str, remedy: str, **details: Any) -> Finding:
    return Finding(Severity.WARNING, summary, remedy, details)


def critical(summary: str, remedy: str, **details: Any) -> Finding:
    return Finding(Severity.CRITICAL, summary, remedy, details)


def worst(findings: Iterable[Finding]) -> Severity:
    return max((finding.severity for finding in findings), key=lambda severity: severity.rank, default=Severity.OK)
