"""Submit inside the caller's transaction: statements on a connection that the caller passes, which we never commit.

The kind of a connection is found by the name of its class, so that no driver or framework is imported that the
application does not use. A connection of SQLAlchemy's is used through SQLAlchemy, never through the driver's connection
below it: with asyncpg that one is not in the transaction until SQLAlchemy has sent something, and a submit through it
survived the rollback.
"""

from __future__ import annotations

import asyncio
import functools
import re
import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from uuid import UUID

import psycopg

from tasklib.connection import has_open_stream
from tasklib.database_errors import error_for_sqlstate, translate
from tasklib.errors import DatabaseError, DatabaseUnavailable, InvalidOptions, TasklibError
from tasklib.sending import send, send_async

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from tasklib.statements import Statement

T = TypeVar("T")
TURN_SECONDS = 0.1  # how long to wait for another thread that uses the connection


def run_in_caller_transaction(connection: Any, statements: Sequence[Statement[T]]) -> list[T]:
    run = _SYNC.get(_kind(connection.__class__))
    if run is None:
        _refuse(connection, wanted="sync")
    with _our_errors():
        return run(connection, statements)


async def run_in_caller_transaction_async(connection: Any, statements: Sequence[Statement[T]]) -> list[T]:
    run = _ASYNC.get(_kind(connection.__class__))
    if run is None:
        _refuse(connection, wanted="async")
    with _our_errors():
        return await run(connection, statements)


# --- how each kind of connection runs statements. Several statements are all or none, even without a transaction ---


def _on_psycopg(conn: psycopg.Connection[Any], statements: Sequence[Statement[T]]) -> list[T]:
    _refuse_open_stream(conn)
    with conn.transaction() if _needs_transaction(conn, statements) else nullcontext():
        return send(conn, statements)


async def _on_async_psycopg(conn: psycopg.AsyncConnection[Any], statements: Sequence[Statement[T]]) -> list[T]:
    await _refuse_open_stream_async(conn)
    async with conn.transaction() if _needs_transaction(conn, statements) else nullcontext():
        return await send_async(conn, statements)


def _needs_transaction(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], statements: Sequence[Any]) -> bool:
    """Only where there would be none: conn.transaction() on an idle connection commits at its end."""
    if conn.closed and not conn.broken:
        raise InvalidOptions("this connection is closed: submit before its block ends")
    is_idle = conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    return len(statements) > 1 and conn.autocommit and is_idle


async def _on_asyncpg(conn: Any, statements: Sequence[Statement[T]]) -> list[T]:
    async with conn.transaction() if len(statements) > 1 and not conn.is_in_transaction() else nullcontext():
        return [
            statement.read([tuple(row) for row in await conn.fetch(statement.sql, *_plain(statement.parameters))])
            for statement in statements
        ]


def _on_session(session: Any, statements: Sequence[Statement[T]]) -> list[T]:
    """On the session's connection, in its transaction. Flushes nothing: an error in the application's own rows would be
    raised by our call.
    """
    _refuse_other_databases(session.get_bind().dialect.name)
    return _on_sqlalchemy(session.connection(), statements)


def _on_sqlalchemy(connection: Any, statements: Sequence[Statement[T]]) -> list[T]:
    _refuse_other_databases(connection.dialect.name)
    _refuse_open_stream(connection.connection.driver_connection)
    with connection.begin_nested() if len(statements) > 1 else nullcontext():
        return [
            statement.read([tuple(row) for row in connection.execute(_as_text(statement.sql), _named(statement))])
            for statement in statements
        ]


def _on_django(connection: Any, statements: Sequence[Statement[T]]) -> list[T]:
    from django.db import transaction  # noqa: PLC0415 - an application that has such a connection has imported it

    _refuse_other_databases(connection.vendor)
    _refuse_open_stream(connection.connection)
    block = transaction.atomic(using=connection.alias) if len(statements) > 1 else nullcontext()
    with block, connection.cursor() as cursor:
        return _with_cursor(cursor, statements)


