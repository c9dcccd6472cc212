"""`current_task().connection`: the task's own writes and its completion are one transaction."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.rows import dict_row

import tasklib
from tasklib import outcomes
from tasklib.connection import DeadlinePassed
from tasklib.outcomes import MOST_FREE_RUNS
from tests.support.proxy import CuttingProxy
from tests.support.working import get, run_of, running, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.proxy import Fate
    from tests.support.raw_sql import Conn

Kind = str


@pytest.fixture(autouse=True)
def effects(conn: Conn) -> Iterator[None]:
    conn.execute("drop table if exists effects; create table effects (task_id uuid, n integer)")
    yield
    conn.execute("drop table effects")


def count(conn: Conn) -> int:
    row = conn.execute("select count(*) from effects").fetchone()
    assert row is not None
    return int(row[0])


def write_in(kind: Kind, then: Any = None, **options: Any) -> tasklib.TaskFunction[..., Any]:
    """A task function of the kind that writes one row, and then does what it is told."""
    sql = "insert into effects values (%s, %s)"

    if kind == "sync":

        @tasklib.task(name="write", **options)
        def write(n: int) -> int:
            current = tasklib.current_task()
            current.connection.execute(sql, [current.id, n])
            if then is not None:
                then()
            return n

        return write

    @tasklib.task(name="write", **options)
    async def write_async(n: int) -> int:
        current = tasklib.current_task()
        await (await current.async_connection()).execute(sql, [current.id, n])
        if then is not None:
            then()
        return n

    return write_async


kinds = pytest.mark.parametrize("kind", ["sync", "async"])


@kinds
def test_a_deferred_trigger_finds_the_tasks_own_search_path(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, kind: Kind
) -> None:
    """The session is the task's: what runs at its COMMIT finds names where the task's own SQL does. For the completion
    alone the search_path is another.
    """
    conn.execute(
        """create function count_effects() returns trigger language plpgsql as $$
           begin perform count(*) from effects; return null; end $$;
           create constraint trigger late after insert on effects deferrable initially deferred
               for each row execute function count_effects()"""
    )
    try:
        with running(config):
            task = wait_final(client, client.submit(write_in(kind).new(1)))
        assert (task.state, task.error) == ("completed", None)
    finally:
        conn.execute("drop function count_effects cascade")


@kinds
def test_the_writes_come_with_the_completion(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, kind: Kind
) -> None:
    """Before it, nobody sees them; after it, result, attempt and progress are as usual."""
    seen: list[int] = []

    def note() -> None:
        seen.append(count(conn))
        tasklib.current_task().progress(1)

    write = write_in(kind, note)
    with running(config, concurrency=3):
        tasks = [wait_final(client, client.submit(write.new(n))) for n in range(3)]
    assert [(task.state, task.result, task.attempt, task.progress) for task in tasks] == [
        ("completed", {"value": n}, 1, {"done": 1}) for n in range(3)
    ]
    assert seen == [0, 1, 2]
    assert count(conn) == 3
    assert (
        conn.execute("select outcome, count(*) from tasklib.task_attempts group by 1").fetchall()[0][0] == "COMPLETED"
    )
    assert conn.execute("select count(*) from tasklib.claims").fetchone() == (0,)


@kinds
@pytest.mark.parametrize(
    "raised",
    [ValueError("no"), tasklib.Retry(), tasklib.Snooze(3600), tasklib.Cancel(), tasklib.Fail("no"), SystemExit()],
)
def test_a_task_that_raises_has_written_nothing(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, kind: Kind, raised: BaseException
) -> None:
    """Whatever it raises. Its failure is recorded all the same."""
    ended = threading.Event()

    def fail() -> None:
        ended.set()
        raise raised

    write = write_in(kind, fail, max_retries=0)
    with running(config):
        task_id = client.submit(write.new(1))
        assert ended.wait(20)
        wait_until(
            lambda: get(client, task_id).state not in {"claimed", "running"} and get(client, task_id).attempt > 0
        )
    assert count(conn) == 0
    assert get(client, task_id).state == (
        "pending"
        if isinstance(raised, tasklib.Snooze)
        else "cancelled"
        if isinstance(raised, tasklib.Cancel)
        else "failed"
    )


@kinds
def test_a_retry_writes_once(client: tasklib.Client, config: tasklib.Config, conn: Conn, kind: Kind) -> None:
    """Of three attempts one is left."""

    def fail_twice() -> None:
        if tasklib.current_task().attempt < 3:
            raise ValueError

    write = write_in(kind, fail_twice, backoff=tasklib.Fixed(0))
    with running(config):
        task = wait_final(client, client.submit(write.new(1)))
    assert (task.state, task.attempt) == ("completed", 3)
    assert count(conn) == 1


def test_the_task_may_not_commit_by_itself(client: tasklib.Client, config: tasklib.Config, conn: Conn) -> None:
    """Psycopg's own words say why."""

    @tasklib.task(max_retries=0)
    def hasty() -> None:
        tasklib.current_task().connection.execute("insert into effects values (null, 1)")
        tasklib.current_task().connection.commit()

    with running(config):
        task = wait_final(client, client.submit_task(hasty))
    assert task.error is not None
    assert "Explicit commit() forbidden" in task.error
    assert count(conn) == 0


