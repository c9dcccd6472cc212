"""Writes what executions came to, in batches, and marks long runners.

Outcomes are kept in memory until the database has them: an outage costs time, not results. What the database does not
take belongs to another worker by now, and is dropped. One row that cannot be written does not hold up the others.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import psycopg

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
    from tasklib.statements import WorkerStatements
    from tasklib.worker.buffer import Buffer
    from tasklib.worker.clock import DatabaseClock, Reading
    from tasklib.worker.execution import Execution
    from tasklib.worker.session import Session
    from tasklib.worker.tally import Tally

T = TypeVar("T")
K = TypeVar("K")
UNSTORABLE = "UNSTORABLE"
LARGEST_BATCH = 1_000
LARGEST_BATCH_CHARACTERS = 8_000_000
GATHER_SECONDS = 0.003  # between two statements, unless there is enough for one
WORTHWHILE_BATCH = 200
BLOCKED_PAUSE_SECONDS = 2.0
MARK_AFTER_SECONDS = 0.05  # `running` is visible within 100 ms
PROGRESS_EVERY_SECONDS = 0.5
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


class Finisher:
    def __init__(
        self, session: Session, statements: WorkerStatements, buffer: Buffer, clock: DatabaseClock, *, tally: Tally
    ) -> None:
        self._session = session
        self._statements = statements
        self._buffer = buffer
        self._clock = clock
        self._tally = tally
        self._successes: deque[Success] = deque()
        self._ended: deque[Ended] = deque()  # all else that ended
        self._most = LARGEST_BATCH
        self._meets_a_lock = False  # somebody holds a row of what comes next
        self._blocked: list[Ended] = []
        self._blocked_until = 0.0
        self._resent = 0  # so many, from the first on, were sent before: their answer was lost
        self._written: set[Execution] = set()  # those of a batch of which others could not be written
        self._progress: dict[Execution, str] = {}  # the last word of each that has one unwritten
        self._progress_at = 0.0
        self._flushed_at = -math.inf
        self._is_gathering = False  # it looks again within GATHER_SECONDS
        self.is_resting = False  # for longer than a task may go unmarked: who starts one has to wake it
        self.on_settled: Callable[[], None] = lambda: None

    def add(self, execution: Execution, settlement: Settlement, moment: float, reading: Reading) -> None:
        self._ended.append(Ended(execution, settlement, moment, reading, self.take_progress(execution)))

    def add_success(self, execution: Execution, outcome: Completed, moment: float, reading: Reading) -> None:
        """A plain one is nearly every end, unless there is more to say of it."""
        if execution.is_committed is not False or execution in self._progress:
            self.add(execution, succeeded(outcome), moment, reading)
        else:
            self._successes.append((execution, outcome.result, moment, reading))

    def note_progress(self, execution: Execution, progress: str) -> bool:
        """True: it is the first to be written, and somebody should wake us."""
        is_first = not self._progress
        self._progress[execution] = progress
        return is_first

    def take_progress(self, execution: Execution) -> str | None:
        """Its last word, if that is not written yet."""
        return self._progress.pop(execution, None)

    @property
    def is_empty(self) -> bool:
        return not self._successes and not self._ended and not self._blocked

    def run_once(self) -> float | None:
        self.is_resting = False
        if self._blocked and time.monotonic() >= self._blocked_until:
            self._ended.extend(self._blocked)
            self._blocked = []
        self._is_gathering = False
        while (self._successes or self._ended) and self._gathering_left() <= 0:
            self._flushed_at = time.monotonic()
            if self._successes and not (self._resent and self._ended):  # what was sent before comes first
                self._complete()
            if self._ended:
                self._flush()
        self._mark_long_runners()
        self._write_progress()
        return self._next_round()

    @property
    def is_to_be_woken(self) -> bool:
        """By who has added something: it does not look by itself soon enough."""
        return not self._is_gathering or len(self._successes) + len(self._ended) >= WORTHWHILE_BATCH

    def _gathering_left(self) -> float:
        """A statement for every turn of the tasks' loop would cost the server, and the loop's own thread, more than the
        tasks themselves. After a while without any, none is kept waiting.
        """
        if len(self._successes) + len(self._ended) >= WORTHWHILE_BATCH:
            return 0.0
        return self._flushed_at + GATHER_SECONDS - time.monotonic()

    def mark(self, executions: Sequence[Execution], session: Session) -> list[Execution]:
        """Those that are `running` in the database from now on; the others are somebody else's."""
        marked = set()
        for worker_id, own in _grouped(executions, lambda each: each.task.worker_id).items():
            started = [(each.id, each.task.fencing_token, each.started_by(self._clock)) for each in own]
            marked |= set(session.run(self._statements.start(worker_id, started)))
        for each in executions:
            each.is_marked = each.id in marked
        return [each for each in executions if each.is_marked]

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
        groups = _grouped(left, lambda each: each.execution.task.worker_id)
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
            size += len(each.settlement.result or "") + len(
                each.settlement.problem.text if each.settlement.problem else ""
            )
            if batch and size > LARGEST_BATCH_CHARACTERS:
                break
            batch.append(each)
        return batch

    def _settle(self, worker_id: str, batch: Sequence[Ended]) -> None:
        if self._meets_a_lock:
            self._meets_a_lock = False
            self._settle_unlocked(worker_id, batch)
            return
        executions = {each.execution for each in batch}
        claims = self._buffer.claims_ended_by(executions)
        sent_at = time.monotonic()
        try:
            settled = set(self._session.run(self._statements.settle(worker_id, map(Ended.to_json, batch), claims)))
        except psycopg.errors.LockNotAvailable:
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
        """Somebody holds a row of the batch: the others do not wait for it."""
        free = set(self._session.run(self._statements.unlocked([each.execution.id for each in batch])))
        blocked = [each for each in batch if each.execution.id not in free]
        if len(blocked) < len(batch):
            self._settle(worker_id, [each for each in batch if each.execution.id in free])
        if blocked:
            log.warning(
                "finish.blocked", tasks=[str(each.execution.id) for each in blocked[:5]], hint="who holds the row?"
            )
            self._blocked += blocked
            self._blocked_until = time.monotonic() + BLOCKED_PAUSE_SECONDS

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

    def _mark_long_runners(self) -> None:
        now = time.monotonic()
        long = [
            each
            for each in self._buffer.executing()
            if not each.is_marked and not each.needs_mark and now - each.started >= MARK_AFTER_SECONDS
        ]
        if long:
            self.mark(long, self._session)
            for each in long:
                each.is_marked = True  # somebody else's too: the finish will tell

    def _write_progress(self) -> None:
        """A word is kept until it is written: the task may end in the meantime, and takes it along."""
        if not self._progress or time.monotonic() < self._progress_at:
            return
        self._progress_at = time.monotonic() + PROGRESS_EVERY_SECONDS
        for worker_id, own in _grouped(list(self._progress.items()), lambda said: said[0].task.worker_id).items():
            said = [(each.id, each.task.fencing_token, progress) for each, progress in own]
            self._session.run(self._statements.note_progress(worker_id, said))
            for each, progress in own:
                if self._progress.get(each) is progress:
                    self._progress.pop(each, None)

    def _next_round(self) -> float | None:
        self.is_resting = True
        self._is_gathering = bool(self._successes or self._ended)
        pauses = [
            self._next_mark(),
            self._progress_at - time.monotonic() if self._progress else None,
            self._gathering_left() if self._is_gathering else None,
        ]
        pause = max(min((each for each in pauses if each is not None), default=math.inf), 0.001)
        if pause <= MARK_AFTER_SECONDS:
            self.is_resting = False  # by then it is early enough to see what begins meanwhile
        return None if math.isinf(pause) else pause

    def _next_mark(self) -> float | None:
        """One that was taken and has not begun yet has no time to count from; who begins it wakes us."""
        started = [each.started for each in self._buffer.executing() if not each.is_marked and each.has_begun]
        if not started:
            return max(self._blocked_until - time.monotonic(), 0.001) if self._blocked else None
        return max(min(started) + MARK_AFTER_SECONDS - time.monotonic(), 0.001)


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


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """By the worker's id, first of all: one that was given up for dead goes on under a new id, and what it still held
    has the old one.
    """
    grouped: dict[K, list[T]] = {}
    for item in items:
        grouped.setdefault(key(item), []).append(item)
    return grouped
