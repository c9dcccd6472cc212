"""Settles the tasks of another worker, by the guarded statement that it would use itself: whoever comes second changes
nothing. One bad row does not keep its neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import psycopg

from tasklib.connection import is_connection_lost
from tasklib.log import log
from tasklib.statements import settlement_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from tasklib.outcomes import HeldTask, Settlement
    from tasklib.statements import WorkerStatements
    from tasklib.worker.session import Session

MOST_AT_ONCE = 1_000


class Decided(NamedTuple):
    task: HeldTask
    settlement: Settlement
    seen: str | None  # the state that it must still have; None: whichever it is held in


class Settling:
    def __init__(self, session: Session, statements: WorkerStatements) -> None:
        self._session = session
        self._statements = statements

    def settle(self, worker_id: str, decided: Sequence[Decided], now: datetime) -> int:
        """How many were still the worker's."""
        batches = (decided[start : start + MOST_AT_ONCE] for start in range(0, len(decided), MOST_AT_ONCE))
        return sum(self._settle(worker_id, batch, now) for batch in batches)

    def _settle(self, worker_id: str, batch: Sequence[Decided], now: datetime) -> int:
        try:
            return self._send(worker_id, batch, now)
        except psycopg.errors.LockNotAvailable:
            return self._settle_unlocked(worker_id, batch, now)
        except psycopg.Error as error:
            if is_connection_lost(error):
                raise
            if len(batch) > 1:
                return sum(self._settle(worker_id, [each], now) for each in batch)
            task = batch[0].task
            log.error("task.unrecoverable", task=task.name, task_id=task.id, error=str(error).partition("\n")[0])
            return 0

    def _settle_unlocked(self, worker_id: str, batch: Sequence[Decided], now: datetime) -> int:
        """Somebody holds a row: the others do not wait for it, and its turn comes again."""
        free = set(self._session.run(self._statements.unlocked([each.task.id for each in batch])))
        blocked = [str(each.task.id) for each in batch if each.task.id not in free]
        log.warning("recovery.blocked", tasks=blocked[:5], hint="who holds the row?")
        rest = [each for each in batch if each.task.id in free]
        return self._settle(worker_id, rest, now) if rest else 0

    def _send(self, worker_id: str, batch: Sequence[Decided], now: datetime) -> int:
        settled = [
            settlement_json(task, settlement, started_at=task.started_at, finished_at=now, seen=seen)
            for task, settlement, seen in batch
        ]
        return len(self._session.run(self._statements.settle(worker_id, settled)))
