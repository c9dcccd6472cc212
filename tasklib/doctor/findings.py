"""The findings of the checks, as values, and the thresholds above which a value becomes a finding."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class Severity(StrEnum):
    """From the best to the worst."""

    OK = "ok"
    NOTE = "note"  # worth knowing, or not visible to this role; nothing has to be done now
    WARNING = "warning"  # works, but not for long, or not as well as it should
    CRITICAL = "critical"  # tasks do not run, or may be lost

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


# As Nagios and similar monitoring systems read them.
EXIT_CODES = {Severity.OK: 0, Severity.NOTE: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}
UNKNOWN_EXIT_CODE = 3  # there was nothing to check


@dataclass(frozen=True, slots=True)
class Finding:
    """The remedy says what to do, mostly as a command to copy. The details are for programs."""

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


def _finding(severity: Severity, summary: str, remedy: str, **details: Any) -> Finding:
    return Finding(severity, summary, remedy, details)


note = functools.partial(_finding, Severity.NOTE)
warning = functools.partial(_finding, Severity.WARNING)
critical = functools.partial(_finding, Severity.CRITICAL)


def worst(findings: Iterable[Finding]) -> Severity:
    return max((finding.severity for finding in findings), key=lambda severity: severity.rank, default=Severity.OK)


SHOWN = 5  # of a list; the details have all of it


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Of two values, the first is for a warning, the second for a critical finding. Tests use smaller ones."""

    clock_seconds: tuple[float, float] = (1.0, 60.0)
    transaction_seconds: tuple[float, float] = (300.0, 3600.0)
    notify_queue_share: tuple[float, float] = (0.1, 0.5)
    connections_share: tuple[float, float] = (0.8, 0.95)
    slot_wal_bytes: int = 10_000_000_000  # kept by a slot that nothing reads
    dead_rows: int = 100_000  # and more than twice the threshold of autovacuum
    unserved_seconds: float = 60.0  # a rollout is no reason for an alarm
    stuck_seconds: float = 30.0  # a lease that ran out is noticed within 20
    paused_seconds: float = 86400.0  # without an end, with tasks waiting
    breaker_seconds: float = 600.0  # half open, with tasks waiting
    # A shorter time limit of a role or database is a warning; one shorter than a tenth is critical.
    shortest_timeouts: Mapping[str, float] = field(
        default_factory=lambda: {
            "statement_timeout": 10.0,
            "transaction_timeout": 10.0,
            "idle_in_transaction_session_timeout": 10.0,
            "idle_session_timeout": 60.0,
            "lock_timeout": 0.1,
        }
    )


def severity_of(value: float, thresholds: tuple[float, float]) -> Severity | None:
    is_warning, is_critical = (value > threshold for threshold in thresholds)
    return Severity.CRITICAL if is_critical else Severity.WARNING if is_warning else None


def some(things: Sequence[str]) -> str:
    more = len(things) - SHOWN
    return "; ".join(things[:SHOWN]) + (f"; and {more} more" if more > 0 else "")


def age(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
