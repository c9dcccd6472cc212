"""Submits on other people's connections: every kind keeps the same contract."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, TypeAlias

import asyncpg
import psycopg2.extras
import pytest
import sqlalchemy
from django.db.utils import ConnectionHandler
from psycopg_pool import ConnectionPool
from sqlalchemy import make_url, orm
from sqlalchemy.ext import asyncio as sqlalchemy_asyncio

import tasklib
from tasklib import caller_transaction
from tasklib.statements import BATCH_ROWS
from tests.support.borrowers import AUTOCOMMIT, KINDS, Borrower, Django, Undo
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.raw_sql import Conn

Pay: TypeAlias = "tasklib.TaskFunction[..., Any]"
OfKind: TypeAlias = "Callable[[str], Borrower]"

# No project is set up here: that is done once in a process, and other tests have a project.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the database during app initialization:RuntimeWarning")


@pytest.fixture(params=KINDS)
def borrower(request: pytest.FixtureRequest, config: tasklib.Config) -> Iterator[Borrower]:
    with contextlib.closing(KINDS[request.param](config)) as made:
        yield made


@pytest.fixture
def of_kind(config: tasklib.Config) -> Iterator[OfKind]:
    """Makes one of the named kind."""
    with contextlib.ExitStack() as ends:
        yield lambda name: ends.enter_context(contextlib.closing((KINDS | AUTOCOMMIT)[name](config)))


@pytest.fixture
def pay() -> tasklib.TaskFunction[..., Any]:
    def pay(invoice: int, **note: Any) -> None: ...

    return tasklib.task(pay)


def count(conn: Conn) -> int:
    """What everybody else sees."""
    row = conn.execute("select count(*) from tasklib.tasks").fetchone()
    assert row is not None
    return int(row[0])


def test_a_commit_is_theirs(borrower: Borrower, conn: Conn, client: tasklib.Client, pay: Pay) -> None:
    """Nobody sees the task before their commit; after it, it is as it was submitted."""
    options: tasklib.SubmitOptions = {
        "queue": "billing",
        "priority": 7,
        "tags": {"percent": "100% $1 :p1"},
        "timeout_seconds": 1.5,
        "expires_at": datetime(2199, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=-7))),
        "store_result": False,
    }
    with borrower.inside(borrower.transaction()):
        made = borrower.submit(pay.options(**options).new(1, text="50% :x $2 '\\ é"))
        assert count(conn) == 0
    task = client.get_task(made)
    assert task is not None
    assert (task.name, task.kwargs) == ("pay", {"invoice": 1, "text": "50% :x $2 '\\ é"})
    assert {name: getattr(task, name) for name in options} == dict(options)


def test_a_rollback_leaves_nothing(borrower: Borrower, conn: Conn, pay: Pay) -> None:
    """Also when the submit is the first thing in the transaction, and when it goes in bulk."""
    for several in (1, BATCH_ROWS + 1):
        with contextlib.suppress(Undo), borrower.inside(borrower.transaction()):
            assert len(borrower.submit_many([pay.new(n) for n in range(several)])) == several
            borrower.submit(pay.new(0))
            raise Undo
        assert count(conn) == 0


def test_a_savepoint_takes_back_what_is_inside_it(borrower: Borrower, client: tasklib.Client, pay: Pay) -> None:
    """And nothing else."""
    with borrower.inside(borrower.transaction()):
        before = borrower.submit(pay.new(1))
        with contextlib.suppress(Undo), borrower.inside(borrower.savepoint()):
            inside = borrower.submit(pay.new(2))
            raise Undo
        with borrower.inside(borrower.savepoint()):
            kept = borrower.submit(pay.new(3))
    assert client.get_task(inside) is None
    assert {task.id for task in client.list_tasks()} == {before, kept}


def test_many_are_in_the_transaction_too(borrower: Borrower, conn: Conn, pay: Pay) -> None:
    """More than one batch: ids in the order given, and nothing committed between the batches."""
    news = [pay.new(n) for n in range(2 * BATCH_ROWS + 1)]
    with borrower.inside(borrower.transaction()):
        assert borrower.submit_many(news) == [new.id for new in news]
        assert count(conn) == 0
    assert count(conn) == len(news)


def test_a_key_finds_the_first_task(borrower: Borrower, pay: Pay) -> None:
    """`existed`, single and in bulk."""
    keyed = pay.options(idempotency_key="invoice-1")
    with borrower.inside(borrower.transaction()):
        first = borrower.submit(keyed.new(1))
        again = borrower.submit(keyed.new(1))
        other, bulk = borrower.submit_many([pay.new(2), keyed.new(1)])
    assert first == again == bulk
    assert [first.existed, again.existed, other.existed, bulk.existed] == [False, True, False, True]


def test_a_conflict_is_our_error(borrower: Borrower, conn: Conn, pay: Pay) -> None:
    """With PostgreSQL's own words, whichever driver brings them; in a savepoint, their transaction goes on after it."""
    keyed = pay.options(idempotency_key="invoice-1")
    with borrower.inside(borrower.transaction()):
        borrower.submit(keyed.new(1))
        refused = pytest.raises(tasklib.IdempotencyConflict, match=r"invoice-1.*another payload.*Use a new key")
        with refused, borrower.inside(borrower.savepoint()):
            borrower.submit(keyed.new(2))
        borrower.submit(pay.new(3))
    assert count(conn) == 2


