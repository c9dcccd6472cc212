"""A queue as it stands: its policy, and what is in force now. The cluster, and the audit of what was changed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

BreakerState = Literal["closed", "open", "half_open"]


@dataclass(frozen=True, slots=True)
class Queue:
    """One queue: its row of `queues`, then what is in force at the moment of reading. None means no limit, or no
    default.
    """

    name: str
    max_running: int | None  # executing at one time in the whole cluster
    max_per_worker: int | None
    rate_limit: int | None  # starts in each period of rate_seconds
    rate_seconds: float | None
    rate_burst: int | None  # starts at once; None: rate_limit
    breaker_failures: int | None
    breaker_share: float | None
    breaker_window_seconds: float | None
    breaker_open_seconds: float | None
    breaker_probes: int | None
    breaker_codes: list[str] | None  # None: every failure counts
    ageing_seconds: float | None
    rank: int  # higher first
    weight: float  # the share among queues of the same rank
    default_priority: int | None
    default_max_retries: int | None
    default_timeout_seconds: float | None
    retention_days: float | None
    audit: bool
    paused_at: datetime | None
    paused_by: str | None
    pause_reason: str | None
    paused_until: datetime | None
    created_at: datetime | None  # None: it has no row yet, but tasks are ready in it
    changed_at: datetime | None
    changed_by: str | None
    is_paused: bool  # a pause whose end has passed is over, although paused_at is still set
    effective_cap: int | None  # max_running, or what the breaker leaves of it
    breaker_state: BreakerState | None  # None: it has no breaker
    breaker_open_until: datetime | None
    permits_in_use: int  # of all workers together
    permit_holders: int  # workers that have any

    def to_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class ClusterPolicy:
    """What holds for all queues together."""

    cluster_wide_cap: int | None  # tasks of all queues that execute at one time
    refuses_unknown_queues: bool  # a submit to a queue that has no row is an error
    features: list[str]  # what only workers that know it may run beside
    version: int  # raised by every change of a policy
    permits_in_use: int  # of the cap of all queues
    permit_holders: int

    def to_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of the audit: who changed what, from what to what, and why."""

    id: int
    at: datetime
    actor: str  # the role of the database, unless the caller named somebody
    verb: str
    task_id: UUID | None
    queue: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    reason: str | None

    def to_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}