def _on_psycopg2(conn: Any, statements: Sequence[Statement[T]]) -> list[T]:
    if conn.async_:
        raise InvalidOptions(
            "this psycopg2 connection is asynchronous, and commits every statement by itself: open one without async_"
        )
    plain = sys.modules["psycopg2.extensions"].cursor  # the connection's own cursors may return rows as dicts
    with conn.cursor(cursor_factory=plain) as cursor:
        if len(statements) == 1:
            return _with_cursor(cursor, statements)
        cursor.execute("savepoint tasklib_many")
        results = _with_cursor(cursor, statements)
        cursor.execute("release savepoint tasklib_many")
        return results


def _with_cursor(cursor: Any, statements: Sequence[Statement[T]]) -> list[T]:
    results = []
    for statement in statements:
        cursor.execute(_as_pyformat(statement.sql), _named(statement))
        results.append(statement.read(list(cursor.fetchall())))
    return results


_SYNC: Final[dict[str | None, Callable[[Any, Sequence[Statement[Any]]], list[Any]]]] = {
    "psycopg.Connection": _on_psycopg,
    "psycopg2.connection": _on_psycopg2,
    "sqlalchemy.Connection": _on_sqlalchemy,
    "sqlalchemy.Session": _on_session,
    "sqlalchemy.scoped_session": lambda scoped, statements: _on_session(scoped(), statements),
    "django.BaseDatabaseWrapper": _on_django,
    "django.ConnectionProxy": _on_django,
}
_ASYNC: Final[dict[str | None, Callable[[Any, Sequence[Statement[Any]]], Awaitable[list[Any]]]]] = {
    "psycopg.AsyncConnection": _on_async_psycopg,
    "asyncpg.Connection": _on_asyncpg,
    "asyncpg.PoolConnectionProxy": _on_asyncpg,
    "sqlalchemy.AsyncConnection": lambda connection, statements: connection.run_sync(_on_sqlalchemy, statements),
    "sqlalchemy.AsyncSession": lambda session, statements: session.run_sync(_on_session, statements),
    "sqlalchemy.async_scoped_session": lambda scoped, statements: scoped().run_sync(_on_session, statements),
}
_SOURCES: Final = {  # objects that hand out connections
    "sqlalchemy.Engine",
    "sqlalchemy.AsyncEngine",
    "sqlalchemy.sessionmaker",
    "sqlalchemy.async_sessionmaker",
    "asyncpg.Pool",
    "psycopg_pool.BasePool",
}


# --- parameters as other drivers want them ---

_PARAMETER = re.compile(r"\$(\d+)")


@functools.cache
def _as_text(sql: str) -> Any:
    from sqlalchemy import text  # noqa: PLC0415 - an application that has such a connection has imported it

    return text(_PARAMETER.sub(r":p\1 ", sql))  # the space: SQLAlchemy does not see a parameter in `:p1::uuid`


@functools.cache
def _as_pyformat(sql: str) -> str:
    return _PARAMETER.sub(r"%(p\1)s", sql.replace("%", "%%"))


def _named(statement: Statement[Any]) -> dict[str, Any]:
    return {f"p{number}": value for number, value in enumerate(_plain(statement.parameters), 1)}


def _plain(parameters: Sequence[Any]) -> list[Any]:
    """Not every driver accepts a UUID; all accept its text."""
    return [str(value) if isinstance(value, UUID) else value for value in parameters]


# --- connections that are refused, and our errors for those of drivers ---


def _kinds(cls: type) -> tuple[str, ...]:
    """Package and name of a class and its base classes: `sqlalchemy.Session`, in whichever module it is defined."""
    return tuple(f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in cls.__mro__)


@functools.lru_cache(maxsize=64)
def _kind(cls: Any) -> str | None:
    return next((kind for kind in _kinds(cls) if kind in _SYNC or kind in _ASYNC), None)


def _refuse(connection: Any, *, wanted: str) -> NoReturn:
    kind = _kind(connection.__class__)
    if kind in _ASYNC:
        raise InvalidOptions(f"{kind} is async: await the async submit, or pass a sync connection")
    if kind in _SYNC:
        raise InvalidOptions(
            f"{kind} is sync, and would block the event loop: use the sync form (submit_sync), or pass an "
            f"async connection ({_names(_ASYNC)})"
        )
    source = next((kind for kind in _kinds(type(connection)) if kind in _SOURCES), None)
    if source is not None:
        raise InvalidOptions(
            f"{source} hands out connections: pass one of them, or a session, to submit in its transaction; without "
            f"connection= the submit uses a connection of its own"
        )
    table = _SYNC if wanted == "sync" else _ASYNC
    raise InvalidOptions(f"connection takes {_names(table)} for {wanted} submits, got {type(connection).__name__}")


