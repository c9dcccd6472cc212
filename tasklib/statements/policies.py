"""What workers send about queue policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tasklib.policies.queue_policy import Policies, QueuePolicy
from tasklib.sql import queries
from tasklib.statements.statement import Row, Statement, read_nothing, read_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasklib.config import Config


class PermitAnswer(NamedTuple):
    permits: int | None  # None: the queue has no cap any more
    target: int | None
    breaker_epoch: int | None
    breaker: str | None
    again_seconds: float | None  # until an open breaker lets the first tasks through


class GrantAnswer(NamedTuple):
    granted: int
    next_seconds: float | None


class PolicyStatements:
    def __init__(self, config: Config) -> None:
        self._sql = queries("policies", config.schema)

    def version(self) -> Statement[int]:
        return Statement(self._sql["version"], (), read_value, is_change=False)

    def policies(self) -> Statement[Policies]:
        return Statement(self._sql["policies"], (), _read_policies, is_change=False)

    def seen(self, queues: Sequence[str], names: Sequence[str], most: int) -> Statement[dict[str, int]]:
        """How many tasks could be claimed from each queue."""
        return Statement(self._sql["seen"], (list(queues), list(names), most), _read_counts, is_change=False)

    def seen_any(self) -> Statement[bool]:
        return Statement(self._sql["seen_any"], (), read_value, is_change=False)

    def permit(self, queue: str, worker_id: str, wants: int, keeps: int) -> Statement[PermitAnswer]:
        parameters = (queue, worker_id, wants, keeps)
        return Statement(self._sql["permit"], parameters, lambda rows: PermitAnswer(*rows[0]))

    def grant(self, queue: str, wants: int) -> Statement[GrantAnswer]:
        return Statement(self._sql["grant"], (queue, wants), lambda rows: GrantAnswer(*rows[0]))

    def report(self, queue: str, epoch: int, succeeded: int, failed: int) -> Statement[None]:
        return Statement(self._sql["report"], (queue, epoch, succeeded, failed), read_nothing)

    def pause(self, queue: str, reason: str, until: float | None, actor: str) -> Statement[None]:
        """`until`: seconds since 1970."""
        return Statement(self._sql["pause"], (queue, reason, until, actor), read_nothing)

    def give_up(self, worker_id: str) -> Statement[None]:
        return Statement(self._sql["give_up"], (worker_id,), read_nothing)

    def give_back(self, worker_id: str, queues: Sequence[str]) -> Statement[None]:
        return Statement(self._sql["give_back"], (worker_id, list(queues)), read_nothing)

    def forget(self) -> Statement[None]:
        return Statement(self._sql["forget"], (), read_nothing)


def _read_counts(rows: list[Row]) -> dict[str, int]:
    return {queue: count for queue, count in rows if count}


def _read_policies(rows: list[Row]) -> Policies:
    version, cluster_wide_cap = rows[0][:2]
    queues = {row[2]: QueuePolicy(*row[2:]) for row in rows if row[2] is not None}
    return Policies(version, cluster_wide_cap, queues)
