"""Recovers the tasks of workers that died, and those whose lock has passed.

A worker is declared dead in its own row; from then on it cannot renew. Its claims say what it held. Each task is
settled by the same guarded statement that its own worker would use: whoever comes second changes nothing. Until the
server and this connection have been up for one lease, nobody is declared dead: in an outage nobody could renew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from tasklib.connection import is_connection_lost
from tasklib.log import log
from tasklib.outcomes import Crashed, Rules, decide
from tasklib.statements import settlement_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from tasklib.config import Config
    from tasklib.outcomes import HeldTask, Settlement
    from tasklib.statements import WorkerStatements
    from tasklib.worker.session import Session


class Reaper:
    def __init__(self, config: Config, session: Session, statements: WorkerStatements) -> None:
        self._session = session
        self._statements = statements
        self._lease_seconds = config.lease_seconds
        self._pause_seconds = min(config.lease_seconds / 15, 1.0)
        self._rules = Rules(bury_after=config.bury_after, timeout_delta_seconds=config.timeout_delta_seconds)

    def run_once(self) -> float | None:
        self._session.connection()
        if self._session.age_seconds < self._lease_seconds:
            return self._pause_seconds
        self._declare_dead()
        self._recover_abandoned()
        self._session.run(self._statements.forget_dead())
        return self._pause_seconds

    def _declare_dead(self) -> None:
        for worker_id, name, hostname, pid in self._session.run(self._statements.declare_dead()):
            log.warning("worker.died", worker_id=worker_id, worker=name, hostname=hostname, pid=pid)

    def _recover_abandoned(self) -> None:
        """By key: claims that cannot be recovered now do not hide those behind them."""
        after = ("", -1)
        while page := self._session.run(self._statements.abandoned(after)):
            for worker_id, claim_id, is_alive, now in page:
                self._recover(worker_id, claim_id, now, worker_is_alive=is_alive)
            after = page[-1][:2]

    def _recover(self, worker_id: str, claim_id: int, now: datetime, *, worker_is_alive: bool) -> None:
        reason = "its lock passed" if worker_is_alive else "its worker died: the lease ran out"
        tasks = self._session.run(self._statements.abandoned_tasks(worker_id, claim_id))
        crash = Crashed(reason, worker_is_alive=worker_is_alive)
        decided = [(task, decide(task, crash, now, self._rules)) for task in tasks]
        self._settle(worker_id, decided, now)
        self._session.run(self._statements.forget_claim(worker_id, claim_id))

    def _settle(self, worker_id: str, decided: Sequence[tuple[HeldTask, Settlement]], now: datetime) -> None:
        """One bad row must not keep its neighbours: if the batch is refused, each goes alone."""
        if not decided:
            return
        try:
            recovered = self._send(worker_id, decided, now)
        except psycopg.Error as error:
            if is_connection_lost(error):
                raise
            if len(decided) == 1:
                task = decided[0][0]
                log.error("task.unrecoverable", task=task.name, task_id=task.id, error=str(error).partition("\n")[0])
                return
            for each in decided:
                self._settle(worker_id, [each], now)
            return
        if recovered:
            log.warning("tasks.recovered", worker_id=worker_id, count=recovered)

    def _send(self, worker_id: str, decided: Sequence[tuple[HeldTask, Settlement]], now: datetime) -> int:
        settled = [
            settlement_json(task, settlement, started_at=task.started_at, finished_at=now, seen=task.state)
            for task, settlement in decided
        ]
        return len(self._session.run(self._statements.settle(worker_id, settled)))
