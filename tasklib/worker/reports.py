"""Reports of the runners and the claimer about executions: that one begins, how far it is, and how it has ended."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tasklib.attempt_log import log_attempt
from tasklib.clock import time
from tasklib.log import log, task_log, task_logger
from tasklib.outcomes import (
    CancelInterrupt,
    Completed,
    Failed,
    Interrupted,
    Outcome,
    Rules,
    Settlement,
    Snoozed,
    TimedOut,
    decide,
    succeeded,
)
from tasklib.worker.forks import call_in_one_process

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from tasklib.runtime.loop import Loop
    from tasklib.worker.basis import Basis
    from tasklib.worker.buffer import Buffer
    from tasklib.worker.execution import Execution
    from tasklib.worker.finish_loop import FinishLoop
    from tasklib.worker.lease import Lease
    from tasklib.worker.runners import Report
    from tasklib.worker.timeouts import TimeoutWatch


class Reports:
    def __init__(
        self,
        basis: Basis,
        *,
        buffer: Buffer,
        finish_loop: FinishLoop,
        lease: Lease,
        timeouts: TimeoutWatch,
        loops: Mapping[str, Loop],
    ) -> None:
        self._config = basis.config
        self._clock = basis.clock
        self._observer = basis.observer
        self.buffer = buffer
        self._finish_loop = finish_loop
        self._lease = lease
        self._timeouts = timeouts
        self._loops = loops
        self._default_rules = Rules.of(basis.config)
        self._rules: dict[Any, Rules] = {}  # by backoff

    def begin(self, execution: Execution) -> bool:
        """Before its first line. False: it has expired."""
        if execution.task.expires_at is not None and not execution.is_marked and execution.is_late(self._clock.now()):
            return False
        execution.begin(self._config.timeout_delta_seconds)
        self._observer.began(execution)
        if self._finish_loop.is_resting and not execution.is_marked:
            self._loops["finish"].wake()
        next_at = self._timeouts.next_at
        if execution.deadline < next_at or self._lease.valid_until < next_at:
            self._loops["watch"].wake()
        return True

    def note_progress(self, execution: Execution, progress: str) -> None:
        if self._finish_loop.note_progress(execution, progress):
            self._loops["finish"].wake()

    def give_back(self, executions: Iterable[Execution]) -> None:
        """They have not begun in this worker, and cost no attempt."""
        for each in executions:
            self.report(each, Interrupted(began=each.is_marked, ran=False))

    def report(self, execution: Execution, outcome: Outcome) -> None:
        """It has ended, or will not begin."""
        self.report_all([(execution, outcome, time.monotonic())])

    def report_all(self, reports: Sequence[Report]) -> None:
        """The executions that ended in one turn of the event loop. The common work is done once for all of them."""
        done: list[tuple[Execution, float]] = []
        reading = self._clock.reading
        is_logged = task_logger.isEnabledFor(logging.INFO)
        for execution, outcome, moment in reports:
            self._observer.ended(execution)  # before the finish loop can settle it
            if execution.loaded_bytes:
                execution.unload()
            seconds = moment - execution.started if execution.has_begun else 0.0
            if isinstance(outcome, Completed):  # needs neither rules nor the date
                self._finish_loop.add_success(execution, outcome, moment, reading)
                done.append((execution, seconds))
                if is_logged:
                    _log(execution, succeeded(outcome), seconds)
                continue
            if isinstance(outcome, Snoozed) and outcome.pause_reason is not None:
                self._finish_loop.add_pause(execution, outcome)
            settlement = self.decide(execution, outcome, reading.at(moment))
            self._finish_loop.add(execution, settlement, moment, reading)
            if settlement.began:
                done.append((execution, seconds))
            else:
                self.buffer.dropped(execution)
            if is_logged or settlement.problem is not None:
                _log(execution, settlement, seconds)
        if self.buffer.limits:
            self._tell_breakers(reports)
        self.buffer.done(done)
        if self._finish_loop.is_to_be_woken:
            self._loops["finish"].wake()

    def _tell_breakers(self, reports: Sequence[Report]) -> None:
        with self.buffer.lock:
            for execution, outcome, _ in reports:
                if execution.limit is not None and isinstance(outcome, Completed | Failed | TimedOut):
                    code = None if isinstance(outcome, Completed) else outcome.problem.code
                    execution.limit.note_attempt(execution.breaker_epoch, code)

    def decide(self, execution: Execution, outcome: Outcome, now: datetime) -> Settlement:
        """The backoff is a function of the user's: if it fails, the default policy decides."""
        function = execution.function
        backoff = (function.task_options.backoff if function is not None else None) or self._default_rules.backoff
        rules = self._rules.get(backoff)
        if rules is None:
            rules = self._rules[backoff] = replace(self._default_rules, backoff=backoff)
        try:
            return call_in_one_process(functools.partial(decide, execution.task, outcome, now, rules))
        except BaseException:  # noqa: BLE001 - user code may raise anything
            log.exception("backoff.failed", task=execution.task.name, consequence="the default policy was used")
            return decide(execution.task, outcome, now, self._default_rules)

    def cancel(self, execution: Execution) -> None:
        """The database says that it was asked to stop."""
        if execution.task.cancel_asked_at is not None:
            return
        execution.ask_to_cancel(self._clock.now(), self._config.timeout_delta_seconds)
        self._observer.must_end_by(execution, execution.must_end_by)
        execution.interrupt(CancelInterrupt)
        self._loops["watch"].wake()
        self.give_back(self.buffer.remove_waiting([execution]))


def _log(execution: Execution, settlement: Settlement, seconds: float) -> None:
    log_attempt(task_log, execution.task, settlement, attempt=execution.task.attempt + 1, seconds=seconds)
