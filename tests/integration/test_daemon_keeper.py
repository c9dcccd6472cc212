"""The keeper: what a dead worker held runs again at once, at whose expense it should; and the house is kept."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

import psycopg
import pytest
from psycopg import sql

import tasklib
from tasklib import TaskWorker
from tasklib.duties.statements import KeeperStatements
from tasklib.runtime.session import Session
from tasklib.statements import WorkerStatements
from tasklib.worker.claimer import CLAIM_LIMIT
from tasklib_daemon import crashes, keeper, settings
from tasklib_daemon.channel import Channel
from tasklib_daemon.crashes import CrashReport, Done, Executing, Recoveries
from tasklib_daemon.keeper import Keeper
from tasklib_daemon.wake import WakeReceiver
from tests.support.history import keep
from tests.support.keeper_worker import keeper_nap, worker_process
from tests.support.working import ManualWorker, get, grown_up_reaper, running, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from uuid import UUID

    from tasklib.statements import ClaimedTask
    from tasklib_daemon.settings import Settings
    from tests.support.raw_sql import Conn

LEASE_SECONDS = 1.2


@tasklib.task
def keeper_work(number: int = 0) -> int:
    return number


@pytest.fixture
def own(config: tasklib.Config, conn: Conn) -> Iterator[Callable[..., Settings]]:
    """Settings of a daemon, with a directory of its own; nobody is elected yet."""
    conn.execute("delete from tasklib.elections; truncate tasklib.worker_states")
    with tempfile.TemporaryDirectory() as directory:

        def make(**values: Any) -> Settings:
            given = {
                "database_url": config.database_url, "name": "test", "runtime_directory": directory,
                "lease_seconds": LEASE_SECONDS, "election_ttl_seconds": 0.6, "snapshot_seconds": 0.1, **values,
            }  # fmt: skip
            return settings.load(None, {}, given)

        yield make


@pytest.fixture
def recoveries(config: tasklib.Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recoveries]:
    """Of the crash loop, whose rounds the test makes."""
    monkeypatch.setattr(crashes, "SWEEPS_AGAIN_SECONDS", (0.2, 0.4))
    session = Session(config, "crashes", settings="-c lock_timeout=100ms")
    yield Recoveries(config, session, WorkerStatements(config), KeeperStatements(config))
    session.close()


class Kept:
    """A keeper in this process, and what it has said."""

    def __init__(self, given: Settings) -> None:
        self.said: list[dict[str, Any]] = []
        self.keeper = Keeper(given, self.said.append)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick)

    def _tick(self) -> None:
        while not self._ended.wait(0.02):
            self.keeper.tick()

    def of(self, what: str) -> list[dict[str, Any]]:
        return [each for each in self.said if each["say"] == what]

    def is_so(self, **values: Any) -> bool:
        states = self.of("state")
        return bool(states) and values.items() <= states[-1].items()

    def __enter__(self) -> Self:
        self.keeper.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(30)
        self.keeper.close()


def report_of(
    worker: ManualWorker,
    executing: Sequence[ClaimedTask] = (),
    done: Sequence[ClaimedTask] = (),
    **values: Any,
) -> CrashReport:
    given: dict[str, Any] = {
        "worker_id": worker.id, "name": "test", "hostname": "host", "pid": 1, "slot": 0,
        "how": "killed by SIGKILL, perhaps out of memory", "cause": "crash",
        "executing": tuple(Executing(each.held.id, each.held.fencing_token, 1.0) for each in executing),
        "done": tuple(Done(each.held.id, each.held.fencing_token) for each in done), **values,
    }  # fmt: skip
    return CrashReport(**given)


def attempts(conn: Conn, task_id: UUID) -> list[tuple[Any, ...]]:
    return conn.execute(
        "select outcome, will_retry, failed_reason from tasklib.task_attempts where task_id = %s order by attempt",
        [task_id],
    ).fetchall()


def claims_of(conn: Conn, worker_id: str) -> int:
    row = conn.execute("select count(*) from tasklib.claims where worker_id = %s", [worker_id]).fetchone()
    assert row is not None
    return int(row[0])


def is_dead(conn: Conn, worker_id: str) -> bool:
    row = conn.execute("select died_at is not null from tasklib.workers where worker_id = %s", [worker_id]).fetchone()
    return row == (True,)


# --- crash reports ---


@pytest.mark.direct("listens, which no pooler lets it do")
def test_a_killed_worker_is_recovered_by_its_report(
    own: Callable[..., Settings], client: tasklib.Client, conn: Conn
) -> None:
    """No lease runs out, and nobody polls. Each task that was executing starts again; who was only in the buffer loses
    nothing. The suspects run alone, one after another, and nobody is buried.
    """
    given = own(lease_seconds=300)
    url = given.config().database_url
    with Kept(given) as kept:
        wait_until(lambda: kept.is_so(listening=True, elected=True), "the keeper to listen")
        tasks = client.submit_many([keeper_nap.new(60.0) for _ in range(4)])
        options: dict[str, Any] = {"lease_seconds": 300, "concurrency": 4, "buffer_size": 100}
        with worker_process(url, poll_interval_seconds=0.05, **options) as worker:
            wait_until(lambda: len(worker.executing) == 4, "four to execute")
            with running(given.config(), poll_interval_seconds=60, duties=False) as spare:
                spare.pause()
                waiting = client.submit_many([keeper_nap.new(0.0) for _ in range(50)])
                wait_until(lambda: get(client, waiting[-1]).state == "claimed", "the others to be held")
                spare.resume()  # there is nothing for it yet
                report = worker.kill()
                kept.keeper.receive([{"say": "died", "report": json.loads(json.dumps(report.to_message()))}])

                def is_running_again() -> bool:
                    again = ("running", spare.worker_id)
                    return any((task.state, task.worker_id) == again for task in map(client.get_task, tasks) if task)

                wait_until(is_running_again, "one to run again")
                for each in tasks:
                    client.cancel_task(each)
                wait_until(lambda: all(tasklib.is_final(get(client, each)) for each in [*tasks, *waiting]), "the end")
        recovered = kept.of("recovered")[0]
        assert recovered["worker_id"] == report.worker_id
        assert recovered["seconds"] > 0
    assert {outcome for each in tasks for outcome in attempts(conn, each)[:1]} == {
        ("WORKER_FAILURE", True, "killed by SIGKILL")
    }
    for each in waiting:
        task = get(client, each)
        assert (task.state, task.attempt, task.crash_count, task.retry_count) == ("completed", 1, 0, 0)
    assert is_dead(conn, report.worker_id)
    assert claims_of(conn, report.worker_id) == 0


def test_five_hundred_held_and_four_executing_take_a_few_statements(
    recoveries: Recoveries, config: tasklib.Config, client: tasklib.Client, conn: Conn
) -> None:
    """In one round. Two of the four were marked, two had no time for it; twenty had ended, and were not written."""
    client.submit_many([keeper_work.new(number) for number in range(524)])
    worker = ManualWorker(config, "w")
    claimed = worker.claim("keeper_work", limit=524)
    executing, done, held = claimed[:4], claimed[4:24], claimed[24:]
    worker.start(*executing[:2])
    worker.close()
    recoveries.add(report_of(worker, executing, done))
    before = recoveries._session.answers
    recoveries.run_once()
    assert recoveries._session.answers - before < 10
    assert not recoveries.is_waiting
    for tasks, expected in (
        (executing, ("pending", True, 1, 1, True, "WORKER_FAILURE")),
        (done, ("pending", True, 1, 0, False, "INTERRUPTED")),
        (held, ("pending", True, 0, 0, False, None)),
    ):
        rows = conn.execute(
            """select distinct state, ready, task.attempt, crash_count, suspect, outcome
                 from tasklib.tasks as task left join tasklib.task_attempts as attempt on task_id = id
                where id = any(%s)""",
            [[each.held.id for each in tasks]],
        ).fetchall()
        assert rows == [expected]
    assert claims_of(conn, worker.id) == 0
    assert is_dead(conn, worker.id)


def test_a_claim_that_commits_after_the_death_is_swept_up(
    recoveries: Recoveries, config: tasklib.Config, client: tasklib.Client, conn: Conn
) -> None:
    """Its backend is nobody's that we could end: behind a pooler, or on its way. Free of charge, like what was held."""
    task = client.submit_task("keeper_work")
    worker = ManualWorker(config, "w")
    with psycopg.connect(config.database_url, cursor_factory=psycopg.RawCursor) as late:
        claim = WorkerStatements(config).claim(worker.id, "default", ["keeper_work"], 10)
        late.execute(claim.sql, claim.parameters)
        recoveries.add(report_of(worker))
        recoveries.run_once()
        late.commit()
    assert get(client, task).state == "claimed"
    wait_until(lambda: recoveries.run_once() is None, "the later sweeps")
    found = get(client, task)
    assert (found.state, found.ready, found.crash_count, found.suspect) == ("pending", True, 0, False)
    worker.close()


