"""A connection to PostgreSQL as the library wants it: never waits for ever, never takes a doubtful
commit for a certain one, and speaks of its failures in our errors.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import json
import math
import re
import threading
from collections import deque
from decimal import Decimal
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any, LiteralString, NamedTuple, Self, TypeVar, cast

import psycopg
from psycopg import capabilities, conninfo, errors, generators, postgres, sql, waiting
from psycopg.adapt import AdaptersMap, PyFormat, Transformer
from psycopg.pq import ExecStatus, Format, PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row
from psycopg.types import TypesRegistry
from psycopg.types.array import ListBinaryDumper, register_all_arrays
from psycopg.types.json import set_json_loads
from pydantic_core import from_json

from tasklib.clock import time
from tasklib.errors import (
    DatabaseError,
    DatabaseUnavailable,
    IdempotencyConflict,
    InvalidConfig,
    InvalidOptions,
    SchemaMissing,
    TasklibError,
)
from tasklib.strict_json import MAX_NUMBER_DIGITS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from psycopg.abc import PQGen
    from psycopg.pq.abc import PGconn, PGresult

    from tasklib.config import Config
    from tasklib.statements import Row, Statement

T = TypeVar("T")
RV = TypeVar("RV")
C = TypeVar("C", bound="psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]")
CANCEL_SECONDS = 2.0
HEAD_START_SECONDS = 0.2  # for the request to cancel, before the connection is closed
GREETING_SECONDS = 10.0
LOOK_SECONDS = 0.1  # how often who waits looks whether the time is up
CONNECT_SECONDS = (2, 10)  # the least that libpq accepts, and the most that we wait for one host

_UNESCAPED_AT = re.compile(r"\w+://[^/?#]*@[^/?#]*@")

# A peer that vanished without a word is noticed within 30 s; the system's defaults take hours.
# What the user's URL says comes first.
_CONNECTION_DEFAULTS = {
    "application_name": "tasklib",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
}


def connection_string(config: Config) -> str:
    return _conninfo("database_url", config.database_url, config)


def listen_connection_string(config: Config) -> str:
    """For what must LISTEN: a direct address, where there is one."""
    if config.listen_database_url is None:
        return connection_string(config)
    return _conninfo("listen_database_url", config.listen_database_url, config)


def _conninfo(field: str, url: str, config: Config) -> str:
    if _UNESCAPED_AT.match(url):
        # libpq would take the rest of the password for the host, and say so in its error.
        raise InvalidConfig(f'{field} has two "@": write the one in the password as %40')
    try:
        given = conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        # libpq's own message repeats parts of the string, and with them the password.
        raise InvalidConfig(
            f"{field} cannot be read: write postgresql://user:password@host:port/database or libpq's key=value form"
        ) from None
    defaults = _CONNECTION_DEFAULTS | {"connect_timeout": _connect_timeout(config)}
    return conninfo.make_conninfo("", **{**defaults, **given, "client_encoding": "utf8"})


def _connect_timeout(config: Config) -> str:
    """No longer than a call waits: a host that does not answer would keep the next calls from trying another time."""
    least, most = CONNECT_SECONDS
    return str(min(max(math.ceil(config.database_timeout_seconds), least), most))


def worker_connection_string(config: Config, role: str) -> str:
    """For a worker's own connections: who looks at pg_stat_activity sees what each is for."""
    dsn = listen_connection_string(config) if role == "listen" else connection_string(config)
    given = conninfo.conninfo_to_dict(dsn)
    return conninfo.make_conninfo(dsn, application_name=f"{given['application_name']}:{role}")


# Where a name without a schema is looked for in our own sessions. By default that includes `public`, where others may
# make an operator that fits our columns better than PostgreSQL's own, and it would run with our rights. pg_temp is
# named, as the last: unnamed, it would be the first.
SEARCH_PATH: LiteralString = "pg_catalog, pg_temp"
OWN_SETTINGS = {"search_path": SEARCH_PATH}

