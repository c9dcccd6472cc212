"""What becomes of a task after each outcome: `decide`, case by case and over all of them."""

from __future__ import annotations

import copy
import math
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tasklib.errors import InvalidOptions
from tasklib.outcomes import (
    Cancel,
    CancelInterrupt,
    Cancelled,
    Completed,
    Crashed,
    Expired,
    Fail,
    Failed,
    HeldTask,
    Interrupted,
    Outcome,
    Problem,
    Retry,
    Rules,
    Settlement,
    Snooze,
    Snoozed,
    StopInterrupt,
    TaskSignal,
    TimedOut,
    TimeoutInterrupt,
    decide,
    seconds_for,
    starts_by,
)
from tasklib.retry import MAX_DELAY_SECONDS, Exponential, Fixed, Linear
from tasklib.states import TRANSITIONS, State

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
CENTURY_SECONDS = 100 * 365 * 86400
PROBLEM = Problem("BROKEN", "it broke", "ValueError: it broke")
RULES = Rules()

Value = TypeVar("Value", HeldTask, Settlement)


def replace(value: Value, **changes: Any) -> Value:
    return value._replace(**changes)


CLAIMED = HeldTask(
    id=UUID("01890000-0000-7000-8000-000000000001"),
    name="resize",
    queue="default",
    state="claimed",
    worker_id="worker-1",
    fencing_token=1,
    attempt=0,
    retry_count=0,
    max_retries=3,
    crash_count=0,
    strikes=0,
    suspect=False,
    on_crash="retry",
    timeout_seconds=None,
    claimed_at=NOW - timedelta(seconds=1),
    started_at=None,
    expires_at=None,
    cancel_asked_at=None,
)
RUNNING = replace(CLAIMED, state="running", attempt=1, started_at=NOW - timedelta(seconds=1))
DIED = Crashed("its worker died")
LOCK_PASSED = Crashed("its lock passed", worker_is_alive=True)
DIED_ALONE = Crashed("its process was killed by SIGSEGV", alone=True, is_isolated=True)


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


@pytest.mark.parametrize("timeout", [5e-324, 1e15, 1e300, 1.7e308])
@pytest.mark.parametrize("since", [datetime(1, 1, 2, tzinfo=UTC), NOW, datetime(9999, 12, 30, tzinfo=UTC)])
def test_a_timeout_of_any_size_can_be_judged(timeout: float, since: datetime) -> None:
    """Whatever a column can hold: one task of which nobody can say what becomes would keep others from recovery."""
    task = replace(RUNNING, timeout_seconds=timeout, started_at=since, claimed_at=since)
    is_strike = timeout < 1 and since < NOW
    assert decide(task, DIED, NOW, RULES).is_strike == is_strike


# --- Case by case ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [CLAIMED, RUNNING])
def test_a_task_that_returns_is_completed(task: HeldTask) -> None:
    """From both leased states: what is short is never marked as running."""
    settlement = decide(task, Completed('{"value": 1}'), NOW, RULES)
    assert settlement == Settlement(State.COMPLETED, "COMPLETED", result='{"value": 1}')


def test_three_retries_are_four_executions_after_five_ten_and_twenty_seconds() -> None:
    """`max_retries` counts the retries after the first run, and the last failure is final with all of them spent."""
    task, delays = RUNNING, []
    while (settlement := decide(task, Failed(PROBLEM), NOW, RULES)).is_retry:
        assert (settlement.state, settlement.outcome, settlement.problem) == (State.FAILED, "FAILED", PROBLEM)
        assert settlement.due_at is not None
        delays.append((settlement.due_at - NOW).total_seconds())
        task = replace(task, retry_count=task.retry_count + 1)
    assert delays == [5.0, 10.0, 20.0]
    assert task.retry_count == 3
    assert settlement == Settlement(State.FAILED, "FAILED", problem=PROBLEM)


def test_without_retries_the_first_failure_is_final() -> None:
    """Zero is a number of retries."""
    settlement = decide(replace(RUNNING, max_retries=0), Failed(PROBLEM), NOW, RULES)
    assert (settlement.due_at, settlement.is_retry) == (None, False)


