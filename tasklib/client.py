"""The verbs: submit, get, list, wait, cancel, retry. Sync and async over the same statements; the module `tasklib` is a
thin convenience over a default pair of these clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar, Unpack, cast, overload
from uuid import UUID
from weakref import WeakKeyDictionary

from tasklib.blocking import warn_if_on_loop
from tasklib.clock import time
from tasklib.combining import Combiner
from tasklib.config import Config
from tasklib.database import Database
from tasklib.errors import InvalidConfig, InvalidOptions, TasklibError, TaskNotRegistered
from tasklib.handles import Handle
from tasklib.options import RESERVED_PARAMETERS
from tasklib.registry import default_registry
from tasklib.statements import Statements, as_uuid
from tasklib.statistics import StatisticsStatements
from tasklib.submission import NewTask, new_task, terms_of
from tasklib.unawaited import told_if_unawaited
from tasklib.unfinished import MOST_NAMED, result_timeout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence

    from tasklib.ids import TaskId
    from tasklib.options import SubmitOptions
    from tasklib.record import Attempt, Task
    from tasklib.statements import ListFilters
    from tasklib.statistics import QueueStatistics, TaskStatistics
    from tasklib.task import TaskFunction
    from tasklib.unfinished import Unfinished

R = TypeVar("R")
T = TypeVar("T")
CancelAnswer: TypeAlias = Literal["cancelled", "asked"] | None
LONGEST_TIMEOUT_SECONDS = 1e9  # what is longer, 30 years, is no limit: Python's own waits take no infinity
Awaited: TypeAlias = "UUID | str | Handle[Any]"  # what can be waited for: a task's id, or its handle


class Client:
    """Sync. Safe to share between threads, and to keep across a fork."""

    def __init__(
        self, config: Config, database: Database | None = None, *, connection: Callable[[], Any] | None = None
    ) -> None:
        self._statements = Statements(_checked(config))
        self._statistics = StatisticsStatements(config)
        self.config = config
        self.database = database or Database(config)
        self._connection = connection  # for submits that name none

    def as_sync(self) -> Client:
        return self

    def as_async(self) -> AsyncClient:
        """The same verbs for asyncio, over the same database."""
        return AsyncClient(self.config, self.database, through=None if self._connection is None else self)

    def submit(self, task: NewTask, *, connection: Any = None) -> TaskId:
        """Submit what `function.new(...)` made. With `connection`, in that connection's transaction."""
        _all_new([task])
        return self.database.run(self._statements.submit(task), connection=self._chosen(connection))[0]

    def submit_task(self, func: TaskFunction[..., Any] | str, /, *args: Any, **kwargs: Any) -> TaskId:
        """Takes what `tasklib.submit_task` takes."""
        task, connection = _new_task(func, args, kwargs)
        return self.submit(task, connection=connection)

    def submit_many(self, tasks: Iterable[NewTask], *, connection: Any = None) -> list[TaskId]:
        """All or none, in one transaction; an id for each, in the order given."""
        given = _all_new(tasks)
        batches = self.database.run(*self._statements.submit_many(given), connection=self._chosen(connection))
        return _in_order(given, batches)

    def get_task(self, task_id: UUID | str) -> Task | None:
        return self.database.run(self._statements.get(task_id))[0]

    def get_attempts(self, task_id: UUID | str) -> list[Attempt]:
        """Every execution of a task that has ended, from the first on."""
        return self.database.run(self._statements.attempts(task_id))[0]

    def list_tasks(
        self, state: str | None = None, name: str | None = None, limit: int = 100, **filters: Unpack[ListFilters]
    ) -> list[Task]:
        """Newest first. Filters: queue, tags, created_after, created_before, final; `after` asks for the next page."""
        return self.database.run(self._statements.list(state, name, limit, **filters))[0]

    @overload
    def handle(self, task_id: UUID | str, function: TaskFunction[..., Coroutine[Any, Any, R]]) -> Handle[R]: ...
    @overload
    def handle(self, task_id: UUID | str, function: TaskFunction[..., R]) -> Handle[R]: ...
    @overload
    def handle(self, task_id: UUID | str, function: None = None) -> Handle[Any]: ...
    def handle(self, task_id: UUID | str, function: TaskFunction[..., Any] | None = None) -> Handle[Any]:
        """For the result; with its function, as the type that it returns."""
        return Handle(task_id, self, None if function is None else function.returns)

    def wait_for(self, tasks: Iterable[Awaited], timeout: float | None = None) -> list[Task]:
        """Wait until all of them are final, and return them in the order given; also those that failed. `ResultTimeout`
        if that takes more than `timeout` seconds, for all of them together.
        """
        wanted = _ids(tasks)
        found = {task.id: task for task in self.as_completed(wanted, timeout)}
        return [found[task_id] for task_id in wanted]

    def as_completed(self, tasks: Iterable[Awaited], timeout: float | None = None) -> Iterator[Task]:
        """Each as soon as it is final; `ResultTimeout` when `timeout` seconds have passed before the last is. All wait
        on one connection, however many there are.
        """
        warn_if_on_loop()
        waiting = set(_ids(tasks))
        deadline = _deadline(timeout)
        arrived: queue.SimpleQueue[Task | Exception] = queue.SimpleQueue()
        ticket = self.database.waiting_room.enter(waiting, lambda _, found: arrived.put(found))
        try:
            while waiting:
                try:
                    found = arrived.get(timeout=_remaining(deadline))
                except queue.Empty:
                    yield from self._last_look(waiting)
                    self._refuse_late(waiting, timeout)
                else:
                    yield _arrived(found, waiting)
        finally:
            ticket.leave()

    def cancel_task(self, task_id: UUID | str, reason: str | None = None) -> CancelAnswer:
        """The answer "cancelled": it waited, and will not run. "asked": a worker holds it, and is asked to stop it.
        None: there is no such task, or it is final.
        """
        return cast("CancelAnswer", self.database.run(self._statements.cancel(task_id, reason))[0])

    def retry_task(self, task_id: UUID | str) -> bool:
        """Run it again, now: one that is final, or that waits for its next attempt. False: it is neither."""
        return self.database.run(self._statements.retry(task_id))[0]

    def expire_tasks(self) -> int:
        """End waiting tasks whose `expires_at` has passed, as workers do every second: at most 1,000. How many."""
        return self.database.run(self._statements.expire())[0]

    def queue_statistics(self, queue: str | None = None) -> list[QueueStatistics]:
        """How many tasks wait or are held, and for how long: of one queue, or of all that have any."""
        return self.database.run(self._statistics.queues(queue))[0]

    def task_statistics(self, window_seconds: float = 3600.0, name: str | None = None) -> list[TaskStatistics]:
        """What became of attempts lately, by task: how many, how many a second, how long they took and had waited. To
        the minute; what has ended in the last seconds may not be in it yet.
        """
        return self.database.run(self._statistics.tasks(window_seconds, name))[0]

    def backlog(self, queues: Sequence[str] | None = None) -> int:
        """How many tasks there are to do: ready, due, or held by a worker. Counted up to 10,000: for scaling."""
        return self.database.run(self._statistics.backlog(queues))[0]

    def close(self) -> None:
        self.database.close()

    def _last_look(self, waiting: set[UUID]) -> list[Task]:
        """So that a short timeout, or none at all, still finds what is there."""
        return _taken_from(waiting, self.database.run(self._statements.final([*waiting]))[0])

    def _refuse_late(self, late: set[UUID], timeout: float | None) -> None:
        if late:
            raise result_timeout(late, timeout, self._unfinished(sorted(late)))

    def _unfinished(self, late: Sequence[UUID]) -> list[Unfinished] | None:
        try:
            return self.database.run(self._statements.unfinished(late[:MOST_NAMED]))[0]
        except TasklibError:  # e.g. a role that may not read the workers: the timeout is what matters
            return None

    def _chosen(self, connection: Any) -> Any:
        return self._connection() if connection is None and self._connection is not None else connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """The same verbs for asyncio. Safe to use from several event loops: each has its own connections."""

    def __init__(self, config: Config, database: Database | None = None, *, through: Client | None = None) -> None:
        self._statements = Statements(_checked(config))
        self._statistics = StatisticsStatements(config)
        self.config = config
        self.database = database or Database(config)
        self._through = through  # submits that name no connection are on its own, a sync one
        self._combiners: WeakKeyDictionary[asyncio.AbstractEventLoop, Combiner] = WeakKeyDictionary()

    def as_sync(self) -> Client:
        return self._through or Client(self.config, self.database)

    def as_async(self) -> AsyncClient:
        return self

    @told_if_unawaited
    def submit(self, task: NewTask, *, connection: Any = None) -> Coroutine[Any, Any, TaskId]:
        return self.send(task, connection)

    async def send(self, task: NewTask, connection: Any) -> TaskId:
        """`submit` without the check that it is awaited: callers in the library await it at once."""
        if self._through is not None and connection is None:
            return await _in_sync_thread(self._through.submit, task)
        _all_new([task])
        if connection is None:
            return await self._combiner().submit(task)
        return (await self.database.run_async(self._statements.submit(task), connection=connection))[0]

    @told_if_unawaited
    def submit_task(
        self, func: TaskFunction[..., Any] | str, /, *args: Any, **kwargs: Any
    ) -> Coroutine[Any, Any, TaskId]:
        task, connection = _new_task(func, args, kwargs)
        return self.send(task, connection)

    @told_if_unawaited
    async def submit_many(self, tasks: Iterable[NewTask], *, connection: Any = None) -> list[TaskId]:
        if self._through is not None and connection is None:
            return await _in_sync_thread(self._through.submit_many, tasks)
        given = _all_new(tasks)
        batches = await self.database.run_async(*self._statements.submit_many(given), connection=connection)
        return _in_order(given, batches)

    async def get_task(self, task_id: UUID | str) -> Task | None:
        return (await self.database.run_async(self._statements.get(task_id)))[0]

    async def get_attempts(self, task_id: UUID | str) -> list[Attempt]:
        return (await self.database.run_async(self._statements.attempts(task_id)))[0]

    async def list_tasks(
        self, state: str | None = None, name: str | None = None, limit: int = 100, **filters: Unpack[ListFilters]
    ) -> list[Task]:
        return (await self.database.run_async(self._statements.list(state, name, limit, **filters)))[0]

    @overload
    def handle(self, task_id: UUID | str, function: TaskFunction[..., Coroutine[Any, Any, R]]) -> Handle[R]: ...
    @overload
    def handle(self, task_id: UUID | str, function: TaskFunction[..., R]) -> Handle[R]: ...
    @overload
    def handle(self, task_id: UUID | str, function: None = None) -> Handle[Any]: ...
    def handle(self, task_id: UUID | str, function: TaskFunction[..., Any] | None = None) -> Handle[Any]:
        return Handle(task_id, self, None if function is None else function.returns)

    async def wait_for(self, tasks: Iterable[Awaited], timeout: float | None = None) -> list[Task]:  # noqa: ASYNC109 - see Handle.result
        wanted = _ids(tasks)
        found = {task.id: task async for task in self.as_completed(wanted, timeout)}
        return [found[task_id] for task_id in wanted]

    async def as_completed(self, tasks: Iterable[Awaited], timeout: float | None = None) -> AsyncIterator[Task]:  # noqa: ASYNC109
        waiting = set(_ids(tasks))
        deadline = _deadline(timeout)
        arrived: asyncio.Queue[Task | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(_: UUID, found: Task | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(arrived.put_nowait, found)

        ticket = self.database.waiting_room.enter(waiting, deliver)
        try:
            while waiting:
                try:
                    found = await asyncio.wait_for(arrived.get(), _remaining(deadline))
                except TimeoutError:
                    for task in await self._last_look(waiting):
                        yield task
                    await self._refuse_late(waiting, timeout)
                else:
                    yield _arrived(found, waiting)
        finally:
            ticket.leave()

    async def cancel_task(self, task_id: UUID | str, reason: str | None = None) -> CancelAnswer:
        return cast("CancelAnswer", (await self.database.run_async(self._statements.cancel(task_id, reason)))[0])

    async def retry_task(self, task_id: UUID | str) -> bool:
        return (await self.database.run_async(self._statements.retry(task_id)))[0]

    async def expire_tasks(self) -> int:
        return (await self.database.run_async(self._statements.expire()))[0]

    async def queue_statistics(self, queue: str | None = None) -> list[QueueStatistics]:
        return (await self.database.run_async(self._statistics.queues(queue)))[0]

    async def task_statistics(self, window_seconds: float = 3600.0, name: str | None = None) -> list[TaskStatistics]:
        return (await self.database.run_async(self._statistics.tasks(window_seconds, name)))[0]

    async def backlog(self, queues: Sequence[str] | None = None) -> int:
        return (await self.database.run_async(self._statistics.backlog(queues)))[0]

    async def close(self) -> None:
        await self.database.close_async()

    def _combiner(self) -> Combiner:
        loop = asyncio.get_running_loop()
        return self._combiners.get(loop) or self._combiners.setdefault(loop, Combiner(self._submit_together))

    async def _submit_together(self, tasks: Sequence[NewTask], since: float) -> list[TaskId]:
        if len(tasks) == 1:
            return await self.database.run_async(self._statements.submit(tasks[0]), since=since)
        return _in_order(tasks, await self.database.run_async(*self._statements.submit_many(tasks), since=since))

    async def _last_look(self, waiting: set[UUID]) -> list[Task]:
        return _taken_from(waiting, (await self.database.run_async(self._statements.final([*waiting])))[0])

    async def _refuse_late(self, late: set[UUID], timeout: float | None) -> None:  # noqa: ASYNC109 - told, not kept
        if late:
            raise result_timeout(late, timeout, await self._unfinished(sorted(late)))

    async def _unfinished(self, late: Sequence[UUID]) -> list[Unfinished] | None:
        try:
            return (await self.database.run_async(self._statements.unfinished(late[:MOST_NAMED])))[0]
        except TasklibError:  # as above
            return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _in_sync_thread(call: Callable[[T], R], given: T) -> R:
    """Where a framework's async code reaches its sync connections: that thread has them, and their transactions."""
    from asgiref.sync import sync_to_async  # noqa: PLC0415 - who has such connections has it

    return await sync_to_async(call)(given)


def _checked(config: Any) -> Config:
    if not isinstance(config, Config):
        raise InvalidConfig("pass a tasklib.Config, e.g. tasklib.Config(database_url=...)")
    return config


def _new_task(
    func: TaskFunction[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[NewTask, Any]:
    """Tell the options from the task's own arguments: no parameter of a task may be called like an option."""
    func = _function_of(func)
    if not isinstance(func, str) and RESERVED_PARAMETERS.isdisjoint(kwargs):
        return func.new(*args, **kwargs), None  # its terms are made already
    options = {name: value for name, value in kwargs.items() if name in RESERVED_PARAMETERS}
    arguments = {name: value for name, value in kwargs.items() if name not in RESERVED_PARAMETERS}
    terms = terms_of(func, cast("SubmitOptions", options))
    return new_task(func, args, arguments, terms), options.get("connection")


def _function_of(func: Any) -> TaskFunction[..., Any] | str:
    """A name that is registered here stands for its function, with its checks and defaults."""
    from tasklib.task import Submitter, TaskFunction  # noqa: PLC0415 - task functions submit through this module

    if isinstance(func, str):
        return default_registry.get(func) if func in default_registry else func
    if isinstance(func, Submitter):
        raise InvalidOptions("call .submit(...) on what options(...) returns, or give the options to submit_task")
    if not isinstance(func, TaskFunction):
        raise TaskNotRegistered(
            f"{getattr(func, '__name__', func)!r} is not a task function: decorate it with @tasklib.task, or use what "
            f"tasklib.task(...) returned"
        )
    return func


def _all_new(tasks: Any) -> list[NewTask]:
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
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
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
