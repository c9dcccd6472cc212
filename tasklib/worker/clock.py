"""The database's clock, as a worker needs it between two answers: what the database last said, and the time since then.

It is never behind, so that no retry is early: the time said is taken for that of the moment when the question was sent.
What it may be ahead by is how long the answer took, so a quick answer is worth more than a slow one.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tasklib.clock import time

DRIFT = 0.0002  # seconds in a second, that two clocks may part: ten times what a bad crystal does


@dataclass(frozen=True)
class Reading:
    said: datetime
    asked_at: float  # monotonic
    doubt: float  # the answer took so long

    def at(self, moment: float) -> datetime:
        return self.said + timedelta(0, moment - self.asked_at)

    def epoch_at(self, moment: float) -> float:
        """The same in seconds since 1970, at a tenth of the price."""
        return self._epoch + moment

    @functools.cached_property
    def _epoch(self) -> float:
        return self.said.timestamp() - self.asked_at

    def doubt_at(self, moment: float) -> float:
        return self.doubt + DRIFT * (moment - self.asked_at)


class DatabaseClock:
    def __init__(self) -> None:
        self._reading = Reading(datetime.now(UTC), time.monotonic(), math.inf)  # until the database has spoken

    def now(self) -> datetime:
        return self._reading.at(time.monotonic())

    @property
    def reading(self) -> Reading:
        """For several moments that are told together: another one might turn their order round."""
        return self._reading

    def set(self, said: datetime, asked_at: float) -> None:
        """Believe the better of the old reading and this one; the newer, if they cannot both be true."""
        old, new = self._reading, Reading(said, asked_at, time.monotonic() - asked_at)
        doubt = old.doubt_at(asked_at)
        is_ahead = (old.at(asked_at) - said).total_seconds()
        if new.doubt <= doubt or not -new.doubt <= is_ahead <= doubt:
            self._reading = new
