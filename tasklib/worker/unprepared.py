"""The executions of a worker that have to be marked or loaded before they start, or have to run alone."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tasklib.clock import time
from tasklib.worker.execution import Execution

if TYPE_CHECKING:
    from collections.abc import Callable

    from tasklib.worker.limited_queues import LimitedQueue

SUSPECT_PATIENCE_SECONDS = 10.0  # how long a suspect waits for the worker to be empty, or for a process
DRAIN_SECONDS = 0.25  # how long others wait for a suspect that can have a process instead
PREPARE_FIRST_SECONDS = 0.05  # an execution that has waited for longer gets the next free slot


class Unprepared(deque[Execution]):
    """In the order in which they are prepared. The buffer's lock guards it."""

    def put(self, execution: Execution) -> None:
        """Suspects come first, because they have begun once."""
        execution.waits_since = min(execution.waits_since, time.monotonic())
        self.insert(len(self.suspects()) if execution.task.suspect else len(self), execution)
        if execution.limit is not None:
            execution.limit.waiting += 1

    def remove(self, execution: Execution) -> None:
        super().remove(execution)
        if execution.limit is not None:
            execution.limit.waiting -= 1

    def last_of(self, limit: LimitedQueue, most: int) -> list[Execution]:
        """Those of this queue that would be the last to start."""
        return [each for each in self if each.limit is limit][::-1][:most]

    def suspects(self) -> list[Execution]:
        return [each for each in self if each.task.suspect]

    def impatient_suspects(self, *, one_runs_alone: bool, is_full: bool) -> list[Execution]:
        """Those that go back to the queue, because another worker may run them sooner."""
        now = time.monotonic()

        def is_impatient(suspect: Execution) -> bool:
            if suspect.may_have_own_process and one_runs_alone:
                return True
            is_patient = suspect.is_patient and not (suspect.may_have_own_process and is_full)
            return now - suspect.waits_since > (SUSPECT_PATIENCE_SECONDS if is_patient else DRAIN_SECONDS)

        return [each for each in self.suspects() if is_impatient(each)]

    def unblocked(self) -> int:
        """How many there are, without those whose rows another session has locked. Those keep no other task out."""
        return sum(not each.is_blocked for each in self)

    def one_must_be_alone(self) -> bool:
        """One waits for the worker to be empty, so nothing starts meanwhile. An execution that may have a process of
        its own instead holds up the others only for a moment.
        """
        since = time.monotonic() - DRAIN_SECONDS
        return any(each.must_be_alone and (not each.may_have_own_process or each.waits_since > since) for each in self)

    def next_fitting(self, fits: Callable[[Execution], bool]) -> Execution | None:
        """An empty worker is rare: it runs the suspect that needs one. Other executions find a slot elsewhere."""
        now = time.monotonic()
        fitting = [each for each in self if each.not_before <= now and fits(each)]
        alone = (each for each in fitting if each.must_be_alone and not each.may_have_own_process)
        return next(alone, fitting[0] if fitting else None)

    def reserved(self) -> int:
        """Slots for which suspects were claimed. Without this, other tasks fill them while the suspects are marked."""
        return sum(each.is_contained for each in self)

    def hold_back_others(self, fits: Callable[[Execution], bool]) -> bool:
        """Executions that could start at once have to wait for one of these, which would never find a free slot."""
        if self.one_must_be_alone():
            return True
        now = time.monotonic()
        return any(
            each.waits_since < now - PREPARE_FIRST_SECONDS and each.not_before <= now and fits(each) for each in self
        )
