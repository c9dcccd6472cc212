"""The outcome of an execution, and what follows from it.

A task function ends by returning or by raising. A runner turns that into an `Outcome`, a value. `decide` says what
becomes of the task, as a `Settlement`, another value. One guarded statement writes it. There is no clock, no chance and
no database in here: the same task, outcome and moment always give the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, assert_never
from uuid import UUID  # noqa: TC003 - pydantic reads the types of HeldTask

from tasklib.errors import InvalidOptions
from tasklib.ranges import YEAR_SECONDS
from tasklib.retry import Backoff, Exponential, delay_seconds
from tasklib.states import State

if TYPE_CHECKING:
    from tasklib.config import Config

# --- What a task function may raise ----------------------------------------------------------------------------------


class TaskSignal(Exception):
    """Raised by a task function to decide what becomes of its task."""


class Retry(TaskSignal):
    """Run me again: after `delay_seconds`, or as the retry policy says. Counts as a retry."""

    def __init__(self, reason: str = "asked for a retry", *, delay_seconds: float | timedelta | None = None) -> None:
        super().__init__(reason)
        self.delay_seconds = None if delay_seconds is None else _checked_delay(delay_seconds)


class Snooze(TaskSignal):
    """Not now: run me again after `delay_seconds`. Costs no retry."""

    def __init__(self, delay_seconds: float | timedelta, reason: str = "snoozed") -> None:
        super().__init__(reason)
        self.delay_seconds = _checked_delay(delay_seconds)


class PauseQueue(TaskSignal):
    """Pause my queue in the whole cluster, until a moment or until it is resumed, and run me again after that. Costs no
    retry.
    """

    def __init__(self, reason: str = "paused by a task", *, until: datetime | timedelta | None = None) -> None:
        super().__init__(reason)
        if isinstance(until, datetime) and until.tzinfo is None:
            raise InvalidOptions(f"until={until!r} has no time zone. Use datetime.now(UTC) + timedelta(...)")
        if until is not None and not isinstance(until, datetime | timedelta):
            raise InvalidOptions(f"until={until!r} must be a datetime with a time zone, or a timedelta from now")
        self.reason = reason
        self.until = until


class Cancel(TaskSignal):
    """There is nothing left to do: the task is cancelled."""

    def __init__(self, reason: str = "cancelled by itself") -> None:
        super().__init__(reason)


class Fail(TaskSignal):
    """It will never work: the task fails for good, whatever retries are left."""

    def __init__(self, reason: str, *, error_code: str | None = None) -> None:
        super().__init__(reason)
        self.error_code = error_code


class TaskInterrupt(BaseException):
    """Raised inside a sync task function that has to stop. No Exception, so that `except Exception` lets it pass."""


class TimeoutInterrupt(TaskInterrupt):
    """Its timeout_seconds have passed."""


class CancelInterrupt(TaskInterrupt):
    """A client cancelled it."""


class StopInterrupt(TaskInterrupt):
    """Its worker stops, or has lost its lease."""


# --- What an execution yielded ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as it is stored."""

    code: str
    message: str
    text: str  # "Type: message", then the traceback


class Completed(NamedTuple):
    result: str | None  # JSON text: {"value": ...}


@dataclass(frozen=True, slots=True)
class Failed:
    problem: Problem
    may_retry: bool = True
    delay_seconds: float | None = None  # None: as the policy says


@dataclass(frozen=True, slots=True)
class TimedOut:
    problem: Problem


@dataclass(frozen=True, slots=True)
class Snoozed:
    delay_seconds: float
    pause_reason: str | None = None  # the task asks for its queue to be paused
    pause_until: float | None = None  # seconds since 1970; None: until it is resumed


@dataclass(frozen=True, slots=True)
class Cancelled:
    problem: Problem
    began: bool = True


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The task is given back at no cost: it was never started, or it was stopped because its worker stops. `began`: the
    run counts as an attempt, since the task may be marked as running. `ran` is false if none of its lines was executed
    even so. `may_repeat` is false if the next run cannot end in the same way for the same reason.
    """

    began: bool
    ran: bool = True
    reason: str = "its worker stopped"
    may_repeat: bool = True


@dataclass(frozen=True, slots=True)
class Expired:
    """Its `expires_at` passed while it waited in a worker's buffer."""


