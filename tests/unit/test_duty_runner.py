"""Several duties on one connection."""

from __future__ import annotations

import psycopg
import pytest

from tasklib.duties.runner import DutyRunner


class Duty:
    def __init__(self, pause_seconds: float, *, raises: type[psycopg.Error] | None = None) -> None:
        self._pause_seconds = pause_seconds
        self.raises = raises
        self.times = 0

    def run_once(self) -> float | None:
        self.times += 1
        if self.raises is not None:
            raise self.raises
        return self._pause_seconds


def test_a_lost_connection_is_looked_for_in_every_round() -> None:
    """A round that asks nothing of the database does not end: its loop would say that the database is back, and be in a
    hurry again, while it is away.
    """
    duty = Duty(100, raises=psycopg.OperationalError)
    duty_runner = DutyRunner([Duty(100), duty])
    for _ in range(3):
        with pytest.raises(psycopg.OperationalError):
            duty_runner.run_once()
    duty.raises = None
    pause = duty_runner.run_once()
    assert duty.times == 4
    assert pause is not None
    assert pause > 90


def test_a_refused_duty_keeps_no_other() -> None:
    """What one is refused is tried again later; the others go on, and the connection with them."""
    refused, other = Duty(100, raises=psycopg.errors.InsufficientPrivilege), Duty(0)
    duty_runner = DutyRunner([refused, other])
    for _ in range(3):
        duty_runner.run_once()
    assert (refused.times, other.times) == (1, 3)
