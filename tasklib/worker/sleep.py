"""When the claimer sleeps, and what it does before that.

Inserts notify only workers that have said that they sleep ("armed the doorbell"). So a worker arms it, looks once more,
and only then sleeps. A worker that has work all the time disarms it: every notification costs the inserting commit a
lock that all commits share.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, NamedTuple

from tasklib.clock import time

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from tasklib.runtime.session import Session
    from tasklib.worker.doorbell import Doorbell

BUSY_SECONDS = 0.05  # of work without a break: then the worker finds new tasks without notifications
BREAK_SECONDS = 0.001  # a longer sleep is a break


class Move(enum.Enum):
    """What the claimer does after a look at the queues."""

    ARM = enum.auto()  # arm the doorbell and look once more
    PROMOTE = enum.auto()  # make due tasks claimable
    DISARM = enum.auto()
    LOOK_AGAIN = enum.auto()  # at once
    STAY_AWAKE = enum.auto()  # look again after a moment, without a doorbell
    WAIT_FOR_SLOT = enum.auto()
    SLEEP = enum.auto()  # until a notification, the next due task or the next poll


STEPS = frozenset({Move.ARM, Move.PROMOTE, Move.DISARM})  # the next move is decided anew after these


class Situation(NamedTuple):
    """What `next_move` depends on."""

    queues_are_empty: bool  # the last look left capacity unused
    has_claimed: bool  # some task, in this round
    has_capacity: bool  # for another claim
    may_arm: bool  # notifications reach this worker
    is_armed: bool
    is_at_rest: bool  # the doorbell holds no lock and tries to get none
    is_busy: bool  # it has worked without a break for a while
    is_due: bool  # a task may have become due
    tried: AbstractSet[Move]  # in this round


def next_move(at: Situation) -> Move:
    """Never SLEEP with an armed doorbell before a look that began after the arming."""
    if not at.queues_are_empty:
        if at.has_capacity:
            return Move.LOOK_AGAIN
        return Move.DISARM if at.is_armed and at.is_busy else Move.WAIT_FOR_SLOT
    if at.may_arm and not at.is_armed and Move.ARM not in at.tried:
        return Move.STAY_AWAKE if at.has_claimed else Move.ARM
    if at.is_due and Move.PROMOTE not in at.tried:
        return Move.PROMOTE
    if not at.may_arm and not at.is_at_rest:
        return Move.DISARM
    return Move.STAY_AWAKE if at.is_armed and at.is_busy else Move.SLEEP


class Sleep:
    """The doorbell, and since when the worker has been busy or asleep. Used by the claim loop's thread alone."""

    def __init__(self, session: Session, doorbell: Doorbell, has_listener: Callable[[], bool]) -> None:
        self._session = session
        self.doorbell = doorbell
        self._has_listener = has_listener
        self._busy_since = math.inf
        self.asleep_since = math.inf

    def wake_up(self) -> None:
        """A round begins."""
        if time.monotonic() - self.asleep_since > BREAK_SECONDS:
            self._busy_since = math.inf
        self.asleep_since = math.inf

    def may_arm(self) -> bool:
        """Something listens for notifications. Behind a pooler the locks would belong to a shared server connection,
        and stay there.
        """
        return self._has_listener() and not self._session.is_pooled

    def arm(self) -> None:
        self.doorbell.arm()
        self._busy_since = math.inf

    def note_look(self, *, found_nothing: bool) -> None:
        """Work counts from the end of the first look that found tasks: a single look may take long."""
        if found_nothing:
            self._busy_since = math.inf
        self._busy_since = min(self._busy_since, time.monotonic())

    def busy_left(self) -> float:
        """Seconds until the worker counts as busy."""
        return self._busy_since + BUSY_SECONDS - time.monotonic()

    def fall_asleep(self) -> float:
        """For how many seconds at most, as far as the doorbell is concerned."""
        self.asleep_since = time.monotonic()
        return self.doorbell.until_asked()
