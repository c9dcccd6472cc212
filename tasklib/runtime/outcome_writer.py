"""The only writer of outcomes: workers write those of their own tasks through it, and duties those of tasks that they
recover from other workers.

All of them send the one guarded statement `settle`, so that a second writer changes nothing. A row that cannot be
written does not stop the rest of its batch: a locked row is set aside for later, and a batch that PostgreSQL refuses is
halved until the bad row is alone. A task may get a cancel request between the decision and the write. Then the
statement leaves it as it is, and its outcome is decided once more.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, Self, TypeVar

import psycopg

from tasklib.attempt_log import log_attempt
from tasklib.clock import time
from tasklib.log import log
from tasklib.outcomes import HeldTask, Settlement, stopped
from tasklib.runtime.bad_rows import Aside, first_line, may_be_one_row, send_apart
from tasklib.runtime.metrics import WorkerMetrics
from tasklib.statements import WorkerStatements, settlement_json
from tasklib.states import State

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from datetime import datetime
    from uuid import UUID

    from tasklib.runtime.session import Session

MOST_AT_ONCE = 1_000
_LOCKED = psycopg.errors.LockNotAvailable()


class WritableOutcome(Protocol):
    @property
    def task(self) -> HeldTask:
        """As it was when the outcome was decided."""
        ...

    @property
    def settlement(self) -> Settlement:
        """What becomes of it."""
        ...

    def to_json(self) -> str:
        """As the statement `settle` takes it."""
        ...

    def replaced(self, settlement: Settlement) -> Self:
        """The same task with another settlement."""
        ...


O = TypeVar("O", bound=WritableOutcome)  # noqa: E741


class OutcomeWriter(ABC, Generic[O]):
    """How outcomes are written. Subclasses say what happens to rows that are written, locked or refused."""

    def __init__(self, session: Session, statements: WorkerStatements) -> None:
        self._session = session
        self._statements = statements

    def settle(self, worker_id: str, batch: Sequence[O]) -> int:
        """How many tasks were still the worker's."""
        try:
            return self._send(worker_id, batch)
        except psycopg.errors.LockNotAvailable as error:
            return self.settle_unlocked(worker_id, batch, error)
        except psycopg.Error as error:
            if not self.may_be_one_row(error):
                raise
            return self.settle_apart(worker_id, batch, error)

    def settle_unlocked(self, worker_id: str, batch: Sequence[O], error: psycopg.Error = _LOCKED) -> int:
        """Without the rows that other sessions have locked. If none is locked, the statement needs another lock."""
        free = set(self._session.run(self._statements.unlocked([each.task.id for each in batch])))
        blocked = [each for each in batch if each.task.id not in free]
        if not blocked:
            return self.wait_for_lock(worker_id, batch, error)
        self.set_aside(blocked)
        rest = [each for each in batch if each.task.id in free]
        return self.settle(worker_id, rest) if rest else 0

    def _send(self, worker_id: str, batch: Sequence[O], lock_seconds: float | None = None) -> int:
        settlements = [each.to_json() for each in batch]
        statement = self._statements.settle(worker_id, settlements, self.claims_ended_by(batch))
        sent_at = time.monotonic()
        settled = set(self._session.run(statement, lock_seconds))
        seconds = time.monotonic() - sent_at
        again = self._stopped_meanwhile(worker_id, batch, settled) if len(settled) < len(batch) else []
        if again:
            ids = {each.task.id for each in again}
            batch = [each for each in batch if each.task.id not in ids]
        self.written(worker_id, batch, settled, seconds)
        return len(settled) + (self.settle(worker_id, again) if again else 0)

    def _stopped_meanwhile(self, worker_id: str, batch: Sequence[O], settled: Collection[UUID]) -> list[O]:
        """Tasks that were left as they are because of a cancel request, with what becomes of them now."""
        left = [each for each in batch if each.task.id not in settled and each.settlement.goes_on]
        if not left:
            return []
        asked = set(self._session.run(self._statements.asked_to_stop(worker_id, [each.task.id for each in left])))
        return [each.replaced(stopped(each.settlement)) for each in left if each.task.id in asked]

    # --- what a subclass decides ---

    @abstractmethod
    def may_be_one_row(self, error: psycopg.Error) -> bool:
        """Whether the batch may pass without one of its rows."""

    def claims_ended_by(self, batch: Sequence[O]) -> list[int]:  # noqa: ARG002 - for subclasses
        """The claims of which nothing is left when these are settled."""
        return []

    @abstractmethod
    def written(self, worker_id: str, batch: Sequence[O], settled: set[UUID], seconds: float) -> None:
        """One statement was executed. Tasks that are not in `settled` belong to another worker by now."""

    @abstractmethod
    def set_aside(self, blocked: Sequence[O]) -> None:
        """These rows are locked by other sessions."""

    @abstractmethod
    def wait_for_lock(self, worker_id: str, batch: Sequence[O], error: psycopg.Error) -> int:
        """The statement needs a lock on something else than its own rows."""

    @abstractmethod
    def settle_apart(self, worker_id: str, batch: Sequence[O], error: psycopg.Error) -> int:
        """PostgreSQL refuses a row of the batch: find it, and write the others."""


