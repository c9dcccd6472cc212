"""The module-level functions: a default client, made by `init`, and thin calls to it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Unpack

from tasklib.client import AsyncClient, Client
from tasklib.config import Config
from tasklib.errors import NotInitialised
from tasklib.handles import Handle
from tasklib.unawaited import told_if_unawaited

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from tasklib.client import Awaited, CancelAnswer
    from tasklib.ids import TaskId
    from tasklib.options import OnCrash
    from tasklib.record import Attempt, Task
    from tasklib.statements import ListFilters
    from tasklib.statistics import QueueStatistics, TaskStatistics
    from tasklib.submission import NewTask
    from tasklib.task import TaskFunction


@dataclass(frozen=True, slots=True)
class _Application:
    client: Client
    async_client: AsyncClient


_application: _Application | None = None
_init_later: Callable[[], Config] | None = None


def init(config: Config | None = None, *, connection: Callable[[], Any] | None = None) -> None:
    """Say which database to use; without a Config, the one that the environment names (DATABASE_URL or PG*).

    Opens no connection. Calling it again replaces the default client, as after `close`. `connection` returns the
    sync connection in whose transaction submits are that name none: a framework's own, for the thread that asks.
    """
    global _application  # noqa: PLW0603 - the one default of the module-level functions
    import_module("tasklib.task")  # now, and not during the first submit; it imports this module
    config = Config.from_environment() if config is None else config
    client = Client(config, connection=connection)
    close()
    _application = _Application(client, client.as_async())


def init_later(config: Callable[[], Config]) -> None:
    """The first use calls `init` with this, if nobody has by then. For frameworks: their own start may never come."""
    global _init_later  # noqa: PLW0603 - see above
    _init_later = config


def close() -> None:
    """Forget the default client and close its connections; those of a running event loop close with the loop."""
    global _application, _init_later
    previous, _application, _init_later = _application, None, None
    if previous is not None:
        previous.client.close()


def set_aside() -> Any:
    """For tests: as if nobody had called `init`, until `put_back` gets what this returns. Nothing is closed."""
    global _application, _init_later  # noqa: PLW0603 - see above
    previous = _application, _init_later
    _application = _init_later = None
    return previous


def put_back(previous: Any) -> None:
    global _application, _init_later
    close()
    _application, _init_later = previous


def is_initialised() -> bool:
    return _application is not None


def default_client() -> Client:
    return _initialised().client


def default_async_client() -> AsyncClient:
    return _initialised().async_client


def _initialised() -> _Application:
    if _application is None and _init_later is not None:
        init(_init_later())
    if _application is None:
        raise NotInitialised("call tasklib.init(tasklib.Config(database_url=...)) before using tasklib")
    return _application


@told_if_unawaited
async def submit_task(
    func: TaskFunction[..., Any] | str,
    /,
    *args: Any,
    delay_seconds: float | timedelta = 0,
    max_retries: int | None = None,
    timeout_seconds: float | None = None,
    priority: int | None = None,
    tags: Mapping[str, Any] | None = None,
    queue: str | None = None,
    scheduled_at: datetime | None = None,
    expires_at: datetime | None = None,
    idempotency_key: str | None = None,
    store_result: bool | None = None,
    on_crash: OnCrash | None = None,
    connection: Any = None,
    **kwargs: Any,
) -> TaskId:
    """Submit a task and return its id, once it is committed.

    Higher `priority` runs first. With `connection` (psycopg's, SQLAlchemy's, asyncpg's or Django's), the submit is part
    of that connection's transaction: rolled back means never existed. A task can be named by a string when its function
    is not at hand.
    """
    return await default_async_client().submit_task(
        func,
        *args,
        delay_seconds=delay_seconds,
        max_retries=max_retries,
        timeout_seconds=timeout_seconds,
        priority=priority,
        tags=tags,
        queue=queue,
        scheduled_at=scheduled_at,
        expires_at=expires_at,
        idempotency_key=idempotency_key,
        store_result=store_result,
        on_crash=on_crash,
        connection=connection,
        **kwargs,
    )


def submit_task_sync(func: TaskFunction[..., Any] | str, /, *args: Any, **kwargs: Any) -> TaskId:
    """`submit_task` for code that is not async; takes the same options."""
    return default_client().submit_task(func, *args, **kwargs)


@told_if_unawaited
async def submit_many(tasks: Iterable[NewTask], *, connection: Any = None) -> list[TaskId]:
    """Submit what `function.new(...)` made: all or none, in one transaction. Ids in the order given;
    `id.existed` tells which of them an earlier submit with the same idempotency key had made.
    """
    return await default_async_client().submit_many(tasks, connection=connection)


def submit_many_sync(tasks: Iterable[NewTask], *, connection: Any = None) -> list[TaskId]:
    return default_client().submit_many(tasks, connection=connection)


def get_task(task_id: UUID | str) -> Task | None:
    return default_client().get_task(task_id)


async def get_task_async(task_id: UUID | str) -> Task | None:
    return await default_async_client().get_task(task_id)


def get_attempts(task_id: UUID | str) -> list[Attempt]:
    """Every execution of a task that has ended, from the first on, with its traceback. Empty: none has, or there is no
    such task.
    """
    return default_client().get_attempts(task_id)


async def get_attempts_async(task_id: UUID | str) -> list[Attempt]:
    return await default_async_client().get_attempts(task_id)


def list_tasks(
    state: str | None = None, name: str | None = None, limit: int = 100, **filters: Unpack[ListFilters]
) -> list[Task]:
    """Newest first. Filters: queue, tags, created_after, created_before, final; `after` (an id) asks for the next page.
    `list_tasks("failed", final=True)` are those that gave up, `final=False` those that wait for a retry.
    """
    return default_client().list_tasks(state, name, limit, **filters)


async def list_tasks_async(
    state: str | None = None, name: str | None = None, limit: int = 100, **filters: Unpack[ListFilters]
) -> list[Task]:
    return await default_async_client().list_tasks(state, name, limit, **filters)


def handle(task_id: UUID | str) -> Handle[Any]:
    """For the result of a task whose id is known; `function.handle(task_id)` knows its type too."""
    return Handle(task_id)


async def wait_for(tasks: Iterable[Awaited], timeout: float | None = None) -> list[Task]:  # noqa: ASYNC109 - see Handle.result
    """Wait until all of them are final; in the order given, also those that failed. `ResultTimeout` after `timeout`."""
    return await default_async_client().wait_for(tasks, timeout)


def wait_for_sync(tasks: Iterable[Awaited], timeout: float | None = None) -> list[Task]:
    return default_client().wait_for(tasks, timeout)


def as_completed(tasks: Iterable[Awaited], timeout: float | None = None) -> AsyncIterator[Task]:
    """Each as soon as it is final: `async for task in tasklib.as_completed(ids):`."""
    return default_async_client().as_completed(tasks, timeout)


def as_completed_sync(tasks: Iterable[Awaited], timeout: float | None = None) -> Iterator[Task]:
    return default_client().as_completed(tasks, timeout)


def cancel_task(task_id: UUID | str, reason: str | None = None) -> CancelAnswer:
    """The answer "cancelled": it waited, and will not run. "asked": a worker holds it, and is asked to stop it. None:
    there is no such task, or it is final.
    """
    return default_client().cancel_task(task_id, reason)


async def cancel_task_async(task_id: UUID | str, reason: str | None = None) -> CancelAnswer:
    return await default_async_client().cancel_task(task_id, reason)


def retry_task(task_id: UUID | str) -> bool:
    """Run it again, now: one that is final, or that waits for its next attempt. False: it is neither."""
    return default_client().retry_task(task_id)


async def retry_task_async(task_id: UUID | str) -> bool:
    return await default_async_client().retry_task(task_id)


def expire_tasks() -> int:
    """End waiting tasks whose `expires_at` has passed, as workers do every second: at most 1,000. How many."""
    return default_client().expire_tasks()


async def expire_tasks_async() -> int:
    return await default_async_client().expire_tasks()


def queue_statistics(queue: str | None = None) -> list[QueueStatistics]:
    """How many tasks wait or are held, and for how long: of one queue, or of all that have any."""
    return default_client().queue_statistics(queue)


async def queue_statistics_async(queue: str | None = None) -> list[QueueStatistics]:
    return await default_async_client().queue_statistics(queue)


def task_statistics(window_seconds: float = 3600.0, name: str | None = None) -> list[TaskStatistics]:
    """What became of attempts lately, by task: how many, how many a second, how long they took and had waited. To the
    minute; what has ended in the last seconds may not be in it yet.
    """
    return default_client().task_statistics(window_seconds, name)


async def task_statistics_async(window_seconds: float = 3600.0, name: str | None = None) -> list[TaskStatistics]:
    return await default_async_client().task_statistics(window_seconds, name)


def backlog(queues: Sequence[str] | None = None) -> int:
    """How many tasks there are to do: ready, due, or held by a worker. Counted up to 10,000: for scaling."""
    return default_client().backlog(queues)


async def backlog_async(queues: Sequence[str] | None = None) -> int:
    return await default_async_client().backlog(queues)
