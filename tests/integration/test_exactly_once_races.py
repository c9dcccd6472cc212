"""Races around the end of a task's own transaction, each forced: a proxy holds the statement that completes the task,
or its COMMIT, until the other side has done its work.

Whatever comes in between: one effect, one completion, and a worker that goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import tasklib
from tests.integration.test_exactly_once import count, kinds, write_in
from tests.support.invariants import violations
from tests.support.proxy import CuttingProxy
from tests.support.raw_sql import literal
from tests.support.working import ManualWorker, get, grown_up_reaper, renew_now, running, time_out, wait_final
from tools.waiting import wait_until, wait_until_blocked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tasklib.outcomes import Completed
    from tasklib.statements import Statement
    from tasklib.worker.execution import Execution
    from tasklib.worker.run import WorkerRun
    from tests.integration.test_exactly_once import Kind
    from tests.support.proxy import Fate, Said
    from tests.support.raw_sql import Conn

pytestmark = pytest.mark.direct("cuts and holds what is said in sessions of its own")

SECONDS = 30.0
WRITE = "insert into effects values (%s, %s)"


@pytest.fixture(autouse=True)
def effects(conn: Conn) -> Iterator[None]:
    conn.execute("drop table if exists effects; create table effects (task_id uuid, n integer)")
    yield
    conn.execute("drop table effects")


@pytest.fixture
def second() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def is_commit(said: Said) -> bool:
    """Of the task's own transaction. A worker's settings and statement go as one message, with their COMMIT."""
    return said.is_commit and said.is_in_transaction


def is_completion(said: Said) -> bool:
    """The guarded statement, on the task's own connection."""
    return said.is_in_transaction and "settled as (" in said.sql


class Hold:
    """Holds the first statement of its kind, until it is let go."""

    def __init__(self, is_meant: Callable[[Said], bool]) -> None:
        self._is_meant = is_meant
        self._is_caught = threading.Event()
        self._is_let_go = threading.Event()
        self._fate: Fate = "pass"

    def decide(self, said: Said) -> Fate:
        if self._is_caught.is_set() or not self._is_meant(said):
            return "pass"
        self._is_caught.set()
        assert self._is_let_go.wait(SECONDS)
        return self._fate

    def wait(self) -> None:
        assert self._is_caught.wait(SECONDS), "nothing was caught"

    def let_go(self, fate: Fate = "pass") -> None:
        self._fate = fate
        self._is_let_go.set()


def crew_of(worker: tasklib.TaskWorker) -> WorkerRun:
    assert worker._run is not None
    return worker._run


NEVER_RENEWS = 300.0  # a lease of which a third is longer than a test: a renewal would undo what `die` does


def die(conn: Conn, worker: tasklib.TaskWorker) -> None:
    """What time does to a worker that no longer renews."""
    past = "update tasklib.workers set lease_until = clock_timestamp() - interval '1 s' where worker_id = %s"
    conn.execute(past, [worker.worker_id])


@pytest.fixture
def grave(database_url: str) -> Iterator[ManualWorker]:
    """Whose connection the reaper takes."""
    made = ManualWorker(tasklib.Config(database_url, lease_seconds=0.3), "grave", lives=False)
    made.session.connection()
    yield made
    made.close()


def reap(database_url: str, grave: ManualWorker) -> None:
    grown_up_reaper(tasklib.Config(database_url, lease_seconds=0.3), grave.session).run_once()


def assert_once(task: tasklib.Task, conn: Conn, *, attempt: int) -> None:
    outcomes = "select attempt from tasklib.task_attempts where task_id = %s and outcome = 'COMPLETED'"
    assert (task.state, task.attempt, count(conn)) == ("completed", attempt, 1)
    assert conn.execute(outcomes, [task.id]).fetchall() == [(attempt,)]


# --- what holds ---


