"""The part of the buffer for queues with a limit. Each has lanes of its own, so that a task that waits for a permit or
a grant keeps no other task waiting. The buffer's lock guards all of it.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from tasklib.clock import time
from tasklib.policies.queue_limit import QueueLimit
from tasklib.policies.queue_policy import ALL_QUEUES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tasklib.policies.queue_policy import QueuePolicy
    from tasklib.worker.execution import Execution
    from tasklib.worker.unprepared import Unprepared


class LimitedQueue(QueueLimit):
    """The limit of one queue in this worker, and the tasks of that queue that wait for a slot."""

    def __init__(self, policy: QueuePolicy, slots: int) -> None:
        super().__init__(policy, slots)
        self.lanes: dict[bool, deque[Execution]] = {False: deque(), True: deque()}  # by is_coroutine

    def put(self, execution: Execution) -> None:
        self.lanes[execution.is_coroutine].append(execution)
        self.waiting += 1

    def take(self, is_coroutine: bool, most: int) -> list[Execution]:
        lane = self.lanes[is_coroutine]
        taken = [lane.popleft() for _ in range(min(most, len(lane), self.room(time.monotonic())))]
        self.waiting -= len(taken)
        return taken

    def ready_to_start(self) -> int:
        """How many wait in the lanes: all that wait, but for those that have to be prepared."""
        return len(self.lanes[False]) + len(self.lanes[True])

    def clear(self) -> None:
        for lane in self.lanes.values():
            lane.clear()
        self.waiting = 0

    def remove(self, execution: Execution) -> None:
        self.lanes[execution.is_coroutine].remove(execution)
        self.waiting -= 1

    def pop_excess(self, average_seconds: float | None, unprepared: Unprepared) -> list[Execution]:
        """The last ones, which would have been the last to start."""
        excess = self.excess(time.monotonic(), average_seconds) if self.waiting else 0
        popped = unprepared.last_of(self, max(excess - self.ready_to_start(), 0))
        for each in popped:
            unprepared.remove(each)
        for lane in self.lanes.values():
            from_lane = [lane.pop() for _ in range(min(excess - len(popped), len(lane)))]
            self.waiting -= len(from_lane)
            popped += from_lane
        return popped


class LimitedQueues:
    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.by_queue: dict[str, LimitedQueue] = {}
        self.cluster: LimitedQueue | None = None  # the cap over all queues
        self._turn = 0
        self._is_first = False  # its tasks start before those of queues without a limit, every other time

    def __bool__(self) -> bool:
        return bool(self.by_queue) or self.cluster is not None

    def set(self, policies: Mapping[str, QueuePolicy], executing: Iterable[Execution]) -> None:
        """Replace the policies. Limits that stay keep their permits. What executes counts for a new limit. The
        lanes are empty afterwards.
        """
        before = self.by_queue | ({} if self.cluster is None else {ALL_QUEUES: self.cluster})
        limits = {
            queue: before.pop(queue) if queue in before else LimitedQueue(policy, self._slots)
            for queue, policy in policies.items()
        }
        for queue, limit in limits.items():
            limit.policy = policies[queue]
            limit.blocked_until = limit.ask_at = -math.inf
            limit.clear()
            if not limit.policy.has_cap:
                limit.lose_permits()
        self.cluster = limits.pop(ALL_QUEUES, None)
        self.by_queue = limits
        self._count(executing)

    def _count(self, executing: Iterable[Execution]) -> None:
        for limit in self.all():
            limit.executing = 0
        for execution in executing:
            execution.limit = self.by_queue.get(execution.task.queue)
            for limit in self._of(execution):
                limit.executing += 1

    def all(self) -> Iterator[LimitedQueue]:
        """Every limit, that over all queues first."""
        if self.cluster is not None:
            yield self.cluster
        yield from self.by_queue.values()

    def begin(self, executions: Iterable[Execution]) -> None:
        for execution in executions:
            for limit in self._of(execution):
                execution.breaker_epoch = limit.begin()

    def end(self, execution: Execution) -> None:
        for limit in self._of(execution):
            limit.end()

    def _of(self, execution: Execution) -> list[LimitedQueue]:
        both = (self.cluster, execution.limit)
        return [limit for limit in both if limit is not None]

    def slots(self, concurrency: int) -> int:
        """How many tasks may execute in this worker."""
        return concurrency if self.cluster is None else min(concurrency, self.cluster.most_executing())

    def may_start(self, execution: Execution) -> bool:
        return execution.limit is None or execution.limit.room(time.monotonic()) > 0

    def take_beside(self, others: deque[Execution], is_coroutine: bool, most: int) -> list[Execution]:
        """The next tasks, of these queues and of `others`, which have no limit. Each kind is first every other time, so
        that neither starves.
        """
        self._is_first = not self._is_first
        taken = self._take(is_coroutine, most) if self._is_first else []
        taken += [others.popleft() for _ in range(min(most - len(taken), len(others)))]
        return taken if self._is_first else taken + self._take(is_coroutine, most - len(taken))

    def _take(self, is_coroutine: bool, most: int) -> list[Execution]:
        """Each time another queue is the first."""
        limits = [*self.by_queue.values()]
        self._turn += 1
        first = self._turn % max(len(limits), 1)
        taken: list[Execution] = []
        for limit in (*limits[first:], *limits[:first]):
            taken += limit.take(is_coroutine, most - len(taken))
        return taken

    def startable(self, is_coroutine: bool) -> int:
        now = time.monotonic()
        return sum(min(len(each.lanes[is_coroutine]), each.room(now)) for each in self.by_queue.values())

    def wants_look(self, average_seconds: float | None) -> bool:
        """A task has ended, and the claimer may claim another one, or ask for grants."""
        return any(
            (each.waiting and not each.room(time.monotonic()))
            or (each.may_have_more and each.claim_room(average_seconds))
            for each in self.by_queue.values()
        )

    def pop_excess(self, average_seconds: float | None, unprepared: Unprepared) -> list[Execution]:
        return [popped for each in self.by_queue.values() for popped in each.pop_excess(average_seconds, unprepared)]

    def waiting(self) -> list[Execution]:
        return [each for limit in self.by_queue.values() for lane in limit.lanes.values() for each in lane]
