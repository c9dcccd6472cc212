"""The message of `ResultTimeout`: the state of each task that was not final in time, and whether a live worker serves
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tasklib.errors import ResultTimeout
from tasklib.registry import default_registry
from tasklib.states import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime
    from uuid import UUID

MOST_NAMED = 3


class Unfinished(NamedTuple):
    """A task that is not final. Columns in the order of the statement `unfinished`."""

    id: UUID
    name: str
    queue: str
    state: str
    due_at: datetime | None
    is_served: bool


def result_timeout(late: Iterable[UUID], timeout: float | None, standing: Iterable[Unfinished] | None) -> ResultTimeout:
    """`standing`: what the database knows of these tasks; None: it could not be asked."""
    late = sorted(late)
    known = None if standing is None else {each.id: each for each in standing}
    named = "; ".join(_sentence(task_id, known) for task_id in late[:MOST_NAMED])
    more = f"; and {len(late) - MOST_NAMED} more" if len(late) > MOST_NAMED else ""
    count = "the task was" if len(late) == 1 else f"{len(late)} tasks were"
    return ResultTimeout(f"{count} not final after {timeout:g} s: {named}{more}")


def _sentence(task_id: UUID, known: Mapping[UUID, Unfinished] | None) -> str:
    if known is None:
        return str(task_id)
    task = known.get(task_id)
    if task is None:
        return f"{task_id} is not in the database: was it submitted in a transaction that is not committed, or deleted?"
    return f"{task.name} ({task_id}) is {task.state}{_when(task)}{_unserved(task)}"


def _when(task: Unfinished) -> str:
    return "" if task.due_at is None else f", due at {task.due_at:%Y-%m-%d %H:%M:%S %Z}"


def _unserved(task: Unfinished) -> str:
    if task.is_served or task.state not in {State.PENDING, State.FAILED}:
        return ""
    return f", and no live worker serves task {task.name!r} in queue {task.queue!r}: {_remedy(task.name)}"


def _remedy(name: str) -> str:
    if name in default_registry and "<locals>" in default_registry.get(name).__qualname__:
        return (
            "its function is defined inside another one, where no worker finds it; move it to the top level of a module"
        )
    return "start one that imports the function, e.g. with `tasklibd run --app MODULE`"
