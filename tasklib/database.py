"""Runs statements: on pools of our own or on the caller's connection, within a deadline, and with our errors.

Pools belong to one process and one event loop: after a fork, and in another loop, new ones are made.
Every statement that the library sends may be repeated (a submit carries its id), so a lost connection is
answered by doing it again until the deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout
from psycopg_pool.sched_async import AsyncScheduler

from tasklib.blocking import warn_if_on_loop
from tasklib.borrowed import run_borrowed, run_borrowed_async
from tasklib.clock import time
from tasklib.connection import (
    BoundedConnection,
    CommitDoubtful,
    DeadlinePassed,
    WatchedConnection,
    connection_string,
    is_connection_lost,
    is_passing_conflict,
    listen_connection_string,
    may_be_the_session,
    meet,
    meet_async,
    raise_doubt,
    send,
    send_alone,
    send_alone_async,
    send_async,
    translate,
)
from tasklib.errors import CommitUnknown, DatabaseUnavailable
from tasklib.statements import Statements
from tasklib.waiting import WaitingRoom

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from tasklib.config import Config
    from tasklib.statements import Statement

T = TypeVar("T")

LONGEST_PAUSE_SECONDS = 1.0
RECONNECT_SECONDS = 3.0  # a pool's own pauses double; after so long they begin anew
CLOSE_SECONDS = 5.0


class Database:
    """One configured database: `run` and `run_async` are where sync and async differ, and nowhere else."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._conninfo = connection_string(config)
        self.waiting_room = WaitingRoom(
            listen_connection_string(config), Statements(config), config.database_timeout_seconds
        )
        self._is_schema_checked = False
        self._processes: dict[int, _ProcessPools] = {}
        weakref.finalize(self, _close_this_process, self._processes)

    def run(self, *statements: Statement[T], connection: Any = None) -> list[T]:
        """All in one transaction; on the caller's connection, in the caller's."""
        if connection is not None:
            return run_borrowed(connection, statements)
        warn_if_on_loop()
        attempt = _Attempt(self._config.database_timeout_seconds, statements)
        if not self._is_schema_checked:
            self.check_schema(attempt.remaining())
        while True:
            pool = self._pools().sync_pool()
            try:
                with pool.connection(timeout=attempt.remaining()) as conn:
                    conn.deadline = attempt.begin(conn)
                    return _execute(conn, statements)
            except psycopg.Error as error:
                time.sleep(attempt.pause_after(error, pool.get_stats()))

    async def run_async(self, *statements: Statement[T], connection: Any = None, since: float | None = None) -> list[T]:
        """`since`, in monotonic time, is when the call has begun, if that was before now."""
        if connection is not None:
            return await run_borrowed_async(connection, statements)
        attempt = _Attempt(self._config.database_timeout_seconds, statements, since)
        if not self._is_schema_checked:
            await self._check_schema_async(attempt.remaining())
        while True:
            own = await self._pools().loop_pool()
            try:
                conn = await own.take(attempt.remaining())
                try:
                    conn.deadline = attempt.begin(conn)
                    return await _execute_async(conn, statements)
                finally:
                    await own.give_back(conn)
            except psycopg.Error as error:
                await asyncio.sleep(attempt.pause_after(error, own.pool.get_stats()))

    def close(self) -> None:
        """Close the sync pool. An async pool closes with its event loop, or by `close_async`."""
        self.waiting_room.close()
        self._pools().close()

    async def close_async(self) -> None:
        await asyncio.to_thread(self.waiting_room.close)
        await self._pools().close_async()

    def check_schema(self, seconds: float | None = None) -> None:
        """Before first use: make a missing schema, refuse one that does not fit. Once is enough."""
        if self._is_schema_checked:
            return
        try:
            self._pools().schema_check.start_or_join(self._ensure_schema).result(
                self._config.database_timeout_seconds if seconds is None else seconds
            )
        except concurrent.futures.TimeoutError:
            raise self._no_answer() from None

    async def _check_schema_async(self, seconds: float) -> None:
        check = self._pools().schema_check.start_or_join(self._ensure_schema)
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

    def _pools(self) -> _ProcessPools:
        # setdefault is atomic: two threads of a new process agree on one.
        pid = os.getpid()
        return self._processes.get(pid) or self._processes.setdefault(
            pid, _ProcessPools(self._conninfo, self._config.pool_size, self._config.database_timeout_seconds)
        )