# A worker's statements all go by an index. A plan that was made while the table was empty would read all of it, and be
# kept until the first ANALYZE; these settings rule that out. Its guarded statements need no stricter isolation, in
# which they might fail. Before PostgreSQL 18, a plan that they leave no choice is given an enormous cost, for which a
# server with LLVM (Debian's is one) compiles it, every time: 0.2 to 1.1 s for what takes 2 ms.
# Left to itself, PostgreSQL plans the claim anew each time, since it takes that plan for a little cheaper: 0.8 ms of
# the 1.4 that an empty claim took.
WORKER_SETTINGS = OWN_SETTINGS | {
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_bitmapscan": "off",
    "default_transaction_isolation": "read committed",
}


# Shutdown by an administrator, in a crash, while starting; the database dropped; idle sessions and transactions ended;
# too many connections, which a pooler may say in the middle of a session.
_CONNECTION_ENDED = frozenset({"57P01", "57P02", "57P03", "57P04", "57P05", "25P03", "25P04", "53300"})


# Read-only; no privilege (the session's role is another); cancelled by a time limit; a plan with other types, or with
# what does not exist any more; a schema, table, function or type that is not to be seen.
_SESSION_STATES = frozenset({"25006", "42501", "57014", "0A000", "XX000", "3F000", "42P01", "42883", "42704"})


class DeadlinePassed(psycopg.OperationalError):
    """No answer came in time. What the server did, or will do, is not known."""


class CommitDoubtful(psycopg.OperationalError):
    """The server committed, but stopped waiting for its synchronous standby, and said so only in a warning."""


class Prepared(NamedTuple):
    """The one statement of a session that was prepared by hand; numbered, for one that was cancelled half way may be
    there all the same.
    """

    number: int
    sql: str | None  # None: nobody knows whether the server has it

    @property
    def name(self) -> bytes:
        return b"tasklib_%d" % self.number


class _WithDeadline:
    """Psycopg's connections have no time limit on the client's side; ours have: `deadline`, in monotonic time."""

    pgconn: PGconn
    deadline = math.inf
    opened_at = -math.inf  # monotonic, and from before it was: a session's settings are read while it is made
    doubt: str | None = None
    is_pooled: bool = False  # before the server is a pooler: the next transaction may be another server connection's
    prepared: Prepared | None = None

    def _look_at_deadline(self) -> None:
        if time.monotonic() > self.deadline:
            self.abandon()
            raise DeadlinePassed("no answer from PostgreSQL in time")

    def abandon(self) -> None:
        """Ask the server to stop, or its backend would go on for nobody; then close: an answer may still come. The
        caller does not wait until a server that cannot be reached is asked. But a pooler forgets who was cancelled once
        the connection is closed: where asking takes no time, it comes first.
        """
        self.deadline = math.inf
        with contextlib.suppress(psycopg.Error, RuntimeError):  # closed already; no thread starts while Python ends
            request = _cancel_request(self.pgconn)
            asking = threading.Thread(target=_ask, args=[request], name="tasklib-cancel", daemon=True)
            asking.start()
            asking.join(HEAD_START_SECONDS)
        self.pgconn.finish()


def _ask(request: Callable[[], None]) -> None:
    with contextlib.suppress(psycopg.Error):  # a server that cannot be reached finds out by itself
        request()


def _cancel_request(pgconn: PGconn) -> Callable[[], None]:
    """Does not need the connection any more when it is called."""
    if not capabilities.has_cancel_safe():
        return pgconn.get_cancel().cancel
    request = pgconn.cancel_conn()
    give_up_at = time.monotonic() + CANCEL_SECONDS

    def look() -> None:
        if time.monotonic() > give_up_at:
            raise DeadlinePassed("PostgreSQL cannot be asked to stop")

    def ask() -> None:
        request.start()
        waiting.wait_conn(with_looks(generators.cancel(request), look), interval=LOOK_SECONDS)

    return ask


def with_looks(gen: Generator[Any, Any, RV], look: Callable[[], None]) -> Generator[Any, Any, RV]:
    """A generator of psycopg's comes back here ten times a second, also when nothing has happened."""
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            look()
            wanted = gen.send(ready)
    except StopIteration as stop:
        return cast("RV", stop.value)


@functools.cache
def own_adapters() -> AdaptersMap:
    """How our values are written and our answers read: as psycopg does it by default. An application may have changed
    that for all connections of its process, on `psycopg.adapters`.
    """
    types = TypesRegistry()
    postgres.register_default_types(types)
    made = AdaptersMap(types=types)
    postgres.register_default_adapters(made)
    register_all_arrays(made)
    set_json_loads(load_json, made)
    made.register_dumper(list, ListBinaryDumper)  # a fifth of the price of text
    return made