@pytest.mark.parametrize("retry_count", [4, 100])
def test_more_retries_than_allowed_are_final_too(retry_count: int) -> None:
    """Somebody may have lowered max_retries in the row."""
    assert not decide(replace(RUNNING, retry_count=retry_count), Failed(PROBLEM), NOW, RULES).is_retry


def test_what_must_not_be_retried_is_not() -> None:
    """Whatever retries are left: the function said that it will never work."""
    settlement = decide(RUNNING, Failed(PROBLEM, may_retry=False, delay_seconds=5.0), NOW, RULES)
    assert settlement == Settlement(State.FAILED, "FAILED", problem=PROBLEM)


@pytest.mark.parametrize("seconds", [0.0, 0.5, 3600.0])
def test_a_retry_may_choose_its_delay(seconds: float) -> None:
    """Zero too. It counts as a retry all the same."""
    settlement = decide(RUNNING, Failed(PROBLEM, delay_seconds=seconds), NOW, RULES)
    assert (settlement.due_at, settlement.is_retry) == (after(seconds), True)


def test_a_chosen_delay_gives_no_more_retries() -> None:
    """Or a task could run for ever."""
    assert not decide(replace(RUNNING, retry_count=3), Failed(PROBLEM, delay_seconds=1.0), NOW, RULES).is_retry


@pytest.mark.parametrize(
    ("backoff", "delays"),
    [(Linear(10), [10, 20, 30]), (Fixed(7), [7, 7, 7]), (lambda retry: retry * 100, [100, 200, 300])],
)
def test_the_policy_of_the_task_counts(backoff: Any, delays: list[int]) -> None:
    """It is asked for the number of the coming retry, from 1 on."""
    dues = [decide(replace(RUNNING, retry_count=n), Failed(PROBLEM), NOW, Rules(backoff)).due_at for n in range(3)]
    assert dues == [after(delay) for delay in delays]


def test_jitter_differs_between_tasks_and_between_retries() -> None:
    """Tasks that failed together must not come back together."""
    rules = Rules(Fixed(100, jitter=0.5))
    tasks = [replace(RUNNING, id=UUID(int=RUNNING.id.int + n), max_retries=9) for n in range(50)]
    by_task = {decide(task, Failed(PROBLEM), NOW, rules).due_at for task in tasks}
    by_retry = {decide(replace(tasks[0], retry_count=n), Failed(PROBLEM), NOW, rules).due_at for n in range(9)}
    assert (len(by_task), len(by_retry)) == (50, 9)
    assert all(due is not None and after(50) <= due <= after(150) for due in by_task | by_retry)
    assert min(due for due in by_task if due) < after(75)
    assert max(due for due in by_task if due) > after(125)


def test_a_timeout_is_a_failure_with_a_name_of_its_own() -> None:
    """It is retried by the policy, and final when the retries are spent."""
    settlement = decide(RUNNING, TimedOut(PROBLEM), NOW, RULES)
    assert settlement == Settlement(State.FAILED, "TIMED_OUT", due_at=after(5), problem=PROBLEM, is_retry=True)
    settlement = decide(replace(RUNNING, retry_count=3), TimedOut(PROBLEM), NOW, RULES)
    assert settlement == Settlement(State.FAILED, "TIMED_OUT", problem=PROBLEM)


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_a_snooze_costs_no_retry(seconds: float) -> None:
    """It waits as a pending task, whatever retries are left."""
    settlement = decide(replace(RUNNING, retry_count=3), Snoozed(seconds), NOW, RULES)
    assert settlement == Settlement(State.PENDING, "SNOOZED", due_at=after(seconds), scheduled_at=after(seconds))


@pytest.mark.parametrize(("began", "outcome"), [(True, "CANCELLED"), (False, None)])
def test_a_task_may_cancel_itself(began: bool, outcome: str | None) -> None:
    """An attempt is written only if it began."""
    settlement = decide(RUNNING, Cancelled(PROBLEM, began=began), NOW, RULES)
    assert (settlement.state, settlement.outcome, settlement.problem) == (State.CANCELLED, outcome, PROBLEM)


