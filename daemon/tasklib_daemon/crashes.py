"""Recovers the tasks of a worker of this daemon that has died: those that executed run again at once, and those that
only waited in its buffer are given back without a charge.

The supervisor has seen the death, and the scoreboard shows which tasks executed. So no lease has to run out. A claim
that was under way may still commit after the death. So the worker's backends are terminated first, and its tasks are
looked for again after one and after five seconds. Every write is guarded: a reaper that comes first, or a report that
comes twice, does no harm.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import psycopg
import pydantic.dataclasses
from psycopg import conninfo
from pydantic_core import to_jsonable_python

from tasklib.connection_string import connection_string
from tasklib.database_errors import is_connection_lost
from tasklib.log import log
from tasklib.outcomes import (
    Cancelled,
    Crashed,
    HeldTask,
    Interrupted,
    Outcome,
    Problem,
    Rules,
    TimedOut,
    decide,
    is_told_by_worker,
)
from tasklib.runtime.bad_rows import first_line
from tasklib.runtime.metrics import SECONDS, WorkerMetrics, histogram
from tasklib.runtime.outcome_writer import Decided, RecoveryWriter
from tasklib.states import State
from tasklib_daemon.plan import Cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from tasklib.config import Config
    from tasklib.duties.statements import KeeperStatements
    from tasklib.runtime.session import Session
    from tasklib.statements import WorkerStatements

SWEEPS_AGAIN_SECONDS = (1.0, 5.0)  # after the first
BACKENDS_SECONDS = 2.0  # how long their end is waited for
AFTER_FAILURE_SECONDS = 1.0
MOST_FAILURES = 10  # then the reaper does it, when the lease has run out
_LONGEST_APPLICATION_NAME = 63
# Keepers and reapers write and count these. A worker does so only if an isolated task's own process died.
_OF_RECOVERERS = frozenset({"WORKER_FAILURE", "LEASE_LOST"})


class Executing(NamedTuple):
    task_id: UUID
    token: int
    seconds: float  # since it started


class Done(NamedTuple):
    """Its function has ended; whether the outcome was written is unknown."""

    task_id: UUID
    token: int


@pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CrashReport:
    """What the supervisor knows of a dead worker, from `waitpid` and from its scoreboard."""

    worker_id: str
    name: str
    hostname: str
    pid: int
    slot: int
    how: str
    cause: Cause
    guilty: UUID | None = None
    executing: tuple[Executing, ...] = ()
    done: tuple[Done, ...] = ()
    backends: tuple[int, ...] = ()
    died: float = field(default_factory=time.monotonic)
    is_counted: bool = False  # the outcomes that it had written are in its counters

    def to_message(self) -> dict[str, Any]:
        """As plain values, from which pydantic makes an equal report: `CrashReport(**message)`."""
        return dict(to_jsonable_python(self))


# --- what becomes of each task: pure ---


class Verdict:
    """Decides what becomes of the tasks that a dead worker held."""

    def __init__(self, report: CrashReport, rules: Rules) -> None:
        self._report = report
        self._rules = rules
        self._executing = {(each.task_id, each.token): each.seconds for each in report.executing}
        self._done = {(each.task_id, each.token) for each in report.done}

    def of(self, task: HeldTask, now: datetime, since_death_seconds: float) -> Decided:
        seconds = self._executing.get((task.id, task.fencing_token))
        if seconds is None and self._is_last_suspect(task):
            seconds = 0.0
        if seconds is None:
            return self._of_idle(task, now)
        # It was executing, even if it was not marked as running yet.
        started_at = now - timedelta(seconds=seconds + since_death_seconds)
        is_marked = task.state == State.RUNNING
        begun = task._replace(
            state=State.RUNNING,
            started_at=task.started_at if is_marked else started_at,
            attempt=task.attempt + (not is_marked),
        )
        settlement = decide(begun, self._outcome(task), now, self._rules)
        if self._is_guilt_unknown() and settlement.state == State.PENDING:
            settlement = settlement._replace(suspect=True)
        return Decided(begun, settlement, None)

    def _is_last_suspect(self, task: HeldTask) -> bool:
        """It had just ended, and no other task was there to blame. A task that kills its worker a moment after it has
        returned would otherwise run again for ever.
        """
        is_done = (task.id, task.fencing_token) in self._done
        return self._report.cause == "crash" and is_done and len(self._done) == 1 and not self._executing

    def _of_idle(self, task: HeldTask, now: datetime) -> Decided:
        """It is given back. With `on_crash="fail"` it does not run again if it may have run: it is marked before its
        first line.
        """
        is_done = (task.id, task.fencing_token) in self._done
        is_marked = task.state == State.RUNNING
        given_back = Interrupted(began=is_done or is_marked, ran=is_done or (is_marked and task.on_crash == "fail"))
        return Decided(task, decide(task, given_back, now, self._rules), None if is_done else task.state)

    def _outcome(self, task: HeldTask) -> Outcome:
        """Of an executing task. A kill because of one task does not charge the others."""
        report = self._report
        is_guilty = task.id == report.guilty
        match report.cause:
            case "crash":
                return Crashed(report.how)
            case "hard_timeout" if is_guilty:
                reason = f"timeout_seconds={task.timeout_seconds or 0:g} passed, and it did not stop: {report.how}"
                return TimedOut(Problem("TIMEOUT", reason, f"TimeoutError: {reason}"))
            case "cancelled" if is_guilty:
                return Cancelled(Problem("CANCELLED", report.how, f"Cancelled: on request: {report.how}"))
            case "hang" | "memory" if is_guilty or (report.guilty is None and len(report.executing) == 1):
                return Crashed(report.how)
            case _:
                return Interrupted(began=True)

    def _is_guilt_unknown(self) -> bool:
        """One of several tasks is guilty, and it is unknown which. None is charged, but each runs alone next time.
        Otherwise the same tasks would meet again, and hang or fill the memory for ever.
        """
        return self._report.cause in {"hang", "memory"} and self._report.guilty is None


# --- how it is done ---


@dataclass(slots=True)
class _Case:
    report: CrashReport
    verdict: Verdict
    due: float = 0.0
    swept_at: float | None = None  # for the first time
    sweeps: int = 0
    failures: int = 0
    counted: set[tuple[UUID, int]] = field(default_factory=set)  # runs that are in our own counters


class Recoveries:
    """Service of the crash loop: takes reports from another thread, and handles them one by one."""

    def __init__(
        self,
        config: Config,
        session: Session,
        statements: WorkerStatements,
        keeper_statements: KeeperStatements,
        *,
        on_recovered: Callable[[CrashReport, float], None] = lambda _report, _seconds: None,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        self._session = session
        self._statements = keeper_statements
        self._metrics = metrics or WorkerMetrics()
        self._policies = statements.policies
        self._settling = RecoveryWriter(session, statements, self._metrics)
        self._on_recovered = on_recovered
        self._application_name = _application_name(config)
        self._rules = Rules.of(config)
        self._new: queue.SimpleQueue[CrashReport] = queue.SimpleQueue()
        self._cases: list[_Case] = []

    def add(self, report: CrashReport) -> None:
        self._new.put(report)

    @property
    def is_waiting(self) -> bool:
        """A report has not been handled for the first time."""
        return not self._new.empty() or any(case.swept_at is None for case in self._cases)

    def run_once(self) -> float | None:
        self._session.connection()  # open before it is needed
        while not self._new.empty():
            report = self._new.get()
            self._cases.append(_Case(report, Verdict(report, self._rules)))
        for case in list(self._cases):
            if time.monotonic() >= case.due:
                self._try(case)
        return min((max(case.due - time.monotonic(), 0.0) for case in self._cases), default=None)

    def _try(self, case: _Case) -> None:
        """An error in one recovery does not stop the others. Without a connection, all wait."""
        try:
            self._sweep(case)
        except Exception as error:
            if isinstance(error, psycopg.Error) and is_connection_lost(error):
                raise
            case.failures += 1
            case.due = time.monotonic() + AFTER_FAILURE_SECONDS
            log.error("recovery.failed", worker_id=case.report.worker_id, error=first_line(error))
            if case.failures >= MOST_FAILURES:
                self._cases.remove(case)

    def _sweep(self, case: _Case) -> None:
        if case.swept_at is None:
            self._end_backends(case.report)
        self._settle(case)
        if case.swept_at is None:
            self._session.run(self._statements.declare_dead(case.report.worker_id))
            self._report(case)
        self._session.run(self._policies.forget())
        self._plan_next(case)

    def _plan_next(self, case: _Case) -> None:
        assert case.swept_at is not None  # noqa: S101 - set by the first sweep
        if case.sweeps == len(SWEEPS_AGAIN_SECONDS):
            self._cases.remove(case)
            return
        case.due = case.swept_at + SWEEPS_AGAIN_SECONDS[case.sweeps]
        case.sweeps += 1

    def _end_backends(self, report: CrashReport) -> None:
        """Behind a pooler the pids are made up. Then only the later sweeps help."""
        if not report.backends or self._session.is_pooled:
            return
        until, pause = time.monotonic() + BACKENDS_SECONDS, 0.002
        name, terminate = self._application_name, self._statements.terminate
        try:
            while left := self._session.run(terminate(report.backends, name, _seconds_since(report))):
                if time.monotonic() > until:
                    log.warning("backends.left", worker_id=report.worker_id, pids=left)
                    return
                time.sleep(pause)
                pause = min(pause * 2, 0.05)
        except psycopg.errors.InsufficientPrivilege as error:
            log.warning("backends.left", worker_id=report.worker_id, error=str(error).partition("\n")[0])

    def _settle(self, case: _Case) -> None:
        report = case.report
        held = self._session.run(self._statements.held(report.worker_id))
        if held:
            now = held[0][1]
            tasks, since_death = [task for task, _ in held], _seconds_since(report)
            decided = self._settling.decide(tasks, lambda task: case.verdict.of(task, now, since_death))
            settled = self._settling.recover(report.worker_id, decided, now)
            case.counted |= {(task.id, task.fencing_token) for task, _ in held}
            self._metrics.lost(settled, "worker_died")
            log.warning("tasks.recovered", worker_id=report.worker_id, count=settled)
        if case.swept_at is None:
            self._count_written(case)
        self._session.run(self._statements.forget_claims(report.worker_id))

    def _count_written(self, case: _Case) -> None:
        """Count the outcomes that the worker wrote, and could not count before it was killed. Those that a reaper or
        another keeper wrote are not among them: they count their own.
        """
        report = case.report
        runs = {(each.task_id, each.token) for each in report.executing} - case.counted
        if not report.is_counted:
            runs |= {(each.task_id, each.token) for each in report.done} - case.counted
        if not runs:
            return
        for each in self._session.run(self._statements.written([task_id for task_id, _ in runs], report.worker_id)):
            is_own = each.outcome not in _OF_RECOVERERS or is_told_by_worker(each.failed_reason)
            if (each.task_id, each.token) in runs and is_own:
                self._metrics.found(
                    each.name, each.queue, each.outcome, seconds=each.seconds, will_retry=each.will_retry,
                    is_buried=each.is_buried,
                )  # fmt: skip
        case.counted |= runs

    def _report(self, case: _Case) -> None:
        case.swept_at = time.monotonic()
        report, seconds = case.report, _seconds_since(case.report)
        log.warning(
            "worker.recovered", worker_id=report.worker_id, worker=report.name, pid=report.pid, slot=report.slot,
            how=report.how, cause=report.cause, executing=len(report.executing), seconds=round(seconds, 3),
        )  # fmt: skip
        self._metrics.add({("recovery",): histogram(SECONDS, [seconds])})
        self._on_recovered(report, seconds)


def _seconds_since(report: CrashReport) -> float:
    return max(time.monotonic() - report.died, 0.0)


def _application_name(config: Config) -> str:
    """The beginning of the names of all connections of this configuration. The server cuts long names off."""
    return str(conninfo.conninfo_to_dict(connection_string(config))["application_name"])[:_LONGEST_APPLICATION_NAME]
