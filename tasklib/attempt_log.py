"""The one log line at the end of an attempt: its outcome, the reason, and whether the task runs again.

A task that failed for good or was buried is an error: a person should look. A task that runs again is a warning. The
line never has arguments or results. It has the message and the traceback of an exception, bounded.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tasklib.log import Log, bounded
from tasklib.states import State

if TYPE_CHECKING:
    from tasklib.outcomes import HeldTask, Settlement

MAX_TRACEBACK_CHARACTERS = 4_000
_GIVEN_UP = {State.FAILED, State.BURIED}
_EVENTS = {
    "COMPLETED": "task.completed",
    "FAILED": "task.failed",
    "WORKER_FAILURE": "task.worker_failure",
    "TIMED_OUT": "task.timed_out",
    "CANCELLED": "task.cancelled",
    "SNOOZED": "task.snoozed",
    "INTERRUPTED": "task.interrupted",
    "LEASE_LOST": "task.lease_lost",
    # No attempt began:
    State.PENDING: "task.released",
    State.FAILED: "task.failed",
    State.CANCELLED: "task.cancelled",
    State.EXPIRED: "task.expired",
    State.BURIED: "task.buried",
}


def log_attempt(
    log: Log,
    task: HeldTask,
    settlement: Settlement,
    *,
    attempt: int,
    seconds: float | None,
    least_level: int = logging.INFO,
) -> None:
    event = _EVENTS[settlement.outcome or settlement.state]
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