def test_what_expired_in_the_buffer_ends_without_an_attempt() -> None:
    """It was claimed in time and not started in time."""
    settlement = decide(replace(CLAIMED, expires_at=NOW), Expired(), NOW, RULES)
    assert (settlement.state, settlement.outcome, settlement.due_at) == (State.EXPIRED, None, None)
    assert settlement.problem is not None
    assert settlement.problem.code == "EXPIRED"


# --- the deadline of all attempts ---


def of_deadline(settlement: Settlement) -> bool:
    return settlement.problem is not None and settlement.problem.code == "DEADLINE_PASSED"


@pytest.mark.parametrize(("left", "is_late"), [(4.9, True), (5.0, True), (5.1, False)])
def test_a_retry_at_the_deadline_or_after_it_is_not_scheduled(left: float, is_late: bool) -> None:
    """The first retry comes after 5 s. The error names both times, and keeps what went wrong."""
    settlement = decide(replace(RUNNING, deadline_at=after(left)), Failed(PROBLEM), NOW, RULES)
    assert settlement.state == State.FAILED
    assert settlement.outcome == "FAILED"
    assert (settlement.is_retry, settlement.goes_on, of_deadline(settlement)) == (not is_late, not is_late, is_late)
    if is_late:
        assert settlement.problem is not None
        assert str(after(5)) in settlement.problem.message
        assert str(after(left)) in settlement.problem.message
        assert PROBLEM.message in settlement.problem.message
        assert PROBLEM.text in settlement.problem.text


def test_a_task_without_retries_fails_by_itself() -> None:
    """Its deadline has nothing to do with it."""
    task = replace(RUNNING, deadline_at=after(1), max_retries=0)
    assert decide(task, Failed(PROBLEM), NOW, RULES).problem == PROBLEM


@pytest.mark.parametrize("retries", [0, 3])
def test_an_attempt_that_ran_into_the_deadline_is_the_last(retries: int) -> None:
    """Whatever retries are left. One that ran into its own timeout is retried while there is time."""
    task = replace(RUNNING, max_retries=retries, deadline_at=NOW)
    settlement = decide(task, TimedOut(PROBLEM), NOW, RULES)
    assert (settlement.state, settlement.outcome, settlement.goes_on) == (State.FAILED, "TIMED_OUT", False)
    assert of_deadline(settlement)
    assert decide(replace(RUNNING, deadline_at=after(60)), TimedOut(PROBLEM), NOW, RULES).is_retry


@pytest.mark.parametrize("outcome", [Snoozed(60), Interrupted(began=True), Interrupted(began=False), DIED])
def test_nothing_goes_on_past_its_deadline(outcome: Outcome) -> None:
    """Neither after a snooze, nor given back, nor after a crash."""
    settlement = decide(replace(RUNNING, deadline_at=NOW), outcome, NOW, RULES)
    assert (settlement.state, settlement.goes_on) == (State.FAILED, False)
    assert of_deadline(settlement)
    assert decide(replace(RUNNING, deadline_at=after(61)), outcome, NOW, RULES).goes_on


@pytest.mark.parametrize(
    ("expires", "deadline", "code"), [(0, None, "EXPIRED"), (None, 0, "DEADLINE_PASSED"), (-1, 0, "EXPIRED"),
                                      (0, -1, "DEADLINE_PASSED"), (0, 0, "DEADLINE_PASSED")]
)  # fmt: skip
def test_what_was_not_started_in_time_ends_by_the_earlier_limit(
    expires: int | None, deadline: int | None, code: str
) -> None:
    limits = [None if each is None else after(each) for each in (expires, deadline)]
    task = replace(CLAIMED, expires_at=limits[0], deadline_at=limits[1])
    assert starts_by(task) == min(each for each in limits if each is not None)
    settlement = decide(task, Expired(), NOW, RULES)
    assert settlement.outcome is None
    assert settlement.problem is not None
    assert settlement.problem.code == code
    assert settlement.state == (State.EXPIRED if code == "EXPIRED" else State.FAILED)


