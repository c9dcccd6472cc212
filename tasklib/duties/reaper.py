"""Recovers the tasks of workers that died, and tasks whose lock has passed.

A worker is declared dead in its own row, and can no longer renew its lease. Its claims say which tasks it held. Each
task is settled by the guarded statement that its own worker would use, so that a second writer changes nothing.
No worker is declared dead until the server and this connection have been up for one lease: during an outage, no
worker could renew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from tasklib.clock import time
from tasklib.database_errors import is_connection_lost
from tasklib.log import log
from tasklib.outcomes import Crashed, Rules, decide
from tasklib.runtime.metrics import WorkerMetrics
from tasklib.runtime.outcome_writer import Decided, RecoveryWriter

if TYPE_CHECKING:
    from datetime import datetime

    from tasklib.config import Config
    from tasklib.runtime.session import Session
    from tasklib.statements import WorkerStatements

KEEP_DEAD_SECONDS = 3600.0  # the rows of dead workers, for operators
FORGET_EVERY_SECONDS = 60.0
MOST_FAILURES = 10  # claims that fail in one round; with more, the fault is not in the claims


class Reaper:
    def __init__(
        self,
        config: Config,
        session: Session,
        statements: WorkerStatements,
        *,
        keep_dead_seconds: float | None = KEEP_DEAD_SECONDS,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        self._session = session
        self._statements = statements
        self._metrics = metrics or WorkerMetrics()
        self._settling = RecoveryWriter(session, statements, self._metrics)
        self._keep_dead_seconds = keep_dead_seconds
        self._forget_at = 0.0
        self._lease_seconds = config.lease_seconds
        self._pause_seconds = min(config.lease_seconds / 15, 1.0)
        self._rules = Rules.of(config)

    def run_once(self) -> float | None:
        self._session.connection()
        if self._session.age_seconds < self._lease_seconds:
            return self._pause_seconds
        self._declare_dead()
        self._recover_abandoned()
        self._session.run(self._statements.policies.forget())
        if time.monotonic() >= self._forget_at:
            self._session.run(self._statements.forget_dead(self._keep_dead_seconds))
            self._forget_at = time.monotonic() + FORGET_EVERY_SECONDS
        return self._pause_seconds

    def _declare_dead(self) -> None:
        for worker_id, name, hostname, pid in self._session.run(self._statements.declare_dead()):
            log.warning("worker.died", worker_id=worker_id, worker=name, hostname=hostname, pid=pid)

    def _recover_abandoned(self) -> None:
        """Page by page, so that claims that cannot be recovered now do not hide those behind them."""
        after = ("", -1)
        failures: list[psycopg.Error] = []
        while page := self._session.run(self._statements.abandoned(after)):
            for worker_id, claim_id, is_alive, now in page:
                try:
                    self._recover(worker_id, claim_id, now, worker_is_alive=is_alive)
                except psycopg.Error as error:
                    if is_connection_lost(error) or len(failures) == MOST_FAILURES:
                        raise
                    failures.append(error)
            after = page[-1][:2]
        if failures:
            raise failures[0]  # logged and counted once for all of them

    def _recover(self, worker_id: str, claim_id: int, now: datetime, *, worker_is_alive: bool) -> None:
        reason = "its lock passed" if worker_is_alive else "its worker died: the lease ran out"
        tasks = self._session.run(self._statements.abandoned_tasks(worker_id, claim_id))
        crash = Crashed(reason, worker_is_alive=worker_is_alive)
        decided = self._settling.decide(
            tasks, lambda task: Decided(task, decide(task, crash, now, self._rules), task.state)
        )
        if recovered := self._settling.recover(worker_id, decided, now):
            self._metrics.lost(recovered, "lease_expired")
            log.warning("tasks.recovered", worker_id=worker_id, count=recovered)
        self._session.run(self._statements.forget_claim(worker_id, claim_id))
