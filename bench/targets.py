"""What the speed of tasklib is held against: ratios within one run, and a few costs per task."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.systems import BARE, PEERS, TASKLIB

if TYPE_CHECKING:
    from bench.figures import Results


@dataclass(frozen=True)
class Figure:
    """One that a run has for every round: the value of a workload, or something else that it saw."""

    workload: str
    system: str = TASKLIB.name
    name: str = "value"


@dataclass(frozen=True)
class Target:
    number: str
    text: str
    ours: Figure
    beside: Figure | None = None  # what ours is divided by
    at_least: float | None = None
    at_most: float | None = None
    less: float = 0.0  # what is taken from ours first: an allowance
    is_aim: bool = False  # wished for, not asked for

    def measured(self, results: Results) -> float | None:
        """The median over the rounds, of each round's own ratio: the machine is the same for both only within one."""
        ours = [figure - self.less for figure in results.figures(self.ours.workload, self.ours.system, self.ours.name)]
        if self.beside is not None:
            beside = results.figures(self.beside.workload, self.beside.system, self.beside.name)
            ours = [one / other for one, other in zip(ours, beside, strict=False)]
        return statistics.median(ours) if ours else None

    def is_met(self, measured: float) -> bool:
        return (self.at_least is None or measured >= self.at_least) and (
            self.at_most is None or measured <= self.at_most
        )

    @property
    def bound(self) -> str:
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"


def _beside_peer(workload: str, title: str, peer: str, at_least: float, *, is_aim: bool = False) -> Target:
    return Target("W3", f"{title}, beside {peer}", Figure(workload), Figure(workload, peer), at_least, is_aim=is_aim)


DRAINS = (("drain", "drain, 1 process"), ("drain_2p", "drain, 2 processes"))
BEGUN = "begun_per_second"

TARGETS = (
    Target(
        "W1",
        "one submitter, of a bare INSERT, while a worker drains",
        Figure("submit_1_draining"),
        Figure("submit_1_draining", BARE.name),
        at_least=0.8,
    ),
    Target(
        "W1",
        "ten submitters, of ten bare INSERTs without a notification, while a worker drains",
        Figure("submit_10_draining"),
        Figure("submit_10_draining", BARE.name),
        at_least=0.8,
    ),
    Target(
        "W1b",
        "the same, workers half loaded and another queue idle",
        Figure("submit_10_half_loaded"),
        Figure("submit_10_half_loaded", BARE.name),
        at_least=0.7,
    ),
    Target("W2", "bulk, of COPY with the triggers off", Figure("bulk"), Figure("bulk", BARE.name), at_least=0.6),
    *(
        _beside_peer(key, title, peer, at_least, is_aim=peer == "graphile-worker")
        for key, title in DRAINS
        for peer, at_least in (("pgqueuer", 1.5), ("pg-boss", 1.0), ("awa-pg", 1.0), ("graphile-worker", 1.0))
    ),
    *(
        Target("W3", f"{title}, of the raw loop", Figure(key), Figure(key, BARE.name), at_least=0.6)
        for key, title in DRAINS
    ),
    Target("W3", "sync tasks, of async ones", Figure("drain_sync"), Figure("drain"), at_least=0.6),
    Target("W12", "PostgreSQL's CPU, us per task", Figure("drain", name="postgresql_us"), at_most=35),
    Target("W12", "the worker's CPU, us per task", Figure("drain", name="worker_us"), at_most=50),
    *(
        Target(
            "W4",
            "submit to start, p50, of a raw insert-notify",
            Figure("latency"),
            Figure("latency", BARE.name),
            at_most=at_most,
            is_aim=at_most < 2.0,
        )
        for at_most in (2.0, 1.5)
    ),
    Target(
        "W4",
        "submit to start, p99 less 2 ms, of a raw insert-notify",
        Figure("latency", name="p99_ms"),
        Figure("latency", BARE.name, "p99_ms"),
        at_most=2.0,
        less=2.0,
    ),
    *(
        Target("W4", f"submit to start, p50, of {name}", Figure("latency"), Figure("latency", name), at_most=1.0)
        for name in (peer.name for peer in PEERS)
    ),
    Target(
        "W5",
        "drain among many ready, of W3",
        Figure("drain_ready", name=BEGUN),
        Figure("drain", name=BEGUN),
        at_least=0.9,
    ),
    *(
        Target(number, f"{title}, of W3", Figure(key), Figure("drain"), at_least=at_least)
        for number, key, title, at_least in (
            ("W6", "drain_snapshot", "drain under a snapshot", 0.8),
            ("W8", "drain_delayed", "drain behind many delayed", 0.9),
            ("W9", "drain_finished", "drain among many finished", 0.9),
        )
    ),
    Target(
        "W6",
        "linear: the last quarter of the tasks, of the first",
        Figure("drain_snapshot", name="steadiness"),
        at_least=0.8,
    ),
    Target("W10", "latency p99 of the last minute, of the first", Figure("sustained", name="p99_drift"), at_most=1.5),
    Target(
        "W10", "size of the tables, last fifth, of the fifth before", Figure("sustained", name="growth"), at_most=1.1
    ),
    *(
        Target("W11", f"{kind} naps of {milliseconds} ms, {slots} at a time, of ideal", Figure(name), at_least=bound)
        for kind, prefix in (("async", ""), ("sync", "sync_"))
        for milliseconds, slots, bound in ((1, 8, 0.8), (10, 64, 0.95), (100, 64, 0.95))
        for name in [f"{prefix}naps_{milliseconds}ms_{slots}"]
    ),
    Target("W13", "queries per daemon and task", Figure("storm"), at_most=2.0),
)
