"""The tasks of the demo, and what a daemon imports: `tasklibd run --app examples.demo_tasks`."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time

import tasklib


@tasklib.task(queue="mail", max_retries=5, timeout_seconds=30)
def send_email(to: str, subject: str) -> bool:
    time.sleep(0.2)
    return subject != "" and "@" in to


@tasklib.task
def resize_image(path: str, *, sizes: list[int]) -> int:
    return len(path) * len(sizes)


@tasklib.task
async def fetch(url: str) -> str:
    await asyncio.sleep(0.3)
    return f"{url}: 200"


@tasklib.task(backoff=tasklib.Fixed(0.4))
def call_api() -> str:
    """Works at the second retry."""
    if tasklib.current_task().retry_count < 2:  # noqa: PLR2004 - see above
        raise ConnectionError("503 from the other side")
    return "done"


@tasklib.task(timeout_seconds=0.3, max_retries=0)
def too_slow() -> None:
    while True:
        time.sleep(0.01)


@tasklib.task
def wait_for_stock() -> None:
    raise tasklib.Snooze(3600, "not in stock")


@tasklib.task
def charge_card(card: str) -> None:
    raise tasklib.Fail(f"declined: ends in {card[-2:]}", error_code="CARD_DECLINED")


@tasklib.task
def never() -> None:
    """Cancelled, or expired, before it starts."""


@tasklib.task
def crash_once() -> str:
    """Takes its worker with it, the first time."""
    if tasklib.current_task().attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


@tasklib.task
def crash_always() -> None:
    """Is buried when it has killed three workers while it ran alone."""
    ctypes.string_at(0)
