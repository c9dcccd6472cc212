"""What a worker holds: tasks that wait for a slot, tasks that execute, and tasks whose end is not committed yet.

Invariants: never more executing than slots; a suspect executes alone, or in a process of its own; nothing starts
without a valid lease, after a stop, or before the claims were compared with the database. One lock guards everything.
The claimer adds executions, and the runners take them.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import TYPE_CHECKING

from tasklib.clock import time
from tasklib.worker.unprepared import DRAIN_SECONDS, Unprepared
from tasklib.worker.unsettled import Unsettled
from tasklib.worker.waiting_lanes import WaitingLanes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from tasklib.policies.queue_policy import QueuePolicy
    from tasklib.worker.execution import Execution
    from tasklib.worker.limited_queues import LimitedQueue

MOST_UNSETTLED = 5_000  # ended tasks whose end is not written yet: then no more are claimed
MOST_LOADED_BYTES = 64 * 1024 * 1024  # of large arguments: then no more are loaded

LARGEST_BUFFER = 2_000
WORTHWHILE_CLAIM = 500  # a worker that waits for more capacity may run out of tasks meanwhile
LOOK_AHEAD_SECONDS = 0.1  # of work is held beyond the slots
LATE_SECONDS = 1.0  # waiting tasks go back if, by the latest durations, they would wait for longer
STUCK_SECONDS = 0.5  # if nothing has started for so long, waiting tasks go back to their queue


def wanted(concurrency: int, average_seconds: float | None, fixed: int | None) -> int:
    """How many tasks to hold in all. A worker of long tasks holds none beyond its slots: another could run them."""
    if fixed is not None:
        return concurrency + fixed
    if average_seconds is None or average_seconds > LOOK_AHEAD_SECONDS:
        return concurrency
    ahead = concurrency * LOOK_AHEAD_SECONDS / max(average_seconds, 1e-5)
    return concurrency + min(int(ahead), LARGEST_BUFFER)


class BufferSize:
    """Adapts to how long tasks take, unless the size is fixed. The buffer's lock guards it."""

    def __init__(self, concurrency: int, fixed: int | None) -> None:
        self._concurrency = concurrency
        self.fixed = fixed
        self.average_seconds: float | None = None
        self.refill_at = 0  # claim more when so few wait
        self._late_since = math.inf  # more tasks are held than their duration allows

    def most(self) -> int:
        """How many tasks to hold in all. `refill_at` is half of what is held ahead, or leaves space for a worthwhile
        claim: claims are cheaper in batches.
        """
        most = wanted(self._concurrency, self.average_seconds, self.fixed)
        ahead = most - self._concurrency
        self.refill_at = ahead - min((ahead + 1) // 2, WORTHWHILE_CLAIM)
        return most

    def most_waiting(self, waiting: int, executing: int) -> int:
        """How many may wait in each lane. Fewer than wait now, if too many have been held for a while. One long task
        among short ones changes nothing: its effect on the average is over by then.
        """
        average = self.average_seconds or 0.0
        is_late = waiting * average >= LATE_SECONDS * self._concurrency
        self._late_since = min(self._late_since, time.monotonic()) if is_late else math.inf
        if time.monotonic() - self._late_since < STUCK_SECONDS:
            return waiting
        return wanted(self._concurrency, average, None) - executing  # a free slot counts, too


class Buffer:
    def __init__(self, concurrency: int, may_start: Callable[[], bool], size: int | None = None) -> None:
        """`size`: how many tasks to hold beyond the slots. None: as many as their durations suggest."""
        self.concurrency = concurrency
        self._may_start = may_start
        self._size = BufferSize(concurrency, size)
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._waiting = WaitingLanes(concurrency)
        self.limits = self._waiting.limited  # guarded by the lock
        self._unprepared = Unprepared()
        self._admitted: dict[bool, deque[Execution]] = {False: deque(), True: deque()}  # prepared, with a slot
        self._executing: dict[Execution, None] = {}
        self._unsettled = Unsettled()
        self.is_open = True
        self._may_take = True  # open, and not paused
        self._idle_threads = 0
        self._is_stuck = False
        self._last_take = time.monotonic()
        # There is something to take, for threads (False) or coroutines (True).
        self.on_work: dict[bool, Callable[[], None]] = {False: lambda: None, True: lambda: None}
        self.on_free: Callable[[], None] = lambda: None  # there is capacity, or an execution may be prepared
        self.on_settled: Callable[[Collection[Execution]], None] = lambda _: None
        self.is_behind: Callable[[], bool] = lambda: False  # too many outcomes wait to be written

    # --- for the claimer ---

    def capacity(self) -> int:
        """How many more tasks to claim; 0 while a claim is not worthwhile."""
        with self.lock:
            if not self._may_take or self._unprepared.one_must_be_alone() or self._one_runs_alone():
                return 0
            held = len(self._executing) + self._waiting_count()
            if self._is_stuck:
                return 1 if held == len(self._executing) < self.concurrency else 0
            if len(self._unsettled) - held > MOST_UNSETTLED or self.is_behind():
                return 0
            most = self._size.most() if self._slots() else len(self._executing)
            return max(most - held, 0) if self._is_short() else 0

    def capacity_for_suspects(
        self, *, processes_are_ready: bool, processes_are_offered: bool = False, is_last_resort: bool = False
    ) -> int:
        """How many suspects to claim. One for each free slot, if they can have processes of their own. One, if that may
        become so soon, or if the worker is empty soon. As a last resort, one also if neither is so.
        """
        with self.lock:
            if not self._may_take or not self._may_start() or self._one_runs_alone():
                return 0
            if self._unprepared.suspects():
                return 0  # one after the other
            free = max(self._slots() - len(self._executing) - len(self._unprepared), 0)
            if processes_are_ready and free:
                return free
            return int(self._is_empty_soon() or (processes_are_offered and free > 0) or is_last_resort)

    def is_empty_soon(self) -> bool:
        with self.lock:
            return self._is_empty_soon()

    def add(self, executions: Iterable[Execution]) -> list[Execution]:
        """The answer: those that have to go back, because the worker stops or pauses."""
        kinds = set()
        with self.lock:
            for each in executions:
                self._unsettled.add(each)
                if self.limits:
                    each.limit = self.limits.by_queue.get(each.task.queue)
                if each.needs_preparation:
                    self._unprepared.put(each)
                else:
                    self._waiting.put(each)
                    kinds.add(each.is_coroutine)
            self._last_take = time.monotonic()
            late = [] if self._may_take else self._pop_waiting()
            if False in kinds:
                self._changed.notify_all()
        for is_coroutine in kinds:
            self.on_work[is_coroutine]()
        return late

    def waiting_suspects(self) -> list[Execution]:
        with self.lock:
            return self._unprepared.suspects()

    def has_unprepared(self) -> bool:
        with self.lock:
            return bool(self._unprepared)

    def next_to_prepare(self) -> Execution | None:
        """The next unprepared execution for which there is a slot. It has its slot from here on."""
        with self.lock:
            if not self._unprepared or not self._may_take or not self._may_start():
                return None
            found = self._unprepared.next_fitting(self._fits)
            if found is not None:
                self._unprepared.remove(found)
                self._begin([found])
                self._last_take = time.monotonic()
            return found

    def postpone(self, execution: Execution, seconds: float) -> bool:
        """Another session has locked its row: prepare it later. False: the worker stops or pauses."""
        with self.lock:
            self._end(execution)
            if not self._may_take:
                return False
            execution.not_before = time.monotonic() + seconds
            self._unprepared.put(execution)
            return True

    def admit(self, execution: Execution) -> bool:
        """It is prepared: the next free runner takes it, in the slot that it has. False: the worker stops or pauses."""
        with self.lock:
            if not self._may_take:
                return False
            self._admitted[execution.is_coroutine].append(execution)
            self._changed.notify_all()
        self.on_work[execution.is_coroutine]()
        return True

    def pop_overdue(self) -> list[Execution]:
        """The executions that have to go back. They wait for slots that do not become free, for a task that has to run
        alone, or for tasks that take longer than those by which the buffer's size was chosen.
        """
        with self.lock:
            if self.limits and (excess := self.limits.pop_excess(self._size.average_seconds, self._unprepared)):
                return excess
            if not self._waiting_count():
                return []
            is_full = len(self._executing) >= self.concurrency
            if suspects := self._unprepared.impatient_suspects(one_runs_alone=self._one_runs_alone(), is_full=is_full):
                return self._pop(suspects)
            if time.monotonic() - self._last_take < STUCK_SECONDS:
                return self._pop_excess() if self._size.fixed is None else []
            others = [
                each
                for each in self._all_waiting()
                if each.is_loaded and not each.task.suspect and not each.is_blocked and each.limit is None
            ]
            if not others or not self._may_start():
                return []
            self._is_stuck = True  # until something starts or ends: what goes back must not be claimed again at once
            return self._pop(others)

    # --- for the policies ---

    def set_policies(self, policies: Mapping[str, QueuePolicy]) -> None:
        """From now on these queues have limits, and no others."""
        with self.lock:
            self._waiting.set_policies(policies, self._executing, self._unprepared)

    def free_slots(self, limit: LimitedQueue | None = None) -> int:
        """For tasks under this limit. The caller has the lock."""
        if limit is not None and limit is self.limits.cluster:
            limit.waiting = len(self._all_waiting())
            return self.concurrency - len(self._executing)
        return self._slots() - len(self._executing)

    @property
    def average_seconds(self) -> float | None:
        return self._size.average_seconds

    # --- for the runners ---

    def take(self, *, is_coroutine: bool) -> Execution | None:
        with self.lock:
            return next(iter(self._take(is_coroutine, most=1)), None)

    def take_all(self) -> list[Execution]:
        """All coroutines that may start now, for the event loop."""
        with self.lock:
            return self._take(is_coroutine=True, most=self.concurrency)

    def wait_and_take(self) -> Execution | None:
        """The next execution for a thread. None: the buffer is closed."""
        with self.lock:
            self._idle_threads += 1
            try:
                while self.is_open:
                    if taken := self._take(is_coroutine=False, most=1):
                        return taken[0]
                    self._changed.wait()
            finally:
                self._idle_threads -= 1
            return None

    def threads_wanted(self, threads: int) -> int:
        """How many more threads to start, so that nothing waits for a thread."""
        with self.lock:
            runnable = self._waiting.startable(is_coroutine=False) + len(self._admitted[False])
            missing = min(runnable, self.concurrency) - self._idle_threads
            return max(min(missing, self.concurrency - threads), 0)

    def done(self, ended: Sequence[tuple[Execution, float]]) -> None:
        """These executions have ended, each after so many seconds. They are held until their outcomes are committed."""
        if not ended:
            return
        with self.lock:
            average = self._size.average_seconds
            for execution, seconds in ended:
                self._end(execution)
                average = seconds if average is None else average + (seconds - average) * 0.05
            self._size.average_seconds = average
            self._is_stuck = False
            after = self._after_end(ended[0][0].is_coroutine)
        for each in after:
            each()

    def dropped(self, execution: Execution) -> None:
        """It will not begin."""
        with self.lock:
            self._end(execution)
        self._free(is_coroutine=execution.is_coroutine)

    # --- for all ---

    def executing(self) -> list[Execution]:
        with self.lock:
            return list(self._executing)

    def held(self) -> list[Execution]:
        with self.lock:
            return list(self._unsettled)

    def claims_ended_by(self, executions: Collection[Execution]) -> list[int]:
        """The claims of which nothing is held any more once these are settled."""
        with self.lock:
            return self._unsettled.claims_ended_by(executions)

    def settled(self, executions: Collection[Execution]) -> None:
        """Their outcomes are committed, or they were lost to another worker."""
        with self.lock:
            self._unsettled.settle(executions)
        self.on_settled(executions)

    def remove_waiting(self, executions: Iterable[Execution]) -> list[Execution]:
        """Take out those that have not started, and return them."""
        with self.lock:
            named = set(executions)
            removed = self._pop([each for each in self._all_waiting() if each in named])
        if removed:
            self._free(is_coroutine=False)
        return removed

    def close(self) -> list[Execution]:
        """Nothing starts from now on. The answer: what has not started."""
        with self.lock:
            self.is_open = self._may_take = False
            self._changed.notify_all()
            return self._pop_waiting()

    def pause(self) -> list[Execution]:
        """Nothing starts until `resume`. The answer: what has not started."""
        with self.lock:
            self._may_take = False
            return self._pop_waiting()

    def resume(self) -> None:
        with self.lock:
            self._may_take = self.is_open

    def wake_runners(self) -> None:
        """Executions that could not start may be able to now."""
        with self.lock:
            self._changed.notify_all()
        self.on_work[True]()

    def counts(self) -> tuple[int, int]:
        """How many wait, and how many execute."""
        with self.lock:
            return self._waiting_count(), len(self._executing)

    def is_idle(self) -> bool:
        with self.lock:
            return not self._unsettled

    def _free(self, *, is_coroutine: bool) -> None:
        """A slot is free. The event loop that has just ended a coroutine takes the next one by itself."""
        with self.lock:
            after = self._after_end(is_coroutine)
        for each in after:
            each()

    def _after_end(self, is_coroutine: bool) -> list[Callable[[], None]]:
        """What to call when the lock is released."""
        after = []
        if self._unprepared or self._is_short() or self.limits.wants_look(self._size.average_seconds):
            after.append(self.on_free)
        if not is_coroutine and (self._admitted[True] or self._waiting.startable(is_coroutine=True)):
            after.append(self.on_work[True])
        if self._idle_threads:
            self._changed.notify_all()
        return after

    def _take(self, is_coroutine: bool, most: int) -> list[Execution]:
        if not self._may_take or not self._may_start():
            return []
        admitted = self._admitted[is_coroutine]
        taken = [admitted.popleft() for _ in range(min(len(admitted), most))]
        reserved = self._unprepared.reserved() if self._unprepared else 0
        free = min(most - len(taken), self._slots() - len(self._executing) - reserved)
        is_held_back = bool(self._unprepared) and self._unprepared.hold_back_others(self._fits)
        if free > 0 and not is_held_back and not self._one_runs_alone():
            started = self._waiting.take(is_coroutine, free)
            if started:
                self._begin(started)
                self._is_stuck = False
                self._last_take = time.monotonic()
                taken += started
        return taken

    def _begin(self, executions: list[Execution]) -> None:
        """They have slots from here on."""
        self._executing.update(dict.fromkeys(executions))
        if self.limits:
            self.limits.begin(executions)

    def _end(self, execution: Execution) -> None:
        """Its slot is free, if it had one."""
        if self._executing.pop(execution, execution) is None and self.limits:
            self.limits.end(execution)

    def _slots(self) -> int:
        """How many may execute: fewer than there are slots, if a cap over all queues says so."""
        return self.concurrency if self.limits.cluster is None else self.limits.slots(self.concurrency)

    def _pop_excess(self) -> list[Execution]:
        waiting = self._waiting_count()
        most = self._size.most_waiting(waiting, len(self._executing)) if self._may_start() else waiting
        return self._waiting.pop_excess(most)

    def _one_runs_alone(self) -> bool:
        return len(self._executing) == 1 and next(iter(self._executing)).must_be_alone

    def _is_short(self) -> bool:
        """There is capacity for a worthwhile claim, or a slot has nothing to run."""
        waiting = self._waiting_count()
        return waiting <= self._size.refill_at or waiting < self._slots() - len(self._executing)

    def _is_empty_soon(self) -> bool:
        """All that executes has only just begun, and may be short."""
        since = time.monotonic() - DRAIN_SECONDS
        return all(each.started > since for each in self._executing)

    def _fits(self, execution: Execution) -> bool:
        """There is a slot for it, and memory for what it has to load."""
        if self.limits and not (self.limits.may_start(execution) and len(self._executing) < self._slots()):
            return False
        if execution.must_be_alone:
            return not self._executing
        if len(self._executing) >= self.concurrency or self._one_runs_alone():
            return False
        return execution.is_loaded or sum(each.loaded_bytes for each in self._executing) < MOST_LOADED_BYTES

    def _waiting_count(self) -> int:
        return len(self._waiting) + (self._unprepared.unblocked() if self._unprepared else 0)

    def _all_waiting(self) -> list[Execution]:
        return [*self._admitted[False], *self._admitted[True], *self._waiting.all(), *self._unprepared]

    def _pop_waiting(self) -> list[Execution]:
        return self._pop(self._all_waiting())

    def _pop(self, executions: list[Execution]) -> list[Execution]:
        for each in executions:
            self._end(each)  # an admitted one had a slot
            lanes = (*self._admitted.values(), self._unprepared)
            (next((lane for lane in lanes if each in lane), None) or self._waiting).remove(each)
        return executions
