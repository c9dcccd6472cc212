"""pgqueuer as its guide to performance says: asyncpg, uvloop, a pool for producers and one connection for the worker,
its autovacuum settings; batches of 500.
"""

from __future__ import annotations

import importlib
import json
from datetime import timedelta
from typing import Any, ClassVar

from bench.drivers.driver import TEXT, Later, System, main, note

asyncpg: Any = importlib.import_module("asyncpg")  # in this environment only: no types here
pgqueuer: Any = importlib.import_module("pgqueuer")
queries: Any = importlib.import_module("pgqueuer.queries")

BATCH_SIZE = 500


async def async_task(job: Any) -> None:
    note(json.loads(job.payload)["number"])


class PgQueuer(System):
    packages: ClassVar = ["pgqueuer", "asyncpg"]
    queries: Any
    worker: Any

    async def install(self) -> None:
        connection = await asyncpg.connect(self.dsn)
        installer = queries.Queries.from_asyncpg_connection(connection)
        await installer.install()
        await installer.optimize_autovacuum()
        await connection.close()

    async def open(self, connections: int) -> None:
        pool = await asyncpg.create_pool(self.dsn, min_size=connections, max_size=connections)
        self.queries = queries.Queries.from_asyncpg_pool(pool)

    async def submit(self, number: int) -> None:
        await self.queries.enqueue("async_task", payload(number))

    async def bulk(self, numbers: list[int], later: Later) -> None:
        await self.queries.enqueue(
            ["async_task"] * len(numbers),
            [payload(number) for number in numbers],
            [later.priority] * len(numbers),
            execute_after=[timedelta(seconds=later.delay_seconds)] * len(numbers),
        )

    async def run(self) -> None:
        self.worker = pgqueuer.PgQueuer.from_asyncpg_connection(await asyncpg.connect(self.dsn))
        self.worker.entrypoint("async_task")(async_task)
        await self.worker.run(batch_size=BATCH_SIZE)

    async def stop(self) -> None:
        self.worker.shutdown.set()


def payload(number: int) -> bytes:
    return json.dumps({"number": number, "text": TEXT}).encode()


if __name__ == "__main__":
    main(PgQueuer)
