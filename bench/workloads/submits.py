"""W1, W2: how fast tasks get in. By one submitter and by ten, who each wait for every commit; and a thousand a call."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psycopg

from bench.harness import Measured
from bench.systems import BARE, TASKLIB
from bench.workloads import tables

if TYPE_CHECKING:
    from bench.harness import Bench, Process
    from bench.systems import System

WARM_UP = 5  # submits of each submitter that do not count: see the driver
MOST_DOUBLINGS = 4


def single(bench: Bench, system: System, *, submitters: int) -> Measured:
    """Nobody works meanwhile."""
    with bench.database(system) as dsn, bench.submitter(system, dsn, connections=submitters) as process:
        seconds = _submit(bench, process, submitters)
        _recount(system, dsn, _count(bench, submitters))
        return _measured(bench, submitters, seconds)


def while_a_worker_drains(bench: Bench, system: System, *, submitters: int) -> Measured:
    """A worker of tasklib's has so much before it that it is busy to the end: it never falls asleep, and has as much of
    the two cores as it can get. The bare submits go into the same table, before the same worker.
    """
    standing = bench.size.standing
    for _ in range(MOST_DOUBLINGS):
        with bench.database(system) as dsn, ExitStack() as stack:
            process = stack.enter_context(bench.submitter(system, dsn, connections=submitters))
            with psycopg.connect(dsn, autocommit=True) as conn:
                tables.fill_ready(conn, standing)
            (worker,) = stack.enter_context(bench.workers(TASKLIB, dsn))
            tables.wait_until_begun([worker], 1)
            seconds = _submit(bench, process, submitters)
            if worker.begun < standing:
                _recount(system, dsn, standing + _count(bench, submitters))
                return _measured(bench, submitters, seconds)
        standing *= 2
    raise RuntimeError(f"{standing // 2:,} tasks are run before the submits are over")


def while_half_loaded(bench: Bench, system: System, *, submitters: int) -> Measured:
    """W1b. A worker of tasklib's runs what is submitted and falls asleep in between; another one waits at a queue to
    which nothing comes. `load` is the first one's share of a core.
    """
    with bench.database(system) as dsn, ExitStack() as stack:
        process = stack.enter_context(bench.submitter(system, dsn, connections=submitters))
        (worker,) = stack.enter_context(bench.workers(TASKLIB, dsn))
        stack.enter_context(bench.workers(TASKLIB, dsn, kind="elsewhere"))
        tables.settle(bench)
        before, began = bench.spent([worker]), time.monotonic()
        seconds = _submit(bench, process, submitters)
        used, wall = bench.spent([worker]).worker_seconds - before.worker_seconds, time.monotonic() - began
        _recount(system, dsn, _count(bench, submitters))
        return _measured(bench, submitters, seconds, load=used / wall)


def bulk(bench: Bench, system: System) -> Measured:
    with bench.database(system) as dsn, bench.submitter(system, dsn) as process:
        process.ask("bulk", count=100)  # opens the connection
        measured = Measured(bench.size.tasks / process.ask("bulk", count=bench.size.tasks)["seconds"])
        _recount(system, dsn, 100 + bench.size.tasks)
        return measured


def _submit(bench: Bench, process: Process, submitters: int) -> float:
    count = _count(bench, submitters) - WARM_UP * submitters
    return float(process.ask("submit", count=count, concurrency=submitters)["seconds"])


def _measured(bench: Bench, submitters: int, seconds: float, **also: float) -> Measured:
    return Measured((_count(bench, submitters) - WARM_UP * submitters) / seconds, also)


def _count(bench: Bench, submitters: int) -> int:
    """With those that do not count."""
    return bench.size.submits * (3 if submitters > 1 else 1) + WARM_UP * submitters


def _recount(system: System, dsn: str, expected: int) -> None:
    """What was awaited is committed: seen by a session that knows nothing of it."""
    if system not in {TASKLIB, BARE}:
        return
    with psycopg.connect(dsn) as conn:
        row = conn.execute("select count(*) from tasklib.tasks").fetchone()
    if row != (expected,):
        raise RuntimeError(f"{system.name}: {expected} tasks were submitted, and {row} are there")
