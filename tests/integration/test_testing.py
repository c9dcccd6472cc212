"""`tasklib.testing` and the pytest plugin, in the hands of a user: run, look, let time pass."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from freezegun import freeze_time
from pydantic import BaseModel

import tasklib
from tasklib.duties.expirer import Expirer
from tasklib.registry import default_registry
from tasklib.runtime.database_clock import DatabaseClock
from tasklib.testing import Queue, TasksFailed, run_inline
from tests.support.invariants import AT_ANY_TIME, violations
from tests.support.raw_sql import literal
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tasklib.embedded import EmbeddedPostgres
    from tests.support.raw_sql import Conn

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
TIMES = ("created_at", "scheduled_at", "next_retry_at", "expires_at", "deadline_at", "due_at")


class Address(BaseModel):
    town: str


@tasklib.task(name="testing.ship", queue="parcels")
def ship(to: Address, at: datetime, weight: Decimal = Decimal("1.5"), *, fragile: bool = False) -> str:
    return f"{to.town} {at:%H} {weight} {fragile}"


@tasklib.task(name="testing.add")
def add(a: int, b: int = 1) -> int:
    return a + b


@pytest.fixture(autouse=True)
def _tasks_are_known() -> None:
    """Another test's clean-up may have come between this module's import and its tests."""
    for function in (ship, add):
        default_registry.add(function)


@pytest.fixture
def row(tasklib_database: tasklib.Config) -> Iterator[Conn]:
    with psycopg.connect(tasklib_database.database_url, autocommit=True) as conn:
        yield conn


# --- run ---


def test_what_is_due_runs_and_what_that_submits(tasklib_queue: Queue) -> None:
    """With a real worker; the tasks that ran come back as they are now, in the order in which they began."""

    @tasklib.task
    def parent() -> None:
        add.submit_sync(20, 22)

    first = parent.submit_sync()
    later = add.options(delay_seconds=60).submit_sync(1)
    ran = tasklib_queue.run_until_empty()
    assert [task.name for task in ran] == ["parent", "testing.add"]
    assert ran[1].result == {"value": 42}
    assert ran[1].parent_id == first
    assert tasklib.is_pending(tasklib.get_task(later))
    assert tasklib_queue.run_until_empty() == []


async def test_the_tests_own_loop_is_free_meanwhile(tasklib_queue: Queue) -> None:
    """A task that needs the test's event loop, say a server in it, gets it."""
    loop = asyncio.get_running_loop()

    @tasklib.task
    def ask() -> str:
        return asyncio.run_coroutine_threadsafe(asyncio.sleep(0, "answer"), loop).result(20)

    await ask.submit()
    [task] = await tasklib_queue.run_until_empty_async()
    assert task.result == {"value": "answer"}


async def test_sync_runs_work_inside_a_running_loop(tasklib_queue: Queue) -> None:
    """Async functions run on the worker's own loop."""

    @tasklib.task
    async def nap() -> str:
        await asyncio.sleep(0)
        return "rested"

    await nap.submit()
    [task] = tasklib_queue.run_until_empty()
    assert task.result == {"value": "rested"}


def test_a_failure_is_raised_with_the_call_and_its_traceback(tasklib_queue: Queue) -> None:
    """Also of a task that would be tried again: nobody wants to find out by what it has not done."""

    @tasklib.task
    def divide(a: int, b: int) -> float:
        return a / b

    divide.submit_sync(6, 3)
    divide.submit_sync(6, 0)
    with pytest.raises(TasksFailed, match=r"divide\(a=6, b=0\) failed, and would be tried again: ZeroDiv") as raised:
        tasklib_queue.run_until_empty()
    assert "return a / b" in str(raised.value)
    assert [task.kwargs for task in raised.value.tasks] == [{"a": 6, "b": 0}]


def test_failures_that_are_part_of_the_test_come_back(tasklib_queue: Queue) -> None:
    """With raise_errors=False, to be looked at."""

    @tasklib.task(max_retries=0)
    def fail() -> None:
        raise ValueError("as planned")

    fail.submit_sync()
    [task] = tasklib_queue.run_until_empty(raise_errors=False)
    assert tasklib.is_failed(task)
    assert task.error_code == "ValueError"


async def test_failures_are_raised_from_async_runs(tasklib_queue: Queue) -> None:
    """The same rule."""

    @tasklib.task
    async def fail() -> None:
        raise ValueError("as planned")

    await fail.submit()
    with pytest.raises(TasksFailed, match="as planned"):
        await tasklib_queue.run_until_empty_async()


