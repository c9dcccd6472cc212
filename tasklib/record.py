"""A task as it stands in the database: the row, as an immutable value, and questions about it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeGuard

from tasklib.states import State

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from tasklib.outcomes import AttemptOutcome


@dataclass(frozen=True, slots=True)
class Task:
    """One row of `tasks`. The first nineteen fields carry the names and meanings of the original TaskLib schema."""

    id: UUID
    name: str
    state: State
    scheduled_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    created_at: datetime
    args: dict[str, Any] | list[Any]
    kwargs: dict[str, Any]
    result: dict[str, Any] | None
    error: str | None
    retry_count: int
    max_retries: int
    next_retry_at: datetime | None
    worker_id: str | None
    locked_until: datetime | None
    timeout_seconds: float | None
    priority: int
    tags: dict[str, Any]
    queue: str
    ready: bool
    attempt: int
    fencing_token: int
    claimed_at: datetime | None
    expires_at: datetime | None
    idempotency_key: str | None
    payload_digest: bytes | None
    serial_key: str | None
    error_code: str | None
    crash_count: int
    suspect: bool
    store_result: bool
    on_crash: str | None  # None: as its function says, which a worker will ask
    progress: Any
    trace_headers: dict[str, str] | None
    resolved_at: datetime | None
    resolved_by: str | None
    resolution_note: str | None
    parent_id: UUID | None
    workflow_id: UUID | None
    step_name: str | None
    pending_parents: int
    due_at: datetime | None
    cancel_asked_at: datetime | None
    strikes: int
    completed_by: str | None  # the worker that ran the attempt by which it succeeded
    deadline_at: datetime | None  # all attempts must be over by then

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> Task:
        """From the columns of `task_columns`, in tasklib/sql/parts.sql: a test compares their names with the fields."""
        return cls(row[0], row[1], State(row[2]), *row[3:])

    def to_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One row of the view `task_attempts`: one execution of a task that has ended."""

    task_id: UUID
    attempt: int  # from 1
    outcome: AttemptOutcome
    will_retry: bool  # the task went on after it
    started_at: datetime
    finished_at: datetime
    worker_id: str
    worker_hostname: str | None
    worker_process_name: str | None
    worker_pid: int | None
    error_code: str | None
    error_message: str | None
    failed_reason: str | None  # of a crash: what is known of it
    error: str | None  # with the traceback
    fencing_token: int

    def to_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def is_pending(task: Task | None) -> TypeGuard[Task]:
    """Waits for its time, its parents or a worker, and has not been tried yet."""
    return task is not None and task.state == State.PENDING


def is_running(task: Task | None) -> TypeGuard[Task]:
    """A worker holds it: in its buffer or executing."""
    return task is not None and task.state in {State.CLAIMED, State.RUNNING}


def is_completed(task: Task | None) -> TypeGuard[Task]:
    return task is not None and task.state == State.COMPLETED


def is_retrying(task: Task | None) -> TypeGuard[Task]:
    """Failed, and waits for its next attempt."""
    return task is not None and task.state == State.FAILED and task.completed_at is None


def is_failed(task: Task | None) -> TypeGuard[Task]:
    """Gave up. A task that waits for its next attempt is not failed in this sense: see `is_retrying`."""
    return task is not None and task.state == State.FAILED and task.completed_at is not None


def is_cancelled(task: Task | None) -> TypeGuard[Task]:
    return task is not None and task.state == State.CANCELLED


def is_expired(task: Task | None) -> TypeGuard[Task]:
    return task is not None and task.state == State.EXPIRED


def is_buried(task: Task | None) -> TypeGuard[Task]:
    return task is not None and task.state == State.BURIED


def is_final(task: Task | None) -> TypeGuard[Task]:
    """Nothing more will happen to it by itself."""
    return task is not None and task.completed_at is not None
