"""The database's clock between two answers: the time that the database last gave, plus the time that has passed since.

It is never behind, so that no retry is early: the time in an answer counts as the time when the question was sent. So
the clock may be ahead by as long as the answer took, and a quick answer is worth more than a slow one.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tasklib.clock import time

DRIFT = 0.0002  # seconds per second by which two clocks may drift apart: ten times that of a bad crystal


@dataclass(frozen=True)
class Reading:
    said: datetime
    asked_at: float  # monotonic
    doubt: float  # how long the answer took

    def at(self, moment: float) -> datetime:
        return self.said + timedelta(0, moment - self.asked_at)

    def epoch_at(self, moment: float) -> float:
        """The same in seconds since 1970, in a tenth of the time."""
        return self._epoch + moment

    @functools.cached_property
    def _epoch(self) -> float:
        return self.said.timestamp() - self.asked_at

    def doubt_at(self, moment: float) -> float:
        return self.doubt + DRIFT * (moment - self.asked_at)


class DatabaseClock:
    """Use one `reading` for several moments that belong together: another reading might change their order."""

    def __init__(self) -> None:
        self.reading = Reading(datetime.now(UTC), time.monotonic(), math.inf)  # until the database has answered

    def now(self) -> datetime:
        return self.reading.at(time.monotonic())

    def set(self, said: datetime, asked_at: float) -> None:
        """Keeps the better of the old reading and this one; or this one, if they contradict each other."""
        old, new = self.reading, Reading(said, asked_at, time.monotonic() - asked_at)
        doubt = old.doubt_at(asked_at)
        is_ahead = (old.at(asked_at) - said).total_seconds()
        if new.doubt <= doubt or not -new.doubt <= is_ahead <= doubt:
            self.reading = new
