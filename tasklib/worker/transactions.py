"""The connection that a task may ask for: what it writes there and its completion are one transaction.

The completion is the guarded statement that settles every task, sent on this connection before its COMMIT. So a worker
that has lost its lease completes nothing and writes nothing; and if the COMMIT's answer is lost, the task is given back
by the same guarded statement: had it been committed after all, nobody holds it any more, and nothing is changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import psycopg
from psycopg import conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from tasklib.connection import (
    BoundedConnection,
    WatchedConnection,
    connection_string,
    is_connection_lost,
    meet,
    meet_async,
    send,
    send_async,
)
from tasklib.errors import InvalidOptions, NoCurrentTask
from tasklib.log import log
from tasklib.outcomes import Completed, Failed, Interrupted
from tasklib.statements import settlement_json
from tasklib.worker.problems import problem_of
from tasklib.worker.runners import outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from uuid import UUID

    from tasklib.config import Config
    from tasklib.outcomes import Outcome, Settlement
    from tasklib.statements import Statement, WorkerStatements
    from tasklib.worker.clock import DatabaseClock
    from tasklib.worker.execution import Execution

C = TypeVar("C", BoundedConnection, WatchedConnection)

MOST_FREE_RUNS = 10  # that a broken connection may cause, before it is taken for the task's own fault

# A task may think for as long as its own timeout says. Sent first of all, it also tells whether the connection lives.
# The mark is gone when the transaction is: a COMMIT or ROLLBACK in the task's own SQL, which psycopg cannot refuse.
_BEGIN = "select set_config('idle_in_transaction_session_timeout', '0', true), set_config('tasklib.task', 'here', true)"
_IS_WHOLE = "select current_setting('tasklib.task', true) = 'here'"


@dataclass(frozen=True, slots=True)
class Transaction(Generic[C]):
    """Open while its task runs. psycopg's own block around it refuses a commit or rollback by the task itself."""

    conn: C
    block: Any  # psycopg's Transaction or AsyncTransaction


class Transactions:
    """At most one for each task that runs, so at most as many connections as there are slots. Those that ended are kept
    for the next: a pool would bring threads of its own. One that is kept for the other kind of function makes room.
    """

    def __init__(
        self,
        config: Config,
        statements: WorkerStatements,
        clock: DatabaseClock,
        decide: Callable[[Execution, Outcome, datetime], Settlement],
        take_progress: Callable[[Execution], str | None],
    ) -> None:
        self._dsn = conninfo.make_conninfo(connection_string(config), application_name="tasklib:task")
        self._seconds = config.database_timeout_seconds
        self._statements = statements
        self._clock = clock
        self._decide = decide
        self._take_progress = take_progress
        self._opening = threading.Lock()
        self._opening_async = asyncio.Lock()
        self._idle: list[BoundedConnection] = []
        self._idle_async: list[WatchedConnection] = []

    def open(self, execution: Execution) -> BoundedConnection:
        if execution.is_coroutine:
            raise InvalidOptions("in an async function: await current_task().async_connection()")
        with self._opening:  # the task may have threads of its own
            _refuse_ended(execution)
            if execution.transaction is None:
                execution.transaction = self._begin()
            conn: BoundedConnection = execution.transaction.conn
            return conn

    async def open_async(self, execution: Execution) -> WatchedConnection:
        if not execution.is_coroutine:
            raise InvalidOptions("in a function that is not async: current_task().connection")
        async with self._opening_async:  # two may ask at once
            _refuse_ended(execution)
            if execution.transaction is None:
                execution.transaction = await self._begin_async()
            conn: WatchedConnection = execution.transaction.conn
            return conn

    def end(self, execution: Execution, outcome: Outcome) -> Outcome:
        """The function has ended so: commit, or roll back. The answer is what the outcome is after that."""
        execution.has_ended = True
        transaction, execution.transaction = execution.transaction, None
        if transaction is None:
            return outcome
        conn: BoundedConnection = transaction.conn
        conn.deadline = time.monotonic() + self._seconds
        conn.row_factory = tuple_row  # the task may have set another
        try:
            if isinstance(outcome, Completed):
                if conn.closed:
                    return _spoilt(_CLOSED)
                if conn.execute(_IS_WHOLE).fetchone() != (True,):
                    return _spoilt(_ENDED)
                if not send(conn, [self._completion(execution, outcome)])[0]:
                    return _not_ours(execution)
                execution.is_committed = None  # from here on nobody knows, until the answer comes
                transaction.block.__exit__(None, None, None)
                execution.is_committed = True
        except Exception as error:  # noqa: BLE001 - the thread, its slot and its task would be lost
            return _outcome_of(execution, error)
        finally:
            self._give_back(conn, transaction.block)
        return outcome

    async def end_async(self, execution: Execution, outcome: Outcome) -> Outcome:
        """Not to be cancelled in the middle of a COMMIT."""
        execution.has_ended = True
        transaction, execution.transaction = execution.transaction, None
        if transaction is None:
            return outcome
        ending = asyncio.ensure_future(self._end_async(execution, outcome, transaction))
        while not ending.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(ending)
        return ending.result()

    async def _end_async(self, execution: Execution, outcome: Outcome, transaction: Transaction[Any]) -> Outcome:
        conn: WatchedConnection = transaction.conn
        conn.row_factory = tuple_row
        try:
            if isinstance(outcome, Completed):
                if conn.closed:
                    return _spoilt(_CLOSED)
                async with asyncio.timeout(self._seconds):
                    if await (await conn.execute(_IS_WHOLE)).fetchone() != (True,):
                        return _spoilt(_ENDED)
                    if not (await send_async(conn, [self._completion(execution, outcome)]))[0]:
                        return _not_ours(execution)
                    execution.is_committed = None
                    await transaction.block.__aexit__(None, None, None)
                    execution.is_committed = True
        except Exception as error:  # noqa: BLE001 - as above
            return _outcome_of(execution, error)
        finally:
            await self._give_back_async(conn, transaction.block)
        return outcome

    def close(self) -> None:
        while self._idle:
            self._idle.pop().pgconn.finish()
        while self._idle_async:
            self._idle_async.pop().pgconn.finish()

    def _completion(self, execution: Execution, outcome: Completed) -> Statement[list[UUID]]:
        now = self._clock.now()
        settled = settlement_json(
            execution.task, self._decide(execution, outcome, now), started_at=execution.started_at, finished_at=now,
            progress=self._take_progress(execution),
        )  # fmt: skip
        return self._statements.settle(execution.task.worker_id, [settled])

    # --- connections ---

    def _begin(self) -> Transaction[BoundedConnection]:
        while True:
            is_new = not self._idle
            conn = self._connect() if is_new else self._idle.pop()
            block = conn.transaction()
            try:
                block.__enter__()
                conn.execute(_BEGIN)
            except psycopg.Error as error:
                conn.close()
                if is_new or not is_connection_lost(error):
                    raise
            else:
                return Transaction(conn, block)

    async def _begin_async(self) -> Transaction[WatchedConnection]:
        while True:
            is_new = not self._idle_async
            conn = await self._connect_async() if is_new else self._idle_async.pop()
            block = conn.transaction()
            try:
                await block.__aenter__()
                await conn.execute(_BEGIN)
            except psycopg.Error as error:
                await conn.close()
                if is_new or not is_connection_lost(error):
                    raise
            else:
                return Transaction(conn, block)

    def _connect(self) -> BoundedConnection:
        _make_room(self._idle_async)
        conn = BoundedConnection.connect(self._dsn)
        meet(conn)
        conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED  # its row is changed by the worker meanwhile
        return conn

    async def _connect_async(self) -> WatchedConnection:
        _make_room(self._idle)
        conn = await WatchedConnection.connect(self._dsn)
        await meet_async(conn)
        await conn.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
        return conn

    def _give_back(self, conn: BoundedConnection, block: psycopg.Transaction) -> None:
        """What is still open is rolled back; what cannot be is closed, and rolled back by the server."""
        try:
            if conn.info.transaction_status == TransactionStatus.ACTIVE:  # an interrupt came in the middle of a query
                conn.abandon()
            elif conn.info.transaction_status != TransactionStatus.IDLE:
                block.__exit__(psycopg.Rollback, psycopg.Rollback(), None)
        except Exception as error:  # noqa: BLE001 - see above
            _tell_broken(error)
            conn.pgconn.finish()
        conn.deadline = float("inf")
        if _is_clean(conn):
            self._idle.append(conn)
        else:
            conn.close()

    async def _give_back_async(self, conn: WatchedConnection, block: psycopg.AsyncTransaction) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                if conn.info.transaction_status == TransactionStatus.ACTIVE:
                    await conn.cancel_safe(timeout=self._seconds)
                elif conn.info.transaction_status != TransactionStatus.IDLE:
                    await block.__aexit__(psycopg.Rollback, psycopg.Rollback(), None)
        except Exception as error:  # noqa: BLE001 - as above
            _tell_broken(error)
            conn.pgconn.finish()
        if _is_clean(conn):
            self._idle_async.append(conn)
        else:
            await conn.close()


