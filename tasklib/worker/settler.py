"""Writes what executions came to, in batches: which of them go together, and what to do when one cannot be written.

Plain successes have a lane of their own, with a statement that has nothing to decide; whatever is the matter with a
batch of them is the other lane's business. What the database does not take belongs to another worker by now, and is
dropped. One row that cannot be written does not hold up the others.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import psycopg

from tasklib.clock import time
from tasklib.connection import is_about_rows, is_connection_lost
from tasklib.log import log
from tasklib.outcomes import Completed, Interrupted, Problem, Rules, Settlement, decide, succeeded
from tasklib.statements import Completions, settlement_json
from tasklib.states import State
from tasklib.strict_json import storable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from uuid import UUID

    from tasklib.outcomes import AttemptOutcome
    from tasklib.statements import Statement, WorkerStatements
    from tasklib.worker.buffer import Buffer
    from tasklib.worker.clock import Reading
    from tasklib.worker.execution import Execution
    from tasklib.worker.session import Session
    from tasklib.worker.tally import Tally

T = TypeVar("T")
K = TypeVar("K")
UNSTORABLE = "UNSTORABLE"
LARGEST_BATCH = 1_000
LARGEST_BATCH_CHARACTERS = 8_000_000
MOST_CHARACTERS = 64_000_000  # of ends that wait to be written
BLOCKED_PAUSE_SECONDS = 1.0
LAST_TRY_SECONDS = 3.0  # for a lock, where no row of the batch is locked
Success: TypeAlias = "tuple[Execution, str | None, float, Reading]"  # with its result, and when: as in Ended


class Ended(NamedTuple):
    """An execution and what becomes of its task."""

    execution: Execution
    settlement: Settlement
    moment: float  # monotonic
    reading: Reading  # the date was told by this one, and is told again by it
    progress: str | None = None

    def to_json(self) -> str:
        """What was completed in its own transaction is given back: which changes nothing, unless a crash of the server
        has undone the COMMIT.
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


