"""W10: submits and runs at 70 % of what both can do at once, for minutes. Does it stay as fast, and as small?

The highest rate at which no backlog grows is looked for first, in a few short trials. Then tasks flow at 70 % of it,
with finished ones kept for a minute: every second it is noted how late tasks began, how many dead rows there are, and
how large the tables have become.
"""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import psycopg

import tasklib
from bench.harness import Measured
from bench.workloads import tables
from tasklib.duties.janitor import Janitor, Retention
from tasklib.duties.statements import KeeperStatements
from tasklib.runtime.session import Session
from tools.measures import percentile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.harness import Bench, Process
    from bench.systems import System

T = TypeVar("T")
SHARE = 0.7
MOST_TRIALS = 6
STEP = 1.15  # between two rates that are tried
BACKLOG_SECONDS = 0.25  # what may be left when a balanced trial ends
PARTS = 5  # of the time, that are compared: minutes, in a full run
PRUNE_REST_SECONDS = 0.5

SIZES = """
select sum(pg_total_relation_size(relid))::bigint, sum(n_dead_tup)::bigint
  from pg_stat_user_tables where schemaname = 'tasklib'
"""


def sustained(bench: Bench, system: System) -> Measured:
    seconds = bench.size.sustain_seconds
    with bench.database(system) as dsn, _flowing(bench, system, dsn) as flow:
        rate = SHARE * _balanced_rate(flow, bench.size.trial_seconds)
    with bench.database(system) as dsn, _flowing(bench, system, dsn) as flow, _pruning(bench, dsn):
        flow.submitter.tell("flow", rate=rate, seconds=seconds)
        sizes, dead_rows = _sampled(dsn, seconds)
        flowed = flow.submitter.answer()
        late = flow.lateness()
    first, *_, last = _parts(late)
    *_, before, at_last = _parts(sizes)
    also = {
        **_percentiles([ms for second in first for ms in second], "_first"),
        **_percentiles([ms for second in last for ms in second], "_last"),
        "growth": statistics.mean(at_last) / statistics.mean(before),
        "dead_rows": max(dead_rows),
        "megabytes": max(sizes),
    }
    also["p99_drift"] = also["p99_ms_last"] / also["p99_ms_first"]
    series = {key: [_percentiles(second)[key] for second in late] for key in ("p50_ms", "p99_ms", "max_ms")}
    return Measured(flowed["count"] / flowed["seconds"], also, {**series, "megabytes": sizes, "dead_rows": dead_rows})


def _percentiles(late: Sequence[float], suffix: str = "") -> dict[str, float]:
    points = {"p50_ms": 50.0, "p99_ms": 99.0, "max_ms": 100.0}
    return {f"{name}{suffix}": percentile(late, percent) for name, percent in points.items()}


def _parts(samples: Sequence[T]) -> list[Sequence[T]]:
    """Of equal length; what is left over belongs to none."""
    parts = max(min(PARTS, len(samples)), 2)
    length = len(samples) // parts
    return [samples[at * length : (at + 1) * length] for at in range(parts)]


# --- the flow --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flow:
    submitter: Process
    worker: Process

    def run(self, rate: float, seconds: float) -> tuple[float, float]:
        """Tasks submitted a second, and how many seconds' worth of them was left when the last was submitted."""
        flowed = self.submitter.ask("flow", rate=rate, seconds=seconds)
        begun = sum(len(each) for each in self.lateness())
        reached = flowed["count"] / flowed["seconds"]
        return reached, (flowed["count"] - begun) / reached

    def lateness(self) -> list[list[float]]:
        """Of every task that began since this was last asked, in ms, by the second in which it did."""
        found: list[list[float]] = self.worker.ask("lateness")["by_second"]
        return found


@contextmanager
def _flowing(bench: Bench, system: System, dsn: str) -> Iterator[Flow]:
    with (
        bench.submitter(system, dsn, kind="timed") as submitter,
        bench.workers(system, dsn, kind="timed") as (worker,),
    ):
        tables.settle(bench)
        yield Flow(submitter, worker)


def _balanced_rate(flow: Flow, seconds: float) -> float:
    """From what is reached when submits are not held back at all: up while no backlog grows, down until none does."""
    reached, left = flow.run(1e9, seconds)
    rate, best = reached * max(1 - left / seconds, 0.1), 0.0
    for _ in range(MOST_TRIALS):
        _wait_until_empty(flow)
        reached, left = flow.run(rate, seconds)
        is_balanced = left <= BACKLOG_SECONDS and reached >= rate * 0.95
        if is_balanced:
            best = max(best, rate)
        elif best:
            break
        rate *= STEP if is_balanced else 1 / STEP
    return best or rate


def _wait_until_empty(flow: Flow) -> None:
    """Nothing has begun for a while."""
    while any(flow.lateness()):
        time.sleep(0.3)


# --- meanwhile -------------------------------------------------------------------------------------------------------


@contextmanager
def _pruning(bench: Bench, dsn: str) -> Iterator[None]:
    """What a daemon's keeper does once an hour, for tasks that are kept for a minute instead of a month."""
    config, is_over = tasklib.Config(dsn), threading.Event()
    session = Session(config, "history")
    janitor = Janitor(
        session, KeeperStatements(config), Retention(bench.size.retention_seconds, bench.size.retention_seconds, None)
    )

    def prune() -> None:
        while not is_over.wait(min(janitor.run_once() or 0.0, PRUNE_REST_SECONDS)):
            pass

    thread = threading.Thread(target=prune)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        session.close()


def _sampled(dsn: str, seconds: float) -> tuple[list[float], list[float]]:
    """Every second: the tables' size in MB, and how many dead rows the server believes there are."""
    sizes, dead_rows = [], []
    ends = time.monotonic() + seconds
    with psycopg.connect(dsn, autocommit=True) as conn:
        while time.monotonic() < ends:
            time.sleep(min(1.0, seconds / PARTS))
            size, dead = conn.execute(SIZES).fetchone() or (0, 0)
            sizes.append(size / 1e6)
            dead_rows.append(float(dead))
    return sizes, dead_rows
