"""The functions of the module `tasklib`: `init` makes a default pair of clients, and each verb calls one of the two."""

from __future__ import annotations

import asyncio
import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from tasklib.client import AsyncClient, Client
from tasklib.config import Config
from tasklib.errors import NotInitialised
from tasklib.handles import Handle
from tasklib.unawaited import log_if_unawaited
from tasklib.verbs import present

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime, timedelta
    from uuid import UUID

    from tasklib.ids import TaskId
    from tasklib.options import OnCrash
    from tasklib.task import TaskFunction

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")


class _Application(NamedTuple):
    client: Client
    async_client: AsyncClient


_application: _Application | None = None
_init_later: Callable[[], Config] | None = None


def init(config: Config | None = None, *, connection: Callable[[], Any] | None = None) -> None:
    """Say which database to use. Without a Config, the environment names it (DATABASE_URL or PG*).

    Opens no connection. Calling it again replaces the default clients, as after `close`. `connection` is for
    frameworks: it returns the sync connection that the calling thread uses, and a submit that names no connection joins
    that one's transaction.
    """
    global _application  # noqa: PLW0603 - the one default of the module-level functions
    import_module("tasklib.task")  # now, and not during the first submit; it imports this module
    client = Client(Config.from_environment() if config is None else config, connection=connection)
    close()
    _application = _Application(client, client.as_async())


def init_later(config: Callable[[], Config]) -> None:
    """Let the first use call `init` with what this returns, unless the application has called it by then. For
    frameworks whose own start may never be run.
    """
    global _init_later  # noqa: PLW0603 - see above
    _init_later = config


def close() -> None:
    """Forget the default clients and close their connections, apart from those of event loops: an event loop's
    connections close with the loop, or by `close_async`.
    """
    previous, _ = set_aside()
    if previous is not None:
        previous.client.close()


async def close_async() -> None:
    """`close`, and close the connections of this event loop too."""
    previous, _ = set_aside()
    if previous is not None:
        await previous.async_client.close()
        await asyncio.to_thread(previous.client.close)


def set_aside() -> tuple[_Application | None, Callable[[], Config] | None]:
    """For tests: act as if `init` was never called, until `put_back` gets what this returns. Closes nothing."""
    global _application, _init_later  # noqa: PLW0603 - see above
    previous = _application, _init_later
    _application = _init_later = None
    return previous


def put_back(previous: tuple[_Application | None, Callable[[], Config] | None]) -> None:
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


@log_if_unawaited
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
    deadline_at: datetime | None = None,
    deadline_seconds: float | None = None,
    idempotency_key: str | None = None,
    store_result: bool | None = None,
    on_crash: OnCrash | None = None,
    connection: Any = None,
    **kwargs: Any,
) -> TaskId:
    """Submit a task and return its id, once it is committed.

    Higher `priority` runs first. With `connection` (psycopg's, SQLAlchemy's, asyncpg's or Django's), the submit is part
    of that connection's transaction: after a rollback the task never existed. A string names a task whose function
    cannot be imported here.
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
        deadline_at=deadline_at,
        deadline_seconds=deadline_seconds,
        idempotency_key=idempotency_key,
        store_result=store_result,
        on_crash=on_crash,
        connection=connection,
        **kwargs,
    )


def handle(task_id: UUID | str) -> Handle[Any]:
    """A handle for a task whose id is known. `function.handle(task_id)` knows the type of the result too."""
    return Handle(task_id)


def _sync_first(
    sync: Callable[Concatenate[Client, P], T], awaited: Callable[Concatenate[AsyncClient, P], A]
) -> tuple[Callable[P, T], Callable[P, A]]:
    """A verb's two functions: `x` is sync, `x_async` is async."""
    return _on_default(sync, default_client, ""), _on_default(awaited, default_async_client, "_async")


def _async_first(
    awaited: Callable[Concatenate[AsyncClient, P], A], sync: Callable[Concatenate[Client, P], T]
) -> tuple[Callable[P, A], Callable[P, T]]:
    """The two functions of a call that submits or waits: `x` is async, `x_sync` is sync."""
    return _on_default(awaited, default_async_client, ""), _on_default(sync, default_client, "_sync")


def _on_default(method: Callable[..., Any], client: Callable[[], Any], suffix: str) -> Any:
    """A function that calls this method of the default client."""
    verb = method.__name__

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        return await getattr(client(), verb)(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(client(), verb)(*args, **kwargs)

    signature = inspect.signature(method)
    _self, *parameters = signature.parameters.values()
    function = call_async if asyncio.iscoroutinefunction(method) else call
    present(function, verb + suffix, __name__, method.__doc__, signature.replace(parameters=parameters))
    return function


# Submitting and waiting: the plain name is async, since a program that has an event loop must not block it.
submit_task_sync = _async_first(AsyncClient.submit_task, Client.submit_task)[1]  # submit_task is above
submit_many, submit_many_sync = _async_first(AsyncClient.submit_many, Client.submit_many)
submit_many = log_if_unawaited(submit_many)
wait_for, wait_for_sync = _async_first(AsyncClient.wait_for, Client.wait_for)
as_completed, as_completed_sync = _async_first(AsyncClient.as_completed, Client.as_completed)

# Everything else: the plain name is sync.
get_task, get_task_async = _sync_first(Client.get_task, AsyncClient.get_task)
get_attempts, get_attempts_async = _sync_first(Client.get_attempts, AsyncClient.get_attempts)
list_tasks, list_tasks_async = _sync_first(Client.list_tasks, AsyncClient.list_tasks)
cancel_task, cancel_task_async = _sync_first(Client.cancel_task, AsyncClient.cancel_task)
retry_task, retry_task_async = _sync_first(Client.retry_task, AsyncClient.retry_task)
expire_tasks, expire_tasks_async = _sync_first(Client.expire_tasks, AsyncClient.expire_tasks)
queue_statistics, queue_statistics_async = _sync_first(Client.queue_statistics, AsyncClient.queue_statistics)
task_statistics, task_statistics_async = _sync_first(Client.task_statistics, AsyncClient.task_statistics)
backlog, backlog_async = _sync_first(Client.backlog, AsyncClient.backlog)
set_queue, set_queue_async = _sync_first(Client.set_queue, AsyncClient.set_queue)
get_queue, get_queue_async = _sync_first(Client.get_queue, AsyncClient.get_queue)
list_queues, list_queues_async = _sync_first(Client.list_queues, AsyncClient.list_queues)
pause_queue, pause_queue_async = _sync_first(Client.pause_queue, AsyncClient.pause_queue)
resume_queue, resume_queue_async = _sync_first(Client.resume_queue, AsyncClient.resume_queue)
set_cluster, set_cluster_async = _sync_first(Client.set_cluster, AsyncClient.set_cluster)
get_cluster, get_cluster_async = _sync_first(Client.get_cluster, AsyncClient.get_cluster)
list_transitions, list_transitions_async = _sync_first(Client.list_transitions, AsyncClient.list_transitions)
