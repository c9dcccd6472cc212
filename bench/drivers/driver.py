"""What the drivers of all systems share: a small process that takes commands and gives answers as lines of JSON.

It runs in the environment of the system under test, so it uses the standard library alone. Every system does the same
things in the same way: what differs is in `System`, and in nothing else. Times are `time.monotonic()`, which is one
clock for all processes of a machine.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

BULK = 1_000  # tasks in one call
TEXT = "alice@example.com"
PROGRESS_SECONDS = 0.05
began: dict[int, float] = {}  # by the task's number: when its first line was reached
repeated: list[int] = []  # numbers that have begun before: in a drain, tasks that have been run twice


def note(number: int) -> int:
    """The first line of every task."""
    if number in began:
        repeated.append(number)
    began[number] = time.monotonic()
    return number


@dataclass(frozen=True)
class Later:
    """When the tasks of a bulk are due, and how they come before others: more is sooner, 0 is what the system gives to
    tasks of which nothing is said.
    """

    delay_seconds: float = 0.0
    priority: int = 0

    @property
    def due_at(self) -> datetime | None:
        return datetime.now(UTC) + timedelta(seconds=self.delay_seconds) if self.delay_seconds else None


class System:
    """What a system has to be able to do."""

    packages: ClassVar[list[str]]  # whose versions count

    def __init__(self, dsn: str, kind: str = "async") -> None:
        self.dsn = dsn
        self.kind = kind  # of the task functions: async or sync

    async def install(self) -> None:
        """The schema, with the settings that the system recommends for it."""
        raise NotImplementedError

    async def open(self, connections: int) -> None:
        """For submits."""
        raise NotImplementedError

    async def submit(self, number: int) -> None:
        """One task, awaited until it is committed."""
        raise NotImplementedError

    async def bulk(self, numbers: list[int], later: Later) -> None:
        """All in one call, until they are committed."""
        raise NotImplementedError

    async def run(self) -> None:
        """Be a worker, until `stop`."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Tell the worker to end in good order."""
        raise NotImplementedError


class Driver:
    """One process: a submitter, or a worker. Its public methods are the commands that it takes."""

    def __init__(self, make: type[System]) -> None:
        self._make = make
        self._system: System | None = None
        self._worker: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            say(await getattr(self, command.pop("do"))(**command))

    @property
    def system(self) -> System:
        assert self._system is not None, "open or setup comes first"
        return self._system

    async def versions(self) -> dict[str, Any]:
        names = [*self._make.packages, *(["uvloop"] if has_uvloop() else [])]
        return {name: version(name) for name in names}

    async def setup(self, dsn: str) -> dict[str, Any]:
        await self._make(dsn).install()
        return {}

    async def open(self, dsn: str, connections: int = 1, kind: str = "async") -> dict[str, Any]:
        self._system = self._make(dsn, kind)
        await self.system.open(connections)
        return {}

    async def submit(self, count: int, concurrency: int) -> dict[str, Any]:
        """Each of `concurrency` submitters awaits one task after the other. The first ones open the connections, and
        do not count.
        """
        await self._submit(5 * concurrency, concurrency)
        return {"seconds": await self._submit(count, concurrency)}

    async def _submit(self, count: int, concurrency: int) -> float:
        numbers = iter(range(count))

        async def submit_on() -> None:
            for number in numbers:
                await self.system.submit(number)

        start = time.monotonic()
        await asyncio.gather(*(submit_on() for _ in range(concurrency)))
        return time.monotonic() - start

    async def bulk(self, count: int, delay_seconds: float = 0.0, priority: int = 0) -> dict[str, Any]:
        later = Later(delay_seconds, priority)
        start = time.monotonic()
        for at in range(0, count, BULK):
            await self.system.bulk(list(range(at, min(at + BULK, count))), later)
        return {"seconds": time.monotonic() - start}

    async def pace(self, count: int, pause: float) -> dict[str, Any]:
        """Submits with pauses, in which the worker falls idle; when each was asked for."""
        submitted = []
        for number in range(count):
            await asyncio.sleep(pause)
            submitted.append(time.monotonic())
            await self.system.submit(number)
        return {"submitted": submitted}

    async def work(self, dsn: str, kind: str) -> dict[str, Any]:
        began.clear()
        repeated.clear()
        self._system = self._make(dsn, kind)
        self._worker = asyncio.ensure_future(self._run())
        threading.Thread(target=tell_progress, daemon=True).start()
        return {}

    async def _run(self) -> None:
        """A worker that fails takes the process with it: nobody would notice otherwise."""
        try:
            await self.system.run()
        except BaseException:  # noqa: BLE001 - see above
            traceback.print_exc()
            os._exit(1)

    async def stop(self) -> dict[str, Any]:
        await self.system.stop()
        if self._worker is not None:
            await asyncio.wait([self._worker], timeout=20)
        return {"began": began, "repeated": len(repeated)}


def tell_progress() -> None:
    """How many tasks have begun, whenever that has changed."""
    told = 0
    while True:
        if len(began) != told:
            told = len(began)
            say({"begun": told})
        time.sleep(PROGRESS_SECONDS)


_saying = threading.Lock()


def say(answer: dict[str, Any]) -> None:
    with _saying:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def has_uvloop() -> bool:
    return importlib.util.find_spec("uvloop") is not None


def main(make: type[System], driver: type[Driver] = Driver) -> None:
    """On uvloop, which any application may choose; on asyncio's own loop where it is not installed. What was imported
    is frozen for everybody: the collector would go through all of it again and again, as tasks come and go.
    """
    gc.collect()
    gc.freeze()
    run: Callable[[Any], Any] = importlib.import_module("uvloop").run if has_uvloop() else asyncio.run
    run(driver(make).serve())
