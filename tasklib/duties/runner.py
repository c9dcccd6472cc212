"""Runs several duties on one connection, each at its own interval."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from tasklib.clock import time
from tasklib.database_errors import is_connection_lost
from tasklib.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tasklib.runtime.loop import Service

AFTER_FAILURE_SECONDS = 2.0  # before a duty that failed is tried again


class DutyRunner:
    def __init__(self, duties: Sequence[Service], *, on_refusal: Callable[[], None] = lambda: None) -> None:
        self._due = dict.fromkeys(duties, 0.0)
        self._on_refusal = on_refusal

    def run_once(self) -> float | None:
        for duty, due in self._due.items():
            if time.monotonic() >= due:
                self._due[duty] = time.monotonic() + AFTER_FAILURE_SECONDS
                pause = self._run(duty)
                self._due[duty] = time.monotonic() + (pause or 0.0)
        return max(min(self._due.values()) - time.monotonic(), 0.0)

    def _run(self, duty: Service) -> float | None:
        """An error in one duty does not stop the rest. A lost connection concerns all of them: the duty that noticed
        it runs first in the next round, because a round without a statement would look as if the database were back.
        """
        try:
            return duty.run_once()
        except psycopg.Error as error:
            if is_connection_lost(error):
                self._due[duty] = 0.0
                raise
            self._on_refusal()
            log.warning("duty.failed", duty=type(duty).__name__.lower(), error=str(error).partition("\n")[0])
            return AFTER_FAILURE_SECONDS
        except Exception:  # noqa: BLE001 - a bug in one duty must not stop the others, or the election
            self._on_refusal()
            log.exception("duty.failed", duty=type(duty).__name__.lower())
            return AFTER_FAILURE_SECONDS
