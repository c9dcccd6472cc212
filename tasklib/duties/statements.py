"""Statements that only a keeper sends: about elections, dead workers, snapshots and retention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import to_json

from tasklib.sql import queries
from tasklib.statements.claims import read_held
from tasklib.statements.statement import Statement, read_column, read_nothing, read_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from tasklib.config import Config
    from tasklib.outcomes import AttemptOutcome, HeldTask


class Pruned(NamedTuple):
    last_id: UUID | None  # of the page; None: the page was empty
    tasks: int  # that were deleted


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
        self._claims = queries("claims", config.schema)
        self._crashes = queries("crashes", config.schema)
        self._elections = queries("elections", config.schema)
        self._janitor = queries("janitor", config.schema)
        self._states = queries("worker_states", config.schema)
        self._rollups = queries("rollups", config.schema)
        self._workers = queries("workers", config.schema)
        self._lease_seconds = config.lease_seconds

    def stand(self, name: str, holder: str, seconds: float) -> Statement[int | None]:
        """The term; None: another holder is elected."""
        return Statement(self._elections["stand"], (name, holder, seconds), read_value)

    def resign(self, name: str, holder: str) -> Statement[None]:
        return Statement(self._elections["resign"], (name, holder), read_nothing)

    def renew_for(self, worker_ids: Sequence[str]) -> Statement[list[str]]:
        """The workers that had not renewed their lease themselves."""
        parameters = (list(worker_ids), self._lease_seconds)
        return Statement(self._workers["renew_for"], parameters, read_column)

    def terminate(self, backends: Sequence[int], name: str, died_seconds_ago: float) -> Statement[list[int]]:
        """The server processes that are still there."""
        parameters = (list(backends), name, died_seconds_ago)
        return Statement(self._crashes["terminate"], parameters, read_column)

    def held(self, worker_id: str) -> Statement[list[tuple[HeldTask, datetime]]]:
        """Each with the time at which the database answered."""
        return Statement(
            self._claims["held"],
            (worker_id,),
            lambda rows: [(read_held(row), row[-1]) for row in rows],
            is_change=False,
        )

    def asked_to_stop(self, task_ids: Sequence[UUID]) -> Statement[list[tuple[UUID, int]]]:
        """Those with a cancel request, each with the token of its run."""
        return Statement(self._crashes["asked_to_stop"], (list(task_ids),), list, is_change=False)

    def written(self, task_ids: Sequence[UUID], worker_id: str) -> Statement[list[WrittenAttempt]]:
        """The attempts of this worker that are written."""
        parameters = (list(task_ids), worker_id)
        return Statement(
            self._crashes["written"], parameters, lambda rows: [WrittenAttempt(*row) for row in rows], is_change=False
        )

    def forget_claims(self, worker_id: str) -> Statement[None]:
        return Statement(self._crashes["forget_claims"], (worker_id,), read_nothing)

    def declare_dead(self, worker_id: str) -> Statement[bool]:
        """True: it was not declared dead before."""
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
        return Statement(self._states["note"], parameters, read_nothing)

    def prune_states(self, older_than_seconds: float, limit: int) -> Statement[int]:
        return Statement(self._states["prune"], (older_than_seconds, limit), read_value)

    def prune_rollups(self, older_than_seconds: float, limit: int) -> Statement[int]:
        return Statement(self._rollups["prune"], (older_than_seconds, limit), read_value)

    def forget_functions(self, unseen_seconds: float) -> Statement[int]:
        """Forgets functions that no worker has declared for this long."""
        return Statement(self._workers["forget_functions"], (unseen_seconds,), read_value)

    def prune_tasks(
        self, after: UUID, before: UUID, *, completed_seconds: float | None, failed_seconds: float | None, limit: int
    ) -> Statement[Pruned]:
        """None: such tasks are kept, unless their queue has a retention of its own."""
        parameters = (after, before, completed_seconds, failed_seconds, limit)
        return Statement(self._janitor["prune"], parameters, lambda rows: Pruned(*rows[0]))

    def shortest_retention(self) -> Statement[float | None]:
        """The shortest that a queue has of its own, in seconds."""
        return Statement(self._janitor["shortest"], (), read_value, is_change=False)

    def prune_transitions(self, older_than_seconds: float, limit: int) -> Statement[int]:
        return Statement(self._janitor["prune_transitions"], (older_than_seconds, limit), read_value)

    def page(self, after: UUID, before: UUID, limit: int) -> Statement[list[UUID]]:
        """The keys that `prune_tasks` would look at."""
        return Statement(self._janitor["page"], (after, before, limit), read_column, is_change=False)

    def prune_given(
        self, task_ids: Sequence[UUID], *, completed_seconds: float | None, failed_seconds: float | None
    ) -> Statement[int]:
        parameters = (list(task_ids), completed_seconds, failed_seconds)
        return Statement(self._janitor["prune_given"], parameters, read_value)
