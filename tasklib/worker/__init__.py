"""Claims tasks, runs them, and records what became of them: claimer -> buffer -> runners -> finisher, under a lease."""

from tasklib.worker.worker import TaskWorker

__all__ = ["TaskWorker"]
