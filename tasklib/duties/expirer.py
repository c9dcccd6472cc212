"""Ends tasks that were not started before their `expires_at`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasklib.log import log

if TYPE_CHECKING:
    from tasklib.statements import WorkerStatements
    from tasklib.worker.session import Session

PAUSE_SECONDS = 1.0


class Expirer:
    def __init__(self, session: Session, statements: WorkerStatements) -> None:
        self._session = session
        self._statements = statements

    def run_once(self) -> float | None:
        expired = self._session.run(self._statements.expire())
        if expired:
            log.info("tasks.expired", count=expired)
        return 0.0 if expired else PAUSE_SECONDS