def test_an_aborted_transaction_is_our_error(borrower: Borrower, pay: Pay) -> None:
    """The application's own mistake before the submit."""
    with contextlib.suppress(Undo), borrower.inside(borrower.transaction()):
        with pytest.raises(Exception, match="division by zero"):
            borrower.execute("select 1/0")
        with pytest.raises(tasklib.DatabaseError, match="Roll it back"):
            borrower.submit(pay.new(1))
        raise Undo


# --- where no transaction is open ---

BEGINS_BY_ITSELF = ["psycopg, autocommit", "asyncpg", "asyncpg from a pool", "django", "django by proxy"]
CANNOT_BEGIN = ["psycopg2, autocommit", "sqlalchemy, autocommit", "sqlalchemy async, autocommit"]


@pytest.mark.parametrize("kind", BEGINS_BY_ITSELF + CANNOT_BEGIN)
def test_a_single_submit_needs_no_transaction(of_kind: OfKind, conn: Conn, pay: Pay, kind: str) -> None:
    """Where every statement commits by itself, so does the submit."""
    of_kind(kind).submit(pay.new(1))
    assert count(conn) == 1


@pytest.mark.parametrize("kind", BEGINS_BY_ITSELF)
def test_many_are_all_or_none_without_a_transaction(of_kind: OfKind, conn: Conn, pay: Pay, kind: str) -> None:
    """The second batch meets a conflict: the first is gone too, and the connection is of use again."""
    borrower = of_kind(kind)
    borrower.submit(pay.options(idempotency_key="z").new(1))
    news = [pay.options(idempotency_key=f"a{n}").new(n) for n in range(BATCH_ROWS)]
    with pytest.raises(tasklib.IdempotencyConflict):
        borrower.submit_many([*news, pay.options(idempotency_key="z").new(2)])
    assert count(conn) == 1
    assert len(borrower.submit_many([*news, pay.options(idempotency_key="z").new(1)])) == BATCH_ROWS + 1
    assert count(conn) == BATCH_ROWS + 1


@pytest.mark.parametrize("kind", CANNOT_BEGIN)
def test_batches_that_would_be_committed_one_by_one_are_refused(
    of_kind: OfKind, conn: Conn, pay: Pay, kind: str
) -> None:
    """The error says to begin a transaction; the connection is of use after it."""
    borrower = of_kind(kind)
    with pytest.raises(tasklib.InvalidOptions, match=r"autocommit.*begin a transaction"):
        borrower.submit_many([pay.new(n) for n in range(BATCH_ROWS + 1)])
    assert count(conn) == 0
    borrower.submit_many([pay.new(n) for n in range(BATCH_ROWS)])
    assert count(conn) == BATCH_ROWS


def test_a_transaction_that_was_begun_by_hand_counts(of_kind: OfKind, conn: Conn, pay: Pay) -> None:
    """`begin` as a statement: asyncpg refuses to make a block of its own inside that."""
    borrower = of_kind("asyncpg")
    borrower.execute("begin")
    borrower.submit_many([pay.new(n) for n in range(BATCH_ROWS + 1)])
    borrower.execute("rollback")
    assert count(conn) == 0