def test_a_task_that_nobody_knows_is_an_error(tasklib_queue: Queue) -> None:
    """A worker would leave it waiting; in a test it is a module that was not imported."""
    tasklib.submit_task_sync("testing.elsewhere")
    with pytest.raises(tasklib.TaskNotRegistered, match=r"'testing.elsewhere'.*testing\.add"):
        tasklib_queue.run_until_empty()
    assert tasklib_queue.run_until_empty(raise_errors=False) == []


def test_only_the_queues_and_tasks_that_are_named_run(tasklib_queue: Queue) -> None:
    """Step by step; what is left waiting on purpose is no error."""
    ship.submit_sync(Address(town="York"), NOON)
    add.submit_sync(1)
    add.options(queue="sums").submit_sync(2)
    tasklib.submit_task_sync("testing.elsewhere")
    assert [task.kwargs for task in tasklib_queue.run_until_empty(queues=["sums"])] == [{"a": 2}]
    assert [task.name for task in tasklib_queue.run_until_empty(tasks=[ship])] == ["testing.ship"]


def test_tasks_that_wait_for_each_other_need_more_slots(tasklib_queue: Queue) -> None:
    """One at a time is the default, so that the order is always the same; `concurrency` gives more."""

    @tasklib.task
    def ask_another() -> int:
        return add.submit_handle_sync(40, 2).result_sync(timeout=20)

    ask_another.submit_sync()
    ran = tasklib_queue.run_until_empty(concurrency=2)
    assert [task.result for task in ran] == [{"value": 42}, {"value": 42}]


# --- look ---


def test_arguments_are_compared_by_value(tasklib_queue: Queue) -> None:
    """As they are stored and read: models, decimals, the same moment in another time zone, defaults left out or given,
    by position or by name.
    """
    ship.submit_sync(Address(town="York"), NOON, fragile=True)
    summer = NOON.astimezone(timezone(timedelta(hours=2)))
    [task] = tasklib_queue.assert_submitted(ship, to={"town": "York"}, at=summer, weight="1.50", fragile=True)
    assert tasklib_queue.submitted(ship, Address(town="York"), NOON, fragile=True) == [task]
    tasklib_queue.assert_not_submitted(ship, Address(town="Hull"), NOON, fragile=True)
    tasklib_queue.assert_not_submitted(ship, Address(town="York"), NOON)
    tasklib_queue.assert_not_submitted(ship, Address(town="York"), NOON, Decimal(2), fragile=True)


def test_arguments_that_no_submit_would_take_are_refused(tasklib_queue: Queue) -> None:
    """A typo in a test must not read as "was not submitted"."""
    with pytest.raises(tasklib.InvalidArguments, match="where"):
        tasklib_queue.assert_not_submitted(ship, where="York")
    with pytest.raises(tasklib.InvalidOptions, match="name the task"):
        tasklib_queue.submitted(to="York")
    with pytest.raises(tasklib.TaskNotRegistered, match="no task function"):
        tasklib_queue.submitted(print)  # type: ignore[arg-type]


def test_positional_only_and_variadic_arguments_are_compared(tasklib_queue: Queue) -> None:
    """They are stored apart from the others."""

    @tasklib.task
    def join(first: str, /, *others: str, sep: str = ",") -> str:
        return sep.join([first, *others])

    join.submit_sync("a", "b", "c")
    tasklib_queue.assert_submitted(join, "a", "b", "c", sep=",", count=1)
    tasklib_queue.assert_not_submitted(join, "a", "b")
    with pytest.raises(AssertionError, match=r"join\('a', 'b', 'c'\) queue"):
        tasklib_queue.assert_submitted(join, "x")


def test_without_arguments_any_will_do(tasklib_queue: Queue) -> None:
    """In the order of the submits."""
    ids = [add.submit_sync(number) for number in range(3)]
    ship.submit_sync(Address(town="York"), NOON)
    assert [task.id for task in tasklib_queue.submitted(add)] == ids
    assert len(tasklib_queue.submitted()) == 4
    assert len(tasklib_queue.submitted(queue="parcels")) == 1


def test_tasks_are_found_by_name(tasklib_queue: Queue) -> None:
    """Registered here or not."""
    tasklib.submit_task_sync("testing.elsewhere", 5, to="York")
    add.submit_sync(1)
    tasklib_queue.assert_submitted("testing.elsewhere", 5, to="York")
    tasklib_queue.assert_not_submitted("testing.elsewhere", to="York")
    tasklib_queue.assert_submitted("testing.add", 1, b=1)


