"""Takes tasks from the queues into the buffer: the service of the claim loop.

A round compares what is held with the database if that is needed, gives back what cannot run soon, prepares what cannot
start at once, and then looks at the queues. It is woken by a notification, by a slot that becomes free, by the next due
task and by the poll.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasklib.worker.buffer import STUCK_SECONDS
from tasklib.worker.sleep import STEPS, Move, Situation, Sleep, next_move

if TYPE_CHECKING:
    from collections.abc import Callable

    from tasklib.worker.claims import Claims
    from tasklib.worker.lease import Lease
    from tasklib.worker.preparation import Preparation
    from tasklib.worker.reconciliation import Reconciliation
    from tasklib.worker.reports import Reports

CLAIM_LIMIT = 1_000  # the most that one claim takes
PREPARE_PAUSE_SECONDS = 0.05  # until the next look whether a waiting execution can be prepared
NAP_SECONDS = 0.001  # between two looks while every look finds something


class Claimer:
    def __init__(
        self,
        reports: Reports,
        lease: Lease,
        *,
        claims: Claims,
        reconciliation: Reconciliation,
        preparation: Preparation,
        sleep: Sleep,
    ) -> None:
        self._reports = reports
        self._buffer = reports.buffer
        self._lease = lease
        self._claims = claims
        self._policies = claims.policies
        self._due = claims.due
        self._reconciliation = reconciliation
        self._preparation = preparation
        self._suspects = preparation.suspects
        self._sleep = sleep
        self.expects_more = True  # tasks may wait in the queues
        self._was_rung = self._was_due = False  # since the last look
        self.is_drained = False  # the last look found nothing to claim and nothing due
        self.on_full: Callable[[], None] = lambda: None  # it was woken by a notification, and has no capacity

    @property
    def claimed(self) -> int:
        """How many tasks in all. It grows when they are in the buffer."""
        return self._claims.claimed

    def ring(self) -> None:
        """A notification says that there may be work. It is a hint: only the database knows."""
        self.expects_more = self._was_rung = True
        self._policies.hear_ring()

    def expects_more_when_idle(self) -> bool:
        """Also suspects, which may wait for an idle worker."""
        return self.expects_more or self._suspects.may_exist

    def run_once(self) -> float | None:
        self._sleep.wake_up()
        if not self._lease.is_valid():
            return self._wait_for_lease()
        self._reconciliation.run_if_needed()
        self._policies.run()
        self._give_back()
        self._preparation.run()
        self._suspects.take_suspects(self._claims)
        if self._due.is_due() and self._buffer.capacity() > 0:
            self._was_due = self._due.promote()
        pause = self._look()
        if self._suspects.may_exist:
            self._suspects.take_suspects(self._claims)
        pause = min(pause, self._policies.seconds_left())
        return min(pause, PREPARE_PAUSE_SECONDS) if self._buffer.has_unprepared() else pause

    def _wait_for_lease(self) -> float:
        """The lease loop wakes the claimer when it has the lease again."""
        self._disarm()
        if self._was_rung:
            self._was_rung = False
            self.on_full()
        return self._due.poll_seconds

    def _give_back(self) -> None:
        """Tasks that another worker could run sooner."""
        if executions := self._buffer.pop_overdue():
            self._suspects.note_given_back(executions)
            self._claims.floors.forget()  # these tasks lie below the floors
            self._reports.give_back(executions)

    def _look(self) -> float:
        """Look at the queues. The answer is the number of seconds until the next round."""
        was_rung, self._was_rung = self._was_rung, False
        was_due, self._was_due = self._was_due, False
        self._claims.found_by = (
            "notification" if was_rung else "due" if was_due else "backlog" if self.expects_more else "poll"
        )
        if self._sleep.doorbell.is_to_ask:
            self._sleep.doorbell.arm()
        before, tried = self.claimed, set[Move]()
        is_empty = self._fill(before)
        while (move := next_move(self._situation(is_empty, before, tried))) in STEPS:
            tried.add(move)
            if move is Move.ARM:
                self._sleep.arm()
                is_empty = self._fill(before)
            elif move is Move.DISARM:
                self._disarm()
            elif move is Move.PROMOTE and self._due.promote():
                self._was_due, self.is_drained = True, False
                return 0.0
        if was_rung and not is_empty:
            self.on_full()
        return self._pause(move)

    def _fill(self, before: int) -> bool:
        """Claim what there is capacity for. True: some capacity was left when the queues were empty."""
        is_empty = not self._policies.may_claim()
        capacity, claimed = min(self._buffer.capacity(), CLAIM_LIMIT), self.claimed
        if capacity > 0 and not is_empty:
            self.expects_more = False  # before the look: a notification that comes meanwhile sets it again
            is_empty = self._claims.fill(capacity)
            self.is_drained = is_empty and self.claimed == claimed
            if not is_empty:
                self.expects_more = True
        elif is_empty:
            self.is_drained = True  # as far as the cap over all queues lets it
        self._sleep.note_look(found_nothing=is_empty and self.claimed == before)
        return is_empty

    def _situation(self, is_empty: bool, before: int, tried: set[Move]) -> Situation:
        doorbell = self._sleep.doorbell
        return Situation(
            queues_are_empty=is_empty,
            has_claimed=self.claimed > before,
            has_capacity=not is_empty and self.expects_more and self._buffer.capacity() > 0,
            may_arm=self._sleep.may_arm(),
            is_armed=doorbell.is_armed,
            is_at_rest=doorbell.is_at_rest,
            is_busy=self._sleep.busy_left() <= 0,
            is_due=self._due.is_due(),
            tried=tried,
        )

    def _pause(self, move: Move) -> float:
        if move is Move.LOOK_AGAIN:
            return 0.0
        if move is Move.SLEEP:
            return min(self._due.seconds_left(), self._sleep.fall_asleep())
        if move is Move.STAY_AWAKE:
            if self._sleep.doorbell.is_armed:
                self._disarm()
            self.expects_more = True
            return NAP_SECONDS
        # WAIT_FOR_SLOT: a free slot wakes the claimer, and a slot that does not become free shows after a while.
        return max(self._sleep.busy_left(), 0.0) if self._sleep.doorbell.is_armed else STUCK_SECONDS

    def _disarm(self) -> None:
        if self._sleep.doorbell.is_armed:
            self.expects_more = True  # no notification comes from here on: a free slot has to look
        self._sleep.doorbell.disarm()