class Decided(NamedTuple):
    """What becomes of a task that is recovered."""

    task: HeldTask
    settlement: Settlement
    seen: str | None  # the state that the task must still have; None: any in which it is held
    decided_at: datetime | None = None

    def to_json(self) -> str:
        assert self.decided_at is not None  # noqa: S101 - the writer has set it
        return settlement_json(
            self.task, self.settlement, started_at=self.task.started_at, finished_at=self.decided_at, seen=self.seen
        )

    def replaced(self, settlement: Settlement) -> Decided:
        return self._replace(settlement=settlement)

    @property
    def seconds(self) -> float:
        """For how long it has run."""
        if self.task.started_at is None or self.decided_at is None:
            return 0.0
        return max((self.decided_at - self.task.started_at).total_seconds(), 0.0)


class RecoveryWriter(OutcomeWriter[Decided]):
    """Writes what becomes of tasks that another worker held, or that this worker holds without knowing it."""

    def __init__(self, session: Session, statements: WorkerStatements, metrics: WorkerMetrics | None = None) -> None:
        super().__init__(session, statements)
        self._metrics = metrics or WorkerMetrics()
        self._aside: Aside[tuple[UUID, int]] = Aside(at_once=True)

    def decide(self, tasks: Iterable[HeldTask], decide: Callable[[HeldTask], Decided]) -> list[Decided]:
        """What becomes of each task. A task for which `decide` fails is set aside, and so is one that was refused
        lately.
        """
        aside, decided = self._aside.current(), []
        for task in tasks:
            if (task.id, task.fencing_token) in aside:
                continue
            try:
                decided.append(decide(task))
            except Exception as error:  # noqa: BLE001 - a bad row must not keep the others from being recovered
                self._refuse(task, error)
        return decided

    def recover(self, worker_id: str, decided: Sequence[Decided], now: datetime) -> int:
        """How many were still the worker's. Each attempt that ends this way is logged, as any other."""
        unique = {each.task.id: each._replace(decided_at=now) for each in decided}  # a task may be in two claims
        rows = [*unique.values()]
        return sum(
            self.settle(worker_id, rows[start : start + MOST_AT_ONCE]) for start in range(0, len(rows), MOST_AT_ONCE)
        )

    def may_be_one_row(self, error: psycopg.Error) -> bool:
        return may_be_one_row(error)

    def written(self, worker_id: str, batch: Sequence[Decided], settled: set[UUID], seconds: float) -> None:  # noqa: ARG002
        """The task's own worker cannot log the attempt any more. It is a warning: a worker has died or lost its
        lease.
        """
        done = [each for each in batch if each.task.id in settled]
        self._metrics.settled((each.task, each.settlement, each.seconds) for each in done)
        for each in done:
            if each.settlement.began:
                task = each.task
                log_attempt(
                    log, task, each.settlement, attempt=task.attempt + (task.state != State.RUNNING),
                    least_level=logging.WARNING, seconds=each.seconds if task.started_at else None,
                )  # fmt: skip

    def set_aside(self, blocked: Sequence[Decided]) -> None:
        """They are found again in the next round."""
        tasks = [str(each.task.id) for each in blocked[:5]]
        log.warning("recovery.blocked", tasks=tasks, hint="which session holds locks on these rows?")

    def settle_apart(self, worker_id: str, batch: Sequence[Decided], error: psycopg.Error) -> int:  # noqa: ARG002
        parts = send_apart(
            batch, lambda part: self._send(worker_id, part), lambda each, error: self._refuse(each.task, error)
        )
        return sum(parts)

    wait_for_lock = settle_apart  # a trigger, for instance, may need a locked row for one of the tasks only

    def _refuse(self, task: HeldTask, error: Exception) -> None:
        self._aside.add((task.id, task.fencing_token))
        if isinstance(error, psycopg.errors.LockNotAvailable):
            hint = "which session holds a lock that its recovery needs?"
            log.warning("recovery.blocked", tasks=[str(task.id)], hint=hint)
        else:
            log.error("task.unrecoverable", task=task.name, task_id=task.id, error=first_line(error))
