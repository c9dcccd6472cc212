"""Behind PgBouncer in transaction mode, where every transaction may meet another server connection, and finds there
what the one before has left. Three server connections are shared by all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import tasklib
from tasklib import embedded, migrate
from tasklib.connection import BoundedAsyncConnection, BoundedConnection
from tasklib.connection_string import connection_string
from tasklib.database import Database
from tasklib.runtime.session import Session
from tasklib.statements import Statement
from tasklib.worker import listener
from tests.support.pooler import PROGRAM, WHY_NOT, pgbouncer
from tests.support.working import get, running, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tasklib.embedded import EmbeddedPostgres
    from tests.support.pooler import Pooler
    from tests.support.raw_sql import Conn, NewDatabase

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)

SERVER_CONNECTIONS = 3
MANY = 20  # more often than psycopg sends a statement before it prepares it


@pytest.fixture(scope="module")
def pooler(tasklib_postgres: EmbeddedPostgres) -> Iterator[Pooler]:
    with pgbouncer(tasklib_postgres.dsn, size=SERVER_CONNECTIONS) as made:
        yield made


@pytest.fixture
def direct_url(database_url: str, direct: Callable[[str], str]) -> str:
    return direct(database_url)


@pytest.fixture
def url(direct_url: str, pooler: Pooler) -> str:
    return pooler.pooled(direct_url)


@pytest.fixture
def config(url: str) -> tasklib.Config:
    return tasklib.Config(url)


def held_servers(url: str) -> Iterator[Conn]:
    """All of the pooler's server connections, each held by a transaction."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(psycopg.connect(url, prepare_threshold=None)) for _ in range(SERVER_CONNECTIONS)]
        pids = {conn.execute("select pg_backend_pid()").fetchone() for conn in held}
        assert len(pids) == SERVER_CONNECTIONS
        yield from held


@pytest.fixture
def count() -> tasklib.TaskFunction[[int], int]:
    @tasklib.task
    def count(n: int) -> int:
        return n

    return count


# What a session could keep for the next client.
_STATE = """
select (select count(*) from pg_prepared_statements),
       (select count(*) from pg_listening_channels()),
       (select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()),
       current_setting('enable_seqscan'), current_setting('lock_timeout'), current_setting('search_path')
"""
CLEAN = (0, 0, 0, "on", "0", '"$user", public')


def test_a_pooler_is_known_by_the_process_id_that_it_makes_up(config: tasklib.Config, direct_url: str) -> None:
    """For every kind of connection that is ours; a direct one is known as such, and prepares what it repeats."""
    answer = Statement("select 1", (), list)
    for each, is_pooled in ((config, True), (tasklib.Config(direct_url), False)):
        database = Database(each)
        database.run(answer)
        with database._process().pools.sync_pool().connection() as sync:
            assert (sync.is_pooled, sync.prepare_threshold is None) == (is_pooled, is_pooled)
        database.close()
        assert asyncio.run(pooled_async(each)) == (is_pooled, is_pooled)
        with contextlib.closing(Session(each, "test")) as session:
            assert session.is_pooled is is_pooled
            assert (session.connection().prepare_threshold is None) is is_pooled


async def pooled_async(config: tasklib.Config) -> tuple[bool, bool]:
    database = Database(config)
    pool = (await database._process().pools.loop_pool()).pool
    async with pool.connection() as conn:
        found = conn.is_pooled, conn.prepare_threshold is None
    await database.close_async()
    return found