@pytest.mark.direct("ends backends, whose pids a pooler makes up")
def test_the_backends_of_the_dead_are_ended_first(
    recoveries: Recoveries, config: tasklib.Config, client: tasklib.Client, conn: Conn
) -> None:
    """One holds a claim that it has not committed: it never will."""
    task = client.submit_task("keeper_work")
    worker = ManualWorker(config, "w")
    with psycopg.connect(
        config.database_url, application_name="tasklib:claim", cursor_factory=psycopg.RawCursor
    ) as in_flight:
        claim = WorkerStatements(config).claim(worker.id, "default", ["keeper_work"], 10)
        in_flight.execute(claim.sql, claim.parameters)
        recoveries.add(report_of(worker, backends=(in_flight.info.backend_pid,)))
        recoveries.run_once()
        with pytest.raises(psycopg.OperationalError):
            in_flight.execute("select 1")
    assert get(client, task).state == "pending"
    worker.close()


@pytest.mark.direct("ends backends, whose pids a pooler makes up")
def test_no_backend_of_somebody_else_is_ended(
    recoveries: Recoveries, config: tasklib.Config, conn: Conn, database_url: str
) -> None:
    """Not one of another application, and not one that has come after the death: the server gives out pids again."""
    worker = ManualWorker(config, "w")
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(psycopg.connect(database_url, application_name="app", autocommit=True))
        now = time.monotonic()
        later = stack.enter_context(psycopg.connect(database_url, application_name="tasklib:claim", autocommit=True))
        # Long ago: the question takes its time to the server, and what is younger than that may be taken for older.
        for each, died in ((other, now), (later, now - 60)):
            recoveries.add(report_of(worker, backends=(each.info.backend_pid,), died=died))
            recoveries.run_once()
            assert each.execute("select 1").fetchone() == (1,)
    assert is_dead(conn, worker.id)
    worker.close()