class Settler:
    def __init__(self, session: Session, statements: WorkerStatements, buffer: Buffer, tally: Tally) -> None:
        self._session = session
        self._statements = statements
        self._buffer = buffer
        self._tally = tally
        self._successes: deque[Success] = deque()
        self._ended: deque[Ended] = deque()  # all else that ended
        self._largest = 0  # characters of one of them; a bound that may be too high
        self._most = LARGEST_BATCH
        self._meets_a_lock = False  # somebody holds a row of what comes next
        self._blocked: list[Ended] = []
        self._blocked_until = 0.0
        self._resent = 0  # so many, from the first on, were sent before: their answer was lost
        self._written: set[Execution] = set()  # those of a batch of which others could not be written
        self.on_settled: Callable[[], None] = lambda: None

    def add(self, ended: Ended) -> None:
        self._ended.append(ended)
        self._largest = max(self._largest, _size(ended.settlement))

    def add_success(self, success: Success) -> None:
        self._successes.append(success)
        if (result := success[1]) is not None and len(result) > self._largest:
            self._largest = len(result)

    def is_behind(self) -> bool:
        """So much waits to be written that its worker should not run more. Claims ask this often, and the sizes are
        added up only if the largest of them makes it possible.
        """
        if len(self) * self._largest <= MOST_CHARACTERS:
            return False
        sizes = [len(result) for _, result, _, _ in list(self._successes) if result]
        sizes += [_size(each.settlement) for each in list(self._ended)]
        self._largest = max(sizes, default=0)
        return sum(sizes) > MOST_CHARACTERS

    def __len__(self) -> int:
        """How many could be written now."""
        return len(self._successes) + len(self._ended)

    @property
    def is_empty(self) -> bool:
        return not self._successes and not self._ended and not self._blocked

    @property
    def blocked_seconds(self) -> float | None:
        """Until those are tried again whose rows somebody else held; None: there are none."""
        return self._blocked_until - time.monotonic() if self._blocked else None

    def try_blocked_again(self) -> None:
        if self._blocked and time.monotonic() >= self._blocked_until:
            self._ended.extend(self._blocked)
            self._blocked = []
            self._meets_a_lock = True  # it may be there still: nobody else waits to find that out

    def write(self) -> None:
        """A batch of each lane. What was sent before comes first."""
        if self._successes and not (self._resent and self._ended):
            self._complete()
        if self._ended:
            self._flush()

    def _complete(self) -> None:
        """Plain successes, by a statement that has nothing to decide. If anything is the matter with one of them, all
        go the way of the other ends, which knows what to do.
        """
        batch = list(self._successes)[: self._most]  # copied in one step: others append
        executions = [execution for execution, _, _, _ in batch]
        worker_id = executions[0].task.worker_id
        completions = _completions(batch)
        is_odd = any(each.task.worker_id != worker_id for each in executions)
        if is_odd or sum(map(len, filter(None, completions.results))) > LARGEST_BATCH_CHARACTERS:
            self._go_the_long_way(batch)
            return
        claims = self._buffer.claims_ended_by(executions)
        sent_at = time.monotonic()
        try:
            settled = set(self._session.run(self._statements.complete(worker_id, completions, claims)))
        except psycopg.Error as error:
            self._go_the_long_way(batch, was_sent=is_connection_lost(error))
            self._meets_a_lock = isinstance(error, psycopg.errors.LockNotAvailable)
            if self._meets_a_lock or is_about_rows(error):
                return
            raise
        self._tally.flushed(len(batch), time.monotonic() - sent_at)
        if len(settled) < len(batch):
            self._tell_lost([_as_ended(each) for each in batch], settled)
            batch = [each for each in batch if each[0].id in settled]
        self._tally.completed((each.task, moment - each.started) for each, _, moment, _ in batch)
        self._buffer.settled(executions)
        _pop(self._successes, len(executions))
        self._most = min(self._most * 2, LARGEST_BATCH)
        self.on_settled()

    def _go_the_long_way(self, batch: Sequence[Success], *, was_sent: bool = False) -> None:
        """Before all others: what was sent before comes first."""
        self._ended.extendleft([_as_ended(each) for each in reversed(batch)])
        _pop(self._successes, len(batch))
        if was_sent:
            self._most = max(self._most // 2, 1)  # it may have been too much for the time that there is
        if was_sent or self._resent:
            self._resent += len(batch)

    def _flush(self) -> None:
        """A batch leaves the memory only when it is committed, or cannot ever be."""
        batch = self._next_batch()
        left = [each for each in batch if each.execution not in self._written] if self._written else batch
        groups = grouped(left, lambda each: each.execution.task.worker_id)
        for worker_id, own in groups.items():
            self._settle(worker_id, own)
            if len(groups) > 1:
                self._written.update(each.execution for each in own)
        _pop(self._ended, len(batch))
        self._resent = max(self._resent - len(batch), 0)
        self._written.difference_update(each.execution for each in batch)
        self._most = min(self._most * 2, LARGEST_BATCH)
        self.on_settled()

    def _next_batch(self) -> list[Ended]:
        batch: list[Ended] = []
        size = 0
        for each in list(self._ended)[: self._most]:
            size += _size(each.settlement)
            if batch and size > LARGEST_BATCH_CHARACTERS:
                break
            batch.append(each)
        return batch

    def _settle(self, worker_id: str, batch: Sequence[Ended], *, is_last_try: bool = False) -> None:
        if self._meets_a_lock:
            self._meets_a_lock = False
            self._settle_unlocked(worker_id, batch)
            return
        executions = {each.execution for each in batch}
        claims = self._buffer.claims_ended_by(executions)
        sent_at = time.monotonic()
        statement = self._statements.settle(worker_id, map(Ended.to_json, batch), claims)
        try:
            settled = set(self._run(statement, is_patient=is_last_try))
        except psycopg.errors.LockNotAvailable:
            if is_last_try:
                self._set_aside(batch)
            else:
                self._settle_unlocked(worker_id, batch)
            return
        except psycopg.Error as error:
            if not is_about_rows(error):
                self._resent = max(self._resent, len(self._next_batch())) if is_connection_lost(error) else self._resent
                self._most = max(self._most // 2, 1)
                raise
            self._settle_apart(worker_id, batch, error)
            return
        self._tally.flushed(len(batch), time.monotonic() - sent_at)
        if self._resent and len(settled) < len(batch):
            settled |= self._written_before(worker_id, batch)
        self._count(batch, settled)
        self._tell_lost(batch, settled)
        self._buffer.settled(executions)

    def _run(self, statement: Statement[T], *, is_patient: bool) -> T:
        return self._session.run_patiently(statement, LAST_TRY_SECONDS) if is_patient else self._session.run(statement)

    def _written_before(self, worker_id: str, batch: Sequence[Ended]) -> set[UUID]:
        """After a lost connection: nothing is written the second time because it was the first. What never began leaves
        no trace by which to tell.
        """
        runs = {(each.execution.id, each.execution.task.fencing_token): each.settlement.began for each in batch}
        found = set(self._session.run(self._statements.written(worker_id, [task_id for task_id, _ in runs])))
        return {run[0] for run, began in runs.items() if not began or run in found}

    def _count(self, batch: Sequence[Ended], settled: set[UUID]) -> None:
        written = [each for each in map(functools.partial(_as_written, settled), batch) if each is not None]
        self._tally.settled(
            (execution.task, settlement, moment - execution.started) for execution, settlement, moment, _, _ in written
        )

    def _settle_unlocked(self, worker_id: str, batch: Sequence[Ended]) -> None:
        """Somebody holds a row of the batch: the others do not wait for it. If nobody does, it was another lock that
        the statement needs: of a row of `claims`, or the one that commits take in turn when they notify. Once more,
        with patience, and then all of them wait.
        """
        free = set(self._session.run(self._statements.unlocked([each.execution.id for each in batch])))
        blocked = [each for each in batch if each.execution.id not in free]
        if free:
            self._settle(worker_id, [each for each in batch if each.execution.id in free], is_last_try=not blocked)
        if blocked:
            self._set_aside(blocked)

    def _set_aside(self, blocked: Sequence[Ended]) -> None:
        """Those that were before have their time: who comes later does not keep them waiting."""
        log.warning("finish.blocked", tasks=[str(each.execution.id) for each in blocked[:5]], hint="who holds the row?")
        if not self._blocked:
            self._blocked_until = time.monotonic() + BLOCKED_PAUSE_SECONDS
        self._blocked += blocked

    def _settle_apart(self, worker_id: str, batch: Sequence[Ended], error: psycopg.Error) -> None:
        """Something in the batch cannot be written: halve it until it is alone, then write what can be."""
        if len(batch) > 1:
            middle = len(batch) // 2
            self._settle(worker_id, batch[:middle])
            self._settle(worker_id, batch[middle:])
            return
        alone = batch[0]
        reason = error.diag.message_primary or type(error).__name__
        task = alone.execution.task
        log.error("finish.refused", task=task.name, task_id=task.id, reason=reason)
        if alone.settlement.problem is not None and alone.settlement.problem.code == UNSTORABLE:
            log.error(
                "finish.given_up", task=task.name, task_id=task.id, consequence="it is recovered when its lock passes"
            )
            self._buffer.settled([alone.execution])
            return
        self._settle(worker_id, [alone._replace(settlement=_without_what_was_refused(alone.settlement, reason))])

    def _tell_lost(self, batch: Sequence[Ended], settled: set[UUID]) -> None:
        if len(settled) == len(batch):
            return
        for each in batch:
            task, is_committed = each.execution.task, each.execution.is_committed
            if is_committed is False and task.id not in settled:
                self._tally.fenced(1)
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
    """What became of it in the database. One that was completed in its own transaction was given back after that, which
    is settled only if there was no completion.
    """
    is_settled = ended.execution.id in settled
    if ended.execution.is_committed is False:
        return ended if is_settled else None
    outcome: AttemptOutcome = "INTERRUPTED" if is_settled else "COMPLETED"
    state = State.PENDING if is_settled else State.COMPLETED
    return ended._replace(settlement=ended.settlement._replace(state=state, outcome=outcome))


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """By the worker's id, first of all: one that was given up for dead goes on under a new id, and what it still held
    has the old one.
    """
    grouped: dict[K, list[T]] = {}
    for item in items:
        grouped.setdefault(key(item), []).append(item)
    return grouped
