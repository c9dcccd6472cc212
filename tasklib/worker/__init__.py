"""The worker: the claimer fills the buffer, runners execute, the finish loop writes outcomes, under a lease."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasklib.worker.worker import TaskWorker

__all__ = ["TaskWorker"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """An application that only registers hooks does not import all of a worker."""
        if name != "TaskWorker":
            raise AttributeError(f"module 'tasklib.worker' has no attribute {name!r}")
        from tasklib.worker.worker import TaskWorker  # noqa: PLC0415 - see above

        return TaskWorker
