"""The connection of one task, which `current_task()` offers: how it is opened, used and closed.

The steps are written once, as coroutines, for sync and async tasks. For a sync task they never wait for an event loop:
psycopg's blocking call has returned before its answer is awaited, and `run_blocking` runs the coroutine to its end in
the task's own thread. What does differ is in the two subclasses: how long to wait for other users of the connection,
and how to stop a query.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from tasklib.clock import time
from tasklib.connection import (
    BoundedAsyncConnection,
    BoundedConnection,
    has_open_stream,
    meet,
    meet_async,
)
from tasklib.log import log
from tasklib.sending import send, send_async
from tasklib.statements import Statement

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

T = TypeVar("T")

LEAVE_SECONDS = 2.0  # for another thread to leave a connection that is to be closed
TURN_SECONDS = 0.1  # for another user of the connection to end its statement, before we look for an open stream

# The task may be idle in its transaction for as long as its own timeout allows. The start time of the transaction tells
# it from a later one, after a COMMIT or ROLLBACK in the task's own SQL, which psycopg cannot refuse. A setting could
# not: RESET ALL would remove it.
_BEGIN: Statement[tuple[float, str]] = Statement(
    """select pg_catalog.set_config('idle_in_transaction_session_timeout', '0', true),
              pg_catalog.date_part('epoch', pg_catalog.now()),
              pg_catalog.current_setting('role')""",
    (),
    lambda rows: (rows[0][1], rows[0][2]),
)

CLOSED = "current_task().connection was closed, by the task or by the server, before the task had ended"
BUSY = (
    "current_task().connection was still in use when the task returned, so the task could not be completed on it. Read "
    "a stream() to its end or close it, leave the `with` block of a COPY, and wait for threads that use the connection."
)
PIPELINE = (
    "a pipeline of current_task().connection was still open when the task returned. Use "
    "`with connection.pipeline():` (`async with` in an async function), and return after the block."
)


def run_blocking(steps: Coroutine[Any, Any, T]) -> T:
    """Run the steps of a sync task, none of which suspends."""
    try:
        steps.send(None)
    except StopIteration as end:
        return cast("T", end.value)
    raise AssertionError("a step on a sync task's connection has waited for an event loop")


async def answer(value: Awaitable[T] | T) -> T:
    """What a call of psycopg's returned: the async half returns an awaitable, the sync half the answer itself."""
    return cast("T", await value if isinstance(value, Awaitable) else value)


class TaskConnection:
    """A connection whose transaction is open while its task runs. psycopg's `transaction()` block around it refuses a
    commit or a rollback by the task.
    """

    _connect: ClassVar[Callable[..., Any]]
    _meet: ClassVar[Callable[..., Any]]
    _send: ClassVar[Callable[..., Any]]
    sleep: ClassVar[Callable[..., Any]]
    _stop_query: ClassVar[Callable[..., Any]]

    def __init__(self, conn: Any) -> None:
        self.conn = conn  # BoundedConnection or BoundedAsyncConnection
        block, is_async = conn.transaction(), isinstance(conn, psycopg.AsyncConnection)
        self._begin, self._end = (block.__aenter__, block.__aexit__) if is_async else (block.__enter__, block.__exit__)
        self.began = 0.0  # by the database's clock
        self.role = "none"  # as the setting has it: "none", unless the URL says otherwise

    @classmethod
    async def open(cls, dsn: str, seconds: float) -> Self:
        conn = await answer(cls._connect(dsn, context=psycopg.adapters))
        try:
            connection = cls(conn)
            await connection._prepare(time.monotonic() + seconds)
        except BaseException:  # an interrupt of the task, too
            conn.pgconn.finish()
            raise
        return connection

    async def _prepare(self, deadline: float) -> None:
        self.conn.deadline = deadline
        await answer(self._meet(self.conn, {}))
        self.conn.deadline = deadline
        await answer(self.conn.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED))  # the worker changes its row
        await answer(self._begin())
        self.began, self.role = await self.send(_BEGIN)
        self.conn.deadline = math.inf  # from here on the task uses it, within its own timeout

    async def send(self, statement: Statement[T]) -> T:
        answers: list[T] = await answer(self._send(self.conn, [statement]))
        return answers[0]

    async def commit(self) -> None:
        await answer(self._end(None, None, None))

    async def roll_back(self) -> None:
        await answer(self._end(psycopg.Rollback, psycopg.Rollback(), None))

    async def ask_after_rollback(self, settings: Statement[None], question: Statement[T]) -> T:
        """Ask in a transaction of its own."""
        await self.send(settings)
        found = await self.send(question)
        await answer(self.conn.rollback())
        return found

    async def flaw(self, _seconds: float) -> str | None:
        """Why no task can be completed on this connection; None: one can."""
        if self.conn.closed:
            return CLOSED
        if self.conn.info.pipeline_status != PipelineStatus.OFF:
            return PIPELINE
        return BUSY if self._is_in_query() else None

    async def close(self, seconds: float, *, is_alone: bool) -> None:
        """Roll back what is open. If that fails, the server rolls back when the connection is closed."""
        try:
            async with self.time_limit(seconds):
                if not is_alone or self._is_in_query():
                    await answer(self._stop_query(self.conn, seconds))
                elif self._is_in_transaction():
                    await self.roll_back()
        except Exception as error:  # noqa: BLE001 - see above
            log_broken(error)
        self.conn.pgconn.finish()

    def _is_in_query(self) -> bool:
        return bool(self.conn.info.transaction_status == TransactionStatus.ACTIVE)

    def _is_in_transaction(self) -> bool:
        is_idle = self.conn.info.transaction_status == TransactionStatus.IDLE
        return not self.conn.closed and not is_idle and self.conn.info.pipeline_status == PipelineStatus.OFF

    def alone(self, seconds: float) -> AbstractContextManager[bool]:  # noqa: ARG002 - see SyncTaskConnection
        """Keep other users off the connection. False: one of them is still using it after these seconds."""
        return contextlib.nullcontext(enter_result=True)  # coroutines: `flaw` waits for them

    def time_limit(self, seconds: float) -> AbstractAsyncContextManager[Any]:
        raise NotImplementedError


