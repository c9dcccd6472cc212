"""One worker process of the soak, and its tasks. Each body writes when it begins and when it ends, into a journal
outside the database: one line is one write, so that a kill -9 leaves whole lines.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import tasklib
from tasklib.worker.task_context import WorkerTaskContext

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

CONCURRENCY = 4
NAP_SECONDS = 0.02
_journal = -1


def write(file: int, **values: object) -> None:
    os.write(file, json.dumps(values).encode() + b"\n")


def keep_journal(path: str) -> None:
    global _journal  # noqa: PLW0603 - task functions have no other way to it
    _journal = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def attempt() -> int:
    return tasklib.current_task().attempt


def note(event: str) -> None:
    current = tasklib.current_task()
    assert isinstance(current.task_context, WorkerTaskContext)
    held = current.task_context.execution.task
    write(
        _journal, event=event, pid=os.getpid(), at=time.time(), task_id=str(current.id), token=held.fencing_token,
        attempt=current.attempt, worker_id=held.worker_id, task=current.name, queue=current.queue,
        monotonic=time.monotonic(), started=current.started,
    )  # fmt: skip


def _note_end(ended: str) -> None:
    """The exception that stops a task may land in here; there is one at most."""
    try:
        note(ended)
    except tasklib.TaskInterrupt:
        note(ended)
        raise


def journaled(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def body(*args: Any, **kwargs: Any) -> None:
        ended = "raised"
        try:
            note("began")
            function(*args, **kwargs)
            ended = "returned"
        finally:
            _note_end(ended)

    return body


def journaled_async(
    function: Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., Coroutine[Any, Any, None]]:
    @functools.wraps(function)
    async def body(*args: Any, **kwargs: Any) -> None:
        ended = "raised"
        try:
            note("began")
            await function(*args, **kwargs)
            ended = "returned"
        finally:
            note(ended)

    return body


def nap(seconds: float) -> None:
    """In small pieces: an exception lands in Python code, not in a sleep."""
    deadline = time.monotonic() + seconds
    while (remaining := deadline - time.monotonic()) > 0:
        time.sleep(min(remaining, NAP_SECONDS))


@tasklib.task
@journaled
def work(seconds: float) -> None:
    nap(seconds)


@tasklib.task
@journaled_async
async def work_async(seconds: float) -> None:
    await asyncio.sleep(seconds)


@tasklib.task(on_crash="fail")
@journaled
def work_once(seconds: float) -> None:
    nap(seconds)


@tasklib.task(on_crash="fail")
@journaled_async
async def work_once_async(seconds: float) -> None:
    await asyncio.sleep(seconds)


@tasklib.task(backoff=tasklib.Fixed(0.2))
@journaled
def flaky(failures: int) -> None:
    if attempt() <= failures:
        raise ValueError("not yet")


@tasklib.task(max_retries=2, backoff=tasklib.Fixed(0.3))
@journaled_async
async def hopeless() -> None:
    raise ValueError("never")


@tasklib.task
@journaled
def told() -> None:
    raise tasklib.Fail("no use")


@tasklib.task
@journaled
def gives_up() -> None:
    raise tasklib.Cancel("nothing to do")


@tasklib.task
@journaled_async
async def sleepy(times: int, seconds: float) -> None:
    if attempt() <= times:
        raise tasklib.Snooze(seconds)


@tasklib.task
@journaled
def eager(times: int) -> None:
    """Claimable again in the moment in which it has failed."""
    if attempt() <= times:
        raise tasklib.Retry("at once", delay_seconds=0)


@tasklib.task(timeout_seconds=0.4, max_retries=1, backoff=tasklib.Fixed(0.2))
@journaled
def late() -> None:
    nap(5)


@tasklib.task(timeout_seconds=0.4, max_retries=1, backoff=tasklib.Fixed(0.2))
@journaled_async
async def late_async() -> None:
    await asyncio.sleep(5)


def main(url: str, journal: str, lease_seconds: str, name: str) -> None:
    keep_journal(journal)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    # Kills at this rate look like guilt; what is tried here is recovery.
    config = tasklib.Config(url, lease_seconds=float(lease_seconds), bury_after=50, worker_id=name)
    tasklib.TaskWorker(config, concurrency=CONCURRENCY, grace_seconds=10).run_sync()


if __name__ == "__main__":
    main(*sys.argv[1:])
