"""What tasks, exceptions, log handlers and other people's transactions may do, without stopping a worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from pydantic import BaseModel, field_validator

import tasklib
from tasklib import TaskWorker
from tasklib.worker.execution import Execution
from tests.support.working import get, running, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.raw_sql import Conn


class Unreadable(Exception):
    """An exception that cannot be looked at."""

    @property
    def error_code(self) -> str:
        raise OSError("not now")


class Picky(BaseModel):
    word: str

    @field_validator("word")
    @classmethod
    def _no(cls, word: str) -> str:
        if word == "bad":
            raise MemoryError("in a validator")
        return word


def _raise_unreadable() -> None:
    raise Unreadable


async def _raise_unreadable_async() -> None:
    raise Unreadable


def _take_picky(picky: Picky) -> str:
    return picky.word


async def _take_picky_async(picky: Picky) -> str:
    return picky.word


async def _exit_in_a_child() -> None:
    async def leave() -> None:
        sys.exit(3)

    await asyncio.wait_for(leave(), 5)


async def _stop_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)


def _forget_to_await() -> Any:
    return _raise_unreadable_async()


@pytest.mark.parametrize(
    ("function", "arguments", "state", "code"),
    [
        (_raise_unreadable, {}, "failed", "UNREADABLE_ERROR"),
        (_raise_unreadable_async, {}, "failed", "UNREADABLE_ERROR"),
        (_take_picky, {"picky": {"word": "bad"}}, "failed", "INVALID_ARGUMENTS"),
        (_take_picky_async, {"picky": {"word": "bad"}}, "failed", "INVALID_ARGUMENTS"),
        (_exit_in_a_child, {}, "failed", "SystemExit"),
        (_stop_the_loop, {}, "completed", None),
        (_forget_to_await, {}, "failed", "FAILED"),
    ],
)
def test_the_next_task_runs_whatever_the_last_one_did(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, function: Any, arguments: Any, state: str, code: str
) -> None:
    """In the one slot that there is: sync and async."""
    tasklib.task(name="rude", max_retries=0)(function)
    conn.execute(
        "insert into tasklib.tasks (name, kwargs, max_retries) values ('rude', %s, 0)", [json.dumps(arguments)]
    )
    after: list[Any] = [tasklib.task(name="sync_after")(lambda: 1), tasklib.task(name="async_after")(_after)]
    with running(config):
        (rude,) = client.list_tasks(name="rude")
        task = wait_final(client, rude.id)
        for each in after:
            assert wait_final(client, client.submit_task(each)).state == "completed"
    assert (task.state, task.error_code) == (state, code)


async def _after() -> int:
    return 1


def test_a_generator_is_refused_at_its_definition() -> None:
    """A worker would run nothing of it."""

    def numbers() -> Iterator[int]:
        yield 1

    with pytest.raises(tasklib.InvalidTaskDefinition, match="is a generator"):
        tasklib.task(numbers)


def test_a_cancel_hits_the_task_that_it_is_for(client: tasklib.Client, config: tasklib.Config) -> None:
    """It has ended, its end is not written yet, and the thread runs another task: that one is not disturbed."""
    began, release = threading.Event(), threading.Event()

    @tasklib.task
    def second() -> str:
        began.set()
        while not release.is_set():
            time.sleep(0.005)
        return "undisturbed"

    with running(config) as worker:
        run = worker._run
        assert run is not None
        second_id = client.submit_task(second)
        assert began.wait(20)
        (execution,) = run.buffer.executing()
        ended = Execution(execution.claimed, execution.function, is_coroutine=False)
        ended.inside = execution.inside  # the seat of the thread in which it ran before
        ended.interrupt(tasklib.CancelInterrupt)
        release.set()
        task = wait_final(client, second_id)
    assert (task.state, task.result) == ("completed", {"value": "undisturbed"})


def test_a_row_that_takes_no_outcome_at_all_is_given_up(
    client: tasklib.Client, conn: Conn, config: tasklib.Config
) -> None:
    """A trigger of the user's refuses whatever is written of it: the others complete, and the worker stops cleanly."""

    @tasklib.task
    def job(fails: bool) -> None:
        if fails:
            raise ValueError("as it should")

    poisoned, *others = client.submit_many([job.new(fails=number == 0) for number in range(20)])
    conn.execute(
        """create function refuse() returns trigger language plpgsql as
           $$ begin raise exception 'refused'; end $$"""
    )
    conn.execute(
        sql.SQL(
            """create trigger refuse before update on tasklib.tasks for each row
               when (new.id = {} and new.state not in ('claimed', 'running')) execute function refuse()"""
        ).format(sql.Literal(str(poisoned)))
    )
    try:
        TaskWorker(config, concurrency=2).run_until_empty_sync()
    finally:
        conn.execute("drop function refuse() cascade")
    assert {get(client, each).state for each in others} == {"completed"}
    assert get(client, poisoned).state == "claimed"