@kinds
@pytest.mark.parametrize("fate", ["before", "during", "after"])
@pytest.mark.parametrize("is_meant", [is_completion, is_commit])
def test_a_cut_costs_neither_task_nor_slot(
    client: tasklib.Client,
    database_url: str,
    conn: Conn,
    tmp_path: Path,
    kind: Kind,
    fate: Fate,
    is_meant: Callable[[Said], bool],
) -> None:
    """Wherever the end of the transaction is cut, the task is completed with one effect, and the only slot of its
    worker takes the next one.
    """
    hold = Hold(is_meant)
    hold.let_go(fate)
    write = write_in(kind)
    with CuttingProxy(database_url, tmp_path, hold.decide) as proxy, running(tasklib.Config(proxy.url), concurrency=1):
        task = wait_final(client, client.submit(write.new(1)))
        assert proxy.cuts == 1
        # The task may be seen as final before the proxy has read the answer that it loses.
        wait_until(lambda: proxy.lost_answers.total() == (fate == "after"), "the answer to be lost")
        is_known = is_meant is is_completion or fate != "during"
        assert_once(task, conn, attempt=task.attempt if not is_known else 1 if proxy.lost_answers["COMMIT"] else 2)
        assert wait_final(client, client.submit(write.new(2))).state == "completed"
    assert conn.execute("select count(*) from tasklib.claims").fetchone() == (0,)
    assert violations(conn, ["I7", "I12"]) == []


