"""What a worker does with its tasks: outcomes, errors, timeouts, cancels, context, hooks, order, wake-ups, stops."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import itertools
import logging
import math
import os
import socket
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import structlog

import tasklib
from tasklib import TaskWorker
from tasklib.duties.promoter import Promoter
from tasklib.statements import Place
from tasklib.worker import buffer, finish_loop, hooks, unwritten
from tasklib.worker.claims import Claims
from tasklib.worker.execution import Execution
from tasklib.worker.preparation import Preparation
from tests.support.raw_sql import Conn, literal
from tests.support.working import (
    ManualWorker,
    get,
    grown_up_reaper,
    quick_reaper,
    renew_now,
    run_of,
    running,
    time_out,
    wait_final,
)
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def run_one(client: tasklib.Client, config: tasklib.Config, function: Any, **options: Any) -> tasklib.Task:
    """Submitted, and run once."""
    task_id = client.submit_task(function, **options)
    TaskWorker(config).run_until_empty_sync()
    return get(client, task_id)


def attempts(conn: Conn) -> list[tuple[Any, ...]]:
    return conn.execute("select attempt, outcome, will_retry from tasklib.task_attempts order by 1").fetchall()


def raising(error: Callable[[], BaseException], *, is_async: bool, **options: Any) -> Any:
    """A task function that raises."""
    if is_async:

        async def fails() -> None:
            raise error()

        return tasklib.task(name="fails", **options)(fails)

    def fails_sync() -> None:
        raise error()

    return tasklib.task(name="fails", **options)(fails_sync)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_what_has_run_is_freed_at_once(client: tasklib.Client, config: tasklib.Config, is_async: bool) -> None:
    """Not when the collector comes by: that took a quarter of the worker's time, and stopped it for 60 ms at a time."""

    async def works() -> None:
        tasklib.current_task().progress(1, 1)

    def works_sync() -> None:
        tasklib.current_task().progress(1, 1)

    function = tasklib.task(name="works")(works if is_async else works_sync)
    client.submit_many([function.new() for _ in range(50)])
    gc.collect()
    others = executions()  # that other tests of this process have left
    gc.disable()
    try:
        TaskWorker(config).run_until_empty_sync()
        left = executions() - others
    finally:
        gc.enable()
    assert left <= 1  # the last one, in a thread that waits for the next


def executions() -> int:
    return sum(type(each) is Execution for each in gc.get_objects())


# --- outcomes by exception ---


def test_retry_comes_when_it_was_asked_for(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, is_async: bool
) -> None:
    """Retry(delay_seconds=) overrides the policy, and counts."""
    task = run_one(client, config, raising(lambda: tasklib.Retry("later", delay_seconds=120), is_async=is_async))
    assert tasklib.is_retrying(task)
    assert task.started_at is not None
    assert task.next_retry_at is not None
    ended = conn.execute("select finished_at + interval '120 seconds' from tasklib.task_attempts").fetchone()
    assert ended == (task.next_retry_at,)
    assert (task.retry_count, task.error_code) == (1, "Retry")
    assert attempts(conn) == [(1, "FAILED", True)]


def test_retry_has_an_end(client: tasklib.Client, config: tasklib.Config, is_async: bool) -> None:
    """max_retries=0: who asks for a retry has none left."""
    task = run_one(client, config, raising(tasklib.Retry, is_async=is_async), max_retries=0)
    assert tasklib.is_failed(task)


def test_snooze_costs_no_retry(client: tasklib.Client, conn: Conn, config: tasklib.Config, is_async: bool) -> None:
    """It waits as it did before it was tried, and the attempt is on record."""
    task = run_one(client, config, raising(lambda: tasklib.Snooze(60), is_async=is_async), max_retries=0)
    assert (task.state, task.ready, task.retry_count, task.attempt, task.error) == ("pending", False, 0, 1, None)
    ended = conn.execute("select finished_at + interval '60 seconds' from tasklib.task_attempts").fetchone()
    assert ended == (task.scheduled_at,)
    assert attempts(conn) == [(1, "SNOOZED", True)]


def test_a_task_can_cancel_itself(client: tasklib.Client, conn: Conn, config: tasklib.Config, is_async: bool) -> None:
    """Final, and no failure."""
    task = run_one(client, config, raising(lambda: tasklib.Cancel("order gone"), is_async=is_async))
    assert tasklib.is_cancelled(task)
    assert task.error is not None
    assert task.error.startswith("Cancel: order gone\n")
    assert attempts(conn) == [(1, "CANCELLED", False)]


def test_fail_is_for_good(client: tasklib.Client, config: tasklib.Config, is_async: bool) -> None:
    """Whatever retries are left; with a code of its own."""
    task = run_one(
        client, config, raising(lambda: tasklib.Fail("no such user", error_code="NO_USER"), is_async=is_async)
    )
    assert tasklib.is_failed(task)
    assert (task.error_code, task.retry_count) == ("NO_USER", 0)


class ShopError(Exception):
    """An application's own."""

    error_code = "SHOP"


class StockError(ShopError):
    """Knows its code by inheritance."""


@pytest.mark.parametrize(
    ("error", "codes", "code"),
    [
        (lambda: ValueError("x"), {}, "ValueError"),
        (lambda: StockError("x"), {}, "SHOP"),
        (lambda: StockError("x"), {ShopError: "MAPPED"}, "MAPPED"),
        (lambda: ConnectionResetError("x"), {OSError: "NETWORK", ConnectionError: "CONNECTION"}, "CONNECTION"),
        (lambda: tasklib.Fail("x"), {}, "FAILED"),
        (lambda: SystemExit(3), {}, "SystemExit"),
    ],
)
def test_error_codes(
    client: tasklib.Client, config: tasklib.Config, error: Any, codes: Any, code: str, is_async: bool
) -> None:
    """By the task's mapping, nearest class first; by the exception's own attribute; else the name of its class."""
    task = run_one(client, config, raising(error, is_async=is_async, error_codes=codes))
    assert task.error_code == code


@pytest.mark.parametrize(
    ("options", "retries"),
    [
        ({}, True),
        ({"retry_on": [OSError]}, False),
        ({"retry_on": [ValueError]}, True),
        ({"no_retry_on": [ArithmeticError, ValueError]}, False),
        ({"retry_on": [ValueError], "no_retry_on": [UnicodeError]}, True),
    ],
)
def test_which_errors_are_retried(
    client: tasklib.Client, config: tasklib.Config, options: dict[str, Any], retries: bool
) -> None:
    """retry_on names those that are, no_retry_on those that are not."""
    task = run_one(client, config, raising(lambda: ValueError("x"), is_async=False, **options))
    assert tasklib.is_retrying(task) is retries


