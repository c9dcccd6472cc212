"""Connections: lost, cut, stopped, forked, shared between threads and loops. Nothing is lost, nothing done twice."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import tasklib
from tasklib import embedded, migrate, sending
from tasklib.connection import DeadlinePassed
from tasklib.database import _Attempt
from tasklib.pools import LoopPool
from tests.support.proxy import CuttingProxy
from tests.support.raw_sql import literal
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.raw_sql import Conn, NewDatabase

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def migrated_url(new_database: NewDatabase) -> str:
    """A database of this module's own: its tests look for the backends of their clients."""
    url = new_database()
    migrate.migrate(tasklib.Config(url))
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("create view ours as select * from pg_stat_activity where datname = current_database()")
    return url


@pytest.fixture
def task() -> tasklib.TaskFunction[[int], None]:
    @tasklib.task
    def count(n: int) -> None: ...

    return count


def count_tasks(conn: Conn) -> int:
    row = conn.execute("select count(*) from tasklib.tasks").fetchone()
    assert row is not None
    return int(row[0])


def test_a_terminated_connection_is_replaced(client: tasklib.Client, conn: Conn, task: Any) -> None:
    """An administrator's pg_terminate_backend costs the caller nothing."""
    client.submit(task.new(0))
    conn.execute("select pg_terminate_backend(pid) from ours where application_name = 'tasklib'")
    client.submit(task.new(1))
    assert count_tasks(conn) == 2


async def test_a_terminated_connection_is_replaced_async(
    async_client: tasklib.AsyncClient, conn: Conn, task: Any
) -> None:
    """The same over the async pool."""
    await async_client.submit(task.new(0))
    conn.execute("select pg_terminate_backend(pid) from ours where application_name = 'tasklib'")
    await async_client.submit(task.new(1))
    assert count_tasks(conn) == 2


def test_a_lost_answer_is_asked_for_again(database_url: str, conn: Conn, task: Any, tmp_path: Path) -> None:
    """The commit happened, its answer was lost: the submit is repeated with its id, and meets its own row."""
    with CuttingProxy(database_url, tmp_path) as proxy, tasklib.Client(tasklib.Config(proxy.url)) as client:
        client.submit(task.new(0))
        proxy.cut()
        task_id = client.submit(task.options(idempotency_key="k").new(1))
        assert proxy.cuts == 1
        assert not task_id.existed
        proxy.cut()
        many = client.submit_many([task.options(idempotency_key=f"k{n}").new(n) for n in range(3)])
        assert proxy.cuts == 2
        assert [made.existed for made in many] == [False] * 3
    assert count_tasks(conn) == 5


async def test_a_lost_answer_is_asked_for_again_async(database_url: str, conn: Conn, task: Any, tmp_path: Path) -> None:
    """The same over the async pool."""
    with CuttingProxy(database_url, tmp_path) as proxy:
        async with tasklib.AsyncClient(tasklib.Config(proxy.url)) as client:
            await client.submit(task.new(0))
            proxy.cut()
            assert not (await client.submit(task.new(1))).existed
            assert proxy.cuts == 1
    assert count_tasks(conn) == 2


@pytest.mark.direct("counts backends, which a pooler keeps")
def test_a_loop_that_ends_leaves_no_connection(config: tasklib.Config, conn: Conn, task: Any) -> None:
    """Also if nobody says so: neither in the pool nor kept at hand."""
    client = tasklib.AsyncClient(config)
    opened = "select from ours where application_name = 'tasklib'"

    async def submit() -> None:
        await asyncio.gather(*(client.submit(task.new(n)) for n in range(5)))
        assert conn.execute(opened).fetchone() is not None

    for _ in range(2):
        asyncio.run(submit())
        wait_until(lambda: conn.execute(opened).fetchone() is None, "all to be closed")


