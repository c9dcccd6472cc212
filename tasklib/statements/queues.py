"""What operators send: the policies of queues and of the cluster, and the audit."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from tasklib.errors import InvalidOptions
from tasklib.names import check_queue
from tasklib.number import is_number
from tasklib.options import CENTURY_SECONDS, check_moment, check_text, check_whole
from tasklib.queue_options import checked_cluster_options, checked_queue_options
from tasklib.queues import ClusterPolicy, Queue, Transition
from tasklib.sql import queries
from tasklib.statements.statement import Row, Statement, read_value
from tasklib.statements.tasks import MAX_LIST_LIMIT, as_uuid
from tasklib.strict_json import storable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from uuid import UUID

    from tasklib.config import Config


class QueueStatements:
    def __init__(self, config: Config) -> None:
        self._sql = queries("queues", config.schema)

    def get(self, name: str) -> Statement[Queue | None]:
        return Statement(self._sql["get"], (_check_name(name),), _read_one, is_change=False)

    def list_all(self) -> Statement[list[Queue]]:
        return Statement(self._sql["list"], (), lambda rows: [Queue(*row) for row in rows], is_change=False)

    def set(self, name: str, options: Mapping[str, Any], reason: str | None) -> Statement[Queue]:
        policy = to_json(checked_queue_options(options)).decode()
        return Statement(self._sql["set"], (_check_name(name), policy, _text(reason)), _read_changed)

    def pause(self, name: str, reason: str | None, until: datetime | timedelta | None) -> Statement[Queue]:
        moment, seconds = None, None
        if isinstance(until, timedelta):
            seconds = _check_pause(until)
        elif until is not None:
            moment = check_moment("until", until)
        return Statement(self._sql["pause"], (_check_name(name), _text(reason), moment, seconds), _read_changed)

    def resume(self, name: str, reason: str | None) -> Statement[bool]:
        return Statement(self._sql["resume"], (_check_name(name), _text(reason)), read_value)

    def get_cluster(self) -> Statement[ClusterPolicy]:
        return Statement(self._sql["get_cluster"], (), lambda rows: ClusterPolicy(*rows[0]), is_change=False)

    def set_cluster(self, options: Mapping[str, Any], reason: str | None) -> Statement[ClusterPolicy]:
        policy = to_json(checked_cluster_options(options)).decode()
        return Statement(self._sql["set_cluster"], (policy, _text(reason)), lambda rows: ClusterPolicy(*rows[0]))

    def transitions(self, task_id: UUID | str | None, queue: str | None, limit: int) -> Statement[list[Transition]]:
        further = (None if queue is None else _check_name(queue), check_whole("limit", limit, 1, MAX_LIST_LIMIT))
        if task_id is None:
            return Statement(self._sql["transitions"], further, _read_transitions, is_change=False)
        parameters = (as_uuid(task_id), *further)
        return Statement(self._sql["transitions_of_task"], parameters, _read_transitions, is_change=False)


def _read_one(rows: list[Row]) -> Queue | None:
    return Queue(*rows[0]) if rows else None


def _read_changed(rows: list[Row]) -> Queue:
    return Queue(*rows[0])


def _read_transitions(rows: list[Row]) -> list[Transition]:
    return [Transition(*row) for row in rows]


def _text(reason: str | None) -> str | None:
    return None if reason is None else storable(check_text("reason", reason))


def _check_pause(length: timedelta) -> float:
    seconds = length.total_seconds()
    if not is_number(seconds, 0, CENTURY_SECONDS) or seconds == 0:
        raise InvalidOptions(f"until must lie in the future, within a century, got {length!r}")
    return seconds


def _check_name(name: str) -> str:
    return check_queue(check_text("the queue's name", name))
