"""What the keeper counts: runs whose worker did not live to count them, recoveries, rings, and loops that fail."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, LiteralString

import pytest

from tasklib.duties.statements import KeeperStatements
from tasklib.outcomes import OWN_PROCESS, Crashed, Failed, Problem, Rules
from tasklib.runtime.metrics import Counts
from tasklib.runtime.session import Session
from tasklib.statements import WorkerStatements
from tasklib_daemon import settings
from tasklib_daemon.crashes import CrashReport, Done, Executing, Recoveries
from tasklib_daemon.keeper import Keeper
from tests.support.working import ManualWorker
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import tasklib
    from tasklib.statements import ClaimedTask
    from tests.support.raw_sql import Conn

CUT: LiteralString = (
    "select pg_terminate_backend(pid) from pg_stat_activity"
    " where application_name like 'tasklib:%' and datname = current_database()"
)


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def recoveries(config: tasklib.Config, counts: Counts) -> Iterator[Recoveries]:
    with contextlib.closing(Session(config, "crashes")) as session:
        yield Recoveries(config, session, WorkerStatements(config), KeeperStatements(config), metrics=counts)


@pytest.fixture
def worker(config: tasklib.Config) -> Iterator[ManualWorker]:
    made = ManualWorker(config, "worker")
    yield made
    made.close()


def report_of(worker: ManualWorker, **values: Any) -> CrashReport:
    about = {"name": "test", "hostname": "host", "pid": 1, "slot": 0, "how": "killed by SIGKILL", "cause": "crash"}
    return CrashReport(worker_id=worker.id, **{**about, **values})


def done(*claimed: ClaimedTask) -> tuple[Done, ...]:
    return tuple(Done(each.held.id, each.held.fencing_token) for each in claimed)


def executing(*claimed: ClaimedTask) -> tuple[Executing, ...]:
    return tuple(Executing(each.held.id, each.held.fencing_token, 1.0) for each in claimed)


def finished(counts: Counts) -> dict[tuple[str, ...], float]:
    return {key[1:]: values[0] for key, values in counts.take().items() if key[0] == "finished"}


# --- who died before it counted ---


def test_a_run_that_was_written_and_not_counted_is_counted_after_the_death(
    recoveries: Recoveries, client: tasklib.Client, worker: ManualWorker, counts: Counts
) -> None:
    """Killed between the commit and its counters: one had let its slot know that it ended, the other one not yet."""
    for number in range(2):
        client.submit_task("work", number=number, max_retries=0)
    first, second = worker.claim("work")
    worker.finish(first)
    worker.finish(second, Failed(Problem("OOPS", "oops", "Oops: oops")))
    recoveries.add(report_of(worker, done=done(first), executing=executing(second)))
    recoveries.run_once()
    taken = counts.take()
    assert taken["finished", "work", "default", "completed"] == [1]
    assert taken["finished", "work", "default", "failed"] == [1]
    assert taken["failed", "work", "default"] == [1]
    assert sum(taken["duration", "work", "default"][:-1]) == 2
    assert sum(taken["recovery",][:-1]) == 1


def test_a_run_that_was_counted_is_not_counted_again(
    recoveries: Recoveries, client: tasklib.Client, worker: ManualWorker, counts: Counts
) -> None:
    """Killed between its counters and its scoreboard, which still shows the run and says that it was counted."""
    client.submit_task("work")
    (task,) = worker.claim("work")
    worker.finish(task)
    recoveries.add(report_of(worker, done=done(task), is_counted=True))
    recoveries.run_once()
    assert finished(counts) == {}


def test_a_run_that_its_worker_took_along_is_counted_once(
    recoveries: Recoveries, client: tasklib.Client, worker: ManualWorker, counts: Counts
) -> None:
    """Also if the report comes again, because the keeper that dealt with it died before it could say so."""
    client.submit_task("work")
    (task,) = worker.claim("work")
    recoveries.add(report_of(worker, executing=executing(task)))
    recoveries.run_once()
    taken = counts.take()
    assert taken["finished", "work", "default", "worker_failure"] == [1]
    assert taken["suspected", "work"] == [1]
    assert taken["lost", "worker_died"] == [1]
    recoveries.add(report_of(worker, executing=executing(task)))
    recoveries.run_once()
    assert finished(counts) == {}


def test_the_crash_of_an_isolated_task_is_counted_after_its_workers_death(
    recoveries: Recoveries, client: tasklib.Client, worker: ManualWorker, counts: Counts
) -> None:
    """A worker writes of the deaths of its isolated tasks itself, and of burials; it may not live to count them."""
    for _ in range(3):
        client.submit_task("work")
    again, buried, failed = claimed = worker.claim("work")
    crash = Crashed(f"{OWN_PROCESS} was killed by SIGKILL", alone=True)
    failed = failed._replace(held=failed.held._replace(on_crash="fail"))
    for each in (again, buried, failed):
        worker.finish(each, crash, Rules(bury_after=1 if each is buried else 3))
    recoveries.add(report_of(worker, done=done(again, failed), executing=executing(buried)))
    recoveries.run_once()
    taken = counts.take()
    assert taken["finished", "work", "default", "worker_failure"] == [len(claimed)]
    assert taken["buried", "work"] == [1]
    assert taken["failed", "work", "default"] == [1]


# --- the keeper itself ---


@pytest.mark.direct("listens, and ends sessions by their names")
def test_a_keeper_counts_its_rounds_its_rings_and_its_failures(
    config: tasklib.Config, conn: Conn, counts: Counts, tmp_path: Path
) -> None:
    """Rounds show that a loop goes on, rings that notifications arrive; and an outage is counted by each loop that met
    it.
    """
    conn.execute("delete from tasklib.elections")
    counts.process = "keeper"
    given = {"database_url": config.database_url, "name": "test", "runtime_directory": str(tmp_path)}
    said: list[dict[str, Any]] = []
    keeper = Keeper(settings.load(None, {}, given), said.append, counts)
    seen: dict[tuple[str, ...], float] = {}

    def counted(*key: str) -> float:
        keeper.tick()
        for each, values in counts.take().items():
            seen[each] = seen.get(each, 0.0) + values[0]
        return seen.get(key, 0.0)

    def is_listening() -> bool:
        keeper.tick()
        return any(each.get("listening") for each in said)

    keeper.start()
    try:
        wait_until(lambda: counted("elected") == 1, "an election")
        wait_until(is_listening, "it to listen")
        conn.execute("notify task_new")
        wait_until(lambda: counted("rings") >= 1, "the ring")
        before = counted("rounds", "keeper", "duties")
        wait_until(lambda: counted("rounds", "keeper", "duties") > before, "one more round")
        conn.execute(CUT)
        wait_until(lambda: counted("errors", "keeper", "listen", "outage") >= 1, "a loop to fail")
    finally:
        keeper.close()
