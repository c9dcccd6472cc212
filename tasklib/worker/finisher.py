"""When what executions came to is written, and what is written of those that still run: that they do, and how far.

Outcomes are kept in memory until the database has them: an outage costs time, not results. How they are written is the
settler's business.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import psycopg

from tasklib.clock import time
from tasklib.duties.apart import first_line, send_apart
from tasklib.log import log
from tasklib.outcomes import succeeded
from tasklib.statements import Started
from tasklib.worker.settler import Ended, Settler, grouped

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from uuid import UUID

    from tasklib.outcomes import Completed, Settlement
    from tasklib.statements import WorkerStatements
    from tasklib.worker.buffer import Buffer
    from tasklib.worker.clock import DatabaseClock, Reading
    from tasklib.worker.execution import Execution
    from tasklib.worker.session import Session
    from tasklib.worker.tally import Tally

GATHER_SECONDS = 0.003  # between two statements, unless there is enough for one
WORTHWHILE_BATCH = 200
MARK_AFTER_SECONDS = 0.05  # `running` is visible within 100 ms
LOCKED_PAUSE_SECONDS = 0.5  # until one is tried again whose row somebody has locked
PROGRESS_EVERY_SECONDS = 0.5


class Finisher:
    def __init__(
        self, session: Session, statements: WorkerStatements, buffer: Buffer, clock: DatabaseClock, *, tally: Tally
    ) -> None:
        self._session = session
        self._statements = statements
        self._buffer = buffer
        self._clock = clock
        self.settler = Settler(session, statements, buffer, tally)
        self._progress: dict[Execution, str] = {}  # the last word of each that has one unwritten
        self._progress_at = 0.0
        self._flushed_at = -math.inf
        self._is_gathering = False  # it looks again within GATHER_SECONDS
        self.is_resting = False  # for longer than a task may go unmarked: who starts one has to wake it

    def add(self, execution: Execution, settlement: Settlement, moment: float, reading: Reading) -> None:
        self.settler.add(Ended(execution, settlement, moment, reading, self.take_progress(execution)))

    def add_success(self, execution: Execution, outcome: Completed, moment: float, reading: Reading) -> None:
        """A plain one is nearly every end, unless there is more to say of it."""
        if execution.is_committed is not False or execution in self._progress:
            self.add(execution, succeeded(outcome), moment, reading)
        else:
            self.settler.add_success((execution, outcome.result, moment, reading))

    def note_progress(self, execution: Execution, progress: str) -> bool:
        """True: it is the first to be written, and somebody should wake us."""
        is_first = not self._progress
        self._progress[execution] = progress
        return is_first

    def take_progress(self, execution: Execution) -> str | None:
        """Its last word, if that is not written yet."""
        return self._progress.pop(execution, None)

    def run_once(self) -> float | None:
        self.is_resting = False
        self.settler.try_blocked_again()
        self._is_gathering = False
        while len(self.settler) and self._gathering_left() <= 0:
            self._flushed_at = time.monotonic()
            self.settler.write()
        self._mark_long_runners()
        self._write_progress()
        return self._next_round()

    @property
    def is_to_be_woken(self) -> bool:
        """By who has added something: it does not look by itself soon enough."""
        return not self._is_gathering or len(self.settler) >= WORTHWHILE_BATCH

    def _gathering_left(self) -> float:
        """A statement for every turn of the tasks' loop would cost the server, and the loop's own thread, more than the
        tasks themselves. After a while without any, none is kept waiting.
        """
        if len(self.settler) >= WORTHWHILE_BATCH:
            return 0.0
        return self._flushed_at + GATHER_SECONDS - time.monotonic()

    def mark(self, executions: Sequence[Execution], session: Session) -> dict[UUID, bool]:
        """Whether it is `running` in the database from now on, for each that is still this worker's. If it is not,
        somebody has locked its row, and nobody waits for that.
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
                except psycopg.errors.LockNotAvailable:  # of the table: no row is waited for
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
                    each.is_marked = True  # somebody else's too: the finish will tell

    def _write_progress(self) -> None:
        """A word is kept until it is written: the task may end in the meantime, and takes it along. Nobody waits for a
        row that is locked.
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
                except psycopg.errors.LockNotAvailable:  # of the table: later
                    return []

            answers = send_apart(said, send, refuse)
            written = {task_id for answer in answers for task_id in answer}.union(refused)
            for each, progress in own:
                if each.id in written and self._progress.get(each) is progress:
                    self._progress.pop(each, None)

    def _next_round(self) -> float | None:
        self.is_resting = True
        self._is_gathering = len(self.settler) > 0
        pauses = [
            self._next_mark(),
            self.settler.blocked_seconds,
            self._progress_at - time.monotonic() if self._progress else None,
            self._gathering_left() if self._is_gathering else None,
        ]
        pause = max(min((each for each in pauses if each is not None), default=math.inf), 0.001)
        if pause <= MARK_AFTER_SECONDS:
            self.is_resting = False  # by then it is early enough to see what begins meanwhile
        return None if math.isinf(pause) else pause

    def _next_mark(self) -> float | None:
        """One that was taken and has not begun yet has no time to count from; who begins it wakes us."""
        starts = [
            max(each.started, each.not_before)
            for each in self._buffer.executing()
            if not each.is_marked and each.has_begun
        ]
        return min(starts) + MARK_AFTER_SECONDS - time.monotonic() if starts else None


def _tell_unmarked(row: tuple[Any, ...], error: psycopg.Error) -> None:
    """That it runs, or how far it is, is not to be seen in the database. The others are not kept from it."""
    log.error("task.not_marked", task_id=row[0], error=first_line(error))
