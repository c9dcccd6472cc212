"""What becomes of the tasks of a worker that died: by what was executing, and by why it died."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from tasklib.outcomes import HeldTask, Rules
from tasklib.states import State
from tasklib_daemon.crashes import CrashReport, Done, Executing, Verdict

if TYPE_CHECKING:
    from tasklib_daemon.plan import Cause

NOW = datetime(2026, 1, 1, tzinfo=UTC)
IDS = [UUID(int=number) for number in range(1, 10)]
RULES = Rules()


def held(number: int = 0, **values: Any) -> HeldTask:
    task = HeldTask(
        id=IDS[number], name="t", queue="default", state="claimed", worker_id="w", fencing_token=7, attempt=0,
        retry_count=0, max_retries=3, crash_count=0, strikes=0, suspect=False, on_crash="retry", timeout_seconds=None,
        claimed_at=NOW - timedelta(seconds=1), started_at=None, expires_at=None, cancel_asked_at=None,
    )  # fmt: skip
    return task._replace(**values)


def report(
    cause: Cause = "crash", *, executing: int = 1, done: tuple[Done, ...] = (), guilty: int | None = None
) -> CrashReport:
    return CrashReport(
        worker_id="w", name="host", hostname="host", pid=1, slot=0, how="killed by SIGSEGV", cause=cause,
        guilty=None if guilty is None else IDS[guilty],
        executing=tuple(Executing(IDS[number], 7, 2.0) for number in range(executing)), done=done, backends=(11, 12),
    )  # fmt: skip


def settled(given: CrashReport, task: HeldTask, rules: Rules = RULES) -> tuple[str, str | None, bool, bool, bool]:
    """State, outcome of the attempt, and whether it is a crash, a strike, a suspect."""
    settlement = Verdict(given, rules).of(task, NOW, 0.5).settlement
    return (
        str(settlement.state),
        settlement.outcome,
        settlement.is_crash,
        settlement.is_strike,
        settlement.suspect,
    )


def test_a_report_survives_being_sent() -> None:
    """It crosses a channel as JSON."""
    sent = report("hard_timeout", executing=2, done=(Done(IDS[5], 3),), guilty=1)
    assert CrashReport(**json.loads(json.dumps(sent.to_message()))) == sent


@pytest.mark.parametrize("state", ["claimed", "running"])
def test_what_was_executing_is_a_crashed_attempt(state: str) -> None:
    """Also if there was no time to mark it: the scoreboard knows better than the row. It tells how the worker died."""
    task = held(state=state, started_at=NOW - timedelta(seconds=9) if state == "running" else None)
    decided = Verdict(report(), RULES).of(task, NOW, 0.5)
    assert settled(report(), task) == ("pending", "WORKER_FAILURE", True, False, True)
    assert decided.settlement.failed_reason == "killed by SIGSEGV"
    assert decided.settlement.due_at is None
    assert decided.task.started_at == NOW - timedelta(seconds=9 if state == "running" else 2.5)


def test_only_a_death_alone_is_a_strike_and_enough_of_them_bury() -> None:
    """A suspect ran alone: it is guilty."""
    assert settled(report(), held(suspect=True, state="running")) == ("pending", "WORKER_FAILURE", True, True, True)
    assert settled(report(), held(suspect=True, state="running", strikes=2))[0] == "buried"


@pytest.mark.parametrize("cause", ["crash", "hard_timeout", "cancelled", "hang", "memory", "recycled", "shutdown"])
def test_what_was_only_held_is_given_back(cause: Cause) -> None:
    """Whatever killed the worker: no attempt, no crash, no suspicion."""
    given = report(cause, guilty=0)
    assert settled(given, held(3)) == ("pending", None, False, False, False)
    assert settled(given, held(3, suspect=True)) == ("pending", None, False, False, True)
    # Marked, and not yet begun: the mark was counted, so it is an attempt that cost nothing.
    assert settled(given, held(3, state="running")) == ("pending", "INTERRUPTED", False, False, False)


def test_an_old_token_is_not_what_was_executing() -> None:
    """The task was given back and claimed again: the second claim had not begun."""
    assert settled(report(), held(fencing_token=8)) == ("pending", None, False, False, False)


def test_what_had_ended_runs_again_and_nobody_is_charged() -> None:
    """Its outcome was not written; the function may have done its work. So what must not run twice does not."""
    given = report(done=(Done(IDS[3], 7),))
    assert settled(given, held(3)) == ("pending", "INTERRUPTED", False, False, False)
    assert settled(given, held(3, on_crash="fail", state="running"))[:2] == ("failed", "INTERRUPTED")


def test_what_had_ended_is_a_suspect_if_nobody_else_was_there() -> None:
    """One that takes its worker along just after it has returned would run again for ever. Of two, nobody is."""
    alone = report(executing=0, done=(Done(IDS[3], 7),))
    assert settled(alone, held(3)) == ("pending", "WORKER_FAILURE", True, False, True)
    assert settled(alone, held(3, suspect=True, strikes=2, state="running"))[0] == "buried"
    assert settled(alone, held(4)) == ("pending", None, False, False, False)
    both = report(executing=0, done=(Done(IDS[3], 7), Done(IDS[4], 7)))
    assert settled(both, held(3)) == ("pending", "INTERRUPTED", False, False, False)
    stopped = report("shutdown", executing=0, done=(Done(IDS[3], 7),))
    assert settled(stopped, held(3)) == ("pending", "INTERRUPTED", False, False, False)


def test_what_must_not_run_twice_fails_once_it_may_have_begun() -> None:
    """It is marked before its first line: if it is not, it had not begun."""
    assert settled(report(), held(on_crash="fail", state="running"))[:2] == ("failed", "WORKER_FAILURE")
    assert settled(report(), held(3, on_crash="fail", state="running"))[:2] == ("failed", "INTERRUPTED")
    assert settled(report(), held(3, on_crash="fail"))[:2] == ("pending", None)


def test_a_hard_timeout_costs_the_guilty_a_retry_and_its_siblings_nothing() -> None:
    """It did not stop when it was told to."""
    given = report("hard_timeout", executing=2, guilty=0)
    assert settled(given, held(0, timeout_seconds=1.0)) == ("failed", "TIMED_OUT", False, False, False)
    guilty = Verdict(given, RULES).of(held(0, timeout_seconds=1.0), NOW, 0.0).settlement
    assert guilty.due_at == NOW + timedelta(seconds=5)
    assert guilty.is_retry
    assert guilty.problem is not None
    assert guilty.problem.code == "TIMEOUT"
    assert settled(given, held(1)) == ("pending", "INTERRUPTED", False, False, False)


def test_a_cancelled_task_is_cancelled_and_its_siblings_lose_nothing() -> None:
    """It ignored the cancel, and its process was killed for it."""
    given = report("cancelled", executing=2, guilty=0)
    assert settled(given, held(0))[:2] == ("cancelled", "CANCELLED")
    assert settled(given, held(0, cancel_asked_at=NOW))[:2] == ("cancelled", "CANCELLED")
    assert settled(given, held(1)) == ("pending", "INTERRUPTED", False, False, False)


@pytest.mark.parametrize("cause", ["recycled", "shutdown"])
def test_what_the_supervisor_ends_for_its_own_reasons_costs_nothing(cause: Cause) -> None:
    """Nobody is guilty, and nobody is suspected."""
    assert settled(report(cause, executing=2), held(1)) == ("pending", "INTERRUPTED", False, False, False)


@pytest.mark.parametrize("cause", ["hang", "memory"])
def test_one_of_several_is_guilty_and_nobody_is_charged_for_it(cause: Cause) -> None:
    """Each runs alone the next time; then the one who does it again is known, and is charged."""
    assert settled(report(cause, executing=2), held(1)) == ("pending", "INTERRUPTED", False, False, True)
    assert settled(report(cause), held(suspect=True)) == ("pending", "WORKER_FAILURE", True, True, True)
    named = report(cause, executing=2, guilty=0)
    assert settled(named, held(0)) == ("pending", "WORKER_FAILURE", True, False, True)
    assert settled(named, held(1)) == ("pending", "INTERRUPTED", False, False, False)


def test_a_crash_after_a_cancel_ends_the_task() -> None:
    """It was to stop, and it has stopped."""
    assert settled(report(), held(cancel_asked_at=NOW))[:2] == (State.CANCELLED, "CANCELLED")
