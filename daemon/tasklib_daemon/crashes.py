"""A worker of this daemon has died: what it was executing runs again at once, and what it merely held loses nothing.

The supervisor has seen the death, and the page tells what was executing: nothing has to be guessed, and no lease has to
run out. A claim that was in flight may still be committed after the death. So its backends are ended first, and waited
for; and it is swept again a second and five seconds later. Every write is guarded as ever: a reaper that comes first,
or a report that comes twice, does no harm.
"""

from __future__ import annotations

import json
import queue
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg import conninfo

from tasklib.connection import connection_string, is_connection_lost
from tasklib.duties.apart import first_line
from tasklib.duties.settling import Decided, Settling
from tasklib.log import log
from tasklib.outcomes import Cancelled, Crashed, Interrupted, Problem, Rules, TimedOut, decide, is_told_by_worker
from tasklib.retry import Exponential
from tasklib.states import State
from tasklib.worker.tally import SECONDS, Tally, histogram

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from tasklib.config import Config
    from tasklib.duties.statements import KeeperStatements
    from tasklib.outcomes import HeldTask, Outcome
    from tasklib.statements import WorkerStatements
    from tasklib.worker.session import Session
    from tasklib_daemon.plan import Cause

SWEEPS_AGAIN_SECONDS = (1.0, 5.0)  # after the first
BACKENDS_SECONDS = 2.0  # how long they are waited for
AFTER_FAILURE_SECONDS = 1.0
MOST_FAILURES = 10  # then the reaper has to do it, when the lease has run out
_LONGEST_APPLICATION_NAME = 63
# Written, and counted, by a keeper or a reaper; by the worker itself only where an isolated task's own process died.
_OF_RECOVERERS = frozenset({"WORKER_FAILURE", "LEASE_LOST"})


class Executing(NamedTuple):
    task_id: UUID
    token: int
    seconds: float  # since it started


class Done(NamedTuple):
    """Its function has ended, and nobody knows whether that was written."""

    task_id: UUID
    token: int


@dataclass(frozen=True, slots=True)
class CrashReport:
    """What the supervisor knows of a worker that died: from `waitpid`, and from its page."""

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
    is_counted: bool = False  # what it had written and not let go of is in its ledger

    def to_json(self) -> dict[str, Any]:
        """Of plain values: for a message."""
        return {
            "worker_id": self.worker_id,
            "name": self.name,
            "hostname": self.hostname,
            "pid": self.pid,
            "slot": self.slot,
            "how": self.how,
            "cause": self.cause,
            "guilty": None if self.guilty is None else str(self.guilty),
            "executing": [[str(each.task_id), each.token, each.seconds] for each in self.executing],
            "done": [[str(each.task_id), each.token] for each in self.done],
            "backends": list(self.backends),
            "is_counted": self.is_counted,
            "died": self.died,
        }

    @classmethod
    def from_json(cls, given: dict[str, Any] | str) -> CrashReport:
        values = dict(json.loads(given) if isinstance(given, str) else given)
        guilty = values.pop("guilty", None)
        executing = tuple(Executing(UUID(id_), token, seconds) for id_, token, seconds in values.pop("executing", ()))
        done = tuple(Done(UUID(id_), token) for id_, token in values.pop("done", ()))
        backends = tuple(values.pop("backends", ()))
        return cls(
            **values,
            guilty=None if guilty is None else UUID(guilty),
            executing=executing,
            done=done,
            backends=backends,
        )


# --- what becomes of each task: pure ---


