"""Settles the tasks of another worker, by the guarded statement that it would use itself: whoever comes second changes
nothing. One bad row does not keep its neighbours.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import psycopg

from tasklib.attempt_log import log_attempt
from tasklib.duties.apart import Aside, first_line, may_be_one_row, send_apart
from tasklib.log import log
from tasklib.statements import settlement_json
from tasklib.states import State
from tasklib.worker.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
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
        self._aside: Aside[tuple[UUID, int]] = Aside(at_once=True)

    def decide(self, tasks: Iterable[HeldTask], decide: Callable[[HeldTask], Decided]) -> list[Decided]:
        """What becomes of each. One of which nobody can say so is set aside, and so is one that was refused lately."""
        aside, decided = self._aside.current(), []
        for task in tasks:
            if (task.id, task.fencing_token) in aside:
                continue
            try:
                decided.append(decide(task))
            except Exception as error:  # noqa: BLE001 - a bad row must not keep the others from being recovered
                self._refuse(task, error)
        return decided

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
        """Rows that somebody holds are left out at once. If a statement still has to wait for a lock, on a row that is
        not among its own, or is refused, it is halved.
        """
        try:
            return self._send(worker_id, batch, now)
        except psycopg.errors.LockNotAvailable:
            batch = self._unlocked(batch)
        except psycopg.Error as error:
            if not may_be_one_row(error):
                raise
        parts = send_apart(
            batch, lambda part: self._send(worker_id, part, now), lambda each, error: self._refuse(each.task, error)
        )
        return set().union(*parts)

    def _unlocked(self, batch: Sequence[Decided]) -> list[Decided]:
        """Those whose rows nobody holds. The turn of the others comes again."""
        free = set(self._session.run(self._statements.unlocked([each.task.id for each in batch])))
        if blocked := [str(each.task.id) for each in batch if each.task.id not in free]:
            log.warning("recovery.blocked", tasks=blocked[:5], hint="who holds the row?")
        return [each for each in batch if each.task.id in free]

    def _refuse(self, task: HeldTask, error: Exception) -> None:
        self._aside.add((task.id, task.fencing_token))
        if isinstance(error, psycopg.errors.LockNotAvailable):
            log.warning("recovery.blocked", tasks=[str(task.id)], hint="who holds a row that its recovery needs?")
        else:
            log.error("task.unrecoverable", task=task.name, task_id=task.id, error=first_line(error))

    def _send(self, worker_id: str, batch: Sequence[Decided], now: datetime) -> set[UUID]:
        settled = [
            settlement_json(task, settlement, started_at=task.started_at, finished_at=now, seen=seen)
            for task, settlement, seen in batch
        ]
        return set(self._session.run(self._statements.settle(worker_id, settled)))


def _tell(task: HeldTask, settlement: Settlement, now: datetime) -> None:
    """Its worker cannot write the line any more. It is a warning at least: a worker has died, or lost its lease."""
    log_attempt(
        log, task, settlement, attempt=task.attempt + (task.state != State.RUNNING), least_level=logging.WARNING,
        seconds=_seconds(task, now) if task.started_at else None,
    )  # fmt: skip


def _seconds(task: HeldTask, now: datetime) -> float:
    return max((now - task.started_at).total_seconds(), 0.0) if task.started_at is not None else 0.0
