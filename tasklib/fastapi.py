"""FastAPI and Starlette: tasklib for as long as the application lives.

    app = FastAPI(lifespan=lifespan(config))

It imports neither of them: a lifespan is just a function from the application to an async context manager.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from tasklib.application import close_async, init, init_later
from tasklib.config import Config
from tasklib.log import log
from tasklib.worker import TaskWorker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


def lifespan(
    config: Config | None = None, *, worker: TaskWorker | bool = False
) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """Calls `tasklib.init` when the application starts, and closes all connections when it ends.

    Without a Config, the environment names the database, as for `init`. With `worker`, tasks run in this process too,
    beside the requests: True for a TaskWorker with its defaults, or one of your own. It drains before the end.

    The lifespan of an application that is mounted into another one never runs: then the first submit opens a
    connection.

    In a lifespan of your own: `async with lifespan(config)(app): ... yield`.
    """

    def chosen() -> Config:
        return Config.from_environment() if config is None else config

    init_later(chosen)

    @asynccontextmanager
    async def alive(_app: Any) -> AsyncIterator[None]:
        settings = chosen()
        own = TaskWorker(settings, handle_signals=False) if worker is True else worker
        async with _initialised(settings), _working(own) if own else nullcontext():
            yield

    return alive


@asynccontextmanager
async def _initialised(config: Config) -> AsyncIterator[None]:
    init(config)
    try:
        yield
    finally:
        await close_async()


@asynccontextmanager
async def _working(worker: TaskWorker) -> AsyncIterator[None]:
    """The application does not wait until the worker has started, and serves requests even if it fails."""
    running = asyncio.create_task(worker.run())
    running.add_done_callback(_tell_failure)
    try:
        yield
    finally:
        if not running.done():
            worker.stop()
        await running


def _tell_failure(running: asyncio.Task[None]) -> None:
    """Log it at once: it is raised only when the application ends."""
    if not running.cancelled() and (error := running.exception()) is not None:
        log.error("worker.failed", error=f"{type(error).__name__}: {error}")
