"""One claimed task inside this worker, from the claim until its settlement is committed."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tasklib.outcomes import TaskInterrupt

if TYPE_CHECKING:
    import asyncio
    from datetime import datetime
    from uuid import UUID

    from tasklib.outcomes import HeldTask
    from tasklib.statements import ClaimedTask
    from tasklib.task import TaskFunction


class Execution:
    """The task, where it runs, and the way to stop it. Its fields change under the buffer's lock, or by its runner."""

    __slots__ = (
        "claimed", "deadline", "function", "inside", "interrupt_kind", "is_coroutine", "is_marked", "is_reported_stuck",
        "locked_since", "started", "started_at", "task",
    )  # fmt: skip

    def __init__(self, claimed: ClaimedTask, function: TaskFunction[..., Any] | None, *, is_coroutine: bool) -> None:
        self.claimed = claimed
        self.task: HeldTask = claimed.held
        self.function = function
        self.is_coroutine = is_coroutine
        self.locked_since = claimed.held.claimed_at
        self.started = math.inf  # monotonic
        self.started_at: datetime | None = None
        self.deadline = math.inf
        self.is_marked = False  # `running` in the database
        self.is_reported_stuck = False
        self.interrupt_kind: type[TaskInterrupt] | None = None
        self.inside: ThreadSeat | CoroutineSeat | None = None

    @property
    def id(self) -> UUID:
        return self.task.id

    @property
    def has_begun(self) -> bool:
        return not math.isinf(self.started)

    @property
    def needs_mark(self) -> bool:
        """Must be `running` in the database before its first line: whether it had begun decides its fate in a crash."""
        return (self.task.suspect or self.task.on_crash == "fail") and not self.is_marked

    def begin(self, started_at: datetime) -> None:
        self.started = time.monotonic()
        self.started_at = started_at
        if self.task.timeout_seconds is not None:
            self.deadline = self.started + self.task.timeout_seconds

    def ask_to_cancel(self, asked_at: datetime) -> None:
        self.task = replace(self.task, cancel_asked_at=asked_at)

    def interrupt(self, kind: type[TaskInterrupt]) -> None:
        """Once: a second exception could land in the clean-up that the first one caused."""
        if self.interrupt_kind is None:
            self.interrupt_kind = kind
            if self.inside is not None:
                self.inside.interrupt(kind)


class ThreadSeat:
    """Raises an exception inside the thread that sits in it, and only while it does.

    The exception may land in a `finally` of the user's, or, in a C call that does not return, never.
    """

    __slots__ = ("_is_taken", "_lock", "_thread_id")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread_id = threading.get_ident()
        self._is_taken = False

    def sit_down(self) -> None:
        with self._lock:
            self._is_taken = True

    def stand_up(self) -> None:
        """After this no exception can come any more, and one that is on its way is called back."""
        while True:
            try:
                with self._lock:
                    self._is_taken = False
                    _set_async_exception(self._thread_id, None)
                break
            except TaskInterrupt:
                continue  # it landed here, after the function had ended

    def interrupt(self, kind: type[TaskInterrupt]) -> None:
        with self._lock:
            if self._is_taken:
                _set_async_exception(self._thread_id, kind)


class CoroutineSeat:
    """Cancels an asyncio task from another thread."""

    __slots__ = ("_loop", "_task")

    def __init__(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
        self._loop = loop
        self._task = task

    def interrupt(self, _kind: type[TaskInterrupt]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel)


def _set_async_exception(thread_id: int, kind: type[BaseException] | None) -> None:
    exception = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), exception)
