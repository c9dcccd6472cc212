"""The executions that could start at once, if they had a slot: in a lane for threads and one for coroutines. Queues
with a limit have lanes of their own. The buffer's lock guards all of it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tasklib.worker.limited_queues import LimitedQueues

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tasklib.policies.queue_policy import QueuePolicy
    from tasklib.worker.execution import Execution


class WaitingLanes:
    def __init__(self, concurrency: int) -> None:
        self._lanes: dict[bool, deque[Execution]] = {False: deque(), True: deque()}  # by is_coroutine
        self.limited = LimitedQueues(concurrency)

    def __len__(self) -> int:
        """How many could start. Those that wait for a permit or a grant are not counted: they keep no others out."""
        count = len(self._lanes[False]) + len(self._lanes[True])
        return count + self.limited.startable(False) + self.limited.startable(True) if self.limited else count  # noqa: FBT003 - a kind

    def startable(self, is_coroutine: bool) -> int:
        count = len(self._lanes[is_coroutine])
        return count + self.limited.startable(is_coroutine) if self.limited else count

    def put(self, execution: Execution) -> None:
        if execution.limit is None:
            self._lanes[execution.is_coroutine].append(execution)
        else:
            execution.limit.put(execution)

    def take(self, is_coroutine: bool, most: int) -> list[Execution]:
        lane = self._lanes[is_coroutine]
        if self.limited:
            return self.limited.take_beside(lane, is_coroutine, most)
        return [lane.popleft() for _ in range(min(most, len(lane)))]

    def pop_excess(self, most: int) -> list[Execution]:
        """The last ones of each lane, which would have been the last to start."""
        return [lane.pop() for lane in self._lanes.values() for _ in range(len(lane) - most)]

    def all(self) -> list[Execution]:
        unlimited = [each for lane in self._lanes.values() for each in lane]
        return unlimited + self.limited.waiting() if self.limited else unlimited

    def remove(self, execution: Execution) -> None:
        if execution.limit is None:
            self._lanes[execution.is_coroutine].remove(execution)
        else:
            execution.limit.remove(execution)

    def set_policies(
        self, policies: Mapping[str, QueuePolicy], executing: Iterable[Execution], unprepared: Sequence[Execution]
    ) -> None:
        """From now on these queues have limits, and no others. Every execution moves to the lane of its queue."""
        waiting = self.all()
        for lane in self._lanes.values():
            lane.clear()
        self.limited.set(policies, executing)
        for each in (*waiting, *unprepared):
            each.limit = self.limited.by_queue.get(each.task.queue)
        for each in waiting:
            self.put(each)
        for each in unprepared:
            if each.limit is not None:
                each.limit.waiting += 1
