"""Verb to statement: what is sent to PostgreSQL, and how the rows that come back are read.

Statements are values. Sync and async, one's own connection and the caller's, all run the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, LiteralString, TypedDict, TypeVar, Unpack
from uuid import UUID

from tasklib.errors import InvalidArguments, InvalidOptions
from tasklib.ids import TaskId
from tasklib.options import checked_options
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
        terms, defaults = task.terms, self._defaults
        max_retries = defaults["max_retries"] if terms.max_retries is None else terms.max_retries
        timeout_seconds = defaults["timeout_seconds"] if terms.timeout_seconds is None else terms.timeout_seconds
        parameters = (
            task.id, task.name, task.args, task.kwargs, terms.queue, terms.priority, terms.delay_seconds,
            terms.scheduled_at, terms.expires_at, max_retries, timeout_seconds,
            terms.tags, terms.idempotency_key, terms.store_result, terms.on_crash,
        )  # fmt: skip
        return Statement(self._sql["submit"], parameters, lambda rows: _read_id(task, *rows[0]))

    def submit_many(self, tasks: Iterable[NewTask]) -> list[Statement[dict[UUID, TaskId]]]:
        """One statement a batch, all in the order of the keys, so that two overlapping submits cannot deadlock."""
        unique = {task.id: task for task in tasks}.values()
        by_key = sorted(unique, key=lambda task: task.terms.idempotency_key or "")
        return [self._submit_batch(by_key[at : at + BATCH_ROWS]) for at in range(0, len(by_key), BATCH_ROWS)]

    def get(self, task_id: UUID | str) -> Statement[Task | None]:
        return Statement(self._sql["get"], (as_uuid(task_id),), _read_one, is_change=False)

    def list(
        self, state: str | None, name: str | None, limit: int, **filters: Unpack[ListFilters]
    ) -> Statement[list[Task]]:
        if not 1 <= limit <= MAX_LIST_LIMIT:
            raise InvalidOptions(
                f"limit must be from 1 to {MAX_LIST_LIMIT}, got {limit!r}; the next page is asked for with after="
            )
        wanted = _state(state)
        tags = checked_options({"tags": filters.get("tags")}).get("tags")
        after = filters.get("after")
        parameters = (
            None if after is None else as_uuid(after), wanted, name, filters.get("queue"), tags,
            filters.get("created_after"), filters.get("created_before"), limit,
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


def as_uuid(value: UUID | str) -> UUID:
    try:
        return value if isinstance(value, UUID) else UUID(value)
    except (ValueError, AttributeError, TypeError):
        raise InvalidOptions(f"{value!r} is not a task id (a UUID)") from None


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


def _state(state: str | None) -> State | None:
    try:
        return None if state is None else State(state)
    except ValueError:
        raise InvalidOptions(f"{state!r} is not a state; there are: {', '.join(State)}") from None