class BoundedConnection(_WithDeadline, psycopg.Connection[Any]):
    """With adapters of our own; one that is made for the application's use gets `context=psycopg.adapters`."""

    @classmethod
    def connect(cls, *args: Any, **kwargs: Any) -> Self:
        opened_at = time.monotonic()
        conn = super().connect(*args, **{"context": own_adapters(), **kwargs})
        conn.opened_at = opened_at
        return conn

    def wait(self, gen: Generator[Any, Any, RV], *args: Any, **kwargs: Any) -> RV:
        return super().wait(with_looks(gen, self._look_at_deadline), *args, **kwargs)


class WatchedConnection(_WithDeadline, psycopg.AsyncConnection[Any]):
    @classmethod
    async def connect(cls, *args: Any, **kwargs: Any) -> Self:
        opened_at = time.monotonic()
        conn = await super().connect(*args, **{"context": own_adapters(), **kwargs})
        conn.opened_at = opened_at
        return conn

    async def wait(self, gen: Generator[Any, Any, RV], *args: Any, **kwargs: Any) -> RV:
        return await super().wait(with_looks(gen, self._look_at_deadline), *args, **kwargs)


def prepare_connection(conn: BoundedConnection | WatchedConnection) -> None:
    """What each connection of ours gets when it is new."""

    def notice(diagnostic: errors.Diagnostic) -> None:
        # Cancelled while it waits for a synchronous standby, the server reports success all the same, and says in
        # a warning what it did. Its words depend on the language; the place in its source does not.
        if diagnostic.source_function == "SyncRepWaitForLSN":
            conn.doubt = diagnostic.message_primary or "no word from the synchronous standby"

    conn.add_notice_handler(notice)


def meet(conn: BoundedConnection, settings: Mapping[str, str] = OWN_SETTINGS) -> None:
    """Prepare a new connection, and find out whether a pooler is in between. The settings are for the whole session,
    and only if it is ours alone.
    """
    prepare_connection(conn)
    deadline = conn.deadline
    conn.deadline = min(deadline, time.monotonic() + GREETING_SECONDS)
    with _with_own_adapters(conn.cursor(row_factory=tuple_row)) as cursor:
        _note_pooler(conn, cursor.execute(*_greeting(conn, settings)).fetchone())
    if not conn.autocommit:
        conn.rollback()
    conn.deadline = deadline


async def meet_async(conn: WatchedConnection, settings: Mapping[str, str] = OWN_SETTINGS) -> None:
    prepare_connection(conn)
    conn.deadline = time.monotonic() + GREETING_SECONDS
    async with _with_own_adapters(conn.cursor(row_factory=tuple_row)) as cursor:
        await cursor.execute(*_greeting(conn, settings))
        _note_pooler(conn, await cursor.fetchone())
    if not conn.autocommit:
        await conn.rollback()
    conn.deadline = math.inf


def _greeting(
    conn: BoundedConnection | WatchedConnection, settings: Mapping[str, str]
) -> tuple[sql.Composed, list[int]]:
    """Asks who answers. A session that is ours alone gets its settings in the same round trip; one behind a pooler must
    not, for the next client would inherit them. `options` at the start would do as well, but PgBouncer refuses them.
    Every name has its schema: until now the search_path is somebody else's.
    """
    is_direct = sql.SQL("pg_catalog.pg_backend_pid() operator(pg_catalog.=) %s")
    given = sql.SQL("").join(
        sql.SQL(", case when {} then pg_catalog.set_config({}, {}, false) end").format(is_direct, name, value)
        for name, value in settings.items()
    )
    return sql.SQL("select pg_catalog.pg_backend_pid()") + given, [conn.info.backend_pid] * len(settings)


def set_local(settings: Mapping[str, str]) -> bytes:
    """For one transaction: behind a pooler no more than that is ours."""
    given = [sql.SQL("pg_catalog.set_config({}, {}, true)").format(name, value) for name, value in settings.items()]
    return (sql.SQL("select ") + sql.SQL(", ").join(given)).as_bytes(own_adapters())


@functools.cache
def _own_settings_for_once() -> bytes:
    return set_local(OWN_SETTINGS)


