"""Logs an error for a submit that was not awaited: it submitted nothing. Python's own warning does not name the task.

The call still returns a real coroutine, which `asyncio.run`, task groups and `gather` accept. Its frame refers to a
`_Call`, which is destroyed with the coroutine, and knows whether the coroutine was ever started.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import weakref
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tasklib.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from types import CodeType

P = ParamSpec("P")
T = TypeVar("T")


def log_if_unawaited(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorates an async function that submits. Its sync form ends in `_sync`, or is a method of Client."""
    name, verb = function.__qualname__, function.__name__
    sync = f"Client.{verb}" if name.startswith("AsyncClient.") else f"{verb}_sync"
    hint = f"write `await ...{verb}(...)`, or `{sync}(...)` in code that is not async"

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        caller = sys._getframe(1)  # noqa: SLF001 - the place of the mistake; `inspect` takes a hundred times as long
        call = _Call(hint, args, caller.f_code, caller.f_lasti)
        coroutine = _run(call, function, args, kwargs)
        call.coroutine = weakref.ref(coroutine)
        setattr(coroutine, "__qualname__", name)  # noqa: B010 - for Python's own warning; checkers differ about it
        return coroutine

    _mark_as_async(called)
    return called


class _Call:
    """Where the call is in the code. The line is looked up only when it is needed."""

    __slots__ = ("args", "code", "coroutine", "hint", "instruction", "is_awaited")
    coroutine: weakref.ref[Any]

    def __init__(self, hint: str, args: Sequence[Any], code: CodeType, instruction: int) -> None:
        self.hint = hint
        self.args = args
        self.code = code
        self.instruction = instruction
        self.is_awaited = False

    def __del__(self) -> None:
        """A coroutine that still exists was closed, or cancelled before it started: on purpose."""
        if not self.is_awaited and self.coroutine() is None and not sys.is_finalizing():
            log.error(
                "submit.not_awaited", task=_task_name(self.args), file=self.code.co_filename, line=self._line(),
                consequence="nothing was submitted", hint=self.hint,
            )  # fmt: skip

    def _line(self) -> int | None:
        lines = (line for start, end, line in self.code.co_lines() if start <= self.instruction < end)
        return next(lines, None)


async def _run(
    call: _Call, function: Callable[..., Coroutine[Any, Any, T]], args: Sequence[Any], kwargs: dict[str, Any]
) -> T:
    call.is_awaited = True
    return await function(*args, **kwargs)


def _task_name(args: Sequence[Any]) -> str | None:
    """The submitted task is the first argument, or the second after a client."""
    names = (each if isinstance(each, str) else getattr(each, "name", None) for each in args[:2])
    return next((name for name in names if isinstance(name, str)), None)


def _mark_as_async(function: Any) -> None:
    """Frameworks ask whether a function is async before they call it: Starlette's background tasks, `unittest.mock`."""
    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(function)
    else:
        function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001 - as asgiref does