def test_an_error_that_was_swallowed_is_told(client: tasklib.Client, config: tasklib.Config, conn: Conn) -> None:
    """PostgreSQL has given up the transaction: to complete the task would be a lie."""

    @tasklib.task(max_retries=0)
    def careless() -> None:
        connection = tasklib.current_task().connection
        connection.execute("insert into effects values (null, 1)")
        try:
            connection.execute("select 1 / 0")
        except psycopg.Error:
            return

    @tasklib.task
    def careful() -> None:
        connection = tasklib.current_task().connection
        connection.execute("insert into effects values (null, 2)")
        with pytest.raises(psycopg.Error), connection.transaction():
            connection.execute("select 1 / 0")

    with running(config):
        failed = wait_final(client, client.submit_task(careless))
        completed = wait_final(client, client.submit_task(careful))
    assert failed.error is not None
    assert "PostgreSQL has aborted the transaction" in failed.error
    assert failed.error_code == "TRANSACTION_SPOILT"
    assert completed.state == "completed"
    assert conn.execute("select n from effects").fetchall() == [(2,)]


@pytest.mark.parametrize("end", ["commit", "rollback", "rollback; insert into effects values (null, 2)"])
def test_the_end_of_the_transaction_in_raw_sql_is_told(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, end: str
) -> None:
    """Psycopg does not see it; what is written afterwards would be another transaction."""

    @tasklib.task(max_retries=0)
    def sly() -> None:
        tasklib.current_task().connection.execute("insert into effects values (null, 1)")
        for each in end.split("; "):
            tasklib.current_task().connection.execute(each.encode())

    with running(config):
        task = wait_final(client, client.submit_task(sly))
    assert (task.state, task.error_code) == ("failed", "TRANSACTION_SPOILT")
    assert task.error is not None
    assert "COMMIT or ROLLBACK" in task.error
    assert count(conn) == (1 if end == "commit" else 0)


@kinds
def test_a_task_that_closes_its_connection_fails(client: tasklib.Client, config: tasklib.Config, kind: Kind) -> None:
    """And is not run again and again at no cost."""
    if kind == "sync":

        @tasklib.task(name="close", max_retries=0)
        def close() -> None:
            tasklib.current_task().connection.close()
    else:

        @tasklib.task(name="close", max_retries=0)
        async def close_async() -> None:
            await (await tasklib.current_task().async_connection()).close()

    with running(config):
        task = wait_final(client, client.submit_task("close"))
    assert (task.state, task.error_code, task.attempt) == ("failed", "TRANSACTION_SPOILT", 1)


LEFT_OPEN: dict[str, str] = {
    "stream": "current_task().connection was still in use",
    "copy": "current_task().connection was still in use",
    "pipeline": "a pipeline of current_task().connection was still open",
}