def _note_pooler(conn: BoundedConnection | WatchedConnection, greeted: Sequence[Any] | None) -> None:
    """A pooler makes up a process id for each of its clients, to know them again when they cancel."""
    conn.is_pooled = greeted is None or greeted[0] != conn.info.backend_pid
    if conn.is_pooled:
        conn.prepare_threshold = None


def send(conn: psycopg.Connection[Any], statements: Sequence[Statement[T]]) -> list[T]:
    results = []
    # A cursor of ours: the caller's connection may have another placeholder style, row factory and adapters.
    with _with_own_adapters(psycopg.RawCursor(conn, row_factory=tuple_row)) as cursor:
        for statement in statements:
            cursor.execute(statement.sql, statement.parameters, binary=True)
            # In a pipeline the answer has not come yet, and with it the description: fetchall waits for both.
            has_rows = cursor.description is not None or conn.pgconn.pipeline_status != PipelineStatus.OFF
            results.append(statement.read(cursor.fetchall() if has_rows else []))
    return results


async def send_async(conn: psycopg.AsyncConnection[Any], statements: Sequence[Statement[T]]) -> list[T]:
    results = []
    async with _with_own_adapters(psycopg.AsyncRawCursor(conn, row_factory=tuple_row)) as cursor:
        for statement in statements:
            await cursor.execute(statement.sql, statement.parameters, binary=True)
            results.append(statement.read(await cursor.fetchall()))
    return results


def _with_own_adapters(cursor: C) -> C:
    """Psycopg copies a connection's adapters for each cursor; to replace the copy leaves the connection as it is."""
    cursor._adapters = own_adapters()  # noqa: SLF001 - there is no public way to begin with other ones
    return cursor


