"""tasklib with its defaults; only the worker's concurrency is chosen, for tasks that take no time."""

from __future__ import annotations

from typing import Any, ClassVar

import tasklib
from bench.drivers.driver import TEXT, System, main, note

CONCURRENCY = {"async": 100, "sync": 4}


@tasklib.task
async def async_task(number: int, text: str) -> int:  # noqa: ARG001 - a payload
    return note(number)


@tasklib.task
def sync_task(number: int, text: str) -> int:  # noqa: ARG001 - a payload
    return note(number)


class Tasklib(System):
    packages: ClassVar = ["tasklib-pg", "psycopg", "psycopg-binary", "pydantic"]
    client: tasklib.AsyncClient
    worker: tasklib.TaskWorker

    async def install(self) -> None:
        async with tasklib.AsyncClient(tasklib.Config(self.dsn)) as client:
            await client.list_tasks()  # the first use makes the schema

    async def open(self, connections: int) -> None:
        self.client = tasklib.AsyncClient(tasklib.Config(self.dsn, pool_size=max(connections, 10)))

    async def submit(self, number: int) -> None:
        await self.client.submit_task(self._task, number=number, text=TEXT)

    async def bulk(self, numbers: list[int]) -> None:
        new = self._task.new
        await self.client.submit_many([new(number=number, text=TEXT) for number in numbers])

    async def run(self) -> None:
        self.worker = tasklib.TaskWorker(
            tasklib.Config(self.dsn), concurrency=CONCURRENCY[self.kind], handle_signals=False
        )
        await self.worker.run()

    async def stop(self) -> None:
        self.worker.stop()

    @property
    def _task(self) -> tasklib.TaskFunction[..., Any]:
        return async_task if self.kind == "async" else sync_task


if __name__ == "__main__":
    main(Tasklib)