@pytest.mark.direct("counts backends, which a pooler keeps")
async def test_a_client_that_is_forgotten_keeps_no_connection_beyond_its_loop(
    config: tasklib.Config, task: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What its pool has open ends in order, with the loop: the collector does not take it half away before that.
    (Connections that are left are looked for after every test.)
    """
    client = tasklib.AsyncClient(config)
    await asyncio.gather(*(client.submit(task.new(n)) for n in range(5)))
    del client
    gc.collect()
    await asyncio.sleep(0)  # a generator that the collector has found would be closed now
    gc.collect()
    assert not [each for each in caplog.records if each.name == "asyncio"]


def test_a_pool_of_dead_connections_costs_no_time(
    config: tasklib.Config, conn: Conn, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart every idle connection is dead; the next call goes through them without a pause."""
    with tasklib.Client(config) as client, ThreadPoolExecutor(10) as pool:
        together = threading.Barrier(10)
        client.list_tasks()
        list(pool.map(lambda n: (together.wait(timeout=20), client.submit(task.new(n))), range(10)))
        conn.execute("select pg_terminate_backend(pid) from ours where application_name = 'tasklib'")
        pauses: list[float] = []
        pause_after = _Attempt.pause_after

        def noted(attempt: _Attempt, error: psycopg.Error, pool: Mapping[str, int]) -> float:
            pauses.append(pause_after(attempt, error, pool))
            return pauses[-1]

        monkeypatch.setattr(_Attempt, "pause_after", noted)
        client.submit(task.new(11))
        assert set(pauses) == {0.0}


@pytest.mark.direct("sets options, which PgBouncer refuses")
def test_an_idle_session_that_was_ended_is_replaced(config: tasklib.Config, conn: Conn, task: Any) -> None:
    """idle_session_timeout is a common setting."""
    timed = make_conninfo(config.database_url, options="-c idle_session_timeout=100ms")
    ended = "select count(*) from ours where application_name = 'tasklib'"
    with tasklib.Client(tasklib.Config(timed)) as client:
        client.submit(task.new(0))
        wait_until(lambda: conn.execute(ended).fetchone() == (0,), "the session's end")
        client.submit(task.new(1))
    assert count_tasks(conn) == 2


def test_somebody_elses_warning_is_no_doubt(new_database: NewDatabase, task: Any) -> None:
    """A trigger that warns, or the server's own advice, does not make a commit uncertain."""
    url = new_database()
    with tasklib.Client(tasklib.Config(url)) as client:
        client.list_tasks()
        with psycopg.connect(url, autocommit=True) as admin:
            admin.execute(
                """create function warn() returns trigger language plpgsql
                   as $$ begin raise warning 'mind the gap'; return null; end $$"""
            )
            admin.execute("create trigger warn after insert on tasklib.tasks execute function warn()")
        assert client.submit(task.new(1)).version == 7


def test_a_row_that_something_else_refuses_is_not_tried_for_ever(new_database: NewDatabase, task: Any) -> None:
    """A unique index that is not ours swallows the insert, and there is no earlier task to point to."""
    url = new_database()
    with tasklib.Client(tasklib.Config(url)) as client:
        client.submit(task.new(1))
        with psycopg.connect(url, autocommit=True) as admin:
            admin.execute("create unique index foreign_rule on tasklib.tasks (name)")
        with pytest.raises(tasklib.InvalidOptions, match="not tasklib's"):
            client.submit(task.new(2))


def gives_up_while_it_waits(client: tasklib.Client, task: Any) -> None:
    """On a slow machine the short deadline may pass before anything was sent: then it is tried again."""

    def is_unknown() -> bool:
        with pytest.raises(tasklib.DatabaseUnavailable) as gave_up:
            client.submit(task)
        assert not isinstance(gave_up.value, tasklib.CommitUnknown) or "may have happened" in str(gave_up.value)
        return isinstance(gave_up.value, tasklib.CommitUnknown)

    wait_until(is_unknown, "a submit that is given up while it waits")


def test_a_deadline_stops_the_server_too(database_url: str, conn: Conn, task: Any) -> None:
    """What nobody waits for any more must not go on, or backends pile up beyond the pool's size."""
    config = tasklib.Config(database_url, database_timeout_seconds=0.3, pool_size=2)
    active = "select count(*) from ours where application_name = 'tasklib' and state = 'active'"
    with tasklib.Client(config) as client, psycopg.connect(database_url) as holder:
        client.submit(task.options(idempotency_key="held").new(1), connection=holder)
        for _ in range(3):
            gives_up_while_it_waits(client, task.options(idempotency_key="held").new(1))
        wait_until(lambda: conn.execute(active).fetchone() == (0,), "the backends to stop")
        holder.rollback()


def test_a_restarted_server_is_waited_for(open_directory: Path, task: Any) -> None:
    """A submit that begins while PostgreSQL is away succeeds when it is back, within the deadline."""
    with embedded.postgres(directory=open_directory / "data") as server:
        client = tasklib.Client(tasklib.Config(server.dsn, database_timeout_seconds=30))
        client.submit(task.new(0))
        server.stop()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.submit, task.new(1))
            with embedded.postgres(directory=open_directory / "data"):
                assert not waiting.result(timeout=30).existed
                assert len(client.list_tasks()) == 2
                client.close()