@kinds
def test_a_commit_that_comes_late_counts(
    client: tasklib.Client, database_url: str, conn: Conn, tmp_path: Path, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker has lost the connection, but the server has not, and hears the COMMIT when the worker is giving the
    task back already: the row's lock keeps the one behind the other.
    """
    write = write_in(kind)
    with CuttingProxy(database_url, tmp_path) as proxy, running(tasklib.Config(proxy.url)) as worker:
        proxy.cut_at_commit("late")
        task_id = client.submit(write.new(1))
        wait_until(lambda: "transaction.broken" in caplog.text, "the connection to be lost")
        wait_until(lambda: crew_of(worker).basis.sessions["finish"].age_seconds > 0, "the finish_loop to be connected")
        wait_until_blocked(conn, crew_of(worker).basis.sessions["finish"].connection())
        proxy.deliver()
        task = wait_final(client, task_id)
        assert_once(task, conn, attempt=1)
    assert conn.execute("select count(*) from tasklib.claims").fetchone() == (0,)


@kinds
def test_a_completion_after_the_lease_was_lost_is_refused(
    client: tasklib.Client, database_url: str, conn: Conn, tmp_path: Path, kind: Kind, grave: ManualWorker
) -> None:
    """Others have recovered the task, and are running it, when the first worker wants to complete it. Its writes do not
    count, theirs do; and it goes on.
    """
    hold = Hold(is_completion)
    began = [threading.Event(), threading.Event()]
    may_end = threading.Event()

    def run_on() -> None:
        began[began[0].is_set()].set()
        assert not began[1].is_set() or may_end.wait(SECONDS)

    write = write_in(kind, run_on)
    with (
        CuttingProxy(database_url, tmp_path, hold.decide) as proxy,
        running(tasklib.Config(proxy.url, lease_seconds=NEVER_RENEWS), concurrency=1) as first,
    ):
        task_id = client.submit(write.new(1))
        hold.wait()
        die(conn, first)
        reap(database_url, grave)
        with running(tasklib.Config(database_url)):
            assert began[1].wait(SECONDS)
            hold.let_go()
            wait_until(lambda: not crew_of(first).buffer.executing(), "the first to end")
            assert (count(conn), get(client, task_id).completed_at) == (0, None)
            may_end.set()
            task = wait_final(client, task_id)
            assert_once(task, conn, attempt=task.attempt)
        renew_now(first)
        assert wait_final(client, client.submit(write.new(2))).state == "completed"
    assert count(conn) == 2


@kinds
def test_a_reaper_waits_for_a_commit_under_way(
    client: tasklib.Client,
    database_url: str,
    conn: Conn,
    tmp_path: Path,
    kind: Kind,
    grave: ManualWorker,
    second: ThreadPoolExecutor,
) -> None:
    """The task is completed in a transaction that is not over, and its worker is declared dead: the reaper finds
    nothing to recover once it is.
    """
    hold = Hold(is_commit)
    write = write_in(kind)
    with (
        CuttingProxy(database_url, tmp_path, hold.decide) as proxy,
        running(tasklib.Config(proxy.url, lease_seconds=NEVER_RENEWS)) as worker,
    ):
        task_id = client.submit(write.new(1))
        hold.wait()
        die(conn, worker)
        reaping = second.submit(reap, database_url, grave)
        wait_until_blocked(conn, grave.session.connection())
        hold.let_go()
        reaping.result(SECONDS)
        assert_once(wait_final(client, task_id), conn, attempt=1)


@kinds
def test_a_timeout_during_the_commit_comes_too_late(
    client: tasklib.Client, database_url: str, conn: Conn, tmp_path: Path, kind: Kind
) -> None:
    """The function had returned in time: it is completed."""
    hold = Hold(is_commit)
    write = write_in(kind, timeout_seconds=60, max_retries=0)
    with CuttingProxy(database_url, tmp_path, hold.decide) as proxy, running(tasklib.Config(proxy.url)) as worker:
        task_id = client.submit(write.new(1))
        hold.wait()
        (execution,) = crew_of(worker).buffer.executing()
        time_out(worker)
        wait_until(lambda: execution.interrupt_kind is not None, "the timeout")
        hold.let_go()
        assert_once(wait_final(client, task_id), conn, attempt=1)


@kinds
def test_a_cancel_during_the_commit_comes_too_late(
    client: tasklib.Client, database_url: str, conn: Conn, tmp_path: Path, kind: Kind, second: ThreadPoolExecutor
) -> None:
    """It waits for the transaction, and then finds the task completed."""
    hold = Hold(is_commit)
    write = write_in(kind)
    with (
        CuttingProxy(database_url, tmp_path, hold.decide) as proxy,
        running(tasklib.Config(proxy.url)),
        psycopg.connect(database_url, autocommit=True, application_name="canceller") as other,
    ):
        task_id = client.submit(write.new(1))
        hold.wait()
        cancelling = second.submit(other.execute, "select tasklib.cancel(%s, null)", [task_id])
        wait_until_blocked(conn, other)
        hold.let_go()
        cancelling.result(SECONDS)
        assert_once(wait_final(client, task_id), conn, attempt=1)


@kinds
@pytest.mark.parametrize("fate", ["pass", "before", "after"])
def test_a_worker_that_stops_during_the_commit_leaves_nothing_open(
    client: tasklib.Client, database_url: str, conn: Conn, tmp_path: Path, kind: Kind, fate: Fate
) -> None:
    """Completed, or given back for the next worker; never half."""
    hold = Hold(is_commit)
    write = write_in(kind)
    with CuttingProxy(database_url, tmp_path, hold.decide) as proxy, running(tasklib.Config(proxy.url)) as worker:
        task_id = client.submit(write.new(1))
        hold.wait()
        worker.stop()
        wait_until(lambda: crew_of(worker).lease.is_stopping, "the stop")
        hold.let_go(fate)
    task = get(client, task_id)
    assert (task.state, count(conn)) == (("pending", 0) if fate == "before" else ("completed", 1))
    left = conn.execute("select (select count(*) from tasklib.claims), count(*) from tasklib.workers").fetchone()
    assert left == (0, 0)


# --- what a task leaves behind ---


def test_a_connection_that_was_kept_writes_nothing_for_others(
    client: tasklib.Client, config: tasklib.Config, conn: Conn
) -> None:
    """What a task has left running holds a connection that ended with the task: another task's transaction is none of
    its business.
    """
    kept: list[psycopg.Connection[Any]] = []
    is_inside, may_go = threading.Event(), threading.Event()
    tasklib.task(name="first")(lambda: kept.append(tasklib.current_task().connection))

    @tasklib.task
    def next_one() -> None:
        tasklib.current_task().connection.execute(WRITE, [tasklib.current_task().id, 2])
        is_inside.set()
        assert may_go.wait(SECONDS)

    with running(config):
        wait_final(client, client.submit_task("first"))
        task_id = client.submit_task(next_one)
        assert is_inside.wait(SECONDS)
        with contextlib.suppress(psycopg.Error):  # so it should be
            kept[0].execute(WRITE, [None, 1])
        may_go.set()
        wait_final(client, task_id)
    assert conn.execute("select n from effects").fetchall() == [(2,)]


def test_what_gather_left_running_writes_nothing_in_the_next_attempt(
    client: tasklib.Client, config: tasklib.Config, conn: Conn
) -> None:
    """The first of two fails, the task is tried again, and the second of the first attempt is still there."""
    second_attempt, stray_is_done = asyncio.Event(), asyncio.Event()

    async def write_later(connection: psycopg.AsyncConnection[Any]) -> None:
        await second_attempt.wait()
        try:
            await connection.execute(WRITE, [None, 1])
        finally:
            stray_is_done.set()

    async def fail() -> None:
        raise ValueError

    @tasklib.task(backoff=tasklib.Fixed(0))
    async def both() -> None:
        connection = await tasklib.current_task().async_connection()
        if tasklib.current_task().attempt == 1:
            await asyncio.gather(write_later(connection), fail())
        second_attempt.set()
        await stray_is_done.wait()
        await connection.execute(WRITE, [None, 2])

    with running(config):
        assert wait_final(client, client.submit_task(both)).state == "completed"
    assert conn.execute("select n from effects").fetchall() == [(2,)]


def test_a_connection_that_was_used_after_its_task_loses_no_other_task(
    client: tasklib.Client, config: tasklib.Config, conn: Conn
) -> None:
    """A statement on it opens a transaction; the next task's own would be a savepoint in that, which is released."""
    kept: list[psycopg.Connection[Any]] = []
    tasklib.task(name="first")(lambda: kept.append(tasklib.current_task().connection))
    write = write_in("sync")
    with running(config) as worker:
        wait_final(client, client.submit_task("first"))
        wait_until(lambda: not crew_of(worker).buffer.executing())
        with contextlib.suppress(psycopg.Error):  # so it should be
            kept[0].execute("select 1")
        task = wait_final(client, client.submit(write.new(1)))
    assert_once(task, conn, attempt=1)


def test_a_transaction_that_was_aborted_before_its_commit_is_no_success(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a task has left running fails a statement between completion and COMMIT: PostgreSQL answers that COMMIT with
    ROLLBACK, and no error.
    """
    connections: list[psycopg.Connection[Any]] = []
    write = write_in("sync", lambda: connections.append(tasklib.current_task().connection))

    def fail_once(statement: Statement[Any]) -> Statement[Any]:
        def read(rows: list[Any]) -> Any:
            if len(connections) == 1:
                with pytest.raises(psycopg.Error):
                    connections[0].execute("select 1 / 0")
            return statement.read(rows)

        return replace(statement, read=read)

    with running(config) as worker:
        transactions = crew_of(worker).transactions
        completion: Callable[[Execution, Completed], Statement[Any]] = transactions._completion
        monkeypatch.setattr(transactions, "_completion", lambda *given: fail_once(completion(*given)))
        task = wait_final(client, client.submit(write.new(1)))
    assert_once(task, conn, attempt=task.attempt)


@kinds
def test_two_that_ask_at_once_get_the_same_connection(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, kind: Kind
) -> None:
    """Or the writes of one of them would be lost, in a transaction that nobody ends."""
    if kind == "sync":

        @tasklib.task(name="both")
        def both() -> None:
            current = tasklib.current_task()
            begun = threading.Barrier(2)

            def write(n: int) -> None:
                begun.wait(SECONDS)
                current.connection.execute(WRITE, [None, n])

            with ThreadPoolExecutor(2) as pool:
                list(pool.map(write, [1, 2]))
    else:

        @tasklib.task(name="both")
        async def both_async() -> None:
            async def write(n: int) -> None:
                await (await tasklib.current_task().async_connection()).execute(WRITE, [None, n])

            await asyncio.gather(write(1), write(2))

    with running(config):
        assert wait_final(client, client.submit_task("both")).state == "completed"
    assert conn.execute("select n from effects order by n").fetchall() == [(1,), (2,)]


@pytest.mark.parametrize("how", ["closed", "terminated"])
def test_a_task_that_always_loses_its_connection_comes_to_an_end(
    client: tasklib.Client, config: tasklib.Config, how: str
) -> None:
    """To give it back at no cost, and at once, would be for ever."""

    @tasklib.task(max_retries=0)
    def breaks() -> None:
        connection = tasklib.current_task().connection
        if how == "closed":
            connection.close()
        else:
            with pytest.raises(psycopg.Error):
                connection.execute("select pg_terminate_backend(pg_backend_pid())")

    with running(config):
        wait_final(client, client.submit_task(breaks))


def test_a_transaction_that_nobody_ends_does_not_keep_its_task(
    client: tasklib.Client, database_url: str, conn: Conn, tmp_path: Path
) -> None:
    """The network went silent between completion and COMMIT: the worker knows, the server does not, and holds the row.
    It must not for longer than the worker would have waited.
    """
    write = write_in("sync")
    with CuttingProxy(database_url, tmp_path) as proxy, running(tasklib.Config(proxy.url)) as worker:
        crew_of(worker).transactions._seconds = 2.0
        proxy.cut_at_commit("late")
        try:
            task = wait_final(client, client.submit(write.new(1)), seconds=40)
        finally:
            proxy.deliver()
    assert task.attempt >= 2  # more, if the server was silent for two seconds once more
    assert_once(task, conn, attempt=task.attempt)


@pytest.mark.parametrize("word", ["commit", "rollback"])
def test_the_task_may_not_end_its_transaction_in_sql(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, word: str
) -> None:
    """Completed without its writes, or with writes that a crash would double: it is told instead."""

    @tasklib.task(max_retries=0)
    def hasty() -> None:
        tasklib.current_task().connection.execute(WRITE, [None, 1])
        tasklib.current_task().connection.execute(literal(word))

    with running(config):
        assert wait_final(client, client.submit_task(hasty)).state == "failed"


def test_what_a_task_has_set_ends_with_it(client: tasklib.Client, config: tasklib.Config) -> None:
    """The next one on the connection would write elsewhere."""
    seen: list[Any] = []

    @tasklib.task
    def sets() -> None:
        connection = tasklib.current_task().connection
        connection.cursor_factory = psycopg.RawCursor
        connection.execute("set search_path = pg_catalog")

    @tasklib.task
    def looks() -> None:
        connection = tasklib.current_task().connection
        seen.extend([connection.cursor_factory, connection.execute("show search_path").fetchone()])

    with running(config):
        wait_final(client, client.submit_task(sets))
        wait_final(client, client.submit_task(looks))
    assert seen == [psycopg.Cursor, ('"$user", public',)]


def test_a_commit_that_a_crash_took_back_loses_no_task(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, database_url: str
) -> None:
    """With synchronous_commit off, which a role or a database may have set, the server may forget in a crash what it
    has answered. Then the task is held as before, and whoever tidies up its claim would make it nobody's for ever.
    """
    is_inside, may_go = threading.Event(), threading.Event()

    def pause() -> None:
        is_inside.set()
        assert may_go.wait(SECONDS)

    write = write_in("sync", pause)
    columns = "state, worker_id, claimed_at, locked_until, started_at, completed_at, completed_by, result, attempt"
    with running(config), psycopg.connect(database_url) as holder:
        task_id = client.submit(write.new(1))
        assert is_inside.wait(SECONDS)
        conn.execute(literal(f"create temp table before as select {columns} from tasklib.tasks"))
        holder.execute("select from tasklib.claims for update")  # the finish_loop comes no further
        may_go.set()
        wait_until(lambda: get(client, task_id).state == "completed")
        with conn.transaction():
            conn.execute(literal(f"update tasklib.tasks set ({columns}) = (select {columns} from before)"))
            conn.execute("delete from effects")
        conn.execute("""select pg_terminate_backend(pid) from pg_stat_activity
                         where datname = current_database() and application_name like 'tasklib:%'""")
        holder.commit()
        task = wait_final(client, task_id)
    assert violations(conn, ["I12"]) == []
    assert_once(task, conn, attempt=task.attempt)


def test_a_row_that_somebody_holds_does_not_keep_the_other_locks_from_being_extended(
    client: tasklib.Client, config: tasklib.Config, database_url: str
) -> None:
    """A transaction has one of the worker's tasks locked, as that of a task does from its completion to its COMMIT: the
    other tasks are extended all the same, and not given to others while they run.
    """
    is_inside, may_go = threading.Barrier(3), threading.Event()

    @tasklib.task
    def long() -> None:
        is_inside.wait(SECONDS)
        assert may_go.wait(SECONDS)

    ids = client.submit_many([long.new(), long.new()])
    with running(config, concurrency=2) as worker:
        try:
            is_inside.wait(SECONDS)
            wait_until(lambda: all(get(client, each).state == "running" for each in ids))
            before = get(client, ids[1]).locked_until
            assert before is not None
            for execution in crew_of(worker).buffer.held():
                execution.locked_since -= timedelta(seconds=config.lock_timeout_seconds)  # it is time to extend them
            with psycopg.connect(database_url) as holder:
                holder.execute("select from tasklib.tasks where id = %s for update", [ids[0]])
                renew_now(worker)
                task = get(client, ids[1])
                assert task.locked_until is not None
                assert task.locked_until > before
                assert task.fencing_token == 1
        finally:
            may_go.set()
        for each in ids:
            wait_final(client, each)
