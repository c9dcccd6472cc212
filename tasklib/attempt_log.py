"""The one line at the end of an attempt: what became of it, why, and whether the task runs again.

A task that is given up, failed for good or buried, is an error: a person should look. One that runs again is a warning.
Arguments and results are never in the line; the message and the traceback of an exception are, bounded.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tasklib.log import bounded
from tasklib.states import State

if TYPE_CHECKING:
    from tasklib.log import Log
    from tasklib.outcomes import HeldTask, Settlement

MAX_TRACEBACK_CHARACTERS = 4_000
_GIVEN_UP = {State.FAILED, State.BURIED}


def log_attempt(
    log: Log,
    task: HeldTask,
    settlement: Settlement,
    *,
    attempt: int,
    seconds: float | None,
    least_level: int = logging.INFO,
) -> None:
    word = (settlement.outcome or ("released" if settlement.state == State.PENDING else settlement.state)).lower()
    event = f"task.{word}"
    log.log(
        max(_level(settlement), least_level), event, task=task.name, task_id=task.id, queue=task.queue,
        attempt=attempt, seconds=None if seconds is None else round(seconds, 4), state=str(settlement.state),
        worker_id=task.worker_id, due_at=settlement.due_at, **_trouble(settlement),
    )  # fmt: skip


def _runs_again(settlement: Settlement) -> bool:
    return settlement.state == State.PENDING or settlement.due_at is not None


def _level(settlement: Settlement) -> int:
    if settlement.problem is None or settlement.state == State.CANCELLED:
        return logging.INFO
    return logging.ERROR if settlement.state in _GIVEN_UP and not _runs_again(settlement) else logging.WARNING


def _trouble(settlement: Settlement) -> dict[str, Any]:
    problem = settlement.problem
    if problem is None:
        return {}
    error, _, trace = problem.text.partition("\nTraceback:\n")
    return {
        "error_code": problem.code,
        "error": error,
        "will_retry": _runs_again(settlement),
        "exception": bounded(trace, MAX_TRACEBACK_CHARACTERS) or None,
    }