def test_the_raw_connection_of_an_async_session_is_not_used(of_kind: OfKind, conn: Conn, pay: Pay) -> None:
    """SQLAlchemy begins on asyncpg at its own first statement: what went round it survived the rollback."""
    borrower = of_kind("sqlalchemy async session, asyncpg")

    async def go_round() -> None:
        raw = await (await borrower.connection.connection()).get_raw_connection()
        await borrower.async_client.submit(pay.new(1), connection=raw.driver_connection)
        await borrower.connection.rollback()

    async def go_through() -> None:
        await borrower.connection.connection()
        await borrower.async_client.submit(pay.new(2), connection=borrower.connection)
        await borrower.connection.rollback()

    borrower.do(go_round())
    assert count(conn) == 1  # the trap is still there
    borrower.do(go_through())
    assert count(conn) == 1


# --- psycopg's pipelines, streams and COPY ---


@pytest.mark.parametrize("kind", ["psycopg", "psycopg, async"])
def test_a_pipeline_keeps_the_contract(of_kind: OfKind, conn: Conn, pay: Pay, kind: str) -> None:
    """Answers come late there. The id of an earlier task is told all the same, and a conflict where it happened."""
    borrower = of_kind(kind)
    keyed = pay.options(idempotency_key="invoice-1")
    with borrower.inside(borrower.transaction()), borrower.inside(borrower.connection.pipeline()):
        first = borrower.submit(keyed.new(1))
        again = borrower.submit(keyed.new(1))
        other, bulk = borrower.submit_many([pay.new(2), keyed.new(1)])
    assert first == again == bulk
    assert [first.existed, again.existed, other.existed, bulk.existed] == [False, True, False, True]
    for several in (1, BATCH_ROWS + 1):
        with contextlib.suppress(Undo), borrower.inside(borrower.transaction()):
            refused = pytest.raises(tasklib.IdempotencyConflict)
            with borrower.inside(borrower.connection.pipeline()), refused:
                borrower.submit_many([pay.new(n) for n in range(several - 1)] + [keyed.new(2)])
            raise Undo
    assert count(conn) == 2


STREAMING_KINDS = ["psycopg", "psycopg, async", "sqlalchemy session", "sqlalchemy async, psycopg", "django"]


@contextlib.contextmanager
def open_stream(borrower: Borrower, how: str) -> Iterator[None]:
    """On the driver's connection, which lies below those of frameworks."""
    borrower.execute("create temporary table streamed (n integer) on commit drop")
    raw = borrower.connection
    if isinstance(borrower, Django):
        raw = raw.connection
    elif not hasattr(raw, "pgconn"):
        below = borrower.do(raw.connection()) if hasattr(raw, "get_bind") else raw
        below = borrower.do(below.get_raw_connection()) if borrower.is_async else below.connection
        raw = below.driver_connection
    cursor = raw.cursor()
    if how == "copy":
        with borrower.inside(cursor.copy("copy streamed from stdin")):
            yield
        return
    rows = cursor.stream("select * from generate_series(1, 3)")
    borrower.do(anext(rows)) if borrower.is_async else next(rows)
    yield
    borrower.do(rows.aclose()) if borrower.is_async else rows.close()


@pytest.mark.parametrize("how", ["stream", "copy"])
@pytest.mark.parametrize("kind", STREAMING_KINDS)
def test_a_submit_during_a_stream_is_refused(of_kind: OfKind, conn: Conn, pay: Pay, kind: str, how: str) -> None:
    """It would wait for the end of the stream, which comes after it."""
    borrower = of_kind(kind)
    with borrower.inside(borrower.transaction()):
        refused = pytest.raises(tasklib.InvalidOptions, match=r"is open on this connection.*submit after it")
        with open_stream(borrower, how), refused:
            borrower.submit(pay.new(1))
        borrower.submit(pay.new(2))
    assert count(conn) == 1


def test_a_stream_of_another_connection_is_nobodys_business(of_kind: OfKind, conn: Conn, pay: Pay) -> None:
    """A submit waits for another thread that uses its connection, whatever is open elsewhere."""
    borrower, other = of_kind("psycopg"), of_kind("psycopg")
    with open_stream(other, "stream"), ThreadPoolExecutor(1) as pool, borrower.inside(borrower.transaction()):
        sleeping = pool.submit(borrower.execute, "select pg_sleep(0.3)")
        wait_until(lambda: borrower.connection.lock.locked() or sleeping.done(), "the connection to be busy")
        borrower.submit(pay.new(1))
        sleeping.result()
    assert count(conn) == 1


