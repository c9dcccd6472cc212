"""W3, W5, W6, W8, W9, W11 and, as a by-product of each, W12: how fast a backlog is run, whatever else is in the table.

A drain lasts from the first line of the first task until the system's own table has nothing left to do. W5 ends sooner:
there the rate is that of the tasks' first lines, `begun_per_second`, which every drain tells. All that is counted per
task, CPU, WAL and commits, is counted while the drain is under way.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg

from bench.harness import Measured
from bench.systems import BARE, TASKLIB
from bench.workloads import tables
from tasklib.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.harness import Bench, Process
    from bench.systems import System

_FROM_THE_FIRST = UUID(int=0)
FINISHED_ROW_BYTES = 600  # with its attempt and its entries in the indexes
WAITING_ROW_BYTES = 500
ORIGINALS = 1_000
SHORTEST_SECONDS = 1e-3  # tasks of one batch may begin at the same moment


@dataclass(frozen=True)
class Drained:
    began: list[float]  # when each task began, in order
    ended: float
    cost: dict[str, float]  # per task

    def measured(self, *, until_empty: bool = True) -> Measured:
        first, last = self.began[0], self.began[-1]
        begun_per_second = len(self.began) / max(last - first, SHORTEST_SECONDS)
        also = {
            **self.cost,
            "begun_per_second": begun_per_second,
            "steadiness": last_quarter_of_first(self.began),
        }
        return Measured(len(self.began) / (self.ended - first) if until_empty else begun_per_second, also)


def last_quarter_of_first(began: Sequence[float]) -> float:
    """How fast the last quarter of the tasks was begun, in terms of the first one: 1 is a drain that does not tire."""
    quarter = max(len(began) // 4, 2)
    first, last = began[quarter - 1] - began[0], began[-1] - began[-quarter]
    return max(first, SHORTEST_SECONDS) / max(last, SHORTEST_SECONDS)


# --- the workloads ---------------------------------------------------------------------------------------------------


def backlog(bench: Bench, system: System, *, kind: str = "async", processes: int = 1) -> Measured:
    """W3."""
    count = _count(system, bench.size.tasks)
    with bench.database(system) as dsn:
        _submit(bench, system, dsn, count, kind=kind)
        return _drain(bench, system, dsn, count, kind=kind, processes=processes).measured()


def among_many_ready(bench: Bench, system: System) -> Measured:
    """W5. The table is kept, and filled up for the next round."""
    kept = bench.kept_database(system, "ready")
    missing = bench.size.backlog - kept.filled
    bench.need_room(missing, WAITING_ROW_BYTES)
    _submit(bench, system, kept.dsn, missing)
    drained = _drain(bench, system, kept.dsn, _count(system, bench.size.backlog_drain), leaves_some=True)
    kept.filled = bench.size.backlog - len(drained.began)
    return drained.measured(until_empty=False)


def under_a_snapshot(bench: Bench, system: System) -> Measured:
    """W6. Another session looks at an earlier state: no vacuum can take away what the drain leaves dead."""
    count = _count(system, bench.size.snapshot_tasks)
    with bench.database(system) as dsn:
        _submit(bench, system, dsn, count)
        with psycopg.connect(dsn) as reader:
            reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            reader.execute("select count(*) from pg_class")
            return _drain(bench, system, dsn, count).measured()


def behind_delayed(bench: Bench, system: System) -> Measured:
    """W8. Tasks of a higher priority whose time comes in a day."""
    kept = bench.kept_database(system, "delayed")
    missing = bench.size.delayed - kept.filled
    bench.need_room(missing, WAITING_ROW_BYTES)
    _submit(bench, system, kept.dsn, missing, delay_seconds=86400, priority=10)
    kept.filled = bench.size.delayed
    count = _count(system, bench.size.tasks)
    _submit(bench, system, kept.dsn, count)
    return _drain(bench, system, kept.dsn, count).measured()


def among_many_finished(bench: Bench, system: System) -> Measured:
    """W9. The finished ones are copies of a thousand that were run, because to run them all would take half an hour."""
    kept = bench.kept_database(system, "finished")
    missing = bench.size.finished - kept.filled
    bench.need_room(missing, FINISHED_ROW_BYTES)
    if missing:
        mark = new_id()
        _submit(bench, system, kept.dsn, ORIGINALS)
        _drain(bench, system, kept.dsn, ORIGINALS)
        with psycopg.connect(kept.dsn, autocommit=True) as conn:
            tables.fill_finished(conn, missing, mark)
    kept.filled = bench.size.finished
    mark = new_id()
    _submit(bench, system, kept.dsn, bench.size.tasks)
    return _drain(bench, system, kept.dsn, bench.size.tasks, mark=mark).measured()


def naps(bench: Bench, system: System, *, kind: str, seconds: float, concurrency: int) -> Measured:
    """W11. The share of what so many slots could do if nothing but the naps took time."""
    count = max(int(concurrency * bench.size.nap_seconds / seconds), concurrency)
    with bench.database(system) as dsn:
        _submit(bench, system, dsn, count, kind=kind)
        drained = _drain(bench, system, dsn, count, kind=kind)
        wall = drained.ended - drained.began[0]
        return Measured(count * seconds / (concurrency * wall), drained.cost)


# --- steps -----------------------------------------------------------------------------------------------------------


def _count(system: System, tasks: int) -> int:
    return max(int(tasks * system.share), 100)


def _submit(bench: Bench, system: System, dsn: str, count: int, *, kind: str = "async", **options: object) -> None:
    if count > 0:
        with bench.submitter(system, dsn, kind=kind) as process:
            process.ask("bulk", count=count, **options)


def _drain(
    bench: Bench,
    system: System,
    dsn: str,
    count: int,
    *,
    kind: str = "async",
    processes: int = 1,
    leaves_some: bool = False,
    mark: UUID = _FROM_THE_FIRST,
) -> Drained:
    """Until `count` tasks have begun and, unless some are to stay, the table is empty. What tasklib has run is then
    looked at, from the key `mark` on.
    """
    with ExitStack() as stack:
        conn = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        tables.make_tidy(conn)
        done = tables.completed(conn, mark) if system is TASKLIB else 0
        workers = stack.enter_context(bench.workers(system, dsn, kind=kind, processes=processes))
        tables.wait_until_begun(workers, 1)
        before, at_first = bench.spent(workers), sum(worker.begun for worker in workers)
        ended = tables.wait(lambda: _is_over(conn, system, workers, count, leaves_some), f"{count} tasks are run")
        after, at_last = bench.spent(workers), sum(worker.begun for worker in workers)
        answers = [worker.stop() for worker in workers]
        began = sorted(itertools.chain.from_iterable(answer.values() for answer in answers))
        if len(began) < count:
            raise RuntimeError(f"{system.name}: {len(began)} of {count} tasks have begun, and none is left")
        if system is not BARE:  # which does not look at what it claims
            _check_once(system, workers, answers)
        if system is TASKLIB:
            tables.check_complete(conn, mark, done + len(began))
        return Drained(began, ended, before.per_task(after, at_last - at_first))


def _check_once(system: System, workers: Sequence[Process], answers: Sequence[dict[str, float]]) -> None:
    """A drain in which nothing fails has no reason to run a task twice; its rate would count what nobody asked for."""
    numbers = set(itertools.chain.from_iterable(answers))
    twice = sum(worker.repeated for worker in workers) + sum(map(len, answers)) - len(numbers)
    if twice:
        raise RuntimeError(f"{system.name}: {twice} tasks were run twice")


def _is_over(
    conn: psycopg.Connection[Any], system: System, workers: Sequence[Process], count: int, leaves_some: bool
) -> bool:
    """The table is looked at only when everything has begun: until then a look would cost more than it tells."""
    if sum(worker.begun for worker in workers) < count:
        return False
    return leaves_some or conn.execute(system.left).fetchone() == (False,)
