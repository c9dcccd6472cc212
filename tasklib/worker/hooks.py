"""What an application does once per worker process: open a pool, load a model, and close them again.

Sync hooks run before the first task, in the thread that starts the worker; async ones on the tasks' own event loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tasklib.log import log

if TYPE_CHECKING:
    from tasklib.worker.runners import CoroutineRunner

Hook = TypeVar("Hook", bound=Callable[[], Any])

_on_start: list[Callable[[], Any]] = []
_on_stop: list[Callable[[], Any]] = []


def on_worker_start(hook: Hook) -> Hook:
    """Called once in each worker process before it takes its first task. An error keeps the worker from starting."""
    _on_start.append(hook)
    return hook


def on_worker_stop(hook: Hook) -> Hook:
    """Called when a worker has finished its last task, in the reverse order of definition."""
    _on_stop.append(hook)
    return hook


def run_start_hooks(loop: CoroutineRunner) -> None:
    for hook in _on_start:
        _run(hook, loop)


def run_stop_hooks(loop: CoroutineRunner) -> None:
    """All of them, whatever one raises."""
    for hook in reversed(_on_stop):
        try:
            _run(hook, loop)
        except Exception:  # noqa: BLE001 - the hook is the user's
            log.exception("hook.failed", hook=getattr(hook, "__qualname__", repr(hook)))


def _run(hook: Callable[[], Any], loop: CoroutineRunner) -> None:
    if inspect.iscoroutinefunction(hook):
        loop.run(hook)
    else:
        hook()
