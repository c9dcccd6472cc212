"""Hooks for a supervisor that watches a worker: which tasks execute, which have ended, and whether its loops go on.

The daemon passes an observer of its own, so that it knows after a worker's death which tasks were executing. This class
ignores everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from tasklib.worker.execution import Execution


class WorkerObserver:
    """Called from all of the worker's threads, and must neither wait nor raise. For each execution `began`, `ended` and
    `settled` are called in that order. A task that never began, because it was given back or came too late, is ended or
    settled without `began`.
    """

    def named(self, worker_id: str) -> None:
        """Before the worker registers with this id; again when it was declared dead and goes on with another id."""

    def began(self, execution: Execution) -> None:
        """Before its first line. `execution.must_end_by` is known, if it has a timeout."""

    def ended(self, execution: Execution) -> None:
        """Its function has returned or raised. The outcome is not in the database yet."""

    def settled(self, executions: Collection[Execution]) -> None:
        """Their outcomes are committed, or they belong to another worker by now."""

    def must_end_by(self, execution: Execution, moment: float) -> None:
        """It was told to stop. If it still executes at this moment of the monotonic clock, only the death of its
        process can end it. Called when it is cancelled, and once more when the moment has come.
        """

    def beat(self) -> None:
        """The claim loop goes on. Called every few seconds at least, also while the loop sleeps or waits for an
        answer. While the connection "claim" is lost, a beat may be late by the time that one attempt to connect
        takes. A worker that drains does not beat.
        """

    def counts(self, waiting: int, executing: int) -> None:
        """After each round of the claim loop."""

    def connected(self, role: str, backend_pid: int) -> None:
        """`role` is "claim", "lease", "finish", "duties", "listen", or "task <id>" for a task's own connection. The pid
        is 0 behind a pooler, which makes up its pids. A second call for a role replaces the first.
        """

    def disconnected(self, role: str) -> None:
        """That connection is closed."""
