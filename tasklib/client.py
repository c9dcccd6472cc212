"""The two clients: the verbs of tasklib/verbs.py, and the calls whose sync and async forms differ: submit and wait.

The functions of the module `tasklib` call a default pair of these clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar
from uuid import UUID
from weakref import WeakKeyDictionary

from tasklib.blocking import warn_if_on_loop
from tasklib.clock import time
from tasklib.errors import InvalidOptions, TasklibError
from tasklib.handles import Handle
from tasklib.number import is_number
from tasklib.statements import as_uuid
from tasklib.submission import NewTask, task_from_call
from tasklib.submit_batcher import SubmitBatcher
from tasklib.unawaited import log_if_unawaited
from tasklib.unfinished import MOST_NAMED, Unfinished, result_timeout
from tasklib.verbs import Verbs

if TYPE_CHECKING:
    from tasklib.config import Config
    from tasklib.database import Database
    from tasklib.ids import TaskId
    from tasklib.record import Task
    from tasklib.task import TaskFunction

R = TypeVar("R")
T = TypeVar("T")
LONGEST_TIMEOUT_SECONDS = 1e9  # 30 years; a longer timeout means no limit, since Python's own waits take no infinity
Awaited: TypeAlias = "UUID | str | Handle[Any]"  # what can be waited for: a task's id, or its handle


class Client(Verbs, is_async=False):
    """The sync client. Safe to share between threads, and to keep across a fork."""

    def __init__(
        self, config: Config, database: Database | None = None, *, connection: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(config, database)
        self._connection = connection  # for submits that name none

    def as_sync(self) -> Client:
        return self

    def as_async(self) -> AsyncClient:
        """The same verbs for asyncio, over the same database."""
        return AsyncClient(self.config, self.database, through=None if self._connection is None else self)

    def submit(self, task: NewTask, *, connection: Any = None) -> TaskId:
        """Submit what `function.new(...)` made. With `connection`, in that connection's transaction."""
        _check_new([task])
        return self.database.run(self._statements.submit(task), connection=self._chosen(connection))[0]

    def submit_task(self, func: TaskFunction[..., Any] | str, /, *args: Any, **kwargs: Any) -> TaskId:
        """The sync form of `tasklib.submit_task`, with the same options."""
        task, connection = task_from_call(func, args, kwargs)
        return self.submit(task, connection=connection)

    def submit_many(self, tasks: Iterable[NewTask], *, connection: Any = None) -> list[TaskId]:
        """Submit what `function.new(...)` made: all or none, in one transaction. Returns the ids in the order given;
        `id.existed` tells which tasks an earlier submit with the same idempotency key had made.
        """
        given = _check_new(tasks)
        batches = self.database.run(*self._statements.submit_many(given), connection=self._chosen(connection))
        return _in_order(given, batches)

    def wait_for(self, tasks: Iterable[Awaited], timeout: float | None = None) -> list[Task]:
        """Wait until all of them are final, and return them in the order given, failed ones included. `ResultTimeout`
        if that takes more than `timeout` seconds, for all of them together.
        """
        wanted = _ids(tasks)
        found = {task.id: task for task in self.as_completed(wanted, timeout)}
        return [found[task_id] for task_id in wanted]

    def as_completed(self, tasks: Iterable[Awaited], timeout: float | None = None) -> Iterator[Task]:
        """Yield each task as soon as it is final. `ResultTimeout` when `timeout` seconds have passed before the last
        is. All waits of a process share one connection.
        """
        warn_if_on_loop()
        waiting = set(_ids(tasks))
        deadline = _deadline(timeout)
        arrived: queue.SimpleQueue[Task | Exception] = queue.SimpleQueue()
        room = self.database.waiting_room
        ticket = room.enter(waiting, lambda _, found: arrived.put(found))
        try:
            while waiting:
                try:
                    found = arrived.get(timeout=_remaining(deadline))
                except queue.Empty:
                    yield from _taken_from(waiting, self._final([*waiting]))  # a timeout of 0 finds what is there
                    if waiting:
                        raise result_timeout(waiting, timeout, self._standing(waiting)) from None
                else:
                    yield _arrived(found, waiting)
        finally:
            room.leave(ticket)

    def close(self) -> None:
        self.database.close()

    def _standing(self, late: Iterable[UUID]) -> list[Unfinished] | None:
        try:
            return self._unfinished(sorted(late)[:MOST_NAMED])
        except TasklibError:  # e.g. a role that may not read the workers: the timeout is what matters
            return None

    def _chosen(self, connection: Any) -> Any:
        return self._connection() if connection is None and self._connection is not None else connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(Verbs, is_async=True):
    """The same verbs for asyncio. Safe to use from several event loops: each has its own connections."""

    def __init__(self, config: Config, database: Database | None = None, *, through: Client | None = None) -> None:
        super().__init__(config, database)
        self._through = through  # submits that name no connection use the sync connection of this client
        self._batchers: WeakKeyDictionary[asyncio.AbstractEventLoop, SubmitBatcher] = WeakKeyDictionary()

    def as_sync(self) -> Client:
        return self._through or Client(self.config, self.database)

    def as_async(self) -> AsyncClient:
        return self

    @log_if_unawaited
    def submit(self, task: NewTask, *, connection: Any = None) -> Coroutine[Any, Any, TaskId]:
        """Submit what `function.new(...)` made. With `connection`, in that connection's transaction."""
        return self._send(task, connection)

    @log_if_unawaited
    def submit_task(
        self, func: TaskFunction[..., Any] | str, /, *args: Any, **kwargs: Any
    ) -> Coroutine[Any, Any, TaskId]:
        """Takes what `tasklib.submit_task` takes."""
        task, connection = task_from_call(func, args, kwargs)
        return self._send(task, connection)

    @log_if_unawaited
    async def submit_many(self, tasks: Iterable[NewTask], *, connection: Any = None) -> list[TaskId]:
        """Submit what `function.new(...)` made: all or none, in one transaction. Returns the ids in the order given;
        `id.existed` tells which tasks an earlier submit with the same idempotency key had made.
        """
        if self._through is not None and connection is None:
            return await _in_sync_thread(self._through.submit_many, tasks)
        given = _check_new(tasks)
        batches = await self.database.run_async(*self._statements.submit_many(given), connection=connection)
        return _in_order(given, batches)

    async def wait_for(self, tasks: Iterable[Awaited], timeout: float | None = None) -> list[Task]:  # noqa: ASYNC109 - see Handle.result
        """Wait until all of them are final, and return them in the order given, failed ones included. `ResultTimeout`
        if that takes more than `timeout` seconds, for all of them together.
        """
        wanted = _ids(tasks)
        found = {task.id: task async for task in self.as_completed(wanted, timeout)}
        return [found[task_id] for task_id in wanted]

    async def as_completed(self, tasks: Iterable[Awaited], timeout: float | None = None) -> AsyncIterator[Task]:  # noqa: ASYNC109
        """Yield each task as soon as it is final: `async for task in tasklib.as_completed(ids):`. `ResultTimeout` when
        `timeout` seconds have passed before the last is. All waits of a process share one connection.
        """
        waiting = set(_ids(tasks))
        deadline = _deadline(timeout)
        arrived: asyncio.Queue[Task | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(_: UUID, found: Task | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, and the wait ended with it
                loop.call_soon_threadsafe(arrived.put_nowait, found)

        room = self.database.waiting_room
        ticket = room.enter(waiting, deliver)
        try:
            while waiting:
                try:
                    found = await asyncio.wait_for(arrived.get(), _remaining(deadline))
                except TimeoutError:
                    for task in _taken_from(waiting, await self._final([*waiting])):
                        yield task
                    if waiting:
                        raise result_timeout(waiting, timeout, await self._standing(waiting)) from None
                else:
                    yield _arrived(found, waiting)
        finally:
            room.leave(ticket)

    async def close(self) -> None:
        await self.database.close_async()

    async def _send(self, task: NewTask, connection: Any) -> TaskId:
        """`submit` without the check that it is awaited: callers in the library await it at once."""
        if self._through is not None and connection is None:
            return await _in_sync_thread(self._through.submit, task)
        _check_new([task])
        if connection is None:
            return await self._batcher().submit(task)
        return (await self.database.run_async(self._statements.submit(task), connection=connection))[0]

    def _batcher(self) -> SubmitBatcher:
        loop = asyncio.get_running_loop()
        return self._batchers.get(loop) or self._batchers.setdefault(loop, SubmitBatcher(self._submit_together))

    async def _submit_together(self, tasks: Sequence[NewTask], since: float) -> list[TaskId]:
        if len(tasks) == 1:
            return await self.database.run_async(self._statements.submit(tasks[0]), since=since)
        return _in_order(tasks, await self.database.run_async(*self._statements.submit_many(tasks), since=since))

    async def _standing(self, late: Iterable[UUID]) -> list[Unfinished] | None:
        try:
            return await self._unfinished(sorted(late)[:MOST_NAMED])
        except TasklibError:  # as above
            return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _in_sync_thread(call: Callable[[T], R], given: T) -> R:
    """Call it in the thread where a framework's async code reaches its sync connections and their transactions."""
    from asgiref.sync import sync_to_async  # noqa: PLC0415 - frameworks with such connections depend on it

    return await sync_to_async(call)(given)


def _check_new(tasks: Any) -> list[NewTask]:
    given: list[Any] = list(tasks) if isinstance(tasks, Iterable) else [None]
    if not all(isinstance(task, NewTask) for task in given):
        raise InvalidOptions("submit takes a task that function.new(...) made, submit_many several of them")
    return given


def _ids(tasks: Any) -> list[UUID]:
    if isinstance(tasks, str | UUID | Handle) or not isinstance(tasks, Iterable):
        raise InvalidOptions("wait_for and as_completed take several task ids or handles: give them a list")
    return [each.id if isinstance(each, Handle) else as_uuid(each) for each in tasks]


def _deadline(timeout: Any) -> float | None:
    if timeout is None:
        return None
    if not is_number(timeout, 0):
        raise InvalidOptions(f"timeout must be a number of seconds, or None for no limit, got {timeout!r}")
    return time.monotonic() + timeout if timeout < LONGEST_TIMEOUT_SECONDS else None


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def _arrived(found: Task | Exception, waiting: set[UUID]) -> Task:
    if isinstance(found, Exception):
        raise found
    waiting.discard(found.id)
    return found


def _taken_from(waiting: set[UUID], final: list[Task]) -> list[Task]:
    waiting.difference_update(task.id for task in final)
    return final


def _in_order(given: Sequence[NewTask], batches: Iterable[Mapping[int, TaskId]]) -> list[TaskId]:
    existing = {number: task_id for batch in batches for number, task_id in batch.items()}
    return [existing.get(task.id.int, task.id) for task in given]
