"""Single submits that wait at the same time go together; each gets its own answer."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

import tasklib
from tasklib.submit_batcher import LARGEST_BATCH, MOST_UNDER_WAY, SubmitBatcher

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.fixture
def new() -> Any:
    def job(n: int) -> None: ...

    return tasklib.task(job).new


class Sender:
    """Sends when it is told to, and notes what it was given."""

    def __init__(self) -> None:
        self.batches: list[list[tasklib.NewTask]] = []
        self.since: list[float] = []
        self.gate = asyncio.Event()
        self.refused: set[int] = set()
        self.error: tasklib.TasklibError = tasklib.IdempotencyConflict("another payload")

    async def send(self, tasks: Sequence[tasklib.NewTask], since: float) -> list[tasklib.TaskId]:
        self.batches.append(list(tasks))
        self.since.append(since)
        await self.gate.wait()
        if self.refused & {task.id.int for task in tasks}:
            raise self.error
        return [task.id for task in tasks]


async def test_nobody_waits_for_company(new: Any) -> None:
    """The first goes at once, alone."""
    sender = Sender()
    sender.gate.set()
    task = new(1)
    assert await SubmitBatcher(sender.send).submit(task) == task.id
    assert sender.batches == [[task]]


async def test_what_comes_meanwhile_goes_together(new: Any) -> None:
    """In the order in which they came, and each gets its own id."""
    sender = Sender()
    combiner = SubmitBatcher(sender.send)
    tasks = [new(n) for n in range(10)]
    submits = asyncio.gather(*(combiner.submit(task) for task in tasks))
    await asyncio.sleep(0)
    sender.gate.set()
    assert await submits == [task.id for task in tasks]
    first = [[task] for task in tasks[:MOST_UNDER_WAY]]
    assert sender.batches == [*first, tasks[MOST_UNDER_WAY:]]
    assert combiner._under_way == 0


async def test_batches_are_bounded(new: Any) -> None:
    """However many wait."""
    sender = Sender()
    combiner = SubmitBatcher(sender.send)
    submits = asyncio.gather(*(combiner.submit(new(n)) for n in range(2 * LARGEST_BATCH)))
    await asyncio.sleep(0)
    sender.gate.set()
    await submits
    assert max(map(len, sender.batches)) == LARGEST_BATCH


async def test_an_error_is_told_to_who_made_it(new: Any) -> None:
    """The others of its batch are submitted."""
    sender = Sender()
    combiner = SubmitBatcher(sender.send)
    tasks = [new(n) for n in range(6)]
    sender.refused = {tasks[4].id.int}
    submits = asyncio.gather(*(combiner.submit(task) for task in tasks), return_exceptions=True)
    await asyncio.sleep(0)
    sender.gate.set()
    answers = await submits
    assert isinstance(answers[4], tasklib.IdempotencyConflict)
    assert [answer for n, answer in enumerate(answers) if n != 4] == [task.id for n, task in enumerate(tasks) if n != 4]


async def test_a_database_that_is_away_is_told_to_all(new: Any) -> None:
    """To try each alone would take as many timeouts as there are tasks."""
    sender = Sender()
    sender.error = tasklib.CommitUnknown("no answer")
    combiner = SubmitBatcher(sender.send)
    tasks = [new(n) for n in range(6)]
    sender.refused = {tasks[4].id.int}
    submits = asyncio.gather(*(combiner.submit(task) for task in tasks), return_exceptions=True)
    await asyncio.sleep(0)
    sender.gate.set()
    assert [type(answer) for answer in (await submits)[2:]] == [tasklib.CommitUnknown] * 4
    assert len(sender.batches) == 3


async def test_who_gave_up_before_it_was_sent_is_not_sent(new: Any) -> None:
    """A submit that was cancelled while it waited here makes no task."""
    sender = Sender()
    combiner = SubmitBatcher(sender.send)
    tasks = [new(n) for n in range(4)]
    submits = [asyncio.ensure_future(combiner.submit(task)) for task in tasks]
    await asyncio.sleep(0)
    submits[2].cancel()
    await asyncio.sleep(0)
    sender.gate.set()
    await asyncio.gather(*submits, return_exceptions=True)
    assert sender.batches == [[tasks[0]], [tasks[1]], [tasks[3]]]


async def test_who_may_have_to_wait_in_the_server_waits_alone(new: Any) -> None:
    """A key may be in use by a transaction that is open for long: others neither wait for it nor share its fate."""
    sender = Sender()
    combiner = SubmitBatcher(sender.send)
    function = tasklib.task(name="keyed")(lambda: None)
    keyed = [function.options(idempotency_key=f"key-{n}").new() for n in range(MOST_UNDER_WAY)]
    plain = new(1)
    submits = asyncio.gather(*(combiner.submit(task) for task in [*keyed, plain]))
    await asyncio.sleep(0)
    assert sender.batches == [[task] for task in [*keyed, plain]]
    sender.gate.set()
    await submits


async def test_who_gives_up_does_not_disturb_the_others(new: Any) -> None:
    """The one under way, and one that waits."""
    sender = Sender()
    combiner = SubmitBatcher(sender.send)
    submits = [asyncio.ensure_future(combiner.submit(new(n))) for n in range(5)]
    await asyncio.sleep(0)
    submits[0].cancel()
    submits[3].cancel()
    await asyncio.sleep(0)
    sender.gate.set()
    answers = await asyncio.gather(*submits, return_exceptions=True)
    assert [isinstance(answer, asyncio.CancelledError) for answer in answers] == [True, False, False, True, False]
    assert combiner._under_way == 0


async def test_the_time_that_a_task_has_waited_counts(new: Any) -> None:
    """What waits for others to be sent is sent with the deadline of the one that has waited longest."""
    sender = Sender()
    combiner = SubmitBatcher(sender.send)
    submits = asyncio.gather(*(combiner.submit(new(n)) for n in range(10)))
    await asyncio.sleep(0)
    queued_by = time.monotonic()
    wait = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.01, wait.set_result, None)
    await wait
    sender.gate.set()
    await submits
    assert len(sender.since) == MOST_UNDER_WAY + 1
    assert sender.since[-1] <= queued_by
