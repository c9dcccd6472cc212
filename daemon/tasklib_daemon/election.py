"""Who does what is done once for all daemons: a row with a holder, a term, and a time by the database's clock.

The holder judges itself by its own monotonic clock, counted from before its renewal was sent: when the database may
give the row to another, it has stopped. Should two believe it at once all the same, they do no harm: every duty is safe
to do twice. No session lock: one would outlive a connection that only the server still believes in.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import psycopg

from tasklib.connection import is_connection_lost
from tasklib.log import log
from tasklib.worker.tally import Tally

if TYPE_CHECKING:
    from tasklib.duties.statements import KeeperStatements
    from tasklib.worker.loop import Service
    from tasklib.worker.session import Session

LONGEST_CANDIDATURE_SECONDS = 1.0  # between two looks of those who are not elected
NOT_ELECTED_SECONDS = 0.25


class Election:
    """A duty itself: stand, and renew three times in a term's time."""

    def __init__(
        self,
        session: Session,
        statements: KeeperStatements,
        *,
        name: str,
        holder: str,
        ttl_seconds: float,
        tally: Tally | None = None,
    ) -> None:
        self._session = session
        self._statements = statements
        self._name = name
        self._holder = holder
        self._ttl_seconds = ttl_seconds
        self._tally = tally or Tally()
        self._until = -math.inf
        self._since = math.inf
        self.term: int | None = None
        self.answered = -math.inf  # monotonic: when the database last answered

    def is_held(self, for_seconds: float = 0.0) -> bool:
        now = time.monotonic()
        return now < self._until and now - self._since >= for_seconds

    def run_once(self) -> float | None:
        sent = time.monotonic()
        try:
            term = self._session.run(self._statements.stand(self._name, self._holder, self._ttl_seconds))
        except psycopg.Error as error:
            if not is_connection_lost(error):
                self.answered = time.monotonic()  # a refusal is an answer: it is not the connection that is at fault
            raise
        self.answered = time.monotonic()
        if term != self.term:
            self._note(term)
        self._until = -math.inf if term is None else sent + self._ttl_seconds
        return min(self._ttl_seconds / 3, LONGEST_CANDIDATURE_SECONDS)

    def resign(self) -> None:
        """The next one need not wait."""
        if self.is_held():
            self._until = -math.inf
            self._session.run(self._statements.resign(self._name, self._holder))

    def _note(self, term: int | None) -> None:
        self._since = time.monotonic()
        if term is not None:
            self._tally.count("elected")
            log.info("keeper.elected", election=self._name, term=term)
        else:
            log.info("keeper.replaced", election=self._name, term=self.term)
        self.term = term


class WhenElected:
    """A duty that is done by the elected keeper only, from `after_seconds` in office on."""

    def __init__(self, election: Election, duty: Service, *, after_seconds: float = 0.0) -> None:
        self._election = election
        self._duty = duty
        self._after_seconds = after_seconds

    def run_once(self) -> float | None:
        if not self._election.is_held(self._after_seconds):
            return NOT_ELECTED_SECONDS
        return self._duty.run_once()
