"""Verb to statement: what is sent to PostgreSQL, and how the rows that come back are read.

Statements are values. Sync and async, one's own connection and the caller's, all run the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, LiteralString, TypedDict, TypeVar, Unpack
from uuid import UUID

from tasklib.errors import InvalidArguments, InvalidOptions
from tasklib.ids import TaskId
from tasklib.options import check_moment, check_text, check_whole, checked_options
from tasklib.record import Task
from tasklib.sql import queries
from tasklib.states import UNSUCCESSFUL, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from tasklib.config import Config
    from tasklib.submission import NewTask

T = TypeVar("T")
Row = tuple[Any, ...]

BATCH_ROWS = 1_000
MAX_LIST_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class Statement(Generic[T]):
    sql: LiteralString
    parameters: Sequence[Any]
    read: Callable[[list[Row]], T]
    is_change: bool = True


class ListFilters(TypedDict, total=False):
    queue: str | None
    tags: Mapping[str, Any] | None  # tasks that have all of these
    created_after: datetime | None
    created_before: datetime | None
    after: UUID | str | None  # the id of the last task of the page before


class Statements:
    """The statements of one configuration: its schema and its defaults."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._sql = queries("tasks", config.schema)
        self._defaults = {
            "max_retries": config.max_retries,
            "timeout_seconds": config.default_task_timeout_seconds,
        }

    def submit(self, task: NewTask) -> Statement[TaskId]:
        self._check_size(task)
        terms = task.terms
        parameters = (
            task.id, task.name, task.args, task.kwargs, terms.queue, terms.priority, terms.delay_seconds,
            terms.scheduled_at, terms.expires_at,
            terms.value("max_retries", self._defaults), terms.value("timeout_seconds", self._defaults),
            terms.tags, terms.idempotency_key, terms.store_result, terms.on_crash,
        )  # fmt: skip
        return Statement(self._sql["submit"], parameters, lambda rows: _read_id(task, *rows[0]))

    def submit_many(self, tasks: Iterable[NewTask]) -> list[Statement[dict[UUID, TaskId]]]:
        """One statement a batch, all in the order of the keys, so that two overlapping submits cannot deadlock."""
        unique = {task.id: task for task in tasks}.values()
        by_key = sorted(unique, key=lambda task: (task.terms.idempotency_key or "\U0010ffff", task.id))
        return [self._submit_batch(by_key[at : at + BATCH_ROWS]) for at in range(0, len(by_key), BATCH_ROWS)]

    def get(self, task_id: UUID | str) -> Statement[Task | None]:
        return Statement(self._sql["get"], (as_uuid(task_id),), _read_one, is_change=False)

    def list(
        self, state: str | None, name: str | None, limit: int, **filters: Unpack[ListFilters]
    ) -> Statement[list[Task]]:
        unknown = sorted(filters.keys() - _FILTER_CHECKS.keys())
        if unknown:
            raise InvalidOptions(f"unknown filter {', '.join(unknown)}; there are: {', '.join(_FILTER_CHECKS)}")
        given = {"name": name, "state": state, **filters}
        checked = {key: _FILTER_CHECKS[key](value) for key, value in given.items() if value is not None}
        wanted = checked.get("state")
        parameters = (
            checked.get("after"), wanted, checked.get("name"), checked.get("queue"), checked.get("tags"),
            checked.get("created_after"), checked.get("created_before"), _check_limit(limit),
        )  # fmt: skip
        sql = self._sql["list_unsuccessful" if wanted in UNSUCCESSFUL else "list"]
        return Statement(sql, parameters, _read_all, is_change=False)

    def _submit_batch(self, batch: Sequence[NewTask]) -> Statement[dict[UUID, TaskId]]:
        for task in batch:
            self._check_size(task)
        terms = {id(task.terms): task.terms for task in batch}
        terms_json = {key: each.to_json(self._defaults) for key, each in terms.items()}
        tasks_json = "[" + ",".join([task.to_json(terms_json[id(task.terms)]) for task in batch]) + "]"

        def read(rows: list[Row]) -> dict[UUID, TaskId]:
            tasks = ((batch[ordinal - 1], id_, existed) for ordinal, id_, existed in rows)
            return {task.id: _read_id(task, id_, existed) for task, id_, existed in tasks}

        return Statement(self._sql["submit_many"], (tasks_json,), read)

    def _check_size(self, task: NewTask) -> None:
        limit = self._config.max_argument_bytes
        # A character is at most four bytes: most payloads need not be encoded to know that they fit.
        if 4 * (len(task.args) + len(task.kwargs)) > limit < len((task.args + task.kwargs).encode()):
            raise InvalidArguments(
                f"{task.name}: the arguments take more than {limit} bytes of JSON (Config.max_argument_bytes). "
                f"Store large data elsewhere and pass where it is."
            )


def as_uuid(value: Any) -> UUID:
    if isinstance(value, UUID):
        return value
    try:
        return UUID(value)
    except (ValueError, AttributeError, TypeError):
        shown = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
        raise InvalidOptions(f"{shown} is not a task id (a UUID)") from None


def _read_id(task: NewTask, found: Any, existed: Any) -> TaskId:
    """A submit that met its own row, after an unknown commit, has not met an earlier task."""
    if not existed:
        return task.id
    earlier = found if isinstance(found, UUID) else UUID(str(found))  # the caller's connection may load ids as text
    return task.id if earlier == task.id else TaskId(earlier, existed=True)


def _read_one(rows: list[Row]) -> Task | None:
    return Task.from_row(rows[0]) if rows else None


def _read_all(rows: list[Row]) -> list[Task]:
    return [Task.from_row(row) for row in rows]


def _tags(tags: Mapping[str, Any]) -> Any:
    return checked_options({"tags": tags})["tags"]


def _state(state: str) -> State:
    try:
        return State(state)
    except ValueError:
        raise InvalidOptions(f"{state!r} is not a state; there are: {', '.join(State)}") from None


_check_limit = check_whole("limit", 1, MAX_LIST_LIMIT)
_FILTER_CHECKS: dict[str, Callable[[Any], Any]] = {
    "state": _state,
    "name": check_text("name", str),
    "queue": check_text("queue", str),
    "tags": _tags,
    "created_after": check_moment("created_after"),
    "created_before": check_moment("created_before"),
    "after": as_uuid,
}
