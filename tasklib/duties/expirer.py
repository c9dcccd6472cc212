"""Ends tasks that were not started before their `expires_at`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasklib.duties.apart import Sweep
from tasklib.log import log
from tasklib.worker.tally import Tally

if TYPE_CHECKING:
    from tasklib.statements import WorkerStatements
    from tasklib.worker.session import Session

PAUSE_SECONDS = 1.0


class Expirer:
    def __init__(self, session: Session, statements: WorkerStatements, tally: Tally | None = None) -> None:
        self._session = session
        self._statements = statements
        self._tally = tally or Tally()
        self._sweep = Sweep("task.not_expired", session.run, due=statements.expirable, change=statements.expire_given)

    def run_once(self) -> float | None:
        expired = self._sweep.run_once(lambda: self._session.run(self._statements.expire()), int)
        if expired:
            self._tally.expired(expired)
            log.info("tasks.expired", count=expired)
        return 0.0 if expired else PAUSE_SECONDS