@pytest.mark.parametrize(
    ("timeout", "left", "seconds"), [(None, None, None), (5.0, None, 5.0), (None, 3, 3.0), (5.0, 3, 3.0), (2.0, 3, 2.0),
                                     (5.0, -1, 0.0)]
)  # fmt: skip
def test_an_attempt_may_take_its_timeout_or_what_is_left(
    timeout: float | None, left: int | None, seconds: float | None
) -> None:
    task = replace(CLAIMED, timeout_seconds=timeout, deadline_at=None if left is None else after(left))
    assert seconds_for(task, NOW) == seconds


@pytest.mark.parametrize("suspect", [True, False])
@pytest.mark.parametrize(("began", "outcome"), [(True, "INTERRUPTED"), (False, None)])
def test_an_interruption_costs_nothing_and_forgives_nothing(began: bool, outcome: str | None, suspect: bool) -> None:
    """A shutdown is not the task's fault; nor has a suspect proved its innocence by it."""
    settlement = decide(replace(RUNNING, suspect=suspect), Interrupted(began=began), NOW, RULES)
    assert (settlement.state, settlement.outcome, settlement.suspect) == (State.PENDING, outcome, suspect)
    assert (settlement.due_at, settlement.is_retry, settlement.is_crash, settlement.is_strike) == (
        None,
        False,
        False,
        False,
    )


def test_free_runs_wait_longer_and_longer() -> None:
    """The first few come at once: a failover is not the task's fault. A task that is its own cause must not spin."""
    runs = [replace(RUNNING, attempt=2 + n, retry_count=2) for n in range(12)]
    dues = [decide(each, Interrupted(began=True), NOW, RULES).due_at for each in runs]
    assert dues == [None, None, None, *(after(seconds) for seconds in (1, 2, 4, 8, 16, 30, 30, 30, 30))]
    for harmless in (Interrupted(began=True, may_repeat=False), Interrupted(began=True, ran=False)):
        assert decide(runs[-1], harmless, NOW, RULES).due_at is None, "a stop of the worker, or it did not run at all"


def test_what_must_not_run_twice_fails_when_it_is_interrupted() -> None:
    """Once it has begun; before that it goes back like any other."""
    settlement = decide(replace(RUNNING, on_crash="fail"), Interrupted(began=True), NOW, RULES)
    assert (settlement.state, settlement.outcome, settlement.due_at) == (State.FAILED, "INTERRUPTED", None)
    assert settlement.problem is not None
    assert settlement.problem.code == "INTERRUPTED"
    settlement = decide(replace(CLAIMED, on_crash="fail"), Interrupted(began=False), NOW, RULES)
    assert settlement == Settlement(State.PENDING)


@pytest.mark.parametrize(
    "outcome", [Completed(None), Failed(PROBLEM), TimedOut(PROBLEM), Snoozed(1), Cancelled(PROBLEM)]
)
def test_a_suspect_that_came_to_an_end_is_cleared(outcome: Outcome) -> None:
    """It ran alone, and its worker lives."""
    assert not decide(replace(RUNNING, suspect=True), outcome, NOW, RULES).suspect


@pytest.mark.parametrize(
    ("crash", "outcome"), [(DIED, "WORKER_FAILURE"), (LOCK_PASSED, "LEASE_LOST")], ids=["died", "lock passed"]
)
def test_a_crash_is_no_retry_and_runs_again_at_once_alone(crash: Crashed, outcome: str) -> None:
    """It may be a neighbour's fault: one crash is no strike."""
    settlement = decide(RUNNING, crash, NOW, RULES)
    assert (settlement.state, settlement.outcome, settlement.due_at) == (State.PENDING, outcome, None)
    assert (settlement.is_crash, settlement.is_retry, settlement.is_strike, settlement.suspect) == (
        True,
        False,
        False,
        True,
    )
    assert settlement.failed_reason == crash.reason