def test_every_way_to_submit(config: tasklib.Config, url: str, conn: Conn, count: Any) -> None:
    """Sync, async, bulk, with a key, on the caller's connection: from many threads, again and again."""

    def submit(n: int) -> None:
        client.submit(count.new(n))
        first = client.submit(count.options(idempotency_key=f"{n}").new(n))
        again = client.submit(count.options(idempotency_key=f"{n}").new(n))
        assert (again, again.existed) == (first, True)
        assert len(client.submit_many([count.new(k) for k in range(3)])) == 3
        assert client.get_task(first) is not None
        with psycopg.connect(url, prepare_threshold=None) as mine:
            client.submit(count.new(n), connection=mine)
            mine.rollback()
            client.submit(count.new(n), connection=mine)

    async def submit_async() -> None:
        async with tasklib.AsyncClient(config) as client:
            await asyncio.gather(*(client.submit(count.new(n)) for n in range(MANY)))
            await client.submit_many([count.new(n) for n in range(2_500)])  # several statements, one transaction

    with tasklib.Client(config) as client, ThreadPoolExecutor(8) as pool:
        list(pool.map(submit, range(MANY)))
    asyncio.run(submit_async())
    assert conn.execute("select count(*) from tasklib.tasks").fetchone() == (MANY * 6 + MANY + 2_500,)


def test_a_worker_does_all_of_its_work(config: tasklib.Config, client: tasklib.Client, count: Any) -> None:
    """It drains, retries, promotes what was delayed, cancels what executes, and marks what lasts."""
    began = threading.Event()
    failed: list[int] = []

    @tasklib.task(max_retries=1, backoff=tasklib.Fixed(0.05))
    def second_time_lucky() -> str:
        failed.append(1)
        if len(failed) == 1:
            raise OSError("no")
        return "yes"

    @tasklib.task
    async def endless() -> None:
        began.set()
        await asyncio.sleep(60)

    ids = client.submit_many([count.new(n) for n in range(300)])
    with running(config, concurrency=4):
        lucky, stopped = client.submit(second_time_lucky.new()), client.submit(endless.new())
        delayed = client.submit(count.options(delay_seconds=0.3).new(7))
        assert began.wait(20)
        wait_until(lambda: get(client, stopped).state == "running", "it to be marked")
        client.cancel_task(stopped)
        states = {str(wait_final(client, each).state) for each in [*ids, lucky, delayed]}
        assert states == {"completed"}
        assert wait_final(client, stopped).state == "cancelled"
    assert get(client, lucky).attempt == 2


def test_a_tasks_own_connection(config: tasklib.Config, client: tasklib.Client, conn: Conn) -> None:
    """The same statement in one transaction after another, on connections that are used again: nothing is prepared."""
    conn.execute("create table if not exists effects (n int primary key)")
    conn.execute("truncate effects")

    @tasklib.task
    def write(n: int) -> None:
        tasklib.current_task().connection.execute("insert into effects values (%s)", [n])

    @tasklib.task
    async def write_async(n: int) -> None:
        await (await tasklib.current_task().async_connection()).execute("insert into effects values (%s)", [n])

    ids = client.submit_many([(write if n % 2 else write_async).new(n) for n in range(4 * MANY)])
    with running(config, concurrency=4):
        tasks = [wait_final(client, task_id) for task_id in ids]
    assert {(task.state, task.attempt) for task in tasks} == {("completed", 1)}
    assert conn.execute("select count(*) from effects").fetchone() == (4 * MANY,)
    conn.execute("drop table effects")


def test_nothing_is_left_in_a_session(config: tasklib.Config, url: str, client: tasklib.Client, count: Any) -> None:
    """After much work, no server connection has prepared statements, channels, advisory locks or settings of ours."""
    with running(config, concurrency=2):
        for n in range(MANY):
            wait_final(client, client.submit(count.new(n)))
    client.close()
    for server in held_servers(url):
        assert server.execute(_STATE).fetchone() == CLEAN


def test_a_session_has_its_settings_for_each_statement(config: tasklib.Config, url: str) -> None:
    """Whichever server connection answers, and only for that long: planner settings, lock_timeout, isolation."""
    shown = Statement(
        """select current_setting('enable_seqscan'), current_setting('lock_timeout'),
                  current_setting('transaction_isolation'), pg_backend_pid() where $1 > 0""",
        (1,),
        list,
    )
    seen = set()
    with contextlib.closing(Session(config, "test", settings="-c lock_timeout=1s")) as session:
        session.connection()
        for server in held_servers(url):
            server.rollback()  # the only one that is free
            (row,) = session.run(shown)
            assert row[:3] == ("off", "1s", "read committed")
            seen.add(row[3])
            assert server.execute(_STATE).fetchone() == CLEAN
    assert len(seen) == SERVER_CONNECTIONS


