"""The gauges of the cluster: the elected keeper reads them from the database, and sends them to the supervisor.

It reads every few seconds, and less often if a reading takes long: at most a twentieth of the time. A reading that
takes too long is cancelled, and the next one counts less. Only this loop asks the database: a scrape shows the last
reading.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import psycopg

from tasklib.log import log
from tasklib.statistics import MOST_COUNTED, Cluster, PolicyReading, QueueStatistics, StatisticsStatements, Table
from tasklib_daemon import metrics
from tasklib_daemon.metrics import MOST_NAMES, OTHER, Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tasklib.config import Config
    from tasklib.runtime.metrics import WorkerMetrics
    from tasklib.runtime.session import Session

Sample = tuple[str, list[str], float]  # a metric's name, its labels, its value

SETTINGS = "-c statement_timeout=2s -c lock_timeout=500ms -c max_parallel_workers_per_gather=0"
EVERY_SECONDS = 5.0
REST = 20  # times the duration of a reading
LEAST_COUNTED = 10_000
REMEMBER_SECONDS = 3600.0  # how long an empty queue is still shown
COUNT_MORE_SECONDS = 600.0  # after a reading that took too long
NOT_ELECTED_SECONDS = 1.0
TABLES = frozenset({
    "tasks", "attempts", "task_attempts", "claims", "workers", "worker_states", "task_rollups", "permits", "rates",
    "task_transitions",
})  # fmt: skip
ALL_QUEUES = "*"  # in the policies: what holds for all queues together
BREAKER_STATES = {"closed": 0.0, "half_open": 1.0, "open": 2.0}


class Gauges:
    def __init__(
        self,
        config: Config,
        session: Session,
        metrics: WorkerMetrics,
        *,
        is_elected: Callable[[], bool],
        unserved: Callable[[], int],
        send: Callable[[dict[str, Any]], None],
    ) -> None:
        self._session = session
        self._statements = StatisticsStatements(config)
        self._metrics = metrics
        self._is_elected = is_elected
        self._unserved = unserved
        self._send = send
        self._most = MOST_COUNTED
        self._more_at = 0.0
        self._seen: dict[str, float] = {}  # queues, and when they last had something

    def run_once(self) -> float | None:
        if not self._is_elected():
            self._session.close()
            return NOT_ELECTED_SECONDS
        began = time.monotonic()
        try:
            samples = [*self._read()]
        except psycopg.errors.QueryCanceled:
            self._metrics.count("gauges_failures")
            self._count_less()
            return REST * (time.monotonic() - began)
        except Exception:
            self._metrics.count("gauges_failures")
            raise
        took = time.monotonic() - began
        samples.append((metrics.GAUGES_DURATION.name, [], took))
        self._send({"say": "gauges", "read_at": time.monotonic(), "samples": samples})
        return max(EVERY_SECONDS, REST * took)

    def _count_less(self) -> None:
        self._most = max(self._most // 10, LEAST_COUNTED)
        self._more_at = time.monotonic() + COUNT_MORE_SECONDS
        log.warning("gauges.slow", consequence=f"no more than {self._most} ready tasks are counted in each queue")

    def _read(self) -> Iterator[Sample]:
        if time.monotonic() >= self._more_at:
            self._most = MOST_COUNTED
        queues = self._session.run(self._statements.queues(most=self._most))
        yield from of_queues([*queues, *self._empty(queues)])
        yield from of_policies(self._session.run(self._statements.policies()), queues)
        yield from of_cluster(self._session.run(self._statements.cluster()))
        yield from of_tables(self._session.run(self._statements.tables()))
        yield metrics.UNSERVED.name, [], float(self._unserved())

    def _empty(self, queues: Sequence[QueueStatistics]) -> Iterator[QueueStatistics]:
        """Queues that had tasks lately are shown with zero, because a missing value would be a gap on a chart."""
        now = time.monotonic()
        self._seen = {queue: at for queue, at in self._seen.items() if now - at < REMEMBER_SECONDS}
        self._seen |= dict.fromkeys((each.queue for each in queues), now)
        for queue in self._seen.keys() - {each.queue for each in queues}:
            yield QueueStatistics(queue, 0, 0, 0, 0, 0, None, None)


def of_queues(queues: Sequence[QueueStatistics]) -> Iterator[Sample]:
    """The longest queues, and the rest together as `other`. A queue of that name belongs to the rest, so that no series
    appears twice.
    """
    by_length = sorted(queues, key=lambda each: (each.queue == OTHER, -each.length))
    most = MOST_NAMES["queue"]
    for each in by_length[:most]:
        yield from _of_queue(each.queue, [each])
    if by_length[most:]:
        yield from _of_queue(OTHER, by_length[most:])


def _of_queue(name: str, queues: Sequence[QueueStatistics]) -> Iterator[Sample]:
    for state in ("ready", "scheduled", "retrying", "claimed", "running"):
        yield metrics.QUEUE_TASKS.name, [name, state], float(sum(getattr(each, state) for each in queues))
    oldest = max(each.oldest_ready_age_seconds or 0.0 for each in queues)
    yield metrics.OLDEST_READY.name, [name], oldest


def of_policies(policies: Sequence[PolicyReading], queues: Sequence[QueueStatistics]) -> Iterator[Sample]:
    """As many queues as may be labels; of more, those in which most tasks are ready. The rest is not told: `other` is
    neither paused nor open. So a queue of that name belongs to the rest.
    """
    ready = {each.queue: each.ready for each in queues}
    ready[ALL_QUEUES] = sum(ready.values())
    by_length = sorted(policies, key=lambda each: -ready.get(each.queue, 0))
    for each in [each for each in by_length if each.queue != OTHER][: MOST_NAMES["queue"]]:
        yield from _of_policy(each, has_ready=ready.get(each.queue, 0) > 0)


def _of_policy(policy: PolicyReading, *, has_ready: bool) -> Iterator[Sample]:
    """A limit that the queue does not have is left out."""
    has_cap = policy.cap is not None
    figures: dict[Metric, float | None] = {
        metrics.QUEUE_WAITING: has_ready,
        metrics.QUEUE_PAUSED: policy.is_paused,
        metrics.QUEUE_CAP: policy.cap,
        metrics.QUEUE_PERMITS: policy.permits if has_cap else None,
        metrics.QUEUE_PERMITS_WANTED: policy.wanted if has_cap else None,
        metrics.QUEUE_PERMITS_FORGOTTEN: policy.forgotten,
        metrics.QUEUE_RATE_STARTS: policy.available_starts,
        metrics.QUEUE_RATE_WAIT: policy.next_start_seconds,
        metrics.QUEUE_BREAKER: None if policy.breaker is None else BREAKER_STATES[policy.breaker],
    }
    yield from ((metric.name, [policy.queue], float(value)) for metric, value in figures.items() if value is not None)


def of_cluster(cluster: Cluster) -> Iterator[Sample]:
    """Unknown values are left out. If nothing is due, or no transaction is open, the age is zero."""
    figures: dict[Metric, float | None] = {
        metrics.SUBMITTED: cluster.submitted,
        metrics.DUE_LAG: cluster.due_lag_seconds or 0.0,
        metrics.CLUSTER_SLOTS: cluster.slots,
        metrics.OLDEST_TRANSACTION: max(cluster.oldest_transaction_seconds or 0.0, 0.0),
        metrics.NOTIFY_QUEUE: cluster.notify_queue_usage,
        metrics.DATABASE_CONNECTIONS: cluster.connections,
        metrics.DATABASE_CONNECTIONS_LIMIT: cluster.connections_limit,
    }
    yield from ((metric.name, [], float(value)) for metric, value in figures.items() if value is not None)
    for state in ("alive", "stopping", "dead"):
        yield metrics.CLUSTER_WORKERS.name, [state], float(getattr(cluster, state))


def of_tables(tables: Sequence[Table]) -> Iterator[Sample]:
    for table in tables:
        if table.name in TABLES:
            yield metrics.TABLE_BYTES.name, [table.name], float(table.size_bytes)
            yield metrics.LIVE_TUPLES.name, [table.name], float(table.live_tuples)
            yield metrics.DEAD_TUPLES.name, [table.name], float(table.dead_tuples)
