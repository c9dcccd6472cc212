"""Turns the supervisor's report into samples: each is a metric, its labels and its values. Pure."""

from __future__ import annotations

import platform
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple, get_args

from tasklib_daemon import metrics
from tasklib_daemon.status import ChildStatus, DaemonState, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tasklib.runtime.metrics import Amounts, Key
    from tasklib_daemon.metrics import Metric


# How long a daemon that lost the election still shows its last gauges. The next daemon needs some seconds to be elected
# and to read them. A gap would restart every alert that has a `for`. Alerts take the `max`, so two values do no harm.
HANDOVER_SECONDS = 60.0


class Sample(NamedTuple):
    metric: Metric
    labels: Sequence[str]
    values: Sequence[float]  # one number; for a histogram, the count of each bucket, then the sum


class Reading(NamedTuple):
    """The gauges of the cluster, as the elected keeper read them."""

    samples: Sequence[tuple[str, Sequence[str], float]] = ()
    age_seconds: float = 0.0


def of_daemon(status: Status, age_seconds: float, totals: Amounts, cluster: Reading) -> Iterator[Sample]:
    """Everything on `/metrics`. Before the first status, only its age."""
    yield Sample(metrics.STATUS_AGE, (), [age_seconds])
    if not status:
        return
    yield from _of_status(status)
    yield from _of_workers(status)
    for role, child in _processes(status):
        yield from _of_process(role, child)
    yield from _of_totals(totals)
    if cluster.samples and (status.get("elected") or cluster.age_seconds < HANDOVER_SECONDS):
        yield Sample(metrics.GAUGES_AGE, (), [cluster.age_seconds])
        for name, labels, value in cluster.samples:
            if name in metrics.BY_NAME:
                yield Sample(metrics.BY_NAME[name], labels, [value])


def _of_status(status: Status) -> Iterator[Sample]:
    yield Sample(metrics.BUILD_INFO, (status.get("version", ""), platform.python_version()), [1.0])
    for state in get_args(DaemonState):
        yield Sample(metrics.DAEMON_STATE, (state,), [float(status.get("state") == state)])
    figures: Mapping[Metric, float | None] = {
        metrics.DAEMON_HEALTHY: status.get("is_healthy", True),
        metrics.DATABASE_UP: status.get("database", False),
        metrics.LISTENER_UP: status.get("listening", False),
        metrics.ELECTED: status.get("elected", False),
        metrics.ELECTION_TERM: status.get("term"),
        metrics.WORKERS_WANTED: status.get("wanted_workers"),
        metrics.CONNECTIONS_BUDGET: status.get("budget"),
    }
    yield from (Sample(metric, (), [float(value)]) for metric, value in figures.items() if value is not None)
    of_workers = sum(worker.get("connections", 0) for worker in status.get("workers", []))
    yield Sample(metrics.CONNECTIONS_OPEN, ("worker",), [float(of_workers)])
    yield Sample(metrics.CONNECTIONS_OPEN, ("keeper",), [float(status.get("connections", 0))])


def _of_workers(status: Status) -> Iterator[Sample]:
    workers = status.get("workers", [])
    states = ["hung" if worker.get("is_hung") else worker.get("state", "starting") for worker in workers]
    for state in ("starting", "ready", "stopping", "waiting", "hung"):
        yield Sample(metrics.WORKERS, (state,), [float(states.count(state))])
    yield Sample(metrics.SLOTS, (), [float(states.count("ready") * status.get("concurrency", 0))])
    for slot, worker in _by_slot(workers).items():
        figures: Mapping[Metric, float | None] = {
            metrics.EXECUTING: worker.get("running"),
            metrics.BUFFERED: worker.get("claimed"),
            metrics.UNWRITTEN: worker.get("unwritten"),
            metrics.BEAT_AGE: worker.get("beat_age_seconds"),
        }
        yield from (Sample(metric, (slot,), [float(value)]) for metric, value in figures.items() if value is not None)


def _by_slot(workers: Iterable[ChildStatus]) -> dict[str, ChildStatus]:
    """One worker for each slot. While one replaces another, the serving one is shown."""
    ordered = sorted(workers, key=lambda worker: worker.get("state") == "ready")
    return {str(worker.get("slot", "")): worker for worker in ordered}


def _processes(status: Status) -> Iterator[tuple[str, ChildStatus]]:
    supervisor: ChildStatus = {"slot": 1, "started_at": status.get("started_at")}
    if "memory_bytes" in status and "cpu_seconds" in status:
        supervisor |= {"memory_bytes": status["memory_bytes"], "cpu_seconds": status["cpu_seconds"]}
    yield "supervisor", supervisor
    for worker in _by_slot(status.get("workers", [])).values():
        yield "worker", worker
    if "keeper" in status:
        yield "keeper", status["keeper"]
    if "web" in status:
        yield "web", status["web"]


def _of_process(role: str, child: ChildStatus) -> Iterator[Sample]:
    labels = (role, str(child.get("slot", "")))
    started_at = child.get("started_at")
    figures: Mapping[Metric, float | None] = {
        metrics.MEMORY: child.get("memory_bytes"),
        metrics.CPU: child.get("cpu_seconds"),
        metrics.START_TIME: None if started_at is None else datetime.fromisoformat(started_at).timestamp(),
        metrics.RESTARTS: child.get("restarts"),
    }
    yield from (Sample(metric, labels, [float(value)]) for metric, value in figures.items() if value is not None)


def _of_totals(totals: Amounts) -> Iterator[Sample]:
    """Expected counters are shown as zero before their first count. A counter that appears with its first count has no
    rate, so neither graphs nor alerts would show that count. Counters whose labels we know are shown from the start;
    those of a task, a queue or a loop as soon as any of its counters is known.
    """
    for word, *labels in sorted(_expected(totals) - totals.keys()):
        yield Sample(metrics.BY_WORD[word], labels, [0.0] * metrics.BY_WORD[word].size)
    for (word, *labels), values in totals.items():
        metric = metrics.BY_WORD.get(word)
        if metric is not None and len(values) == metric.size:
            yield Sample(metric, labels, values)


def _expected(totals: Amounts) -> set[Key]:
    counted = metrics.BY_WORD.values()
    known: dict[tuple[str, ...], set[tuple[str, ...]]] = {metric.open_labels: set() for metric in counted}
    known[()].add(())
    for word, *labels in totals:
        names = metrics.BY_WORD[word].labels if word in metrics.BY_WORD else ()
        for length in range(1, len(names) + 1):
            if names[:length] in known:
                known[names[:length]].add(tuple(labels[:length]))
    return {
        (word, *labels, *last)
        for word, metric in metrics.BY_WORD.items()
        for labels in known[metric.open_labels]
        for last in ([[value] for value in metric.values] or [[]])
    }
