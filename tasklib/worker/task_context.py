"""What `current_task()` shows a running task of its worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasklib.current import CurrentTask

if TYPE_CHECKING:
    from collections.abc import Callable

    from tasklib.connection import BoundedAsyncConnection, BoundedConnection
    from tasklib.worker.exactly_once import Transactions
    from tasklib.worker.execution import Execution


@dataclass(frozen=True, slots=True)
class WorkerTaskContext:
    execution: Execution
    stop_asked: Callable[[], bool]
    transactions: Transactions
    on_progress: Callable[[Execution, str], None]

    @property
    def cancel_asked(self) -> bool:
        return self.execution.task.cancel_asked_at is not None

    @property
    def should_stop(self) -> bool:
        return self.stop_asked() or self.cancel_asked or self.execution.interrupt_kind is not None

    def note_progress(self, progress: str) -> None:
        if not self.execution.has_ended:
            self.on_progress(self.execution, progress)

    def connection(self) -> BoundedConnection:
        return self.transactions.open(self.execution)

    async def async_connection(self) -> BoundedAsyncConnection:
        return await self.transactions.open_async(self.execution)


def describe(execution: Execution, task_context: WorkerTaskContext) -> CurrentTask:
    task = execution.task
    return CurrentTask(
        id=task.id,
        name=task.name,
        queue=task.queue,
        attempt=task.attempt + 1,
        retry_count=task.retry_count,
        started_at=execution.started_by(task_context.transactions.clock),
        timeout_seconds=task.timeout_seconds,
        parent_id=execution.claimed.parent_id,
        tags_json=execution.claimed.tags,
        task_context=task_context,
        started=execution.started,
    )
