"""What the daemon runs while a role of its database is hostile: each kind of task sends other statements."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

import tasklib


@tasklib.task
def plain(number: int) -> int:
    return number


@tasklib.task
def in_a_transaction() -> None:
    tasklib.current_task().connection.execute("select 1")


@tasklib.task
async def in_an_async_transaction() -> None:
    connection = await tasklib.current_task().async_connection()
    await connection.execute("select 1")


@tasklib.task(max_retries=1)
def fails() -> None:
    raise RuntimeError("on purpose")


@tasklib.task
def snoozes() -> None:
    if tasklib.current_task().attempt == 1:
        raise tasklib.Snooze(0.1)


@tasklib.task
def tells_its_progress() -> None:
    tasklib.current_task().progress(1, 2, "half")


@tasklib.task(isolation="process")
def in_a_process() -> int:
    return os.getpid()


@tasklib.task
def submits_another() -> str:
    """In its own transaction, and on a connection of the client's."""
    current = tasklib.current_task()
    plain.submit_sync(1)
    return str(plain.options(connection=current.connection).submit_sync(2))


@tasklib.task
def kills_its_worker() -> None:
    if tasklib.current_task().attempt == 1:
        os.kill(os.getpid(), 9)


def soon(seconds: float = 0.2) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)
