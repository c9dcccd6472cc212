"""Single submits of one event loop that wait at the same time go to the database together.

Each would be a commit of its own, and a commit that notifies holds a lock of the whole server through its fsync: ten at
once wait for one another there. So the first goes at once, and what comes while it is on its way goes with the next.
Nobody waits for company.

A task with an idempotency key goes alone, at once: it may have to wait in the server, for as long as another
transaction that has used its key is open, and nobody else should wait with it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from tasklib.clock import time
from tasklib.errors import DatabaseUnavailable, TasklibError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tasklib.ids import TaskId
    from tasklib.submission import NewTask

MOST_UNDER_WAY = 2
LARGEST_BATCH = 1_000


class _Waiting(NamedTuple):
    task: NewTask
    future: asyncio.Future[TaskId]
    since: float  # monotonic


class Combiner:
    """For one event loop. `send` submits several tasks, all or none, and returns their ids in order. It is told since
    when they have waited: what a task has waited here is part of its call's time.
    """

    def __init__(self, send: Callable[[Sequence[NewTask], float], Awaitable[list[TaskId]]]) -> None:
        self._send = send
        self._under_way = 0
        self._waiting: list[_Waiting] = []
        self._batches: set[asyncio.Task[None]] = set()

    async def submit(self, task: NewTask) -> TaskId:
        if task.terms.idempotency_key is not None:
            return (await self._send([task], time.monotonic()))[0]
        if self._under_way >= MOST_UNDER_WAY:
            future: asyncio.Future[TaskId] = asyncio.get_running_loop().create_future()
            self._waiting.append(_Waiting(task, future, time.monotonic()))
            return await future
        self._under_way += 1
        try:
            return (await self._send([task], time.monotonic()))[0]
        finally:
            self._under_way -= 1
            self._send_waiting()

    def _send_waiting(self) -> None:
        self._waiting = [each for each in self._waiting if not each.future.done()]  # nobody waits for it any more
        if not self._waiting or self._under_way >= MOST_UNDER_WAY:
            return
        batch, self._waiting = self._waiting[:LARGEST_BATCH], self._waiting[LARGEST_BATCH:]
        self._under_way += 1
        sending = asyncio.get_running_loop().create_task(self._send_batch(batch))
        self._batches.add(sending)
        sending.add_done_callback(self._batches.discard)

    async def _send_batch(self, batch: Sequence[_Waiting]) -> None:
        try:
            await self._settle(batch)
        finally:
            self._under_way -= 1
            for each in batch:
                each.future.cancel()  # those that have no answer: the loop is being closed
            self._send_waiting()

    async def _settle(self, batch: Sequence[_Waiting]) -> None:
        """An error of one is told to that one: then each goes alone."""
        try:
            ids = await self._send([each.task for each in batch], batch[0].since)
        except TasklibError as error:
            if len(batch) == 1 or isinstance(error, DatabaseUnavailable):
                for each in batch:
                    _tell(each.future, error)
                return
            for each in batch:
                await self._settle([each])
            return
        for each, task_id in zip(batch, ids, strict=True):
            if not each.future.done():
                each.future.set_result(task_id)


def _tell(future: asyncio.Future[TaskId], error: TasklibError) -> None:
    if not future.done():
        future.set_exception(error)