def has_open_stream(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """A stream() or a COPY has begun on it, and nobody is going on with it at this moment. Each is a generator of
    psycopg's that holds the connection's lock; nothing else shows it. Slow, since it looks at every object: ask only if
    the lock is held.
    """
    for each in gc.get_objects():
        code, frame = None, None
        if type(each) is GeneratorType and not each.gi_running:
            code, frame = each.gi_code, each.gi_frame
        elif type(each) is AsyncGeneratorType and not each.ag_running:
            code, frame = each.ag_code, each.ag_frame
        if code in _STREAMS and frame is not None and frame.f_locals["self"].connection is conn:
            return True
    return False


_STREAMS = frozenset(
    inspect.unwrap(method).__code__
    for kind in (psycopg.Cursor, psycopg.AsyncCursor)
    for method in (kind.stream, kind.copy)
)


def send_alone(conn: BoundedConnection, statement: Statement[T]) -> T:
    """One statement, on a connection of our own that nobody else uses meanwhile, and that is in no transaction."""
    if _goes_with_settings(conn, statement):
        return send_as_transaction(conn, _own_settings_for_once(), statement)
    return conn.wait(_by_hand(conn, statement)) if _goes_by_hand(conn, statement) else send(conn, [statement])[0]


async def send_alone_async(conn: WatchedConnection, statement: Statement[T]) -> T:
    if _goes_with_settings(conn, statement):
        return await _send_as_transaction_async(conn, _own_settings_for_once(), statement)
    if _goes_by_hand(conn, statement):
        return await conn.wait(_by_hand(conn, statement))
    return (await send_async(conn, [statement]))[0]


def _goes_with_settings(conn: BoundedConnection | WatchedConnection, statement: Statement[Any]) -> bool:
    return conn.is_pooled and not statement.is_qualified


def _goes_by_hand(conn: BoundedConnection | WatchedConnection, statement: Statement[Any]) -> bool:
    """Not behind a pooler: it is prepared for the session."""
    return statement.as_bytes is not None and not conn.is_pooled


def _by_hand(conn: BoundedConnection | WatchedConnection, statement: Statement[T]) -> PQGen[T]:
    """Past psycopg's cursors, which find out for each execution what is known of some statements beforehand: the types,
    the plan, that one set of rows comes. That was two thirds of the client's time for a submit, and for a claim of one
    task. The waiting, its deadline and its cancellation stay psycopg's, and so does the reading of rows.
    """
    if conn.prepared is None or conn.prepared.sql != statement.sql:
        yield from _prepare(conn, statement.sql)
    assert conn.prepared is not None  # noqa: S101 - by now
    assert statement.as_bytes is not None  # noqa: S101 - asked before
    values = statement.as_bytes()
    formats = [Format.BINARY] * len(values) if statement.is_binary else None
    conn.pgconn.send_query_prepared(conn.prepared.name, values, formats, result_format=Format.BINARY)
    results = yield from generators.execute(conn.pgconn)
    try:
        return statement.read(_rows(conn, results))
    except psycopg.Error as error:
        if error.sqlstate in _OUTDATED:
            conn.prepared = conn.prepared._replace(sql=None)
        raise


def _prepare(conn: BoundedConnection | WatchedConnection, text: str) -> PQGen[None]:
    number = 0 if conn.prepared is None else conn.prepared.number + 1
    conn.prepared = Prepared(number, None)
    conn.pgconn.send_prepare(conn.prepared.name, text.encode())
    results = yield from generators.execute(conn.pgconn)
    _rows(conn, results)
    conn.prepared = Prepared(number, text)


def send_as_transaction(conn: BoundedConnection, settings: bytes, statement: Statement[T]) -> T:
    """One statement and its settings, on a connection that is ours until it has committed: all in one round trip."""
    try:
        return conn.wait(_as_transaction(conn, settings, statement))
    except psycopg.Error:
        with contextlib.suppress(psycopg.Error):  # the error before it says more
            conn.rollback()
        _close_unless_idle(conn)
        raise


async def _send_as_transaction_async(conn: WatchedConnection, settings: bytes, statement: Statement[T]) -> T:
    try:
        return await conn.wait(_as_transaction(conn, settings, statement))
    except psycopg.Error:
        with contextlib.suppress(psycopg.Error):
            await conn.rollback()
        _close_unless_idle(conn)
        raise


def _close_unless_idle(conn: BoundedConnection | WatchedConnection) -> None:
    if conn.info.transaction_status != TransactionStatus.IDLE:
        conn.pgconn.finish()


def _as_transaction(conn: BoundedConnection | WatchedConnection, settings: bytes, statement: Statement[T]) -> PQGen[T]:
    """Not by psycopg's own pipeline, which ends with a Flush after the Sync. If that comes a moment later, PgBouncer
    1.18 takes it for the begin of the next transaction, and keeps a server connection for who says nothing more.
    """
    dumper = Transformer(conn)
    values = dumper.dump_sequence(statement.parameters, [PyFormat.AUTO] * len(statement.parameters))
    send_query = functools.partial(conn.pgconn.send_query_params, result_format=Format.BINARY)
    commands: deque[Callable[[], None]] = deque(
        [
            functools.partial(send_query, b"begin isolation level read committed", None),
            functools.partial(send_query, settings, None),
            functools.partial(send_query, statement.sql.encode(), values, dumper.types, dumper.formats),
            functools.partial(send_query, b"commit", None),
            conn.pgconn.pipeline_sync,
        ]
    )
    expected = len(commands)
    conn.pgconn.enter_pipeline_mode()
    try:
        answers = yield from generators.pipeline_communicate(conn.pgconn, commands)
        yield from generators.send(conn.pgconn)
        while len(answers) < expected:
            answers.append((yield from generators.fetch_many(conn.pgconn)))
    except BaseException:
        conn.pgconn.finish()  # in the middle of an answer it is of no use any more
        raise
    conn.pgconn.exit_pipeline_mode()
    _begun, _set, answer, *_ended = results = [each for several in answers for each in several]
    _raise_failure(results)
    return statement.read(_loaded(conn, answer))


def _rows(conn: BoundedConnection | WatchedConnection, results: Sequence[PGresult]) -> list[Row]:
    """Of the first result. A commit that fails is told by a second one."""
    _raise_failure(results)
    return _loaded(conn, results[0])


def _raise_failure(results: Sequence[PGresult]) -> None:
    for each in results:
        if each.status == ExecStatus.FATAL_ERROR:
            raise errors.error_from_result(each, "utf-8")


def _loaded(conn: BoundedConnection | WatchedConnection, result: PGresult) -> list[Row]:
    if not result.ntuples:
        return []
    reader = Transformer(conn)
    reader.set_pgresult(result)
    return reader.load_rows(0, result.ntuples, tuple)


_OUTDATED = frozenset({"26000", "0A000"})  # somebody has deallocated it; its rows have other types now


def load_json(data: str | bytes) -> Any:
    """For looking at what SQL let in: one row that Python cannot read must not hide all others of a list.

    A number that no int or float holds comes as a Decimal; what is nested too deeply comes as a note that says so.
    """
    try:
        return from_json(data)
    except ValueError as error:
        unreadable = {"unreadable": str(error)}
    try:
        return json.loads(data, parse_int=_whole_number)
    except (ValueError, RecursionError):
        return unreadable


def _whole_number(digits: str) -> int | Decimal:
    return int(digits) if len(digits) <= MAX_NUMBER_DIGITS else Decimal(digits)


def raise_doubt(conn: BoundedConnection | WatchedConnection) -> None:
    doubt, conn.doubt = conn.doubt, None
    if doubt is not None:
        raise CommitDoubtful(doubt)


def is_connection_lost(error: psycopg.Error) -> bool:
    """The connection is of no use any more, or could not be made; another one may work."""
    if error.sqlstate is not None:
        return _is_end(error.sqlstate)
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)


