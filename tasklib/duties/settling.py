"""Settles the tasks of another worker, by the guarded statement that it would use itself: whoever comes second changes
nothing. One bad row does not keep its neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import psycopg

from tasklib.connection import is_connection_lost
from tasklib.log import log
from tasklib.statements import settlement_json
from tasklib.states import State
from tasklib.worker.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from tasklib.outcomes import HeldTask, Settlement
    from tasklib.statements import WorkerStatements
    from tasklib.worker.session import Session

MOST_AT_ONCE = 1_000


class Decided(NamedTuple):
    task: HeldTask
    settlement: Settlement
    seen: str | None  # the state that it must still have; None: whichever it is held in


class Settling:
    def __init__(self, session: Session, statements: WorkerStatements, tally: Tally | None = None) -> None:
        self._session = session
        self._statements = statements
        self._tally = tally or Tally()

    def settle(self, worker_id: str, decided: Sequence[Decided], now: datetime) -> int:
        """How many were still the worker's. Each attempt that ends so has its line in the log, as any other."""
        decided = [*{each.task.id: each for each in decided}.values()]  # one that was claimed twice is in two claims
        settled: set[UUID] = set()
        for start in range(0, len(decided), MOST_AT_ONCE):
            settled |= self._settle(worker_id, decided[start : start + MOST_AT_ONCE], now)
        written = [each for each in decided if each.task.id in settled]
        self._tally.settled((task, settlement, _seconds(task, now)) for task, settlement, _ in written)
        for task, settlement, _ in written:
            if settlement.began:
                _tell(task, settlement, now)
        return len(settled)

    def _settle(self, worker_id: str, batch: Sequence[Decided], now: datetime) -> set[UUID]:
        try:
            return self._send(worker_id, batch, now)
        except psycopg.errors.LockNotAvailable:
            return self._settle_unlocked(worker_id, batch, now)
        except psycopg.Error as error:
            if is_connection_lost(error):
                raise
            if len(batch) > 1:
                return {id_ for each in batch for id_ in self._settle(worker_id, [each], now)}
            task = batch[0].task
            log.error("task.unrecoverable", task=task.name, task_id=task.id, error=str(error).partition("\n")[0])
            return set()

    def _settle_unlocked(self, worker_id: str, batch: Sequence[Decided], now: datetime) -> set[UUID]:
        """Somebody holds a row: the others do not wait for it, and its turn comes again."""
        free = set(self._session.run(self._statements.unlocked([each.task.id for each in batch])))
        blocked = [str(each.task.id) for each in batch if each.task.id not in free]
        log.warning("recovery.blocked", tasks=blocked[:5], hint="who holds the row?")
        rest = [each for each in batch if each.task.id in free]
        return self._settle(worker_id, rest, now) if rest else set()

    def _send(self, worker_id: str, batch: Sequence[Decided], now: datetime) -> set[UUID]:
        settled = [
            settlement_json(task, settlement, started_at=task.started_at, finished_at=now, seen=seen)
            for task, settlement, seen in batch
        ]
        return set(self._session.run(self._statements.settle(worker_id, settled)))


def _tell(task: HeldTask, settlement: Settlement, now: datetime) -> None:
    """The one line at the end of an attempt, which its worker cannot write any more."""
    log.warning(
        f"task.{str(settlement.outcome).lower()}", task=task.name, task_id=task.id, queue=task.queue,
        attempt=task.attempt + (task.state != State.RUNNING), state=str(settlement.state), worker_id=task.worker_id,
        seconds=round(_seconds(task, now), 4) if task.started_at else None,
        error_code=settlement.problem and settlement.problem.code, due_at=settlement.due_at,
    )  # fmt: skip


def _seconds(task: HeldTask, now: datetime) -> float:
    return max((now - task.started_at).total_seconds(), 0.0) if task.started_at is not None else 0.0