@kinds
@pytest.mark.parametrize("how", LEFT_OPEN)
def test_what_is_left_open_fails_the_task(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, kind: Kind, how: str
) -> None:
    """A stream or a COPY holds psycopg's lock for ever. The slot is free again, the task's locks are gone, and the
    error says what to do.
    """
    kept: list[Any] = []
    sql = "insert into effects values (null, 1)"
    series = "select * from generate_series(1, 3)"

    def leave_open() -> None:
        connection = tasklib.current_task().connection
        connection.execute(sql)
        opened: Any = {
            "stream": lambda: connection.cursor().stream(series),
            "copy": lambda: connection.cursor().copy("copy effects from stdin"),
            "pipeline": connection.pipeline,
        }[how]()
        next(opened) if how == "stream" else opened.__enter__()
        kept.append(opened)

    async def leave_open_async() -> None:
        connection = await tasklib.current_task().async_connection()
        await connection.execute(sql)
        opened: Any = {
            "stream": lambda: connection.cursor().stream(series),
            "copy": lambda: connection.cursor().copy("copy effects from stdin"),
            "pipeline": connection.pipeline,
        }[how]()
        await (anext(opened) if how == "stream" else opened.__aenter__())
        kept.append(opened)

    tasklib.task(name="leave_open", max_retries=0)(leave_open if kind == "sync" else leave_open_async)
    write = write_in(kind)
    with running(config, concurrency=1):
        task = wait_final(client, client.submit_task("leave_open"))
        assert wait_final(client, client.submit(write.new(2))).state == "completed", "the slot is free"
        conn.execute("set lock_timeout = '20s'; lock table effects in access exclusive mode; reset lock_timeout")
    assert (task.state, task.error_code, task.attempt) == ("failed", "TRANSACTION_SPOILT", 1)
    assert task.error is not None
    assert LEFT_OPEN[how] in task.error
    for opened in kept if kind == "sync" else ():  # a loop closes its own, the collector complains
        with contextlib.suppress(psycopg.Error):
            opened.close() if how == "stream" else opened.__exit__(None, None, None)
    assert conn.execute("select n from effects").fetchall() == [(2,)]


def test_a_thread_that_keeps_the_connection_busy_does_not_keep_the_slot(
    client: tasklib.Client, config: tasklib.Config, conn: Conn
) -> None:
    """For longer than an answer may take: the end has its deadline, and the query is cancelled. It is the thread itself
    that closes the connection: under it, that crashed the process.
    """
    ended: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    @tasklib.task(max_retries=0)
    def leaves_a_thread() -> None:
        connection = tasklib.current_task().connection

        def sleep() -> None:
            try:
                connection.execute("select pg_sleep(600)")
            except psycopg.Error as error:
                ended.put(error)

        threading.Thread(target=sleep, daemon=True).start()
        wait_until(connection.lock.locked, "the connection to be busy")
        run_of(worker).transactions._seconds = 0.5  # for the end alone: a slow server has more time for the rest

    with running(config) as worker:
        task = wait_final(client, client.submit_task(leaves_a_thread))
    assert (task.state, task.error_code) == ("failed", "TRANSACTION_SPOILT")
    assert isinstance(ended.get(timeout=20), DeadlinePassed), "the thread has found out by itself"


@kinds
@pytest.mark.parametrize("how", ["delete from {0}", "update {0} set fencing_token = fencing_token + 1"])
def test_a_task_that_changes_its_own_row_fails(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, kind: Kind, how: str
) -> None:
    """It holds the task still, once that is rolled back: it would run again and again at no cost."""
    sql = f"{how.format('tasklib.tasks')} where id = %s".encode()

    def spoil() -> None:
        tasklib.current_task().connection.execute(sql, [tasklib.current_task().id])

    async def spoil_async() -> None:
        await (await tasklib.current_task().async_connection()).execute(sql, [tasklib.current_task().id])

    tasklib.task(name="spoil", max_retries=0)(spoil if kind == "sync" else spoil_async)
    with running(config):
        task = wait_final(client, client.submit_task("spoil"))
    assert (task.state, task.error_code, task.attempt) == ("failed", "TRANSACTION_SPOILT", 1)
    assert task.error is not None
    assert "its own row" in task.error