OWN_PROCESS = "its process"  # how the reason begins, if a worker reports the death of an isolated task
SERVER_DIED = "the fork server died under it"


def is_told_by_worker(failed_reason: str | None) -> bool:
    """Whether a worker that survived the crash wrote this. The reaper writes the reasons of all other crashes."""
    return failed_reason is not None and (failed_reason.startswith(f"{OWN_PROCESS} ") or failed_reason == SERVER_DIED)


@dataclass(frozen=True, slots=True)
class Crashed:
    """Its worker died, or its own process died (`alone`), or its lock passed while it was held."""

    reason: str
    worker_is_alive: bool = False
    alone: bool = False  # it had begun, and no other task can be guilty
    is_isolated: bool = False  # it always runs in a process of its own, so it needs no empty worker


_Unfinished: TypeAlias = Failed | TimedOut | Snoozed | Cancelled | Interrupted | Expired | Crashed
Outcome: TypeAlias = Completed | _Unfinished

AttemptOutcome = Literal[
    "COMPLETED", "FAILED", "WORKER_FAILURE", "TIMED_OUT", "CANCELLED", "SNOOZED", "INTERRUPTED", "LEASE_LOST"
]


MOST_FREE_RUNS = 10  # that an unreachable database may cause; after these, the fault counts as the task's own
PROMPT_FREE_RUNS = 3  # that begin without a pause
LONGEST_DELAY_SECONDS = 30.0  # between free runs


# --- What follows ----------------------------------------------------------------------------------------------------


class HeldTask(NamedTuple):
    """A task that a worker holds. The fields are in the order of the columns that the statements return."""

    id: UUID
    name: str
    queue: str
    state: str
    worker_id: str
    fencing_token: int
    attempt: int
    retry_count: int
    max_retries: int
    crash_count: int
    strikes: int
    suspect: bool
    on_crash: str | None  # None: as its function says
    timeout_seconds: float | None
    claimed_at: datetime
    started_at: datetime | None
    expires_at: datetime | None
    cancel_asked_at: datetime | None
    deadline_at: datetime | None = None  # all attempts must be over by then


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules for retries and burials, from the task function and the configuration."""

    backoff: Backoff = field(default_factory=Exponential)
    bury_after: int = 3
    timeout_delta_seconds: float = 10.0

    @classmethod
    def of(cls, config: Config) -> Rules:
        """For task functions that have no backoff of their own."""
        backoff = Exponential(
            config.base_retry_delay_seconds, config.retry_backoff_multiplier, config.max_retry_delay_seconds,
            config.retry_jitter,
        )  # fmt: skip
        return cls(backoff, config.bury_after, config.timeout_delta_seconds)


class Settlement(NamedTuple):
    """What becomes of a held task. `due_at` is when a waiting one may run again; None: at once."""

    state: State
    outcome: AttemptOutcome | None = None  # of the attempt; None: none began
    due_at: datetime | None = None
    scheduled_at: datetime | None = None
    result: str | None = None
    problem: Problem | None = None
    failed_reason: str | None = None
    is_retry: bool = False
    is_crash: bool = False
    is_strike: bool = False
    suspect: bool = False

    @property
    def began(self) -> bool:
        return self.outcome is not None

    @property
    def goes_on(self) -> bool:
        """The task is not final: it waits for its next run."""
        return self.state == State.PENDING or (self.state == State.FAILED and self.due_at is not None)


def succeeded(outcome: Completed) -> Settlement:
    """Even if a cancel was requested: the work has been done."""
    return Settlement(State.COMPLETED, "COMPLETED", None, None, outcome.result)


def decide(task: HeldTask, outcome: Outcome, now: datetime, rules: Rules) -> Settlement:
    """What becomes of the task. Every outcome has an answer, whatever the task's state."""
    if isinstance(outcome, Completed):
        return succeeded(outcome)
    settlement = _within_deadline(task, _decide(task, outcome, now, rules), now)
    return settlement if task.cancel_asked_at is None else stopped(settlement)


