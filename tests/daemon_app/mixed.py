"""Task functions that end in every way there is, for tests that count what became of them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import tasklib
from tasklib import current_task
from tests.support import hostile_tasks

if TYPE_CHECKING:
    import random
    from collections.abc import Callable


@tasklib.task
def succeed(seconds: float = 0.0) -> str:
    time.sleep(seconds)
    return "done"


@tasklib.task
async def succeed_async(seconds: float = 0.0) -> str:
    await asyncio.sleep(seconds)
    return "done"


@tasklib.task(max_retries=2, backoff=tasklib.Fixed(0.05))
def fail_at_first(times: int) -> str:
    if current_task().attempt <= times:
        raise ValueError("not yet")
    return "at last"


@tasklib.task(max_retries=1, timeout_seconds=0.1, backoff=tasklib.Fixed(0.05))
def take_too_long() -> None:
    ends = time.monotonic() + 5
    while time.monotonic() < ends:
        time.sleep(0.005)


@tasklib.task
def snooze_once() -> str:
    if current_task().attempt == 1:
        raise tasklib.Snooze(0.05)
    return "awake"


@tasklib.task
def give_up() -> None:
    raise tasklib.Cancel("there is nothing to do")


@tasklib.task(queue="books")
def keep_books(text: str) -> None:
    """Its own write, and its completion, in one transaction."""
    current_task().connection.execute("insert into public.books (text) values (%s)", [text])


@tasklib.task
def crash() -> None:
    hostile_tasks.segfault()


def draw(dice: random.Random) -> tasklib.NewTask:
    """One of all that leave their worker alive."""
    kinds: list[tuple[int, Callable[[], tasklib.NewTask]]] = [
        (30, lambda: succeed.new(dice.choice([0.0, 0.0, 0.02]))),
        (30, lambda: succeed_async.new(dice.choice([0.0, 0.0, 0.02]))),
        (10, lambda: fail_at_first.new(dice.choice([1, 2, 9]))),
        (2, take_too_long.new),
        (5, snooze_once.new),
        (5, give_up.new),
        (15, lambda: keep_books.new("a line")),
    ]
    weights, makers = zip(*kinds, strict=True)
    made: tasklib.NewTask = dice.choices(makers, weights)[0]()
    return made