def test_options_are_compared_where_they_are_given(tasklib_queue: Queue) -> None:
    """By the names that a submit has for them; tags are some of the task's; times are near."""
    soon = datetime.now(UTC) + timedelta(hours=1)
    options = tasklib.SubmitOptions(
        queue="mail", priority=7, scheduled_at=soon, expires_at=soon + timedelta(days=1), tags={"a": [1], "b": 2},
        max_retries=9, idempotency_key="key", timeout_seconds=4, on_crash="fail", store_result=False,
        deadline_seconds=60,
    )  # fmt: skip
    add.options(**options).submit_sync(1)
    near: Any = {**options, "scheduled_at": soon + timedelta(seconds=0.5), "tags": {"a": [1]}}
    tasklib_queue.assert_submitted(add, 1, **near)
    tasklib_queue.assert_submitted(add, delay_seconds=timedelta(hours=1))
    for other in (
        {"queue": "default"}, {"priority": 0}, {"scheduled_at": soon + timedelta(seconds=5)}, {"delay_seconds": 3590},
        {"expires_at": soon}, {"tags": {"a": [2]}}, {"tags": {"c": 1}}, {"max_retries": 3}, {"idempotency_key": "k"},
        {"timeout_seconds": 5}, {"on_crash": "retry"}, {"store_result": True}, {"deadline_seconds": 50},
        {"deadline_at": soon},
    ):  # fmt: skip
        tasklib_queue.assert_not_submitted(add, **other)


def test_the_error_lists_what_was_submitted_instead(tasklib_queue: Queue) -> None:
    """The call, and what was asked for besides it."""
    add.options(delay_seconds=60).submit_sync(1, 2)
    ship.submit_sync(Address(town="York"), NOON)
    with pytest.raises(AssertionError) as raised:
        tasklib_queue.assert_submitted(add, 1, 3, delay_seconds=90)
    assert str(raised.value).splitlines() == [
        "testing.add(a=1, b=3) with delay_seconds=90.0 was not submitted. These were:",
        "  testing.add(a=1, b=2) queue='default', delay_seconds=60.0 (pending)",
        "  testing.ship(at='2026-05-01T12:00:00Z', to={'town': 'York'}) queue='parcels', delay_seconds=0.0 (pending)",
    ]


def test_the_error_of_an_empty_queue_says_so(tasklib_queue: Queue) -> None:
    """A commit that was forgotten is the usual reason."""
    with pytest.raises(AssertionError, match=r"testing\.add was not submitted\. Nothing was submitted, or it is not"):
        tasklib_queue.assert_submitted(add)


def test_a_long_list_is_cut(tasklib_queue: Queue) -> None:
    """Thousands of lines would hide the first."""
    tasklib.submit_many_sync([add.new(number) for number in range(30)])
    with pytest.raises(AssertionError, match="and 10 more"):
        tasklib_queue.assert_submitted(ship)


def test_how_often_can_be_said(tasklib_queue: Queue) -> None:
    """Exactly; zero is a number too."""
    add.submit_sync(1)
    add.submit_sync(1)
    assert len(tasklib_queue.assert_submitted(add, 1, count=2)) == 2
    assert tasklib_queue.assert_submitted(ship, count=0) == []
    with pytest.raises(AssertionError, match=r"testing\.add\(a=1\) was submitted 2 times, not 1\. These"):
        tasklib_queue.assert_submitted(add, 1, count=1)
    with pytest.raises(AssertionError, match="was submitted 2 times, not 0"):
        tasklib_queue.assert_submitted(add, count=0)
    with pytest.raises(AssertionError, match=r"testing\.ship was not submitted"):
        tasklib_queue.assert_submitted(ship, count=1)


def test_a_parameter_called_count_is_an_argument(tasklib_queue: Queue) -> None:
    """Otherwise nobody could compare it."""

    @tasklib.task
    def pick(count: int) -> int:
        return count

    pick.submit_sync(3)
    tasklib_queue.assert_submitted(pick, count=3)
    with pytest.raises(AssertionError, match=r"pick\(count=1\) was not submitted"):
        tasklib_queue.assert_submitted(pick, count=1)