def stopped(settlement: Settlement) -> Settlement:
    """What becomes of a task with a cancel request, whatever it did short of completing. Only this function turns a
    cancel request into an outcome. It is also called for a request that came after the decision: see OutcomeWriter.
    """
    problem = Problem("CANCELLED", "on request", "Cancelled: on request")
    return Settlement(State.CANCELLED, "CANCELLED" if settlement.began else None, problem=problem)


def _decide(task: HeldTask, outcome: _Unfinished, now: datetime, rules: Rules) -> Settlement:  # noqa: PLR0911 - one for each outcome
    match outcome:
        case Failed(problem, may_retry, delay):
            return _failed("FAILED", task, problem, now, rules, may_retry=may_retry, delay=delay)
        case TimedOut(problem) if task.deadline_at is not None and now >= task.deadline_at:
            late = _deadline_passed(f"it still ran at its deadline {task.deadline_at}", problem)
            return Settlement(State.FAILED, "TIMED_OUT", problem=late)
        case TimedOut(problem):
            return _failed("TIMED_OUT", task, problem, now, rules)
        case Snoozed(delay_seconds=delay):
            due_at = now + timedelta(seconds=delay)
            return Settlement(State.PENDING, "SNOOZED", due_at=due_at, scheduled_at=due_at)
        case Cancelled(problem, began):
            return Settlement(State.CANCELLED, "CANCELLED" if began else None, problem=problem)
        case Interrupted():
            return _interrupted(task, outcome, now)
        case Expired() if starts_by(task) == task.deadline_at is not None:
            late = _deadline_passed(f"not started before the deadline {task.deadline_at}")
            return Settlement(State.FAILED, problem=late)
        case Expired():
            text = f"Expired: not started before {task.expires_at}"
            return Settlement(State.EXPIRED, problem=Problem("EXPIRED", "not started in time", text))
        case Crashed():
            return _crashed(task, outcome, now, rules)
    assert_never(outcome)


def starts_by(task: HeldTask) -> datetime | None:
    """A task that has not started by then does not start. None: it may start at any time."""
    limits = [each for each in (task.expires_at, task.deadline_at) if each is not None]
    return min(limits, default=None)


def seconds_for(task: HeldTask, now: datetime) -> float | None:
    """How long an attempt may take that starts now: its timeout, or the time that is left until the deadline."""
    if task.deadline_at is None:
        return task.timeout_seconds
    left = max((task.deadline_at - now).total_seconds(), 0.0)
    return left if task.timeout_seconds is None else min(left, task.timeout_seconds)


def _within_deadline(task: HeldTask, settlement: Settlement, now: datetime) -> Settlement:
    """A run that would begin at the deadline, or after it, is not scheduled: the task has failed for good."""
    next_at = settlement.due_at or now
    if task.deadline_at is None or not settlement.goes_on or next_at < task.deadline_at:
        return settlement
    problem = _deadline_passed(
        f"the next run would be at {next_at}, and the deadline is {task.deadline_at}", settlement.problem
    )
    word: AttemptOutcome | None = "FAILED" if settlement.outcome == "SNOOZED" else settlement.outcome
    return settlement._replace(
        state=State.FAILED, outcome=word, due_at=None, scheduled_at=None, problem=problem, is_retry=False, suspect=False
    )


def _deadline_passed(reason: str, last: Problem | None = None) -> Problem:
    """With the error of the last attempt, which would otherwise be lost."""
    message = reason if last is None else f"{reason}; its last error: {last.message}"
    text = f"DeadlinePassed: {reason}" if last is None else f"DeadlinePassed: {reason}\n{last.text}"
    return Problem("DEADLINE_PASSED", message, text)


def _failed(
    word: AttemptOutcome,
    task: HeldTask,
    problem: Problem,
    now: datetime,
    rules: Rules,
    *,
    may_retry: bool = True,
    delay: float | None = None,
) -> Settlement:
    """`max_retries` counts retries after the first run: 3 means four executions."""
    if not may_retry or task.retry_count >= task.max_retries:
        return Settlement(State.FAILED, word, problem=problem)
    if delay is None:
        delay = delay_seconds(rules.backoff, task.retry_count + 1, _chance(task))
    return Settlement(State.FAILED, word, due_at=now + timedelta(seconds=delay), problem=problem, is_retry=True)


