"""Task functions with a process of their own, for tests/integration/test_isolation.py: well-behaved and hostile ones.

Imported by the tests' worker and, by its name, by the worker's fork server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

import tasklib
from tests.support import hostile_tasks

if TYPE_CHECKING:
    from collections.abc import Iterator

FOR_EVER = 1000
NONSENSE = b"""{"outcome": {"kind": "Completed"}}
[1]
{"progress": 5, "backend": "x", "outcome": 5}
{"outcome": {"kind": "Completed", "result": 5}}
{"outcome": {"kind": "Snoozed", "delay_seconds": NaN}}
in the middle of a w"""
_around: list[str] = []


@tasklib.around_task
@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """The isolated tasks of this module alone: it is imported into the process of the tests, too."""
    _around.append("entered")
    yield


def hold_the_gil() -> None:
    """A signal ends one call, and another follows."""
    while True:
        hostile_tasks.hold_gil()


def whereabouts() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "threads": [each.name for each in threading.enumerate()],
        "is_main": threading.current_thread() is threading.main_thread(),
    }


@tasklib.task(isolation="process")
def where(moment: datetime) -> dict[str, Any]:
    return whereabouts() | {"moment": moment}


@tasklib.task(isolation="process")
async def where_async(moment: datetime) -> dict[str, Any]:
    await asyncio.sleep(0.001)
    return whereabouts() | {"moment": moment}


@tasklib.task
def where_worker() -> int:
    return os.getpid()


@tasklib.task(isolation="process", no_retry_on=ZeroDivisionError, backoff=tasklib.Fixed(3600))
def end_by(how: str) -> None:
    """However a function may end, other than by returning."""
    endings: dict[str, BaseException] = {
        "fail": tasklib.Fail("never", error_code="NO"),
        "cancel": tasklib.Cancel("not needed"),
        "snooze": tasklib.Snooze(3600),
        "retry": tasklib.Retry("later", delay_seconds=3600),
        "raise": ZeroDivisionError("a thousand \udcff by nothing"),
        "exit": SystemExit(3),
    }
    raise endings[how]


@tasklib.task(isolation="process", backoff=tasklib.Fixed(3600))
async def end_by_async(how: str) -> None:
    await asyncio.sleep(0)
    end_by(how)


@tasklib.task(isolation="process", timeout_seconds=60)
def describe() -> dict[str, Any]:
    task = tasklib.current_task()
    task.progress(1, 3)
    task.progress(2, 3, "half")
    child = where_worker.submit_sync()
    return {
        "id": task.id,
        "name": task.name,
        "attempt": task.attempt,
        "tags": task.tags,
        "deadline": task.deadline,
        "remaining": task.remaining_seconds,
        "should_stop": task.should_stop,
        "cancel_asked": task.cancel_asked,
        "child": child,
        "around": list(_around),
        "logged": structlog.contextvars.get_contextvars(),
    }


@tasklib.task(isolation="process", max_retries=0)
def write(word: str, end: str) -> None:
    conn = tasklib.current_task().connection
    conn.execute("insert into words (word) values (%s)", [word])
    _end(end)


@tasklib.task(isolation="process", max_retries=0)
async def write_async(word: str, end: str) -> None:
    conn = await tasklib.current_task().async_connection()
    await conn.execute("insert into words (word) values (%s)", [word])
    _end(end)


def _end(how: str) -> None:
    if how == "raise":
        raise ValueError("all of it is rolled back")
    if how == "die":
        os._exit(1)


# --- Hostile tasks ---


@tasklib.task(isolation="process")
def segfault() -> None:
    hostile_tasks.segfault()


@tasklib.task(isolation="process")
def leave(code: int) -> None:
    hostile_tasks.exit_process(code)


@tasklib.task(isolation="process")
def kill_itself() -> None:
    hostile_tasks.kill_process()


@tasklib.task(isolation="process")
def close_descriptors() -> None:
    """And open others: what has the number of the way to the worker leads somewhere else."""
    hostile_tasks.close_descriptors(reuse=True)


@tasklib.task(isolation="process")
def babble() -> None:
    """To everybody, the worker included."""
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(fd, NONSENSE)
    os._exit(4)


@tasklib.task(isolation="process", memory_limit_mb=200, max_retries=0)
def take_memory(megabytes: int) -> int:
    held = [bytearray(2**20) for _ in range(megabytes)]
    return len(held)


@tasklib.task(isolation="process", memory_limit_mb=200, max_retries=0)
def return_much(megabytes: int) -> str:
    return "x" * megabytes * 2**20


@tasklib.task(isolation="process", timeout_seconds=60, max_retries=0)
def overrun(how: str, told: str) -> str:
    """What happens in `told`, a file, is for the test to read."""
    _overrun(how, told)
    return "never"


@tasklib.task(isolation="process", timeout_seconds=60, max_retries=0)
async def overrun_async(how: str, told: str) -> str:
    if how == "politely":
        try:
            _write(told, f"{os.getpid()}\n")
            await asyncio.sleep(FOR_EVER)
        finally:
            _write(told, "cleaned up")
    _overrun(how, told)
    return "never"


@tasklib.task(isolation="process", max_retries=0)
def endure(how: str, told: str) -> str:
    """Until it is cancelled, or its worker stops."""
    if how == "stop when asked":
        Path(told).write_text(str(os.getpid()))
        while not tasklib.current_task().should_stop:
            time.sleep(0.005)
        return "stopped when asked"
    _overrun(how, told)
    return "never"


def _overrun(how: str, told: str) -> None:
    if how != "politely":
        Path(told).write_text(f"{os.getpid()}\n")
    match how:
        case "politely":
            try:
                Path(told).write_text(f"{os.getpid()}\n")
                while True:
                    time.sleep(0.01)
            except tasklib.TaskInterrupt as interrupt:
                Path(told).write_text(type(interrupt).__name__)
                raise
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(0.01)
        case "in C":
            hold_the_gil()
        case "bomb":
            hostile_tasks.fork_bomb(3, told, own_sessions=False)
        case _:
            time.sleep(FOR_EVER)


@tasklib.task(isolation="process")
def leave_a_child_behind() -> int:
    return subprocess.Popen(["sleep", str(FOR_EVER)]).pid


@tasklib.task(isolation="process")
def linger_once(told: str) -> None:
    """For ever the first time, and not at all the second."""
    if not Path(told).exists():
        child = subprocess.Popen(["sleep", str(FOR_EVER)])
        Path(told).write_text(f"{os.getpid()} {child.pid}")
        hold_the_gil()


@tasklib.task(isolation="process")
def kill_the_server(server: int) -> None:
    """Of its own worker: the test has said which."""
    if os.getppid() == server:
        os.kill(server, signal.SIGKILL)
        time.sleep(FOR_EVER)


@tasklib.task(isolation="process")
def freeze_the_server(server: int) -> None:
    if os.getppid() == server:
        os.kill(server, signal.SIGSTOP)


@tasklib.task
def work_on(path: str) -> int:
    """A neighbour in a thread, until the file is there."""
    rounds = 0
    while not Path(path).exists():
        rounds += 1
        time.sleep(0.005)
    return rounds


@tasklib.task
async def work_on_async(path: str) -> int:
    rounds = 0
    while not _exists(path):
        rounds += 1
        await asyncio.sleep(0.005)
    return rounds


def _write(path: str, text: str) -> None:
    Path(path).write_text(text)


def _exists(path: str) -> bool:
    return Path(path).exists()
