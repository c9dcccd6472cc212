"""Says which tasks wait in vain: their names are known to no live worker that serves their queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasklib.clock import time
from tasklib.log import log

if TYPE_CHECKING:
    from tasklib.statements import WorkerStatements
    from tasklib.worker.claimer import Menu
    from tasklib.worker.session import Session

PAUSE_SECONDS = 60.0
TELL_AGAIN_SECONDS = 600.0


class Census:
    """Of the queues of a worker that knows the names on its menu itself; or, without a menu, of all queues."""

    def __init__(
        self,
        session: Session,
        statements: WorkerStatements,
        menu: Menu | None = None,
        *,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        self._session = session
        self._statements = statements
        self._menu = menu
        self._pause_seconds = pause_seconds
        self._tell_at = 0.0
        self.unserved: list[str] = []

    def run_once(self) -> float | None:
        queues = self._menu.queues if self._menu is not None else None
        if queues is None:
            queues = self._session.run(self._statements.ready_queues())
        served = self._menu.names() if self._menu is not None else []
        before, self.unserved = self.unserved, sorted(self._session.run(self._statements.waiting_names(queues, served)))
        if self.unserved and (self.unserved != before or time.monotonic() >= self._tell_at):
            self._tell_at = time.monotonic() + TELL_AGAIN_SECONDS
            log.warning(
                "tasks.unserved",
                names=self.unserved,
                hint="is the module that defines them imported by a worker, and are they at its top level?",
            )
        return self._pause_seconds
