"""The application of daemon_hostile_tasks.py: tasks with hostile bodies, and harmless tasks beside them.

Every hostile task is bounded: it takes a known amount, notes the processes that it starts, and is submitted with a
timeout.
"""

from __future__ import annotations

import asyncio
import os
import re
import time

import tasklib
from tests.support import hostile_tasks

PROCESSES = "CAMPAIGN_PROCESSES"  # a file with the pids of processes that fork bombs have started, one in a line
BOMB_GENERATIONS = 4  # 30 processes
FILL_MB = 300
MEMORY_LIMIT_MB = 200  # of a worker, and of an isolated task


# --- harmless ---


@tasklib.task
def fetch(seconds: float) -> None:
    """Waits, as a task does that calls another service."""
    time.sleep(seconds)


@tasklib.task
async def fetch_async(seconds: float) -> None:
    await asyncio.sleep(seconds)


# --- tasks that kill a process ---


@tasklib.task
def segfault() -> None:
    hostile_tasks.segfault()


@tasklib.task(isolation="process")
def segfault_isolated() -> None:
    hostile_tasks.segfault()


@tasklib.task
def exit_at_once() -> None:
    hostile_tasks.exit_process(3)


@tasklib.task
async def exit_async() -> None:
    hostile_tasks.exit_process(0)


@tasklib.task(isolation="process")
def kill_parent_isolated() -> None:
    """The parent is the fork server of the worker."""
    hostile_tasks.kill_parent()


@tasklib.task
def kill_supervisor() -> None:
    hostile_tasks.kill_parent()
    time.sleep(hostile_tasks.FOREVER_SECONDS)


# --- tasks that never end ---


@tasklib.task
def backtrack() -> None:
    """A loop in C that holds the GIL."""
    re.match(r"(a+)+$", "a" * 60 + "b")


@tasklib.task
def multiply() -> None:
    """The same; it takes minutes."""
    3 ** (10**9)


@tasklib.task
def hold_gil() -> None:
    hostile_tasks.hold_gil()


@tasklib.task(isolation="process")
def hold_gil_isolated() -> None:
    hostile_tasks.hold_gil()


@tasklib.task
async def block_loop() -> None:
    time.sleep(hostile_tasks.FOREVER_SECONDS)  # noqa: ASYNC251 - the task under test blocks the event loop


@tasklib.task
def ignore_signals() -> None:
    hostile_tasks.ignore_signals()


# --- tasks that exhaust a resource ---


@tasklib.task
def fill_memory() -> None:
    """More than the worker may have. The task can be interrupted; the memory stays in use."""
    hostile_tasks.hold_memory(FILL_MB)
    while True:
        time.sleep(0.01)


@tasklib.task(isolation="process", memory_limit_mb=MEMORY_LIMIT_MB)
def fill_memory_isolated() -> None:
    hostile_tasks.hold_memory(FILL_MB)


@tasklib.task
def close_descriptors() -> None:
    hostile_tasks.close_descriptors()


@tasklib.task(isolation="process")
def close_descriptors_isolated() -> None:
    hostile_tasks.close_descriptors()


@tasklib.task
def fork_bomb() -> None:
    hostile_tasks.fork_bomb(BOMB_GENERATIONS, os.environ[PROCESSES])


@tasklib.task(isolation="process")
def fork_bomb_isolated() -> None:
    hostile_tasks.fork_bomb(BOMB_GENERATIONS, os.environ[PROCESSES])