def test_something_that_should_not_have_been_submitted(tasklib_queue: Queue) -> None:
    """At all, or not so."""
    tasklib_queue.assert_not_submitted()
    add.submit_sync(1)
    tasklib_queue.assert_not_submitted(add, 2)
    with pytest.raises(AssertionError, match=r"a task was submitted\. These were:\n  testing\.add\(a=1\)"):
        tasklib_queue.assert_not_submitted()
    with pytest.raises(AssertionError, match=r"testing\.add\(a=1\) was submitted"):
        tasklib_queue.assert_not_submitted(add, 1)


def test_what_is_not_committed_is_seen_through_its_own_connection_only(tasklib_queue: Queue) -> None:
    """For tests that roll everything back; a rollback leaves nothing."""
    with psycopg.connect(tasklib_queue.config.database_url) as conn:
        add.options(connection=conn).submit_sync(1)
        tasklib_queue.assert_not_submitted(add)
        tasklib_queue.assert_submitted(add, 1, connection=conn)
        with pytest.raises(AssertionError, match=r"These were:\n  testing\.add\(a=1\)"):
            tasklib_queue.assert_submitted(add, 2, connection=conn)
        conn.rollback()
    tasklib_queue.assert_not_submitted()


def test_a_row_that_does_not_fit_the_function_is_another_one(tasklib_queue: Queue, row: Conn) -> None:
    """SQL may have written anything."""
    row.execute("""select tasklib.submit('testing.add', '{"a": "many"}')""")
    tasklib_queue.assert_not_submitted(add, 1)
    tasklib_queue.assert_submitted(add)


# --- time ---


def times(conn: Conn) -> dict[str, dict[str, datetime | None]]:
    rows = conn.execute(literal(f"select tags->>'as', {', '.join(TIMES)} from tasklib.tasks")).fetchall()
    return {name: dict(zip(TIMES, values, strict=True)) for name, *values in rows}


def test_a_delayed_task_runs_when_its_time_has_come_and_not_before(tasklib_queue: Queue) -> None:
    """In steps, and by a timedelta."""
    add.options(delay_seconds=3600).submit_sync(1)
    tasklib_queue.travel(seconds=3570)
    assert tasklib_queue.run_until_empty() == []
    tasklib_queue.travel(timedelta(seconds=30))
    assert [task.result for task in tasklib_queue.run_until_empty()] == [{"value": 2}]


def test_frozen_time_stands_still(tasklib_queue: Queue) -> None:
    """For what was there, and for what comes later, however long the test takes; `travel` moves it."""
    submitted = time.monotonic()
    before = add.options(delay_seconds=3).submit_sync(1)
    tasklib_queue.freeze()
    after = add.options(delay_seconds=200, expires_at=datetime.now(UTC) + timedelta(seconds=600)).submit_sync(2)
    wait_until(lambda: time.monotonic() > submitted + 3.5, "it would be due, if time went on")
    assert tasklib_queue.run_until_empty() == []
    tasklib_queue.travel(3)
    assert [task.id for task in tasklib_queue.run_until_empty()] == [before]
    tasklib_queue.travel(100)
    assert tasklib_queue.run_until_empty() == []
    tasklib_queue.travel(100)
    assert [task.id for task in tasklib_queue.run_until_empty()] == [after]


def test_what_was_initialised_before_is_again_afterwards(config: tasklib.Config, client: tasklib.Client) -> None:
    """An application, Django's for example, that called `init` long before the test."""
    tasklib.init(config)
    queue = Queue(config)
    try:
        with queue:
            add.submit_sync(1)
            assert len(queue.submitted()) == 1
        assert client.get_task(add.submit_sync(2)) is not None
    finally:
        queue.close()
        tasklib.close()


@pytest.fixture
def clock_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers believe that the database's answers took a second, and are ahead of its clock by that."""
    really = DatabaseClock.set
    monkeypatch.setattr(DatabaseClock, "set", lambda clock, said, asked_at: really(clock, said, asked_at - 1.0))


@pytest.mark.usefixtures("clock_ahead")
def test_a_retry_comes_without_waiting(tasklib_queue: Queue) -> None:
    """As often as the policy says; also if the worker's clock is ahead of the database's."""
    attempts: list[int] = []

    @tasklib.task(max_retries=2, backoff=tasklib.Fixed(300))
    def unlucky() -> None:
        attempts.append(len(attempts) + 1)
        raise ConnectionError("down")

    unlucky.submit_sync()
    for expected in ([1], [1, 2], [1, 2, 3], [1, 2, 3]):
        tasklib_queue.run_until_empty(raise_errors=False)
        assert attempts == expected
        tasklib_queue.run_until_empty(raise_errors=False)
        assert attempts == expected
        tasklib_queue.travel(300)
    [task] = tasklib_queue.submitted(unlucky)
    assert tasklib.is_failed(task)


