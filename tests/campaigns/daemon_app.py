"""The application of the daemons in campaigns: the tasks of soak.py, isolated tasks, tasks that write through their own
connection, and tasks that leave processes behind. Every one succeeds unless it is interrupted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import tasklib
from tests.campaigns import soak_worker
from tests.campaigns.soak_worker import journaled, journaled_async, nap, work, work_async

if TYPE_CHECKING:
    import random

JOURNAL = "CAMPAIGN_JOURNAL"  # a file: the runs of task bodies
PROCESSES = "CAMPAIGN_PROCESSES"  # a file: the pids of processes that tasks have started, one in a line
MAKE_EFFECTS = "create table effects (task_id uuid not null, worker_id text not null)"
CHILD_SECONDS = 300  # longer than any check takes
WRITER_SECONDS = 3.0

if os.environ.get(JOURNAL):
    soak_worker.keep_journal(os.environ[JOURNAL])


@tasklib.task(isolation="process")
@journaled
def work_apart(seconds: float) -> None:
    nap(seconds)


@tasklib.task(isolation="process")
@journaled_async
async def work_apart_async(seconds: float) -> None:
    await asyncio.sleep(seconds)


@tasklib.task
@journaled
def write(seconds: float) -> None:
    """Its write and its completion are one transaction."""
    current = tasklib.current_task()
    current.connection.execute("insert into effects values (%s, current_setting('application_name'))", [current.id])
    nap(seconds)


@tasklib.task
@journaled_async
async def write_async(seconds: float) -> None:
    current = tasklib.current_task()
    connection = await current.async_connection()
    await connection.execute("insert into effects values (%s, current_setting('application_name'))", [current.id])
    await asyncio.sleep(seconds)


@tasklib.task(isolation="process")
@journaled
def write_apart(seconds: float) -> None:
    current = tasklib.current_task()
    current.connection.execute("insert into effects values (%s, current_setting('application_name'))", [current.id])
    nap(seconds)


@tasklib.task
@journaled
def work_with_children(seconds: float) -> None:
    """Starts processes that outlive it: in its session and in their own, with exec and without, and one whose parent
    has ended.
    """
    sleep = ["sleep", str(CHILD_SECONDS)]
    pids = [
        subprocess.Popen(sleep).pid,
        subprocess.Popen(sleep, start_new_session=True).pid,
        _forked_off(),
        int(subprocess.check_output(["sh", "-c", f"setsid {' '.join(sleep)} >&- 2>&- & echo $!"])),
    ]
    with open(os.environ[PROCESSES], "a", encoding="ascii") as file:  # noqa: PTH123 - one write
        file.write("".join(f"{pid}\n" for pid in pids))
    nap(seconds)


def _forked_off() -> int:
    made = os.fork()
    if made == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(CHILD_SECONDS)
        os._exit(0)
    return made


def draw(dice: random.Random) -> tasklib.NewTask:
    """A task of the load: most are short, and many are long enough to be hit."""
    low, high = dice.choices([(0.0, 0.05), (0.05, 0.3), (0.3, 0.8)], [40, 50, 10])[0]
    function = dice.choices([work, work_async, write, work_apart, work_apart_async], [40, 40, 10, 5, 5])[0]
    return function.new(dice.uniform(low, high))


def draw_writer(dice: random.Random) -> tasklib.NewTask:
    """Tasks that need a connection of their own; half of them have a short timeout."""
    function = dice.choices([write, write_async, write_apart], [40, 40, 20])[0]
    limit = dice.choice([None, WRITER_SECONDS])
    return function.options(timeout_seconds=limit).new(dice.uniform(0.0, 0.1))


def draw_long(dice: random.Random, seconds: float) -> tasklib.NewTask:
    return dice.choice([work, work_async, write, work_apart, work_with_children]).new(seconds)


def draw_with_children(dice: random.Random) -> tasklib.NewTask:
    """The same load, with some tasks whose processes outlive them."""
    return work_with_children.new(dice.uniform(0.1, 1.0)) if dice.random() < 0.03 else draw(dice)


@tasklib.task
@journaled
def hold_itself(seconds: float) -> None:
    """Locks its own row through its own connection until it ends."""
    current = tasklib.current_task()
    current.connection.execute("select from tasklib.tasks where id = %s for update", [current.id])
    current.connection.execute("insert into effects values (%s, current_setting('application_name'))", [current.id])
    current.progress(1, 2)
    nap(seconds)