def test_nothing_is_sent_behind_the_end_of_a_transaction(config: tasklib.Config, tmp_path: Path) -> None:
    """PgBouncer would take it for the begin of the next one, and keep a server connection for it."""
    trace = tmp_path / "trace"
    with contextlib.closing(Session(config, "test")) as session, trace.open("w") as file:
        session.connection().pgconn.trace(file.fileno())
        assert session.run(Statement("select $1::int", (1,), list)) == [(1,)]
        session.connection().pgconn.untrace()
    messages = [line.split("\t") for line in trace.read_text().splitlines()]
    sent = [name for _, side, _, name, *_ in messages if side == "F"]
    assert sent[-2:] == ["Execute", "Sync"]


def test_a_refused_statement_leaves_no_transaction_open(config: tasklib.Config, client: tasklib.Client) -> None:
    """The error is the statement's own, and the next statement runs on the same connection."""
    with contextlib.closing(Session(config, "test", settings="-c lock_timeout=50ms")) as session:
        with pytest.raises(psycopg.errors.DivisionByZero):
            session.run(Statement("select 1 / $1::int", (0,), list))
        with psycopg.connect(config.database_url) as holder:
            holder.execute("lock table tasklib.tasks")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                session.run(Statement("select count(*) from tasklib.tasks", (), list))
        assert session.run(Statement("select $1::int", (1,), list)) == [(1,)]
        assert session.connections == 1


def test_a_deadline_holds_behind_a_pooler(config: tasklib.Config, conn: Conn) -> None:
    """The caller is free in time, and the server is told to stop."""
    sleeping = "select count(*) from pg_stat_activity where query like '%pg_sleep(60)%' and pid <> pg_backend_pid()"
    with contextlib.closing(Session(config, "test")) as session:
        patient, session._timeout_seconds = session._timeout_seconds, 0.3
        with pytest.raises(psycopg.OperationalError, match="in time"):
            session.run(Statement("select pg_sleep(60)", (), list))
        session._timeout_seconds = patient
        wait_until(lambda: conn.execute(sleeping + " and state = 'active'").fetchone() == (0,), "the server to stop")
        assert session.run(Statement("select 1", (), list)) == [(1,)]


def test_migrations_go_through_a_pooler(
    new_database: NewDatabase, direct: Callable[[str], str], pooler: Pooler
) -> None:
    """Several at once, as when a deployment starts: the lock is the transaction's, not the session's."""
    config = tasklib.Config(pooler.pooled(direct(new_database())))
    with ThreadPoolExecutor(SERVER_CONNECTIONS) as pool:
        applied = list(pool.map(lambda _: migrate.migrate(config), range(6)))
    assert sorted(bool(each.pending) for each in applied) == [False] * 5 + [True]
    assert str(migrate.check(config)) == "nothing"
    with tasklib.Client(config) as client:
        client.submit_task("a")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that is soon sure, and soon tries again."""
    monkeypatch.setattr(listener, "CHECK_WAIT_SECONDS", 0.3)
    monkeypatch.setattr(listener, "DEAF_PAUSE_SECONDS", 0.05)


def warnings_of_deafness(caplog: pytest.LogCaptureFixture) -> int:
    return sum("listener.deaf" in record.message for record in caplog.records)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("listen_at", ["nowhere else", "the pooler", "another database"])
def test_a_deaf_listener_leaves_the_work_to_the_poll(
    listen_at: str,
    direct_url: str,
    tasklib_postgres: EmbeddedPostgres,
    client: tasklib.Client,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where LISTEN cannot hear what submits ring, there is one warning, however often it is tried, the poll finds the
    tasks, and no channel of ours stays listened to in a session that others will use.
    """
    ran = threading.Event()
    tasklib.task(name="job")(ran.set)
    with pgbouncer(tasklib_postgres.dsn, size=SERVER_CONNECTIONS) as pooler:
        url = pooler.pooled(direct_url)
        addresses = {"nowhere else": None, "the pooler": url, "another database": tasklib_postgres.dsn}
        config = tasklib.Config(url, listen_database_url=addresses[listen_at])
        with caplog.at_level(logging.WARNING, "tasklib"), running(config) as worker:
            run = worker._run
            assert run is not None
            beats = run.loops["listen"].beats
            wait_until(lambda: run.loops["listen"].beats > beats + 3, "it to be tried again")
            client.submit_task("job")
            assert ran.wait(20)
        assert warnings_of_deafness(caplog) == 1
        for server in held_servers(url):
            channels = {channel for (channel,) in server.execute("select pg_listening_channels()")}
            assert not {each for each in channels if each.startswith("task_")}