def _is_end(sqlstate: str) -> bool:
    return sqlstate in _CONNECTION_ENDED or sqlstate.startswith("08")


def may_be_the_session(error: psycopg.Error) -> bool:
    """Perhaps only this session is refused: another one may work. Settings of a role or a database are read when a
    session begins, and kept; a session with what was a standby then stays with it; plans name what was dropped since.
    """
    return error.sqlstate in _SESSION_STATES


def is_passing_conflict(error: psycopg.Error) -> bool:
    return isinstance(error, errors.SerializationFailure | errors.DeadlockDetected)


def is_about_rows(error: psycopg.Error) -> bool:
    """A value or a row was refused, by PostgreSQL or by somebody's trigger: without it, the statement would pass. A
    code that PostgreSQL does not have is a trigger's own.
    """
    refusals = (
        psycopg.DataError, psycopg.IntegrityError, errors.RaiseException, errors.ProgramLimitExceeded,
        errors.DataCorrupted,
    )  # fmt: skip
    return isinstance(error, refusals) or (type(error) is psycopg.DatabaseError and error.sqlstate is not None)


def translate(error: psycopg.Error) -> TasklibError:
    """Our error for PostgreSQL's. The original stays behind it as the cause."""
    message = error.diag.message_primary or str(error).strip()
    if error.sqlstate is not None:
        return refusal(error.sqlstate, message, error.diag.message_hint)
    if isinstance(error, psycopg.DataError):
        return InvalidOptions(f"PostgreSQL refused a value: {message}")
    if is_connection_lost(error):
        return DatabaseUnavailable(f"PostgreSQL cannot be reached: {message}")
    return DatabaseError(message)


def refusal(sqlstate: str, message: str, hint: str | None = None) -> TasklibError:
    """By what PostgreSQL itself says, and so the same for every driver."""
    if sqlstate == "TL409":
        return IdempotencyConflict(f"{message}. {hint}")
    if sqlstate in {"TL400", "TL500"}:
        return InvalidOptions(f"{message}. {hint}" if hint else message)
    if sqlstate in _VALUE_REFUSED or sqlstate.startswith("22"):
        return InvalidOptions(f"PostgreSQL refused a value: {message}")
    if sqlstate in _SCHEMA_MISSING:
        return SchemaMissing(f"{message}. Run `tasklib migrate`.")
    return _refusal_by_the_server(sqlstate, message)


def _refusal_by_the_server(sqlstate: str, message: str) -> TasklibError:
    if sqlstate == _NO_PRIVILEGE:
        return DatabaseError(f"the role of this connection may not do this: {message}", sqlstate=sqlstate)
    if _is_end(sqlstate):
        return DatabaseUnavailable(f"PostgreSQL cannot be reached: {message}")
    if sqlstate == _ABORTED:
        message = (
            f"{message}: an earlier statement of this transaction failed, and nothing more can be done in it. Roll it "
            f"back and begin anew; run statements that may fail in a savepoint"
        )
    return DatabaseError(message, sqlstate=sqlstate)


_VALUE_REFUSED = frozenset({"23502", "23514"})  # not null, check
_SCHEMA_MISSING = frozenset({"3F000", "42P01", "42883"})  # schema, table, function
_NO_PRIVILEGE = "42501"
_ABORTED = "25P02"