def test_a_claimed_task_of_a_dead_worker_is_a_suspect_the_second_time_and_never_an_attempt() -> None:
    """Nobody knows whether it had begun; and a worker holds many that it has not begun."""
    first = decide(CLAIMED, DIED, NOW, RULES)
    assert (first.state, first.outcome, first.suspect) == (State.PENDING, None, False)
    assert (first.is_crash, first.is_strike) == (True, False)
    second = decide(replace(CLAIMED, crash_count=1), DIED, NOW, RULES)
    assert second == replace(first, suspect=True)


def test_a_suspect_that_had_not_started_stays_one_without_a_strike() -> None:
    """It was not executing: a suspect is marked before its first line."""
    settlement = decide(replace(CLAIMED, suspect=True, strikes=2), DIED, NOW, RULES)
    assert (settlement.state, settlement.suspect, settlement.is_strike) == (State.PENDING, True, False)


def test_only_deaths_while_alone_lead_to_burial() -> None:
    """The first death makes it a suspect; the three after that are strikes; the third buries it."""
    task, deaths = RUNNING, 1
    while (settlement := decide(task, DIED, NOW, RULES)).state == State.PENDING:
        task = replace(task, suspect=settlement.suspect, strikes=task.strikes + settlement.is_strike)
        deaths += 1
    assert (settlement.state, deaths, task.strikes) == (State.BURIED, 4, 2)
    assert settlement.is_strike
    assert settlement.outcome == "WORKER_FAILURE"
    assert settlement.problem is not None
    assert settlement.problem.code == "BURIED"
    assert "strike 3 of 3" in settlement.problem.text


@pytest.mark.parametrize(("bury_after", "strikes", "state"), [(1, 0, "buried"), (2, 0, "pending"), (5, 4, "buried")])
def test_the_number_of_strikes_is_a_setting(bury_after: int, strikes: int, state: str) -> None:
    """From one on."""
    task = replace(RUNNING, suspect=True, strikes=strikes)
    assert decide(task, DIED, NOW, Rules(bury_after=bury_after)).state == state


@pytest.mark.parametrize("task", [CLAIMED, RUNNING, replace(RUNNING, suspect=True)])
def test_what_dies_in_a_process_of_its_own_is_guilty_from_the_first_time_on(task: HeldTask) -> None:
    """Nobody else can have done it: each death is an attempt and a strike, whether it was marked as running or not. It
    costs no retry, and no worker has to be empty for its next run.
    """
    deaths = 1
    while (settlement := decide(task, DIED_ALONE, NOW, RULES)).state == State.PENDING:
        assert (settlement.outcome, settlement.due_at) == ("WORKER_FAILURE", None)
        assert (settlement.is_crash, settlement.is_strike, settlement.is_retry) == (True, True, False)
        assert not settlement.suspect
        task = replace(task, suspect=settlement.suspect, strikes=task.strikes + 1)
        deaths += 1
    assert (settlement.state, deaths) == (State.BURIED, 3)
    assert settlement.problem is not None
    assert settlement.problem.text.startswith("Buried: its process was killed by SIGSEGV")


def test_what_dies_in_a_process_of_its_own_and_must_not_run_twice_fails() -> None:
    """Also if nobody had marked it as running yet: that process was made to run it."""
    settlement = decide(replace(CLAIMED, on_crash="fail"), DIED_ALONE, NOW, RULES)
    assert (settlement.state, settlement.outcome) == (State.FAILED, "WORKER_FAILURE")


def test_random_kills_never_bury_an_innocent_task() -> None:
    """It never runs alone to its death: after each crash it comes to some other end."""
    task = RUNNING
    for _ in range(100):
        crash = decide(task, DIED, NOW, RULES)
        task = replace(task, suspect=crash.suspect, strikes=task.strikes + crash.is_strike)
        snooze = decide(task, Snoozed(1), NOW, RULES)
        task = replace(task, suspect=snooze.suspect)
    assert task.strikes == 0


