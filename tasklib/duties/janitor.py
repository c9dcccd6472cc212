"""Deletes what has been kept for long enough: finished tasks with their attempts, and snapshots of workers.

Hourly, in bounded batches, and resting as long as it works. Tasks are looked at in the order of their keys, which are
made from the time: only those that were made before the shortest time for which anything is kept, page by page from
where the last page ended. Two at once do no harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

import psycopg

from tasklib.clock import time
from tasklib.duties.apart import first_line, may_be_one_row, send_apart
from tasklib.duties.statements import Pruned
from tasklib.log import log

if TYPE_CHECKING:
    from tasklib.duties.statements import KeeperStatements
    from tasklib.worker.session import Session

EVERY_SECONDS = 3600.0
BATCH = 1_000
LONGEST_REST_SECONDS = 5.0
DAY_SECONDS = 86400.0
FUNCTIONS_SECONDS = 90 * DAY_SECONDS  # since a worker last had them
_FIRST = UUID(int=0)
_LAST = UUID(int=2**128 - 1)


@dataclass(frozen=True, slots=True)
class Retention:
    """How long finished tasks and snapshots are kept. None: for ever, as are buried tasks."""

    completed_seconds: float | None = 30 * DAY_SECONDS  # cancelled and expired ones too
    failed_seconds: float | None = 90 * DAY_SECONDS
    states_seconds: float | None = 7 * DAY_SECONDS  # of workers, and of tasks by the minute

    def ranges(self, now: float) -> list[tuple[UUID, UUID]]:
        """The keys among which there may be tasks that are old enough. Of the keys that lie in the future, nobody knows
        when they were made: they are not ours, and are all looked at.
        """
        kept = [each for each in (self.completed_seconds, self.failed_seconds) if each is not None]
        if not kept:
            return []
        return [(_FIRST, _key(now - min(kept))), (_key(now + DAY_SECONDS), _LAST)]


class Janitor:
    def __init__(self, session: Session, statements: KeeperStatements, retention: Retention) -> None:
        self._session = session
        self._statements = statements
        self._retention = retention
        self._ranges: list[tuple[UUID, UUID]] | None = None  # what is left of a pass; None: none is under way
        self._tasks = 0
        self._states = 0
        self._rollups = 0

    def run_once(self) -> float | None:
        if self._ranges is None:
            self._ranges = self._retention.ranges(time.time())
        began = time.monotonic()
        if self._prune_tasks(self._ranges) or self._prune_states() or self._prune_rollups():
            return min(time.monotonic() - began, LONGEST_REST_SECONDS)
        self._session.run(self._statements.forget_functions(FUNCTIONS_SECONDS))
        self._end()
        return EVERY_SECONDS

    def _prune_tasks(self, ranges: list[tuple[UUID, UUID]]) -> bool:
        """False: there are no more pages."""
        if not ranges:
            return False
        after, before = ranges[0]
        pruned = self._prune_page(after, before)
        self._tasks += pruned.tasks
        ranges[:1] = [] if pruned.last_id is None else [(pruned.last_id, before)]
        return True

    def _prune_page(self, after: UUID, before: UUID) -> Pruned:
        """What cannot be deleted stays, and keeps nothing else."""
        kept = {
            "completed_seconds": self._retention.completed_seconds, "failed_seconds": self._retention.failed_seconds,
        }  # fmt: skip
        try:
            return self._session.run(self._statements.prune_tasks(after, before, limit=BATCH, **kept))
        except psycopg.Error as error:
            if not may_be_one_row(error):
                raise
        ids = self._session.run(self._statements.page(after, before, BATCH))
        counts = send_apart(ids, lambda part: self._session.run(self._statements.prune_given(part, **kept)), _tell_kept)
        return Pruned(ids[-1] if ids else None, sum(counts))

    def _prune_states(self) -> bool:
        """False: that was the last batch."""
        if self._retention.states_seconds is None:
            return False
        count = self._session.run(self._statements.prune_states(self._retention.states_seconds, BATCH))
        self._states += count
        return count == BATCH

    def _prune_rollups(self) -> bool:
        if self._retention.states_seconds is None:
            return False
        count = self._session.run(self._statements.prune_rollups(self._retention.states_seconds, BATCH))
        self._rollups += count
        return count == BATCH

    def _end(self) -> None:
        if self._tasks or self._states or self._rollups:
            log.info("history.pruned", tasks=self._tasks, worker_states=self._states, task_rollups=self._rollups)
        self._ranges, self._tasks, self._states, self._rollups = None, 0, 0, 0


def _tell_kept(task_id: UUID, error: psycopg.Error) -> None:
    log.error("task.not_pruned", task_id=task_id, error=first_line(error))


def _key(moment: float) -> UUID:
    """The first that can be made at a moment: see `tasklib.ids`."""
    return UUID(int=max(int(moment * 1000), 0) << 80)
