"""Sends single submits of one event loop to the database together, if they wait at the same time.

Alone, each would be a commit, and a commit that notifies holds a lock of the whole server through its fsync: ten at
once would wait for one another. So the first submits are sent at once, and those that come meanwhile are sent together
as soon as one of them is done. No submit is delayed to fill a batch.

A task with an idempotency key is sent alone, and at once: it may have to wait in the server for another open
transaction that has used its key, and other tasks must not wait with it.
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

MOST_UNDER_WAY = 2  # calls of `send` at the same time
LARGEST_BATCH = 1_000


class _Waiting(NamedTuple):
    task: NewTask
    future: asyncio.Future[TaskId]
    since: float  # monotonic


class SubmitBatcher:
    """For one event loop. `send` submits several tasks, all or none, and returns their ids in order. Its second
    argument says since when they have waited: that time counts towards the timeout of the call.
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
        self._waiting = [each for each in self._waiting if not each.future.done()]  # its caller was cancelled
        if not self._waiting or self._under_way >= MOST_UNDER_WAY:
            return
        batch, self._waiting = self._waiting[:LARGEST_BATCH], self._waiting[LARGEST_BATCH:]
        self._under_way += 1
        sending = asyncio.get_running_loop().create_task(self._send_batch(batch))
        self._batches.add(sending)
        sending.add_done_callback(self._batches.discard)

    async def _send_batch(self, batch: Sequence[_Waiting]) -> None:
        try:
            await self._submit_batch(batch)
        finally:
            self._under_way -= 1
            for each in batch:
                each.future.cancel()  # without an answer, if the loop is being closed
            self._send_waiting()

    async def _submit_batch(self, batch: Sequence[_Waiting]) -> None:
        """After an error each task is sent alone, so that only the one that caused it fails."""
        try:
            ids = await self._send([each.task for each in batch], batch[0].since)
        except TasklibError as error:
            if len(batch) == 1 or isinstance(error, DatabaseUnavailable):
                for each in batch:
                    _fail(each.future, error)
                return
            for each in batch:
                await self._submit_batch([each])
            return
        for each, task_id in zip(batch, ids, strict=True):
            if not each.future.done():
                each.future.set_result(task_id)


def _fail(future: asyncio.Future[TaskId], error: TasklibError) -> None:
    if not future.done():
        future.set_exception(error)
