"""Says which tasks wait in vain: their names are known to no live worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasklib.log import log

if TYPE_CHECKING:
    from tasklib.statements import WorkerStatements
    from tasklib.worker.claimer import Menu
    from tasklib.worker.session import Session

PAUSE_SECONDS = 60.0


class Census:
    def __init__(self, session: Session, statements: WorkerStatements, menu: Menu) -> None:
        self._session = session
        self._statements = statements
        self._menu = menu

    def run_once(self) -> float | None:
        queues = self._menu.queues
        if queues is None:
            queues = self._session.run(self._statements.ready_queues())
        unserved = self._session.run(self._statements.waiting_names(queues, self._menu.names()))
        if unserved:
            log.warning(
                "tasks.unserved", names=sorted(unserved), hint="is the module that defines them imported by a worker?"
            )
        return PAUSE_SECONDS
