"""Decides when outcomes are written; `unwritten` and the OutcomeWriter decide how. It also writes which tasks are
running, and how far they are.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from typing import TYPE_CHECKING, Any

import psycopg

from tasklib.clock import time
from tasklib.database_errors import is_connection_lost
from tasklib.log import log
from tasklib.outcomes import Completed, Settlement, Snoozed, succeeded
from tasklib.runtime.bad_rows import first_line, send_apart
from tasklib.statements import Started, WorkerStatements
from tasklib.worker.unwritten import Ended, UnwrittenOutcomes, grouped

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from uuid import UUID

    from tasklib.runtime.database_clock import DatabaseClock, Reading
    from tasklib.runtime.metrics import WorkerMetrics
    from tasklib.runtime.session import Session
    from tasklib.worker.buffer import Buffer
    from tasklib.worker.execution import Execution

GATHER_SECONDS = 0.003  # between two statements, unless there is enough for one
WORTHWHILE_BATCH = 200
MARK_AFTER_SECONDS = 0.05  # `running` is visible within 100 ms
LOCKED_PAUSE_SECONDS = 0.5  # until a locked row is tried again
PROGRESS_EVERY_SECONDS = 0.5


class FinishLoop:
    def __init__(
        self,
        session: Session,
        statements: WorkerStatements,
        buffer: Buffer,
        clock: DatabaseClock,
        *,
        metrics: WorkerMetrics,
    ) -> None:
        self._session = session
        self._statements = statements
        self._buffer = buffer
        self._clock = clock
        self.outcome_writer = UnwrittenOutcomes(session, statements, buffer, metrics)
        self._progress: dict[Execution, str] = {}  # the last report of each task that is not written yet
        self._progress_at = 0.0
        self._pauses: deque[tuple[Execution, Snoozed]] = deque()
        self._flushed_at = -math.inf
        self._is_gathering = False  # the next round comes within GATHER_SECONDS
        self.is_resting = False  # for longer than a task may stay unmarked: to start one wakes the loop

    def add(self, execution: Execution, settlement: Settlement, moment: float, reading: Reading) -> None:
        self.outcome_writer.add(Ended(execution, settlement, moment, reading, self.take_progress(execution)))

    def add_success(self, execution: Execution, outcome: Completed, moment: float, reading: Reading) -> None:
        """Nearly every outcome is a plain success, unless there is progress or a transaction to write with it."""
        if execution.is_committed is not False or execution in self._progress:
            self.add(execution, succeeded(outcome), moment, reading)
        else:
            self.outcome_writer.add_success((execution, outcome.result, moment, reading))

    def note_progress(self, execution: Execution, progress: str) -> bool:
        """True: it is the first report that waits, and the caller has to wake the loop."""
        is_first = not self._progress
        self._progress[execution] = progress
        return is_first

    def take_progress(self, execution: Execution) -> str | None:
        """Its last report, if that is not written yet."""
        return self._progress.pop(execution, None)

    def add_pause(self, execution: Execution, snoozed: Snoozed) -> None:
        """It asks for its queue to be paused. That is written before the outcome, which makes the task claimable."""
        self._pauses.append((execution, snoozed))

    def run_once(self) -> float | None:
        self.is_resting = False
        self._write_pauses()
        self.outcome_writer.try_blocked_again()
        self._is_gathering = False
        while len(self.outcome_writer) and self._gathering_left() <= 0:
            self._flushed_at = time.monotonic()
            self.outcome_writer.write()
        self._mark_long_runners()
        self._write_progress()
        return self._next_round()

    @property
    def is_to_be_woken(self) -> bool:
        """Whether the caller that has added something has to wake the loop."""
        return not self._is_gathering or len(self.outcome_writer) >= WORTHWHILE_BATCH

    def _gathering_left(self) -> float:
        """Seconds until the next batch is written. A statement for every turn of the tasks' event loop would cost
        more than the tasks themselves. After an idle while, an outcome is written at once.
        """
        if len(self.outcome_writer) >= WORTHWHILE_BATCH:
            return 0.0
        return self._flushed_at + GATHER_SECONDS - time.monotonic()

    def mark(self, executions: Sequence[Execution], session: Session) -> dict[UUID, bool]:
        """For each task that is still this worker's: whether it is `running` in the database from now on. It is not
        if its row is locked.
        """
        marks: dict[UUID, bool] = {}
        for worker_id, own in grouped(executions, lambda each: each.task.worker_id).items():
            started = [
                Started(
                    each.id,
                    each.task.fencing_token,
                    each.started_by(self._clock),
                    each.is_contained,
                    each.task.on_crash == "fail",
                )
                for each in own
            ]
            start = functools.partial(self._statements.start, worker_id)

            def send(part: Sequence[Started]) -> dict[UUID, bool]:
                try:
                    return session.run(start(part))  # noqa: B023 - sent here
                except psycopg.errors.LockNotAvailable:  # a lock on the table: the statement waits for no row
                    return dict.fromkeys((each.id for each in part), False)

            for answer in send_apart(started, send, _tell_unmarked):
                marks |= answer
        for each in executions:
            each.is_marked = marks.get(each.id, False)
        return marks

    def _mark_long_runners(self) -> None:
        now = time.monotonic()
        begun_by = now - MARK_AFTER_SECONDS
        long = [
            each
            for each in self._buffer.executing()
            if each.started <= begun_by and not each.is_marked and not each.needs_mark and each.not_before <= begun_by
        ]
        if long:
            marks = self.mark(long, self._session)
            for each in long:
                if each.id in marks and not each.is_marked:
                    each.not_before = now + LOCKED_PAUSE_SECONDS
                else:
                    each.is_marked = True  # also if it belongs to another worker: its end will tell

    def _write_pauses(self) -> None:
        while self._pauses:
            execution, snoozed = self._pauses[0]
            task = execution.task
            pause = self._statements.policies.pause(
                task.queue, snoozed.pause_reason or "", snoozed.pause_until, f"task {task.id}"
            )
            try:
                self._session.run(pause)
            except psycopg.Error as error:
                if is_connection_lost(error):
                    raise
                log.error("queue.not_paused", queue=task.queue, task_id=task.id, error=first_line(error))
            self._pauses.popleft()

    def _write_progress(self) -> None:
        """A report is kept until it is written. If the task ends in the meantime, its outcome takes the report along.
        Locked rows are skipped.
        """
        if not self._progress or time.monotonic() < self._progress_at:
            return
        self._progress_at = time.monotonic() + PROGRESS_EVERY_SECONDS
        for worker_id, own in grouped(list(self._progress.items()), lambda said: said[0].task.worker_id).items():
            said = [(each.id, each.task.fencing_token, progress) for each, progress in own]
            note = functools.partial(self._statements.note_progress, worker_id)
            refused: list[UUID] = []

            def refuse(row: tuple[UUID, int, str], error: psycopg.Error) -> None:
                refused.append(row[0])  # noqa: B023 - called here
                _tell_unmarked(row, error)

            def send(part: Sequence[tuple[UUID, int, str]]) -> Collection[UUID]:
                try:
                    return self._session.run(note(part))  # noqa: B023 - sent here
                except psycopg.errors.LockNotAvailable:  # a lock on the table: later
                    return []

            answers = send_apart(said, send, refuse)
            written = {task_id for answer in answers for task_id in answer}.union(refused)
            for each, progress in own:
                if each.id in written and self._progress.get(each) is progress:
                    self._progress.pop(each, None)

    def _next_round(self) -> float | None:
        self.is_resting = True
        self._is_gathering = len(self.outcome_writer) > 0
        pauses = [
            self._next_mark(),
            self.outcome_writer.blocked_seconds,
            self._progress_at - time.monotonic() if self._progress else None,
            self._gathering_left() if self._is_gathering else None,
        ]
        pause = max(min((each for each in pauses if each is not None), default=math.inf), 0.001)
        if pause <= MARK_AFTER_SECONDS:
            self.is_resting = False  # early enough for tasks that begin meanwhile
        return None if math.isinf(pause) else pause

    def _next_mark(self) -> float | None:
        """A task that has not begun yet has no start to count from; its start wakes the loop."""
        starts = [
            max(each.started, each.not_before)
            for each in self._buffer.executing()
            if not each.is_marked and each.has_begun
        ]
        return min(starts) + MARK_AFTER_SECONDS - time.monotonic() if starts else None


def _tell_unmarked(row: tuple[Any, ...], error: psycopg.Error) -> None:
    """The database does not show that this task runs, or how far it is. Other tasks are not affected."""
    log.error("task.not_marked", task_id=row[0], error=first_line(error))
