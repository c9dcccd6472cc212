"""The database's clock, as far as a worker needs it between two answers: its last word, and the time since then."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta


class DatabaseClock:
    def __init__(self) -> None:
        self._said = (datetime.now(UTC), time.monotonic())  # until the database has spoken

    def set(self, now: datetime) -> None:
        self._said = (now, time.monotonic())

    def now(self) -> datetime:
        said, at = self._said
        return said + timedelta(seconds=time.monotonic() - at)