def test_a_report_that_comes_twice_or_late_changes_nothing(
    recoveries: Recoveries, config: tasklib.Config, client: tasklib.Client, conn: Conn
) -> None:
    """A second keeper has it too; and somebody has claimed the task again meanwhile."""
    task = client.submit_task("keeper_work")
    first, second = ManualWorker(config, "w"), ManualWorker(config, "w")
    claimed = first.claim("keeper_work")
    for _ in range(2):
        recoveries.add(report_of(first, claimed))
        recoveries.run_once()
    again = second.claim_suspects("keeper_work")
    recoveries.add(report_of(first, claimed))
    recoveries.run_once()
    assert get(client, task).crash_count == 1
    assert second.finish(again[0])
    assert [outcome for outcome, _, _ in attempts(conn, task)] == ["WORKER_FAILURE", "COMPLETED"]
    for worker in (first, second):
        worker.close()


def test_a_reaper_before_or_after_does_no_harm(
    recoveries: Recoveries, client: tasklib.Client, conn: Conn, database_url: str
) -> None:
    """Another daemon's reaper saw the lease run out first; or it comes when all is done."""
    config = tasklib.Config(database_url, lease_seconds=0.3)
    tasks = client.submit_many([keeper_work.new(1), keeper_work.new(2)])
    before, after = ManualWorker(config, "w1"), ManualWorker(config, "w2")
    session = Session(config, "reaper")
    reaper = grown_up_reaper(config, session)
    early = before.claim("keeper_work", limit=1)
    conn.execute(
        "update tasklib.workers set lease_until = now() - interval '1 second' where worker_id = %s", [before.id]
    )
    reaper.run_once()
    recoveries.add(report_of(before, early))
    late = after.claim("keeper_work", limit=2)
    executing = [each for each in late if each.held.id != early[0].held.id]
    recoveries.add(report_of(after, executing))
    recoveries.run_once()
    reaper.run_once()
    counts = {task: get(client, task) for task in tasks}
    assert {each.crash_count for each in counts.values()} == {1}
    assert {each.strikes for each in counts.values()} == {0}
    assert {each.state for each in counts.values()} == {"pending"}
    session.close()
    before.close()
    after.close()