def test_a_task_that_must_not_run_twice_fails_in_a_crash() -> None:
    """If it had begun: it is marked as running before its first line."""
    settlement = decide(replace(RUNNING, on_crash="fail"), DIED, NOW, RULES)
    assert (settlement.state, settlement.outcome, settlement.due_at) == (State.FAILED, "WORKER_FAILURE", None)
    assert settlement.is_crash
    assert settlement.problem is not None
    assert settlement.problem.code == "WORKER_CRASHED"


@pytest.mark.parametrize("suspect", [True, False])
def test_a_task_that_must_not_run_twice_runs_if_it_had_not_begun(suspect: bool) -> None:
    """It is `claimed`, so not one line of it was executed, and nobody suspects it."""
    settlement = decide(replace(CLAIMED, on_crash="fail", suspect=suspect), DIED, NOW, RULES)
    assert settlement == Settlement(State.PENDING, suspect=suspect)


@pytest.mark.parametrize(("held_seconds", "is_strike"), [(29.0, False), (40.0, False), (40.001, True), (86400.0, True)])
@pytest.mark.parametrize("state", ["claimed", "running"])
def test_what_is_held_past_its_timeout_and_the_delta_gets_a_strike(
    state: str, held_seconds: float, is_strike: bool
) -> None:
    """Again and again, it is buried: it blocks its workers without killing them."""
    since = NOW - timedelta(seconds=held_seconds)
    started_at = since if state == "running" else None
    task = replace(CLAIMED, state=state, claimed_at=since, started_at=started_at, timeout_seconds=30.0)
    settlement = decide(task, LOCK_PASSED, NOW, Rules(timeout_delta_seconds=10.0))
    assert (settlement.state, settlement.is_strike) == (State.PENDING, is_strike)
    last = decide(replace(task, strikes=2), LOCK_PASSED, NOW, Rules(timeout_delta_seconds=10.0))
    assert (last.state == State.BURIED) is is_strike


def test_the_time_of_a_running_task_counts_from_its_start() -> None:
    """It may have waited in the buffer."""
    long_ago = NOW - timedelta(days=1)
    task = replace(RUNNING, claimed_at=long_ago, timeout_seconds=30.0)
    assert not decide(task, DIED, NOW, RULES).is_strike
    assert decide(replace(task, started_at=long_ago), DIED, NOW, RULES).is_strike


def test_without_a_timeout_nothing_is_held_too_long() -> None:
    """A task of a week is no crime."""
    task = replace(RUNNING, started_at=NOW - timedelta(days=7), claimed_at=NOW - timedelta(days=7))
    assert not decide(task, LOCK_PASSED, NOW, RULES).is_strike


def test_a_claimed_task_held_too_long_is_buried_without_an_attempt() -> None:
    """Nothing began."""
    task = replace(CLAIMED, claimed_at=NOW - timedelta(days=1), timeout_seconds=1.0, strikes=2)
    settlement = decide(task, LOCK_PASSED, NOW, RULES)
    assert (settlement.state, settlement.outcome, settlement.is_crash) == (State.BURIED, None, True)


ASKED = replace(RUNNING, cancel_asked_at=NOW)


@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        (Failed(PROBLEM), "CANCELLED"),
        (TimedOut(PROBLEM), "CANCELLED"),
        (Snoozed(1), "CANCELLED"),
        (Cancelled(PROBLEM), "CANCELLED"),
        (Cancelled(PROBLEM, began=False), None),
        (Interrupted(began=True), "CANCELLED"),
        (Interrupted(began=False), None),
        (Expired(), None),
        (DIED, "CANCELLED"),
        (LOCK_PASSED, "CANCELLED"),
        (DIED_ALONE, "CANCELLED"),
    ],
)
def test_a_task_that_was_asked_to_stop_is_cancelled_however_it_ends(outcome: Outcome, word: str | None) -> None:
    """It must not come back."""
    settlement = decide(ASKED, outcome, NOW, RULES)
    assert (settlement.state, settlement.outcome, settlement.due_at) == (State.CANCELLED, word, None)
    assert settlement.problem is not None
    assert settlement.problem.code == "CANCELLED"