def _interrupted(task: HeldTask, interruption: Interrupted, now: datetime) -> Settlement:
    """The task runs again at no cost. A task that must not run twice fails instead, once it has begun. A task that has
    had many free runs may cause them itself: it waits before it runs again.
    """
    began, reason = interruption.began, interruption.reason
    if began and interruption.ran and task.on_crash == "fail":
        problem = Problem("INTERRUPTED", reason, f"Interrupted: {reason}")
        return Settlement(State.FAILED, "INTERRUPTED", problem=problem)
    pause = delay_of_free_run(task, PROMPT_FREE_RUNS) if interruption.ran and interruption.may_repeat else 0.0
    due_at = now + timedelta(seconds=pause) if began and pause else None
    return Settlement(State.PENDING, "INTERRUPTED" if began else None, due_at=due_at, suspect=task.suspect)


def free_runs(task: HeldTask) -> int:
    """How many of its runs have cost no retry."""
    return task.attempt - task.retry_count


def has_free_runs(task: HeldTask) -> bool:
    return free_runs(task) < MOST_FREE_RUNS


def delay_of_free_run(task: HeldTask, prompt_runs: int = 0) -> float:
    """The first `prompt_runs` begin at once. After that, each waits twice as long as the one before."""
    often = free_runs(task) - prompt_runs
    return min(2.0 ** min(often, 10), LONGEST_DELAY_SECONDS) if often >= 0 else 0.0


def _crashed(task: HeldTask, crash: Crashed, now: datetime, rules: Rules) -> Settlement:
    """Find the guilty task.

    A task that was executing becomes a suspect, and runs alone the next time. A crash is a strike only if the task was
    alone, or was held past its time. A task that died in a process of its own was alone. If it always has such a
    process, it needs no empty worker the next time.

    A task that may never have begun had no attempt. It becomes a suspect only at its second crash: a worker holds
    hundreds of tasks that it has not begun, and to run all of them alone would take longer than the crash. A task with
    on_crash="fail" is marked as running before its first line: without the mark, it had not begun.
    """
    reason, began = crash.reason, crash.alone or task.state == State.RUNNING
    if not began and task.on_crash == "fail":
        return Settlement(State.PENDING, suspect=task.suspect)
    is_strike = crash.alone or (began and task.suspect) or _is_held_too_long(task, now, rules)
    settlement = Settlement(
        State.PENDING,
        None if not began else "LEASE_LOST" if crash.worker_is_alive else "WORKER_FAILURE",
        problem=Problem("WORKER_CRASHED", reason, f"WorkerCrashed: {reason}"),
        failed_reason=reason,
        is_crash=True,
        is_strike=is_strike,
        suspect=not crash.is_isolated and (began or task.suspect or task.crash_count > 0),
    )
    if task.on_crash == "fail":
        return settlement._replace(state=State.FAILED)
    if is_strike and task.strikes + 1 >= rules.bury_after:
        buried = Problem("BURIED", reason, f"Buried: {reason}; strike {task.strikes + 1} of {rules.bury_after}")
        return settlement._replace(state=State.BURIED, problem=buried)
    return settlement


def _is_held_too_long(task: HeldTask, now: datetime, rules: Rules) -> bool:
    """Whether it was held for longer than its timeout and the delta, which allows for everything around it. Compares
    seconds, because the moment itself may lie beyond the calendar.
    """
    if task.timeout_seconds is None:
        return False
    since = task.started_at if task.state == State.RUNNING and task.started_at else task.claimed_at
    return (now - since).total_seconds() > task.timeout_seconds + rules.timeout_delta_seconds


def _chance(task: HeldTask) -> float:
    """A number from 0 to 1 that differs for each retry. A pure function draws no random number, so it is made from the
    id and the count of retries. All bits of the id are mixed, because ids of one batch differ in a few bits only.
    """
    mixed = (task.id.int + task.retry_count + 1) * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128
    return (mixed >> 64) / 2**64


def _checked_delay(value: float | timedelta) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not 0 <= seconds <= 100 * YEAR_SECONDS:
        raise InvalidOptions(f"delay_seconds must be a number of seconds from zero to a century, got {value!r}")
    return float(seconds)
