"""Enforces timeouts: interrupts tasks whose time is up, and all of them when the lease has run out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tasklib.clock import time
from tasklib.log import log
from tasklib.outcomes import StopInterrupt, TimeoutInterrupt

if TYPE_CHECKING:
    from tasklib.runtime.observer import WorkerObserver
    from tasklib.worker.buffer import Buffer
    from tasklib.worker.execution import Execution
    from tasklib.worker.lease import Lease

STARVED_PAUSE_SECONDS = 0.05  # until the next look whether the lease could be renewed


class TimeoutWatch:
    def __init__(self, buffer: Buffer, lease: Lease, observer: WorkerObserver) -> None:
        self._buffer = buffer
        self._lease = lease
        self._observer = observer
        self.next_at = math.inf  # monotonic: a task with an earlier deadline has to wake the loop

    def run_once(self) -> float | None:
        self.next_at = math.inf  # what begins from here on wakes the loop
        now = time.monotonic()
        executing = self._buffer.executing()
        if executing and self._lease.is_lost():
            self._fence(executing)
        for each in executing:
            self._check(each, now)
        next_at = min((self._next(each, now) for each in executing), default=math.inf)
        if executing and not self._lease.is_lost():
            next_at = min(next_at, max(self._lease.valid_until, now + STARVED_PAUSE_SECONDS))
        self.next_at = next_at
        return None if math.isinf(next_at) else max(next_at - time.monotonic(), 0.001)

    def _fence(self, executing: list[Execution]) -> None:
        """Other workers may be given these tasks at any moment, so they must stop. Ended ones keep their outcomes."""
        told = [each for each in executing if each.interrupt_kind is None]
        for each in told:
            each.interrupt(StopInterrupt)
        if told:
            log.error("lease.expired", worker_id=self._lease.worker_id, told_to_stop=len(told))

    def _check(self, execution: Execution, now: float) -> None:
        if now >= execution.deadline:
            execution.interrupt(TimeoutInterrupt)
        if now >= execution.must_end_by and not execution.is_reported_stuck:
            execution.is_reported_stuck = True
            self._observer.must_end_by(execution, execution.must_end_by)
            log.error(
                "task.stuck", task=execution.task.name, task_id=execution.id, seconds=round(now - execution.started, 1),
                consequence="it does not stop; it keeps its slot and its lease until it does, or its process dies",
            )  # fmt: skip

    def _next(self, execution: Execution, now: float) -> float:
        return min((each for each in (execution.deadline, execution.must_end_by) if each > now), default=math.inf)
