"""The other statements of workers and duties, beside those about claims and outcomes: about the worker's own row, the
doorbell, and tasks whose time has come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import to_json

from tasklib.sql import queries
from tasklib.statements.claims import ClaimStatements
from tasklib.statements.outcomes import OutcomeStatements
from tasklib.statements.policies import PolicyStatements
from tasklib.statements.statement import Row, Statement, read_column, read_nothing, read_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from tasklib.config import Config


class Promotion(NamedTuple):
    promoted: int
    next_due_seconds: float | None  # None: no task is known to become due


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """A worker's row, as it registers it."""

    worker_id: str
    name: str
    hostname: str
    pid: int
    process_name: str
    queues: list[str] | None
    task_names: list[str]
    concurrency: int


class WorkerStatements(ClaimStatements, OutcomeStatements):
    def __init__(self, config: Config) -> None:
        ClaimStatements.__init__(self, config)
        OutcomeStatements.__init__(self, config)
        self._tasks = queries("tasks", config.schema)
        self._workers = queries("workers", config.schema)
        self._doorbell = queries("doorbell", config.schema)
        self.policies = PolicyStatements(config)

    # --- the worker's row ---

    def register(self, worker: WorkerDescription) -> Statement[datetime | None]:
        parameters = (
            worker.worker_id, worker.name, worker.hostname, worker.pid, worker.process_name, worker.queues,
            worker.task_names, worker.concurrency, self._lease_seconds,
        )  # fmt: skip
        return Statement(self._workers["register"], parameters, read_value)

    def declare(self, functions: Sequence[Mapping[str, Any]]) -> Statement[None]:
        return Statement(self._workers["declare"], (to_json(functions).decode(),), read_nothing)

    def renew(self, worker_id: str, names: Sequence[str], *, stopping: bool) -> Statement[datetime | None]:
        """None: the worker was declared dead."""
        return Statement(self._workers["renew"], (worker_id, self._lease_seconds, list(names), stopping), read_value)

    def deregister(self, worker_id: str) -> Statement[None]:
        return Statement(self._workers["deregister"], (worker_id,), read_nothing)

    def declare_dead(self) -> Statement[list[Row]]:
        return Statement(self._workers["declare_dead"], (self._lease_seconds,), list)

    def forget_dead(self, after_seconds: float | None = 3600.0) -> Statement[None]:
        """None: never."""
        return Statement(self._workers["forget_dead"], (after_seconds,), read_nothing)

    # --- the doorbell ---

    def arm(self, queues: Sequence[str]) -> Statement[tuple[list[str], bool]]:
        """Which of these queues are armed now, and whether no other session is about to commit."""
        return Statement(self._doorbell["arm"], (list(queues),), lambda rows: (rows[0][0], rows[0][1]))

    def disarm(self, queues: Sequence[str]) -> Statement[None]:
        return Statement(self._doorbell["disarm"], (list(queues),), read_nothing)

    # --- tasks that wait ---

    def promote(self) -> Statement[Promotion]:
        return Statement(self._tasks["promote"], (), lambda rows: Promotion(*rows[0]))

    def promotable(self, aside: Iterable[UUID]) -> Statement[list[UUID]]:
        """Tasks that are due, without those that are set aside."""
        return Statement(self._tasks["promotable"], (list(aside),), read_column, is_change=False)

    def promote_given(self, task_ids: Sequence[UUID]) -> Statement[int]:
        return Statement(self._tasks["promote_given"], (list(task_ids),), lambda rows: read_value(rows) or 0)

    def expire(self) -> Statement[int]:
        return Statement(self._tasks["expire"], (), read_value)

    def expirable(self, aside: Iterable[UUID]) -> Statement[list[UUID]]:
        """Tasks that were not started in time, without those that are set aside."""
        return Statement(self._tasks["expirable"], (list(aside),), read_column, is_change=False)

    def expire_given(self, task_ids: Sequence[UUID]) -> Statement[int]:
        return Statement(self._tasks["expire_given"], (list(task_ids),), read_value)

    def ready_queues(self) -> Statement[list[str]]:
        return Statement(self._tasks["ready_queues"], (), read_column, is_change=False)

    def lockable(
        self, queues: Sequence[str] | None, old_seconds: float, seen: Sequence[UUID] | None
    ) -> Statement[tuple[bool, list[UUID]]]:
        """Whether these queues (None: any) have a task that could be claimed, and the tasks that were seen."""
        parameters = (None if queues is None else list(queues), old_seconds, None if seen is None else list(seen))
        return Statement(self._tasks["lockable"], parameters, lambda rows: rows[0])

    def closed_queues(self) -> Statement[list[str]]:
        """Queues of which nothing may start now: paused, or with their cap in use. '*' stands for all."""
        return Statement(self._tasks["closed_queues"], (), read_column, is_change=False)

    def waiting_names(self, queues: Sequence[str], served: Sequence[str]) -> Statement[list[str]]:
        return Statement(self._tasks["waiting_names"], (list(queues), list(served)), read_column, is_change=False)
