"""Ordinary task functions that may become suspects, for tests/integration/test_suspects.py.

Imported by the tests' worker and, by its name, by the worker's fork server.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import tasklib
from tests.support import hostile_tasks

_opened: list[str] = []


@tasklib.on_worker_start
def open_something() -> None:
    _opened.append("sync")


@tasklib.on_worker_start
async def open_something_async() -> None:
    await asyncio.sleep(0)
    _opened.append("async")


def meet(directory: str, count: int) -> list[int]:
    """Returns when so many processes, or tasks, have come: their pids."""
    place = Path(directory)
    (place / f"{os.getpid()}.{time.monotonic_ns()}").touch()
    deadline = time.monotonic() + 60
    while len(found := list(place.iterdir())) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(found)} of {count} have come")
        time.sleep(0.01)
    return [int(each.name.partition(".")[0]) for each in found]


@tasklib.task
def attend(directory: str, count: int) -> list[int]:
    return meet(directory, count)


@tasklib.task
async def attend_async(directory: str, count: int) -> list[int]:
    return await asyncio.to_thread(meet, directory, count)


@tasklib.task
def task_context() -> tuple[int, list[str]]:
    return os.getpid(), _opened


@tasklib.task
async def surroundings_async() -> tuple[int, list[str]]:
    return os.getpid(), _opened


@tasklib.task
def die() -> None:
    hostile_tasks.kill_process()


@tasklib.task
def fill_memory() -> None:
    hostile_tasks.fill_memory()


@tasklib.task
def hold_interpreter() -> None:
    """For longer than any test waits."""
    hostile_tasks.hold_gil()


@tasklib.task
def wait_for(path: str) -> int:
    deadline = time.monotonic() + 60
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.getpid()
