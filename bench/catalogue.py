"""The workloads by number and name: what each is called, who takes part, and how its figure is shown."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bench.systems import BARE, TASKLIB
from bench.workloads import drains, storm, submits, sustained, waits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.harness import Bench, Measured
    from bench.systems import System

OURS = (TASKLIB.name,)
BESIDE_THE_LIMIT = (TASKLIB.name, BARE.name)


@dataclass(frozen=True)
class Workload:
    number: str
    key: str
    title: str
    run: Callable[[Bench, System], Measured]
    unit: str = "/s"
    only: tuple[str, ...] = ()  # systems that take part; none: all
    without: tuple[str, ...] = ()
    is_once: bool = False  # not in every round
    less_is_better: bool = False

    def takes(self, system: System) -> bool:
        return (not self.only or system.kind in self.only) and system.kind not in self.without

    def ratio(self, ours: float, theirs: float) -> float:
        """More than 1: we are ahead."""
        return theirs / ours if self.less_is_better else ours / theirs

    def show(self, measured: Sequence[Measured]) -> str:
        median = statistics.median(each.value for each in measured)
        if self.unit == "/s":
            return f"{median:,.0f}/s"
        if self.unit == "ms":
            p99 = statistics.median(each.also["p99_ms"] for each in measured)
            return f"{median:.2f} / {p99:.2f} ms"
        return f"{median:.3g}{self.unit}"


WORKLOADS = (
    Workload("W1", "submit_1", "submit, 1 submitter", partial(submits.single, submitters=1)),
    Workload("W1", "submit_10", "submit, 10 submitters", partial(submits.single, submitters=10)),
    Workload(
        "W1",
        "submit_1_draining",
        "submit, 1 submitter, while a worker drains",
        partial(submits.while_a_worker_drains, submitters=1),
        only=BESIDE_THE_LIMIT,
    ),
    Workload(
        "W1",
        "submit_10_draining",
        "submit, 10 submitters, while a worker drains",
        partial(submits.while_a_worker_drains, submitters=10),
        only=BESIDE_THE_LIMIT,
    ),
    Workload(
        "W1b",
        "submit_10_half_loaded",
        "submit, 10 submitters, worker half loaded",
        partial(submits.while_half_loaded, submitters=10),
        only=BESIDE_THE_LIMIT,
    ),
    Workload("W2", "bulk", "submit, 1,000 a call", submits.bulk),
    Workload("W3", "drain", "drain, async tasks, 1 process", drains.backlog),
    Workload("W3", "drain_2p", "drain, async tasks, 2 processes", partial(drains.backlog, processes=2)),
    Workload("W3", "drain_sync", "drain, sync tasks, 1 process", partial(drains.backlog, kind="sync"), only=OURS),
    Workload("W4", "latency", "submit to start, idle: p50 / p99", waits.latency, unit="ms", less_is_better=True),
    Workload("W5", "drain_ready", "drain among many ready", drains.among_many_ready),
    Workload("W6", "drain_snapshot", "drain under a snapshot", drains.under_a_snapshot),
    Workload(
        "W7",
        "idle",
        "an idle worker and its server, thousandths of a core",
        waits.idle,
        unit="",
        without=(BARE.name,),
        less_is_better=True,
    ),
    Workload(
        "W8",
        "drain_delayed",
        "drain behind many delayed of a higher priority",
        drains.behind_delayed,
        without=(BARE.name,),
    ),
    Workload("W9", "drain_finished", "drain among many finished", drains.among_many_finished, only=OURS),
    Workload("W10", "sustained", "submits and runs at 70 %, for minutes", sustained.sustained, only=OURS, is_once=True),
    *(
        Workload(
            "W11",
            f"{prefix}naps_{milliseconds}ms_{concurrency}",
            f"{kind} naps of {milliseconds} ms, {concurrency} at a time",
            partial(
                drains.naps,
                kind=f"{kind}_nap_{milliseconds}ms_{concurrency}",
                seconds=milliseconds / 1_000,
                concurrency=concurrency,
            ),
            unit=" of ideal",
            only=OURS,
        )
        for kind, prefix in (("async", ""), ("sync", "sync_"))
        for milliseconds, concurrency in ((1, 8), (1, 64), (10, 64), (100, 64))
    ),
    Workload(
        "W13", "storm", "idle daemons, a task every 10 ms", storm.storm, unit=" queries per daemon and task", only=OURS
    ),
)
