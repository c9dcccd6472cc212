"""Ends tasks that were not started before their `expires_at`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasklib.log import log
from tasklib.runtime.bad_rows import Sweep
from tasklib.runtime.metrics import WorkerMetrics

if TYPE_CHECKING:
    from tasklib.runtime.session import Session
    from tasklib.statements import WorkerStatements

PAUSE_SECONDS = 1.0


class Expirer:
    def __init__(self, session: Session, statements: WorkerStatements, metrics: WorkerMetrics | None = None) -> None:
        self._session = session
        self._statements = statements
        self._metrics = metrics or WorkerMetrics()
        self._sweep = Sweep("task.not_expired", session.run, due=statements.expirable, change=statements.expire_given)

    def run_once(self) -> float | None:
        expired = self._sweep.run_once(lambda: self._session.run(self._statements.expire()), int)
        if expired:
            self._metrics.expired(expired)
            log.info("tasks.expired", count=expired)
        return 0.0 if expired else PAUSE_SECONDS
