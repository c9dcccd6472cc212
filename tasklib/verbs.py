"""The verbs: each is declared once, as a method of `Verbs` that returns its statement.

`Client` gets it as a method that runs the statement, `AsyncClient` as a coroutine method of the same name and
arguments. To add a verb, declare it here, and publish both of its module-level names in tasklib/application.py.
"""

from __future__ import annotations

import inspect
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from tasklib.config import Config
from tasklib.database import Database
from tasklib.errors import InvalidConfig
from tasklib.handles import Handle
from tasklib.queue_options import UNCHANGED, Unchanged
from tasklib.statements import ListFilters, QueueStatements, Statement, Statements
from tasklib.statistics import QueueStatistics, StatisticsStatements, TaskStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from tasklib.client import AsyncClient, Client
    from tasklib.queues import ClusterPolicy, Queue, Transition
    from tasklib.record import Attempt, Task
    from tasklib.task import TaskFunction
    from tasklib.unfinished import Unfinished

P = ParamSpec("P")
T = TypeVar("T")
CancelAnswer = Literal["cancelled", "asked"] | None


class verb(Generic[P, T]):  # noqa: N801 - a decorator
    """Makes both forms of a verb from the method that returns its statement."""

    def __init__(self, statement: Callable[Concatenate[Any, P], Statement[T]]) -> None:
        def run(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return client.database.run(statement(client, *args, **kwargs))[0]

        async def run_async(client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return (await client.database.run_async(statement(client, *args, **kwargs)))[0]

        signature = inspect.signature(statement)
        result = str(signature.return_annotation).removeprefix("Statement[").removesuffix("]")
        for form in (run, run_async):
            present(form, statement.__name__, __name__, statement.__doc__, signature.replace(return_annotation=result))
        self.sync_form = run
        self.async_form = run_async

    # Type checkers read these; at run time `Verbs.__init_subclass__` gives each client a plain method.
    @overload
    def __get__(self, client: Client, owner: type[Client]) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type[AsyncClient]) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: None, owner: type[Client]) -> Callable[Concatenate[Client, P], T]: ...
    @overload
    def __get__(
        self, client: None, owner: type[AsyncClient]
    ) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]: ...
    def __get__(self, client: Any, owner: Any) -> Any:
        return self


def present(function: Any, name: str, module: str, doc: str | None, signature: inspect.Signature) -> None:
    """Make a function that was built at run time look like a written one. Its code gets the name too: tracebacks show
    it, and so does the event `loop.blocked`.
    """
    function.__code__ = function.__code__.replace(co_name=name)
    function.__name__ = function.__qualname__ = name
    function.__module__ = module
    function.__doc__ = doc
    function.__signature__ = signature


