"""The one background loop: a thread that calls `run_once` again and again, and survives whatever that raises."""

from __future__ import annotations

import math
import random
import threading
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import psycopg

from tasklib.clock import time
from tasklib.database_errors import is_connection_lost
from tasklib.errors import DatabaseUnavailable
from tasklib.log import log

if TYPE_CHECKING:
    from collections.abc import Callable

FailureKind: TypeAlias = Literal["outage", "refused", "bug"]
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 2.0
LONGEST_SILENCE_SECONDS = 5.0  # a watchdog would take more for a hang


class Service(Protocol):
    def run_once(self) -> float | None:
        """Does what there is to do. Answers after how many seconds to call again. None: when woken."""


class Loop(threading.Thread):
    """Runs one service until it is stopped. A lost database costs pauses, nothing else."""

    def __init__(self, name: str, service: Service, on_beat: Callable[[], None] = lambda: None) -> None:
        super().__init__(name=f"tasklib-{name}", daemon=True)
        self.service = service
        self._role = name
        self._on_beat = on_beat
        self._woken = threading.Event()
        self._is_stopping = False
        self._failures = 0
        self.on_failure: Callable[[str, FailureKind], None] = lambda _loop, _kind: None
        self.answers: Callable[[], int] | None = None  # how often the database has answered this loop
        self._answers_before = 0
        self.beats = 0  # grows with every round, unless the loop hangs

    def wake(self) -> None:
        if not self._woken.is_set():  # many times cheaper than to set it again
            self._woken.set()

    def stop(self) -> None:
        self._is_stopping = True
        self._woken.set()

    def run(self) -> None:
        while True:
            self._woken.clear()
            if self._is_stopping:  # read after the clear: a later `stop` ends the wait below
                return
            delay = self._round()
            self.beats += 1
            self._on_beat()
            if delay is None or delay > 0:
                self._rest(math.inf if delay is None else delay)

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._woken.wait(min(seconds, LONGEST_SILENCE_SECONDS)):
            seconds = until - time.monotonic()
            if seconds <= 0:
                return
            self._on_beat()

    def _round(self) -> float | None:
        try:
            delay = self.service.run_once()
        except (psycopg.Error, DatabaseUnavailable) as error:
            return self._pause_after(error)
        except Exception:  # noqa: BLE001 - a loop that ends would look alive and do nothing
            log.exception("loop.failed", loop=self._role)
            self.on_failure(self._role, "bug")
            return self._pause()
        if self._failures and self._has_answer():
            log.info("database.back", loop=self._role, failures=self._failures)
            self._failures = 0
        return delay

    def _has_answer(self) -> bool:
        """A round without a statement does not prove that the database is back."""
        return self.answers is None or self.answers() != self._answers_before

    def _pause_after(self, error: Exception) -> float:
        is_outage = not isinstance(error, psycopg.Error) or is_connection_lost(error)
        self.on_failure(self._role, "outage" if is_outage else "refused")
        if self._failures == 0 or not is_outage:
            event = "database.lost" if is_outage else "database.refused"
            log.warning(event, loop=self._role, error=str(error).strip().partition("\n")[0])
        return self._pause()

    def _pause(self) -> float:
        """Pauses that double, with a random part: many workers must not come back at the same moment. A wake-up does
        not end the pause, or the loop would spin.
        """
        self._failures += 1
        self._answers_before = self.answers() if self.answers is not None else 0
        longest = min(FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures - 1, 10), LONGEST_PAUSE_SECONDS)
        deadline = time.monotonic() + longest * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing
        while not self._is_stopping and (remaining := deadline - time.monotonic()) > 0:
            self._woken.clear()
            self._woken.wait(remaining)
        return 0.0
