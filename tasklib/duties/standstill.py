"""Warns of tasks that this role cannot claim although no statement fails. Row-level security hides rows without an
error, and so does a lock that is never released. Everything else would look as if there were no work.

Statistics of the queues are read with the rights of their owner. If they show tasks that have been ready for a while,
and this role can lock none of their rows, twice in a row, the queue stands still. A queue that is paused, or whose cap
is in use, does not: its tasks are meant to wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasklib.clock import time
from tasklib.log import log
from tasklib.statistics import StatisticsStatements

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from tasklib.config import Config
    from tasklib.runtime.session import Session
    from tasklib.statements import WorkerStatements

PAUSE_SECONDS = 10.0
OLD_SECONDS = 10.0  # a task that has been ready for less may be about to be claimed
TELL_AGAIN_SECONDS = 600.0
HINT = (
    "run `tasklib doctor`: is row-level security on for a table of tasklib, or does a session hold locks on these rows?"
)


class Standstill:
    def __init__(
        self,
        config: Config,
        session: Session,
        statements: WorkerStatements,
        queues: Sequence[str] | None,
        *,
        pause_seconds: float = PAUSE_SECONDS,
        old_seconds: float = OLD_SECONDS,
    ) -> None:
        self._session = session
        self._statements = statements
        self._statistics = StatisticsStatements(config)
        self._queues = queues
        self._pause_seconds = pause_seconds
        self._old_seconds = old_seconds
        self._suspected: set[str] = set()
        self._seen: list[UUID] | None = None  # tasks at the last look
        self._tell_at = 0.0
        self.hidden: list[str] = []  # queues whose tasks cannot be claimed

    def run_once(self) -> float | None:
        found = self._look()
        self.hidden = sorted(found & self._suspected)
        self._suspected = found
        if self.hidden and time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + TELL_AGAIN_SECONDS
            log.error("tasks.unclaimable", queues=self.hidden, hint=HINT)
        elif not self.hidden:
            self._tell_at = 0.0
        return self._pause_seconds

    def _look(self) -> set[str]:
        """Queues with old tasks of which this role can lock none. Mostly this is one probe of an index: there is no
        task, or it is new, or it is another one than at the last look, or the role could claim it.
        """
        statement = self._statements.lockable(self._queues, self._old_seconds, self._seen)
        can_claim, self._seen = self._session.run(statement)
        if can_claim:
            return set()
        waiting = self._session.run(self._statistics.queues(most=1))
        found = {
            each.queue
            for each in waiting
            if each.ready
            and (each.oldest_ready_age_seconds or 0.0) >= self._old_seconds
            and (self._queues is None or each.queue in self._queues)
        }
        closed = {*self._session.run(self._statements.closed_queues())} if found else set()
        return set() if "*" in closed else found - closed