@pytest.mark.parametrize(
    ("policy", "delays"),
    [
        (tasklib.Exponential(3, 3, cap_seconds=20), [3, 9, 20]),
        (tasklib.Linear(7), [7, 14, 21]),
        (tasklib.Fixed(4), [4, 4, 4]),
        (lambda retry: retry * 100.0, [100, 200, 300]),
        (lambda _: 1 / 0, [5, 10, 20]),
    ],
)
def test_retry_policies(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, policy: Any, delays: list[float]
) -> None:
    """Per task: exponential, linear, fixed, or a function; one that fails or answers nonsense costs nothing."""
    fails = raising(lambda: OSError("x"), is_async=False, backoff=policy)
    task_id = client.submit_task(fails)
    seen: list[int] = []
    for _ in delays:
        TaskWorker(config).run_until_empty_sync()
        row = conn.execute(
            """select extract(epoch from next_retry_at - finished_at)::float from tasklib.tasks
               join tasklib.task_attempts as a on a.task_id = id and a.attempt = tasks.attempt where id = %s""",
            [task_id],
        ).fetchone()
        assert row is not None
        seen.append(round(row[0]))
        conn.execute("update tasklib.tasks set next_retry_at = now(), due_at = now() where next_retry_at is not null")
    assert seen == delays


def test_jitter_spreads_the_retries(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """Within its share, and not all at once."""
    spread = tasklib.Config(config.database_url, retry_jitter=0.5, base_retry_delay_seconds=100)
    fails = raising(lambda: OSError("x"), is_async=False)
    client.submit_many([fails.new() for _ in range(20)])
    TaskWorker(spread, concurrency=4).run_until_empty_sync()
    rows = conn.execute(
        """select round(extract(epoch from next_retry_at - finished_at), 2) from tasklib.tasks
             join tasklib.task_attempts on task_id = id"""
    ).fetchall()
    assert len(rows) == 20
    delays = {delay for (delay,) in rows}
    assert len(delays) > 10
    assert 50 <= min(delays) <= max(delays) <= 150


# --- errors and results as they are stored ---


def test_the_error_tells_where_and_shows_no_locals(client: tasklib.Client, config: tasklib.Config) -> None:
    """Type and message, then the task function's own frames, with the cause; no worker frames, no values."""

    @tasklib.task(max_retries=0)
    def outer(password: str) -> None:
        try:
            int("x")
        except ValueError as error:
            raise ShopError("wrapped") from error

    task = run_one(client, config, outer, password="hunter2-secret")
    assert task.error is not None
    first, second, *rest = task.error.splitlines()
    assert (first, second) == ("ShopError: wrapped", "Traceback:")
    assert "in outer" in rest[0]
    assert "Caused by ValueError: invalid literal" in task.error
    assert "runners.py" not in task.error
    assert "hunter2-secret" not in task.error


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "begins"),
    [
        (lambda: ValueError("nul \0 and half \ud800"), "ValueError: nul \ufffd and half ?"),
        (lambda: ValueError("x" * 1_000_000), "ValueError: xxx"),
        (Rude, "Rude: (its message cannot be shown: RuntimeError)"),
    ],
)
def test_an_error_that_cannot_be_stored_is_made_storable(
    client: tasklib.Client, config: tasklib.Config, error: Any, begins: str, is_async: bool
) -> None:
    """Never fatal: the task fails with what can be said."""
    task = run_one(client, config, raising(error, is_async=is_async, max_retries=0))
    assert task.error is not None
    assert task.error.startswith(begins)
    assert len(task.error) < 70_000


class Opaque:
    def __repr__(self) -> str:
        return "<opaque>"


_CIRCLE: list[Any] = []
_CIRCLE.append(_CIRCLE)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ({"a": [1, "x", None]}, {"value": {"a": [1, "x", None]}}),
        (datetime(2026, 1, 2, tzinfo=UTC), {"value": "2026-01-02T00:00:00Z"}),
        (math.nan, {"value": "NaN"}),
        ("nul \0", {"value": "nul \ufffd"}),
        (Opaque(), {"value": "<opaque>"}),
        ([1e300, 12345678901234567890], {"value": [1e300, 12345678901234567890]}),
        ("x" * 2_000_000, {"value": None}),
        (_CIRCLE, {"value": ["..."]}),
    ],
)
def test_a_result_that_cannot_be_stored_is_sanitised(
    client: tasklib.Client, config: tasklib.Config, value: Any, stored: dict[str, Any], caplog: Any
) -> None:
    """The work has been done: the task completes, with what can be kept, and the log says so."""
    task = run_one(client, config, tasklib.task(name="returns")(lambda: value))
    assert task.state == "completed"
    assert task.result is not None
    assert {"value": task.result["value"]} == stored
    assert ("not_stored" in task.result) is (stored == {"value": None})


def test_a_result_can_be_left_out(client: tasklib.Client, config: tasklib.Config) -> None:
    """store_result=False."""
    task = run_one(client, config, tasklib.task(name="quiet", store_result=False)(lambda: "secret"))
    assert (task.state, task.result) == ("completed", None)


