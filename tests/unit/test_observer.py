"""The parts that a observer counts on, without a database: limits, pauses, beats, and when a lease is lost."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest

import tasklib
from tasklib.registry import Registry
from tasklib.runtime.loop import Loop
from tasklib.runtime.observer import WorkerObserver
from tasklib.worker import execution as execution_module
from tasklib.worker import lease as lease_module
from tasklib.worker.basis import Basis, Options
from tasklib.worker.buffer import Buffer
from tasklib.worker.execution import Execution
from tasklib.worker.lease import Lease
from tasklib.worker.served import Served
from tests.unit.test_buffer import Clock, execution, executions
from tools.waiting import wait_until

NOW = datetime(2030, 1, 1, tzinfo=UTC)
DELTA = 10.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(execution_module, "time", made)
    monkeypatch.setattr(lease_module, "time", made)
    return made


# --- when a task's process may be killed ---


@pytest.mark.parametrize(
    ("timeout", "cancelled_after", "isolation", "limit"),
    [
        (None, None, "worker", math.inf),
        (5.0, None, "worker", 15.0),
        (None, 2.0, "worker", 12.0),
        (5.0, 2.0, "worker", 12.0),  # whichever is first
        (5.0, 7.0, "worker", 15.0),
        (5.0, 2.0, "process", math.inf),  # its own process is killed, by who started it
    ],
)
def test_a_task_must_end_a_delta_after_it_was_told_to_stop(
    clock: Clock, timeout: float | None, cancelled_after: float | None, isolation: Any, limit: float
) -> None:
    function = tasklib.task(name="job", isolation=isolation)(lambda: None)
    claimed = execution().claimed
    held = Execution(
        claimed._replace(held=claimed.held._replace(timeout_seconds=timeout)), function, is_coroutine=False
    )
    begun_at = clock.seconds
    held.begin(DELTA)
    if cancelled_after is not None:
        clock.seconds += cancelled_after
        held.ask_to_cancel(NOW, DELTA)
    assert held.must_end_by - begun_at == limit


# --- pauses ---


def test_a_paused_buffer_hands_out_nothing_and_hands_back_what_comes() -> None:
    """Also what was claimed before the pause and arrives after it."""
    buffer = Buffer(2, lambda: True)
    waiting = executions(3)
    assert buffer.add(waiting) == []
    begun = buffer.take(is_coroutine=False)
    assert buffer.counts() == (2, 1)
    assert buffer.pause() == waiting[1:]
    late = executions(2)
    assert buffer.add(late) == late
    assert (buffer.take(is_coroutine=False), buffer.next_to_prepare(), buffer.capacity()) == (None, None, 0)
    assert buffer.executing() == [begun]
    buffer.resume()
    assert buffer.capacity() == 1


@pytest.mark.parametrize("how", ["pause", "close"])
def test_what_was_marked_in_the_meantime_is_not_admitted(how: str) -> None:
    """Nobody would ever take it, and it would keep its slot."""
    buffer = Buffer(1, lambda: True)
    marked = execution(on_crash="fail")
    buffer.add([marked])
    assert buffer.next_to_prepare() is marked
    getattr(buffer, how)()
    assert not buffer.admit(marked)
    buffer.done([(marked, 0.0)])
    assert buffer.executing() == []


def test_a_closed_buffer_stays_closed_when_it_is_resumed() -> None:
    buffer = Buffer(1, lambda: True)
    buffer.pause()
    buffer.close()
    buffer.resume()
    assert buffer.capacity() == 0


# --- beats ---


class Sleeper:
    def __init__(self, pause: float | None) -> None:
        self.pause = pause
        self.rounds = 0

    def run_once(self) -> float | None:
        self.rounds += 1
        return self.pause


@pytest.mark.parametrize("pause", [None, 3600.0, 1e12])
def test_a_loop_beats_also_in_a_long_pause(monkeypatch: pytest.MonkeyPatch, pause: float | None) -> None:
    """And ends its pause when it is woken."""
    monkeypatch.setattr("tasklib.runtime.loop.LONGEST_SILENCE_SECONDS", 0.005)
    beats: list[int] = []
    sleeper = Sleeper(pause)
    loop = Loop("test", sleeper, lambda: beats.append(1))
    loop.start()
    wait_until(lambda: len(beats) > 3, "beats")
    assert sleeper.rounds == 1
    loop.wake()
    wait_until(lambda: sleeper.rounds == 2, "another round")
    loop.stop()
    loop.join(20)
    assert not loop.is_alive()


def test_a_short_pause_ends_by_itself() -> None:
    sleeper = Sleeper(0.001)
    loop = Loop("test", sleeper)
    loop.start()
    wait_until(lambda: sleeper.rounds > 3, "rounds")
    loop.stop()
    loop.join(20)
    assert not loop.is_alive()


# --- when a lease is lost ---


class Database:
    """Answers a renewal, or fails."""

    def __init__(self) -> None:
        self.is_away = False

    def run(self, _: Any) -> datetime:
        if self.is_away:
            raise OSError("away")
        return NOW


@pytest.fixture
def database() -> Database:
    return Database()


@pytest.fixture
def lease(clock: Clock, database: Any) -> Lease:
    basis = Basis(
        tasklib.Config("", lease_seconds=15), Served(Registry(), None, []), Options(1, 1.0, None, 0.0, listen=False),
        WorkerObserver(), None,
    )  # fmt: skip
    basis.sessions["lease"], basis.statements = database, _Statements()  # type: ignore[assignment]
    made = Lease(basis, Buffer(1, lambda: True))
    made.run_once()
    return made


class _Statements:
    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


def test_a_lease_is_lost_when_it_has_run_out_and_could_not_be_renewed(
    lease: Lease, clock: Clock, database: Database
) -> None:
    database.is_away = True
    clock.seconds += 14.9
    with pytest.raises(OSError, match="away"):
        lease.run_once()
    assert not lease.is_lost()
    clock.seconds += 0.1
    assert lease.is_lost()
    database.is_away = False
    lease.run_once()
    assert not lease.is_lost()


def test_a_starved_worker_tries_to_renew_before_its_lease_is_lost(lease: Lease, clock: Clock) -> None:
    """Nobody tried: it ran out all the same. It may be that somebody kept it; but not for long, if no answer comes."""
    clock.seconds += 60
    assert not lease.is_valid()
    assert not lease.is_lost()
    clock.seconds += 4.9
    assert not lease.is_lost()
    clock.seconds += 0.2
    assert lease.is_lost()
    lease.run_once()
    assert not lease.is_lost()
    clock.seconds += 60
    assert not lease.is_lost()  # this is another time


def test_nobody_has_to_watch() -> None:
    """The observer of a worker that nobody watches takes everything, and does nothing."""
    observer, held = WorkerObserver(), execution()
    observer.named("worker-1")
    observer.began(held)
    observer.must_end_by(held, 1.0)
    observer.ended(held)
    observer.settled([held])
    observer.beat()
    observer.counts(1, 1)
    observer.connected("claim", 1)
    observer.disconnected("claim")
    assert vars(observer) == {}