def test_a_claimed_task_that_was_asked_to_stop_and_crashed_has_no_attempt() -> None:
    """It had not begun, as far as anybody knows."""
    assert decide(replace(CLAIMED, cancel_asked_at=NOW), DIED, NOW, RULES) == replace(
        decide(ASKED, DIED, NOW, RULES), outcome=None
    )


def test_a_task_that_was_asked_too_late_is_completed() -> None:
    """Its work is done: to call it cancelled would be a lie."""
    assert decide(ASKED, Completed("{}"), NOW, RULES).state == State.COMPLETED


# --- Over all of them ------------------------------------------------------------------------------------------------

moments = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
counts = st.integers(0, 5)
problems = st.builds(Problem, st.text(min_size=1), st.text(), st.text())
delays = st.floats(0, CENTURY_SECONDS)
tasks = st.builds(
    HeldTask,
    id=st.uuids(),
    name=st.just("resize"),
    queue=st.just("default"),
    state=st.sampled_from(["claimed", "running"]),
    worker_id=st.just("worker-1"),
    fencing_token=st.integers(1, 2**63 - 1),
    attempt=counts,
    retry_count=counts,
    max_retries=counts,
    crash_count=counts,
    strikes=counts,
    suspect=st.booleans(),
    on_crash=st.sampled_from(["retry", "fail"]),
    timeout_seconds=st.none() | st.floats(5e-324, 1.7e308),  # whatever a column can hold
    claimed_at=moments,
    started_at=st.none() | moments,
    expires_at=st.none() | moments,
    cancel_asked_at=st.none() | st.none() | moments,
    deadline_at=st.none() | moments,
)
outcomes = st.one_of(
    st.builds(Completed, st.none() | st.just("{}")),
    st.builds(Failed, problems, st.booleans(), st.none() | delays),
    st.builds(TimedOut, problems),
    st.builds(Snoozed, delays),
    st.builds(Cancelled, problems, st.booleans()),
    st.builds(Interrupted, st.booleans()),
    st.just(Expired()),
    st.builds(Crashed, st.text(), st.booleans(), st.booleans()),
)
backoffs = st.one_of(
    st.builds(Exponential, jitter=st.floats(0, 1)),
    st.builds(Linear, st.floats(0, MAX_DELAY_SECONDS)),
    st.builds(Fixed, st.floats(0, MAX_DELAY_SECONDS), st.floats(0, 1)),
    st.floats().map(lambda wanted: lambda _: wanted),
)
all_rules = st.builds(Rules, backoffs, st.integers(1, 5), st.floats(0, 86400))


def verb_of(outcome: Outcome, settlement: Settlement) -> str:
    """What the change is called in `states`."""
    match settlement.state:
        case State.COMPLETED:
            return "complete"
        case State.FAILED:
            return "fail"
        case State.CANCELLED:
            return "cancel"
        case State.BURIED:
            return "bury"
        case State.EXPIRED:
            return "expire"
        case State.PENDING:
            return {Snoozed: "snooze", Interrupted: "release", Crashed: "reap"}[type(outcome)]
    raise AssertionError(settlement)


@given(task=tasks, outcome=outcomes, now=moments, rules=all_rules)
def test_every_decision_is_a_change_that_the_states_allow(
    task: HeldTask, outcome: Outcome, now: datetime, rules: Rules
) -> None:
    """`decide` is complete: there is an answer for every task, outcome and moment."""
    assume(not isinstance(outcome, Expired) or task.state == "claimed")  # what was started did not expire
    settlement = decide(task, outcome, now, rules)
    before, to = TRANSITIONS[verb_of(outcome, settlement)]
    assert task.state in before
    assert settlement.state == to


