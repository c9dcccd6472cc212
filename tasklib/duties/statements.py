"""What only a keeper sends: about elections, deaths that were seen, snapshots, and what has been kept long enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import to_json

from tasklib.outcomes import HeldTask
from tasklib.sql import queries
from tasklib.statements import Statement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from tasklib.config import Config
    from tasklib.outcomes import AttemptOutcome


class Pruned(NamedTuple):
    last_id: UUID | None  # of the page that was looked at; None: there was nothing
    tasks: int  # that went


class WrittenAttempt(NamedTuple):
    task_id: UUID
    token: int
    name: str
    queue: str
    outcome: AttemptOutcome
    will_retry: bool
    seconds: float
    failed_reason: str | None
    is_buried: bool  # by this attempt


class KeeperStatements:
    def __init__(self, config: Config) -> None:
        self._crashes = queries("crashes", config.schema)
        self._elections = queries("elections", config.schema)
        self._janitor = queries("janitor", config.schema)
        self._states = queries("worker_states", config.schema)
        self._rollups = queries("rollups", config.schema)
        self._workers = queries("workers", config.schema)
        self._lease_seconds = config.lease_seconds

    def stand(self, name: str, holder: str, seconds: float) -> Statement[int | None]:
        """The term, if the holder is elected."""
        return Statement(self._elections["stand"], (name, holder, seconds), lambda rows: rows[0][0] if rows else None)

    def resign(self, name: str, holder: str) -> Statement[None]:
        return Statement(self._elections["resign"], (name, holder), lambda _: None)

    def renew_for(self, worker_ids: Sequence[str]) -> Statement[list[str]]:
        """Those that had not renewed by themselves."""
        parameters = (list(worker_ids), self._lease_seconds)
        return Statement(self._workers["renew_for"], parameters, lambda rows: [row[0] for row in rows])

    def terminate(self, backends: Sequence[int], name: str, died_seconds_ago: float) -> Statement[list[int]]:
        """Those that are still there."""
        parameters = (list(backends), name, died_seconds_ago)
        return Statement(self._crashes["terminate"], parameters, lambda rows: [row[0] for row in rows])

    def held(self, worker_id: str) -> Statement[list[tuple[HeldTask, datetime]]]:
        """With the time at which the database said so."""
        return Statement(
            self._crashes["held"], (worker_id,), lambda rows: [(HeldTask(*row[1:]), row[0]) for row in rows]
        )

    def asked_to_stop(self, task_ids: Sequence[UUID]) -> Statement[list[tuple[UUID, int]]]:
        """With the tokens of the runs that were."""
        return Statement(self._crashes["asked_to_stop"], (list(task_ids),), list, is_change=False)

    def written(self, task_ids: Sequence[UUID], worker_id: str) -> Statement[list[WrittenAttempt]]:
        """What became of runs of this worker, if that was written."""
        parameters = (list(task_ids), worker_id)
        return Statement(
            self._crashes["written"], parameters, lambda rows: [WrittenAttempt(*row) for row in rows], is_change=False
        )

    def forget_claims(self, worker_id: str) -> Statement[None]:
        return Statement(self._crashes["forget_claims"], (worker_id,), lambda _: None)

    def declare_dead(self, worker_id: str) -> Statement[bool]:
        """True: nobody had done so before."""
        return Statement(self._crashes["declare_dead"], (worker_id,), bool)

    def note_states(
        self,
        states: Sequence[Mapping[str, Any]],
        *,
        queues: Sequence[str] | None,
        max_claim_batch: int,
        max_claim_per_worker: int | None,
        recovery_config: Mapping[str, Any],
    ) -> Statement[None]:
        parameters = (
            to_json(states).decode(), None if queues is None else list(queues), max_claim_batch, max_claim_per_worker,
            to_json(recovery_config).decode(),
        )  # fmt: skip
        return Statement(self._states["note"], parameters, lambda _: None)

    def prune_states(self, older_than_seconds: float, limit: int) -> Statement[int]:
        return Statement(self._states["prune"], (older_than_seconds, limit), lambda rows: int(rows[0][0]))

    def prune_rollups(self, older_than_seconds: float, limit: int) -> Statement[int]:
        return Statement(self._rollups["prune"], (older_than_seconds, limit), lambda rows: int(rows[0][0]))

    def forget_functions(self, unseen_seconds: float) -> Statement[int]:
        """Those that no worker has served for so long."""
        return Statement(self._workers["forget_functions"], (unseen_seconds,), lambda rows: int(rows[0][0]))

    def prune_tasks(
        self, after: UUID, before: UUID, *, completed_seconds: float | None, failed_seconds: float | None, limit: int
    ) -> Statement[Pruned]:
        """None: such tasks stay."""
        parameters = (after, before, completed_seconds, failed_seconds, limit)
        return Statement(self._janitor["prune"], parameters, lambda rows: Pruned(*rows[0]))

    def page(self, after: UUID, before: UUID, limit: int) -> Statement[list[UUID]]:
        """The keys that `prune_tasks` would look at."""
        return Statement(
            self._janitor["page"], (after, before, limit), lambda rows: [row[0] for row in rows], is_change=False
        )

    def prune_given(
        self, task_ids: Sequence[UUID], *, completed_seconds: float | None, failed_seconds: float | None
    ) -> Statement[int]:
        parameters = (list(task_ids), completed_seconds, failed_seconds)
        return Statement(self._janitor["prune_given"], parameters, lambda rows: int(rows[0][0]))
