"""procrastinate: async tasks on psycopg, concurrency 50, a pool that is large enough for it; finished jobs are kept,
which is its default.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
from typing import Any, ClassVar

from bench.drivers.driver import TEXT, Later, System, main, note

procrastinate: Any = importlib.import_module("procrastinate")  # in this environment only: no types here

CONCURRENCY = 50
POOL_SIZE = 20


async def async_task(number: int, text: str) -> int:  # noqa: ARG001 - a payload
    return note(number)


class Procrastinate(System):
    packages: ClassVar = ["procrastinate", "psycopg", "psycopg-binary"]

    def __init__(self, dsn: str, kind: str = "async") -> None:
        super().__init__(dsn, kind)
        self.app = procrastinate.App(
            connector=procrastinate.PsycopgConnector(conninfo=dsn, min_size=POOL_SIZE, max_size=POOL_SIZE)
        )
        self.running: asyncio.Task[None] | None = None
        self.task = self.app.task(async_task, name="async_task")

    async def install(self) -> None:
        async with self.app.open_async():
            await self.app.schema_manager.apply_schema_async()

    async def open(self, connections: int) -> None:  # noqa: ARG002 - the pool is large enough
        await self.app.open_async()

    async def submit(self, number: int) -> None:
        await self.task.defer_async(number=number, text=TEXT)

    async def bulk(self, numbers: list[int], later: Later) -> None:
        task = self.task.configure(schedule_at=later.due_at, priority=later.priority)
        await task.batch_defer_async(*({"number": number, "text": TEXT} for number in numbers))

    async def run(self) -> None:
        async with self.app.open_async():
            self.running = asyncio.ensure_future(
                self.app.run_worker_async(concurrency=CONCURRENCY, install_signal_handlers=False)
            )
            with contextlib.suppress(asyncio.CancelledError):
                await self.running

    async def stop(self) -> None:
        if self.running is not None:
            self.running.cancel()


if __name__ == "__main__":
    logging.getLogger("procrastinate").setLevel(logging.ERROR)  # it warns of an App in the main module
    main(Procrastinate)
