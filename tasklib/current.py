"""The task that is running here: `tasklib.current_task()` inside a task function.

It has the task's own values, says whether the task should stop, and has the connection whose transaction completes it.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from pydantic_core import from_json, to_json

from tasklib.clock import time
from tasklib.errors import InvalidOptions, NoCurrentTask
from tasklib.number import is_number
from tasklib.strict_json import storable

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    import psycopg

MAX_MESSAGE_CHARACTERS = 1_000
LARGEST = 1e15
USE_ASYNC_CONNECTION = (
    "current_task().connection is for sync tasks; in an async task: await current_task().async_connection()"
)
USE_CONNECTION = "async_connection() is for async tasks; in a sync task use current_task().connection"
_current: ContextVar[Callable[[], CurrentTask]] = ContextVar("tasklib_current_task")


class TaskContext(Protocol):
    """What a running task can ask of its worker."""

    @property
    def cancel_asked(self) -> bool: ...

    @property
    def should_stop(self) -> bool: ...

    def note_progress(self, progress: str) -> None: ...

    def connection(self) -> psycopg.Connection[Any]: ...

    async def async_connection(self) -> psycopg.AsyncConnection[Any]: ...


@dataclass(frozen=True, slots=True)
class CurrentTask:
    """The task that is running here. `attempt` counts executions that began, from 1."""

    id: UUID
    name: str
    queue: str
    attempt: int
    retry_count: int
    started_at: datetime
    timeout_seconds: float | None
    parent_id: UUID | None
    tags_json: str = field(repr=False)
    task_context: TaskContext = field(repr=False)
    started: float = field(default_factory=time.monotonic, repr=False)

    @property
    def tags(self) -> dict[str, Any]:
        tags: dict[str, Any] = from_json(self.tags_json)
        return tags

    @property
    def deadline(self) -> datetime | None:
        """When its timeout passes, by the database's clock; None: it has no timeout."""
        return None if self.timeout_seconds is None else self.started_at + timedelta(seconds=self.timeout_seconds)

    @property
    def remaining_seconds(self) -> float | None:
        """Until the deadline, at least zero."""
        if self.timeout_seconds is None:
            return None
        return max(self.started + self.timeout_seconds - time.monotonic(), 0.0)

    @property
    def cancel_asked(self) -> bool:
        """A cancel was requested: the task will be cancelled, unless it completes."""
        return self.task_context.cancel_asked

    @property
    def should_stop(self) -> bool:
        """Its worker wants to stop, its time is up, or it was cancelled. A long loop checks this, saves its work and
        raises `Snooze(0)`, or returns.
        """
        return self.task_context.should_stop

    def progress(self, done: float, total: float | None = None, message: str | None = None) -> None:
        """Report how far the task is, as often as you like. It is written twice a second, for `get_task().progress`."""
        progress = {"done": _number("done", done), "total": total if total is None else _number("total", total)}
        if message is not None:
            progress["message"] = storable(str(message), MAX_MESSAGE_CHARACTERS)
        self.task_context.note_progress(
            to_json({key: value for key, value in progress.items() if value is not None}).decode()
        )

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """A psycopg connection in the transaction that also completes the task. Its writes and the completion are
        committed together, exactly once, when the function returns. If the function raises, all is rolled back. The
        task cannot commit by itself. An error in SQL aborts the transaction: put `with connection.transaction():`
        around statements that may fail.
        In async functions: `await current_task().async_connection()`.
        """
        return self.task_context.connection()

    async def async_connection(self) -> psycopg.AsyncConnection[Any]:
        """`connection` for async functions."""
        return await self.task_context.async_connection()


def current_task() -> CurrentTask:
    """The task that is running here. Raises outside of a task; `is_running_task()` asks first."""
    describe = _current.get(None)
    if describe is None:
        raise NoCurrentTask(
            "current_task() was called outside of a task: it works in a function that a worker runs, and in what that "
            "calls. In a test, run the function with tasklib.testing.run_inline."
        )
    return describe()


def is_running_task() -> bool:
    return _current.get(None) is not None


def enter_task(describe: Callable[[], CurrentTask]) -> None:
    """Set the current task of this context, which ends with the task. Most tasks never ask, so `describe` is lazy."""
    _current.set(describe)


def current_task_id() -> UUID | None:
    """The parent of tasks that are submitted here."""
    describe = _current.get(None)
    return None if describe is None else describe().id


def _number(name: str, value: Any) -> Any:
    if not is_number(value, -LARGEST, LARGEST):
        raise InvalidOptions(f"progress: {name} must be a number, got {value!r}")
    return value