@kinds
def test_an_encoding_that_cannot_write_the_result_fails_the_task(
    client: tasklib.Client, config: tasklib.Config, kind: Kind
) -> None:
    """It would fail the next time, too."""

    def speak() -> str:
        tasklib.current_task().connection.execute("set client_encoding to latin1")
        return "\N{GRINNING FACE}"

    async def speak_async() -> str:
        await (await tasklib.current_task().async_connection()).execute("set client_encoding to latin1")
        return "\N{GRINNING FACE}"

    tasklib.task(name="speak", max_retries=0)(speak if kind == "sync" else speak_async)
    with running(config):
        task = wait_final(client, client.submit_task("speak"))
    assert (task.state, task.error_code, task.attempt) == ("failed", "TRANSACTION_SPOILT", 1)
    assert task.error is not None
    assert "client_encoding" in task.error


@pytest.mark.direct("what is set for a session stays with a pooler's connection")
@kinds
def test_the_tasks_settings_are_its_own_business(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, kind: Kind
) -> None:
    """RESET ALL, and a role that may not complete the task. Deferred triggers run with the task's role."""
    conn.execute(
        """create role effects_writer; grant insert on effects to effects_writer; create table seen (role text);
           grant insert on seen to effects_writer;
           create function note_role() returns trigger language plpgsql as $$
           begin insert into public.seen values (current_user); return null; end $$;
           create constraint trigger late after insert on effects deferrable initially deferred
               for each row execute function note_role()"""
    )
    sql = b"reset all; set role effects_writer; insert into public.effects values (null, 1)"

    def reset() -> None:
        tasklib.current_task().connection.execute(sql)

    async def reset_async() -> None:
        await (await tasklib.current_task().async_connection()).execute(sql)

    tasklib.task(name="reset", max_retries=0)(reset if kind == "sync" else reset_async)
    try:
        with running(config):
            task = wait_final(client, client.submit_task("reset"))
        assert (task.state, task.error) == ("completed", None)
        assert count(conn) == 1
        assert conn.execute("select role from seen").fetchall() == [("effects_writer",)]
    finally:
        conn.execute("drop function note_role cascade; drop table seen; drop owned by effects_writer")
        conn.execute("drop role effects_writer")