def test_waiting_has_an_end(database_url: str, conn: Conn, task: Any) -> None:
    """A submit that waits for another transaction's key gives up at its deadline, and says what is not known."""
    config = tasklib.Config(database_url, database_timeout_seconds=0.5)
    new = task.options(idempotency_key="held").new(1)
    with tasklib.Client(config) as client, psycopg.connect(database_url) as holder:
        client.submit(new, connection=holder)
        gives_up_while_it_waits(client, task.options(idempotency_key="held").new(1))
        holder.rollback()


async def test_waiting_has_an_end_async(database_url: str, task: Any) -> None:
    """The same over the async client."""
    config = tasklib.Config(database_url, database_timeout_seconds=0.5)
    async with tasklib.AsyncClient(config) as client, await psycopg.AsyncConnection.connect(database_url) as holder:
        await client.submit(task.options(idempotency_key="held").new(1), connection=holder)
        ends: list[type[Exception]] = []
        while tasklib.CommitUnknown not in ends:  # a short deadline may pass before anything was sent
            assert len(ends) < 10
            with pytest.raises(tasklib.DatabaseUnavailable) as gave_up:
                await client.submit(task.options(idempotency_key="held").new(1))
            ends.append(type(gave_up.value))
        await holder.rollback()


def can_look(client: tasklib.Client) -> bool:
    try:
        client.list_tasks()
    except tasklib.DatabaseUnavailable:
        return False
    return True


@pytest.mark.direct("stops the backend of the client's own connection")
@pytest.mark.parametrize("is_change", [True, False])
def test_a_silent_server_does_not_hang_the_caller(database_url: str, conn: Conn, task: Any, is_change: bool) -> None:
    """A backend that is stopped, or a host that vanished, sends nothing at all; a read knows that nothing changed."""
    config = tasklib.Config(database_url, database_timeout_seconds=0.5, pool_size=1)
    client = tasklib.Client(config)
    wait_until(functools.partial(can_look, client), "its connection")
    row = conn.execute("select pid from ours where application_name = 'tasklib'").fetchone()
    assert row is not None
    os.kill(row[0], signal.SIGSTOP)
    try:
        with pytest.raises(tasklib.DatabaseUnavailable) as gave_up:
            client.submit(task.new(1)) if is_change else client.list_tasks()
        assert isinstance(gave_up.value.__cause__, DeadlinePassed)
        assert isinstance(gave_up.value, tasklib.CommitUnknown) is is_change
    finally:
        os.kill(row[0], signal.SIGCONT)
        client.close()


def test_a_doubtful_commit_is_not_called_a_success(tmp_path: Path, task: Any) -> None:
    """Cancelled while it waits for a synchronous standby, PostgreSQL answers "done" with a mere warning.

    The caller is told that it is not known; submitting the same task again, when the standby is no more asked for,
    settles it: one row.
    """
    with (
        embedded.postgres() as server,
        psycopg.connect(server.dsn, autocommit=True) as admin,
        tasklib.Client(tasklib.Config(server.dsn)) as client,
    ):
        client.list_tasks()
        require_standby(admin, "nobody")
        new = task.new(1)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.submit, new)
            wait_until(lambda: cancel_waiting_for_standby(admin), "a backend that waits for its standby")
            assert isinstance(waiting.exception(timeout=20), tasklib.CommitUnknown)
        require_standby(admin, "")
        assert client.submit(new) == new.id
        assert len(client.list_tasks()) == 1


def require_standby(admin: Conn, name: str) -> None:
    admin.execute(literal(f"alter system set synchronous_standby_names = '{name}'"))
    admin.execute("set synchronous_commit = local")
    admin.execute("select pg_reload_conf()")
    wait_until(lambda: admin.execute("show synchronous_standby_names").fetchone() == (name,), "the setting")


def cancel_waiting_for_standby(admin: Conn) -> bool:
    found = admin.execute("select pg_cancel_backend(pid) from pg_stat_activity where wait_event = 'SyncRep'").fetchall()
    return bool(found)


@pytest.mark.parametrize(
    "change",
    [{"host": "127.0.0.1", "port": "1"}, {"dbname": "no_such_database"}, {"user": "no_such_role"}],
)
def test_a_wrong_url_fails_at_once_and_keeps_the_password(database_url: str, change: dict[str, str]) -> None:
    """Not after the deadline, not in psycopg's words, and without the secret."""
    url = make_conninfo(database_url, password="S3CR3T", **change)
    with tasklib.Client(tasklib.Config(url)) as client, pytest.raises(tasklib.DatabaseUnavailable) as refused:
        client.submit_task("a")
    assert str(refused.value).startswith("PostgreSQL cannot be reached"), "what the deadline ends has another message"
    assert "S3CR3T" not in str(refused.value)