def _names(table: dict[str | None, Any]) -> str:
    return ", ".join(str(kind) for kind in table)


def _refuse_other_databases(name: str) -> None:
    if name != "postgresql":
        raise InvalidOptions(
            f"connection leads to {name}: the tasks are in PostgreSQL, and no transaction spans both. Leave out "
            f"connection=, and submit after your commit."
        )


def _refuse_open_stream(conn: Any) -> None:
    """Psycopg holds the connection's lock while a stream() or a COPY is open, and a submit inside it would wait for
    ever. A lock that another thread holds for a moment is waited for. `conn` is the driver's connection; only psycopg's
    has such a lock.
    """
    lock = getattr(conn, "lock", None)
    if lock is None or not lock.locked():
        return
    if not isinstance(lock, asyncio.Lock) and lock.acquire(timeout=TURN_SECONDS):
        lock.release()
    elif has_open_stream(conn):
        raise InvalidOptions(_STREAMING)


async def _refuse_open_stream_async(conn: psycopg.AsyncConnection[Any]) -> None:
    if not conn.lock.locked():
        return
    try:
        async with asyncio.timeout(TURN_SECONDS), conn.lock:
            return
    except TimeoutError:
        if has_open_stream(conn):
            raise InvalidOptions(_STREAMING) from None


_STREAMING = (
    "a stream() or a COPY is open on this connection, and nothing else can be sent until it ends: submit after it, or "
    "on another connection"
)


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except TasklibError:
        raise
    except Exception as error:
        chain = _chain(error)
        ours = _translated(chain)
        if ours is None:
            raise
        # The cause is the driver's error: SQLAlchemy's shows the parameters, and arguments may be secrets.
        raise ours from chain[-1]


def _chain(error: BaseException) -> list[BaseException]:
    """The framework's error first, the driver's last."""
    chain = [error]
    while (inner := getattr(chain[-1], "orig", None) or chain[-1].__cause__) is not None and inner not in chain:
        chain.append(inner)
    return chain


def _translated(chain: Sequence[BaseException]) -> TasklibError | None:
    """Our error for this one. None: it has nothing to do with the database."""
    for error in reversed(chain):
        sqlstate = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if sqlstate == _NO_TRANSACTION:
            return InvalidOptions(
                "this connection commits every statement by itself (autocommit), and these tasks need several "
                "statements: begin a transaction first"
            )
        if isinstance(error, UnicodeEncodeError):
            return InvalidOptions(
                f"the client_encoding of this connection, {error.encoding}, has no such character: set it to UTF8"
            )
        if isinstance(sqlstate, str):
            return error_for_sqlstate(sqlstate, *_message_and_hint(error))
        if isinstance(error, psycopg.Error):
            return translate(error)
    return _without_state(chain)


def _without_state(chain: Sequence[BaseException]) -> TasklibError | None:
    kinds = {kind for error in chain for kind in _kinds(type(error))}
    message = str(chain[-1]).strip()
    if kinds & _MISUSES:
        return InvalidOptions(f"this connection cannot be used: {message}")
    if kinds & _LOSSES:
        return DatabaseUnavailable(f"PostgreSQL cannot be reached: {message}")
    return DatabaseError(message) if kinds & _DATABASE_ERRORS else None


_NO_TRANSACTION = "25P01"
_MISUSES = {
    "sqlalchemy.InvalidRequestError",
    "asyncpg.InterfaceError",
    "psycopg2.InterfaceError",
    "django.InterfaceError",
}
_LOSSES = {"psycopg2.OperationalError"}
_DATABASE_ERRORS = {"sqlalchemy.SQLAlchemyError", "psycopg2.Error", "django.DatabaseError"}


def _message_and_hint(error: Any) -> tuple[str, str | None]:
    """PostgreSQL's message and hint: psycopg keeps them in `diag`, asyncpg on the error itself."""
    diagnostic = getattr(error, "diag", None)
    if diagnostic is not None:
        return diagnostic.message_primary or str(error).strip(), diagnostic.message_hint
    return getattr(error, "message", None) or str(error).strip(), getattr(error, "hint", None)
