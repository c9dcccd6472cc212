"""What a running task sees of its worker, through `current_task()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasklib.current import CurrentTask

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from tasklib.connection import BoundedConnection, WatchedConnection
    from tasklib.worker.execution import Execution
    from tasklib.worker.transactions import Transactions


@dataclass(frozen=True, slots=True)
class WorkerSurroundings:
    execution: Execution
    stop_asked: threading.Event
    transactions: Transactions
    on_progress: Callable[[Execution, str], None]

    @property
    def cancel_asked(self) -> bool:
        return self.execution.task.cancel_asked_at is not None

    @property
    def should_stop(self) -> bool:
        return self.stop_asked.is_set() or self.cancel_asked or self.execution.interrupt_kind is not None

    def note_progress(self, progress: str) -> None:
        if not self.execution.has_ended:
            self.on_progress(self.execution, progress)

    def connection(self) -> BoundedConnection:
        return self.transactions.open(self.execution)

    async def async_connection(self) -> WatchedConnection:
        return await self.transactions.open_async(self.execution)


def describe(execution: Execution, surroundings: WorkerSurroundings) -> CurrentTask:
    task = execution.task
    return CurrentTask(
        id=task.id,
        name=task.name,
        queue=task.queue,
        attempt=task.attempt + 1,
        retry_count=task.retry_count,
        started_at=execution.started_by(surroundings.transactions.clock),
        timeout_seconds=task.timeout_seconds,
        parent_id=execution.claimed.parent_id,
        tags_json=execution.claimed.tags,
        surroundings=surroundings,
        started=execution.started,
    )
