"""The connection pools of one process: one for its threads, and one for each of its event loops."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, cast

from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from psycopg_pool.sched_async import AsyncScheduler

from tasklib.clock import time
from tasklib.connection import BoundedAsyncConnection, BoundedConnection, meet, meet_async

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

RECONNECT_SECONDS = 3.0  # a pool doubles its pauses between tries to connect; after so long it starts over
CLOSE_SECONDS = 5.0
_POOL_SETTINGS: dict[str, Any] = {
    "kwargs": {"autocommit": True},
    "min_size": 0,
    "reconnect_timeout": RECONNECT_SECONDS,
    "name": "tasklib",
}


class ProcessPools:
    """Made anew in every process: a connection must not be used on both sides of a fork."""

    def __init__(self, conninfo: str, size: int, seconds: float) -> None:
        self._conninfo = conninfo
        self._size = size
        self._close_seconds = min(seconds, CLOSE_SECONDS)
        self._lock = threading.Lock()
        self._sync: ConnectionPool[BoundedConnection] | None = None
        self._async: dict[asyncio.AbstractEventLoop, LoopPool] = {}

    def sync_pool(self) -> ConnectionPool[BoundedConnection]:
        with self._lock:
            if self._sync is None:
                self._sync = ConnectionPool(
                    self._conninfo,
                    connection_class=BoundedConnection,
                    configure=meet,
                    max_size=self._size,
                    reconnect_failed=_reconnect,
                    open=True,
                    **_POOL_SETTINGS,
                )
            return self._sync

    async def loop_pool(self) -> LoopPool:
        loop = asyncio.get_running_loop()
        with self._lock:
            for closed in [known for known in self._async if known.is_closed()]:
                del self._async[closed]
            if loop not in self._async:
                self._async[loop] = LoopPool(self._conninfo, self._size, self._close_seconds)
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


class LoopPool:
    """An async pool that closes with its event loop, even if the application never closes it.

    asyncio ends a loop's async generators last of all, so the `finally` of `_open_until_closed` runs when the loop
    ends. Until then `_kept` refers to the pool. Otherwise the garbage collector could remove the pool together with its
    own tasks, and leave its connections open.
    """

    _kept: ClassVar[dict[LoopPool, asyncio.AbstractEventLoop]] = {}

    def __init__(self, conninfo: str, size: int, close_seconds: float) -> None:
        self._close_seconds = close_seconds
        self.pool: AsyncConnectionPool[BoundedAsyncConnection] = _AsyncPool(
            conninfo,
            connection_class=BoundedAsyncConnection,
            configure=self._meet,
            max_size=size,
            reconnect_failed=_reconnect_async,
            open=False,
            **_POOL_SETTINGS,
        )
        self._lifetime = self._open_until_closed()
        self._opening = asyncio.Lock()
        self._is_open = False
        self._spare: BoundedAsyncConnection | None = None  # taken from the pool, and kept for the next call
        self._out = 0  # how many connections are taken and not given back
        self._made: weakref.WeakSet[BoundedAsyncConnection] = weakref.WeakSet()

    async def opened(self) -> None:
        if self._is_open:
            return
        async with self._opening:
            if not self._is_open:
                await anext(self._lifetime)
                self._is_open = True

    async def _meet(self, conn: BoundedAsyncConnection) -> None:
        await meet_async(conn)
        self._made.add(conn)

    async def take(self, seconds: float) -> BoundedAsyncConnection:
        spare, self._spare = self._spare, None
        conn = await self.pool.getconn(seconds) if spare is None else spare
        self._out += 1
        return conn

    async def give_back(self, conn: BoundedAsyncConnection) -> None:
        """Keep a healthy connection for the next call: to take it from the pool and to give it back would be a tenth of
        the time of a submit. It goes back to the pool if all are taken, since another call may wait for it there, and
        if it is so old that the pool replaces it.
        """
        are_all_out = self._out == self.pool.max_size
        self._out -= 1
        is_young = time.monotonic() < conn.opened_at + self.pool.max_lifetime
        is_healthy = not conn.closed and conn.info.transaction_status == TransactionStatus.IDLE and is_young
        if is_healthy and self._is_open and self._spare is None and not are_all_out:
            self._spare = conn
        else:
            await self.pool.putconn(conn)

    async def close(self) -> None:
        await self._lifetime.aclose()

    async def _open_until_closed(self) -> AsyncGenerator[None, None]:
        for pool, loop in list(self._kept.items()):
            if loop.is_closed():  # it was closed without its generators being ended
                self._kept.pop(pool, None)
        self._kept[self] = asyncio.get_running_loop()
        await self.pool.open()
        try:
            yield
        finally:
            self._kept.pop(self, None)
            self._is_open = False
            # At the end of a loop the pool's own tasks are cancelled already, and the pool forgets its connections.
            with contextlib.suppress(asyncio.CancelledError):
                await self.pool.close(self._close_seconds)
            for conn in self._made:
                conn.pgconn.finish()


class _AsyncPool(AsyncConnectionPool[BoundedAsyncConnection]):
    """A pool whose tasks end when they are cancelled. Those of psycopg's pool go on connecting, and `asyncio.run` would
    wait for them for ever.
    """

    def _start_workers(self) -> None:
        self._sched = _Scheduler()
        super()._start_workers()

    @classmethod
    async def worker(cls, q: Any) -> None:
        with contextlib.suppress(_WasCancelled):
            await super().worker(cast("Any", _UntilCancelled(q)))


class _UntilCancelled:
    """The pool's queue of work. It ends the loop of a worker task that is cancelled."""

    def __init__(self, queue: asyncio.Queue[Any]) -> None:
        self._queue = queue

    async def get(self) -> Any:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise _WasCancelled
        return await self._queue.get()


class _WasCancelled(Exception):
    pass


class _Scheduler(AsyncScheduler):
    """Ends when it is cancelled. psycopg's scheduler goes on if that happens during an action, or together with a new
    one.
    """

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


def _reconnect(pool: ConnectionPool[Any]) -> None:
    """Try again while calls wait. A pool that has given up connecting would not try before the next request, and its
    pauses double: it would come back from an outage as late as the outage was long.
    """
    if pool.get_stats()["requests_waiting"]:
        pool.check()


async def _reconnect_async(pool: AsyncConnectionPool[Any]) -> None:
    if pool.get_stats()["requests_waiting"]:
        await pool.check()
