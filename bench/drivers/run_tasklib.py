"""tasklib with its defaults; only the worker's concurrency is chosen, for tasks that take no time."""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass
from typing import Any, ClassVar

import tasklib
from bench.drivers.driver import TEXT, Driver, Later, System, main, note

TICK_SECONDS = 0.02
LARGEST_BULK = 500


@tasklib.task
async def async_task(number: int, text: str) -> int:  # noqa: ARG001 - a payload
    return note(number)


@tasklib.task
def sync_task(number: int, text: str) -> int:  # noqa: ARG001 - a payload
    return note(number)


@tasklib.task
async def async_nap(number: int, text: str, seconds: float) -> int:  # noqa: ARG001 - a payload
    note(number)
    await asyncio.sleep(seconds)
    return number


@tasklib.task
def sync_nap(number: int, text: str, seconds: float) -> int:  # noqa: ARG001 - a payload
    note(number)
    time.sleep(seconds)
    return number


late: dict[int, array[float]] = {}  # by the second in which a task began: how late each was, in ms


@tasklib.task
async def timed_task(number: int, text: str, submitted: float) -> int:  # noqa: ARG001 - a payload
    now = time.monotonic()
    late.setdefault(int(now), array("f")).append((now - submitted) * 1_000)
    return number


@dataclass(frozen=True)
class Kind:
    """What is submitted, and how it is worked on."""

    task: tasklib.TaskFunction[..., Any] = async_task
    concurrency: int = 100
    nap_seconds: float | None = None
    queues: tuple[str, ...] | None = None


KINDS = {
    "async": Kind(),
    "sync": Kind(sync_task, 4),
    "timed": Kind(timed_task),
    "crowd": Kind(),  # each submitter has a client, and so a connection, of its own
    "elsewhere": Kind(queues=("elsewhere",)),
    **{
        f"{kind}_nap_{milliseconds}ms_{concurrency}": Kind(task, concurrency, milliseconds / 1_000)
        for kind, task in (("async", async_nap), ("sync", sync_nap))
        for milliseconds, concurrency in ((1, 8), (1, 64), (10, 64), (100, 64))
    },
}


class Tasklib(System):
    packages: ClassVar = ["tasklib-pg", "psycopg", "psycopg-binary", "pydantic"]
    client: tasklib.AsyncClient
    worker: tasklib.TaskWorker
    _idle: list[tasklib.AsyncClient]

    def __init__(self, dsn: str, kind: str = "async") -> None:
        super().__init__(dsn, kind)
        self._kind = KINDS[kind]
        self._payload: dict[str, Any] = {"text": TEXT}
        if self._kind.nap_seconds is not None:
            self._payload["seconds"] = self._kind.nap_seconds

    async def install(self) -> None:
        async with tasklib.AsyncClient(tasklib.Config(self.dsn)) as client:
            await client.list_tasks()  # the first use makes the schema

    async def open(self, connections: int) -> None:
        if self.kind == "crowd":
            self._idle = [tasklib.AsyncClient(tasklib.Config(self.dsn, pool_size=1)) for _ in range(connections)]
        self.client = tasklib.AsyncClient(tasklib.Config(self.dsn, pool_size=max(connections, 10)))

    async def submit(self, number: int) -> None:
        if self.kind != "crowd":
            await self.client.submit_task(self._kind.task, number=number, **self._payload)
            return
        client = self._idle.pop()
        await client.submit_task(self._kind.task, number=number, **self._payload)
        self._idle.append(client)

    async def flow(self, rate: float, seconds: float) -> dict[str, Any]:
        """So many tasks a second in small bulks, each by the clock: one that took long is made up for."""
        start, count = time.monotonic(), 0
        while (now := time.monotonic()) < start + seconds:
            wanted = min(int((now - start + TICK_SECONDS) * rate) - count, LARGEST_BULK)
            new = self._kind.task.new
            await self.client.submit_many(
                [new(number=count + each, submitted=time.monotonic(), **self._payload) for each in range(wanted)]
            )
            count += wanted
            await asyncio.sleep(start + count / rate - time.monotonic())
        return {"count": count, "seconds": time.monotonic() - start}

    async def bulk(self, numbers: list[int], later: Later) -> None:
        task = self._kind.task.options(delay_seconds=later.delay_seconds or None, priority=later.priority)
        new, payload = task.new, self._payload
        await self.client.submit_many([new(number=number, **payload) for number in numbers])

    async def run(self) -> None:
        self.worker = tasklib.TaskWorker(
            tasklib.Config(self.dsn),
            concurrency=self._kind.concurrency,
            queues=self._kind.queues,
            handle_signals=False,
        )
        await self.worker.run()

    async def stop(self) -> None:
        self.worker.stop()


class TasklibDriver(Driver):
    """Also a flow of tasks, and how late they began."""

    async def flow(self, rate: float, seconds: float) -> dict[str, Any]:
        assert isinstance(self.system, Tasklib)
        return await self.system.flow(rate, seconds)

    async def lateness(self) -> dict[str, Any]:
        found = [late.pop(second) for second in sorted(late)]
        return {"by_second": [[round(each, 3) for each in second] for second in found]}


if __name__ == "__main__":
    main(Tasklib, TasklibDriver)