@pytest.mark.direct("counts backends, which a pooler shares out")
def test_connections_stay_within_the_pool(config: tasklib.Config, conn: Conn, task: Any) -> None:
    """A hundred threads share what Config.pool_size allows."""
    small = tasklib.Config(config.database_url, pool_size=3)
    most = 0
    stop = threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.is_set():
            row = conn.execute("select count(*) from ours where application_name = 'tasklib'").fetchone()
            most = max(most, row[0] if row else 0)

    with tasklib.Client(small) as client:
        client.list_tasks()
        watcher = threading.Thread(target=watch)
        watcher.start()
        with ThreadPoolExecutor(30) as pool:
            list(pool.map(lambda n: client.submit(task.new(n)), range(300)))
        stop.set()
        watcher.join()
    assert 1 <= most <= 3
    assert count_tasks(conn) == 300


SCRIPT_HEAD = """
import asyncio, os, sys, tasklib
tasklib.init(tasklib.Config(sys.argv[1]))

@tasklib.task
def ping(n: int) -> None: ...
"""
TWO_LOOPS = """
import logging
logging.disable(logging.WARNING)   # a sync call on the loop is told of, and works
async def one(n):
    await ping.submit(n)
    assert tasklib.get_task(await ping.submit(n)) is not None   # sync, inside the running loop
asyncio.run(one(1))
asyncio.run(one(2))
"""
FORK = """
ping.submit_sync(0)
asyncio.run(ping.submit(0))
child = os.fork()
for n in range(50):   # both at once: a socket that they shared would mix their answers
    ping.submit_sync(n)
asyncio.run(ping.submit(0))
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert len(tasklib.list_tasks(limit=1000)) == 104
"""
FORK_IN_LOOP = """
async def main():
    await ping.submit(1)
    child = os.fork()
    if child == 0:
        ping.submit_sync(2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    await ping.submit(3)
    assert len(await tasklib.list_tasks_async()) == 3
asyncio.run(main())
"""


