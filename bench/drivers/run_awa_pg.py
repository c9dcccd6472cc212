"""awa-pg: Python handlers on its Rust core and its queue storage. Without a deadline for each attempt it writes claims
as batches, and not a row for each. More claimers, or larger batches, do not make it faster here.
"""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

from bench.drivers.driver import TEXT, Later, System, main, note

awa: Any = importlib.import_module("awa")  # in this environment only: no types here

QUEUE = "default"
MAX_WORKERS = 1_000
CONNECTIONS = 20  # of a worker
HIGHEST, NORMAL = 1, 2  # of its four priorities


@dataclass
class AsyncTask:
    number: int
    text: str


async def async_task(job: Any) -> None:
    note(job.args.number)


class Awa(System):
    packages: ClassVar = ["awa-pg"]
    client: Any
    stopped: asyncio.Event

    async def install(self) -> None:
        client = self._client(1)
        await client.migrate()
        await client.install_queue_storage()
        await client.close()

    async def open(self, connections: int) -> None:
        self.client = self._client(connections)

    async def submit(self, number: int) -> None:
        await self.client.insert(AsyncTask(number, TEXT), queue=QUEUE)

    async def bulk(self, numbers: list[int], later: Later) -> None:
        await self.client.enqueue_many_copy(
            [AsyncTask(number, TEXT) for number in numbers],
            queue=QUEUE,
            priority=HIGHEST if later.priority > 0 else NORMAL,
            run_at=later.due_at,
        )

    async def run(self) -> None:
        self.client = self._client(CONNECTIONS)

        self.client.task(AsyncTask, queue=QUEUE)(async_task)
        await self.client.start([{"name": QUEUE, "max_workers": MAX_WORKERS, "deadline_duration_ms": 0}])
        self.stopped = asyncio.Event()
        await self.stopped.wait()
        await self.client.shutdown()
        await self.client.close()

    async def stop(self) -> None:
        self.stopped.set()

    def _client(self, connections: int) -> Any:
        """Its parser of addresses wants the name of a host, also where the address is a socket."""
        return awa.AsyncClient(self.dsn.replace("@/", "@localhost/"), connections)


if __name__ == "__main__":
    main(Awa)
