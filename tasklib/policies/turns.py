"""In which order a worker claims from its queues, and how much of its capacity each gets.

Queues of a higher rank come first, and leave to the others what they do not take. Among queues of one rank, each is the
first in its turn. If their weights differ, capacity is divided by weight: a queue saves up what it could not use for
want of capacity, and loses it when it is empty (deficit round robin).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tasklib.policies.queue_policy import QueuePolicy


class Turn(NamedTuple):
    queue: str
    share: int | None  # of the capacity that is left; None: all of it


class Turns:
    def __init__(self) -> None:
        self._turn = 0
        self._credits: dict[str, float] = {}

    def next_round(self, queues: Sequence[str], policies: Mapping[str, QueuePolicy], capacity: int) -> Iterator[Turn]:
        """Every queue at least once. A weighted queue comes a second time, for what others have left."""
        self._turn += 1
        if not queues:
            return iter(())
        if not any(queue in policies for queue in queues):
            first = self._turn % len(queues)
            return (Turn(queue, None) for queue in (*queues[first:], *queues[:first]))
        return self._by_rank(queues, policies, capacity)

    def _by_rank(self, queues: Sequence[str], policies: Mapping[str, QueuePolicy], capacity: int) -> Iterator[Turn]:
        def rank(queue: str) -> int:
            return policies[queue].rank if queue in policies else 0

        for _, group in itertools.groupby(sorted(queues, key=rank, reverse=True), key=rank):
            equals = list(group)
            first = self._turn % len(equals)
            rotated = [*equals[first:], *equals[:first]]
            weights = {queue: policies[queue].weight if queue in policies else 1.0 for queue in equals}
            if len(set(weights.values())) > 1:
                for queue in rotated:
                    earned = capacity * weights[queue] / sum(weights.values())
                    credit = self._credits[queue] = self._credits.get(queue, 0.0) + earned
                    yield Turn(queue, int(credit))
            for queue in rotated:
                yield Turn(queue, None)

    def note(self, queue: str, claimed: int, *, is_short: bool) -> None:
        if queue in self._credits:
            self._credits[queue] = 0.0 if is_short else max(self._credits[queue] - claimed, 0.0)