@given(task=tasks, outcome=outcomes, now=moments, rules=all_rules)
def test_every_decision_keeps_the_promises_of_the_table(
    task: HeldTask, outcome: Outcome, now: datetime, rules: Rules
) -> None:
    """Retries within bounds, a sane time for what waits, none for what is final, and a reason for what went wrong."""
    settlement = decide(task, outcome, now, rules)
    waits = settlement.state == State.PENDING or (settlement.state == State.FAILED and settlement.is_retry)
    if settlement.is_retry:
        assert task.retry_count + 1 <= task.max_retries
        assert settlement.due_at is not None
    if settlement.due_at is not None:
        assert waits
        assert now <= settlement.due_at <= now + timedelta(seconds=CENTURY_SECONDS)
    assert settlement.scheduled_at in (None, settlement.due_at)
    if settlement.state not in (State.PENDING, State.COMPLETED):
        assert settlement.problem is not None
        assert settlement.problem.code
    if settlement.result is not None:
        assert settlement.state == State.COMPLETED


@given(task=tasks, outcome=outcomes, now=moments, rules=all_rules)
def test_every_decision_counts_what_happened_and_nothing_else(
    task: HeldTask, outcome: Outcome, now: datetime, rules: Rules
) -> None:
    """An attempt if and only if it began; crashes and strikes only by a crash; retries only by a failure."""
    settlement = decide(task, outcome, now, rules)
    is_crash = isinstance(outcome, Crashed)
    if isinstance(outcome, Crashed):
        began = outcome.alone or task.state == "running"
    else:
        began = getattr(outcome, "began", not isinstance(outcome, Expired))
    assert settlement.began == (settlement.outcome is not None) == began
    assert is_crash or not (settlement.is_crash or settlement.is_strike)
    assert not settlement.is_retry or isinstance(outcome, Failed | TimedOut)
    assert settlement.state != State.BURIED or (settlement.is_strike and task.strikes + 1 >= rules.bury_after)
    assert not (settlement.suspect and settlement.state in (State.COMPLETED, State.CANCELLED))


@given(task=tasks, outcome=outcomes, now=moments, rules=all_rules)
def test_the_same_question_has_the_same_answer(task: HeldTask, outcome: Outcome, now: datetime, rules: Rules) -> None:
    """No clock and no dice: chance comes from the id."""
    assert decide(task, outcome, now, rules) == decide(copy.copy(task), copy.copy(outcome), now, rules)


@given(task=tasks, outcome=outcomes, now=moments, rules=all_rules)
def test_who_asked_for_a_cancel_gets_it_or_a_result(
    task: HeldTask, outcome: Outcome, now: datetime, rules: Rules
) -> None:
    """Nothing that was asked to stop waits, or runs, again."""
    settlement = decide(replace(task, cancel_asked_at=now), outcome, now, rules)
    assert settlement.state in (State.CANCELLED, State.COMPLETED)


# --- What a task function may raise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, -0.001, math.nan, math.inf, CENTURY_SECONDS + 1, True, timedelta(seconds=-1)])
def test_a_delay_is_a_number_of_seconds_up_to_a_century(wrong: Any) -> None:
    """It is refused where it is written, in the task function."""
    with pytest.raises(InvalidOptions, match="delay_seconds"):
        Snooze(wrong)
    with pytest.raises(InvalidOptions, match="delay_seconds"):
        Retry(delay_seconds=wrong)


def test_a_delay_may_be_a_timedelta() -> None:
    """Seconds are what is kept."""
    assert Snooze(timedelta(minutes=2)).delay_seconds == 120.0
    assert Retry(delay_seconds=timedelta(seconds=1)).delay_seconds == 1.0
    assert Retry().delay_seconds is None
    assert Retry(delay_seconds=0).delay_seconds == 0.0


def test_signals_are_exceptions_and_interrupts_are_not() -> None:
    """`except Exception` in a task function must not swallow an interrupt."""
    for signal in (Retry(), Snooze(1), Cancel(), Fail("never")):
        assert isinstance(signal, TaskSignal)
        assert str(signal)
    for interrupt in (TimeoutInterrupt, CancelInterrupt, StopInterrupt):
        assert not issubclass(interrupt, Exception)
    assert Fail("never", error_code="NO_SUCH_USER").error_code == "NO_SUCH_USER"
