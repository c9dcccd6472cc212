"""The application of daemon_policies.py: tasks that end in every way, in queues with policies."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import tasklib
from tests.campaigns import soak_worker
from tests.campaigns.daemon_app import work_apart
from tests.campaigns.soak_worker import (
    attempt,
    flaky,
    journaled,
    journaled_async,
    late,
    late_async,
    nap,
    sleepy,
    work,
    work_async,
    work_once,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

OUTAGE = "CAMPAIGN_OUTAGE"  # a file: while it exists, calls of the fragile service fail
CAPPED, PER_WORKER, RATED, FRAGILE, PLAIN = QUEUES = ("capped", "per_worker", "rated", "fragile", "default")


def is_down() -> bool:
    return Path(os.environ[OUTAGE]).exists()


@tasklib.task(max_retries=1_000, backoff=tasklib.Fixed(0.5))
@journaled
def call(seconds: float) -> None:
    """A call of the service behind the breaker."""
    nap(seconds)
    if is_down():
        raise ConnectionError("the service is down")


@tasklib.task(max_retries=1_000, backoff=tasklib.Fixed(0.5))
@journaled_async
async def call_async(seconds: float) -> None:
    await asyncio.sleep(seconds)
    if is_down():
        raise ConnectionError("the service is down")


@tasklib.task
@journaled
def crash() -> None:
    """Kills its process at its first attempt. Other tasks of the worker die with it."""
    if attempt() == 1:
        soak_worker.note("crashed")
        os.kill(os.getpid(), signal.SIGKILL)


def draw(dice: random.Random, queue: str) -> tasklib.NewTask:
    """Of 40 ms on average. Of tasks that take more than 0.1 s, a worker holds none beyond what may execute. Their
    permits are idle for the length of a claim, which on a busy machine takes half as long as such a task.
    """
    if queue == FRAGILE:
        return dice.choice([call, call_async]).options(queue=queue).new(dice.uniform(0.01, 0.1))
    low, high = dice.choices([(0.0, 0.02), (0.02, 0.05), (0.05, 0.2), (0.5, 1.5)], [300, 600, 95, 5])[0]
    seconds = dice.uniform(low, high)
    kinds: list[tuple[int, Callable[[], tasklib.NewTask]]] = [
        (440, lambda: work.options(queue=queue).new(seconds)),
        (440, lambda: work_async.options(queue=queue).new(seconds)),
        (30, lambda: work_once.options(queue=queue).new(seconds)),
        (10, lambda: work_apart.options(queue=queue).new(seconds)),
        (30, lambda: flaky.options(queue=queue).new(dice.randint(1, 2))),
        (30, lambda: sleepy.options(queue=queue).new(1, dice.choice([0.0, 0.3]))),
        (4, lambda: late.options(queue=queue).new()),
        (4, lambda: late_async.options(queue=queue).new()),
        (1, lambda: crash.options(queue=queue).new()),
    ]
    return dice.choices(kinds, [weight for weight, _ in kinds])[0][1]()


def draw_plain(dice: random.Random) -> tasklib.NewTask:
    return draw(dice, PLAIN)
