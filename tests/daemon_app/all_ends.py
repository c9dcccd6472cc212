"""Tasks that end in every way that there is: the load of a daemon that is being watched."""

from __future__ import annotations

import time

import tasklib
from tasklib import Cancel, Fail, Fixed, Snooze
from tests.support import hostile_tasks

SOON = Fixed(0.2)


@tasklib.task(queue="quick")
def sum_up(a: int, b: int) -> int:
    return a + b


@tasklib.task(queue="slow")
def doze(seconds: float) -> None:
    time.sleep(seconds)


@tasklib.task(queue="quick", max_retries=2, backoff=SOON)
def stumble() -> str:
    """Fails the first time."""
    if tasklib.current_task().attempt == 1:
        raise ValueError("the first time")
    return "the second time"


@tasklib.task(queue="quick", max_retries=1, backoff=SOON)
def fail_always() -> None:
    raise ValueError("every time")


@tasklib.task(queue="quick")
def fail_for_good() -> None:
    raise Fail("it will never work")


@tasklib.task(queue="quick")
def hesitate() -> None:
    if tasklib.current_task().attempt == 1:
        raise Snooze(0.2)


@tasklib.task(queue="quick")
def decline() -> None:
    raise Cancel("nothing to do")


@tasklib.task(queue="slow", max_retries=0, timeout_seconds=0.2)
def never_end() -> None:
    while True:
        time.sleep(0.01)


@tasklib.task(queue="slow", max_retries=0, timeout_seconds=0.2)
def never_end_in_c() -> None:
    """Has to be ended with its process."""
    time.sleep(3600)


@tasklib.task(queue="slow")
def die_once(flag: str) -> None:
    hostile_tasks.kill_process_once(flag)


@tasklib.task(queue="slow")
def die_always() -> None:
    hostile_tasks.kill_process()


@tasklib.task(queue="quick")
def come_later() -> None:
    """Nobody waits for it."""
