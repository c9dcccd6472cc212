"""A task on its way in: validated and encoded, before any database is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import to_json

from tasklib.arguments import encode_untyped
from tasklib.current import current_task_id
from tasklib.ids import TaskId, new_id
from tasklib.names import check_task_name
from tasklib.options import DEFAULT_QUEUE, OnCrash, SubmitOptions, checked_options
from tasklib.strict_json import LARGEST_ARGUMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from tasklib.task import TaskFunction


@dataclass(frozen=True, slots=True)
class Terms:
    """What a submit says besides the arguments, with the task function's defaults filled in.

    Many tasks share one: it is checked once, and written as JSON once a batch. None means: as the Config says; of
    `on_crash`, as the function says that runs it. If the function is not known here, None of any option means: as the
    workers that have the function say.
    """

    knows_function: bool
    queue: str | None
    priority: int | None
    delay_seconds: float
    scheduled_at: datetime | None
    expires_at: datetime | None
    max_retries: int | None
    timeout_seconds: float | None
    tags: str  # JSON text
    idempotency_key: str | None
    store_result: bool | None
    on_crash: OnCrash | None

    def value(self, option: str, defaults: Mapping[str, Any]) -> Any:
        said = getattr(self, option)
        return defaults.get(option) if said is None else said

    def is_plain(self, defaults: Mapping[str, Any]) -> bool:
        """It says nothing but its queue."""
        return (
            self.knows_function
            and self.tags == "{}"
            and all(
                self.value(option, defaults) == sql_default
                for option, sql_default in _SQL_DEFAULTS.items()
                if option != "queue"
            )
        )

    def to_json(self, defaults: Mapping[str, Any]) -> str:
        """As members of one element of what tasklib.submit_many takes; what equals its own default is left out."""
        tags = "" if self.tags == "{}" else f',"tags":{self.tags}'
        if not self.knows_function:
            return tags + _members(self.given()) + _otherwise(defaults)
        values = {option: self.value(option, defaults) for option in _SQL_DEFAULTS}
        return tags + ',"resolved":true' + _members(_beside(values))

    def given(self) -> dict[str, Any]:
        """For a function that is not known here: what was said, and nothing else."""
        options = {option: getattr(self, option) for option in _SQL_DEFAULTS}
        return {
            option: value for option, value in options.items() if value is not None and (option, value) != _NO_DELAY
        }


class NewTask(NamedTuple):
    """A validated task that is not submitted yet. It has its id: to submit it twice is to submit it once."""

    id: TaskId
    name: str
    args: str  # JSON text
    kwargs: str
    terms: Terms
    parent_id: UUID | None = None

    def __repr__(self) -> str:
        return f"NewTask(id={self.id!r}, name={self.name!r})"  # arguments may be secrets

    def to_json(self, terms_json: str) -> str:
        args = "" if self.args == "{}" else f',"args":{self.args}'
        parent = "" if self.parent_id is None else f',"parent_id":"{self.parent_id}"'
        return f'{{"id":"{self.id.int:032x}","name":"{self.name}","kwargs":{self.kwargs}{args}{parent}{terms_json}}}'


_SQL_DEFAULTS = {
    "queue": DEFAULT_QUEUE,
    "priority": 0,
    "delay_seconds": 0.0,
    "scheduled_at": None,
    "expires_at": None,
    "max_retries": 3,
    "timeout_seconds": None,
    "idempotency_key": None,
    "store_result": True,
    "on_crash": None,
}
_NO_DELAY = ("delay_seconds", 0.0)


def _beside(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that differ from the defaults of the database."""
    return {option: value for option, value in values.items() if value != _SQL_DEFAULTS[option]}


def _members(values: Mapping[str, Any]) -> str:
    return "".join(f',"{option}":{to_json(value).decode()}' for option, value in values.items())


def _otherwise(defaults: Mapping[str, Any]) -> str:
    """What the Config says, for a name that no worker has served yet."""
    differing = _beside(defaults)
    return f',"otherwise":{to_json(differing).decode()}' if differing else ""


def new_task(
    task: TaskFunction[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any], terms: Terms
) -> NewTask:
    """A task that is given by its name alone takes JSON values only: its signature is not at hand. Made inside another
    task, it carries that as its parent.

    Encoding allows what any Config may allow; the statement knows which Config it is for.
    """
    if isinstance(task, str):
        name = check_task_name(task)
        encoded = encode_untyped(name, args, kwargs, max_bytes=LARGEST_ARGUMENT_BYTES)
    else:
        name = task.name
        encoded = task.arguments.encode(args, kwargs, max_bytes=LARGEST_ARGUMENT_BYTES)
    return NewTask(new_id(), name, encoded.args, encoded.kwargs, terms, current_task_id())


def terms_of(task: TaskFunction[..., Any] | str, options: SubmitOptions) -> Terms:
    given = {**_options_of(task), **checked_options(options)}
    return Terms(
        knows_function=not isinstance(task, str),
        queue=given.get("queue"),
        priority=given.get("priority"),
        delay_seconds=given.get("delay_seconds", 0.0),
        scheduled_at=given.get("scheduled_at"),
        expires_at=given.get("expires_at"),
        max_retries=given.get("max_retries"),
        timeout_seconds=given.get("timeout_seconds"),
        tags=given.get("tags", "{}"),
        idempotency_key=given.get("idempotency_key"),
        store_result=given.get("store_result"),
        on_crash=given.get("on_crash"),
    )


def _options_of(task: TaskFunction[..., Any] | str) -> dict[str, Any]:
    """`on_crash="retry"` is left to the worker: should its version of the function say "fail", that holds."""
    if isinstance(task, str):
        return {}
    own = task.task_options
    return {
        "queue": own.queue,
        "priority": own.priority,
        "max_retries": own.max_retries,
        "timeout_seconds": own.timeout_seconds,
        "store_result": own.store_result,
        "on_crash": None if own.on_crash == "retry" else own.on_crash,
    }
