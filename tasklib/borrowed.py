"""Statements on a connection that is somebody else's: in the caller's transaction, and never committed by us."""

from __future__ import annotations

from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from tasklib.connection import send, send_async, translate
from tasklib.errors import InvalidOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasklib.statements import Statement

T = TypeVar("T")


def _needs_transaction(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], statements: Sequence[Any]) -> bool:
    """Only where there would be none. Otherwise conn.transaction() on an idle connection would commit at its end."""
    is_idle = conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    return len(statements) > 1 and conn.autocommit and is_idle


def run_borrowed(conn: Any, statements: Sequence[Statement[T]]) -> list[T]:
    if not isinstance(conn, psycopg.Connection):
        raise InvalidOptions(f"connection must be a psycopg.Connection for a sync submit, got {type(conn).__name__}")
    try:
        with ExitStack() as stack:
            if _needs_transaction(conn, statements):
                stack.enter_context(conn.transaction())
            return send(conn, statements)
    except psycopg.Error as error:
        raise translate(error) from error


async def run_borrowed_async(conn: Any, statements: Sequence[Statement[T]]) -> list[T]:
    if not isinstance(conn, psycopg.AsyncConnection):
        raise InvalidOptions(
            f"connection must be a psycopg.AsyncConnection for an async submit, got {type(conn).__name__}; "
            f"with a psycopg.Connection use the sync verbs (submit_sync)"
        )
    try:
        async with AsyncExitStack() as stack:
            if _needs_transaction(conn, statements):
                await stack.enter_async_context(conn.transaction())
            return await send_async(conn, statements)
    except psycopg.Error as error:
        raise translate(error) from error