# --- sessions ---


class Base(orm.DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "borrowed_orders"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    amount: orm.Mapped[int] = orm.mapped_column(sqlalchemy.CheckConstraint("amount > 0"))


@pytest.fixture
def orders(conn: Conn) -> Iterator[None]:
    conn.execute("create table borrowed_orders (id serial primary key, amount int check (amount > 0))")
    yield
    conn.execute("drop table borrowed_orders")


def test_rows_and_task_are_one(of_kind: OfKind, conn: Conn, client: tasklib.Client, orders: None, pay: Pay) -> None:
    """The use of it all: an order and the task that deals with it, by the order's id."""
    session = of_kind("sqlalchemy session").connection
    for ends_well in (True, False):
        with contextlib.suppress(Undo), session.begin():
            order = Order(amount=5)
            session.add(order)
            session.flush()
            client.submit(pay.new(order.id), connection=session)
            if not ends_well:
                raise Undo
    rows = conn.execute("select kwargs->'invoice' = to_jsonb(o.id) from tasklib.tasks, borrowed_orders o").fetchall()
    assert rows == [(True,)]


def test_a_bad_row_of_theirs_is_not_our_error(of_kind: OfKind, client: tasklib.Client, orders: None, pay: Pay) -> None:
    """The submit does not flush: what the application's own row violates is raised where the application flushes."""
    session = of_kind("sqlalchemy session").connection
    session.add(Order(amount=-1))
    client.submit(pay.new(1), connection=session)
    with pytest.raises(sqlalchemy.exc.IntegrityError):
        session.commit()


def test_the_sync_session_of_an_async_one(of_kind: OfKind, conn: Conn, pay: Pay) -> None:
    """Sync code that an async application runs by `run_sync` submits with the sync verbs."""
    borrower = of_kind("sqlalchemy async session, asyncpg")

    def business(session: orm.Session) -> None:
        borrower.sync_client.submit(pay.new(1), connection=session)

    async def application() -> None:
        await borrower.connection.run_sync(business)
        await borrower.connection.commit()

    borrower.do(application())
    assert count(conn) == 1


# --- what is refused ---


def test_the_wrong_kind_of_submit_is_refused(borrower: Borrower, pay: Pay) -> None:
    """A sync connection in an async submit would block the loop; an async one in a sync submit cannot be awaited."""
    borrower.is_async = not borrower.is_async
    advice = "sync, and would block.*submit_sync" if borrower.is_async else "is async: await"
    with pytest.raises(tasklib.InvalidOptions, match=advice):
        borrower.submit(pay.new(1))


def test_a_closed_connection_is_refused(borrower: Borrower, pay: Pay) -> None:
    """It is closed, or back in its pool. Sessions and Django's connections are different: they open again."""
    borrower.do(borrower.connection.close())
    opens_again = hasattr(borrower.connection, "get_bind") or isinstance(borrower, Django)
    refused = pytest.raises(tasklib.InvalidOptions, match=r"closed|released back to the pool")
    with contextlib.nullcontext() if opens_again else refused:
        borrower.submit(pay.new(1))


def test_a_lost_connection_is_our_error(borrower: Borrower, conn: Conn, pay: Pay) -> None:
    """The server ended the session in mid-transaction."""
    doomed = "select pg_terminate_backend(pid, 10000) from pg_stat_activity where application_name = 'doomed'"
    ended, met = [], []
    with contextlib.suppress(Exception), borrower.inside(borrower.transaction()):
        borrower.execute("set application_name = 'doomed'")
        ended += conn.execute(doomed).fetchall()
        try:
            borrower.submit(pay.new(1))
        except Exception as error:  # looked at below: the end of the block has errors of its own
            met.append(type(error))
            raise
    assert (ended, met) == ([(True,)], [tasklib.DatabaseUnavailable])


@pytest.mark.parametrize("kind", ["psycopg2", "sqlalchemy session, psycopg2"])
def test_a_connection_that_was_cut_is_our_error(of_kind: OfKind, pay: Pay, kind: str) -> None:
    """Without a word from the server, and so without a code: psycopg2 is known by its class alone."""
    borrower = of_kind(kind)
    raw = borrower.connection if kind == "psycopg2" else borrower.connection.connection().connection.driver_connection
    with socket.socket(fileno=os.dup(raw.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)
    with pytest.raises(tasklib.DatabaseUnavailable):
        borrower.submit(pay.new(1))


def test_a_transaction_that_django_gave_up_is_our_error(of_kind: OfKind, pay: Pay) -> None:
    """Django refuses by itself, before anything is sent."""
    borrower = of_kind("django")
    with borrower.inside(borrower.transaction()):
        borrower.connection.set_rollback(True)
        with pytest.raises(tasklib.DatabaseError, match="end of the 'atomic' block"):
            borrower.submit(pay.new(1))


def test_a_missing_schema_is_our_error(borrower: Borrower, pay: Pay) -> None:
    """Nobody's transaction is used to make it; the error names the command."""
    config = tasklib.Config(borrower.url, schema="nowhere")
    borrower.sync_client, borrower.async_client = tasklib.Client(config), tasklib.AsyncClient(config)
    with contextlib.suppress(Undo), borrower.inside(borrower.transaction()):
        with pytest.raises(tasklib.SchemaMissing, match="tasklib migrate"):
            borrower.submit(pay.new(1))
        raise Undo


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("kind", ["psycopg", "psycopg, async", "psycopg2", "sqlalchemy, psycopg", "django"])
def test_an_encoding_without_the_character_is_our_error(
    of_kind: OfKind, conn: Conn, pay: Pay, kind: str, *, many: bool
) -> None:
    """The error says what to set; nothing is sent, and what the encoding has goes through."""
    borrower, secret = of_kind(kind), uuid.uuid4().hex
    with borrower.inside(borrower.transaction()):
        if kind == "psycopg2":
            borrower.connection.set_client_encoding("LATIN1")
        else:
            borrower.execute("set client_encoding to latin1")
        new = pay.new(1, text="\N{GRINNING FACE}", password=secret)
        with pytest.raises(tasklib.InvalidOptions, match=r"client_encoding.*UTF8") as refused:
            borrower.submit_many([new, pay.new(2)]) if many else borrower.submit(new)
        assert secret not in "".join(traceback.format_exception(refused.value))
        borrower.submit(pay.new(3, text="é"))
    assert count(conn) == 1


def test_an_asynchronous_psycopg2_connection_is_refused(conn: Conn, client: tasklib.Client, pay: Pay) -> None:
    """It commits each statement by itself, and its answers have to be waited for."""
    raw = psycopg2.connect(client.config.database_url, async_=True)
    psycopg2.extras.wait_select(raw)
    with pytest.raises(tasklib.InvalidOptions, match=r"asynchronous.*without async_"):
        client.submit(pay.new(1), connection=raw)
    raw.close()
    assert count(conn) == 0


def test_errors_do_not_show_arguments(borrower: Borrower, pay: Pay) -> None:
    """SQLAlchemy's errors carry the parameters; ours, and what stands behind them, do not."""
    keyed, secret = pay.options(idempotency_key="k"), uuid.uuid4().hex
    with contextlib.suppress(Undo), borrower.inside(borrower.transaction()):
        borrower.submit(keyed.new(1))
        with pytest.raises(tasklib.IdempotencyConflict) as refused:
            borrower.submit(keyed.new(1, password=secret))
        assert secret not in "".join(traceback.format_exception(refused.value))
        raise Undo


@pytest.mark.parametrize(
    "make",
    [
        sqlalchemy.create_engine,
        lambda url: orm.sessionmaker(sqlalchemy.create_engine(url)),
        lambda url: ConnectionPool(url, open=False),
    ],
    ids=["engine", "sessionmaker", "psycopg_pool"],
)
def test_a_source_of_connections_is_refused(
    client: tasklib.Client, pay: Pay, make: Callable[[str], Any], database_url: str
) -> None:
    """Which of its connections, and in which transaction?"""
    with pytest.raises(tasklib.InvalidOptions, match="hands out connections: pass one of them"):
        client.submit(pay.new(1), connection=make(database_url))


async def test_an_async_source_of_connections_is_refused(
    async_client: tasklib.AsyncClient, pay: Pay, database_url: str
) -> None:
    """An engine, a session factory, and asyncpg's pool."""
    engine = sqlalchemy_asyncio.create_async_engine(make_url(database_url).set(drivername="postgresql+asyncpg"))
    async with asyncpg.create_pool(database_url, min_size=0) as pool:
        for source in (engine, sqlalchemy_asyncio.async_sessionmaker(engine), pool):
            with pytest.raises(tasklib.InvalidOptions, match="hands out connections: pass one of them"):
                await async_client.submit(pay.new(1), connection=source)


async def test_a_connection_that_was_never_opened_is_refused(
    async_client: tasklib.AsyncClient, pay: Pay, database_url: str
) -> None:
    """`engine.connect()` without its `async with`."""
    engine = sqlalchemy_asyncio.create_async_engine(make_url(database_url).set(drivername="postgresql+asyncpg"))
    with pytest.raises(tasklib.InvalidOptions, match="cannot be used"):
        await async_client.submit(pay.new(1), connection=engine.connect())


def test_another_database_is_refused(client: tasklib.Client, pay: Pay) -> None:
    """No transaction spans SQLite and PostgreSQL."""
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as connection, orm.Session(engine) as session:
        for other in (connection, session):
            with pytest.raises(tasklib.InvalidOptions, match="leads to sqlite"):
                client.submit(pay.new(1), connection=other)
    engine.dispose()


def test_another_database_of_djangos_is_refused(of_kind: OfKind, client: tasklib.Client, pay: Pay) -> None:
    """A project may have several."""
    of_kind("django")
    sqlite = ConnectionHandler({"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})["default"]
    with pytest.raises(tasklib.InvalidOptions, match="leads to sqlite"):
        client.submit(pay.new(1), connection=sqlite)


def test_a_session_that_cannot_tell_its_database_is_refused(client: tasklib.Client, pay: Pay) -> None:
    """One that is bound to nothing; SQLAlchemy's words say so."""
    with pytest.raises(tasklib.InvalidOptions, match="cannot be used"):
        client.submit(pay.new(1), connection=orm.Session())


def test_what_is_not_a_connection_is_refused(client: tasklib.Client, pay: Pay) -> None:
    """The error names what is taken."""
    with pytest.raises(tasklib.InvalidOptions, match=r"psycopg\.Connection.*sqlalchemy\.Session.*got object"):
        client.submit(pay.new(1), connection=object())


def test_an_error_that_is_not_the_databases_passes(of_kind: OfKind, client: tasklib.Client, pay: Pay) -> None:
    """A hook of the application's that raises: its own error, as it is."""
    connection = of_kind("sqlalchemy, psycopg").connection

    def hook(*_: Any) -> None:
        raise ZeroDivisionError("mine")

    sqlalchemy.event.listen(connection, "before_cursor_execute", hook)
    with pytest.raises(ZeroDivisionError, match="mine"):
        client.submit(pay.new(1), connection=connection)


def test_frameworks_are_not_imported() -> None:
    """`import tasklib` costs nobody a framework that they may not even have."""
    program = (
        "import sys, tasklib; "
        "print(sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'sqlalchemy', 'asyncpg', 'django', 'psycopg2', 'fastapi', 'starlette'}))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_psycopg2_alone(conn: Conn, database_url: str) -> None:
    """It knows no UUIDs until somebody teaches it; in this process SQLAlchemy has."""
    program = """if True:
        import sys, psycopg2, tasklib
        client = tasklib.Client(tasklib.Config(sys.argv[1]))
        with psycopg2.connect(sys.argv[1]) as conn:
            assert not client.submit_task("pay", idempotency_key="k", connection=conn).existed
            assert client.submit_task("pay", idempotency_key="k", connection=conn).existed
    """
    subprocess.run([sys.executable, "-W", "error", "-c", program, database_url], check=True)
    assert count(conn) == 1


def test_a_percent_sign_in_our_sql_stays_one() -> None:
    """It means a parameter to DB-API drivers."""
    assert caller_transaction._as_pyformat("select 5 % $1::int, $12") == "select 5 %% %(p1)s::int, %(p12)s"
