"""What one worker may start of one queue that has a limit: its permits, its grants, and when to ask for more.

Invariants: it executes at most `own` tasks of a queue with a cap, and `own` is never above what the database has given
it. Before it asks for fewer permits it lowers `own`, so that nothing starts while the question is under way. A grant
is for one start, and is thrown away a moment after the question was sent. All times are monotonic. The buffer's lock
guards every field.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tasklib.policies.queue_policy import QueuePolicy

LOOK_AHEAD_SECONDS = 0.1  # of work is held beyond what may execute
MOST_AHEAD = 2_000
GRANT_AHEAD_SECONDS = 0.05  # grants are asked for as many as start in this time
GRANT_SECONDS = 0.1  # after the question was sent, grants that are not used are thrown away
UNUSED_SECONDS = 0.05  # permits that were not used for so long go back
HUNGRY_SECONDS = (0.05, 0.2)  # between two questions for more permits: at first, and at most
USING_ALL_SECONDS = 1.0  # a worker that uses all its permits asks so often whether it has to share them
SHORT_WAIT_SECONDS = 0.1  # tasks that wait for a grant for longer go back to their queue


class PermitQuestion(NamedTuple):
    wants: int
    keeps: int


class QueueLimit:
    def __init__(self, policy: QueuePolicy, slots: int) -> None:
        self.policy = policy
        self.slots = slots  # of the worker
        self.is_paused = False
        self.executing = 0
        self.waiting = 0  # in the buffer, also those that have to be prepared first
        self.own = 0  # the most that may execute
        self.held = 0  # permits, by the last answer; more than `own` while too many execute
        self.asked = 0  # permits, by the last question that was answered: for the others it is hungry if it got fewer
        self.may_have_more = False  # tasks are ready in the queue
        self.seen = 0  # so many were ready at the last look; since then none was claimed
        self.grants = 0
        self.grants_until = -math.inf
        self.blocked_until = -math.inf  # the rate or the cap leaves nothing before that
        self.ask_at = -math.inf  # the next question for permits
        self._hungry_pause = HUNGRY_SECONDS[0]
        self._unused_since = math.inf
        self.epoch = 0  # of the breaker
        self.is_half_open = False
        self.succeeded = 0  # attempts that began in this epoch and were not reported yet
        self.failed = 0

    # --- how many may start ---

    def room(self, now: float) -> int:
        """How many more may start now."""
        if self.is_paused:
            return 0
        room = self.most_executing() - self.executing
        if self.policy.starts_per_second is not None:
            room = min(room, self.grants if now < self.grants_until else 0)
        return max(room, 0)

    def most_executing(self) -> int:
        most = self.own if self.policy.has_cap else self.slots
        return most if self.policy.max_per_worker is None else min(most, self.policy.max_per_worker)

    def begin(self) -> int:
        """One starts. The answer is the breaker's epoch."""
        self.executing += 1
        self.grants = max(self.grants - 1, 0)
        return self.epoch

    def end(self) -> None:
        self.executing -= 1

    # --- how many to hold ---

    def is_closed(self, now: float) -> bool:
        """Nothing can start before `blocked_until`, a resume or a ring."""
        return self.is_paused or now < self.blocked_until

    def has_budget(self, now: float) -> bool:
        """It may start something, or has just done so: claim without a look whether there are tasks."""
        if self.policy.has_cap and not self.own:
            return False
        return (
            self.policy.starts_per_second is None or self.waiting > 0 or (self.grants > 0 and now < self.grants_until)
        )

    def claim_room(self, average_seconds: float | None) -> int:
        """How many more to claim. None while a claim would not be worth its while."""
        ahead = self._ahead(average_seconds)
        room = self.most_executing() + ahead - self.executing - self.waiting
        return max(room, 0) if self.waiting <= ahead // 2 else 0

    def excess(self, now: float, average_seconds: float | None) -> int:
        """How many of the waiting ones go back, so that another worker can run them."""
        if self.is_paused:
            return self.waiting
        if self.policy.starts_per_second is not None and self.blocked_until - now > SHORT_WAIT_SECONDS:
            return max(self.waiting - (self.grants if now < self.grants_until else 0), 0)
        most = self.most_executing()
        allowed = max(most - self.executing, 0) + (2 * self._ahead(average_seconds) if most else 0)
        return max(self.waiting - allowed, 0)

    def _ahead(self, average_seconds: float | None) -> int:
        """A worker of long tasks holds none beyond what may execute: another worker could run them."""
        ahead = 0
        if average_seconds is not None and average_seconds <= LOOK_AHEAD_SECONDS:
            ahead = int(self.most_executing() * LOOK_AHEAD_SECONDS / max(average_seconds, 1e-5))
        if self.policy.starts_per_second is not None:
            ahead = min(ahead, int(self.policy.starts_per_second * LOOK_AHEAD_SECONDS))
        return min(ahead, MOST_AHEAD)

    # --- permits ---

    def permit_question(self, now: float, free_slots: int, seen: int = 0) -> PermitQuestion | None:
        """What to ask for now. None: nothing. `seen`: so many tasks are known to be ready in the queue. If it wants
        less than it has, it starts no more than that from here on.
        """
        if not self.policy.has_cap:
            return None
        usable = self.executing + max(free_slots, 0)
        more = self.slots if self.may_have_more else max(seen, self.seen)
        wants = min(self.executing + self.waiting + more, usable, self.slots)
        if self.policy.max_per_worker is not None:
            wants = min(wants, self.policy.max_per_worker)
        if self.is_paused:
            wants = 0
        if wants >= max(self.own, self.asked):
            self._unused_since = math.inf
        elif self._unused_since == math.inf:
            self._unused_since = now
        if not self._is_to_ask(now, wants):
            return None
        self.own = min(self.own, wants)
        self.held = max(self.held, wants)  # until the answer comes: it may be lost, and then it is asked for again
        return PermitQuestion(wants, max(self.executing, self.own))

    def _is_to_ask(self, now: float, wants: int) -> bool:
        if self.held > max(self.own, self.executing):  # too many were executing; some have ended
            return True
        if wants > self.own:
            return now >= self.ask_at
        if wants < max(self.own, self.asked):
            return now - self._unused_since >= UNUSED_SECONDS
        return self.own > 0 and now >= self.ask_at

    def note_permits(self, question: PermitQuestion, permits: int, target: int, now: float) -> None:
        self.held, self.asked = permits, question.wants
        self.own = min(permits, target)
        self._unused_since = math.inf
        if self.own < question.wants:
            self.ask_at = now + self._hungry_pause
            self._hungry_pause = min(self._hungry_pause * 2, HUNGRY_SECONDS[1])
            if not self.own:
                self.blocked_until = self.ask_at
        else:
            self.ask_at = now + USING_ALL_SECONDS if self.own else -math.inf
            self._hungry_pause = HUNGRY_SECONDS[0]

    def lose_permits(self) -> None:
        """The database knows of none."""
        self.own = self.held = self.asked = 0
        self.ask_at = -math.inf

    def hear_ring(self) -> None:
        """Permits may have become free, or tasks have come. A worker that runs none of them looks for tasks first."""
        if self.own or self.executing:
            self.may_have_more = True
        if self.policy.has_cap and self.own < self.slots:
            self.ask_at = -math.inf
            if self.policy.starts_per_second is None:
                self.blocked_until = -math.inf

    # --- its breaker ---

    def note_attempt(self, epoch: int, error_code: str | None) -> None:
        """An attempt has succeeded (None), or failed with this code. One of another epoch says nothing about now."""
        if not self.policy.has_breaker or epoch != self.epoch:
            return
        if error_code is None:
            self.succeeded += 1
        elif self.policy.counts_as_failure(error_code):
            self.failed += 1

    # --- grants of a rate ---

    def grants_wanted(self, now: float, free_slots: int, average_seconds: float | None, seen: int = 0) -> int:
        """How many to ask for now: as many as will start within a moment, and not before the rate allows one."""
        if self.policy.starts_per_second is None or self.is_closed(now):
            return 0
        if now >= self.grants_until:
            self.grants = 0
        startable = min(free_slots, self.most_executing() - self.executing)
        if startable <= 0:
            return 0
        quick = 0 if average_seconds is None else int(self.slots * GRANT_AHEAD_SECONDS / max(average_seconds, 1e-5))
        return max(min(self.waiting + seen, max(startable, quick)) - self.grants, 0)

    def note_grants(self, sent_at: float, wanted: int, granted: int, next_seconds: float | None, now: float) -> None:
        until = sent_at + GRANT_SECONDS
        if granted:
            self.grants_until = min(self.grants_until, until) if self.grants else until
        self.grants += granted
        if granted < wanted:
            self.blocked_until = now + (next_seconds or 0.0)

    # --- when to look again ---

    def seconds_left(self, now: float) -> float:
        """Until something has to be asked for or given back."""
        moments = []
        if self.blocked_until > now:
            moments.append(self.blocked_until)
        elif self.policy.has_cap and self.own < self.slots and (self.waiting or self.may_have_more or self.seen):
            moments.append(self.ask_at)
        if self.own:
            moments.append(self.ask_at)
        is_wish_over = self.asked > self.own and not (self.waiting or self.may_have_more or self.seen)
        if self.executing < self.own or is_wish_over:
            moments.append(min(self._unused_since, now) + UNUSED_SECONDS)
        if self.policy.starts_per_second is not None and self.waiting and self.blocked_until <= now:
            moments.append(max(self.grants_until, now + 0.001) if self.grants else now)
        if self.succeeded or self.failed:
            moments.append(now + USING_ALL_SECONDS)
        return max(min(moments, default=math.inf) - now, 0.0)
