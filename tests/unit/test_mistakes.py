"""Mistakes that newcomers make, most of them with the words of another queue, get an answer that says what to do."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

import tasklib
from tasklib import blocking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NOWHERE = tasklib.Config("postgresql://nowhere.invalid")


@pytest.fixture
def add() -> Any:
    @tasklib.task
    def add(a: int, b: int) -> int:
        return a + b

    return add


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Python's own warning is not what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


# --- a submit that nobody awaits ---

SUBMITS: dict[str, Callable[[Any], Any]] = {
    "submit_sync": lambda add: add.submit(1, 2),
    "submit_handle_sync": lambda add: add.options(priority=1).submit_handle(1, 2),
    "submit_task_sync": lambda add: tasklib.submit_task(add, 1, 2),
    "submit_many_sync": lambda add: tasklib.submit_many([add.new(1, 2)]),
    "Client.submit": lambda add: tasklib.AsyncClient(NOWHERE).submit(add.new(1, 2)),
}


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("hint", SUBMITS)
def test_a_submit_that_is_not_awaited_is_an_error(hint: str, add: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was submitted, and nothing else would say so: with the task, the place, and what to write instead."""
    SUBMITS[hint](add)
    (record,) = caplog.records
    told = record.tasklib  # type: ignore[attr-defined]
    assert (record.levelname, told["event"], told["file"]) == ("ERROR", "submit.not_awaited", __file__)
    assert inspect.getsourcelines(SUBMITS[hint])[1] == told["line"]
    assert told["task"] == ("add" if hint != "submit_many_sync" else None)
    assert f"`{hint}(...)`" in told["hint"]


def test_what_is_cancelled_or_closed_before_it_begins_is_no_mistake(add: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The program has done that on purpose."""

    async def main() -> None:
        task = asyncio.ensure_future(add.submit(1, 2))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(add.submit(1, 2), 0)

    asyncio.run(main())
    add.submit(1, 2).close()
    assert not caplog.records


def test_a_submit_is_a_coroutine_still(add: Any) -> None:
    """For `asyncio.run`, for whoever asks `inspect`, for Starlette's background tasks and for mocks."""
    assert asyncio.iscoroutinefunction(add.submit)
    coroutine = add.submit(1, 2)
    assert inspect.iscoroutine(coroutine)
    with pytest.raises(tasklib.NotInitialised):
        asyncio.run(coroutine)
    with mock.patch.object(tasklib.TaskFunction, "submit") as submit:
        assert isinstance(submit, mock.AsyncMock)


# --- sync calls on an event loop ---


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """A function in a file that is no test, which calls what a sync submit calls."""
    file = tmp_path / "views.py"
    file.write_text("def view():\n    check()\n")
    names: dict[str, Any] = {"check": blocking.warn_if_on_loop}
    exec(compile(file.read_text(), file, "exec"), names)
    blocking._warned.clear()
    yield names["view"]
    blocking._warned.clear()


async def test_a_sync_call_on_the_event_loop_is_told_of_once(
    elsewhere: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """With its place: all that the loop serves waits meanwhile."""
    for _ in range(3):
        elsewhere()
    (record,) = caplog.records
    told = record.tasklib  # type: ignore[attr-defined]
    assert (record.levelname, told["event"], told["line"]) == ("WARNING", "loop.blocked", 2)
    assert told["file"].endswith("views.py")


async def test_a_sync_call_that_blocks_no_loop_is_not_told_of(
    elsewhere: Callable[[], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread, in a callback beside the tasks (greenlets look like that), in a notebook, and in a test itself."""
    await asyncio.to_thread(elsewhere)
    asyncio.get_running_loop().call_soon(elsewhere)
    await asyncio.sleep(0)
    blocking.warn_if_on_loop()
    monkeypatch.setitem(sys.modules, "ipykernel", mock.Mock())
    elsewhere()
    assert not caplog.records


# --- words of other queues ---


@pytest.mark.parametrize(
    ("mistake", "error", "remedy"),
    [
        (lambda add: add.delay(1, 2), AttributeError, r"use submit_sync\(\.\.\.\)"),
        (lambda add: add.apply_async((1, 2)), AttributeError, r"use options\(delay_seconds=.*submit_sync"),
        (lambda add: add.nonsense, AttributeError, r"'add' has no attribute 'nonsense'$"),
        (lambda add: tasklib.task(bind=True)(add.function), tasklib.InvalidTaskDefinition, "current_task"),  # type: ignore[call-overload]
        (lambda add: add.options(countdown=5), tasklib.InvalidOptions, "Instead of countdown, use delay_seconds"),
        (lambda add: add.new(1, 2, countdown=5), tasklib.InvalidArguments, r"options\(delay_seconds=\.\.\.\)"),
        (lambda add: add.new(1, 2, priority=5), tasklib.InvalidArguments, r"options\(priority=\.\.\.\)"),
        (lambda _: tasklib.task(lambda: 1), tasklib.InvalidTaskDefinition, "`def` at the top level of a module"),
        (lambda _: tasklib.task(functools.partial(int, "1")), tasklib.InvalidTaskDefinition, "a partial has no name"),
        (pickle.dumps, pickle.PicklingError, "top level of a module"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_mistake_names_what_to_do(add: Any, mistake: Callable[[Any], Any], error: Any, remedy: str) -> None:
    """Celery's words, options among the arguments, and functions that no worker can find."""
    with pytest.raises(error, match=remedy):
        mistake(add)
    assert not hasattr(add, "delay")


def test_a_module_that_is_run_and_imported_is_named(tmp_path: Path) -> None:
    """Its functions are there twice, under one name; that neither is to be renamed is not obvious."""
    (tmp_path / "shop.py").write_text("import tasklib\n@tasklib.task\ndef pay() -> None: ...\nimport other\n")
    (tmp_path / "other.py").write_text("import shop\n")
    ran = subprocess.run([sys.executable, "shop.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    last = ran.stderr.strip().splitlines()[-1]
    assert "shop.py is run as the main program and imported as 'shop' too. Put the tasks into a module" in last
