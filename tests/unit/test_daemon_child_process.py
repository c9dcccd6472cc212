"""What is said of a child that has ended, and how long its slot rests."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from tasklib_daemon.child_process import ChildProcess, StopProgress, _overdue, how_it_ended
from tasklib_daemon.children import SlotHistory
from tasklib_daemon.plan import Overdue, Slot
from tasklib_daemon.scoreboard import ScoreboardEntry
from tasklib_daemon.settings import Restart

if TYPE_CHECKING:
    from uuid import UUID

    from tasklib_daemon.plan import Cause


@pytest.mark.parametrize(
    ("status", "why", "words"),
    [
        (0, None, "exited with code 0"),
        (3 << 8, None, "exited with code 3"),
        (3 << 8, "the daemon stops", "exited with code 3"),
        (signal.SIGKILL, None, "killed by SIGKILL, perhaps out of memory"),
        (signal.SIGKILL, "a task was over its time", "killed by SIGKILL: a task was over its time"),
        (signal.SIGSEGV, None, "killed by SIGSEGV"),
        (signal.SIGSEGV | 0x80, None, "killed by SIGSEGV"),  # with a core dump
        (signal.SIGRTMIN + 1, None, f"killed by signal {signal.SIGRTMIN + 1}"),  # one without a name
    ],
)
def test_how_it_ended(status: int, why: str | None, words: str) -> None:
    """In words that a person reads in the attempt: only if it was not we who killed it, memory is a guess."""
    assert how_it_ended(status, why) == words


@pytest.mark.parametrize(
    ("cause", "guilty", "stopped", "words"),
    [
        ("shutdown", None, None, "killed by SIGKILL: the daemon stops"),
        ("recycled", None, None, "killed by SIGKILL: the reload was given up"),
        ("shutdown", None, "a new generation serves", "killed by SIGKILL: a new generation serves"),
        (None, None, "its claim loop has stood still", "killed by SIGKILL: its claim loop has stood still"),
        ("hard_timeout", uuid4(), "the daemon stops", "killed by SIGKILL: a task was over its time"),
        ("cancelled", uuid4(), None, "killed by SIGKILL: a cancelled task did not stop"),
    ],
)
def test_a_kill_of_ours_is_never_told_as_a_lack_of_memory(
    cause: Cause | None, guilty: UUID | None, stopped: str | None, words: str
) -> None:
    """Also if the child was not told to stop before: the daemon stops at once, or a reload is given up."""
    process = subprocess.Popen(["sleep", "60"])
    nothing: Any = SimpleNamespace()
    child = ChildProcess(
        child_id=1, slot=Slot("worker", 1), generation=1, scoreboard=nothing, channel=nothing, stacks=nothing,
        pid=process.pid, stop=StopProgress(why=stopped),
    )  # fmt: skip
    child.kill(cause, guilty)
    _, status = os.waitpid(process.pid, 0)
    process.returncode = -signal.SIGKILL
    assert how_it_ended(status, child.stop.why) == words


def test_a_slot_rests_longer_after_each_death_in_a_row() -> None:
    """And begins anew after a life that was long enough; old deaths are no crash loop."""
    history, restart = SlotHistory(), Restart(first_seconds=0.1, longest_seconds=30.0, crash_loop_seconds=60.0)
    pauses = []
    for _ in range(4):
        history.add(100.0, lived_seconds=0.0, restart=restart)
        pauses.append(history.resting_until - 100.0)
    for number, pause in enumerate(pauses):
        assert 0.05 * 2**number <= pause <= 0.1 * 2**number + 1e-9
    assert (history.restarts, len(history.deaths)) == (4, 4)
    history.add(1000.0, lived_seconds=900.0, restart=restart)
    assert history.resting_until - 1000.0 <= 0.1 + 1e-9
    assert (history.restarts, history.deaths) == (5, [1000.0])


def test_a_crash_loop_lasts_until_somebody_has_lived() -> None:
    """However long the slot rests in between: with pauses of half a minute there are never five in a minute."""
    history, restart = SlotHistory(), Restart(longest_seconds=30.0, crash_loop_deaths=5, crash_loop_seconds=60.0)
    for number in range(8):
        history.add(100.0 * number, lived_seconds=0.0, restart=restart)
        assert history.is_crash_loop(100.0 * number, 0.0, restart) == (number >= 4)
    later = 1000.0
    assert history.is_crash_loop(later, 1.0, restart)
    assert not history.is_crash_loop(later, 40.0, restart)


def test_a_cancel_is_for_one_run() -> None:
    """One that was asked to stop, and was retried, is not killed for that when it runs again."""
    task_id = uuid4()
    view: Any = SimpleNamespace(
        executing=[ScoreboardEntry(task_id, 2, 0.0, math.inf, is_cancelled=False, is_isolated=False)]
    )
    assert _overdue(view, {(task_id, 1): 5.0}, 10.0) is None
    assert _overdue(view, {(task_id, 2): 5.0}, 10.0) == Overdue(task_id, "cancelled")
    assert _overdue(view, {(task_id, 2): 15.0}, 10.0) is None