def test_a_locked_row_holds_up_nobody(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, database_url: str
) -> None:
    """Somebody's transaction holds a task that has ended: the others are written meanwhile, and it when it is free."""
    began, release = threading.Event(), threading.Event()

    @tasklib.task
    def held() -> None:
        began.set()
        release.wait(20)

    job = tasklib.task(name="job")(lambda: None)
    with running(config, concurrency=2), psycopg.connect(database_url) as holder:
        held_id = client.submit_task(held)
        assert began.wait(20)
        wait_until(lambda: get(client, held_id).state == "running", "running")
        holder.execute("select 1 from tasklib.tasks where id = %s for update", [held_id])
        release.set()
        for task_id in client.submit_many([job.new() for _ in range(30)]):
            assert wait_final(client, task_id).state == "completed"
        assert get(client, held_id).state == "running"
        holder.rollback()
        assert wait_final(client, held_id).state == "completed"


class Broken(logging.Handler):
    """A handler that raises, where it should not."""

    def handle(self, record: logging.LogRecord) -> bool:  # noqa: ARG002 - it does not get that far
        raise OSError("disk full")


@pytest.fixture
def _broken_logging() -> Iterator[None]:
    handler = Broken()
    logger = logging.getLogger("tasklib")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    yield
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.usefixtures("_broken_logging")
def test_a_log_handler_that_raises_stops_nothing(
    client: tasklib.Client, config: tasklib.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told on stderr, as logging does with its own troubles."""
    job = tasklib.task(name="job")(lambda: None)
    with running(config) as worker:
        assert wait_final(client, client.submit_task(job)).state == "completed"
        run = worker._run
        assert run is not None
        assert all(loop.is_alive() for loop in run.loops.values())
    assert "disk full" in capsys.readouterr().err


def test_large_results_are_written_in_small_batches(client: tasklib.Client, config: tasklib.Config) -> None:
    """Sixty results of a megabyte, with five seconds for each statement."""
    hasty = tasklib.Config(config.database_url, database_timeout_seconds=5)
    large = tasklib.task(name="large")(lambda: "x" * 1_000_000)
    client.submit_many([large.new() for _ in range(60)])
    TaskWorker(hasty, concurrency=4).run_until_empty_sync()
    with contextlib.closing(psycopg.connect(config.database_url)) as conn:
        assert conn.execute("select state, count(*) from tasklib.tasks group by 1").fetchall() == [("completed", 60)]


async def test_run_can_be_cancelled_twice(client: tasklib.Client, config: tasklib.Config) -> None:
    """The second time ends the grace; the drain is waited for all the same."""
    began = threading.Event()

    @tasklib.task
    def forever() -> None:
        began.set()
        while True:
            time.sleep(0.005)

    task_id = client.submit_task(forever)
    run = asyncio.create_task(TaskWorker(config, grace_seconds=3600).run())
    assert await asyncio.to_thread(began.wait, 20)
    for _ in range(2):
        run.cancel()
        await asyncio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await run
    assert get(client, task_id).ready