def test_a_row_that_somebody_holds_keeps_no_other(
    recoveries: Recoveries, config: tasklib.Config, client: tasklib.Client, database_url: str
) -> None:
    """Its turn comes with the next sweep."""
    tasks = client.submit_many([keeper_work.new(number) for number in range(10)])
    worker = ManualWorker(config, "w")
    claimed = worker.claim("keeper_work", limit=10)
    with psycopg.connect(database_url) as holder:
        holder.execute("select from tasklib.tasks where id = %s for update", [tasks[0]])
        recoveries.add(report_of(worker, claimed))
        recoveries.run_once()
        assert [get(client, task).state for task in tasks] == ["claimed"] + ["pending"] * 9
    wait_until(lambda: recoveries.run_once() is None, "the later sweeps")
    assert get(client, tasks[0]).attempt == 1
    worker.close()


@pytest.mark.direct("shuts the database, behind which a pooler would wait")
def test_reports_wait_for_the_database(
    own: Callable[..., Settings],
    config: tasklib.Config,
    client: tasklib.Client,
    conn: Conn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are dealt with when it is back."""
    monkeypatch.setattr(keeper, "ANSWER_SECONDS", 1.0)
    task = client.submit_task("keeper_work")
    worker = ManualWorker(config, "w")
    claimed = worker.claim("keeper_work")
    worker.close()
    with Kept(own()) as kept:
        wait_until(lambda: kept.is_so(database=True), "the keeper")
        with refusing(conn):
            kept.keeper.receive([{"say": "died", "report": report_of(worker, claimed).to_message()}])
            wait_until(lambda: kept.is_so(database=False, listening=False), "the keeper to notice")
            assert kept.keeper.recoveries.is_waiting
        wait_until(lambda: not kept.keeper.recoveries.is_waiting, "the report to be dealt with")
    assert attempts(conn, task)[0][0] == "WORKER_FAILURE"


@contextlib.contextmanager
def refusing(conn: Conn) -> Iterator[None]:
    """The database lets nobody in, and has thrown everybody else out."""
    allow = sql.SQL("alter database {} allow_connections {}")
    name = sql.Identifier(conn.info.dbname)
    with psycopg.connect(conn.info.dsn, dbname="postgres", autocommit=True) as other:
        other.execute(allow.format(name, sql.SQL("false")))
        try:
            other.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s and pid <> %s",
                [conn.info.dbname, conn.info.backend_pid],
            )
            yield
        finally:
            other.execute(allow.format(name, sql.SQL("true")))


# --- what it does for its daemon ---


def lease_seconds_left(conn: Conn, worker_id: str) -> float:
    row = conn.execute(
        "select extract(epoch from lease_until - clock_timestamp()) from tasklib.workers where worker_id = %s",
        [worker_id],
    ).fetchone()
    assert row is not None
    return float(row[0])


def test_the_leases_of_the_living_are_renewed_for_them(
    own: Callable[..., Settings], conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that holds the interpreter's lock starves its worker's renewal. Not of one that hangs, not of one that is
    dead, and not once the supervisor has fallen silent.
    """
    given = own(lease_seconds=300)
    alive, hung, dead = (ManualWorker(given.config(), name) for name in ("alive", "hung", "dead"))
    conn.execute("update tasklib.workers set died_at = now() where worker_id = %s", [dead.id])
    workers = [{"worker_id": alive.id, "pid": 1}, {"worker_id": hung.id, "pid": 2, "is_hung": True}]
    workers += [{"worker_id": dead.id, "pid": 3}, {"worker_id": "", "pid": 4}]  # the last has no name yet
    run_low = "update tasklib.workers set lease_until = clock_timestamp() + interval '100 seconds'"
    with Kept(given) as kept:
        wait_until(lambda: kept.is_so(database=True), "the keeper")
        duties: Any = kept.keeper._loops["duties"]

        def look_soon() -> None:
            duties.service._due.update(dict.fromkeys(duties.service._due, 0.0))
            duties.wake()

        def is_renewed() -> bool:
            kept.keeper.receive([{"say": "workers", "workers": workers}, {"say": "nonsense"}, {"say": "workers"}])
            look_soon()
            return lease_seconds_left(conn, alive.id) > 100

        conn.execute(run_low)
        wait_until(is_renewed, "the renewal")
        assert max(lease_seconds_left(conn, each.id) for each in (hung, dead)) < 100
        monkeypatch.setattr(keeper, "FRESH_SECONDS", 0.0)
        conn.execute(run_low)
        rounds = duties.beats + 3

        def has_looked_again() -> bool:
            look_soon()
            return bool(duties.beats > rounds)

        wait_until(has_looked_again, "it to look again")
        assert lease_seconds_left(conn, alive.id) < 100
    for worker in (alive, hung, dead):
        worker.close()


def test_snapshots_say_how_the_workers_are(own: Callable[..., Settings], conn: Conn) -> None:
    """Every column, one row a worker and moment; what is not known is null."""
    given = own(queues=["a", "b"], concurrency=7, buffer_size=20)
    told = {
        "worker_id": "w-1", "slot": 0, "pid": 42, "running": 2, "claimed": 3, "memory_bytes": 50 * 1024 * 1024,
        "cpu_percent": 1.5, "started_at": "2026-01-01T00:00:00+00:00", "is_hung": False,
    }  # fmt: skip
    count = "select count(*) from tasklib.worker_states where worker_id = 'w-1'"
    with Kept(given) as kept:
        wait_until(lambda: kept.is_so(database=True), "the keeper")
        kept.keeper.receive([{"say": "workers", "workers": [told, {"worker_id": "w-2", "pid": 43}]}])
        wait_until(lambda: (conn.execute(count).fetchone() or [0])[0] >= 2, "two snapshots")
    row = conn.execute(
        """select hostname, pid, processes, queues, tasks_running, tasks_claimed, memory_usage_mb, cpu_percent,
                  memory_percent between 0.001 and 100, max_claim_batch, max_claim_per_worker, cluster_wide_cap,
                  queue_priorities, queue_max_concurrency, recovery_config ->> 'bury_after', worker_started_at::text,
                  recovery_config #>> '{retention,completed_days}'
             from tasklib.worker_states where worker_id = 'w-1' limit 1"""
    ).fetchone()
    assert row is not None
    assert row[:9] == (socket.gethostname(), 42, 1, ["a", "b"], 2, 3, 50.0, 1.5, True)
    assert row[9:15] == (CLAIM_LIMIT, 27, None, None, None, "3")
    assert (row[15][:10], row[16]) == ("2026-01-01", "30.0")


def asleep(conn: Conn) -> int:
    """How many have said that they sleep."""
    sql = "select count(*) from pg_locks where locktype = 'advisory' and objsubid = 2"
    (count,) = conn.execute(sql).fetchone() or (0,)
    return int(count)


@pytest.mark.direct("listens, which no pooler lets it do")
def test_it_wakes_its_siblings_and_hears_cancels_for_them(
    own: Callable[..., Settings], client: tasklib.Client, conn: Conn
) -> None:
    """A worker that does not listen, and polls once a minute, starts a new task at once, and stops a cancelled one."""
    given = own(lease_seconds=300)  # it looks for cancels itself three times in a lease
    with (
        Kept(given) as kept,
        running(given.config(), listen=False, duties=False, poll_interval_seconds=60) as worker,
    ):
        receiver = WakeReceiver(given.runtime_directory, 0, worker)
        worker.has_listener = receiver.start()
        assert worker.has_listener
        worker.ring()  # it looks once more, and from then on inserts ring for it
        try:
            wait_until(lambda: kept.is_so(listening=True), "the keeper to listen")
            wait_until(lambda: asleep(conn) == 1, "its first looks to be over")
            task = client.submit_task("keeper_work")
            wait_until(lambda: get(client, task).state == "completed", "it to be woken")
            slow = client.submit_task("keeper_nap")
            wait_until(lambda: get(client, slow).state == "running", "the slow one")
            conn.execute("select pg_notify('task_cancel', %s)", [str(slow)])  # anybody may say so
            conn.execute("select pg_notify('task_cancel', %s)", [str(task)])
            assert client.cancel_task(slow)
            wait_until(lambda: get(client, slow).state == "cancelled", "it to stop")
        finally:
            receiver.stop()
        said = [each for each in kept.said if each["say"] == "cancel"]
        assert said
        assert {(each["task_id"], each["token"]) for each in said} == {(str(slow), 1)}


@pytest.fixture
def crowd(own: Callable[..., Settings], conn: Conn) -> Iterator[list[TaskWorker]]:
    """Five idle workers of one daemon, with two slots each, that poll once a minute; and its keeper."""
    given = own(lease_seconds=60)
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(Kept(given))
        wait_until(lambda: kept.is_so(listening=True), "the keeper to listen")
        workers = []
        for slot in range(5):
            options: dict[str, Any] = {"listen": False, "duties": False, "poll_interval_seconds": 60}
            worker = stack.enter_context(running(given.config(), concurrency=2, buffer_size=0, **options))
            receiver = WakeReceiver(given.runtime_directory, slot, worker)
            worker.has_listener, worker.on_full = receiver.start(), receiver.pass_on
            stack.callback(receiver.stop)
            worker.ring()  # it looks once more, and from then on inserts ring for it
            workers.append(worker)
        wait_until(lambda: asleep(conn) == 5, "all to be asleep")
        yield workers


def looks(workers: list[TaskWorker]) -> list[int]:
    return [worker._run.loops["claim"].beats for worker in workers if worker._run is not None]


@pytest.mark.direct("listens, which no pooler lets it do")
def test_a_task_wakes_one_worker(client: tasklib.Client, conn: Conn, crowd: list[TaskWorker]) -> None:
    """Another one each time: all others would look in vain."""
    before = looks(crowd)
    for _ in range(5):
        # One that falls asleep while an insert is under way looks several times.
        wait_until(lambda: asleep(conn) == 5, "all to be asleep")
        task = client.submit_task("keeper_work")
        wait_until(lambda: get(client, task).state == "completed", "it to run")  # noqa: B023 - at once

    def woken() -> list[int]:
        return [after - earlier for earlier, after in zip(before, looks(crowd), strict=True)]

    wait_until(lambda: min(woken()) >= 1, "each to have been woken in turn")  # a look counts when it has ended
    assert sum(woken()) <= 12, "one for the ring, and perhaps one when its slot is free"


@pytest.mark.direct("listens, which no pooler lets it do")
def test_a_burst_wakes_all_who_have_room(client: tasklib.Client, crowd: list[TaskWorker]) -> None:
    """Each takes what it has room for, and passes the ring on."""
    buffers = [worker._run.buffer for worker in crowd if worker._run is not None]
    release = threading.Event()

    @tasklib.task
    def burst() -> None:
        assert release.wait(60)

    tasks = client.submit_many([burst.new() for _ in range(50)])
    try:
        wait_until(lambda: [len(buffer.executing()) for buffer in buffers] == [2] * 5, "all slots at once")
    finally:
        release.set()
    for task in tasks:  # the polls are once a minute
        wait_final(client, task)


@pytest.mark.direct("listens, which no pooler lets it do")
def test_a_ring_goes_past_who_cannot_take_it(client: tasklib.Client, crowd: list[TaskWorker]) -> None:
    """Paused, stopping, or full: the next one gets it."""
    paused, stopped, full, *_ = crowd
    paused.pause()
    stopped.stop()
    assert full._run is not None
    full._run.buffer.pause()  # no room, as far as its claimer can see
    for _ in range(10):
        task = client.submit_task("keeper_work")
        wait_until(lambda: get(client, task).state == "completed", "it to run")  # noqa: B023 - at once


# --- what it does when elected ---


def test_the_elected_expires_and_prunes(
    own: Callable[..., Settings], client: tasklib.Client, config: tasklib.Config, conn: Conn
) -> None:
    """As the retention of the settings says: what is completed, and what has failed, each after its own time."""
    task = client.submit_task("keeper_work", expires_at=datetime.now(UTC) + timedelta(seconds=0.2))
    completed = [keep(conn, "completed", days_ago) for days_ago in (3, 1)]
    failed = [keep(conn, "failed", days_ago) for days_ago in (5, 3)]
    with Kept(own(retention={"completed_days": 2, "failed_days": 4})):
        wait_until(lambda: get(client, task).state == "expired", "its expiry")
        gone = [completed[0], failed[0]]
        wait_until(lambda: not any(client.get_task(each) for each in gone), "what is old to go")
        assert all(client.get_task(each) for each in (completed[1], failed[1]))


def test_names_that_nobody_serves_are_told(
    own: Callable[..., Settings],
    client: tasklib.Client,
    conn: Conn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the log and to the supervisor: no live worker knows them, or none of those that do serves their queue."""
    monkeypatch.setattr(keeper, "UNSERVED_SECONDS", 0.2)
    given = own()
    client.submit_task("nobody_knows_me")
    client.submit_task("keeper_work", queue="elsewhere")
    with (
        Kept(given) as kept,
        running(given.config(), queues=["default"], duties=False) as worker,
    ):
        wait_until(lambda: kept.is_so(unserved=["keeper_work", "nobody_knows_me"]), "both to be told")
        assert "tasks.unserved" in caplog.text
        worker.stop()


def test_a_vanished_daemon_is_taken_over_also_when_it_was_elected(
    own: Callable[..., Settings], client: tasklib.Client, conn: Conn
) -> None:
    """Its worker and its keeper die in the same moment, without a word: the next keeper is elected when the term is
    over, and the task runs again when the lease is. How soon is judged by `dev.py soak daemon supervisors`.
    """
    given, url = own(), own().config().database_url
    options: dict[str, Any] = {"lease_seconds": 300, "listen": False, "duties": False}
    with (
        keeper_process(own(election_ttl_seconds=4.0)) as first,
        worker_process(url, **options) as worker,
    ):
        first.wait_for(elected=True)
        elected = (conn.execute("select holder from tasklib.elections").fetchone() or [""])[0]
        task = client.submit_task("keeper_nap")
        wait_until(lambda: get(client, task).state == "running", "the task to run")
        with Kept(given) as kept, worker_process(url, **options) as other:
            wait_until(lambda: kept.is_so(database=True), "the second keeper")
            os.kill(first.process.pid, signal.SIGKILL)
            dead = worker.kill()
            conn.execute("update tasklib.elections set until = clock_timestamp() where holder = %s", [elected])
            past = "update tasklib.workers set lease_until = clock_timestamp() where worker_id = %s"
            conn.execute(past, [dead.worker_id])
            wait_until(lambda: kept.is_so(elected=True), "the second to be elected")
            wait_until(lambda: any(id_ == task for id_, _ in other.began), "the task to run again")
    assert attempts(conn, task) == [("WORKER_FAILURE", True, "its worker died: the lease ran out")]


# --- as a process ---


class KeeperProcess:
    """`keeper.run` in a process of its own, at the other end of a channel."""

    def __init__(self, given: Settings) -> None:
        ours, theirs = socket.socketpair()
        values = {"database_url": given.config().database_url, "name": given.name, "lease_seconds": LEASE_SECONDS}
        values |= {"runtime_directory": str(given.runtime_directory)}
        values |= {"election_ttl_seconds": given.election_ttl_seconds}
        program = (
            "import json, socket, sys\n"
            "from tasklib_daemon import keeper, settings\n"
            "from tasklib_daemon.channel import Channel\n"
            "fd, values = int(sys.argv[1]), json.loads(sys.argv[2])\n"
            "keeper.run(settings.load(None, {}, values), Channel(socket.socket(fileno=fd), blocks=True))\n"
        )
        command = [sys.executable, "-c", program, str(theirs.fileno()), json.dumps(values)]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.channel = Channel(ours)
        self.said: list[dict[str, Any]] = []

    def wait_for(self, **values: Any) -> None:
        def is_so() -> bool:
            self.said += self.channel.receive()
            states = [each for each in self.said if each["say"] == "state"]
            return bool(states) and values.items() <= states[-1].items()

        wait_until(is_so, f"the keeper to say {values}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        self.channel.close()


@contextlib.contextmanager
def keeper_process(given: Settings) -> Iterator[KeeperProcess]:
    made = KeeperProcess(given)
    try:
        yield made
    finally:
        made.close()


WAITS = "select waitstart from pg_locks where relation = 'tasklib.claims'::regclass and waitstart is not null"


def test_it_deals_with_what_it_was_told_before_it_goes(
    own: Callable[..., Settings],
    config: tasklib.Config,
    client: tasklib.Client,
    conn: Conn,
    direct: Callable[[str], str],
) -> None:
    """SIGTERM comes right behind the report, and somebody is in the way for a moment. It gives up its office, so that
    the next one need not wait.
    """
    task = client.submit_task("keeper_work")
    worker = ManualWorker(replace(config, lease_seconds=300), "w")  # however long the keeper takes to start
    claimed = worker.claim("keeper_work")
    with keeper_process(own()) as process:
        process.wait_for(elected=True, database=True)
        with psycopg.connect(direct(config.database_url)) as holder:
            holder.execute("lock table tasklib.claims")
            process.channel.send({"say": "died", "report": report_of(worker, claimed).to_message()})
            process.process.send_signal(signal.SIGTERM)
            waits: set[Any] = set()

            def is_tried_again() -> bool:
                waits.update(holder.execute(WAITS))
                return len(waits) > 1

            wait_until(is_tried_again, "a second try")
        assert process.process.wait(30) == 0
    assert attempts(conn, task)[0][0] == "WORKER_FAILURE"
    assert conn.execute("select until <= clock_timestamp() from tasklib.elections").fetchone() == (True,)
    assert [each["say"] for each in process.said][:2] == ["ready", "state"]
    worker.close()


def test_it_ends_with_its_supervisor(own: Callable[..., Settings]) -> None:
    """The channel is closed: there is nobody any more to keep house for."""
    with keeper_process(own()) as process:
        process.wait_for(database=True)
        process.channel.close()
        assert process.process.wait(30) == 0


def test_its_first_state_is_reported_without_waiting_a_second(
    own: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the database has answered, it is asked often; without an answer, only for a moment."""
    said: list[dict[str, Any]] = []
    kept = Keeper(own(), said.append)
    assert not kept.is_settled
    settle(kept)
    assert said[-1]["database"]
    assert said[-1]["listening"]
    monkeypatch.setattr(keeper, "SETTLE_SECONDS", 0.1)
    settle(Keeper(own(database_url="postgresql://127.0.0.1:1/none"), said.append))
    assert not said[-1]["database"]


def settle(kept: Keeper) -> None:
    def is_settled() -> bool:
        kept.tick()
        return kept.is_settled

    kept.start()
    try:
        wait_until(is_settled, "the first answers, or the end of the wait for them")
    finally:
        kept.close()


def test_a_schema_that_does_not_fit_is_an_error(own: Callable[..., Settings], conn: Conn) -> None:
    """It says so, and does not go on."""
    kept = Keeper(own(schema="strange"), lambda _: None)
    conn.execute("create schema strange; create table strange.schema_migrations (version integer)")
    try:
        kept.start()
        wait_until(lambda: kept._schema_check.error is not None, "the keeper to look")
        with pytest.raises(tasklib.TasklibError):
            kept.tick()
    finally:
        kept.close()
        conn.execute("drop schema strange cascade")