def test_a_connection_that_always_breaks_is_the_tasks_own_fault(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first it costs nothing: a server may have been restarted. Not for ever, and not without a pause."""
    monkeypatch.setattr(outcomes, "LONGEST_DELAY_SECONDS", 0.01)

    @tasklib.task(max_retries=0)
    def breaking() -> None:
        row = tasklib.current_task().connection.execute("select pg_backend_pid()").fetchone()
        assert row is not None
        conn.execute("select pg_terminate_backend(%s)", [row[0]])
        gone = "select from pg_stat_activity where pid = %s"
        wait_until(lambda: conn.execute(gone, [row[0]]).fetchone() is None, "its end")

    with running(config):
        task = wait_final(client, client.submit_task(breaking), seconds=60)
    assert task.state == "failed"
    assert task.attempt == MOST_FREE_RUNS + 1


def test_two_that_ask_at_once_get_one_transaction(client: tasklib.Client, config: tasklib.Config, conn: Conn) -> None:
    """In an async function, and in the threads of a sync one."""

    async def insert(n: int) -> None:
        connection = await tasklib.current_task().async_connection()
        await connection.execute("insert into effects values (null, %s)", [n])

    @tasklib.task
    async def gathers() -> None:
        await asyncio.gather(*(insert(n) for n in range(5)))

    @tasklib.task
    def threads() -> None:
        current, together = tasklib.current_task(), threading.Barrier(5)

        def insert_here(n: int) -> None:
            together.wait(20)
            current.connection.execute("insert into effects values (null, %s)", [n])

        with ThreadPoolExecutor(5) as pool:
            list(pool.map(insert_here, range(5)))

    with running(config):
        for done, name in enumerate(("gathers", "threads"), start=1):
            assert wait_final(client, client.submit_task(name)).state == "completed"
            assert count(conn) == 5 * done


@kinds
def test_the_tasks_rules_hold_at_commit(client: tasklib.Client, config: tasklib.Config, conn: Conn, kind: Kind) -> None:
    """What is not to be retried is not, and its code is the task's own."""
    conn.execute(
        "alter table effects add unique (n) deferrable initially deferred; insert into effects values (null, 1)"
    )
    unique = psycopg.errors.UniqueViolation
    write = write_in(kind, no_retry_on=[unique], error_codes={unique: "DUP"}, max_retries=3)
    with running(config):
        task = wait_final(client, client.submit(write.new(1)))
    assert (task.state, task.error_code, task.attempt) == ("failed", "DUP", 1)


@kinds
def test_what_commit_refuses_fails_the_task(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, kind: Kind
) -> None:
    """A deferred constraint speaks at COMMIT."""
    conn.execute(
        "alter table effects add unique (n) deferrable initially deferred; insert into effects values (null, 1)"
    )
    write = write_in(kind, max_retries=0)
    with running(config):
        task = wait_final(client, client.submit(write.new(1)))
    assert (task.state, task.error_code) == ("failed", "UniqueViolation")
    assert count(conn) == 1


@kinds
def test_who_has_lost_its_lease_writes_nothing(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, kind: Kind
) -> None:
    """Another worker has the task by now: completion and writes are both refused."""
    steal = "update tasklib.tasks set fencing_token = fencing_token + 1 where id = %s"
    stolen = threading.Event()

    def lose() -> None:
        if not stolen.is_set():
            conn.execute(steal, [tasklib.current_task().id])
            stolen.set()

    write = write_in(kind, lose)
    with running(config):
        task_id = client.submit(write.new(1))
        assert stolen.wait(20)
    assert count(conn) == 0
    assert get(client, task_id).completed_at is None


@pytest.mark.direct("compares backends, which a pooler shares out")
@kinds
def test_each_task_has_a_connection_of_its_own(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, kind: Kind
) -> None:
    """Clean, and closed with the task: what one has set, or has left running, does not reach another."""
    backends: list[Any] = []

    def note(row: Any) -> None:
        assert isinstance(row, tuple)
        backends.append(row[0])

    query = "select pg_backend_pid() as pid"
    if kind == "sync":

        @tasklib.task(name="job")
        def job() -> None:
            connection = tasklib.current_task().connection
            note(connection.execute(query).fetchone())
            connection.row_factory = dict_row
            assert tasklib.current_task().connection is connection
    else:

        @tasklib.task(name="job")
        async def job_async() -> None:
            connection = await tasklib.current_task().async_connection()
            note(await (await connection.execute(query)).fetchone())
            connection.row_factory = dict_row
            assert await tasklib.current_task().async_connection() is connection

    with running(config):
        for _ in range(3):
            assert wait_final(client, client.submit_task("job")).state == "completed"
        opened = "select from pg_stat_activity where application_name = 'tasklib:task' and datname = current_database()"
        wait_until(lambda: conn.execute(opened).fetchone() is None, "the connections to be closed")
    assert len(set(backends)) == 3


def test_sync_and_async_are_told_apart(client: tasklib.Client, config: tasklib.Config) -> None:
    """An error that names the other one."""

    @tasklib.task(max_retries=0)
    async def confused() -> None:
        tasklib.current_task().connection.execute("select 1")

    @tasklib.task(max_retries=0)
    def puzzled() -> None:
        coroutine = tasklib.current_task().async_connection()
        coroutine.send(None)

    with running(config, concurrency=2):
        for function, hint in (
            (confused, "await current_task().async_connection()"),
            (puzzled, "current_task().connection"),
        ):
            task = wait_final(client, client.submit_task(function))
            assert task.error is not None
            assert hint in task.error


@kinds
def test_a_timeout_in_mid_query_rolls_back(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, kind: Kind
) -> None:
    """And the query does not go on in the server."""
    sleep = "insert into effects select null, 1 from pg_sleep(60)"
    if kind == "sync":

        @tasklib.task(name="slow", max_retries=0, timeout_seconds=0.3)
        def slow() -> None:
            tasklib.current_task().connection.execute(sleep)
    else:

        @tasklib.task(name="slow", max_retries=0, timeout_seconds=0.3)
        async def slow_async() -> None:
            await (await tasklib.current_task().async_connection()).execute(sleep)

    with running(config):
        task = wait_final(client, client.submit_task("slow"))
        assert (task.state, task.error_code) == ("failed", "TIMEOUT")
        running_query = "select from pg_stat_activity where query like 'insert into effects%' and state = 'active'"
        wait_until(lambda: conn.execute(running_query).fetchone() is None, "the query to end")
    assert count(conn) == 0


@kinds
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_commit_is_found_out(database_url: str, conn: Conn, tmp_path: Path, kind: Kind, when: Fate) -> None:
    """The connection is cut before COMMIT reaches the server, or before its answer comes back: the work is done again
    in the first case, and not in the second. Effects and completions agree.
    """
    with CuttingProxy(database_url, tmp_path) as proxy:
        config = tasklib.Config(proxy.url)
        write = write_in(kind, lambda: proxy.cut_at_commit(when) if proxy.cuts == 0 else None)
        with tasklib.Client(tasklib.Config(database_url)) as client, running(config):
            task = wait_final(client, client.submit(write.new(1)), seconds=40)
    assert proxy.cuts == 1
    assert task.state == "completed"
    assert task.attempt == (2 if when == "before" else 1)
    assert task.retry_count == 0, "it was not the task's fault"
    assert count(conn) == 1


def test_a_child_is_submitted_with_the_work(
    app: None, client: tasklib.Client, config: tasklib.Config, conn: Conn
) -> None:
    """On the same connection: all or nothing."""
    child = tasklib.task(name="child", queue="elsewhere")(lambda: None)

    @tasklib.task(backoff=tasklib.Fixed(0))
    def parent() -> None:
        current = tasklib.current_task()
        child.options(connection=current.connection).submit_sync()
        if current.attempt == 1:
            raise ValueError

    with running(config, queues=["default"]):
        parent_id = client.submit_task(parent)
        wait_final(client, parent_id)
    assert [task.parent_id for task in client.list_tasks(name="child")] == [parent_id]


def test_children_may_be_submitted_from_several_threads(
    client: tasklib.Client, config: tasklib.Config, conn: Conn
) -> None:
    """On the task's own connection they go one after the other, and are committed with it."""
    child = tasklib.task(name="child")(lambda: None)

    @tasklib.task(max_retries=0)
    def parent() -> None:
        own = tasklib.current_task().connection
        with ThreadPoolExecutor(4) as pool:
            for each in [pool.submit(client.submit, child.new(), connection=own) for _ in range(12)]:
                each.result()

    task_id = client.submit_task(parent)
    tasklib.TaskWorker(config, tasks=[parent]).run_until_empty_sync()
    assert get(client, task_id).error is None
    assert conn.execute("select count(*) from tasklib.tasks where name = 'child'").fetchone() == (12,)


def test_the_connection_ends_with_the_task(client: tasklib.Client, config: tasklib.Config) -> None:
    """What a task left running finds a closed door."""
    kept: list[tasklib.CurrentTask] = []
    tasklib.task(name="job")(lambda: kept.append(tasklib.current_task()))
    with running(config):
        wait_final(client, client.submit_task("job"))
        with pytest.raises(tasklib.NoCurrentTask, match="has ended"):
            kept[0].connection.execute("select 1")
        kept[0].progress(1)
