"""Warns of tasks that wait in vain, because no live worker that serves their queue knows their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasklib.clock import time
from tasklib.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tasklib.runtime.session import Session
    from tasklib.statements import WorkerStatements

PAUSE_SECONDS = 60.0
TELL_AGAIN_SECONDS = 600.0


class UnservedNames:
    """In these queues; None: in all. `served_names` are names that the caller serves itself."""

    def __init__(
        self,
        session: Session,
        statements: WorkerStatements,
        queues: Sequence[str] | None = None,
        served_names: Callable[[], Sequence[str]] | None = None,
        *,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        self._session = session
        self._statements = statements
        self._queues = queues
        self._served_names = served_names or list
        self._pause_seconds = pause_seconds
        self._tell_at = 0.0
        self.unserved: list[str] = []

    def run_once(self) -> float | None:
        queues = self._queues
        if queues is None:
            queues = self._session.run(self._statements.ready_queues())
        waiting = self._session.run(self._statements.waiting_names(queues, self._served_names()))
        before, self.unserved = self.unserved, sorted(waiting)
        if self.unserved and (self.unserved != before or time.monotonic() >= self._tell_at):
            self._tell_at = time.monotonic() + TELL_AGAIN_SECONDS
            log.warning(
                "tasks.unserved",
                names=self.unserved,
                hint="is the module that defines them imported by a worker, and are they at its top level?",
            )
        return self._pause_seconds
