"""The policies of all queues, as a worker reads them: values. The database decides about permits, grants and breakers;
what is here says whom to ask, and what needs no answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALL_QUEUES = "*"  # the name under which permits of the cluster-wide cap are asked for


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """What holds for one queue. A queue without a policy has none of these."""

    queue: str
    is_paused: bool = False
    paused_until: float | None = None  # seconds since 1970; None: until it is resumed
    has_cap: bool = False  # permits have to be asked for: a cap, or a breaker
    max_per_worker: int | None = None
    starts_per_second: float | None = None  # grants have to be asked for
    has_breaker: bool = False
    breaker_codes: Sequence[str] | None = None  # errors that count; None: all
    ageing_seconds: float | None = None
    rank: int = 0
    weight: float = 1.0

    def is_paused_at(self, now: float) -> bool:
        return self.is_paused and (self.paused_until is None or now < self.paused_until)

    @property
    def needs_own_claim(self) -> bool:
        """A claim from many queues at once cannot obey it."""
        return self.is_limited or self.ageing_seconds is not None or self.rank != 0

    @property
    def is_limited(self) -> bool:
        """Its tasks may have to wait although slots are free."""
        return self.is_paused or self.has_cap or self.max_per_worker is not None or self.starts_per_second is not None

    def counts_as_failure(self, error_code: str) -> bool:
        return self.breaker_codes is None or error_code in self.breaker_codes


@dataclass(frozen=True, slots=True)
class Policies:
    """All of them, at one version."""

    version: int = 0
    cluster_wide_cap: int | None = None
    queues: Mapping[str, QueuePolicy] = field(default_factory=dict)

    def limited(self) -> dict[str, QueuePolicy]:
        """Those that keep tasks waiting; the cap over all queues is one of them."""
        limited = {name: policy for name, policy in self.queues.items() if policy.is_limited}
        if self.cluster_wide_cap is not None:
            limited[ALL_QUEUES] = QueuePolicy(ALL_QUEUES, has_cap=True)
        return limited
