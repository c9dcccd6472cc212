"""How a statement is sent on one psycopg connection, and how its rows are read.

`send` works on any connection, also the caller's. `send_alone` is the fast way on a connection of our own.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg import errors, generators
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import ExecStatus, Format, PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from tasklib.connection import (
    OWN_SETTINGS,
    BoundedAsyncConnection,
    BoundedConnection,
    Prepared,
    set_local,
    with_own_adapters,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg.abc import PQGen
    from psycopg.pq.abc import PGresult

    from tasklib.statements import Row, Statement

T = TypeVar("T")
_OUTDATED = frozenset({"26000", "0A000"})  # a prepared statement was deallocated; its rows have other types now


def send(conn: psycopg.Connection[Any], statements: Sequence[Statement[T]]) -> list[T]:
    results = []
    # A cursor of ours: the caller's connection may have another placeholder style, row factory and adapters.
    with with_own_adapters(psycopg.RawCursor(conn, row_factory=tuple_row)) as cursor:
        for statement in statements:
            cursor.execute(statement.sql, statement.parameters, binary=True)
            # In a pipeline neither the answer nor its description has come yet: fetchall waits for both.
            has_rows = cursor.description is not None or conn.pgconn.pipeline_status != PipelineStatus.OFF
            results.append(statement.read(cursor.fetchall() if has_rows else []))
    return results


async def send_async(conn: psycopg.AsyncConnection[Any], statements: Sequence[Statement[T]]) -> list[T]:
    results = []
    async with with_own_adapters(psycopg.AsyncRawCursor(conn, row_factory=tuple_row)) as cursor:
        for statement in statements:
            await cursor.execute(statement.sql, statement.parameters, binary=True)
            results.append(statement.read(await cursor.fetchall()))
    return results


def send_alone(conn: BoundedConnection, statement: Statement[T]) -> T:
    """Send one statement on a connection of our own that is in no transaction, and that nothing else uses meanwhile."""
    if _goes_with_settings(conn, statement):
        return send_as_transaction(conn, _own_settings_for_once(), statement)
    return conn.wait(_by_hand(conn, statement)) if _goes_by_hand(conn, statement) else send(conn, [statement])[0]


async def send_alone_async(conn: BoundedAsyncConnection, statement: Statement[T]) -> T:
    if _goes_with_settings(conn, statement):
        return await _send_as_transaction_async(conn, _own_settings_for_once(), statement)
    if _goes_by_hand(conn, statement):
        return await conn.wait(_by_hand(conn, statement))
    return (await send_async(conn, [statement]))[0]


def _goes_with_settings(conn: BoundedConnection | BoundedAsyncConnection, statement: Statement[Any]) -> bool:
    return conn.is_pooled and not statement.is_qualified


def _goes_by_hand(conn: BoundedConnection | BoundedAsyncConnection, statement: Statement[Any]) -> bool:
    """Not behind a pooler, since the statement is prepared for the session."""
    return statement.as_bytes is not None and not conn.is_pooled


@functools.cache
def _own_settings_for_once() -> bytes:
    return set_local(OWN_SETTINGS)


def _by_hand(conn: BoundedConnection | BoundedAsyncConnection, statement: Statement[T]) -> PQGen[T]:
    """Send it without psycopg's cursors. For each execution they find out what is known here beforehand: the types, the
    plan, and that there is one set of rows. That took two thirds of the client's time for a submit, and for a claim of
    one task. psycopg still waits, cancels and reads the rows.
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


def _prepare(conn: BoundedConnection | BoundedAsyncConnection, text: str) -> PQGen[None]:
    number = 0 if conn.prepared is None else conn.prepared.number + 1
    conn.prepared = Prepared(number, None)
    conn.pgconn.send_prepare(conn.prepared.name, text.encode())
    results = yield from generators.execute(conn.pgconn)
    _rows(conn, results)
    conn.prepared = Prepared(number, text)


def send_as_transaction(conn: BoundedConnection, settings: bytes, statement: Statement[T]) -> T:
    """Send one statement in a transaction with these settings, all in one round trip."""
    try:
        return conn.wait(_as_transaction(conn, settings, statement))
    except psycopg.Error:
        with contextlib.suppress(psycopg.Error):  # the error before it says more
            conn.rollback()
        _close_unless_idle(conn)
        raise


async def _send_as_transaction_async(conn: BoundedAsyncConnection, settings: bytes, statement: Statement[T]) -> T:
    try:
        return await conn.wait(_as_transaction(conn, settings, statement))
    except psycopg.Error:
        with contextlib.suppress(psycopg.Error):
            await conn.rollback()
        _close_unless_idle(conn)
        raise


def _close_unless_idle(conn: BoundedConnection | BoundedAsyncConnection) -> None:
    if conn.info.transaction_status != TransactionStatus.IDLE:
        conn.pgconn.finish()


def _as_transaction(
    conn: BoundedConnection | BoundedAsyncConnection, settings: bytes, statement: Statement[T]
) -> PQGen[T]:
    """Not by psycopg's own pipeline, which sends a Flush after the Sync. If the Flush arrives a moment later, PgBouncer
    1.18 takes it for the begin of the next transaction, and reserves a server connection that stays unused.
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
        conn.pgconn.finish()  # it stopped in the middle of an answer, and cannot be used any more
        raise
    conn.pgconn.exit_pipeline_mode()
    _begun, _set, answer, *_ended = results = [each for several in answers for each in several]
    _raise_failure(results)
    return statement.read(_loaded(conn, answer))


def _rows(conn: BoundedConnection | BoundedAsyncConnection, results: Sequence[PGresult]) -> list[Row]:
    """The rows of the first result. A commit that fails is reported by a second result."""
    _raise_failure(results)
    return _loaded(conn, results[0])


def _raise_failure(results: Sequence[PGresult]) -> None:
    for each in results:
        if each.status == ExecStatus.FATAL_ERROR:
            raise errors.error_from_result(each, "utf-8")


def _loaded(conn: BoundedConnection | BoundedAsyncConnection, result: PGresult) -> list[Row]:
    if not result.ntuples:
        return []
    reader = Transformer(conn)
    reader.set_pgresult(result)
    return reader.load_rows(0, result.ntuples, tuple)
