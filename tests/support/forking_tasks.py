"""Task functions that fork and return in both processes, and others that say where they run: for
tests/integration/test_forks.py. `main` is a worker by itself, until its queue is empty.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time

import tasklib
from tasklib import current_task

JOURNAL = "FORKING_TASKS_JOURNAL"


def note(word: str) -> None:
    """Appended in one write: two processes do it."""
    journal = open_journal()
    os.write(journal, f"{word} {os.getpid()}\n".encode())
    os.close(journal)


def open_journal() -> int:
    return os.open(os.environ[JOURNAL], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def fork() -> None:
    note("parent")
    if os.fork() == 0:
        note("copy")


@tasklib.task(queue="forks")
def whereabouts() -> None:
    note("other")


@tasklib.task(queue="forks")
async def whereabouts_async() -> None:
    note("other")
    await asyncio.sleep(0.0)
    note("other")


@tasklib.task(queue="forks")
def in_thread() -> str:
    fork()
    return "done"


@tasklib.task(queue="forks", max_retries=0)
def in_thread_and_raise() -> None:
    fork()
    raise SystemExit(3)


@tasklib.task(queue="forks")
def in_c() -> str:
    """As a library may, without Python's knowledge. In the copy, the interpreter's lock still counts the worker's other
    threads among those that wait for it. A copy that gave it up could wait for them for ever. So the copy's line is
    written in C too, which keeps the lock, and nobody has asked for the lock by then.
    """
    note("parent")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    time.sleep(0.01)  # whoever had asked for the lock has it now
    journal, libc = open_journal(), ctypes.PyDLL(None)
    if libc.fork() == 0:
        line = b"copy %d\n" % os.getpid()
        libc.write(journal, line, len(line))
        return "done"
    sys.setswitchinterval(interval)
    os.close(journal)
    return "done"


@tasklib.task(queue="forks")
async def on_loop() -> str:
    fork()
    return "done"


@tasklib.task(queue="forks")
async def on_loop_and_wait() -> str:
    """The copy would go on with the loop's other tasks."""
    fork()
    await asyncio.sleep(0.05)
    return "done"


@tasklib.task(queue="forks")
def in_transaction() -> str:
    current_task().connection.execute("insert into public.forked (pid) values (%s)", [os.getpid()])
    fork()
    return "done"


@tasklib.task(queue="forks")
async def in_async_transaction() -> str:
    conn = await current_task().async_connection()
    await conn.execute("insert into public.forked (pid) values (%s)", [os.getpid()])
    fork()
    return "done"


@tasklib.task(queue="forks", isolation="process")
def isolated() -> str:
    fork()
    return "done"


@tasklib.task(queue="forks", isolation="process")
def isolated_in_transaction() -> str:
    current_task().connection.execute("insert into public.forked (pid) values (%s)", [os.getpid()])
    fork()
    return "done"


def fork_in_backoff(_retry: int) -> float:
    fork()
    return 3600.0


@tasklib.task(queue="forks", max_retries=1, backoff=fork_in_backoff)
def in_backoff() -> str:
    if current_task().attempt == 1:
        raise ValueError("not yet")
    return "done"


def main() -> None:
    if os.environ.get("FORKING_TASKS_HOOK"):
        tasklib.on_worker_start(fork)
        tasklib.on_worker_stop(fork)
    worker = tasklib.TaskWorker(tasklib.Config(sys.argv[1]), concurrency=6, buffer_size=50, queues=["forks"])
    worker.run_until_empty_sync()
    note("end")
