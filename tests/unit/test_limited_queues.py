"""What a worker holds of queues with a limit, without a database: nothing is lost between the lanes and the limit."""

from __future__ import annotations

import itertools
import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import UUID

from tasklib.outcomes import HeldTask
from tasklib.policies.queue_policy import QueuePolicy
from tasklib.statements import ClaimedTask
from tasklib.worker.buffer import Buffer
from tasklib.worker.execution import Execution

if TYPE_CHECKING:
    from tasklib.worker.limited_queues import LimitedQueue

NOW = datetime(2030, 1, 1, tzinfo=UTC)
numbers = itertools.count(1)


def execution(*, is_coroutine: bool = False, on_crash: str = "retry", suspect: bool = False) -> Execution:
    held = HeldTask(
        UUID(int=next(numbers)), "send", "mail", "claimed", "worker-1", 1, 0, 0, 3, 0, 0, suspect, on_crash, None, NOW,
        None, None, None,
    )  # fmt: skip
    claimed = ClaimedTask(held, "{}", "{}", "{}", None, True, str(held.id), 0.0, 1)
    return Execution(claimed, None, is_coroutine=is_coroutine)


def buffer_with(policy: QueuePolicy, *, own: int = 0) -> tuple[Buffer, LimitedQueue]:
    made = Buffer(10, lambda: True)
    made.set_policies({"mail": policy})
    limit = made.limits.by_queue["mail"]
    limit.own = limit.held = own
    return made, limit


def capped(*, own: int = 0) -> tuple[Buffer, LimitedQueue]:
    return buffer_with(QueuePolicy("mail", has_cap=True), own=own)


def test_what_exceeds_a_limit_goes_back_and_nothing_else() -> None:
    """Threads and coroutines have a lane each: what one lane gives must not be taken from the other one as well."""
    buffer, limit = capped(own=2)
    given = [execution(is_coroutine=each % 2 == 0) for each in range(6)]
    buffer.add(given)
    back = buffer.pop_overdue()
    assert len(back) == 4
    left = [each for lane in limit.lanes.values() for each in lane]
    assert {*back, *left} == {*given}
    assert limit.waiting == len(left) == 2


def test_a_task_that_has_to_be_prepared_waits_for_its_limit_too() -> None:
    """Otherwise its worker would ask for no permit, and hold it for ever."""
    buffer, limit = capped()
    once = execution(on_crash="fail")
    buffer.add([once])
    assert limit.waiting == 1
    limit.own = 1
    assert buffer.next_to_prepare() is once
    assert (limit.waiting, limit.executing) == (0, 1)
    assert buffer.postpone(once, 0.1)
    assert (limit.waiting, limit.executing) == (1, 0)
    buffer.set_policies({"mail": QueuePolicy("mail", has_cap=True, rank=1)})
    assert limit.waiting == 1


def test_a_task_that_has_to_be_prepared_goes_back_when_its_queue_is_paused() -> None:
    buffer, limit = capped(own=5)
    once, suspect, other = execution(on_crash="fail"), execution(suspect=True), execution()
    buffer.add([once, suspect, other])
    limit.is_paused = True
    assert {*buffer.pop_overdue()} == {once, suspect, other}
    assert limit.waiting == 0
    assert not buffer.has_unprepared()


def test_a_changed_policy_is_acted_upon_at_once() -> None:
    """A worker that was told to wait for an hour need not hear a notification: it may have been lost."""
    buffer, limit = buffer_with(QueuePolicy("mail", starts_per_second=0.001))
    limit.blocked_until = limit.ask_at = math.inf
    buffer.set_policies({"mail": QueuePolicy("mail", starts_per_second=1000.0)})
    assert not limit.is_closed(0.0)
    assert limit.ask_at < 0