def test_a_snoozed_task_wakes(tasklib_queue: Queue) -> None:
    """Snooze is no failure, and its time passes like any other."""
    attempts: list[int] = []

    @tasklib.task
    def sleepy() -> str:
        attempts.append(1)
        if len(attempts) == 1:
            raise tasklib.Snooze(86400)
        return "awake"

    sleepy.submit_sync()
    [task] = tasklib_queue.run_until_empty()
    assert tasklib.is_pending(task)
    tasklib_queue.travel(86400)
    [task] = tasklib_queue.run_until_empty()
    assert task.result == {"value": "awake"}


def test_what_expires_on_the_way_does_not_run(tasklib_queue: Queue) -> None:
    """Nobody was working then. A smaller step would have run it."""
    hour = datetime.now(UTC) + timedelta(hours=1)
    late = add.options(expires_at=hour).submit_sync(1)
    both = add.options(delay_seconds=1800, expires_at=hour).submit_sync(2)
    tasklib_queue.travel(3600)
    assert tasklib_queue.run_until_empty() == []
    assert tasklib.is_expired(tasklib.get_task(late))
    assert tasklib.is_expired(tasklib.get_task(both))


def test_expiry_does_not_depend_on_a_workers_round(tasklib_queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of a short run may be gone before its expirer has come round."""
    monkeypatch.setattr(Expirer, "run_once", lambda _: 1.0)
    add.options(expires_at=datetime.now(UTC) + timedelta(hours=1)).submit_sync(1)
    tasklib_queue.travel(3600)
    tasklib_queue.run_until_empty()
    assert [task.state for task in tasklib_queue.submitted()] == [tasklib.State.EXPIRED]


def test_a_step_before_the_expiry_lets_it_run(tasklib_queue: Queue) -> None:
    """Its expiry moves with its start."""
    add.options(delay_seconds=1800, expires_at=datetime.now(UTC) + timedelta(hours=1)).submit_sync(2)
    tasklib_queue.travel(1800)
    assert [task.result for task in tasklib_queue.run_until_empty()] == [{"value": 3}]


def test_all_times_of_what_waits_move_together_and_nothing_else(tasklib_queue: Queue, row: Conn) -> None:
    """So that order and distances stay. What is final keeps its history; what is ready stays ready."""

    @tasklib.task
    def fail() -> None:
        raise ValueError("as planned")

    def named(name: str, **options: Any) -> Any:
        return {"tags": {"as": name}, **options}

    tomorrow = datetime.now(UTC) + timedelta(days=1)
    add.options(**named("done")).submit_sync(1)
    fail.options(**named("retrying", expires_at=tomorrow)).submit_sync()
    tasklib_queue.run_until_empty(raise_errors=False)
    add.options(**named("ready")).submit_sync(1)
    add.options(**named("ready, expires", expires_at=tomorrow)).submit_sync(1)
    add.options(**named("delayed", delay_seconds=7200)).submit_sync(1)
    add.options(**named("delayed, expires", delay_seconds=7200, expires_at=tomorrow)).submit_sync(1)
    before = times(row)
    is_ready = "select tags->>'as', ready from tasklib.tasks order by 1"
    readiness = row.execute(is_ready).fetchall()

    tasklib_queue.travel(3600.5)

    for name, was in before.items():
        moved = timedelta(0) if name == "done" else timedelta(seconds=3600.5)
        assert times(row)[name] == {key: value and value - moved for key, value in was.items()}
    assert row.execute(is_ready).fetchall() == readiness
    assert violations(row, AT_ANY_TIME) == []
    tasklib_queue.assert_submitted(add, delay_seconds=7200, count=2)


def test_time_goes_forward_only(tasklib_queue: Queue) -> None:
    """What has become due cannot be taken back from it."""
    for wrong in (-1, timedelta(seconds=-1), float("nan"), float("inf")):
        with pytest.raises(tasklib.InvalidOptions, match="forward"):
            tasklib_queue.travel(wrong)


# --- inline, with a database ---


async def test_the_connection_of_an_inline_task_commits_with_it(tasklib_queue: Queue, row: Conn) -> None:
    """And is rolled back with it, as in a worker; it cannot be committed by hand."""
    row.execute("create table if not exists inline_notes (note text)")
    row.execute("delete from inline_notes")

    @tasklib.task
    def write(note: str) -> None:
        conn = tasklib.current_task().connection
        conn.execute("insert into inline_notes values (%s)", [note])
        assert tasklib.current_task().connection is conn
        if note == "bad":
            raise ValueError(note)
        if note == "hasty":
            conn.commit()

    @tasklib.task
    async def write_async(note: str) -> None:
        conn = await tasklib.current_task().async_connection()
        await conn.execute("insert into inline_notes values (%s)", [note])
        assert await tasklib.current_task().async_connection() is conn
        if note == "bad":
            raise ValueError(note)
        if note == "hasty":
            await conn.commit()

    run_inline(write, "good")
    await run_inline(write_async, "good")
    with pytest.raises(ValueError, match="bad"):
        run_inline(write, "bad")
    with pytest.raises(ValueError, match="bad"):
        await run_inline(write_async, "bad")
    with pytest.raises(psycopg.ProgrammingError):
        run_inline(write, "hasty")
    with pytest.raises(psycopg.ProgrammingError):
        await run_inline(write_async, "hasty")
    assert row.execute("select note from inline_notes").fetchall() == [("good",), ("good",)]


# --- the fixtures and the Queue itself ---


def test_every_table_is_emptied(tasklib_queue: Queue, row: Conn) -> None:
    """But the record of migrations. Who adds a table has to think of it here."""
    add.submit_sync(1)
    tasklib_queue.run_until_empty()
    tables = [name for (name,) in row.execute("select tablename from pg_tables where schemaname = 'tasklib'")]
    known = [
        "attempts", "breakers", "claims", "elections", "permits", "policy", "queues", "rates", "schema_migrations",
        "task_functions", "task_rollups", "task_transitions", "tasks", "worker_states", "workers",
    ]  # fmt: skip
    assert sorted(tables) == known
    row.execute("insert into tasklib.tasks (name, state, worker_id, locked_until) values ('a', 'running', 'w', now())")
    row.execute(
        "insert into tasklib.workers (worker_id, name, hostname, pid, process_name, task_names, concurrency,"
        " lease_until) values ('w', 'w', 'h', 1, 'p', '{}', 1, now())"
    )
    row.execute("insert into tasklib.attempts select * from tasklib.folded_attempts")
    row.execute(
        "insert into tasklib.task_rollups (minute, name, queue) values (now(), 'a', 'b') on conflict do nothing"
    )
    row.execute("insert into tasklib.elections (name, holder, term, until) values ('duties', 'w', 1, now())")
    row.execute(
        "insert into tasklib.worker_states (worker_id, hostname, pid, processes, tasks_running, tasks_claimed,"
        " recovery_config) values ('w', 'h', 1, 1, 0, 0, '{}')"
    )
    row.execute("insert into tasklib.breakers (queue) values ('q'); insert into tasklib.rates (queue) values ('q')")
    row.execute("insert into tasklib.permits (queue, worker_id, permits, wanted) values ('q', 'w', 1, 1)")
    row.execute("select tasklib.pause_queue('q')")

    def filled() -> set[str]:
        counted = [(name, row.execute(literal(f"select count(*) from tasklib.{name}")).fetchone()) for name in tables]
        return {name for name, count in counted if count and count[0]}

    assert filled() == set(tables)
    tasklib_queue.empty()
    assert filled() == {"policy", "schema_migrations"}
    row.execute("select tasklib.set_cluster('{\"cluster_wide_cap\": 1}')")
    tasklib_queue.empty()
    assert row.execute("select cluster_wide_cap, features from tasklib.policy").fetchone() == (None, [])


def test_a_block_is_one_test(tasklib_database: tasklib.Config) -> None:
    """Empty at its start, closed at its end; functions that were defined inside it are forgotten, those of modules are
    not. Also when the test closes or initialises tasklib itself.
    """
    queue = Queue(tasklib_database)
    for _ in range(2):
        with queue:
            queue.assert_not_submitted()

            @tasklib.task(name="testing.local")
            def local() -> None: ...

            local.submit_sync()
            assert "testing.local" in default_registry
            tasklib.close()
            tasklib.init(tasklib_database)
            add.submit_sync(1)
            assert len(queue.submitted()) == 2
        assert "testing.local" not in default_registry
        assert "testing.add" in default_registry
        with pytest.raises(tasklib.NotInitialised):
            add.submit_sync(1)
    queue.close()


def test_a_module_that_is_imported_in_a_test_stays_registered(
    tasklib_database: tasklib.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next import would do nothing: the tasks would be unknown from the second test on."""
    (tmp_path / "imported_in_a_test.py").write_text("import tasklib\n@tasklib.task\ndef of_a_module(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    queue = Queue(tasklib_database)
    with queue:
        importlib.import_module("imported_in_a_test")
    with queue:
        tasklib.submit_task_sync("of_a_module")
        assert len(queue.run_until_empty()) == 1
    queue.close()


def test_connections_last_from_test_to_test(tasklib_database: tasklib.Config, row: Conn) -> None:
    """To connect for each test would take longer than most tests; `close` ends them."""
    name = "testing_of_connections"
    queue = Queue(tasklib.Config(f"{tasklib_database.database_url}&application_name={name}"))
    own = f"select pid from pg_stat_activity where application_name = '{name}'"
    found = set()
    for _ in range(3):
        with queue:
            add.submit_sync(1)
            found.add(tuple(row.execute(literal(own)).fetchall()))
    assert len(found) == 1
    queue.close()
    assert row.execute(literal(f"{own} and state <> 'idle'")).fetchall() == []


PROJECT_TEST = """
    import sys

    import pytest
    import tasklib


    @tasklib.task
    def add(a: int, b: int = 1) -> int:
        return a + b


    @pytest.mark.parametrize("number", range(4))
    def test_sync(tasklib_queue, number, worker_id):
        assert tasklib_queue.submitted() == []
        add.submit_sync(number)
        tasklib_queue.assert_submitted(add, number, b=1, count=1)
        assert [task.result for task in tasklib_queue.run_until_empty()] == [{"value": number + 1}]
        print("DATABASE", worker_id, tasklib_queue.config.database_url.partition("tasklib_test_")[2][:32])


    @pytest.mark.anyio
    async def test_anyio(tasklib_queue, anyio_backend_name):
        assert anyio_backend_name == "asyncio"
        assert tasklib_queue.submitted() == []
        await add.submit(1)
        assert len(await tasklib_queue.run_until_empty_async()) == 1


    @pytest.mark.asyncio
    async def test_asyncio(tasklib_queue):
        assert tasklib_queue.submitted() == []
        await add.submit(1)
        assert len(await tasklib_queue.run_until_empty_async()) == 1


    def test_database_alone(tasklib_database):
        with tasklib.Client(tasklib_database) as client:
            assert client.list_tasks() == []
        with pytest.raises(tasklib.NotInitialised):
            tasklib.list_tasks()


    @pytest.fixture
    def anyio_backend():
        return "asyncio"


    @pytest.fixture
    def worker_id(request):
        return getattr(request.config, "workerinput", {}).get("workerid", "master")
"""


def pytest_in(directory: Path, server: EmbeddedPostgres, *options: str) -> subprocess.CompletedProcess[str]:
    """Another project's run, warnings as errors, in random order."""
    settings = ["-W", "error", "-o", "asyncio_default_fixture_loop_scope=function", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-rP", *settings, "-c", os.devnull, "--rootdir", str(directory)]
    environment = os.environ | {"TASKLIB_TEST_DSN": server.dsn}
    return subprocess.run(
        [*command, *options, str(directory)], cwd=directory, env=environment, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("-p", "tasklib.pytest_plugin", "-p", "tasklib_pytest"), id="by both of its names"),
        pytest.param(("-p", "tasklib_pytest", "-n", "2"), id="in two processes"),
    ],
)
def test_the_plugin_serves_a_project(
    options: tuple[str, ...], tmp_path: Path, tasklib_postgres: EmbeddedPostgres
) -> None:
    """Sync, anyio and asyncio tests, beside pytest-randomly; with pytest-xdist each process has a database. None of
    them is left.
    """
    (tmp_path / "test_it.py").write_text(textwrap.dedent(PROJECT_TEST))
    run = pytest_in(tmp_path, tasklib_postgres, *options)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "7 passed" in run.stdout
    said = {tuple(line.split()[1:]) for line in run.stdout.splitlines() if line.startswith("DATABASE")}
    processes, databases = zip(*said, strict=True)
    assert len(set(databases)) == len(set(processes)) == len(said)
    with psycopg.connect(tasklib_postgres.dsn) as conn:
        left = {name for (name,) in conn.execute("select datname from pg_database")}
    assert not {f"tasklib_test_{database}" for database in databases} & left


def test_its_former_name_brings_it_in(tmp_path: Path) -> None:
    """`pytest_plugins = ["tasklib.pytest_plugin"]`, also where pytest looks for no plugins by itself."""
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['tasklib.pytest_plugin']\n")
    options = ["--fixtures", "-c", os.devnull, "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    assert "tasklib_queue -- " in run.stdout


def test_a_project_brings_its_own_database(
    tmp_path: Path, tasklib_postgres: EmbeddedPostgres, config: tasklib.Config
) -> None:
    """By overriding `tasklib_config`."""
    (tmp_path / "conftest.py").write_text(
        "import os, pytest, tasklib\n"
        "@pytest.fixture(scope='session')\n"
        "def tasklib_config():\n"
        f"    return tasklib.Config({config.database_url!r}, max_retries=7)\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import tasklib\n"
        "def test_it(tasklib_queue):\n"
        "    tasklib.submit_task_sync('a')\n"
        f"    assert tasklib_queue.config.database_url == {config.database_url!r}\n"
        "    assert tasklib_queue.assert_submitted('a')[0].max_retries == 7\n"
    )
    run = pytest_in(tmp_path, tasklib_postgres, "-p", "tasklib_pytest")
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_plugin_imports_nothing_before_it_is_used(tmp_path: Path, tasklib_postgres: EmbeddedPostgres) -> None:
    """It is loaded by every pytest run in the environment."""
    heavy = {"tasklib", "psycopg", "psycopg_pool", "pydantic", "pydantic_core", "structlog"}
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_it(request):\n"
        "    assert request.config.pluginmanager.has_plugin('tasklib_pytest')\n"
        f"    assert not {heavy!r} & set(sys.modules)\n"
    )
    run = pytest_in(tmp_path, tasklib_postgres, "-p", "tasklib_pytest")
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_plugin_is_found_by_itself(tmp_path: Path, tasklib_postgres: EmbeddedPostgres) -> None:
    """An entry point of the installed package; `-p no:tasklib_pytest` turns it off."""
    (tmp_path / "test_it.py").write_text("def test_it(tasklib_queue): ...\n")
    run = pytest_in(tmp_path, tasklib_postgres)
    assert run.returncode == 0, run.stdout + run.stderr
    run = pytest_in(tmp_path, tasklib_postgres, "-p", "no:tasklib_pytest")
    assert "fixture 'tasklib_queue' not found" in run.stdout


# --- with a clock that a test has patched ---


@tasklib.task(name="testing.when")
def when() -> datetime:
    return datetime.now(UTC)


@tasklib.task(name="testing.rest")
async def rest(seconds: float) -> datetime:
    await asyncio.sleep(seconds)
    return datetime.now(UTC)


@pytest.mark.parametrize("tick", [False, True])
def test_a_frozen_clock_stops_no_worker(tasklib_queue: Queue, tick: bool) -> None:
    """The application sees the frozen time; workers, their event loop and who waits go by the real one."""
    default_registry.add(when)
    default_registry.add(rest)
    with freeze_time(NOON, tick=tick):
        handles = [when.submit_handle_sync(), rest.submit_handle_sync(0.01)]
        ended_within(tasklib_queue.run_until_empty)
        results = [handle.result_sync(timeout=20) for handle in handles]
        waiting = add.options(delay_seconds=60).submit_handle_sync(1)
        error = ended_within(lambda: waiting.result_sync(timeout=0.01))
    assert all(NOON <= result < NOON + timedelta(minutes=1) for result in results)
    assert isinstance(error, tasklib.ResultTimeout)
    assert [task.created_at > NOON for task in tasklib_queue.submitted()] == [True] * 3


async def test_a_frozen_clock_in_an_async_test(tasklib_queue: Queue) -> None:
    """The test's own event loop keeps its time by `real_asyncio=True`."""
    default_registry.add(rest)
    with freeze_time(NOON, real_asyncio=True):
        handle = await rest.submit_handle(0.01)
        await asyncio.wait_for(tasklib_queue.run_until_empty_async(), 20)
        assert await handle.result(timeout=20) == NOON
        waiting = await add.options(delay_seconds=60).submit_handle(1)
        with pytest.raises(tasklib.ResultTimeout):
            await waiting.result(timeout=0.01)


def ended_within(call: Callable[[], object], seconds: float = 20.0) -> object:
    """What the call returned or raised. A call that hangs fails the test, and not the whole run."""
    ended: Future[object] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is the answer
            ended.set_result(error)

    threading.Thread(target=run, daemon=True).start()
    return ended.result(seconds)
