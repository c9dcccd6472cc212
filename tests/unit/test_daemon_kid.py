"""What is said of a child that has ended, and how long its place rests."""

from __future__ import annotations

import signal

import pytest

from tasklib_daemon.kid import History, how_it_ended
from tasklib_daemon.settings import Restart


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


def test_a_place_rests_longer_after_each_death_in_a_row() -> None:
    """And begins anew after a life that was long enough; old deaths are no crash loop."""
    history, restart = History(), Restart(first_seconds=0.1, longest_seconds=30.0, crash_loop_seconds=60.0)
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