class Verdict:
    """Of the tasks that a dead worker held."""

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
        # It was executing, whether or not there was time to mark it.
        started_at = now - timedelta(seconds=seconds + since_death_seconds)
        is_marked = task.state == State.RUNNING
        begun = task._replace(
            state=State.RUNNING,
            started_at=task.started_at if is_marked else started_at,
            attempt=task.attempt + (not is_marked),
        )
        settlement = decide(begun, self._outcome(task), now, self._rules)
        if self._is_somebody_guilty() and settlement.state == State.PENDING:
            settlement = settlement._replace(suspect=True)
        return Decided(begun, settlement, None)

    def _is_last_suspect(self, task: HeldTask) -> bool:
        """It had just ended, and nobody else was there to be blamed: one that takes its worker along a moment after it
        has returned would run again for ever.
        """
        is_done = (task.id, task.fencing_token) in self._done
        return self._report.cause == "crash" and is_done and len(self._done) == 1 and not self._executing

    def _of_idle(self, task: HeldTask, now: datetime) -> Decided:
        """Given back. One that must not run twice does not if it may have run: it is marked before its first line."""
        is_done = (task.id, task.fencing_token) in self._done
        is_marked = task.state == State.RUNNING
        given_back = Interrupted(began=is_done or is_marked, ran=is_done or (is_marked and task.on_crash == "fail"))
        return Decided(task, decide(task, given_back, now, self._rules), None if is_done else task.state)

    def _outcome(self, task: HeldTask) -> Outcome:
        """Of one that was executing. What the supervisor did to one task costs no other."""
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

    def _is_somebody_guilty(self) -> bool:
        """One of several, and nobody knows which: they are free of charge, but each runs alone the next time. Otherwise
        the same ones would meet again, and hang or fill the memory for ever.
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
    counted: set[tuple[UUID, int]] = field(default_factory=set)  # runs that are in our own ledger


class Recoveries:
    """Service of the crash loop: takes reports from another thread, and works them off one by one."""

    def __init__(
        self,
        config: Config,
        session: Session,
        statements: WorkerStatements,
        keeper_statements: KeeperStatements,
        *,
        on_recovered: Callable[[CrashReport, float], None] = lambda _report, _seconds: None,
        tally: Tally | None = None,
    ) -> None:
        self._session = session
        self._statements = keeper_statements
        self._tally = tally or Tally()
        self._settling = Settling(session, statements, self._tally)
        self._on_recovered = on_recovered
        self._application_name = _application_name(config)
        self._rules = Rules(
            Exponential(
                config.base_retry_delay_seconds, config.retry_backoff_multiplier, config.max_retry_delay_seconds,
                config.retry_jitter,
            ),
            config.bury_after, config.timeout_delta_seconds,
        )  # fmt: skip
        self._new: queue.SimpleQueue[CrashReport] = queue.SimpleQueue()
        self._cases: list[_Case] = []

    def add(self, report: CrashReport) -> None:
        self._new.put(report)

    @property
    def is_waiting(self) -> bool:
        """Some report has not been dealt with at all."""
        return not self._new.empty() or any(case.swept_at is None for case in self._cases)

    def run_once(self) -> float | None:
        self._session.connection()  # at hand when it is needed
        while not self._new.empty():
            report = self._new.get()
            self._cases.append(_Case(report, Verdict(report, self._rules)))
        for case in list(self._cases):
            if time.monotonic() >= case.due:
                self._try(case)
        return min((max(case.due - time.monotonic(), 0.0) for case in self._cases), default=None)

    def _try(self, case: _Case) -> None:
        """What one is refused does not keep the others; without a connection, all of them wait."""
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
            self._tell(case)
        self._plan_next(case)

    def _plan_next(self, case: _Case) -> None:
        assert case.swept_at is not None  # noqa: S101 - it is told after the first
        if case.sweeps == len(SWEEPS_AGAIN_SECONDS):
            self._cases.remove(case)
            return
        case.due = case.swept_at + SWEEPS_AGAIN_SECONDS[case.sweeps]
        case.sweeps += 1

    def _end_backends(self, report: CrashReport) -> None:
        """Behind a pooler their numbers are made up, and the sweeps to come have to do."""
        if not report.backends or self._session.is_pooled:
            return
        until, pause = time.monotonic() + BACKENDS_SECONDS, 0.002
        try:
            while left := self._session.run(self._terminate(report)):
                if time.monotonic() > until:
                    log.warning("backends.left", worker_id=report.worker_id, pids=left)
                    return
                time.sleep(pause)
                pause = min(pause * 2, 0.05)
        except psycopg.errors.InsufficientPrivilege as error:
            log.warning("backends.left", worker_id=report.worker_id, error=str(error).partition("\n")[0])

    def _terminate(self, report: CrashReport) -> Any:
        return self._statements.terminate(report.backends, self._application_name, _seconds_since(report))

    def _settle(self, case: _Case) -> None:
        report = case.report
        held = self._session.run(self._statements.held(report.worker_id))
        if held:
            now = held[0][1]
            tasks, since_death = [task for task, _ in held], _seconds_since(report)
            decided = self._settling.decide(tasks, lambda task: case.verdict.of(task, now, since_death))
            settled = self._settling.settle(report.worker_id, decided, now)
            case.counted |= {(task.id, task.fencing_token) for task, _ in held}
            self._tally.lost(settled, "worker_died")
            log.warning("tasks.recovered", worker_id=report.worker_id, count=settled)
        if case.swept_at is None:
            self._count_written(case)
        self._session.run(self._statements.forget_claims(report.worker_id))

    def _count_written(self, case: _Case) -> None:
        """What the worker had settled itself and was killed before it could count: its runs that nobody holds. What a
        reaper was quicker with is not among it, nor what a keeper had settled that died before it could say so.
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
                self._tally.found(
                    each.name, each.queue, each.outcome, seconds=each.seconds, will_retry=each.will_retry,
                    is_buried=each.is_buried,
                )  # fmt: skip
        case.counted |= runs

    def _tell(self, case: _Case) -> None:
        case.swept_at = time.monotonic()
        report, seconds = case.report, _seconds_since(case.report)
        log.warning(
            "worker.recovered", worker_id=report.worker_id, worker=report.name, pid=report.pid, slot=report.slot,
            how=report.how, cause=report.cause, executing=len(report.executing), seconds=round(seconds, 3),
        )  # fmt: skip
        self._tally.add({("recovery",): histogram(SECONDS, [seconds])})
        self._on_recovered(report, seconds)


def _seconds_since(report: CrashReport) -> float:
    return max(time.monotonic() - report.died, 0.0)


def _application_name(config: Config) -> str:
    """What the names of all connections of this configuration begin with; the server cuts them off."""
    return str(conninfo.conninfo_to_dict(connection_string(config))["application_name"])[:_LONGEST_APPLICATION_NAME]
