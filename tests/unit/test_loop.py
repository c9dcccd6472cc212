"""The loop skeleton: what it says about the database."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import psycopg

from tasklib.runtime.loop import Loop

if TYPE_CHECKING:
    import pytest


class Asking:
    """A service whose rounds are scripted: the database is away, or is not asked, or answers."""

    def __init__(self, *rounds: str) -> None:
        self._rounds = list(rounds)
        self.answers = 0
        self.is_over = threading.Event()

    def run_once(self) -> float | None:
        if not self._rounds:
            self.is_over.set()
            return None
        match self._rounds.pop(0):
            case "away":
                raise psycopg.OperationalError("the connection is lost")
            case "answer":
                self.answers += 1
        return 0.0


def said(caplog: pytest.LogCaptureFixture, *rounds: str) -> list[str]:
    service = Asking(*rounds)
    loop = Loop("test", service)
    loop.answers = lambda: service.answers
    with caplog.at_level(logging.INFO, logger="tasklib"):
        loop.start()
        assert service.is_over.wait(20)
        loop.stop()
        loop.join(20)
    return [record.getMessage().split()[0] for record in caplog.records]


def test_the_database_is_back_when_it_has_answered(caplog: pytest.LogCaptureFixture) -> None:
    """Not when there was nothing to ask it: an operator would believe that the outage is over."""
    assert said(caplog, "away", "nothing", "away", "nothing", "answer", "nothing") == ["database.lost", "database.back"]


def test_a_database_that_stays_away_is_not_told_to_be_back(caplog: pytest.LogCaptureFixture) -> None:
    """However often the loop goes round meanwhile."""
    assert said(caplog, "answer", "away", "nothing", "nothing", "away", "nothing") == ["database.lost"]
