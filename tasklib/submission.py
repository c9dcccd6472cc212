"""Makes a task that can be submitted: validates it and encodes its arguments, without the database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pydantic_core import to_json

from tasklib.arguments import encode_untyped
from tasklib.current import current_task_id
from tasklib.errors import InvalidOptions, TaskNotRegistered
from tasklib.ids import TaskId, new_id
from tasklib.names import check_task_name
from tasklib.options import DEFAULT_QUEUE, QUEUE_OPTIONS, RESERVED_PARAMETERS, OnCrash, SubmitOptions, checked_options
from tasklib.registry import default_registry
from tasklib.strict_json import LARGEST_ARGUMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from tasklib.task import TaskFunction


@dataclass(frozen=True, slots=True)
class ResolvedOptions:
    """The options of a submit, with the task function's own filled in.

    Many tasks share one object: it is checked once, and written as JSON once a batch. None means that neither says it:
    then the queue's default counts, which the database looks up, or else the Config's value. None of `on_crash` means
    that of the function in the worker. If the function is not known here, None of any option means the value that the
    workers with that function use.
    """

    knows_function: bool
    queue: str | None
    priority: int | None
    delay_seconds: float
    scheduled_at: datetime | None
    expires_at: datetime | None
    deadline_at: datetime | None
    deadline_seconds: float | None
    max_retries: int | None
    timeout_seconds: float | None
    tags: str  # JSON text
    idempotency_key: str | None
    store_result: bool | None
    on_crash: OnCrash | None

    def is_plain(self, defaults: Mapping[str, Any]) -> bool:
        """Nothing but the queue has to be said."""
        return (
            self.knows_function
            and self.tags == "{}"
            and self.said().keys() <= {"queue"}
            and not self.otherwise(defaults)
        )

    def to_json(self, defaults: Mapping[str, Any]) -> str:
        """The options as members of one element of the argument of the SQL function `submit_many`."""
        tags = "" if self.tags == "{}" else f',"tags":{self.tags}'
        resolved = ',"resolved":true' if self.knows_function else ""
        otherwise = self.otherwise(defaults)
        last = f',"otherwise":{to_json(otherwise).decode()}' if otherwise else ""
        return tags + resolved + _members(self.said()) + last

    def said(self) -> dict[str, Any]:
        """The options that must be sent. If the function is known here, an option is left out that has the default of
        the database, unless a queue may have another default for it.
        """
        options = {option: getattr(self, option) for option in _SQL_DEFAULTS}
        return {
            option: value
            for option, value in options.items()
            if value is not None
            and (option in QUEUE_OPTIONS or value != _SQL_DEFAULTS[option] or not self.knows_function)
            and (option, value) != _NO_DELAY
        }

    def otherwise(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The Config's values, for options that nobody else says."""
        return {
            option: value
            for option, value in defaults.items()
            if value != _SQL_DEFAULTS[option] and getattr(self, option) is None
        }


class NewTask(NamedTuple):
    """A validated task that is not submitted yet. It has an id already, so submitting it twice makes one task."""

    id: TaskId
    name: str
    args: str  # JSON text
    kwargs: str
    terms: ResolvedOptions
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
    "deadline_at": None,
    "deadline_seconds": None,
    "max_retries": 3,
    "timeout_seconds": None,
    "idempotency_key": None,
    "store_result": True,
    "on_crash": None,
}
_NO_DELAY = ("delay_seconds", 0.0)


def _members(values: Mapping[str, Any]) -> str:
    return "".join(f',"{option}":{to_json(value).decode()}' for option, value in values.items())


def new_task(
    task: TaskFunction[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any], terms: ResolvedOptions
) -> NewTask:
    """A task that is given by its name alone takes JSON values only, since its signature is not known. A task that is
    made inside another one has that as its parent.

    The size limit here is the largest that a Config may set. The statement checks the limit of its own Config.
    """
    if isinstance(task, str):
        name = check_task_name(task)
        encoded = encode_untyped(name, args, kwargs, max_bytes=LARGEST_ARGUMENT_BYTES)
    else:
        name = task.name
        encoded = task.arguments.encode(args, kwargs, max_bytes=LARGEST_ARGUMENT_BYTES)
    return NewTask(new_id(), name, encoded.args, encoded.kwargs, terms, current_task_id())


def task_from_call(
    func: TaskFunction[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[NewTask, Any]:
    """For `submit_task`: the task, and the connection to submit it on. A keyword with the name of an option is an
    option, since no parameter of a task may have such a name. All others are the task's own arguments.
    """
    func = _function_of(func)
    if not isinstance(func, str) and RESERVED_PARAMETERS.isdisjoint(kwargs):
        return func.new(*args, **kwargs), None  # its options are resolved already
    options = {name: value for name, value in kwargs.items() if name in RESERVED_PARAMETERS}
    arguments = {name: value for name, value in kwargs.items() if name not in RESERVED_PARAMETERS}
    terms = terms_of(func, cast("SubmitOptions", options))
    return new_task(func, args, arguments, terms), options.get("connection")


def _function_of(func: Any) -> TaskFunction[..., Any] | str:
    """A name that is registered here stands for its function, with its checks and defaults."""
    from tasklib.task import Submitter, TaskFunction  # noqa: PLC0415 - task functions submit through this module

    if isinstance(func, str):
        return default_registry.get(func) if func in default_registry else func
    if isinstance(func, TaskFunction):
        return func
    if isinstance(func, Submitter):
        raise InvalidOptions("call .submit(...) on what options(...) returns, or give the options to submit_task")
    raise TaskNotRegistered(
        f"{getattr(func, '__name__', func)!r} is not a task function: decorate it with @tasklib.task, or use what "
        f"tasklib.task(...) returned"
    )


def terms_of(task: TaskFunction[..., Any] | str, options: SubmitOptions) -> ResolvedOptions:
    own, given = _options_of(task), checked_options(options)
    if "deadline_at" in given:
        own.pop("deadline_seconds", None)
    given = {**own, **given}
    return ResolvedOptions(
        knows_function=not isinstance(task, str),
        queue=given.get("queue"),
        priority=given.get("priority"),
        delay_seconds=given.get("delay_seconds", 0.0),
        scheduled_at=given.get("scheduled_at"),
        expires_at=given.get("expires_at"),
        deadline_at=given.get("deadline_at"),
        deadline_seconds=given.get("deadline_seconds"),
        max_retries=given.get("max_retries"),
        timeout_seconds=given.get("timeout_seconds"),
        tags=given.get("tags", "{}"),
        idempotency_key=given.get("idempotency_key"),
        store_result=given.get("store_result"),
        on_crash=given.get("on_crash"),
    )


def _options_of(task: TaskFunction[..., Any] | str) -> dict[str, Any]:
    """`on_crash="retry"` is not stored: if the worker's version of the function says "fail", that holds."""
    if isinstance(task, str):
        return {}
    own = task.task_options
    return {
        "queue": own.queue,
        "priority": own.priority,
        "max_retries": own.max_retries,
        "timeout_seconds": own.timeout_seconds,
        "deadline_seconds": own.deadline_seconds,
        "store_result": own.store_result,
        "on_crash": None if own.on_crash == "retry" else own.on_crash,
    }
