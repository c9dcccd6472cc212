"""Hooks of the application: run once per worker process, to open a pool or load a model and to close them again; and
around each task.

Sync hooks run before the first task, in the thread that starts the worker; async ones on the tasks' own event loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tasklib.clock import time
from tasklib.log import log
from tasklib.worker.forks import call_in_one_process

if TYPE_CHECKING:
    RunAsync: TypeAlias = Callable[[Callable[[], Coroutine[Any, Any, Any]], Callable[[], bool]], None]


Hook = TypeVar("Hook", bound=Callable[[], Any])
Around = TypeVar("Around", bound="Callable[[], AbstractContextManager[Any]]")

_on_start: list[Callable[[], Any]] = []
_on_stop: list[Callable[[], Any]] = []
_around: list[Callable[[], Any]] = []


def on_worker_start(hook: Hook) -> Hook:
    """Called once before a worker takes its first task. An error keeps the worker from starting."""
    _on_start.append(hook)
    return hook


def on_worker_stop(hook: Hook) -> Hook:
    """Called when a worker has finished its last task, in the reverse order of definition."""
    _on_stop.append(hook)
    return hook


def around_task(hook: Around) -> Around:
    """The hook returns a context manager. Each sync task function is called inside it, in its own thread. Async task
    functions are called inside those that support `async with`, and no others. If one raises, the task fails.
    """
    _around.append(hook)
    return hook


def all_hooks() -> list[Callable[[], Any]]:
    return [*_on_start, *_on_stop, *_around]


def has_around_hooks() -> bool:
    return bool(_around)  # most workers have none


def call_inside_hooks(call: Callable[[], Any]) -> Any:
    if not _around:
        return call()
    with ExitStack() as stack:
        for hook in _around:
            stack.enter_context(hook())
        return call()


async def await_inside_hooks(call: Callable[[], Awaitable[Any]]) -> Any:
    async with AsyncExitStack() as stack:
        for made in [hook() for hook in _around]:
            if hasattr(made, "__aenter__"):
                await stack.enter_async_context(made)
        return await call()


def run_start_hooks(run_async: RunAsync, gives_up: Callable[[], bool]) -> None:
    for hook in _on_start:
        _run(hook, run_async, gives_up)


def run_stop_hooks(run_async: RunAsync, seconds: float) -> None:
    """Every hook has this much time. An error in one does not stop the rest."""
    for hook in reversed(_on_stop):
        try:
            _run(hook, run_async, _after(seconds))
        except Exception:  # noqa: BLE001 - the hook is the user's
            log.exception("hook.failed", hook=getattr(hook, "__qualname__", repr(hook)))


def _after(seconds: float) -> Callable[[], bool]:
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() > deadline


def _run(hook: Callable[[], Any], run_async: RunAsync, gives_up: Callable[[], bool]) -> None:
    if inspect.iscoroutinefunction(hook):
        run_async(hook, gives_up)
    else:
        call_in_one_process(hook)