class Verbs:
    """What both clients have: the configuration, the database, and every verb that is one statement."""

    def __init__(self, config: Config, database: Database | None = None) -> None:
        if not isinstance(config, Config):
            raise InvalidConfig("pass a tasklib.Config, e.g. tasklib.Config(database_url=...)")
        self.config = config
        self.database = database or Database(config)
        self._statements = Statements(config)
        self._statistics = StatisticsStatements(config)
        self._queues = QueueStatements(config)

    def __init_subclass__(cls, *, is_async: bool | None = None) -> None:
        """A subclass that does not say whether it is async inherits the methods of its own base class."""
        for name, each in vars(Verbs).items():
            if is_async is not None and isinstance(each, verb):
                form = each.async_form if is_async else each.sync_form
                form.__qualname__ = f"{cls.__name__}.{name}"
                setattr(cls, name, form)

    @verb
    def get_task(self, task_id: UUID | str) -> Statement[Task | None]:
        """The task as it stands. None: there is no such task."""
        return self._statements.get(task_id)

    @verb
    def get_attempts(self, task_id: UUID | str) -> Statement[list[Attempt]]:
        """Every attempt of a task that has ended, the first one first, each with its traceback. Empty: no attempt has
        ended yet, or there is no such task.
        """
        return self._statements.attempts(task_id)

    @verb
    def list_tasks(
        self, state: str | None = None, name: str | None = None, limit: int = 100, **filters: Unpack[ListFilters]
    ) -> Statement[list[Task]]:
        """Tasks, newest first. Filters: queue, tags, created_after, created_before, final; `after` (the last id of the
        page before) asks for the next page. `list_tasks("failed", final=True)` lists the tasks that gave up,
        `final=False` those that wait for a retry.
        """
        return self._statements.list(state, name, limit, **filters)

    @verb
    def cancel_task(self, task_id: UUID | str, reason: str | None = None) -> Statement[CancelAnswer]:
        """Cancel a task. "cancelled": it was waiting, and will not run. "asked": a worker holds it, and is asked to
        stop it. None: there is no such task, or it is final.
        """
        return cast("Statement[CancelAnswer]", self._statements.cancel(task_id, reason))

    @verb
    def retry_task(self, task_id: UUID | str) -> Statement[bool]:
        """Run a task again, now: one that is final, or that waits for its next attempt. False: it is neither."""
        return self._statements.retry(task_id)

    @verb
    def expire_tasks(self) -> Statement[int]:
        """End waiting tasks whose `expires_at` has passed, at most 1,000, and return how many. Workers do this every
        second.
        """
        return self._statements.expire()

    @verb
    def queue_statistics(self, queue: str | None = None) -> Statement[list[QueueStatistics]]:
        """How many tasks wait or are held, and for how long: for one queue, or for all queues that have any."""
        return self._statistics.queues(queue)

    @verb
    def task_statistics(
        self, window_seconds: float = 3600.0, name: str | None = None
    ) -> Statement[list[TaskStatistics]]:
        """The outcomes of recent attempts, by task name: how many, how many a second, how long they took and waited.
        The window is exact to the minute; attempts of the last seconds may not be counted yet.
        """
        return self._statistics.tasks(window_seconds, name)

    @verb
    def backlog(self, queues: Sequence[str] | None = None) -> Statement[int]:
        """How many tasks there are to do: ready, due, or held by a worker. Counted up to 10,000: for scaling."""
        return self._statistics.backlog(queues)

    @verb
    def set_queue(
        self,
        name: str,
        *,
        max_running: int | Unchanged | None = UNCHANGED,
        max_per_worker: int | Unchanged | None = UNCHANGED,
        rate_limit: int | Unchanged | None = UNCHANGED,
        rate_seconds: float | Unchanged | None = UNCHANGED,
        rate_burst: int | Unchanged | None = UNCHANGED,
        breaker_failures: int | Unchanged | None = UNCHANGED,
        breaker_share: float | Unchanged | None = UNCHANGED,
        breaker_window_seconds: float | Unchanged | None = UNCHANGED,
        breaker_open_seconds: float | Unchanged | None = UNCHANGED,
        breaker_probes: int | Unchanged | None = UNCHANGED,
        breaker_codes: Sequence[str] | Unchanged | None = UNCHANGED,
        ageing_seconds: float | Unchanged | None = UNCHANGED,
        rank: int | Unchanged | None = UNCHANGED,
        weight: float | Unchanged | None = UNCHANGED,
        default_priority: int | Unchanged | None = UNCHANGED,
        default_max_retries: int | Unchanged | None = UNCHANGED,
        default_timeout_seconds: float | Unchanged | None = UNCHANGED,
        retention_days: float | Unchanged | None = UNCHANGED,
        audit: bool | Unchanged | None = UNCHANGED,
        reason: str | None = None,
    ) -> Statement[Queue]:
        """Set the policy of a queue for the whole cluster. An option that is left out stays as it is (`UNCHANGED`), and
        None removes the limit. docs/queues.md says what each option promises. The reason goes to the audit.
        """
        options = {
            "max_running": max_running, "max_per_worker": max_per_worker, "rate_limit": rate_limit, "rate_seconds":
            rate_seconds, "rate_burst": rate_burst, "breaker_failures": breaker_failures, "breaker_share":
            breaker_share, "breaker_window_seconds": breaker_window_seconds, "breaker_open_seconds":
            breaker_open_seconds, "breaker_probes": breaker_probes, "breaker_codes": breaker_codes, "ageing_seconds":
            ageing_seconds, "rank": rank, "weight": weight, "default_priority": default_priority, "default_max_retries":
            default_max_retries, "default_timeout_seconds": default_timeout_seconds, "retention_days": retention_days,
            "audit": audit,
        }  # fmt: skip
        return self._queues.set(name, options, reason)

    @verb
    def get_queue(self, name: str) -> Statement[Queue | None]:
        """The policy of a queue, and what is in force now. None: nobody has set a policy for it."""
        return self._queues.get(name)

    @verb
    def list_queues(self) -> Statement[list[Queue]]:
        """Every queue that has a policy, and every queue in which a task is ready, by name. `created_at` is None for a
        queue that nobody has set a policy for.
        """
        return self._queues.list_all()

    @verb
    def pause_queue(
        self, name: str, reason: str | None = None, until: datetime | timedelta | None = None
    ) -> Statement[Queue]:
        """Pause a queue in the whole cluster: after a second no worker starts a task of it. Tasks that execute go on.
        `until`, a moment or a time from now, ends the pause by itself.
        """
        return self._queues.pause(name, reason, until)

    @verb
    def resume_queue(self, name: str, reason: str | None = None) -> Statement[bool]:
        """End the pause of a queue. False: it was not paused."""
        return self._queues.resume(name, reason)

    @verb
    def set_cluster(
        self,
        *,
        cluster_wide_cap: int | Unchanged | None = UNCHANGED,
        refuses_unknown_queues: bool | Unchanged | None = UNCHANGED,
        reason: str | None = None,
    ) -> Statement[ClusterPolicy]:
        """Set what holds for all queues: how many tasks execute at one time, and whether a submit to a queue that has
        no policy is an error. An option that is left out stays as it is.
        """
        options = {"cluster_wide_cap": cluster_wide_cap, "refuses_unknown_queues": refuses_unknown_queues}
        return self._queues.set_cluster(options, reason)

    @verb
    def get_cluster(self) -> Statement[ClusterPolicy]:
        """What holds for all queues, and how much of the cap is in use."""
        return self._queues.get_cluster()

    @verb
    def list_transitions(
        self, task_id: UUID | str | None = None, queue: str | None = None, limit: int = 100
    ) -> Statement[list[Transition]]:
        """The audit, newest first: what operators changed, and what happened to tasks whose queue has `audit`."""
        return self._queues.transitions(task_id, queue, limit)

    @overload
    def handle(self, task_id: UUID | str, function: TaskFunction[..., Coroutine[Any, Any, T]]) -> Handle[T]: ...
    @overload
    def handle(self, task_id: UUID | str, function: TaskFunction[..., T]) -> Handle[T]: ...
    @overload
    def handle(self, task_id: UUID | str, function: None = None) -> Handle[Any]: ...
    def handle(self, task_id: UUID | str, function: TaskFunction[..., Any] | None = None) -> Handle[Any]:
        """A handle for a task whose id is known. With its function, the result has the type that it returns."""
        returns = None if function is None else function.returns
        return Handle(task_id, cast("Client | AsyncClient", self), returns)

    @verb
    def _final(self, task_ids: Sequence[UUID]) -> Statement[list[Task]]:
        """The final ones among these tasks."""
        return self._statements.final(task_ids)

    @verb
    def _unfinished(self, task_ids: Sequence[UUID]) -> Statement[list[Unfinished]]:
        """The state of these tasks that are not final, for `ResultTimeout`."""
        return self._statements.unfinished(task_ids)
