"""Statistics of queues, and of finished attempts over a window: the values, and the statements that read them.

None of these statements reads tasks that have ended, however many there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasklib.errors import InvalidOptions
from tasklib.names import check_queue
from tasklib.sql import queries
from tasklib.statements import Statement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasklib.config import Config

MOST_COUNTED = 1_000_000  # ready tasks in each queue; a tenth of the others
MOST_IN_BACKLOG = 10_000


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """One queue in which something waits or is held. Ages are those of the ready tasks; None: there are none."""

    queue: str
    ready: int
    scheduled: int
    retrying: int
    claimed: int
    running: int
    oldest_ready_age_seconds: float | None
    newest_ready_age_seconds: float | None

    @property
    def length(self) -> int:
        """Everything that is not done yet."""
        return self.ready + self.scheduled + self.retrying + self.claimed + self.running


@dataclass(frozen=True, slots=True)
class TaskStatistics:
    """The attempts of one task function, by outcome. `retried` counts some of the failed and the timed out ones
    again.
    """

    name: str
    attempts: int
    completed: int
    failed: int
    timed_out: int
    cancelled: int
    snoozed: int
    interrupted: int
    crashed: int
    retried: int
    per_second: float
    average_seconds: float | None
    p50_seconds: float | None
    p95_seconds: float | None
    p99_seconds: float | None
    average_wait_seconds: float | None
    p50_wait_seconds: float | None
    p95_wait_seconds: float | None
    p99_wait_seconds: float | None


@dataclass(frozen=True, slots=True)
class Cluster:
    """Figures of the whole cluster."""

    submitted: int | None
    due_lag_seconds: float | None
    alive: int
    stopping: int
    dead: int
    slots: int
    oldest_transaction_seconds: float | None
    notify_queue_usage: float
    connections: int
    connections_limit: int


@dataclass(frozen=True, slots=True)
class PolicyReading:
    """What the policy of one queue allows now; of '*', what all queues together may do. None: no such limit."""

    queue: str
    is_paused: bool
    cap: int | None  # of tasks that execute at once; a breaker that is not closed lowers it
    permits: int  # of the cap, that workers hold
    wanted: int  # that workers want beyond those
    forgotten: int  # of `permits`, those of workers that are dead or unknown
    breaker: str | None  # closed, half_open or open
    available_starts: int | None  # that the rate limit would grant now
    next_start_seconds: float | None  # until it grants one


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    size_bytes: int
    live_tuples: int
    dead_tuples: int


class StatisticsStatements:
    def __init__(self, config: Config) -> None:
        self._sql = queries("statistics", config.schema)

    def queues(self, queue: str | None = None, most: int = MOST_COUNTED) -> Statement[list[QueueStatistics]]:
        parameters = (None if queue is None else check_queue(queue), most)
        return Statement(
            self._sql["queues"], parameters, lambda rows: [QueueStatistics(*row) for row in rows], is_change=False
        )

    def tasks(self, window_seconds: float, name: str | None = None) -> Statement[list[TaskStatistics]]:
        if isinstance(window_seconds, bool) or not 0 < window_seconds <= 366 * 86400:
            raise InvalidOptions(f"window_seconds must be a number of seconds up to a year, got {window_seconds!r}")
        parameters = (float(window_seconds), name)
        return Statement(
            self._sql["tasks"], parameters, lambda rows: [TaskStatistics(*row) for row in rows], is_change=False
        )

    def backlog(self, queues: Sequence[str] | None = None, most: int = MOST_IN_BACKLOG) -> Statement[int]:
        if isinstance(queues, str):
            raise InvalidOptions(f"queues must be a list of names, got {queues!r}")
        parameters = (None if queues is None else [check_queue(queue) for queue in queues], most)
        return Statement(self._sql["backlog"], parameters, lambda rows: int(rows[0][0]), is_change=False)

    def cluster(self) -> Statement[Cluster]:
        return Statement(self._sql["cluster"], (), lambda rows: Cluster(*rows[0]), is_change=False)

    def policies(self) -> Statement[list[PolicyReading]]:
        return Statement(self._sql["policies"], (), lambda rows: [PolicyReading(*row) for row in rows], is_change=False)

    def tables(self) -> Statement[list[Table]]:
        return Statement(self._sql["tables"], (), lambda rows: [Table(*row) for row in rows], is_change=False)
