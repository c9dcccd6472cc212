"""What somebody outside sees of a worker: which tasks execute, which ones have ended, and whether its loop goes on.

A supervisor that has to tell, after a worker's death, who was executing, hands in a witness of its own. This one sees
nothing: it is for a worker that nobody watches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from tasklib.worker.execution import Execution


class Witness:
    """Told from all of the worker's threads, and must neither wait nor raise. For each execution `began`, `ended` and
    `settled` come in that order. What never began, because it was given back or came too late, is ended or settled
    all the same: who has not seen it begin ignores that.
    """

    def named(self, worker_id: str) -> None:
        """Before it is registered under this name; again when it was given up for dead, and goes on under another."""

    def began(self, execution: Execution) -> None:
        """Before its first line. `execution.must_end_by` is known, if it has a timeout."""

    def ended(self, execution: Execution) -> None:
        """Its function has returned or raised. What came of it is not in the database yet."""

    def settled(self, executions: Collection[Execution]) -> None:
        """What came of them is committed; or they are somebody else's by now."""

    def must_end_by(self, execution: Execution, moment: float) -> None:
        """It was told to stop. If it executes at this moment, by the monotonic clock, only the death of its process can
        end it. Told when it is cancelled, and once more when the moment has come.
        """

    def beat(self) -> None:
        """The claim loop goes on: every few seconds at least, also while it sleeps or waits for an answer. While the
        connection "claim" is not there, a beat may be late by the time that an attempt to connect takes; a worker that
        drains does not beat.
        """

    def counts(self, waiting: int, executing: int) -> None:
        """After each round of the claim loop."""

    def connected(self, role: str, backend_pid: int) -> None:
        """`role` is "claim", "lease", "finish", "duties", "listen", or "task <id>" for a task's own connection. The pid
        is 0 behind a pooler: there it would be made up. Told again for a role, it replaces the last one.
        """

    def disconnected(self, role: str) -> None:
        """That connection is closed."""