class _SharedCheck:
    """One check for all who need it, in a thread of its own: each waits for it no longer than he may, also while a name
    is resolved or a host does not answer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: Future[None] | None = None

    def start_or_join(self, check: Callable[[], None]) -> Future[None]:
        with self._lock:
            if self._under_way is None or self._under_way.done():
                self._under_way = Future()
                self._under_way.set_running_or_notify_cancel()  # who gives up must not cancel it for the others
                args = (check, self._under_way)
                threading.Thread(target=self._run, args=args, name="tasklib-schema-check", daemon=True).start()
            return self._under_way

    @staticmethod
    def _run(check: Callable[[], None], future: Future[None]) -> None:
        try:
            check()
        except BaseException as error:  # noqa: BLE001 - told to all who wait for it
            future.set_exception(error)
        else:
            future.set_result(None)


class _Attempt:
    """One call's deadline, and what to do after a failure: pause and try again, or raise our error."""

    def __init__(self, seconds: float, statements: Sequence[Statement[Any]], since: float | None = None) -> None:
        self._seconds = seconds
        self._began_at = time.monotonic() if since is None else since
        self._deadline = self._began_at + seconds
        self._is_change = any(statement.is_change for statement in statements)
        self._begun = 0
        self._is_session_old = False

    def remaining(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def begin(self, conn: BoundedConnection | WatchedConnection) -> float:
        self._begun += 1
        self._is_session_old = conn.opened_at < self._began_at
        return self._deadline

    def pause_after(self, error: psycopg.Error, pool: Mapping[str, int]) -> float:
        """After a restart every idle connection of the pool is dead; they are gone through without a pause."""
        if not isinstance(error, CommitDoubtful | DeadlinePassed | PoolTimeout):
            if not self._may_pass(error):
                raise translate(error) from error
            fresh = max(self._begun - pool.get("pool_max", 0), 0)
            pause = min(0.01 * 2.0 ** min(fresh, 10), LONGEST_PAUSE_SECONDS) if fresh else 0.0
            if pause < self.remaining():
                return pause
        raise self._gave_up(error) from error

    def _may_pass(self, error: psycopg.Error) -> bool:
        """What may be a matter of the session is believed only from one that is newer than the call."""
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


class _ProcessPools:
    """The pools of one process: one for its threads, one for each event loop."""

    def __init__(self, conninfo: str, size: int, seconds: float) -> None:
        self._conninfo = conninfo
        self._size = size
        self._close_seconds = min(seconds, CLOSE_SECONDS)
        self._lock = threading.Lock()
        self.schema_check = _SharedCheck()
        self._sync: ConnectionPool[BoundedConnection] | None = None
        self._async: dict[asyncio.AbstractEventLoop, _LoopPool] = {}

    def sync_pool(self) -> ConnectionPool[BoundedConnection]:
        with self._lock:
            if self._sync is None:
                self._sync = ConnectionPool(
                    self._conninfo,
                    connection_class=BoundedConnection,
                    kwargs={"autocommit": True},
                    configure=meet,
                    min_size=0,
                    max_size=self._size,
                    reconnect_timeout=RECONNECT_SECONDS,
                    reconnect_failed=_try_again_for_who_waits,
                    open=True,
                    name="tasklib",
                )
            return self._sync

    async def loop_pool(self) -> _LoopPool:
        loop = asyncio.get_running_loop()
        with self._lock:
            for closed in [known for known in self._async if known.is_closed()]:
                del self._async[closed]
            if loop not in self._async:
                self._async[loop] = _LoopPool(self._conninfo, self._size, self._close_seconds)
            mine = self._async[loop]
        await mine.opened()
        return mine

    def close(self) -> None:
        with self._lock:
            pool, self._sync = self._sync, None
        if pool is not None:
            pool.close(self._close_seconds)

    async def close_async(self) -> None:
        with self._lock:
            mine = self._async.pop(asyncio.get_running_loop(), None)
        if mine is not None:
            await mine.close()


class _AsyncPool(AsyncConnectionPool[WatchedConnection]):
    """psycopg's own goes on connecting when its tasks are cancelled, and `asyncio.run` would wait for them for ever."""

    def _start_workers(self) -> None:
        self._sched = _Scheduler()
        super()._start_workers()

    @classmethod
    async def worker(cls, q: Any) -> None:
        with contextlib.suppress(_WasCancelled):
            await super().worker(cast("Any", _UntilCancelled(q)))


class _WasCancelled(Exception):
    pass


class _UntilCancelled:
    """The pool's queue of work, which ends for a task that is cancelled."""

    def __init__(self, queue: asyncio.Queue[Any]) -> None:
        self._queue = queue

    async def get(self) -> Any:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise _WasCancelled
        return await self._queue.get()


class _Scheduler(AsyncScheduler):
    """Ends when it is cancelled. psycopg's own goes on if that happens during an action, or together with a new one."""

    def __init__(self) -> None:
        super().__init__()
        self._event: Any = _EventUntilCancelled()


class _EventUntilCancelled(asyncio.Event):
    """`asyncio.wait_for`, which psycopg uses here, forgets a cancel that comes together with the event."""

    async def wait_timeout(self, timeout: float) -> bool:  # noqa: ASYNC109 - psycopg's signature
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        try:
            async with asyncio.timeout(timeout):
                return await self.wait()
        except TimeoutError:
            return False


class _LoopPool:
    """An async pool that closes with its event loop, also when nobody says so.

    asyncio ends a loop's async generators last of all: this one's `finally` is our notice. Until then it is kept: the
    collector would take the pool's own tasks with it, and leave connections open.
    """

    _kept: ClassVar[dict[_LoopPool, asyncio.AbstractEventLoop]] = {}

    def __init__(self, conninfo: str, size: int, close_seconds: float) -> None:
        self._close_seconds = close_seconds
        self.pool: AsyncConnectionPool[WatchedConnection] = _AsyncPool(
            conninfo,
            connection_class=WatchedConnection,
            kwargs={"autocommit": True},
            configure=self._meet,
            min_size=0,
            max_size=size,
            reconnect_timeout=RECONNECT_SECONDS,
            reconnect_failed=_try_again_for_who_waits_async,
            open=False,
            name="tasklib",
        )
        self._lifetime = self._open_until_closed()
        self._opening = asyncio.Lock()
        self._is_open = False
        self._spare: WatchedConnection | None = None  # taken from the pool, and kept for who asks next
        self._out = 0  # taken, and not given back
        self._made: weakref.WeakSet[WatchedConnection] = weakref.WeakSet()

    async def opened(self) -> None:
        if self._is_open:
            return
        async with self._opening:
            if not self._is_open:
                await anext(self._lifetime)
                self._is_open = True

    async def _meet(self, conn: WatchedConnection) -> None:
        await meet_async(conn)
        self._made.add(conn)

    async def take(self, seconds: float) -> WatchedConnection:
        spare, self._spare = self._spare, None
        conn = await self.pool.getconn(seconds) if spare is None else spare
        self._out += 1
        return conn

    async def give_back(self, conn: WatchedConnection) -> None:
        """One that is well is kept at hand, unless all are out, and somebody may wait: the way through the pool and
        back is a tenth of the time of a submit.
        """
        are_all_out = self._out == self.pool.max_size
        self._out -= 1
        is_well = not conn.closed and conn.info.transaction_status == TransactionStatus.IDLE
        is_well = is_well and time.monotonic() < conn.opened_at + self.pool.max_lifetime  # the pool replaces it then
        if is_well and self._is_open and self._spare is None and not are_all_out:
            self._spare = conn
        else:
            await self.pool.putconn(conn)

    async def close(self) -> None:
        await self._lifetime.aclose()

    async def _open_until_closed(self) -> AsyncGenerator[None, None]:
        for pool, loop in list(self._kept.items()):
            if loop.is_closed():  # by somebody who did not end its generators
                self._kept.pop(pool, None)
        self._kept[self] = asyncio.get_running_loop()
        await self.pool.open()
        try:
            yield
        finally:
            self._kept.pop(self, None)
            self._is_open = False
            # The end of a loop has cancelled the pool's own tasks by now: then it forgets what it holds.
            with contextlib.suppress(asyncio.CancelledError):
                await self.pool.close(self._close_seconds)
            for conn in self._made:
                conn.pgconn.finish()


def _close_this_process(processes: dict[int, _ProcessPools]) -> None:
    """Only our own: to close a connection that was inherited over a fork would end the parent's session."""
    pools = processes.get(os.getpid())
    if pools is not None:
        pools.close()


def _try_again_for_who_waits(pool: ConnectionPool[Any]) -> None:
    """A pool tries to connect when somebody asks it to, with pauses that double; and when it has given up, not before
    somebody asks again. So it would come back from an outage as late as the outage was long.
    """
    if pool.get_stats()["requests_waiting"]:
        pool.check()


async def _try_again_for_who_waits_async(pool: AsyncConnectionPool[Any]) -> None:
    if pool.get_stats()["requests_waiting"]:
        await pool.check()


def _execute(conn: BoundedConnection, statements: Sequence[Statement[T]]) -> list[T]:
    conn.doubt = None  # a call that was interrupted may have left one behind
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


async def _execute_async(conn: WatchedConnection, statements: Sequence[Statement[T]]) -> list[T]:
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