LOOPS_IN_THREADS = """
from concurrent.futures import ThreadPoolExecutor
def serve(n):
    async def several():
        await asyncio.gather(*(ping.submit(n) for _ in range(5)))
    asyncio.run(several())
    ping.submit_sync(n)
with ThreadPoolExecutor(4) as pool:
    list(pool.map(serve, range(12)))
assert len(tasklib.list_tasks(limit=1000)) == 72
"""
PREFORK = """
import collections
from concurrent.futures import ThreadPoolExecutor
def serve(n):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ping.submit_sync, range(8)))
    asyncio.run(ping.submit(n))
    sys.exit(0)   # what it inherited is finalized with it
ping.submit_sync(0)   # the application uses tasklib while it is loaded
for generation in range(2):   # and servers that have ended are replaced
    children = []
    for n in range(3):
        children.append(os.fork())
        if children[-1] == 0:
            serve(n)
    ping.submit_sync(1)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    ping.submit_sync(2)
    asyncio.run(ping.submit(3))
made = collections.Counter(task.kwargs["n"] for task in tasklib.list_tasks(limit=1000))
assert sum(made.values()) == 1 + 2 * (3 * 9 + 3), made
"""
MULTIPROCESSING = """
import multiprocessing

def child(n):
    ping.submit_sync(n)
    asyncio.run(ping.submit(n))

if __name__ == "__main__":
    ping.submit_sync(0)
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        children = [context.Process(target=child, args=[n]) for n in range(2)]
        for each in children:
            each.start()
        ping.submit_sync(1)
        for each in children:
            each.join()
        assert [each.exitcode for each in children] == [0, 0], method
    assert len(tasklib.list_tasks(limit=1000)) == 1 + 3 * (2 * 2 + 1)
"""
SCRIPTS = {
    "two loops": TWO_LOOPS,
    "loops in threads": LOOPS_IN_THREADS,
    "fork": FORK,
    "fork in a loop": FORK_IN_LOOP,
    "prefork": PREFORK,
    "multiprocessing": MULTIPROCESSING,
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_pools_belong_to_a_process_and_a_loop(new_database: NewDatabase, tmp_path: Path, script: str) -> None:
    """Preforking servers, several asyncio.run, pytest-asyncio: no inherited socket, no warning, nothing left open. In a
    database of its own: what a test before this has abandoned may still be committed.
    """
    (tmp_path / "script.py").write_text(SCRIPT_HEAD + script)
    command = [sys.executable, "-W", "error", "script.py", new_database()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.direct("sets options, which PgBouncer refuses")
def test_a_serialization_failure_is_tried_again(tmp_path: Path, database_url: str, conn: Conn, task: Any) -> None:
    """Where the database's default isolation is stricter, a conflict with a concurrent submit is nobody's business."""
    strict = make_conninfo(database_url, options="-c default_transaction_isolation=serializable")
    with psycopg.connect(database_url) as holder, tasklib.Client(tasklib.Config(strict)) as client:
        first = client.submit(task.options(idempotency_key="k").new(1), connection=holder)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.submit, task.options(idempotency_key="k").new(1))
            pids = "select pid from ours where application_name = 'tasklib' and wait_event_type = 'Lock'"
            wait_until(lambda: conn.execute(pids).fetchone() is not None, "the second submit to wait")
            holder.commit()
            found = waiting.result(timeout=20)
    assert (found, found.existed) == (first, True)


@pytest.mark.direct("prepares statements for the whole session")
async def test_a_submit_that_was_cancelled_while_it_was_prepared_spoils_no_connection(
    config: tasklib.Config, conn: Conn, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may have prepared it all the same: the next submit prepares its own."""
    really = sending._rows
    answers = []

    def read(*args: Any) -> Any:
        answers.append(args)
        if len(answers) == 1:
            raise asyncio.CancelledError  # the server has prepared it, and nobody takes note of that
        return really(*args)

    monkeypatch.setattr(sending, "_rows", read)
    async with tasklib.AsyncClient(config) as client:
        with pytest.raises(asyncio.CancelledError):
            await client.submit(task.new(1))
        for n in range(3):
            await client.submit(task.new(n))
    assert count_tasks(conn) == 3


REFUSE_AT_COMMIT = """
create function refuse() returns trigger language plpgsql as $$
begin raise exception 'not today' using errcode = '23514'; end $$;
create constraint trigger refuse after insert on tasklib.tasks deferrable initially deferred
    for each row execute function refuse()
"""


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_the_commit_refuses_is_told_in_our_words(new_database: NewDatabase, task: Any, kind: str) -> None:
    """The statement itself has succeeded by then: its rows come first, and the error after them."""
    config = tasklib.Config(new_database())
    migrate.migrate(config)

    async def submit() -> None:
        async with tasklib.AsyncClient(config) as client:
            await client.submit(task.new(1))

    with psycopg.connect(config.database_url, autocommit=True) as conn, tasklib.Client(config) as client:
        conn.execute(literal(REFUSE_AT_COMMIT))
        with pytest.raises(tasklib.InvalidOptions, match="not today"):
            client.submit(task.new(1)) if kind == "sync" else asyncio.run(submit())
        conn.execute("drop trigger refuse on tasklib.tasks")
        client.submit(task.new(1))
        assert count_tasks(conn) == 1


@pytest.mark.direct("prepares statements for the whole session")
def test_a_statement_that_somebody_has_deallocated_is_prepared_anew(
    config: tasklib.Config, conn: Conn, task: Any
) -> None:
    """One submit fails, and the next one does not."""
    with tasklib.Client(config) as client:
        client.submit(task.new(1))
        with client.database._process().pools.sync_pool().connection() as own:
            own.execute("deallocate all")
        with pytest.raises(tasklib.DatabaseError):
            client.submit(task.new(2))
        client.submit(task.new(3))
    assert count_tasks(conn) == 2


@pytest.mark.parametrize("is_acting", [True, False])
async def test_the_scheduler_of_a_pool_ends_when_it_is_cancelled(config: tasklib.Config, is_acting: bool) -> None:
    """During an action, and together with a new one. An event loop that ended in an outage waited for it for ever."""
    acts = asyncio.Event()

    async def act() -> None:
        acts.set()
        await asyncio.Event().wait()

    pool = LoopPool(config.database_url, 1, 1.0)
    await pool.opened()
    scheduler, runner = pool.pool._sched, pool.pool._sched_runner
    assert runner is not None
    await asyncio.sleep(0)  # it waits
    await scheduler.enter(0 if is_acting else 60, act)
    if is_acting:
        await acts.wait()
    runner.cancel()
    ended, _ = await asyncio.wait([runner], timeout=20)
    assert ended == {runner}
    await pool.close()
