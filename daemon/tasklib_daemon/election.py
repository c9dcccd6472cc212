"""Elects the keeper that does the duties of the whole cluster: a row with a holder, a term and an end by the database's
clock.

The holder measures its term by its own monotonic clock, from before the renewal was sent. So it stops before the
database may give the row to another keeper. If two keepers believe to be elected all the same, they do no harm: every
duty is safe to do twice. A session lock would not do: it outlives a connection that only the server believes in.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import psycopg

from tasklib.database_errors import is_connection_lost
from tasklib.log import log
from tasklib.runtime.metrics import WorkerMetrics

if TYPE_CHECKING:
    from tasklib.duties.statements import KeeperStatements
    from tasklib.runtime.loop import Service
    from tasklib.runtime.session import Session

LONGEST_CANDIDATURE_SECONDS = 1.0  # between two tries of a keeper that is not elected
NOT_ELECTED_SECONDS = 0.25


class Election:
    """A duty itself: it stands for election, and renews three times per term."""

    def __init__(
        self,
        session: Session,
        statements: KeeperStatements,
        *,
        name: str,
        holder: str,
        ttl_seconds: float,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        self._session = session
        self._statements = statements
        self._name = name
        self._holder = holder
        self._ttl_seconds = ttl_seconds
        self._metrics = metrics or WorkerMetrics()
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
                self.answered = time.monotonic()  # a refusal is an answer too: the connection works
            raise
        self.answered = time.monotonic()
        if term != self.term:
            self._note(term)
        self._until = -math.inf if term is None else sent + self._ttl_seconds
        return min(self._ttl_seconds / 3, LONGEST_CANDIDATURE_SECONDS)

    def resign(self) -> None:
        """Another keeper can be elected at once."""
        if self.is_held():
            self._until = -math.inf
            self._session.run(self._statements.resign(self._name, self._holder))

    def _note(self, term: int | None) -> None:
        self._since = time.monotonic()
        if term is not None:
            self._metrics.count("elected")
            log.info("keeper.elected", election=self._name, term=term)
        else:
            log.info("keeper.replaced", election=self._name, term=self.term)
        self.term = term


class WhenElected:
    """A duty of the elected keeper only, once it has been elected for `after_seconds`."""

    def __init__(self, election: Election, duty: Service, *, after_seconds: float = 0.0) -> None:
        self._election = election
        self._duty = duty
        self._after_seconds = after_seconds

    def run_once(self) -> float | None:
        if not self._election.is_held(self._after_seconds):
            return NOT_ELECTED_SECONDS
        return self._duty.run_once()
