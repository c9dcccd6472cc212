"""A row of `tasks` as Django's TaskResult."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from django.utils import timezone

from tasklib.django.contract import TaskError, TaskResult, TaskResultStatus
from tasklib.django.models import Task, TaskAttempt
from tasklib.states import LEASED, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasklib.django.contract import Task as DjangoTask

_STATUSES = {
    State.PENDING: TaskResultStatus.READY,
    State.CLAIMED: TaskResultStatus.RUNNING,
    State.RUNNING: TaskResultStatus.RUNNING,
    State.COMPLETED: TaskResultStatus.SUCCESSFUL,
}
# The exception classes of tasks that ended without an exception of their own.
_CLASSES = {
    "TIMEOUT": "builtins.TimeoutError",
    "CANCELLED": "tasklib.errors.TaskCancelled",
    "EXPIRED": "tasklib.errors.TaskExpired",
    "BURIED": "tasklib.errors.TaskBuried",
}


def result_of(row: Task, task: DjangoTask[..., Any], backend: str) -> TaskResult[..., Any]:
    attempts = list(TaskAttempt.objects.filter(task_id=row.id)) if row.attempt else []
    result: TaskResult[..., Any] = TaskResult(
        task=replace(task, backend=backend, priority=row.priority, queue_name=row.queue, run_after=_run_after(row)),
        id=str(row.id),
        status=_status(row),
        enqueued_at=row.created_at,
        started_at=attempts[0].started_at if attempts else row.started_at,
        finished_at=row.completed_at,
        last_attempted_at=row.started_at,
        args=row.args if isinstance(row.args, list) else [],
        kwargs=row.kwargs,
        backend=backend,
        errors=_errors(row, attempts),
        worker_ids=_worker_ids(row, attempts),
    )
    _set(result, _return_value=(row.result or {}).get("value"))
    return result


def started(result: TaskResult[..., Any]) -> TaskResult[..., Any]:
    """As the task itself sees it. The row has its start only after a while, or at the end."""
    now = timezone.now()
    _set(result, status=TaskResultStatus.RUNNING, started_at=result.started_at or now, last_attempted_at=now)
    return result


def succeeded(result: TaskResult[..., Any], value: Any) -> TaskResult[..., Any]:
    _set(result, status=TaskResultStatus.SUCCESSFUL, finished_at=timezone.now(), _return_value=value)
    return result


def failed(result: TaskResult[..., Any], error: TaskError) -> TaskResult[..., Any]:
    _set(result, status=TaskResultStatus.FAILED, finished_at=timezone.now(), errors=[*result.errors, error])
    return result


def _set(result: TaskResult[..., Any], **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(result, name, value)  # it is frozen, and Django changes it in the same way


def _status(row: Task) -> TaskResultStatus:
    """A task that waits for its next attempt is ready to run again."""
    if row.state == State.FAILED and row.next_retry_at is not None:
        return TaskResultStatus.READY
    return _STATUSES.get(State(row.state), TaskResultStatus.FAILED)


def _run_after(row: Task) -> Any:
    return row.scheduled_at if row.scheduled_at > row.created_at else None


def _worker_ids(row: Task, attempts: Sequence[TaskAttempt]) -> list[str]:
    """One for each attempt, also for a running one."""
    under_way = [row.worker_id] if row.state in LEASED and row.worker_id is not None else []
    return [attempt.worker_id for attempt in attempts] + under_way


def _errors(row: Task, attempts: Sequence[TaskAttempt]) -> list[TaskError]:
    """One for each attempt; only the last one has its traceback."""
    found = [(each.error_code, each.error_message or "") for each in attempts if each.error_code is not None]
    if row.error_code is not None:
        if found and found[-1][0] == row.error_code:
            found.pop()
        found.append((row.error_code, row.error or ""))
    return [TaskError(exception_class_path=_class_path(code), traceback=text) for code, text in found]


def _class_path(code: str) -> str:
    return code if "." in code else _CLASSES.get(code, "tasklib.errors.TaskFailed")
