"""Runs statements within a deadline, on a pooled connection or in the caller's transaction, and raises our errors.

Every statement that the library sends may be repeated (a submit carries its id). So a statement whose connection was
lost is sent again, until the deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import psycopg
from psycopg import errors
from psycopg_pool import PoolTimeout

from tasklib.blocking import warn_if_on_loop
from tasklib.caller_transaction import run_in_caller_transaction, run_in_caller_transaction_async
from tasklib.clock import time
from tasklib.connection import (
    BoundedAsyncConnection,
    BoundedConnection,
    CommitDoubtful,
    DeadlinePassed,
    raise_doubt,
)
from tasklib.connection_string import connection_string, listen_connection_string
from tasklib.database_errors import is_connection_lost, is_passing_conflict, may_be_the_session, translate
from tasklib.errors import CommitUnknown, DatabaseUnavailable
from tasklib.pools import ProcessPools
from tasklib.sending import send, send_alone, send_alone_async, send_async
from tasklib.statements import Statement, Statements
from tasklib.waiting import WaitingRoom

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tasklib.config import Config

T = TypeVar("T")

LONGEST_PAUSE_SECONDS = 1.0


class Database:
    """One configured database. Only `run` and `run_async` differ for sync and async callers."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._conninfo = connection_string(config)
        self._listen_conninfo = listen_connection_string(config)
        self._is_schema_checked = False
        self._processes: dict[int, _Process] = {}
        weakref.finalize(self, _close_this_process, self._processes)

    def run(self, *statements: Statement[T], connection: Any = None) -> list[T]:
        """Run the statements in one transaction: the caller's, if there is a `connection`."""
        if connection is not None:
            return run_in_caller_transaction(connection, statements)
        warn_if_on_loop()
        attempt = _Attempt(self._config.database_timeout_seconds, statements)
        if not self._is_schema_checked:
            self.check_schema(attempt.remaining())
        while True:
            pool = self._process().pools.sync_pool()
            try:
                with pool.connection(timeout=attempt.remaining()) as conn:
                    conn.deadline = attempt.begin(conn)
                    return _execute(conn, statements)
            except psycopg.Error as error:
                time.sleep(attempt.pause_after(error, pool.get_stats()))

    async def run_async(self, *statements: Statement[T], connection: Any = None, since: float | None = None) -> list[T]:
        """The async form of `run`. `since`, in monotonic time, says when the call began, if that was before now."""
        if connection is not None:
            return await run_in_caller_transaction_async(connection, statements)
        attempt = _Attempt(self._config.database_timeout_seconds, statements, since)
        if not self._is_schema_checked:
            await self._check_schema_async(attempt.remaining())
        while True:
            own = await self._process().pools.loop_pool()
            try:
                conn = await own.take(attempt.remaining())
                try:
                    conn.deadline = attempt.begin(conn)
                    return await _execute_async(conn, statements)
                finally:
                    await own.give_back(conn)
            except psycopg.Error as error:
                await asyncio.sleep(attempt.pause_after(error, own.pool.get_stats()))

    @property
    def waiting_room(self) -> WaitingRoom:
        return self._process().waiting_room

    def close(self) -> None:
        """Close the sync pool. An async pool closes with its event loop, or by `close_async`."""
        self.waiting_room.close()
        self._process().pools.close()

    async def close_async(self) -> None:
        await asyncio.to_thread(self.waiting_room.close)
        await self._process().pools.close_async()

    def check_schema(self, seconds: float | None = None) -> None:
        """Before first use, and once: create a missing schema, refuse one that does not fit."""
        if self._is_schema_checked:
            return
        try:
            self._process().schema_check.start_or_join(self._ensure_schema).result(
                self._config.database_timeout_seconds if seconds is None else seconds
            )
        except concurrent.futures.TimeoutError:
            raise self._no_answer() from None

    async def _check_schema_async(self, seconds: float) -> None:
        check = self._process().schema_check.start_or_join(self._ensure_schema)
        try:
            await asyncio.wait_for(asyncio.wrap_future(check), seconds)
        except TimeoutError:
            raise self._no_answer() from None

    def _no_answer(self) -> DatabaseUnavailable:
        return DatabaseUnavailable(f"no answer from PostgreSQL within {self._config.database_timeout_seconds:g} s")

    def _ensure_schema(self) -> None:
        # Not at the top: `python -m tasklib.migrate` would find itself imported already, and warn.
        from tasklib import migrate  # noqa: PLC0415

        if not self._is_schema_checked:
            migrate.ensure(self._config)
            self._is_schema_checked = True

    def _process(self) -> _Process:
        pid = os.getpid()
        return self._processes.get(pid) or self._processes.setdefault(pid, self._new_process())  # setdefault is atomic

    def _new_process(self) -> _Process:
        seconds = self._config.database_timeout_seconds
        pools = ProcessPools(self._conninfo, self._config.pool_size, seconds)
        return _Process(pools, WaitingRoom(self._listen_conninfo, Statements(self._config), seconds), _SharedCheck())


