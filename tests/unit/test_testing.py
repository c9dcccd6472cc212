"""`tasklib.testing.run_inline`: a task function runs here and now, as a worker would run it."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel

import tasklib
from tasklib.testing import TasksFailed, run_inline

seen: ContextVar[str] = ContextVar("seen", default="nothing")


class Address(BaseModel):
    town: str


@dataclass
class Receipt:
    total: Decimal
    at: datetime


@tasklib.task(name="inline.describe", queue="words", timeout_seconds=30)
def describe(*values: Any, **named: Any) -> list[Any]:
    return [*values, named]


def test_arguments_arrive_as_a_worker_gives_them() -> None:
    """Validated, through JSON, and built again: not the caller's own objects."""
    given = Address(town="York")
    received: list[object] = []

    @tasklib.task
    def take(number: int, address: Address, sizes: tuple[int, ...] = (1, 2)) -> None:
        received.extend([number, address, sizes])

    run_inline(take, "5", given)  # type: ignore[call-overload]
    assert received == [5, given, (1, 2)]
    assert received[1] is not given


def test_arguments_that_a_submit_refuses_are_refused() -> None:
    """By the same error, before anything runs."""

    @tasklib.task
    def take(number: int) -> None:
        raise AssertionError(number)

    with pytest.raises(tasklib.InvalidArguments, match="number"):
        run_inline(take, "many")  # type: ignore[call-overload]
    with pytest.raises(tasklib.InvalidArguments, match="to_whom"):
        run_inline(describe, to_whom=object())


def test_the_result_comes_back_as_a_handle_gives_it() -> None:
    """Through JSON, as the type that the function says it returns; as JSON where it says none."""
    at = datetime(2026, 5, 1, 12, tzinfo=timezone(timedelta(hours=2)))

    @tasklib.task
    def pay() -> Receipt:
        return Receipt(Decimal("12.90"), at)

    @tasklib.task
    def pay_untyped():  # type: ignore[no-untyped-def]  # noqa: ANN202 - says nothing
        return Receipt(Decimal("12.90"), at)

    assert run_inline(pay) == Receipt(Decimal("12.90"), at)
    assert run_inline(pay_untyped) == {"total": "12.90", "at": "2026-05-01T12:00:00+02:00"}


def test_a_result_that_cannot_be_stored_is_an_error() -> None:
    """What production would find out when somebody asks for the result."""

    @tasklib.task
    def make() -> Receipt:
        return object()  # type: ignore[return-value]

    with pytest.raises(tasklib.InvalidResult):
        run_inline(make)


def test_what_is_not_stored_does_not_come_back() -> None:
    """`store_result=False` means that nobody can ask for it."""

    @tasklib.task(store_result=False)
    def make() -> int:
        return 5

    assert run_inline(make) is None


async def test_async_functions_are_awaited() -> None:
    """One name for both kinds: `run_inline` is called as the function itself is."""

    @tasklib.task
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    assert await run_inline(double, 21) == 42


@pytest.mark.parametrize(
    "signal",
    [tasklib.Retry(delay_seconds=5), tasklib.Snooze(60), tasklib.Cancel("gone"), tasklib.Fail("no"), KeyError("x")],
    ids=lambda signal: type(signal).__name__,
)
async def test_what_the_function_raises_comes_out(signal: Exception) -> None:
    """The very exception, with its delay and reason."""

    @tasklib.task
    def give_up() -> None:
        raise signal

    @tasklib.task
    async def give_up_async() -> None:
        raise signal

    with pytest.raises(type(signal)) as raised:
        run_inline(give_up)
    assert raised.value is signal
    with pytest.raises(type(signal)) as raised:
        await run_inline(give_up_async)
    assert raised.value is signal


async def test_current_task_is_there_inside_and_gone_afterwards() -> None:
    """A first attempt, with the function's own queue and timeout; nobody asks it to stop, and progress goes nowhere."""
    found: list[tasklib.CurrentTask] = []

    @tasklib.task(name="mail.send", queue="mail", timeout_seconds=30)
    def look() -> None:
        found.append(tasklib.current_task())
        found[-1].progress(1, 2, "half")

    @tasklib.task(name="mail.send_async", queue="mail", timeout_seconds=30)
    async def look_async() -> None:
        found.append(tasklib.current_task())
        await asyncio.sleep(0)
        assert tasklib.current_task() == found[-1]

    run_inline(look)
    await run_inline(look_async)
    for task, name in zip(found, ("mail.send", "mail.send_async"), strict=True):
        assert (task.name, task.queue, task.attempt, task.parent_id, task.tags) == (name, "mail", 1, None, {})
        assert task.remaining_seconds is not None
        assert 0 < task.remaining_seconds <= 30
        assert not task.should_stop
        assert not task.cancel_asked
    with pytest.raises(tasklib.NoCurrentTask):
        tasklib.current_task()


async def test_what_it_submits_would_carry_its_parent() -> None:
    """As in a worker."""
    parents: list[object] = []

    @tasklib.task
    def parent() -> None:
        parents.extend([tasklib.current_task().id, describe.new(1).parent_id])

    run_inline(parent)
    assert parents[0] == parents[1] is not None


async def test_its_context_is_a_copy() -> None:
    """It sees the test's context variables; what it sets goes with it."""

    @tasklib.task
    def change() -> str:
        before = seen.get()
        seen.set("sync")
        return before

    @tasklib.task
    async def change_async() -> str:
        before = seen.get()
        seen.set("async")
        return before

    token = seen.set("the test's")
    try:
        assert run_inline(change) == "the test's"
        assert await run_inline(change_async) == "the test's"
        assert seen.get() == "the test's"
    finally:
        seen.reset(token)


def test_a_coroutine_that_nobody_awaits_fails() -> None:
    """A sync function that returns one, as a decorator over an async def may make it: a worker runs nothing of it."""

    async def work() -> None: ...

    @tasklib.task
    def wrapped() -> Any:
        return work()

    with pytest.raises(tasklib.Fail, match="coroutine"):
        run_inline(wrapped)


async def test_connections_are_those_of_the_functions_kind() -> None:
    """The same refusals as in a worker, and a clear one where no database is known."""

    @tasklib.task
    def wants_async() -> None:
        coroutine = tasklib.current_task().async_connection()
        with pytest.raises(tasklib.InvalidOptions, match="for async tasks"):
            coroutine.send(None)

    @tasklib.task
    async def wants_sync() -> None:
        tasklib.current_task().connection.execute("select 1")

    @tasklib.task
    def wants_any() -> None:
        tasklib.current_task().connection.execute("select 1")

    run_inline(wants_async)
    with pytest.raises(tasklib.InvalidOptions, match="async_connection"):
        await run_inline(wants_sync)
    with pytest.raises(tasklib.NotInitialised):
        run_inline(wants_any)


def test_only_task_functions_run_inline() -> None:
    """A function without @task has no argument validation."""
    with pytest.raises(tasklib.TaskNotRegistered, match="no task function"):
        run_inline(datetime.now, UTC)  # type: ignore[call-overload]


def test_failures_are_assertions() -> None:
    """Test frameworks tell a failed assertion from an error in the test."""
    assert issubclass(TasksFailed, AssertionError)
