"""Retention: deletes finished tasks with their attempts, rows of the audit, snapshots of workers and statistics that
are old enough.

It runs hourly, in bounded batches, and rests as long as it works. Tasks are looked at in the order of their keys,
which are made from the time. Only pages of keys that are older than the shortest retention are read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

import psycopg

from tasklib.clock import time
from tasklib.duties.statements import KeeperStatements, Pruned
from tasklib.log import log
from tasklib.runtime.bad_rows import first_line, may_be_one_row, send_apart

if TYPE_CHECKING:
    from tasklib.runtime.session import Session

EVERY_SECONDS = 3600.0
BATCH = 1_000
LONGEST_REST_SECONDS = 5.0
DAY_SECONDS = 86400.0
FUNCTIONS_SECONDS = 90 * DAY_SECONDS  # since a worker last declared them
_FIRST = UUID(int=0)
_LAST = UUID(int=2**128 - 1)


@dataclass(frozen=True, slots=True)
class Retention:
    """How long finished tasks and snapshots are kept. None: for ever. Buried tasks are always kept."""

    completed_seconds: float | None = 30 * DAY_SECONDS  # cancelled and expired tasks too
    failed_seconds: float | None = 90 * DAY_SECONDS
    states_seconds: float | None = 7 * DAY_SECONDS  # snapshots of workers, and statistics by the minute
    audit_seconds: float | None = 365 * DAY_SECONDS  # task_transitions

    def ranges(self, now: float, shortest_of_queues: float | None = None) -> list[tuple[UUID, UUID]]:
        """The ranges of keys that may have tasks which are old enough. Keys that lie in the future were not made by
        us, and do not tell the age of their tasks. All of them are looked at.
        """
        all_kept = (self.completed_seconds, self.failed_seconds, shortest_of_queues)
        kept = [each for each in all_kept if each is not None]
        if not kept:
            return []
        return [(_FIRST, _key(now - min(kept))), (_key(now + DAY_SECONDS), _LAST)]


class Janitor:
    def __init__(self, session: Session, statements: KeeperStatements, retention: Retention) -> None:
        self._session = session
        self._statements = statements
        self._retention = retention
        self._ranges: list[tuple[UUID, UUID]] | None = None  # what is left of a pass; None: none is under way
        self._pruned = Counter[str]()

    def run_once(self) -> float | None:
        if self._ranges is None:
            shortest = self._session.run(self._statements.shortest_retention())
            self._ranges = self._retention.ranges(time.time(), shortest)
        began = time.monotonic()
        if self._prune_tasks(self._ranges) or self._prune_history():
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
        self._pruned["tasks"] += pruned.tasks
        ranges[:1] = [] if pruned.last_id is None else [(pruned.last_id, before)]
        return True

    def _prune_page(self, after: UUID, before: UUID) -> Pruned:
        """A task that cannot be deleted stays, and the others go."""
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

    def _prune_history(self) -> bool:
        """False: that was the last batch."""
        run, seconds = self._session.run, self._retention.states_seconds
        gone: dict[str, int] = {}
        if seconds is not None:
            gone["worker_states"] = run(self._statements.prune_states(seconds, BATCH))
            gone["task_rollups"] = run(self._statements.prune_rollups(seconds, BATCH))
        if self._retention.audit_seconds is not None:
            gone["task_transitions"] = run(self._statements.prune_transitions(self._retention.audit_seconds, BATCH))
        self._pruned.update(gone)
        return BATCH in gone.values()

    def _end(self) -> None:
        if self._pruned.total():
            none = {"tasks": 0, "worker_states": 0, "task_rollups": 0, "task_transitions": 0}
            log.info("history.pruned", **{**none, **self._pruned})
        self._ranges, self._pruned = None, Counter()


def _tell_kept(task_id: UUID, error: psycopg.Error) -> None:
    log.error("task.not_pruned", task_id=task_id, error=first_line(error))


def _key(moment: float) -> UUID:
    """The first key that can be made at a moment: see `tasklib.ids`."""
    return UUID(int=max(int(moment * 1000), 0) << 80)