def test_an_unknown_name_is_left_for_others_and_told(
    client: tasklib.Client, config: tasklib.Config, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker claims only what it knows, and says which names nobody serves."""
    tasklib.task(name="known")(lambda: None)
    unknown, known = client.submit_task("not_here", priority=10), client.submit_task("known")
    with caplog.at_level(logging.INFO, "tasklib"), running(config):
        wait_final(client, known)
        wait_until(lambda: "tasks.unserved" in caplog.text, "the warning")
    assert "not_here" in caplog.text
    assert get(client, unknown).state == "pending"


def test_a_name_that_vanished_fails_its_task(client: tasklib.Client, config: tasklib.Config) -> None:
    """Claimed by a worker that was told to serve it, without a function for it."""
    gone = tasklib.task(name="gone")(lambda: None)
    worker = TaskWorker(config, tasks=[gone])
    tasklib.registry.default_registry.clear()
    task_id = client.submit_task("gone")
    worker.run_until_empty_sync()
    task = get(client, task_id)
    assert tasklib.is_failed(task)
    assert task.error_code == "UNKNOWN_TASK"


# --- timeouts ---


def test_a_thread_that_ignores_its_timeout_keeps_its_task(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, caplog: pytest.LogCaptureFixture
) -> None:
    """No retry may overlap the old run: it stays `running`, an error is logged, and it takes one slot of two."""
    hard = tasklib.Config(config.database_url, timeout_delta_seconds=0.1)
    release, interrupted = threading.Event(), threading.Event()

    @tasklib.task(timeout_seconds=0.05)
    def stubborn() -> str:
        while not release.is_set():
            try:
                release.wait(0.005)
            except tasklib.TimeoutInterrupt:
                interrupted.set()
        return "done after all"

    ran = threading.Event()
    tasklib.task(name="other")(ran.set)
    task_id = client.submit_task(stubborn)
    with caplog.at_level(logging.ERROR, "tasklib"), running(hard, concurrency=2) as worker:
        assert interrupted.wait(20)
        wait_until(lambda: "task.stuck" in caplog.text, "the error")
        client.submit_task("other")
        assert ran.wait(20)
        renew_now(worker)
        task = get(client, task_id)
        assert (task.state, task.worker_id) == ("running", worker.worker_id)
        release.set()
        task = wait_final(client, task_id)
    assert (task.state, task.result, task.attempt) == ("completed", {"value": "done after all"}, 1)


def test_an_interrupt_passes_except_exception(client: tasklib.Client, config: tasklib.Config) -> None:
    """Code that catches every Exception does not swallow its timeout, and its clean-up runs."""
    inside, cleaned = threading.Event(), threading.Event()

    @tasklib.task(timeout_seconds=60, max_retries=0)
    def careless() -> None:
        try:
            while True:
                with contextlib.suppress(Exception):  # what careless code does
                    inside.set()
                    time.sleep(0.002)
        finally:
            cleaned.set()

    task_id = client.submit_task(careless)
    with running(config) as worker:
        assert inside.wait(20)
        time_out(worker)
        task = wait_final(client, task_id)
    assert (task.state, task.error_code) == ("failed", "TIMEOUT")
    assert cleaned.is_set()


def test_an_interrupt_never_hits_the_next_task(client: tasklib.Client, config: tasklib.Config) -> None:
    """Tasks that end just when their time is up, one after the other in one thread: each is completed or timed out by
    itself, and the thread survives.
    """

    @tasklib.task(timeout_seconds=0.01, max_retries=0)
    def close_call(n: int) -> int:
        end = time.monotonic() + 0.0099 + (n % 5) * 0.0001
        while time.monotonic() < end:
            pass
        return n

    fine = tasklib.task(name="fine")(lambda: threading.get_ident())  # noqa: PLW0108 - a builtin has no signature
    client.submit_many([task for n in range(40) for task in (close_call.new(n=n), fine.new())])
    TaskWorker(config).run_until_empty_sync()
    assert {task.state for task in client.list_tasks(name="fine")} == {"completed"}
    outcomes = {(task.state, task.error_code) for task in client.list_tasks(name="close_call")}
    assert outcomes <= {("completed", None), ("failed", "TIMEOUT")}


def test_a_blocked_loop_does_not_block_the_worker(client: tasklib.Client, config: tasklib.Config) -> None:
    """An async function that blocks its loop: renewal, claims and finishes go on."""
    blocking, release = threading.Event(), threading.Event()

    @tasklib.task
    async def rude() -> None:
        blocking.set()
        release.wait(60)

    ran = threading.Event()
    tasklib.task(name="other")(ran.set)
    task_id = client.submit_task(rude)
    with running(config, concurrency=2) as worker:
        assert blocking.wait(20)
        until = run_of(worker).lease.valid_until
        renew_now(worker)
        assert run_of(worker).lease.valid_until > until
        client.submit_task("other")
        assert ran.wait(20)
        release.set()
        task = wait_final(client, task_id)
    assert (task.state, task.fencing_token) == ("completed", 1)


def test_running_is_visible_soon(client: tasklib.Client, config: tasklib.Config) -> None:
    """`running` and `started_at`, for what lasts longer than 50 ms; nothing else wakes the worker for it. That it takes
    no more than 100 ms is judged by `dev.py soak daemon punctual`.
    """
    assert finish_loop.MARK_AFTER_SECONDS == 0.05
    began, release = threading.Event(), threading.Event()

    @tasklib.task
    def long() -> None:
        began.set()
        release.wait(40)

    with running(replace(config, lease_seconds=300), poll_interval_seconds=60):
        task_id = client.submit_task(long)
        assert began.wait(20)
        wait_until(lambda: get(client, task_id).state == "running", "running")
        assert get(client, task_id).started_at is not None
        release.set()
        wait_final(client, task_id)


# --- cancel ---


def test_a_running_task_is_cancelled(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, is_async: bool
) -> None:
    """It is asked to stop, and stops: cancelled, with its attempt on record."""
    began = threading.Event()
    stopped_by: list[str] = []

    def forever() -> None:
        began.set()
        try:
            while True:
                time.sleep(0.005)
        except BaseException as error:
            stopped_by.append(type(error).__name__)
            raise

    async def forever_async() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        except BaseException as error:
            stopped_by.append(type(error).__name__)
            raise

    task_id = client.submit_task(tasklib.task(name="forever")(forever_async if is_async else forever))
    with running(config):
        assert began.wait(20)
        assert client.cancel_task(task_id, "ordered twice") == "asked"
        task = wait_final(client, task_id)
    assert (task.state, task.error_code, task.cancel_asked_at) == ("cancelled", "CANCELLED", None)
    assert task.error == "Cancelled: ordered twice"
    assert stopped_by == ["CancelledError" if is_async else "CancelInterrupt"]
    assert attempts(conn) == [(1, "CANCELLED", False)]
    assert conn.execute("select error_message from tasklib.task_attempts").fetchall() == [("ordered twice",)]


def test_a_buffered_task_is_cancelled_without_running(
    client: tasklib.Client, conn: Conn, config: tasklib.Config
) -> None:
    """It had not begun: no attempt."""
    began, release = threading.Event(), threading.Event()

    @tasklib.task
    def hold() -> None:
        began.set()
        release.wait(20)

    ran: list[int] = []
    tasklib.task(name="next")(lambda: ran.append(1))
    client.submit_task(hold, priority=1)
    task_id = client.submit_task("next")
    # Two at a time are claimed; the second one waits behind the first, until it is given back for that.
    with running(tasklib.Config(config.database_url), buffer_size=1):
        assert began.wait(20)
        assert client.cancel_task(task_id) in {"asked", "cancelled"}
        task = wait_final(client, task_id)
        release.set()
    assert task.state == "cancelled"
    assert ran == []
    assert task.attempt == 0


def test_the_attempt_that_succeeded_is_history_too(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """It is kept in the task's own row, and has one of its own when the task is run again: nothing of it is lost."""
    task_id = run_one(client, config, tasklib.task(name="fine")(lambda: 1)).id
    row = "select * from tasklib.task_attempts where task_id = %s and attempt = 1"
    before = conn.execute(row, [task_id]).fetchall()
    task = get(client, task_id)
    worker_id, pid, outcome = task.completed_by, os.getpid(), "COMPLETED"
    assert before[0][:6] == (task_id, 1, task.started_at, task.completed_at, 1, pid)
    assert before[0][6:10] == (False, outcome, worker_id, socket.gethostname())
    assert conn.execute("select count(*) from tasklib.attempts").fetchone() == (0,)
    assert client.retry_task(task_id)
    assert conn.execute(row, [task_id]).fetchall() == before
    TaskWorker(config).run_until_empty_sync()
    assert conn.execute(row, [task_id]).fetchall() == before
    assert attempts(conn) == [(1, "COMPLETED", False), (2, "COMPLETED", False)]


def test_retry_by_hand(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """A final task runs again from the beginning, with all its retries; its history stays."""
    healed = threading.Event()

    @tasklib.task(max_retries=0)
    def flaky() -> str:
        if not healed.is_set():
            raise OSError("not yet")
        return "ok"

    task = run_one(client, config, flaky)
    assert tasklib.is_failed(task)
    healed.set()
    assert client.retry_task(task.id) is True
    assert client.retry_task(task.id) is False
    TaskWorker(config).run_until_empty_sync()
    task = get(client, task.id)
    assert (task.state, task.result, task.attempt, task.error) == ("completed", {"value": "ok"}, 2, None)
    assert attempts(conn) == [(1, "FAILED", False), (2, "COMPLETED", False)]


def test_expired_tasks_do_not_run(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """Not started before expires_at: expired, ready or delayed; never claimed."""
    ran: list[int] = []
    late = tasklib.task(name="late")(lambda: ran.append(1))
    ids = [
        client.submit_task(late, expires_at=datetime.now(UTC) + timedelta(minutes=1)),
        client.submit_task(late, expires_at=datetime.now(UTC) + timedelta(minutes=1), delay_seconds=3600),
    ]
    conn.execute("update tasklib.tasks set expires_at = now() - interval '1 s', due_at = now() - interval '1 s'")
    with running(config):
        for task_id in ids:
            task = wait_final(client, task_id)
            assert (task.state, task.error_code, task.attempt) == ("expired", "EXPIRED", 0)
    assert ran == []


def test_expiry_as_a_verb(client: tasklib.Client, conn: Conn) -> None:
    """Without any worker."""
    task_id = client.submit_task("late", expires_at=datetime.now(UTC) + timedelta(minutes=1))
    assert client.expire_tasks() == 0
    conn.execute("update tasklib.tasks set expires_at = now() - interval '1 s', due_at = now() - interval '1 s'")
    assert client.expire_tasks() == 1
    assert tasklib.is_expired(get(client, task_id))


# --- context, log, hooks ---

_tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")


@pytest.mark.parametrize("awaited", [False, True])
def test_context_flows_into_tasks_and_stays_apart(
    client: tasklib.Client, config: tasklib.Config, is_async: bool, awaited: bool
) -> None:
    """What was set where the worker was started is seen; what a task sets, the next one does not see; the log context
    names the task.
    """

    def look() -> list[str]:
        seen = _tenant.get()
        _tenant.set("changed")
        context = structlog.contextvars.get_contextvars()
        return [seen, context["task"], str(context["attempt"]), context["task_id"]]

    async def look_async() -> list[str]:
        return look()

    task = tasklib.task(name="look")(look_async if is_async else look)
    ids = [client.submit_task(task) for _ in range(3)]
    token = _tenant.set("acme")
    try:
        worker = TaskWorker(config)
        asyncio.run(worker.run_until_empty()) if awaited else worker.run_until_empty_sync()
    finally:
        _tenant.reset(token)
    for task_id in ids:
        assert get(client, task_id).result == {"value": ["acme", "look", "1", str(task_id)]}


@pytest.fixture
def _own_hooks() -> Iterator[None]:
    before = list(hooks._on_start), list(hooks._on_stop)
    yield
    hooks._on_start[:], hooks._on_stop[:] = before


@pytest.mark.usefixtures("_own_hooks")
def test_hooks_run_once_per_worker(client: tasklib.Client, config: tasklib.Config) -> None:
    """Before the first task and after the last; async ones on the loop on which async tasks run."""
    story: list[Any] = []
    loops: list[Any] = []

    @tasklib.on_worker_start
    def start() -> None:
        story.append("start")

    @tasklib.on_worker_start
    async def open_pool() -> None:
        loops.append(asyncio.get_running_loop())

    @tasklib.on_worker_stop
    async def close_pool() -> None:
        loops.append(asyncio.get_running_loop())

    @tasklib.on_worker_stop
    def stop() -> None:
        story.append("stop")

    @tasklib.task
    async def use_pool() -> None:
        loops.append(asyncio.get_running_loop())
        story.append("task")

    client.submit_task(use_pool)
    TaskWorker(config).run_until_empty_sync()
    assert story == ["start", "task", "stop"]
    assert len(loops) == 3
    assert len(set(map(id, loops))) == 1


@pytest.mark.usefixtures("_own_hooks")
def test_a_start_hook_that_fails_keeps_the_worker_from_starting(
    client: tasklib.Client, conn: Conn, config: tasklib.Config
) -> None:
    """Its error is raised; nothing was claimed, nobody is registered."""

    @tasklib.on_worker_start
    def broken() -> None:
        raise OSError("no model file")

    job = tasklib.task(name="job")(lambda: None)
    task_id = client.submit_task(job)
    with pytest.raises(OSError, match="no model file"):
        TaskWorker(config).run_until_empty_sync()
    assert get(client, task_id).state == "pending"
    assert conn.execute("select count(*) from tasklib.workers").fetchone() == (0,)


def test_one_line_ends_an_attempt_and_never_holds_arguments(
    client: tasklib.Client, config: tasklib.Config, caplog: pytest.LogCaptureFixture
) -> None:
    """Task, id, queue, attempt, worker, time, outcome; neither arguments nor results, whatever happens."""

    @tasklib.task(max_retries=0)
    def pay(card: str) -> str:
        if card.endswith("bad"):
            raise ValueError("declined")
        return card

    ids = [client.submit_task(pay, card="S3CR3T-good"), client.submit_task(pay, card="S3CR3T-bad")]
    with caplog.at_level(logging.DEBUG, "tasklib"):
        TaskWorker(config).run_until_empty_sync()
    lines = [record.getMessage() for record in caplog.records if "task_id=" in record.getMessage()]
    assert [line.split()[0] for line in lines] == ["task.completed", "task.failed"]
    for line, task_id in zip(lines, ids, strict=True):
        assert all(
            word in line for word in ("task=pay", f"task_id={task_id}", "queue=default", "attempt=1", "seconds=")
        )
    assert "S3CR3T" not in caplog.text
    record = next(record for record in caplog.records if "task.failed" in record.getMessage())
    assert record.tasklib["error_code"] == "ValueError"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("retries", "level"), [(0, "ERROR"), (1, "WARNING")])
def test_a_failure_is_understood_from_its_log_line(
    client: tasklib.Client, config: tasklib.Config, caplog: pytest.LogCaptureFixture, retries: int, level: str
) -> None:
    """What was raised and where, and whether it runs again. If it does not, a person should look: an error."""

    @tasklib.task(max_retries=retries)
    def pay(card: str) -> None:
        raise ValueError("declined")

    client.submit_task(pay, card="S3CR3T")
    TaskWorker(config).run_until_empty_sync()
    (record,) = [record for record in caplog.records if record.name == "tasklib.tasks"]
    line, *trace = record.getMessage().splitlines()
    assert record.levelname == level
    assert 'error="ValueError: declined"' in line
    assert f"will_retry={bool(retries)}" in line
    assert trace[-1] == '        raise ValueError("declined")'
    assert "S3CR3T" not in caplog.text


# --- order, queues, the buffer ---


def test_older_tasks_of_a_lower_priority_are_found_behind_newer_ones(
    client: tasklib.Client, config: tasklib.Config
) -> None:
    """Claims that come back full begin where the last one ended; before it stops or sleeps, a worker looks below."""
    ran: list[str] = []

    @tasklib.task
    def note(what: str) -> None:
        ran.append(what)

    client.submit_many([note.new(what="older") for _ in range(25)])
    client.submit_many([note.options(priority=5).new(what="newer") for _ in range(50)])
    TaskWorker(config, concurrency=1, buffer_size=4).run_until_empty_sync()
    assert ran == ["newer"] * 50 + ["older"] * 25
    client.submit_many([note.new(what="older") for _ in range(25)])
    client.submit_many([note.options(priority=5).new(what="newer") for _ in range(50)])
    with running(config, concurrency=10, buffer_size=0, poll_interval_seconds=60, listen=False):
        wait_until(lambda: len(ran) == 150, "all of them")


def test_a_claim_begins_at_its_floor(client: tasklib.Client, config: tasklib.Config) -> None:
    """What was submitted before it, or has a lower priority, is passed over; what has its very moment is not."""
    note = tasklib.task(name="note")(lambda: None)
    client.submit_many([note.new() for _ in range(3)])
    worker = ManualWorker(config, "w")
    first = worker.session.run(worker.statements.claim(worker.id, "default", ["note"], 1))
    assert first.reached is not None

    def count(later: float, priority: int) -> int:
        assert first.reached is not None
        floor = Place(first.reached.submitted + later, priority)
        claim = worker.statements.claim(worker.id, "default", ["note"], 2, floor=floor)
        return len(worker.session.run(claim).tasks)

    assert count(3600, 0) == 0
    assert count(-0.001, 1) == 0
    assert count(-0.001, 0) == 2
    worker.close()


def test_a_worker_of_all_queues_finds_new_ones(client: tasklib.Client, config: tasklib.Config) -> None:
    """Also those that no function of its names, and that had nothing in them before."""
    ran: list[str] = []

    @tasklib.task
    def note(where: str) -> None:
        ran.append(where)

    for queue in ("somewhere", "elsewhere", "default"):
        client.submit_task(note, where=queue, queue=queue)
    TaskWorker(config).run_until_empty_sync()
    assert sorted(ran) == ["default", "elsewhere", "somewhere"]


def test_only_the_given_queues_and_tasks(client: tasklib.Client, config: tasklib.Config) -> None:
    """queues= and tasks= bound what a worker takes."""
    a, b = (tasklib.task(name=name)(lambda: None) for name in "ab")
    ids = {
        (name, queue): client.submit_task(name, queue=queue) for name in "ab" for queue in ("red", "blue", "default")
    }
    TaskWorker(config, queues=["red"], tasks=[a]).run_until_empty_sync()
    assert [key for key, task_id in ids.items() if get(client, task_id).state == "completed"] == [("a", "red")]
    TaskWorker(config, queues=["red", "blue"], tasks=["b"]).run_until_empty_sync()
    TaskWorker(config, tasks=[a, b]).run_until_empty_sync()
    assert {get(client, task_id).state for task_id in ids.values()} == {"completed"}


def test_a_full_queue_does_not_starve_another(client: tasklib.Client, config: tasklib.Config) -> None:
    """With two queues, a few tasks of the second run long before the first one is empty."""
    order: list[str] = []
    note = tasklib.task(name="note")(lambda q: order.append(q))  # noqa: PLW0108 - its parameter has a name
    client.submit_many([note.options(queue="full").new(q="full") for _ in range(300)])
    client.submit_many([note.options(queue="small").new(q="small") for _ in range(3)])
    TaskWorker(config, queues=["full", "small"], buffer_size=4).run_until_empty_sync()
    assert len(order) == 303
    assert max(index for index, queue in enumerate(order) if queue == "small") < 60


def test_tasks_behind_long_ones_go_back(client: tasklib.Client, config: tasklib.Config, monkeypatch: Any) -> None:
    """What waits behind a slot that does not get free goes back, and another worker runs it."""
    monkeypatch.setattr(buffer, "STUCK_SECONDS", 0.1)
    release = threading.Event()
    ran: list[str] = []
    job = tasklib.task(name="job")(lambda: ran.append("job"))

    @tasklib.task(priority=10)
    def long() -> None:
        release.wait(30)

    client.submit_many([job.new() for _ in range(50)])
    TaskWorker(config).run_until_empty_sync()  # short tasks: the next worker may expect more of them
    with running(config, buffer_size=20) as first:
        long_id = client.submit(long.new())
        ids = client.submit_many([job.new() for _ in range(10)])
        wait_until(lambda: get(client, long_id).state == "running", "the long one")
        with running(config, tasks=[job]) as second:
            for task_id in ids:
                wait_final(client, task_id)
            assert second.worker_id != first.worker_id
        assert get(client, long_id).state == "running"
        release.set()
        wait_final(client, long_id)
    assert {task.attempt for task in client.list_tasks(name="job", limit=10)} == {1}


def test_ends_of_a_few_milliseconds_share_a_statement(
    client: tasklib.Client, config: tasklib.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each would cost more than the tasks."""
    monkeypatch.setattr(finish_loop, "GATHER_SECONDS", 0.05)
    job = tasklib.task(name="job")(lambda: time.sleep(0.005))
    worker = TaskWorker(config)
    written: list[float] = []
    really = unwritten.UnwrittenOutcomes.write

    def note(self: unwritten.UnwrittenOutcomes) -> None:
        assert worker._run is not None
        written.append(worker._run.finish_loop._flushed_at)
        really(self)

    monkeypatch.setattr(unwritten.UnwrittenOutcomes, "write", note)
    client.submit_many([job.new() for _ in range(100)])
    worker.run_until_empty_sync()
    assert len(written) > 1
    assert min(later - earlier for earlier, later in itertools.pairwise(written)) >= 0.05 - 1e-9


def test_what_turns_out_to_be_long_is_left_to_others(client: tasklib.Client, config: tasklib.Config) -> None:
    """A worker that has run short tasks holds many. Each of these takes less than `STUCK_SECONDS`."""
    waiting: list[int] = []  # when each of them began
    is_shown = threading.Event()

    @tasklib.task
    def job(is_long: bool) -> None:
        if is_long and not is_shown.is_set():
            waiting.append(run.buffer.counts()[0])
            time.sleep(0.2)
            rounds = run.loops["claim"].beats
            run.loops["claim"].wake()  # it may have stood still, for as long as the database did
            wait_until(lambda: run.loops["claim"].beats > rounds, "the claim loop to look at what it holds")

    with running(config) as worker:
        run = run_of(worker)
        for task_id in client.submit_many([job.new(is_long=False) for _ in range(50)]):
            wait_final(client, task_id)
        run.buffer._size.average_seconds = 0.001  # also on a machine on which one of them took long
        ids = client.submit_many([job.new(is_long=True) for _ in range(40)])
        wait_until(lambda: sum(get(client, each).ready for each in ids) >= 20, "most of them to be ready for others")
        begun = len(waiting)
        is_shown.set()
        for task_id in ids:
            assert wait_final(client, task_id).attempt == 1
    assert waiting[0] == len(ids) - 1, "it held all of them"
    assert begun < len(ids) // 2


def test_a_suspect_runs_alone(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """While it executes nothing else does, and it is marked as running before its first line."""
    executing: set[str] = set()
    company: list[set[str]] = []
    states: list[str] = []
    lock = threading.Lock()

    @tasklib.task
    def watched(key: str) -> None:
        with lock:
            executing.add(key)
        if key == "suspect":
            row = conn.execute("select state from tasklib.tasks where suspect").fetchone()
            states.append(row[0] if row else "none")
            deadline = time.monotonic() + 0.5  # time for others to begin beside it
            while executing == {"suspect"} and time.monotonic() < deadline:
                time.sleep(0.002)
            company.append(set(executing))
        time.sleep(0.002)
        with lock:
            executing.discard(key)

    client.submit_many([watched.new(key=str(n)) for n in range(20)])
    suspect = client.submit(watched.options(priority=10).new(key="suspect"))
    client.submit_many([watched.options(priority=-2).new(key=str(n)) for n in range(20, 40)])
    conn.execute("update tasklib.tasks set suspect = true where id = %s", [suspect])
    TaskWorker(config, concurrency=4).run_until_empty_sync()
    assert company == [{"suspect"}]
    assert states == ["running"]
    assert get(client, suspect).suspect is False
    assert {task.state for task in client.list_tasks(limit=100)} == {"completed"}


def test_a_suspect_does_not_keep_others_waiting_behind_it(
    client: tasklib.Client, conn: Conn, config: tasklib.Config
) -> None:
    """An idle worker takes one suspect and nothing beside it: what would wait behind it is left to other workers."""
    began, release = threading.Event(), threading.Event()

    @tasklib.task
    def slow() -> None:
        began.set()
        release.wait(20)

    other = tasklib.task(name="other")(lambda: None)
    suspects = client.submit_many([slow.options(priority=1).new() for _ in range(2)])
    others = client.submit_many([other.new() for _ in range(5)])
    conn.execute("update tasklib.tasks set suspect = true where id = any(%s)", [suspects])
    with running(config, concurrency=4):
        assert began.wait(20)
        held = conn.execute("select id from tasklib.tasks where worker_id is not null").fetchall()
        assert held == [(suspects[0],)]
        with running(config, tasks=[other]):
            for task_id in others:
                wait_final(client, task_id)
        release.set()
        for task_id in suspects:
            wait_final(client, task_id)


@pytest.mark.direct("polls once a minute, and hears of work")
@pytest.mark.parametrize("queues", [("a", "a"), ("a", "b"), ("b", "a")])
def test_a_suspect_that_was_left_for_another_task_does_not_wait_for_the_poll(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, queues: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the other task has ended before its claimer goes on."""
    really = Preparation.add

    def add(self: Preparation, executions: Any) -> None:
        really(self, executions)
        wait_until(self._buffer.is_idle, "what was claimed has been settled")

    quick = tasklib.task(name="quick")(lambda: None)
    with running(config, concurrency=4, poll_interval_seconds=60, queues=["a", "b"]):
        wait_final(client, client.submit_task(quick, queue="a"))
        monkeypatch.setattr(Preparation, "add", add)
        with conn.transaction():
            other, suspect = (client.submit_task(quick, queue=queue, connection=conn) for queue in queues)
            conn.execute("update tasklib.tasks set suspect = true where id = %s", [suspect])
        for task_id in (other, suspect):
            assert wait_final(client, task_id).state == "completed"


def test_suspects_run_as_soon_as_the_worker_is_idle(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """Those that it left alone while it was busy, and one after the other. They do not wait for the poll."""
    began, release = threading.Event(), threading.Event()

    @tasklib.task
    def slow() -> None:
        began.set()
        release.wait(20)

    quick = tasklib.task(name="quick")(lambda: None)
    with running(config, concurrency=4, poll_interval_seconds=60):
        slow_id = client.submit(slow.new())
        assert began.wait(20)
        with conn.transaction():
            suspects = client.submit_many([quick.new() for _ in range(3)], connection=conn)
            conn.execute("update tasklib.tasks set suspect = true where id = any(%s)", [suspects])
        wait_final(client, client.submit(quick.new()))  # it has looked, and taken what it may
        assert {get(client, each).attempt for each in suspects} == {0}
        release.set()
        for task_id in [slow_id, *suspects]:
            wait_final(client, task_id)


def test_what_must_not_run_twice_is_marked_before_its_first_line(
    client: tasklib.Client, conn: Conn, config: tasklib.Config
) -> None:
    """on_crash="fail": after a crash it is known whether it had begun."""
    states: list[str] = []

    @tasklib.task(on_crash="fail")
    def once() -> None:
        row = conn.execute("select state from tasklib.tasks").fetchone()
        states.append(row[0] if row else "none")

    task = run_one(client, config, once)
    assert states == ["running"]
    assert (task.state, task.attempt) == ("completed", 1)


def test_on_crash_fail(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """Begun when its worker died: failed, not run again. Only claimed: runs."""
    ran: list[int] = []
    once = tasklib.task(name="once", on_crash="fail")(lambda: ran.append(1))
    begun, buffered = client.submit_task(once, priority=1), client.submit_task(once)
    dead = ManualWorker(config, "dead")
    first, _ = dead.claim("once")
    assert dead.start(first)
    dead.close()
    conn.execute("update tasklib.workers set lease_until = clock_timestamp() - interval '1 s'")
    with quick_reaper(config) as reaper:
        reaper.run_once()
    with running(config):
        failed, done = wait_final(client, begun), wait_final(client, buffered)
    assert (failed.state, failed.error_code, failed.crash_count) == ("failed", "WORKER_CRASHED", 1)
    assert (done.state, done.attempt) == ("completed", 1)
    assert ran == [1]


def test_a_task_that_kills_its_workers_is_buried(client: tasklib.Client, config: tasklib.Config) -> None:
    """The first death makes it a suspect; two more while alone bury it. It is kept for a person."""
    quick = tasklib.Config(config.database_url, lease_seconds=0.3, bury_after=2)
    killer = tasklib.task(name="killer")(lambda: None)
    task_id = client.submit_task(killer)
    grave = ManualWorker(quick, "grave", lives=False)
    reaper = grown_up_reaper(quick, grave.session)
    history = []
    for _ in range(3):
        victim = ManualWorker(quick, "victim")
        (claimed,) = victim.claim("killer") or victim.claim_suspects("killer")
        assert victim.start(claimed)
        wait_until(functools.partial(_is_dead, grave, victim), "its lease to run out")
        reaper.run_once()
        task = get(client, task_id)
        history.append((task.state, task.suspect, task.strikes, task.crash_count, task.retry_count))
        victim.close()
    grave.close()
    assert history == [("pending", True, 0, 1, 0), ("pending", True, 1, 2, 0), ("buried", True, 2, 3, 0)]
    assert client.retry_task(task_id)
    TaskWorker(config).run_until_empty_sync()
    assert get(client, task_id).state == "completed"


def _is_dead(grave: ManualWorker, victim: ManualWorker) -> bool:
    sql = f"select lease_until < clock_timestamp() from tasklib.workers where worker_id = '{victim.id}'"
    return grave.session.connection().execute(literal(sql)).fetchone() == (True,)


# --- wake-ups ---


@pytest.mark.direct("polls once a minute: is about LISTEN")
def test_an_idle_worker_hears_of_new_work(client: tasklib.Client, config: tasklib.Config) -> None:
    """With a poll of a minute: by the notification alone, in any queue."""
    ran = threading.Event()
    tasklib.task(name="job")(ran.set)
    with running(config, poll_interval_seconds=60):
        client.submit_task("job", queue="never-heard-of")
        assert ran.wait(20)


def test_until_empty_means_retries_too(client: tasklib.Client, config: tasklib.Config) -> None:
    """Those that are due at once."""

    @tasklib.task(max_retries=3, backoff=tasklib.Fixed(0))
    def failing() -> None:
        raise OSError

    for _ in range(20):
        task_id = client.submit_task(failing)
        TaskWorker(config).run_until_empty_sync()
        assert tasklib.is_failed(get(client, task_id))


def test_polling_alone_is_enough(client: tasklib.Client, config: tasklib.Config) -> None:
    """listen=False: everything works, within the poll interval."""
    ran = threading.Event()
    tasklib.task(name="job")(ran.set)
    with running(config, listen=False, poll_interval_seconds=0.05):
        client.submit_task("job", delay_seconds=0.2)
        assert ran.wait(20)


def test_a_delayed_task_is_not_late_where_claims_are_slower_than_tasks(
    client: tasklib.Client, config: tasklib.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is always room for more, and always more to claim: in between the worker does what else it has to."""
    order: list[str] = []
    really = Claims._claim
    is_submitted = threading.Event()

    def slow(self: Claims, *args: Any, **options: Any) -> Any:
        assert len(order) <= 200 or is_submitted.wait(20)
        time.sleep(0.05)
        return really(self, *args, **options)

    @tasklib.task
    async def note(what: str) -> None:
        order.append(what)

    monkeypatch.setattr(Claims, "_claim", slow)
    client.submit_many([note.new(what="other") for _ in range(6_000)])
    with running(config, concurrency=100, buffer_size=100, poll_interval_seconds=0.1, duties=False):
        wait_until(lambda: len(order) > 200, "the worker is under way")
        client.submit_task(note, what="delayed", delay_seconds=0.1, priority=5)
        is_submitted.set()
        wait_until(lambda: "delayed" in order, "the delayed one")
        assert order.count("other") < 6_000, "it waited for the backlog"


def test_a_delayed_task_is_not_forgotten_by_who_always_has_work(client: tasklib.Client, config: tasklib.Config) -> None:
    """It was idle, and knew of nothing that was to become due; since then every claim has come back full."""
    order: list[str] = []

    @tasklib.task
    def note(what: str, seconds: float = 0.0) -> None:
        order.append(what)
        time.sleep(seconds)

    with running(config, poll_interval_seconds=0.2) as worker:
        client.submit_task(note, what="first")
        wait_until(lambda: order == ["first"], "the worker has nothing to do")
        assert worker._run is not None
        due = worker._run.claimer._due
        wait_until(lambda: due.promote_at == math.inf, "it knows of nothing that is due")
        client.submit_many([note.new(what="other", seconds=0.01) for _ in range(2_000)])
        client.submit_task(note, what="delayed", delay_seconds=0.3, priority=5)
        wait_until(lambda: "delayed" in order, "the delayed one")
        assert order.count("other") < 2_000, "it waited for the backlog"


@pytest.mark.parametrize("listen", [True, False])
def test_a_delayed_task_starts_on_time(client: tasklib.Client, config: tasklib.Config, listen: bool) -> None:
    """An idle worker wakes for it, also if it polls once a minute, and never starts it before. That it is not late by
    more than 20 ms is judged by `dev.py soak daemon punctual`.
    """
    began: list[datetime] = []
    tick = tasklib.task(name="tick")(lambda: began.append(datetime.now(UTC)))

    def submit() -> datetime:
        due = datetime.now(UTC) + timedelta(seconds=0.5)
        client.submit_task(tick, scheduled_at=due)
        return due

    due = [] if listen else [submit()]  # one that does not listen finds it by its first look
    with running(config, poll_interval_seconds=60, listen=listen):
        due += [submit()] if listen else []
        wait_until(lambda: bool(began), "it to start")
    assert began[0] >= due[0]


@pytest.mark.direct("polls once a minute: is about LISTEN")
def test_a_retry_starts_on_time(client: tasklib.Client, config: tasklib.Config) -> None:
    """As a delayed one does: the worker wakes for it, though it polls once a minute."""

    @tasklib.task(max_retries=2, backoff=tasklib.Fixed(0.2))
    def flaky() -> None:
        raise OSError("again")

    with running(config, poll_interval_seconds=60):
        assert wait_final(client, client.submit_task(flaky)).attempt == 3


@pytest.mark.direct("polls once a minute: is about LISTEN")
def test_a_flood_of_foreign_notifications_changes_nothing(
    client: tasklib.Client, conn: Conn, config: tasklib.Config
) -> None:
    """Anybody can notify: nonsense is heard and ignored."""
    ran = threading.Event()
    tasklib.task(name="job")(ran.set)
    with running(config, poll_interval_seconds=60):
        for payload in ("", "x" * 7000, "not a uuid", str(client.submit_task("later", delay_seconds=3600))):
            conn.execute("select pg_notify('task_cancel', %s), pg_notify('task_new', %s)", [payload, payload])
        client.submit_task("job")
        assert ran.wait(20)


# --- stop ---


def test_a_stop_finishes_what_runs_and_gives_back_the_rest(
    client: tasklib.Client, conn: Conn, config: tasklib.Config
) -> None:
    """What executes ends; what waited is ready again at no cost; the worker's row and its claims are gone."""
    began, release = threading.Event(), threading.Event()

    @tasklib.task
    def job() -> None:
        began.set()
        release.wait(20)

    ids = client.submit_many([job.new() for _ in range(5)])
    with running(config, buffer_size=3) as worker:
        assert began.wait(20)
        worker.stop()
        wait_until(lambda: sum(get(client, each).ready for each in ids) == 4, "the rest to be given back")
        row = conn.execute("select stopping, lease_until > clock_timestamp() from tasklib.workers").fetchone()
        assert row is not None
        assert row[1], "the heartbeat outlives the drain"
        release.set()
    tasks = [get(client, each) for each in ids]
    assert sorted(task.state for task in tasks) == ["completed", "pending", "pending", "pending", "pending"]
    assert {(task.attempt, task.retry_count) for task in tasks if task.state == "pending"} == {(0, 0)}
    assert conn.execute(
        "select (select count(*) from tasklib.workers), (select count(*) from tasklib.claims)"
    ).fetchone() == (0, 0)


def test_what_does_not_end_within_the_grace_is_interrupted_at_no_cost(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, is_async: bool
) -> None:
    """Interruption by a stop costs no retry: the task is ready for the next worker."""
    began = threading.Event()

    def forever() -> None:
        began.set()
        while True:
            time.sleep(0.005)

    async def forever_async() -> None:
        began.set()
        await asyncio.sleep(60)

    task_id = client.submit_task(tasklib.task(name="forever")(forever_async if is_async else forever))
    with running(config, grace_seconds=0.1):
        assert began.wait(20)
    task = get(client, task_id)
    assert (task.state, task.ready, task.retry_count, task.attempt) == ("pending", True, 0, 1)
    assert attempts(conn) == [(1, "INTERRUPTED", True)]


def test_a_second_stop_ends_the_grace(client: tasklib.Client, config: tasklib.Config) -> None:
    """Of an hour."""
    began = threading.Event()

    @tasklib.task
    def forever() -> None:
        began.set()
        while True:
            time.sleep(0.005)

    task_id = client.submit_task(forever)
    with running(config, grace_seconds=3600) as worker:
        assert began.wait(20)
        worker.stop()
        worker.stop()
    assert get(client, task_id).ready


async def test_to_cancel_run_is_to_stop_it(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """`await worker.run()` in a task group: the drain is waited for, then the cancellation goes on."""
    began = threading.Event()

    @tasklib.task
    def job() -> str:
        began.set()
        time.sleep(0.1)
        return "done"

    task_id = client.submit_task(job)
    run = asyncio.create_task(TaskWorker(config).run())
    assert await asyncio.to_thread(began.wait, 20)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert get(client, task_id).state == "completed"
    assert conn.execute("select count(*) from tasklib.workers").fetchone() == (0,)


def test_a_worker_runs_once_at_a_time_and_again(client: tasklib.Client, config: tasklib.Config) -> None:
    """The same object can be run again, under a new id; not twice at once."""
    job = tasklib.task(name="job")(lambda: None)
    worker = TaskWorker(config)
    ids = []
    for _ in range(2):
        client.submit_task(job)
        worker.run_until_empty_sync()
        ids.append(worker.worker_id)
    assert ids[0] != ids[1]
    with running(config) as busy, pytest.raises(tasklib.InvalidOptions, match="running already"):
        busy.run_sync()
    assert {task.state for task in client.list_tasks()} == {"completed"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"concurrency": 0}, "concurrency must be"),
        ({"concurrency": True}, "concurrency must be"),
        ({"poll_interval_seconds": 0}, "poll_interval_seconds must be"),
        ({"poll_interval_seconds": 61}, "poll_interval_seconds must be"),
        ({"queues": "mail"}, "list of names"),
        ({"queues": []}, "leave it out"),
        ({"queues": ["No Spaces"]}, "cannot be a queue"),
        ({"tasks": "job"}, "list of task functions"),
        ({"tasks": ["unheard_of"]}, "no task function is called"),
        ({"buffer_size": -1}, "buffer_size"),
        ({"grace_seconds": -1}, "grace_seconds"),
    ],
)
def test_wrong_options_are_refused(config: tasklib.Config, options: dict[str, Any], words: str) -> None:
    """At once, with what to do."""
    with pytest.raises(tasklib.TasklibError, match=words):
        TaskWorker(config, **options)
    with pytest.raises(tasklib.InvalidConfig, match=r"takes a tasklib\.Config first"):
        TaskWorker("postgresql://", concurrency=1)  # type: ignore[arg-type]


def test_wrong_task_options_are_refused() -> None:
    """At the definition."""
    with pytest.raises(tasklib.InvalidOptions, match="backoff takes"):
        tasklib.task(name="a", backoff=5)(lambda: None)  # type: ignore[call-overload]
    with pytest.raises(tasklib.InvalidOptions, match="error code"):
        tasklib.task(name="a", error_codes={OSError: ""})(lambda: None)
    with pytest.raises(tasklib.InvalidOptions, match="exception classes"):
        tasklib.task(name="a", error_codes={"OSError": "X"})(lambda: None)  # type: ignore[dict-item]


def test_partials_and_callable_objects_run(client: tasklib.Client, config: tasklib.Config) -> None:
    """What can be decorated can be run."""

    def power(base: int, exponent: int) -> int:
        return int(base**exponent)

    square = tasklib.task(name="square")(functools.partial(power, exponent=2))
    assert run_one(client, config, square, base=7).result == {"value": 49}


def test_what_expires_in_the_buffer_does_not_start(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claimed in time, but its turn comes too late: expired, never begun."""
    monkeypatch.setattr(buffer, "STUCK_SECONDS", 60)
    began, release = threading.Event(), threading.Event()
    ran: list[int] = []

    @tasklib.task(priority=1)
    def hold() -> None:
        began.set()
        release.wait(60)

    async def late_async() -> None:
        ran.append(1)

    def late() -> None:
        ran.append(1)

    tasklib.task(name="late")(late_async if is_async else late)
    client.submit_task(hold)
    with running(config, buffer_size=2) as worker:
        assert began.wait(20)
        task_id = client.submit_task("late", expires_at=datetime.now(UTC) + timedelta(hours=1))
        buffer_of_it = run_of(worker).buffer
        wait_until(lambda: buffer_of_it.counts() == (1, 1), "claimed, and waiting behind the other")
        (waiting,) = [each for each in buffer_of_it.held() if each.id == task_id]
        waiting.task = waiting.task._replace(expires_at=datetime.now(UTC) - timedelta(hours=1))  # an hour has passed
        release.set()
        task = wait_final(client, task_id)
    assert (task.state, task.error_code, task.attempt) == ("expired", "EXPIRED", 0)
    assert ran == []


def test_the_promoter(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """It promotes what is due, and says how many tasks that were, and when the next one is due."""
    worker = ManualWorker(config, "promoter", lives=False)
    promoter = Promoter(worker.session, worker.statements)
    assert promoter.promote() == (0, None)
    task_id = client.submit_task("later", delay_seconds=3600)
    promoted, next_due_seconds = promoter.promote()
    assert promoted == 0
    assert next_due_seconds is not None
    assert 0 < next_due_seconds <= 3600
    conn.execute("update tasklib.tasks set due_at = now(), scheduled_at = now()")
    assert promoter.promote() == (1, None)
    assert get(client, task_id).ready
    worker.close()


@pytest.mark.usefixtures("_own_hooks")
def test_a_start_hook_that_hangs_ends_with_the_stop(config: tasklib.Config) -> None:
    """A stop does not wait for it."""
    began = threading.Event()

    @tasklib.on_worker_start
    async def hang() -> None:
        began.set()
        await asyncio.sleep(3600)

    worker = TaskWorker(config)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            worker.run_sync()
        except TimeoutError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert began.wait(20)
    worker.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert len(raised) == 1


def test_tasks_run_on_the_kind_of_loop_that_the_application_runs_on(
    client: tasklib.Client, config: tasklib.Config
) -> None:
    """On uvloop under uvloop, on asyncio's own elsewhere."""
    uvloop = pytest.importorskip("uvloop")
    tasklib.task(name="kind")(_kind_of_loop)

    def run_by(run: Callable[[Any], None]) -> tasklib.Task:
        task_id = client.submit_task("kind")
        run(TaskWorker(config).run_until_empty())
        return get(client, task_id)

    assert run_by(uvloop.run).result == {"value": "uvloop"}
    assert run_by(asyncio.run).result == {"value": "asyncio"}


async def _kind_of_loop() -> str:
    await asyncio.sleep(0)
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]
