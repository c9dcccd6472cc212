"""The statements of clients: submitting, reading and cancelling tasks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack
from uuid import UUID

from pydantic_core import to_json

from tasklib.errors import InvalidArguments, InvalidOptions
from tasklib.ids import TaskId
from tasklib.options import check_flag, check_moment, check_text, check_whole, checked_options
from tasklib.record import Attempt, Task
from tasklib.sql import queries
from tasklib.statements.statement import Row, Statement, as_texts, read_column, read_nothing, read_value
from tasklib.states import UNSUCCESSFUL, State
from tasklib.strict_json import storable
from tasklib.unfinished import Unfinished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from tasklib.config import Config
    from tasklib.submission import NewTask

BATCH_ROWS = 1_000
MAX_LIST_LIMIT = 10_000


class ListFilters(TypedDict, total=False):
    queue: str | None
    tags: Mapping[str, Any] | None  # tasks that have all of these
    created_after: datetime | None
    created_before: datetime | None
    final: bool | None  # True: tasks that are done with; False: tasks that still wait or run
    after: UUID | str | None  # the id of the last task on the previous page


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
        if task.parent_id is not None or not task.terms.knows_function:
            batch = self._submit_batch([task])
            return Statement(
                batch.sql, batch.parameters, lambda rows: batch.read(rows).get(task.id.int, task.id), is_qualified=True
            )
        self._check_size(task)
        terms = task.terms

        def read(rows: list[Row]) -> TaskId:
            return _read_id(task, rows[0][0]) if rows else task.id

        if task.args == "{}" and terms.is_plain(self._defaults):
            parameters = (task.id, task.name, task.kwargs, terms.queue)
            return Statement(
                self._sql["submit_plain"], parameters, read, as_bytes=lambda: as_texts(parameters), is_qualified=True
            )
        all_parameters = (
            task.id, task.name, task.args, task.kwargs, terms.queue, terms.priority, terms.delay_seconds,
            _iso(terms.scheduled_at), _iso(terms.expires_at), terms.max_retries, terms.timeout_seconds,
            terms.tags, terms.idempotency_key, terms.store_result, terms.on_crash,
            _iso(terms.deadline_at), terms.deadline_seconds, to_json(terms.otherwise(self._defaults)).decode(),
        )  # fmt: skip
        return Statement(self._sql["submit"], all_parameters, read, is_qualified=True)

    def submit_many(self, tasks: Iterable[NewTask]) -> list[Statement[dict[int, TaskId]]]:
        """One statement for each batch, in the order of the keys, so that two overlapping submits cannot deadlock.
        The answer maps each task that existed before to the earlier one. Its keys are ids as numbers: a UUID is slow
        to compare.
        """
        unique = {task.id.int: task for task in tasks}.values()
        by_key = sorted(unique, key=lambda task: (task.terms.idempotency_key or "\U0010ffff", task.id.int))
        return [self._submit_batch(by_key[at : at + BATCH_ROWS]) for at in range(0, len(by_key), BATCH_ROWS)]

    def get(self, task_id: UUID | str) -> Statement[Task | None]:
        return Statement(
            self._sql["get"],
            (as_uuid(task_id),),
            lambda rows: Task.from_row(rows[0]) if rows else None,
            is_change=False,
        )

    def attempts(self, task_id: UUID | str) -> Statement[list[Attempt]]:
        return Statement(
            self._sql["attempts"], (as_uuid(task_id),), lambda rows: [Attempt(*row) for row in rows], is_change=False
        )

    def ids_between(self, first: UUID, last: UUID) -> Statement[list[UUID]]:
        """The first few ids in this range."""
        return Statement(self._sql["ids_between"], (first, last), read_column, is_change=False)

    def final(self, task_ids: Sequence[UUID]) -> Statement[list[Task]]:
        """Those of these tasks that are final."""
        return Statement(self._sql["final"], ([*task_ids],), _read_all, is_change=False)

    def missing(self, task_ids: Sequence[UUID]) -> Statement[Sequence[UUID]]:
        return Statement(self._sql["missing"], ([*task_ids],), read_column, is_change=False)

    def unfinished(self, task_ids: Sequence[UUID]) -> Statement[list[Unfinished]]:
        return Statement(
            self._sql["unfinished"], ([*task_ids],), lambda rows: [*map(Unfinished._make, rows)], is_change=False
        )

    def announce_waiting(self) -> Statement[None]:
        return Statement(self._sql["announce_waiting"], (), read_nothing)

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
            checked.get("created_after"), checked.get("created_before"),
            check_whole("limit", limit, 1, MAX_LIST_LIMIT), checked.get("final"),
        )  # fmt: skip
        sql = self._sql["list_unsuccessful" if wanted in UNSUCCESSFUL else "list"]
        return Statement(sql, parameters, _read_all, is_change=False)

    def cancel(self, task_id: UUID | str, reason: str | None) -> Statement[str | None]:
        text = None if reason is None else storable(check_text("reason", reason))
        return Statement(self._sql["cancel"], (as_uuid(task_id), text), read_value)

    def retry(self, task_id: UUID | str) -> Statement[bool]:
        return Statement(self._sql["retry"], (as_uuid(task_id),), read_value)

    def expire(self) -> Statement[int]:
        return Statement(self._sql["expire"], (), read_value)

    def _submit_batch(self, batch: Sequence[NewTask]) -> Statement[dict[int, TaskId]]:
        for task in batch:
            self._check_size(task)
        terms = {id(task.terms): task.terms for task in batch}
        terms_json = {key: each.to_json(self._defaults) for key, each in terms.items()}
        tasks_json = "[" + ",".join([task.to_json(terms_json[id(task.terms)]) for task in batch]) + "]"

        def read(rows: list[Row]) -> dict[int, TaskId]:
            existing = ((batch[int(ordinal) - 1], found) for ordinal, found in rows)
            return {task.id.int: _read_id(task, found) for task, found in existing}

        return Statement(self._sql["submit_many"], (tasks_json,), read, is_qualified=True)

    def _check_size(self, task: NewTask) -> None:
        limit = self._config.max_argument_bytes
        # A character is at most four bytes, so most payloads need not be encoded to see that they fit.
        if 4 * (len(task.args) + len(task.kwargs)) > limit < len((task.args + task.kwargs).encode()):
            raise InvalidArguments(
                f"{task.name}: the arguments take more than {limit} bytes of JSON (Config.max_argument_bytes). "
                f"Store large data elsewhere, and pass a reference to it."
            )


def as_uuid(value: Any) -> UUID:
    if isinstance(value, UUID):
        return value
    try:
        return UUID(value)
    except (ValueError, AttributeError, TypeError):
        shown = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
        raise InvalidOptions(f"{shown} is not a task id (a UUID)") from None


def _read_id(task: NewTask, found: str) -> TaskId:
    """After a commit whose answer was lost, a submit may find its own row. That is not an earlier task."""
    earlier = UUID(found)
    return task.id if earlier == task.id else TaskId(earlier, existed=True)


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _read_all(rows: list[Row]) -> list[Task]:
    return [Task.from_row(row) for row in rows]


def _state(state: str) -> State:
    try:
        return State(state)
    except ValueError:
        raise InvalidOptions(f"{state!r} is not a state; there are: {', '.join(State)}") from None


_FILTER_CHECKS: dict[str, Callable[[Any], Any]] = {
    "state": _state,
    "name": partial(check_text, "name"),
    "queue": partial(check_text, "queue"),
    "tags": lambda tags: checked_options({"tags": tags})["tags"],
    "created_after": partial(check_moment, "created_after"),
    "created_before": partial(check_moment, "created_before"),
    "after": as_uuid,
    "final": partial(check_flag, "final"),
}
