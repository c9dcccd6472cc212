"""From where on something is a finding, and how lists and times are worded.

All limits are here, for the documentation to be compared with, and for tests, which make a finding true without waiting
for an hour.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasklib.doctor.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SHOWN = 5  # of a list; the details have all of it


@dataclass(frozen=True, slots=True)
class Limits:
    """Of two values, the first is a warning, the second critical."""

    clock_seconds: tuple[float, float] = (1.0, 60.0)
    transaction_seconds: tuple[float, float] = (300.0, 3600.0)
    notify_queue_share: tuple[float, float] = (0.1, 0.5)
    connections_share: tuple[float, float] = (0.8, 0.95)
    slot_wal_bytes: int = 10_000_000_000  # that a slot keeps for nobody
    dead_rows: int = 100_000  # and twice as many as autovacuum waits for
    unserved_seconds: float = 60.0  # a rollout is no reason to wake anybody
    stuck_seconds: float = 30.0  # a lease that ran out is noticed within 20
    # A time limit of a role or database that is shorter is a warning, and a tenth of it is critical.
    shortest_timeouts: Mapping[str, float] = field(
        default_factory=lambda: {
            "statement_timeout": 10.0,
            "transaction_timeout": 10.0,
            "idle_in_transaction_session_timeout": 10.0,
            "idle_session_timeout": 60.0,
            "lock_timeout": 0.1,
        }
    )


def severity_of(value: float, limits: tuple[float, float]) -> Severity | None:
    is_warning, is_critical = (value > limit for limit in limits)
    return Severity.CRITICAL if is_critical else Severity.WARNING if is_warning else None


def some(things: Sequence[str]) -> str:
    more = len(things) - SHOWN
    return "; ".join(things[:SHOWN]) + (f"; and {more} more" if more > 0 else "")


def age(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
