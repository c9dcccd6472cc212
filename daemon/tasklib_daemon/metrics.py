"""Every metric, defined once: its name, meaning, unit and labels.

Labels are bounded. The names of tasks and queues come from the application: only so many of each, and of pairs of them,
become labels; the rest is `other`. All other labels have a few values of our own. No label is a task id or a user's
value.

Workers and the keeper count under the `word` of a metric, in their counters. The other metrics are made from the
supervisor's status, or are read from the database by the elected keeper, once for all daemons (`is_cluster`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from tasklib.outcomes import AttemptOutcome
from tasklib.runtime.metrics import BATCHES, SECONDS, STATEMENT_SECONDS, Found
from tasklib_daemon.plan import Cause

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind = Literal["counter", "gauge", "histogram"]
PREFIX = "tasklib_"
MOST_NAMES = {"task": 200, "queue": 100}  # then: OTHER
# Pairs of a task and its queue; then the queue is OTHER. A histogram has twenty series for each pair. With one queue
# per customer, twenty tasks made two thousand pairs, and each scrape took 0.7 s.
MOST_PAIRS = 200
PAIR = ("task", "queue")
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Metric:
    name: str  # without the prefix, and without the `_total` of a counter
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()
    word: str | None = None
    is_cluster: bool = False
    values: tuple[str, ...] = ()  # of its last label; all are shown as soon as the other labels are known

    @property
    def full_name(self) -> str:
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")

    @property
    def size(self) -> int:
        """How many numbers it takes in the counters."""
        return len(self.buckets) + 2 if self.kind == "histogram" else 1

    @property
    def open_labels(self) -> tuple[str, ...]:
        """The labels whose values are not known beforehand."""
        return self.labels[:-1] if self.values else self.labels


def _counted(
    name: str,
    word: str,
    help_text: str,
    *labels: str,
    buckets: tuple[float, ...] = (),
    unit: str = "tasks",
    values: tuple[str, ...] = (),
) -> Metric:
    kind: Kind = "histogram" if buckets else "counter"
    return Metric(name, kind, help_text, labels, unit, buckets, word, values=values)


def _gauge(name: str, help_text: str, *labels: str, unit: str = "", is_cluster: bool = False) -> Metric:
    return Metric(name, "gauge", help_text, labels, unit, is_cluster=is_cluster)


def _cluster(name: str, help_text: str, *labels: str, unit: str = "") -> Metric:
    return _gauge(name, help_text, *labels, unit=unit, is_cluster=True)


# --- tasks ---

CLAIMED = _counted(
    "tasks_claimed", "claimed",
    "Tasks taken from the queues, by how they were found: by a notification, by the poll, because their time had come "
    "(due), or because more tasks waited (backlog).",
    "queue", "found", values=get_args(Found),
)  # fmt: skip
STARTED = _counted("tasks_started", "started", "Attempts that began.")
FINISHED = _counted(
    "tasks_finished", "finished",
    "Attempts that ended, by outcome, as in the view task_attempts: completed, failed, timed_out, cancelled, snoozed, "
    "interrupted, worker_failure, lease_lost.",
    "task", "queue", "outcome", values=tuple(each.lower() for each in get_args(AttemptOutcome)),
)  # fmt: skip
RETRIED = _counted(
    "tasks_retried", "retried", "Attempts that failed or timed out, and are to be tried again.", "task", "queue"
)
FAILED = _counted("tasks_failed", "failed", "Tasks that failed for good.", "task", "queue")
LOST = _counted(
    "tasks_lost", "lost",
    "Tasks taken back from a worker that died under its supervisor (worker_died), or that renewed its lease no more, "
    "or held a task past its lock (lease_expired).",
    "cause", values=("worker_died", "lease_expired"),
)  # fmt: skip
RELEASED = _counted("tasks_released", "released", "Tasks given back without having begun.")
EXPIRED = _counted("tasks_expired", "expired", "Tasks that were not started before their expires_at.")
SUSPECTED = _counted(
    "tasks_suspected", "suspected",
    "Tasks that were executing when their worker died, or that two dead workers held. They run apart from others the "
    "next time.", "task",
)  # fmt: skip
BURIED = _counted("tasks_buried", "buried", "Tasks that killed their workers too often, kept for a person.", "task")
DURATION = _counted(
    "task_duration_seconds", "duration", "How long attempts took.", "task", "queue", buckets=SECONDS, unit="seconds"
)
WAIT = _counted(
    "queue_wait_seconds", "wait", "Time from when a task was ready until a worker claimed it, for first attempts.",
    "task", "queue", buckets=SECONDS, unit="seconds",
)  # fmt: skip

# --- workers ---

CLAIM_SECONDS = _counted(
    "claim_duration_seconds", "claim_seconds", "How long claim statements took.", buckets=STATEMENT_SECONDS,
    unit="seconds",
)  # fmt: skip
CLAIM_BATCH = _counted("claim_batch_tasks", "claim_batch", "Tasks found by one claim statement.", buckets=BATCHES)
FINISH_SECONDS = _counted(
    "finish_duration_seconds", "finish_seconds", "How long statements that write outcomes took.",
    buckets=STATEMENT_SECONDS, unit="seconds",
)  # fmt: skip
FINISH_BATCH = _counted("finish_batch_tasks", "finish_batch", "Outcomes written by one statement.", buckets=BATCHES)
FENCED = _counted(
    "fenced_writes", "fenced", "Outcomes that were refused, because another worker held the task.", unit="writes"
)
LEASES_LOST = _counted(
    "leases_lost", "lease_lost",
    "Leases of workers that could not be renewed in time (ran_out), or were given to others (fenced).",
    "how", unit="leases", values=("ran_out", "fenced"),
)  # fmt: skip
LOOP_ROUNDS = _counted(
    "loop_rounds", "rounds", "Rounds of each loop. The count of a loop that hangs does not grow.", "process", "loop",
    unit="rounds",
)  # fmt: skip
DATABASE_ERRORS = _counted(
    "database_errors", "errors",
    "Rounds of loops that failed: the database was away (outage), it refused something (refused), or it is a bug.",
    "process", "loop", "kind", unit="errors", values=("outage", "refused", "bug"),
)  # fmt: skip
WORKERS_WANTED = _gauge("workers_wanted", "Workers that this daemon should have.", unit="workers")
WORKERS = _gauge(
    "workers",
    "Workers of this daemon by state: starting, ready, stopping, hung, or waiting (dead, and not started again yet).",
    "state", unit="workers",
)  # fmt: skip
SLOTS = _gauge("slots", "Tasks that the ready workers of this daemon can execute at once.", unit="tasks")
EXECUTING = _gauge("worker_executing_tasks", "Tasks that execute.", "slot", unit="tasks")
BUFFERED = _gauge(
    "worker_buffered_tasks", "Tasks that were claimed, and wait in the worker's buffer.", "slot", unit="tasks"
)
UNWRITTEN = _gauge(
    "worker_unwritten_tasks", "Tasks that have ended, and whose outcome is not written yet.", "slot", unit="tasks"
)
BEAT_AGE = _gauge("worker_beat_age_seconds", "Time since the claim loop last made progress.", "slot", unit="seconds")
WORKER_DEATHS = _counted(
    "worker_deaths", "deaths",
    "Deaths of workers: crash, hang, hard_timeout, cancelled (a task did not stop), memory; and expected ones: "
    "recycled, shutdown.",
    "cause", unit="deaths", values=get_args(Cause),
)  # fmt: skip
RECOVERY = _counted(
    "recovery_duration_seconds", "recovery", "From the death of a worker until its tasks could run again.",
    buckets=SECONDS, unit="seconds",
)  # fmt: skip

# --- the daemon ---

BUILD_INFO = _gauge("build_info", "Always 1; the versions are in the labels.", "version", "python", unit="info")
DAEMON_STATE = _gauge("daemon_state", "1 for the state that the daemon is in.", "state")
DAEMON_HEALTHY = _gauge("daemon_healthy", "0 while a child dies again and again, or the web child has no port.")
STATUS_AGE = _gauge("status_age_seconds", "Time since the supervisor's last status.", unit="seconds")
MEMORY = _gauge("process_resident_memory_bytes", "Memory of each process.", "role", "slot", unit="bytes")
CPU = Metric("process_cpu_seconds", "counter", "CPU time of each process.", ("role", "slot"), "seconds")
START_TIME = _gauge(
    "process_start_time_seconds", "When each process began, since 1970.", "role", "slot", unit="seconds"
)
RESTARTS = Metric(
    "process_restarts", "counter", "How often a child was started again, after an unexpected death.",
    ("role", "slot"), "restarts",
)  # fmt: skip
DATABASE_UP = _gauge("database_up", "1 while the database answers the keeper.")
LISTENER_UP = _gauge("listener_up", "1 while the daemon receives notifications; 0: only the poll finds new tasks.")
NOTIFICATIONS = _counted(
    "notifications", "rings", "Notifications of new tasks that the daemon has received.", unit="notifications"
)
ELECTED = _gauge("elected", "1 for the daemon that runs the duties of the whole cluster.")
ELECTION_TERM = _gauge("election_term", "The term of office; only while elected.")
ELECTIONS_WON = _counted("elections_won", "elected", "How often this daemon was elected.", unit="elections")
CONNECTIONS_OPEN = _gauge(
    "connections_open", "Connections to the database of all workers, or of the keeper.", "process", unit="connections"
)
CONNECTIONS_BUDGET = _gauge("connections_budget", "Connections that this daemon may open.", unit="connections")
OTHERS = _counted(
    "series_dropped", "others", "Counts that went to `other`, because there are too many names.", unit="counts"
)
GAUGES_FAILURES = _counted(
    "gauges_failures", "gauges_failures", "Readings of the gauges of the cluster that failed or took too long.",
    unit="readings",
)  # fmt: skip

# --- the cluster ---

SUBMITTED = Metric(
    "tasks_submitted", "counter",
    "Rows inserted into tasklib.tasks, by PostgreSQL's own statistics, which count what was rolled back too.",
    unit="tasks", is_cluster=True,
)  # fmt: skip
QUEUE_TASKS = _cluster(
    "queue_tasks",
    "Tasks that wait or are held: ready, scheduled for later, retrying (they wait for their next attempt), claimed, "
    "running. Ready tasks are counted up to a million in each queue, other tasks among the hundred thousand that are "
    "due first.",
    "queue", "state", unit="tasks",
)  # fmt: skip
OLDEST_READY = _cluster(
    "queue_oldest_ready_age_seconds", "For how long the oldest ready task has been ready.", "queue",
    unit="seconds",
)  # fmt: skip
QUEUE_WAITING = _cluster("queue_waiting", "1 while tasks of a queue with a policy are ready and wait; else 0.", "queue")
QUEUE_PAUSED = _cluster("queue_paused", "1 while the queue is paused; else 0.", "queue")
QUEUE_CAP = _cluster(
    "queue_cap",
    "Tasks of the queue that may execute at once in the whole cluster: max_running, or fewer while a breaker is not "
    "closed. Queue * is the cap over all queues.",
    "queue", unit="tasks",
)  # fmt: skip
QUEUE_PERMITS = _cluster(
    "queue_permits", "Permits that workers hold of the cap: tasks that they may execute at once.", "queue", unit="tasks"
)
QUEUE_PERMITS_WANTED = _cluster(
    "queue_permits_wanted", "Permits that workers want beyond those that they hold.", "queue", unit="tasks"
)
QUEUE_PERMITS_FORGOTTEN = _cluster(
    "queue_permits_forgotten",
    "Permits of workers that are dead or unknown. They are freed when the tasks of the worker are recovered.",
    "queue", unit="tasks",
)  # fmt: skip
QUEUE_RATE_STARTS = _cluster(
    "queue_rate_available_starts", "Starts that the rate limit of the queue would grant now.", "queue", unit="starts"
)
QUEUE_RATE_WAIT = _cluster(
    "queue_rate_wait_seconds", "Time until the rate limit of the queue grants the next start; 0 if it does so now.",
    "queue", unit="seconds",
)  # fmt: skip
QUEUE_BREAKER = _cluster(
    "queue_breaker_state", "The circuit breaker of the queue: 0 closed, 1 half open, 2 open.", "queue"
)
DUE_LAG = _cluster(
    "due_lag_seconds",
    "How long the longest due of the tasks that wait for their time has been due. Tasks of paused queues do not count.",
    unit="seconds",
)
UNSERVED = _cluster(
    "unserved_names", "Names of tasks that wait, in queues that are not paused, and that no live worker serves.",
    unit="names",
)  # fmt: skip
CLUSTER_WORKERS = _cluster(
    "cluster_workers", "Workers in the table of workers: alive, stopping, or dead and not forgotten yet.", "state",
    unit="workers",
)  # fmt: skip
CLUSTER_SLOTS = _cluster("cluster_slots", "Tasks that all live workers can execute at once.", unit="tasks")
TABLE_BYTES = _cluster("database_table_bytes", "Size of each table, with its indexes.", "table", unit="bytes")
LIVE_TUPLES = _cluster("database_live_tuples", "Rows, as PostgreSQL estimates them.", "table", unit="tuples")
DEAD_TUPLES = _cluster(
    "database_dead_tuples", "Dead versions of rows that wait for a vacuum, as PostgreSQL estimates them.", "table",
    unit="tuples",
)  # fmt: skip
OLDEST_TRANSACTION = _cluster(
    "database_oldest_transaction_age_seconds",
    "Age of the oldest open transaction in this database: rows that died since it began are not vacuumed. Other roles' "
    "sessions are seen only with the role pg_read_all_stats.",
    unit="seconds",
)  # fmt: skip
NOTIFY_QUEUE = _cluster(
    "database_notify_queue_usage_ratio", "How full the server's queue of notifications is: at 1, commits fail.",
    unit="ratio",
)  # fmt: skip
DATABASE_CONNECTIONS = _cluster("database_connections", "Connections to the server.", unit="connections")
DATABASE_CONNECTIONS_LIMIT = _cluster(
    "database_connections_limit", "Connections that the server accepts, without the reserved ones.", unit="connections"
)
GAUGES_AGE = _cluster("gauges_age_seconds", "Time since the gauges of the cluster were read.", unit="seconds")
GAUGES_DURATION = _cluster("gauges_read_duration_seconds", "How long the last reading took.", unit="seconds")

ALL: tuple[Metric, ...] = tuple(each for each in [*globals().values()] if isinstance(each, Metric))
BY_WORD = {metric.word: metric for metric in ALL if metric.word is not None}
BY_NAME = {metric.name: metric for metric in ALL}


class Bounds:
    """Which names may be labels: the first ones, up to a bound for each kind and for pairs. The choice is final, so
    that the counts of one name never move to another series.
    """

    def __init__(self) -> None:
        self._known: dict[str, set[str]] = {label: set() for label in MOST_NAMES}
        self._pairs: set[tuple[str, str]] = set()

    def within(self, metric: Metric, labels: Iterable[str]) -> tuple[str, ...]:
        bounded = tuple(self._bounded(name, value) for name, value in zip(metric.labels, labels, strict=True))
        if metric.labels[:2] == PAIR:
            task, queue, *rest = bounded
            return (task, queue if self._is_pair_known(task, queue) else OTHER, *rest)
        return bounded

    def _bounded(self, label: str, value: str) -> str:
        known = self._known.get(label)
        if known is None or value in known:
            return value
        if len(known) >= MOST_NAMES[label]:
            return OTHER
        known.add(value)
        return value

    def _is_pair_known(self, task: str, queue: str) -> bool:
        if (task, queue) not in self._pairs and len(self._pairs) < MOST_PAIRS:
            self._pairs.add((task, queue))
        return (task, queue) in self._pairs
