"""What a worker holds: tasks that wait for a slot, tasks that execute, and tasks whose end is not committed yet.

Invariants: never more executing than slots; a suspect executes alone, or in a process of its own; nothing starts
without a valid lease, after a stop, or before claims were checked after a reconnect. All under one lock; runners take,
the claimer adds.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING

from tasklib.clock import time

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from tasklib.worker.execution import Execution

LARGEST_BUFFER = 2_000
WORTHWHILE_CLAIM = 500  # who waits for room for more may run out of tasks meanwhile
LOOK_AHEAD_SECONDS = 0.1  # of work is held beyond the slots: several round trips
MOST_UNSETTLED = 5_000  # ended tasks whose end is not written yet: then no more are claimed
HOARD_SECONDS = 0.5  # when nothing has started for so long, what waits goes back to the queue
LATE_SECONDS = 1.0  # what would wait for longer, as tasks have taken lately, goes back too
LONE_PATIENCE_SECONDS = 10.0  # how long a suspect waits for the worker to be empty, or for a process
DRAIN_SECONDS = 0.25  # how long others wait for a suspect that can have a process instead
CAREFUL_SECONDS = 0.05  # after so long, the next free slot is for one that has to be marked or loaded first
MOST_LOADED_BYTES = 64 * 1024 * 1024  # of large arguments: then no more are loaded beside them


def wanted(concurrency: int, average_seconds: float | None, fixed: int | None) -> int:
    """How many tasks to hold in all. A worker of long tasks holds none beyond its slots: another could run them."""
    if fixed is not None:
        return concurrency + fixed
    if average_seconds is None or average_seconds > LOOK_AHEAD_SECONDS:
        return concurrency
    ahead = concurrency * LOOK_AHEAD_SECONDS / max(average_seconds, 1e-5)
    return concurrency + min(int(ahead), LARGEST_BUFFER)


def _has_waited(suspect: Execution, now: float) -> bool:
    return now - suspect.waits_since > (LONE_PATIENCE_SECONDS if suspect.is_patient else DRAIN_SECONDS)


class Buffer:
    def __init__(self, concurrency: int, may_start: Callable[[], bool]) -> None:
        self.concurrency = concurrency
        self._may_start = may_start
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: dict[bool, deque[Execution]] = {False: deque(), True: deque()}  # by is_coroutine
        self._careful: deque[Execution] = deque()  # those that must be marked or loaded first, or be alone
        self._admitted: dict[bool, deque[Execution]] = {False: deque(), True: deque()}  # marked, with a slot
        # By execution, not by task: one that goes back at once may be claimed again before its end is noted here.
        self._executing: dict[Execution, None] = {}
        self._unsettled: dict[Execution, None] = {}
        self._claims: Counter[int] = Counter()  # how many of each are unsettled
        self._is_open = True
        self._may_take = True  # open, and not paused
        self._idle_threads = 0
        self._average_seconds: float | None = None
        self._refill_at = 0
        self._is_stuck = False
        self._last_take = time.monotonic()
        self._late_since = math.inf  # more is held than the tasks' length allows
        # There is something to take, for threads (False) or coroutines (True).
        self.on_work: dict[bool, Callable[[], None]] = {False: lambda: None, True: lambda: None}
        self.on_free: Callable[[], None] = lambda: None  # a careful one may be able to start
        self.on_settled: Callable[[Collection[Execution]], None] = lambda _: None
        self.is_behind: Callable[[], bool] = lambda: False  # too much waits to be written

    # --- the claimer's side ---

    def room(self, fixed: int | None) -> int:
        """How many more to claim. Not before half of what is held ahead is used up, or enough for a claim that is worth
        its while: claims are cheaper in batches.
        """
        with self._lock:
            if not self._may_take or self._lone_is_next() or self._lone_executes():
                return 0  # what would come has to wait
            held = len(self._executing) + self._waiting_count()
            if self._is_stuck:
                return 1 if held == len(self._executing) < self.concurrency else 0
            if len(self._unsettled) - held > MOST_UNSETTLED or self.is_behind():
                return 0
            most = wanted(self.concurrency, self._average_seconds, fixed)
            ahead = most - self.concurrency
            self._refill_at = ahead - min((ahead + 1) // 2, WORTHWHILE_CLAIM)
            return max(most - held, 0) if self._is_short() else 0

    def room_for_suspects(
        self, *, processes_are_ready: bool, processes_are_offered: bool = False, is_last_resort: bool = False
    ) -> int:
        """How many suspects to claim. One for each free slot, if they can have processes of their own. One, if that may
        become so soon, or if the worker is empty soon. As a last resort, one also if neither is so.
        """
        with self._lock:
            if not self._may_take or not self._may_start() or self._lone_executes():
                return 0
            if any(each.task.suspect for each in self._careful):
                return 0  # one after the other
            free = max(self.concurrency - len(self._executing) - len(self._careful), 0)
            if processes_are_ready and free:
                return free
            return int(self._is_empty_soon() or (processes_are_offered and free > 0) or is_last_resort)

    def is_empty_soon(self) -> bool:
        with self._lock:
            return self._is_empty_soon()

    def add(self, executions: Iterable[Execution]) -> list[Execution]:
        """Those that came too late, because the worker stops or pauses, are handed back."""
        kinds = set()
        with self._lock:
            for each in executions:
                self._unsettled[each] = None
                self._claims[each.claimed.claim_id] += 1
                if each.needs_care:
                    self._put_careful(each)
                else:
                    self._waiting[each.is_coroutine].append(each)
                    kinds.add(each.is_coroutine)
            self._last_take = time.monotonic()
            late = [] if self._may_take else self._pop_waiting()
            if False in kinds:
                self._changed.notify_all()
        for is_coroutine in kinds:
            self.on_work[is_coroutine]()
        return late

    def waiting_suspects(self) -> list[Execution]:
        with self._lock:
            return [each for each in self._careful if each.task.suspect]

    def next_careful(self) -> Execution | None:
        """The next one that cannot start as it is, if there is a place for it. Its slot is taken from here on."""
        with self._lock:
            if not self._careful or not self._may_take or not self._may_start():
                return None
            now = time.monotonic()
            fitting = (each for each in self._careful if each.not_before <= now and self._fits(each))
            found = next(fitting, None)
            if found is not None:
                self._careful.remove(found)
                self._executing[found] = None
                self._last_take = now
            return found

    def put_back(self, execution: Execution, seconds: float) -> bool:
        """Somebody has locked its row: it is tried again after this time. False: the worker stops or pauses."""
        with self._lock:
            self._executing.pop(execution, None)
            if not self._may_take:
                return False
            execution.not_before = time.monotonic() + seconds
            self._put_careful(execution)
            return True

    def admit(self, execution: Execution) -> bool:
        """It is marked: the next free runner takes it, in the slot that it has. False: the worker stops or pauses."""
        with self._lock:
            if not self._may_take:
                return False
            self._admitted[execution.is_coroutine].append(execution)
            self._changed.notify_all()
        self.on_work[execution.is_coroutine]()
        return True

    def hoarded(self, fixed: int | None) -> list[Execution]:
        """What should go back: it waits behind slots that do not get free, behind a task that wants to be alone, or
        behind tasks that take longer than those by which it was reckoned how many to hold.
        """
        with self._lock:
            if not self._waiting_count():
                return []
            now = time.monotonic()
            if suspects := [each for each in self._careful if each.task.suspect and _has_waited(each, now)]:
                return self._pop(suspects)
            if now - self._last_take < HOARD_SECONDS:
                return self._pop_late() if fixed is None else []
            others = [
                each for each in self._all_waiting() if each.is_loaded and not each.task.suspect and not each.is_blocked
            ]
            if not others or not self._may_start():
                return []
            self._is_stuck = True  # until something starts or ends: what goes back must not come back at once
            return self._pop(others)

    # --- the runners' side ---

    def take(self, *, is_coroutine: bool) -> Execution | None:
        with self._lock:
            return next(iter(self._take(is_coroutine, most=1)), None)

    def take_all(self) -> list[Execution]:
        """All coroutines that may start now."""
        with self._lock:
            return self._take(is_coroutine=True, most=self.concurrency)

    def wait_and_take(self) -> Execution | None:
        """For threads. None: the buffer is closed."""
        with self._lock:
            self._idle_threads += 1
            try:
                while self._is_open:
                    if taken := self._take(is_coroutine=False, most=1):
                        return taken[0]
                    self._changed.wait()
            finally:
                self._idle_threads -= 1
            return None

    def threads_wanted(self, threads: int) -> int:
        """How many more threads to start, so that nothing waits that could run."""
        with self._lock:
            runnable = len(self._waiting[False]) + len(self._admitted[False])
            missing = min(runnable, self.concurrency) - self._idle_threads
            return max(min(missing, self.concurrency - threads), 0)

    def done(self, ended: Sequence[tuple[Execution, float]]) -> None:
        """They have ended, after so many seconds each; they are held until that is committed."""
        if not ended:
            return
        with self._lock:
            average = self._average_seconds
            for execution, seconds in ended:
                self._executing.pop(execution, None)
                average = seconds if average is None else average + (seconds - average) * 0.05
            self._average_seconds = average
            self._is_stuck = False
            after = self._after_end(ended[0][0].is_coroutine)
        for each in after:
            each()

    def dropped(self, execution: Execution) -> None:
        """It will not begin."""
        with self._lock:
            self._executing.pop(execution, None)
        self._freed(by=execution)

    # --- for everybody ---

    def executing(self) -> list[Execution]:
        with self._lock:
            return list(self._executing)

    def held(self) -> list[Execution]:
        with self._lock:
            return list(self._unsettled)

    def claims_ended_by(self, executions: Collection[Execution]) -> list[int]:
        """The claims of which nothing is left once these are settled."""
        with self._lock:
            return [claim for claim, count in self._unsettled_of(executions).items() if count == self._claims[claim]]

    def settled(self, executions: Collection[Execution]) -> None:
        """Committed, or lost: no longer ours."""
        with self._lock:
            for claim, count in self._unsettled_of(executions).items():
                self._claims[claim] -= count
                if not self._claims[claim]:
                    del self._claims[claim]
            for each in executions:
                self._unsettled.pop(each, None)
        self.on_settled(executions)

    def remove_waiting(self, executions: Iterable[Execution]) -> list[Execution]:
        """Those of them that have not started."""
        with self._lock:
            named = set(executions)
            removed = self._pop([each for each in self._all_waiting() if each in named])
        if removed:
            self._freed(by=None)
        return removed

    def close(self) -> list[Execution]:
        """Nothing starts from now on. What had not started is handed back."""
        with self._lock:
            self._is_open = self._may_take = False
            self._changed.notify_all()
            return self._pop_waiting()

    def pause(self) -> list[Execution]:
        """Nothing starts until it is resumed. What had not started is handed back; what executes goes on."""
        with self._lock:
            self._may_take = False
            return self._pop_waiting()

    def resume(self) -> None:
        with self._lock:
            self._may_take = self._is_open

    def poke(self) -> None:
        """What kept tasks from starting may be over."""
        with self._lock:
            self._changed.notify_all()
        self.on_work[True]()

    def has_careful(self) -> bool:
        with self._lock:
            return bool(self._careful)

    def counts(self) -> tuple[int, int]:
        """How many wait, and how many execute."""
        with self._lock:
            return self._waiting_count(), len(self._executing)

    def is_idle(self) -> bool:
        with self._lock:
            return not self._unsettled

    def _freed(self, *, by: Execution | None) -> None:
        """Something may start that could not. The loop that has just ended a task takes the next one by itself."""
        with self._lock:
            after = self._after_end(by is not None and by.is_coroutine)
        for each in after:
            each()

    def _after_end(self, is_coroutine: bool) -> list[Callable[[], None]]:
        """Whom to wake, without the lock."""
        after = []
        if self._careful or self._is_short():
            after.append(self.on_free)
        if not is_coroutine and (self._waiting[True] or self._admitted[True]):
            after.append(self.on_work[True])
        if self._idle_threads:
            self._changed.notify_all()
        return after

    def _take(self, is_coroutine: bool, most: int) -> list[Execution]:
        """Whether they may start is asked once for all of them: nothing changes that while the lock is held."""
        if not self._may_take or not self._may_start():
            return []
        admitted, lane = self._admitted[is_coroutine], self._waiting[is_coroutine]
        taken = [admitted.popleft() for _ in range(min(len(admitted), most))]
        free = min(most - len(taken), len(lane), self.concurrency - len(self._executing))
        if free > 0 and not self._lone_executes() and not (self._careful and self._is_held_back()):
            started = [lane.popleft() for _ in range(free)]
            self._executing.update(dict.fromkeys(started))
            self._is_stuck = False
            self._last_take = time.monotonic()
            taken += started
        return taken

    def _pop_late(self) -> list[Execution]:
        """The last ones of each lane: they would have been the last to start. One long task among short ones is no
        reason: it has to be so for a while.
        """
        average = self._average_seconds or 0.0
        is_late = self._waiting_count() * average >= LATE_SECONDS * self.concurrency and self._may_start()
        self._late_since = min(self._late_since, time.monotonic()) if is_late else math.inf
        if time.monotonic() - self._late_since < HOARD_SECONDS:
            return []
        ahead = wanted(self.concurrency, average, None) - len(self._executing)  # for a free slot, too
        return [lane.pop() for lane in self._waiting.values() for _ in range(len(lane) - ahead)]

    def _unsettled_of(self, executions: Collection[Execution]) -> Counter[int]:
        """How many of each claim."""
        return Counter([each.claimed.claim_id for each in executions if each in self._unsettled])

    def _lone_executes(self) -> bool:
        return len(self._executing) == 1 and next(iter(self._executing)).must_be_alone

    def _is_short(self) -> bool:
        """There is room for a claim that is worth its while, or a slot has nothing to run."""
        waiting = self._waiting_count()
        return waiting <= self._refill_at or waiting < self.concurrency - len(self._executing)

    def _is_empty_soon(self) -> bool:
        """All that executes has begun just now: it may be short."""
        since = time.monotonic() - DRAIN_SECONDS
        return all(each.started > since for each in self._executing)

    def _put_careful(self, execution: Execution) -> None:
        """Suspects first: they have begun once."""
        execution.waits_since = min(execution.waits_since, time.monotonic())
        suspects = sum(each.task.suspect for each in self._careful)
        self._careful.insert(suspects if execution.task.suspect else len(self._careful), execution)

    def _fits(self, execution: Execution) -> bool:
        """There is a slot for it, and room for what it has to load."""
        if execution.must_be_alone:
            return not self._executing
        if len(self._executing) >= self.concurrency or self._lone_executes():
            return False
        return execution.is_loaded or sum(each.loaded_bytes for each in self._executing) < MOST_LOADED_BYTES

    def _lone_is_next(self) -> bool:
        """Nothing starts meanwhile: it waits for the worker to be empty. One that may have a process of its own instead
        does not hold up the others for long.
        """
        since = time.monotonic() - DRAIN_SECONDS
        return any(
            each.must_be_alone and (not each.may_have_own_process or each.waits_since > since) for each in self._careful
        )

    def _is_held_back(self) -> bool:
        """What could start at once waits for one that cannot: otherwise that one would never find a free slot."""
        if self._lone_is_next():
            return True
        now = time.monotonic()
        return any(
            each.waits_since < now - CAREFUL_SECONDS and each.not_before <= now and self._fits(each)
            for each in self._careful
        )

    def _waiting_count(self) -> int:
        """Without those whose rows somebody has locked: they take nobody's place."""
        careful = sum(not each.is_blocked for each in self._careful) if self._careful else 0
        return len(self._waiting[False]) + len(self._waiting[True]) + careful

    def _all_waiting(self) -> list[Execution]:
        return [each for lane in self._lanes() for each in lane]

    def _lanes(self) -> list[deque[Execution]]:
        return [*self._admitted.values(), *self._waiting.values(), self._careful]

    def _pop_waiting(self) -> list[Execution]:
        return self._pop(self._all_waiting())

    def _pop(self, executions: list[Execution]) -> list[Execution]:
        for each in executions:
            self._executing.pop(each, None)  # one that was admitted had a slot
            next(lane for lane in self._lanes() if each in lane).remove(each)
        return executions
