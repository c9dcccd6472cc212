"""A worker's idea of the database's time."""

from datetime import UTC, datetime, timedelta

import pytest

from tasklib.runtime import database_clock as clock_module
from tasklib.runtime.database_clock import DatabaseClock

START = datetime(2026, 1, 1, tzinfo=UTC)


class Time:
    """A monotonic clock that goes on when told to, and a database's beside it."""

    def __init__(self) -> None:
        self.passed = 1000.0
        self.database_ahead = 0.0

    def monotonic(self) -> float:
        return self.passed

    def database(self) -> datetime:
        return START + timedelta(seconds=self.passed + self.database_ahead)


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Time:
    passing = Time()
    monkeypatch.setattr(clock_module, "time", passing)
    return passing


def ask(passing: Time, clock: DatabaseClock, there: float, back: float) -> None:
    asked_at = passing.monotonic()
    passing.passed += there
    said = passing.database()
    passing.passed += back
    clock.set(said, asked_at)


def ahead(passing: Time, clock: DatabaseClock) -> float:
    return (clock.now() - passing.database()).total_seconds()


@pytest.mark.parametrize(("there", "back"), [(0.0, 0.018), (0.018, 0.0), (0.001, 0.001)])
def test_it_is_never_behind(passing: Time, there: float, back: float) -> None:
    """A retry's time is reckoned with it, and no retry is early; it is ahead by no more than the answer took."""
    clock = DatabaseClock()
    ask(passing, clock, there, back)
    passing.passed += 3.0
    assert -1e-6 <= ahead(passing, clock) <= there + back + 1e-6


def test_a_slow_answer_spoils_nothing(passing: Time) -> None:
    """Five seconds behind a lock say little about the time."""
    clock = DatabaseClock()
    ask(passing, clock, 0.001, 0.001)
    ask(passing, clock, 5.0, 0.001)
    assert -1e-6 <= ahead(passing, clock) <= 0.003


def test_a_reading_ages(passing: Time) -> None:
    """Clocks drift apart: after a while an ordinary answer is better than an old, quick one."""
    clock = DatabaseClock()
    ask(passing, clock, 0.0005, 0.0005)
    passing.passed += 60.0
    passing.database_ahead = 0.004
    ask(passing, clock, 0.003, 0.003)
    assert -1e-6 <= ahead(passing, clock) <= 0.006


@pytest.mark.parametrize("step", [-3600.0, -0.5, 0.5, 3600.0])
def test_a_clock_that_was_set_is_followed(passing: Time, step: float) -> None:
    """Also by an answer that is slower than the one before; another server may have another time."""
    clock = DatabaseClock()
    ask(passing, clock, 0.001, 0.001)
    passing.database_ahead = step
    ask(passing, clock, 0.01, 0.01)
    assert -1e-6 <= ahead(passing, clock) <= 0.02 + 1e-6


def test_before_the_database_has_spoken_it_is_our_own() -> None:
    assert abs((DatabaseClock().now() - datetime.now(UTC)).total_seconds()) < 1
