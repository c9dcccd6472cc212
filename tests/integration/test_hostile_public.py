"""A role that may create in `public`, and does: nothing of it ever runs with the rights of another."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import psycopg2
import pytest
from psycopg import errors
from psycopg.pq import TransactionStatus

import tasklib
from tasklib import doctor, embedded, migrate
from tasklib.connection import BoundedAsyncConnection, BoundedConnection, meet, meet_async
from tasklib.sending import send_alone, send_alone_async
from tasklib.sql import queries
from tasklib.statements import Row, Statement
from tests.support import pooler
from tests.support.hostile import DAEMON, MALLORY, OWNER, WEB, HostileDatabase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.raw_sql import Conn

pytestmark = [
    pytest.mark.postgres_versions,
    pytest.mark.direct("has a server, and a pooler, of its own"),
]

FAILS: Statement[list[Row]] = Statement("select 1 / 0", (), list)
# These have no SET clause, for speed: every name in them has its schema instead, or who calls them has set the path.
UNPINNED = {"caller", "keyed_digest", "ring", "tasks_in_json", "tell_done"}


@pytest.fixture(scope="module")
def hostile() -> Iterator[HostileDatabase]:
    with embedded.postgres() as server:
        made = HostileDatabase(server.dsn)
        made.make()
        made.attack()
        made.trust_mallory_more()
        made.attack()
        yield made


@pytest.fixture(scope="module", params=["direct", "pooled"])
def address(request: pytest.FixtureRequest, hostile: HostileDatabase) -> Iterator[Callable[[str], str]]:
    if request.param == "direct":
        yield str
        return
    with pooler.pgbouncer(hostile.admin) as made:
        yield made.pooled


@pytest.fixture
def unharmed(hostile: HostileDatabase) -> Iterator[HostileDatabase]:
    """After the test, nothing hostile has run as another role."""
    yield hostile
    assert hostile.problems() == []


# --- the catalogue ---


def test_no_function_with_its_owners_rights_is_for_everybody(conn: Conn) -> None:
    """Or USAGE on the schema would be enough to run it: with arguments, or as a trigger, of one's own types."""
    rows = conn.execute(
        """select proname from pg_proc
            where pronamespace = 'tasklib'::regnamespace and prosecdef
              and exists (select from aclexplode(coalesce(proacl, acldefault('f', proowner))) where grantee = 0)"""
    ).fetchall()
    assert rows == []


def test_every_function_pins_its_search_path(conn: Conn) -> None:
    """All that have their owner's rights; and the others, but for those whose every name has a schema."""
    rows = conn.execute(
        """select proname, prosecdef from pg_proc
            where pronamespace = 'tasklib'::regnamespace
              and not coalesce('search_path=pg_catalog, pg_temp' = any(proconfig), false)"""
    ).fetchall()
    assert dict(rows) == dict.fromkeys(UNPINNED, False)


def test_nobody_makes_operators_on_the_types(conn: Conn) -> None:
    """One on exactly the column's type is preferred to PostgreSQL's own, and runs as who asks, wherever public is in
    the search_path. The types of rows are no column's.
    """
    rows = conn.execute(
        """select typname from pg_type left join pg_class on pg_class.oid = typrelid
            where typnamespace = 'tasklib'::regnamespace and typelem = 0 and coalesce(relkind, 'c') = 'c'
              and exists (select from aclexplode(coalesce(typacl, acldefault('T', typowner))) where grantee = 0)"""
    ).fetchall()
    assert rows == []


# --- what the hostile role does itself ---


def test_a_trigger_with_the_owners_rights_is_for_its_own_table_alone(hostile: HostileDatabase) -> None:
    """Who may execute every function, as a daemon's role may, still cannot have its casts run as the owner."""
    with hostile.connect() as conn:
        conn.execute(
            """insert into tasklib.attempts (task_id, fencing_token, started_at, finished_at, attempt, will_retry,
                                             outcome, worker_id)
               values (gen_random_uuid(), 1, now(), now(), 1, false, 'FAILED', 'w')"""
        )
    with hostile.connect(MALLORY) as conn:
        conn.execute("create temp table mine (id public.bait)")
        conn.execute(
            "create trigger t after delete on mine referencing old table as deleted "
            "for each statement execute function tasklib.forget_attempts()"
        )
        conn.execute("insert into mine values (row('x')::public.bait)")
        with pytest.raises(psycopg.Error, match=r"trigger of tasklib\.tasks alone"):
            conn.execute("delete from mine")
    hostile.attack()
    assert hostile.problems() == []


def test_who_has_usage_alone_cannot_attach_it(conn: Conn) -> None:
    """PUBLIC may not execute it."""
    conn.execute("create role plain_user")
    conn.execute("grant usage on schema tasklib to plain_user")
    try:
        conn.execute("set role plain_user")
        conn.execute("create temp table mine (id uuid)")
        with pytest.raises(errors.InsufficientPrivilege):
            conn.execute("create trigger t after delete on mine execute function tasklib.forget_attempts()")
    finally:
        conn.execute("reset role")
        conn.execute("drop owned by plain_user")
        conn.execute("drop role plain_user")


# --- our own sessions ---