class SyncTaskConnection(TaskConnection):
    """Of a task in a thread. The task may have started other threads, which may use the connection still."""

    conn: BoundedConnection
    _connect = BoundedConnection.connect
    _meet = staticmethod(meet)
    _send = staticmethod(send)
    sleep = staticmethod(time.sleep)
    _stop_query = staticmethod(lambda conn, _seconds: conn.abandon())

    @contextlib.contextmanager
    def alone(self, seconds: float) -> Iterator[bool]:
        """Hold psycopg's lock: other threads wait for it, and then find the connection closed. An open stream holds the
        lock for ever.
        """
        conn, lock, first = self.conn, self.conn.lock, min(seconds, TURN_SECONDS)
        is_alone = lock.acquire(timeout=first) or (
            seconds > 0 and not has_open_stream(conn) and lock.acquire(timeout=seconds - first)
        )
        if not is_alone:
            yield False
            return
        conn.lock = ours = cast("threading.Lock", threading.RLock())  # psycopg takes it for each statement
        with ours:
            yield True
        lock.release()

    def time_limit(self, seconds: float) -> AbstractAsyncContextManager[Any]:
        self.conn.deadline = time.monotonic() + seconds
        return contextlib.nullcontext()

    async def close(self, seconds: float, *, is_alone: bool) -> None:
        """If another thread is inside libpq, to close the connection there would crash the process. But that thread
        looks at the deadline ten times a second, has its query cancelled, and closes the connection itself.
        """
        if is_alone or has_open_stream(self.conn):
            await super().close(seconds, is_alone=is_alone)
            return
        self.conn.deadline = -math.inf
        if self.conn.lock.acquire(timeout=LEAVE_SECONDS):
            self.conn.lock.release()
            self.conn.pgconn.finish()


class AsyncTaskConnection(TaskConnection):
    """Of a task on an event loop."""

    conn: BoundedAsyncConnection
    _connect = BoundedAsyncConnection.connect
    _meet = staticmethod(meet_async)
    _send = staticmethod(send_async)
    sleep = staticmethod(asyncio.sleep)
    _stop_query = staticmethod(lambda conn, seconds: conn.cancel_safe(timeout=seconds))

    async def flaw(self, seconds: float) -> str | None:
        lock = self.conn.lock
        if lock.locked() and has_open_stream(self.conn):
            return BUSY
        try:
            async with asyncio.timeout(seconds), lock:
                return await super().flaw(seconds)
        except TimeoutError:
            return BUSY

    def time_limit(self, seconds: float) -> AbstractAsyncContextManager[Any]:
        return asyncio.timeout(seconds)


def log_broken(error: Exception, **about: object) -> None:
    log.warning("transaction.broken", error=str(error).partition("\n")[0] or type(error).__name__, **about)
