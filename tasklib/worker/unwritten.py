"""Outcomes of executions that the database does not have yet: an outage costs time, not results.

They are written in batches. Plain successes have a queue of their own, and a statement that has nothing to decide. If a
batch of them cannot be written, it goes to the other queue, which handles every case. An outcome that the database does
not accept belongs to another worker by now, and is dropped.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import psycopg

from tasklib.clock import time
from tasklib.database_errors import is_about_rows, is_connection_lost
from tasklib.log import log
from tasklib.outcomes import (
    AttemptOutcome,
    Completed,
    HeldTask,
    Interrupted,
    Problem,
    Rules,
    Settlement,
    decide,
    succeeded,
)
from tasklib.runtime.outcome_writer import OutcomeWriter
from tasklib.statements import Completions, WorkerStatements, settlement_json
from tasklib.states import State
from tasklib.strict_json import storable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from uuid import UUID

    from tasklib.runtime.database_clock import Reading
    from tasklib.runtime.metrics import WorkerMetrics
    from tasklib.runtime.session import Session
    from tasklib.worker.buffer import Buffer
    from tasklib.worker.execution import Execution

T = TypeVar("T")
K = TypeVar("K")
UNSTORABLE = "UNSTORABLE"
LARGEST_BATCH = 1_000
LARGEST_BATCH_CHARACTERS = 8_000_000
MOST_CHARACTERS = 64_000_000  # of all outcomes that wait to be written
BLOCKED_PAUSE_SECONDS = 1.0
LAST_TRY_SECONDS = 3.0  # to wait for a lock if no row of the batch is locked
Success: TypeAlias = "tuple[Execution, str | None, float, Reading]"  # execution, result, moment, reading: as in Ended


class Ended(NamedTuple):
    """An execution that has ended, and what becomes of its task."""

    execution: Execution
    settlement: Settlement
    moment: float  # monotonic
    reading: Reading  # of the clock: it turns the moment into a date, always the same
    progress: str | None = None

    @property
    def task(self) -> HeldTask:
        return self.execution.task

    def replaced(self, settlement: Settlement) -> Ended:
        return self._replace(settlement=settlement)

    def to_json(self) -> str:
        """A task that was completed in its own transaction is given back. That changes nothing, unless a crash of the
        server has undone the COMMIT.
        """
        execution, reading = self.execution, self.reading
        finished_at = reading.at(self.moment)
        given_back = execution.is_committed and decide(execution.task, Interrupted(began=True), finished_at, Rules())
        if execution.started_at is None and execution.has_begun:
            execution.started_at = reading.at(execution.started)
        return settlement_json(
            execution.task,
            given_back or self.settlement,
            started_at=execution.started_at,
            finished_at=finished_at,
            progress=self.progress,
        )


class UnwrittenOutcomes(OutcomeWriter[Ended]):
    def __init__(self, session: Session, statements: WorkerStatements, buffer: Buffer, metrics: WorkerMetrics) -> None:
        super().__init__(session, statements)
        self._buffer = buffer
        self._metrics = metrics
        self._successes: deque[Success] = deque()
        self._ended: deque[Ended] = deque()  # all else that ended
        self._largest = 0  # characters of one of them; a bound that may be too high
        self._most = LARGEST_BATCH
        self._meets_a_lock = False  # another session may have locked a row of the next batch
        self._blocked: list[Ended] = []
        self._blocked_until = 0.0
        self._resent = 0  # how many, from the first on, were sent before; their answer was lost
        self._written: set[Execution] = set()  # of the next batch, of which the rest could not be written
        self.on_settled: Callable[[], None] = lambda: None

    def add(self, ended: Ended) -> None:
        self._ended.append(ended)
        self._largest = max(self._largest, _size(ended.settlement))

    def add_success(self, success: Success) -> None:
        self._successes.append(success)
        if (result := success[1]) is not None and len(result) > self._largest:
            self._largest = len(result)

    def is_behind(self) -> bool:
        """So much waits to be written that the worker should not run more tasks. Claims ask this often, so the sizes
        are added up only if the largest of them makes it possible.
        """
        if len(self) * self._largest <= MOST_CHARACTERS:
            return False
        sizes = [len(result) for _, result, _, _ in list(self._successes) if result]
        sizes += [_size(each.settlement) for each in list(self._ended)]
        self._largest = max(sizes, default=0)
        return sum(sizes) > MOST_CHARACTERS

    def __len__(self) -> int:
        """How many can be written now."""
        return len(self._successes) + len(self._ended)

    @property
    def is_empty(self) -> bool:
        return not self._successes and not self._ended and not self._blocked

    @property
    def blocked_seconds(self) -> float | None:
        """Seconds until the blocked outcomes are tried again; None: there are none."""
        return self._blocked_until - time.monotonic() if self._blocked else None

    def try_blocked_again(self) -> None:
        if self._blocked and time.monotonic() >= self._blocked_until:
            self._ended.extend(self._blocked)
            self._blocked = []
            self._meets_a_lock = True  # the lock may still be there, and the others need not wait to find out

    def write(self) -> None:
        """One batch of each queue. Outcomes that were sent before come first."""
        if self._successes and not (self._resent and self._ended):
            self._complete()
        if self._ended:
            self._flush()

    def _complete(self) -> None:
        """Plain successes. If one of them cannot be written this way, the whole batch goes to the other queue."""
        batch = list(self._successes)[: self._most]  # copied in one step, because other threads append
        executions = [execution for execution, _, _, _ in batch]
        worker_id = executions[0].task.worker_id
        completions = _completions(batch)
        is_odd = any(each.task.worker_id != worker_id for each in executions)
        if is_odd or sum(map(len, filter(None, completions.results))) > LARGEST_BATCH_CHARACTERS:
            self._move_to_ended(batch)
            return
        claims = self._buffer.claims_ended_by(executions)
        sent_at = time.monotonic()
        try:
            settled = set(self._session.run(self._statements.complete(worker_id, completions, claims)))
        except psycopg.Error as error:
            self._move_to_ended(batch, was_sent=is_connection_lost(error))
            self._meets_a_lock = isinstance(error, psycopg.errors.LockNotAvailable)
            if self._meets_a_lock or is_about_rows(error):
                return
            raise
        self._metrics.flushed(len(batch), time.monotonic() - sent_at)
        if len(settled) < len(batch):
            self._tell_lost([_as_ended(each) for each in batch], settled)
            batch = [each for each in batch if each[0].id in settled]
        self._metrics.completed((each.task, moment - each.started) for each, _, moment, _ in batch)
        self._buffer.settled(executions)
        _pop(self._successes, len(executions))
        self._most = min(self._most * 2, LARGEST_BATCH)
        self.on_settled()

    def _move_to_ended(self, batch: Sequence[Success], *, was_sent: bool = False) -> None:
        """To the front, because outcomes that were sent before come first."""
        self._ended.extendleft([_as_ended(each) for each in reversed(batch)])
        _pop(self._successes, len(batch))
        if was_sent:
            self._most = max(self._most // 2, 1)  # it may have been too much for one statement
        if was_sent or self._resent:
            self._resent += len(batch)

    def _flush(self) -> None:
        """A batch leaves the memory only when it is committed, or can never be."""
        batch = self._next_batch()
        left = [each for each in batch if each.execution not in self._written] if self._written else batch
        groups = grouped(left, lambda each: each.task.worker_id)
        for worker_id, own in groups.items():
            self._settle(worker_id, own, len(batch))
            if len(groups) > 1:
                self._written.update(each.execution for each in own)
        _pop(self._ended, len(batch))
        self._resent = max(self._resent - len(batch), 0)
        self._written.difference_update(each.execution for each in batch)
        self._most = min(self._most * 2, LARGEST_BATCH)
        self.on_settled()

    def _settle(self, worker_id: str, own: Sequence[Ended], batch_size: int) -> None:
        meets_a_lock, self._meets_a_lock = self._meets_a_lock, False
        try:
            (self.settle_unlocked if meets_a_lock else self.settle)(worker_id, own)
        except psycopg.Error as error:
            if is_connection_lost(error):
                self._resent = max(self._resent, batch_size)
            self._most = max(self._most // 2, 1)
            raise

    def _next_batch(self) -> list[Ended]:
        batch: list[Ended] = []
        size = 0
        for each in list(self._ended)[: self._most]:
            size += _size(each.settlement)
            if batch and size > LARGEST_BATCH_CHARACTERS:
                break
            batch.append(each)
        return batch

    # --- how a batch is written: see OutcomeWriter ---

    def may_be_one_row(self, error: psycopg.Error) -> bool:
        return is_about_rows(error)

    def claims_ended_by(self, batch: Sequence[Ended]) -> list[int]:
        return self._buffer.claims_ended_by({each.execution for each in batch})

    def written(self, worker_id: str, batch: Sequence[Ended], settled: set[UUID], seconds: float) -> None:
        self._metrics.flushed(len(batch), seconds)
        if self._resent and len(settled) < len(batch):
            settled = settled | self._written_before(worker_id, batch)
        self._count(batch, settled)
        self._tell_lost(batch, settled)
        self._buffer.settled({each.execution for each in batch})

    def set_aside(self, blocked: Sequence[Ended]) -> None:
        """Newly blocked rows do not postpone the next try of those that were blocked before."""
        tasks = [str(each.execution.id) for each in blocked[:5]]
        log.warning("finish.blocked", tasks=tasks, hint="which session holds locks on these rows?")
        if not self._blocked:
            self._blocked_until = time.monotonic() + BLOCKED_PAUSE_SECONDS
        self._blocked += blocked

    def wait_for_lock(self, worker_id: str, batch: Sequence[Ended], error: psycopg.Error) -> int:  # noqa: ARG002
        """It may be a row of `claims`, or the lock that commits take in turn when they notify. So the batch is sent
        once more with a longer lock_timeout. If that is not enough, all of it waits.
        """
        try:
            return self._send(worker_id, batch, LAST_TRY_SECONDS)
        except psycopg.errors.LockNotAvailable:
            self.set_aside(batch)
            return 0

    def settle_apart(self, worker_id: str, batch: Sequence[Ended], error: psycopg.Error) -> int:
        if len(batch) > 1:
            middle = len(batch) // 2
            return self.settle(worker_id, batch[:middle]) + self.settle(worker_id, batch[middle:])
        instead = self._refuse(batch[0], error)
        return 0 if instead is None else self.settle(worker_id, [instead])

    def _refuse(self, outcome: Ended, error: psycopg.Error) -> Ended | None:
        """The outcome to write instead, which says that the real one could not be stored."""
        reason = error.diag.message_primary or type(error).__name__
        task, problem = outcome.task, outcome.settlement.problem
        log.error("finish.refused", task=task.name, task_id=task.id, reason=reason)
        if problem is None or problem.code != UNSTORABLE:
            return outcome.replaced(_without_what_was_refused(outcome.settlement, reason))
        consequence = "it is recovered when its lock has passed"
        log.error("finish.given_up", task=task.name, task_id=task.id, consequence=consequence)
        self._buffer.settled([outcome.execution])
        return None

    def _written_before(self, worker_id: str, batch: Sequence[Ended]) -> set[UUID]:
        """After a lost connection: a task is not settled the second time if it was the first time. A task that never
        began has no attempt that would tell; it counts as written.
        """
        runs = {(each.task.id, each.task.fencing_token): each.settlement.began for each in batch}
        found = set(self._session.run(self._statements.written(worker_id, [task_id for task_id, _ in runs])))
        return {run[0] for run, began in runs.items() if not began or run in found}

    def _count(self, batch: Sequence[Ended], settled: set[UUID]) -> None:
        written = [each for each in map(functools.partial(_as_written, settled), batch) if each is not None]
        self._metrics.settled((each.task, each.settlement, each.moment - each.execution.started) for each in written)

    def _tell_lost(self, batch: Sequence[Ended], settled: set[UUID]) -> None:
        if len(settled) == len(batch):
            return
        for each in batch:
            task, is_committed = each.execution.task, each.execution.is_committed
            if is_committed is False and task.id not in settled:
                self._metrics.fenced(1)
                log.warning("lease.lost", task=task.name, task_id=task.id, token=task.fencing_token)
            elif is_committed is None and task.id not in settled:
                log.info("commit.found", task=task.name, task_id=task.id)
            elif is_committed and task.id in settled:
                log.error("commit.lost", task=task.name, task_id=task.id, consequence="it will run again")


def _size(settlement: Settlement) -> int:
    return len(settlement.result or "") + len(settlement.problem.text if settlement.problem else "")


def _completions(batch: Sequence[Success]) -> Completions:
    completions = Completions([], [], [], [], [])
    for execution, result, moment, reading in batch:
        started = (
            reading.epoch_at(execution.started) if execution.started_at is None else execution.started_at.timestamp()
        )
        completions.ids.append(execution.task.id)
        completions.tokens.append(execution.task.fencing_token)
        completions.started.append(started)
        completions.finished.append(max(reading.epoch_at(moment), started))
        completions.results.append(result)
    return completions


def _as_ended(success: Success) -> Ended:
    execution, result, moment, reading = success
    return Ended(execution, succeeded(Completed(result)), moment, reading)


def _pop(queue: deque[T], count: int) -> None:
    for _ in range(count):
        queue.popleft()


def _without_what_was_refused(settlement: Settlement, reason: str) -> Settlement:
    problem = Problem(UNSTORABLE, storable(reason), f"Unstorable: PostgreSQL refused the outcome: {storable(reason)}")
    is_completed = settlement.state == State.COMPLETED
    return settlement._replace(
        state=State.FAILED if is_completed else settlement.state,
        outcome="FAILED" if is_completed else settlement.outcome,
        result=None,
        problem=problem,
        failed_reason=None,
    )


def _as_written(settled: Collection[UUID], ended: Ended) -> Ended | None:
    """The outcome as the database has it. A task that was completed in its own transaction is given back afterwards; it
    is settled that way only if the completion was lost.
    """
    is_settled = ended.execution.id in settled
    if ended.execution.is_committed is False:
        return ended if is_settled else None
    outcome: AttemptOutcome = "INTERRUPTED" if is_settled else "COMPLETED"
    state = State.PENDING if is_settled else State.COMPLETED
    return ended._replace(settlement=ended.settlement._replace(state=state, outcome=outcome))


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Mostly by the worker's id: a worker that was declared dead goes on under a new id, and still holds tasks of the
    old one.
    """
    grouped: dict[K, list[T]] = {}
    for item in items:
        grouped.setdefault(key(item), []).append(item)
    return grouped