def test_a_client_runs_nothing_hostile(unharmed: HostileDatabase, address: Callable[[str], str]) -> None:
    """Every verb, with `search_path = public, pg_catalog`; behind a transaction pooler too."""
    with tasklib.Client(tasklib.Config(address(unharmed.of(WEB)))) as client:
        first = client.submit_task("a", 1, queue="default", tags={"x": 1}, idempotency_key="once")
        client.submit_task("a", 1, queue="default", idempotency_key="once")
        client.submit_many([tasklib.task(name="a")(_nothing).new() for _ in range(1_001)])
        assert client.get_task(first) is not None
        assert client.list_tasks("pending", "a", 5, queue="default", tags={"x": 1})
        client.list_tasks("failed", "a", 5, queue="default")
        client.cancel_task(first, "why not")
        assert [task.state for task in client.wait_for([first], 20)] == ["cancelled"]
        client.retry_task(first)
        client.expire_tasks()
        client.queue_statistics("default")
        client.task_statistics()
        client.backlog(["default"])


async def test_an_async_client_runs_nothing_hostile(unharmed: HostileDatabase, address: Callable[[str], str]) -> None:
    """The same."""
    async with tasklib.AsyncClient(tasklib.Config(address(unharmed.of(WEB)))) as client:
        made = await client.submit_task("a", 1, queue="default", delay_seconds=60)
        assert await client.get_task(made) is not None
        assert await client.list_tasks("pending", "a", 5, queue="default")
        with pytest.raises(tasklib.TasklibError):
            await client.submit_task("a", on_crash="retry", queue="Not a queue")
        await client.cancel_task(made)
        await client.retry_task(made)
        await client.backlog(["default"])


def test_a_failed_statement_leaves_the_connection_usable(
    hostile: HostileDatabase, address: Callable[[str], str]
) -> None:
    """Behind a pooler it goes in a transaction of its own, with its settings: an error must end that too."""
    with BoundedConnection.connect(address(hostile.of(WEB)), autocommit=True) as conn:
        meet(conn)
        for _ in range(2):
            with pytest.raises(errors.DivisionByZero):
                send_alone(conn, FAILS)
            assert conn.info.transaction_status == TransactionStatus.IDLE


async def test_a_failed_async_statement_leaves_the_connection_usable(
    hostile: HostileDatabase, address: Callable[[str], str]
) -> None:
    """The same."""
    async with await BoundedAsyncConnection.connect(address(hostile.of(WEB)), autocommit=True) as conn:
        await meet_async(conn)
        for _ in range(2):
            with pytest.raises(errors.DivisionByZero):
                await send_alone_async(conn, FAILS)
            assert conn.info.transaction_status == TransactionStatus.IDLE


def test_a_worker_and_its_duties_run_nothing_hostile(unharmed: HostileDatabase, address: Callable[[str], str]) -> None:
    """Claims, finishes, and what is written on the task's own connection."""
    config = tasklib.Config(address(unharmed.of(DAEMON)))
    transfer = tasklib.task(name="transfer")(_transfer)
    with tasklib.Client(config) as client:
        made = client.submit(transfer.new())
        tasklib.TaskWorker(config, tasks=[transfer]).run_until_empty_sync()
        found = client.get_task(made)
        assert found is not None
        assert found.state == "completed"


def test_the_doctor_and_the_migrator_run_nothing_hostile(
    unharmed: HostileDatabase, address: Callable[[str], str]
) -> None:
    """They have the owner's rights, or a superuser's."""
    config = tasklib.Config(address(unharmed.of(OWNER)))
    assert list(doctor.run_checks(config))
    with unharmed.connect(OWNER) as conn:
        conn.execute("delete from tasklib.schema_migrations where version = 0")
    migrate.migrate(config)
    assert not migrate.check(config).is_outdated


# --- connections of others ---


def test_submits_on_borrowed_connections_run_nothing_hostile(unharmed: HostileDatabase) -> None:
    """Their search_path is not ours to set: every name in these statements has its schema."""
    soon = datetime.now(UTC) + timedelta(seconds=60)
    task = tasklib.task(name="a")(_nothing).options(scheduled_at=soon, expires_at=soon, timeout_seconds=5)
    dsn = unharmed.of(WEB)
    with tasklib.Client(tasklib.Config(dsn)) as client:
        with psycopg.connect(dsn) as conn:
            client.submit(task.new(), connection=conn)
            client.submit_task("b", 1, connection=conn)
            client.submit_many([task.new(), task.new()], connection=conn)
        with contextlib.closing(psycopg2.connect(dsn)) as other, other:
            client.submit(task.new(), connection=other)
            client.submit_task("b", 1, connection=other)
            client.submit_many([task.new(), task.new()], connection=other)


def test_triggers_and_unpinned_functions_run_nothing_hostile(unharmed: HostileDatabase) -> None:
    """They run in sessions of others, with their search_path."""
    with psycopg.connect(unharmed.of(DAEMON), autocommit=True) as conn:
        conn.execute("insert into tasklib.tasks (name, idempotency_key) values ('raw', 'raw')")
        conn.execute("select tasklib.ring('default'), tasklib.caller(), tasklib.keyed_digest('x')")
        conn.execute("select pg_catalog.pg_advisory_lock_shared(pg_catalog.hashtextextended('tasklib.task_done', 0))")
        with psycopg.connect(unharmed.of(DAEMON), autocommit=True) as other:  # tells who waits
            other.execute(
                "update tasklib.tasks set state = 'completed', ready = false, due_at = null, "
                "completed_at = pg_catalog.clock_timestamp() where name operator(pg_catalog.=) 'raw'"
            )
            other.execute("delete from tasklib.tasks where name operator(pg_catalog.=) 'raw'")
        conn.execute(queries("tasks", "tasklib")["ready_queues"])


def _nothing() -> None: ...


def _transfer() -> None:
    tasklib.current_task().connection.execute("select 1")