class _Process(NamedTuple):
    """What a process must not share with the process that forked it."""

    pools: ProcessPools
    waiting_room: WaitingRoom
    schema_check: _SharedCheck


class _SharedCheck:
    """One check for all calls that need it, in a thread of its own. So each call waits for it no longer than its own
    timeout, even while a host name is resolved or a host does not answer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: Future[None] | None = None

    def start_or_join(self, check: Callable[[], None]) -> Future[None]:
        with self._lock:
            if self._under_way is None or self._under_way.done():
                self._under_way = Future()
                self._under_way.set_running_or_notify_cancel()  # a call that gives up must not cancel it for others
                args = (check, self._under_way)
                threading.Thread(target=self._run, args=args, name="tasklib-schema-check", daemon=True).start()
            return self._under_way

    @staticmethod
    def _run(check: Callable[[], None], future: Future[None]) -> None:
        try:
            check()
        except BaseException as error:  # noqa: BLE001 - raised in every call that waits for it
            future.set_exception(error)
        else:
            future.set_result(None)


class _Attempt:
    """The deadline of one call, and what to do after a failure: pause and try again, or raise our error."""

    def __init__(self, seconds: float, statements: Sequence[Statement[Any]], since: float | None = None) -> None:
        self._seconds = seconds
        self._began_at = time.monotonic() if since is None else since
        self._deadline = self._began_at + seconds
        self._is_change = any(statement.is_change for statement in statements)
        self._begun = 0
        self._is_session_old = False

    def remaining(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def begin(self, conn: BoundedConnection | BoundedAsyncConnection) -> float:
        self._begun += 1
        self._is_session_old = conn.opened_at < self._began_at
        return self._deadline

    def pause_after(self, error: psycopg.Error, pool: Mapping[str, int]) -> float:
        """There is no pause until every connection of the pool was tried: after a restart all idle ones are dead."""
        if not isinstance(error, CommitDoubtful | DeadlinePassed | PoolTimeout):
            if not self._may_pass(error):
                raise translate(error) from error
            fresh = max(self._begun - pool.get("pool_max", 0), 0)
            pause = min(0.01 * 2.0 ** min(fresh, 10), LONGEST_PAUSE_SECONDS) if fresh else 0.0
            if pause < self.remaining():
                return pause
        raise self._gave_up(error) from error

    def _may_pass(self, error: psycopg.Error) -> bool:
        """Trying again may help. An error that may concern only this session is final if the session is newer than the
        call.
        """
        if is_connection_lost(error) or is_passing_conflict(error):
            return True
        return may_be_the_session(error) and self._is_session_old and not isinstance(error, errors.QueryCanceled)

    def _gave_up(self, error: Exception) -> DatabaseUnavailable:
        if self._begun and self._is_change:
            return CommitUnknown(
                f"PostgreSQL did not confirm the change ({error}): it may have happened or not. "
                f"To be sure, submit again with the same idempotency_key, or the same NewTask."
            )
        return DatabaseUnavailable(
            f"no answer from PostgreSQL within {self._seconds:g} s: {str(error) or 'time is up'}. "
            f"Is it up, and is Config.pool_size large enough?"
        )


def _close_this_process(processes: dict[int, _Process]) -> None:
    """Close only this process's connections: to close one that came over a fork would end the parent's session."""
    if (process := processes.get(os.getpid())) is not None:
        process.pools.close()


def _execute(conn: BoundedConnection, statements: Sequence[Statement[T]]) -> list[T]:
    conn.doubt = None  # an interrupted call may have left one
    try:
        if len(statements) == 1:
            results = [send_alone(conn, statements[0])]
        else:
            with conn.transaction():
                results = send(conn, statements)
    except psycopg.Error as error:
        if may_be_the_session(error):
            conn.close()
        raise
    raise_doubt(conn)
    return results


async def _execute_async(conn: BoundedAsyncConnection, statements: Sequence[Statement[T]]) -> list[T]:
    conn.doubt = None
    try:
        if len(statements) == 1:
            results = [await send_alone_async(conn, statements[0])]
        else:
            async with conn.transaction():
                results = await send_async(conn, statements)
    except psycopg.Error as error:
        if may_be_the_session(error):
            await conn.close()
        raise
    raise_doubt(conn)
    return results