def _is_clean(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    return not conn.closed and conn.info.transaction_status == TransactionStatus.IDLE


def _refuse_ended(execution: Execution) -> None:
    if execution.has_ended:
        raise NoCurrentTask(f"the task {execution.id} has ended: its connection went with it")


def _not_ours(execution: Execution) -> Outcome:
    """Another worker has it by now. What was written here is rolled back."""
    log.warning("lease.lost", task=execution.task.name, task_id=execution.id, token=execution.task.fencing_token)
    return Interrupted(began=True)


def _outcome_of(execution: Execution, error: Exception) -> Outcome:
    """The function has returned, and its work was not committed; or, if the connection broke, perhaps was. Then the
    task is given back at no cost, which changes nothing if it was.
    """
    task = execution.task
    if isinstance(error, psycopg.errors.InFailedSqlTransaction):
        return _spoilt(_ABORTED)
    if not isinstance(error, psycopg.Error) or is_connection_lost(error):
        _tell_broken(error, task=task.name, task_id=task.id)
        if execution.is_committed is None or task.attempt - task.retry_count < MOST_FREE_RUNS:
            return Interrupted(began=True)
    execution.is_committed = False
    return outcome_of(execution, error)


_CLOSED = "current_task().connection was closed, by the task or by the server, before the task had ended"
_ENDED = (
    "the transaction of current_task().connection was ended by a COMMIT or ROLLBACK in the task's own SQL: what was "
    "written before it is not part of the completion. Leave both to the worker."
)
_ABORTED = (
    "an error on current_task().connection was not let through: PostgreSQL has given up the transaction, and nothing "
    "of it can be committed. Use `with connection.transaction():` around what may fail."
)


def _spoilt(reason: str) -> Failed:
    """Nothing can be completed in this transaction any more."""
    return Failed(problem_of(InvalidOptions(reason), code="TRANSACTION_SPOILT"))


def _make_room(idle: list[Any]) -> None:
    with contextlib.suppress(IndexError):
        idle.pop().pgconn.finish()


def _tell_broken(error: Exception, **about: object) -> None:
    log.warning("transaction.broken", error=str(error).partition("\n")[0] or type(error).__name__, **about)
