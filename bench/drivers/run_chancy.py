"""chancy for many short jobs: the async executor, and eager polling, which fetches again when a job has ended and not
only every five seconds. Of its default plugins those are on that recover and prune jobs, and elect who does it; metrics
and workflows, which handle every job once more, would take two fifths of its rate. What has ended is written ten times
a second instead of once, and kept for a minute.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any, ClassVar

from bench.drivers.driver import TEXT, Later, System, main, note

chancy: Any = importlib.import_module("chancy")  # in this environment only: no types here
leadership: Any = importlib.import_module("chancy.plugins.leadership")
pruner: Any = importlib.import_module("chancy.plugins.pruner")
recovery: Any = importlib.import_module("chancy.plugins.recovery")

CONCURRENCY = 500
FLUSH_SECONDS = 0.1


async def async_task(number: int, text: str) -> int:  # noqa: ARG001 - a payload
    return note(number)


class Chancy(System):
    packages: ClassVar = ["chancy", "psycopg", "psycopg-binary"]
    app: Any
    worker: Any

    async def install(self) -> None:
        async with self._app(1) as app:
            await app.migrate()
            await app.declare(
                chancy.Queue(
                    "default", concurrency=CONCURRENCY, executor=chancy.Chancy.Executor.Async, eager_polling=True
                )
            )

    async def open(self, connections: int) -> None:
        self.app = await self._app(connections).__aenter__()

    async def submit(self, number: int) -> None:
        await self.app.push(job(number))

    async def bulk(self, numbers: list[int], later: Later) -> None:
        each = {"priority": later.priority} | ({"scheduled_at": later.due_at} if later.due_at else {})
        async for _ in self.app.push_many([job(number, **each) for number in numbers], batch_size=len(numbers)):
            pass

    async def run(self) -> None:
        async with self._app(10) as app:
            self.worker = chancy.Worker(app, register_signal_handlers=False)
            self.worker.send_outgoing_interval = FLUSH_SECONDS
            await self.worker.start()
            await self.worker.wait_for_shutdown()

    async def stop(self) -> None:
        await self.worker.stop()

    def _app(self, connections: int) -> Any:
        log = logging.getLogger("chancy")
        log.setLevel(logging.WARNING)  # a line for every job otherwise
        return chancy.Chancy(
            self.dsn,
            plugins=[leadership.Leadership(), recovery.Recovery(), pruner.Pruner()],
            no_default_plugins=True,
            min_connection_pool_size=connections,
            max_connection_pool_size=connections,
            log=log,
        )


def job(number: int, **options: Any) -> Any:
    return chancy.Job(func="__main__.async_task", kwargs={"number": number, "text": TEXT}, **options)


if __name__ == "__main__":
    main(Chancy)