def test_a_direct_address_for_the_listener_makes_it_prompt(
    url: str, direct_url: str, client: tasklib.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """With a poll of a minute, a task that was submitted through the pooler runs at once; so does a cancel."""
    config = tasklib.Config(url, listen_database_url=direct_url)
    ran = threading.Event()
    tasklib.task(name="job")(ran.set)
    with caplog.at_level(logging.WARNING, "tasklib"), running(config, poll_interval_seconds=60):
        client.submit_task("job")
        assert ran.wait(20)
    assert warnings_of_deafness(caplog) == 0


@pytest.mark.parametrize("listens", [False, True], ids=["looks", "listens elsewhere"])
def test_results_are_waited_for(url: str, direct_url: str, conn: Conn, count: Any, listens: bool) -> None:
    """By looking; with a direct address for it by LISTEN, whose lock is held there and nowhere else."""
    locks = "select count(*) from pg_locks where locktype = 'advisory' and objsubid = 1"  # 2: of who sleeps
    config = tasklib.Config(url, listen_database_url=direct_url if listens else None)
    tasklib.init(config)
    try:
        handle = count.options(delay_seconds=0.5).submit_handle_sync(7)
        with running(config), ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(handle.result_sync, 20)
            if listens:
                wait_until(lambda: conn.execute(locks).fetchone() == (1,), "somebody listens")
            assert waiting.result() == 7
            assert conn.execute(locks).fetchone() == (int(listens),)
    finally:
        tasklib.close()
    for server in held_servers(url):
        assert server.execute(_STATE).fetchone() == CLEAN


@pytest.mark.slow
def test_a_database_that_restarts_behind_its_pooler(open_directory: Path, count: Any) -> None:
    """The pooler stays; the worker and the client go on when the database is back, and nothing is lost."""
    began, release = threading.Event(), threading.Event()

    @tasklib.task
    def held() -> str:
        began.set()
        release.wait(30)
        return "kept"

    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(contextlib.ExitStack())
        server = servers.enter_context(embedded.postgres(open_directory / "data"))
        pooler = stack.enter_context(pgbouncer(server.dsn))
        config = tasklib.Config(pooler.pooled(server.dsn))
        client = stack.enter_context(tasklib.Client(config))
        stack.enter_context(running(config, concurrency=2))
        first = client.submit(held.new())
        assert began.wait(20)
        server.stop()
        release.set()
        servers.enter_context(embedded.postgres(open_directory / "data"))
        assert wait_final(client, client.submit(count.new(1)), seconds=40).state == "completed"
        task = wait_final(client, first, seconds=40)
        assert (task.state, task.result, task.attempt) == ("completed", {"value": "kept"}, 1)


def test_the_connection_string_sends_nothing_that_a_pooler_refuses(config: tasklib.Config) -> None:
    """PgBouncer knows few startup parameters, and refuses a connection that sends others, `options` among them."""
    BoundedConnection.connect(connection_string(config)).close()
    asyncio.run(connect_and_close(connection_string(config)))
    refused = tasklib.Config(make_conninfo(config.database_url, options="-c statement_timeout=5s"))
    with tasklib.Client(refused) as client, pytest.raises(tasklib.DatabaseUnavailable, match="options"):
        client.submit_task("a")


async def connect_and_close(dsn: str) -> None:
    await (await BoundedAsyncConnection.connect(dsn)).close()
