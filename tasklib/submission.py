"""A task on its way in: validated and encoded, before any database is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from tasklib.arguments import encode_untyped
from tasklib.ids import new_id
from tasklib.names import check_task_name
from tasklib.options import DEFAULT_QUEUE, OnCrash, SubmitOptions, TaskOptions, checked_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from tasklib.arguments import EncodedArguments
    from tasklib.task import TaskFunction

# What encoding allows at most; Config.max_argument_bytes, which is known at the submit, may allow less.
LARGEST_ARGUMENT_BYTES = 1024 * 1024
_BY_NAME_ALONE = TaskOptions()


@dataclass(frozen=True, slots=True)
class NewTask:
    """A validated task that is not submitted yet. It has its id: to submit it twice is to submit it once."""

    id: UUID
    name: str
    args: str  # JSON text, like kwargs and tags
    kwargs: str
    queue: str
    priority: int
    delay_seconds: float
    scheduled_at: datetime | None
    expires_at: datetime | None
    max_retries: int | None
    timeout_seconds: float | None
    tags: str
    idempotency_key: str | None
    store_result: bool
    on_crash: OnCrash

    def to_json(self, defaults: Mapping[str, Any]) -> str:
        """One element of what tasklib.submit_many takes. What equals the function's own default is left out."""
        parts = [f'"id":"{self.id}","name":"{self.name}","kwargs":{self.kwargs}']
        if self.args != "{}":
            parts.append(f'"args":{self.args}')
        if self.tags != "{}":
            parts.append(f'"tags":{self.tags}')
        parts += [
            f'"{option}":{to_json(value).decode()}'
            for option, sql_default in _SCALARS.items()
            if (value := _first(getattr(self, option), defaults.get(option))) != sql_default
        ]
        return "{" + ",".join(parts) + "}"


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value


_SCALARS = {
    "queue": DEFAULT_QUEUE,
    "priority": 0,
    "delay_seconds": 0.0,
    "scheduled_at": None,
    "expires_at": None,
    "max_retries": 3,
    "timeout_seconds": None,
    "idempotency_key": None,
    "store_result": True,
    "on_crash": "retry",
}


def new_task(
    task: TaskFunction[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SubmitOptions
) -> NewTask:
    given = checked_options(options)
    own = _BY_NAME_ALONE if isinstance(task, str) else task.task_options
    encoded = _encode(task, args, kwargs)
    return NewTask(
        id=new_id(),
        name=task if isinstance(task, str) else task.name,
        args=encoded.args,
        kwargs=encoded.kwargs,
        queue=given.get("queue", own.queue),
        priority=given.get("priority", own.priority),
        delay_seconds=given.get("delay_seconds", 0.0),
        scheduled_at=given.get("scheduled_at"),
        expires_at=given.get("expires_at"),
        max_retries=given.get("max_retries", own.max_retries),
        timeout_seconds=given.get("timeout_seconds", own.timeout_seconds),
        tags=given.get("tags", "{}"),
        idempotency_key=given.get("idempotency_key"),
        store_result=given.get("store_result", own.store_result),
        on_crash=given.get("on_crash", own.on_crash),
    )


def _encode(task: TaskFunction[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> EncodedArguments:
    """A task given by its name alone takes JSON values only: its signature is not at hand."""
    if isinstance(task, str):
        return encode_untyped(check_task_name(task), args, kwargs, max_bytes=LARGEST_ARGUMENT_BYTES)
    return task.arguments.encode(args, kwargs, max_bytes=LARGEST_ARGUMENT_BYTES)
