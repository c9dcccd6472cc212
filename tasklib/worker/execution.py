"""One claimed task inside this worker, from the claim until its outcome is committed; and how to interrupt it."""

from __future__ import annotations

import ctypes
import math
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from tasklib.clock import time
from tasklib.outcomes import HeldTask, TaskInterrupt, seconds_for, starts_by

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from tasklib.runtime.database_clock import DatabaseClock
    from tasklib.statements import ClaimedTask
    from tasklib.task import TaskFunction
    from tasklib.worker.limited_queues import LimitedQueue
    from tasklib.worker.task_connection import TaskConnection


# A suspect may run beside others, in a process of its own, until its worker has died this often under it. After that it
# must be alone in a worker, which costs the worker's other slots: an unlucky task should not get there by chance.
MOST_CONTAINED_RUNS = 5
_one_at_a_time = threading.Lock()


class Execution:
    """The task and the state of its execution. Fields change under the buffer's lock, or in the runner's thread."""

    started = math.inf  # monotonic
    started_at: datetime | None = None  # by the database's clock; None until it is needed
    deadline = math.inf  # when it is told to stop
    timeout_limit = math.inf  # when it must have stopped; each limit is written by one thread
    cancel_limit = math.inf
    is_marked = False  # `running` in the database
    waits_since = math.inf  # monotonic: since then it waits to be prepared
    not_before = 0.0  # monotonic: its row was locked, and it is tried again then
    has_own_process = False  # given to it because it is a suspect
    may_have_own_process = False  # its function and its worker allow it
    is_patient = True  # it waits for an empty worker for longer than a moment
    loaded_bytes = 0  # of arguments that did not come with the claim
    is_reported_stuck = False
    limit: LimitedQueue | None = None  # of its queue
    breaker_epoch = 0  # of its queue's breaker, when it began
    interrupt_kind: type[TaskInterrupt] | None = None
    inside: Interruptible | None = None  # where it executes
    transaction: TaskConnection | None = None
    opening: Any = None  # a lock, made when the task first asks for its connection
    failed_connects = 0  # of its own connection
    waited_seconds = 0.0  # for its own connection
    has_ended = False  # its function has returned or raised
    is_committed: bool | None = False  # in its own transaction; None: the answer was lost

    def __init__(self, claimed: ClaimedTask, function: TaskFunction[..., Any] | None, is_coroutine: bool) -> None:
        self.claimed = claimed
        self.task: HeldTask = _as_function_says(claimed.held, function)
        if self.task.deadline_at is not None:
            self._held_since = time.monotonic()  # after `claimed_at`, so what is left is never reckoned too short
            self.task = self.task._replace(expires_at=starts_by(self.task))
        self.function = function
        self.is_coroutine = is_coroutine
        self.locked_since = claimed.held.claimed_at

    @property
    def id(self) -> UUID:
        return self.task.id

    @property
    def has_begun(self) -> bool:
        return not math.isinf(self.started)

    @property
    def must_end_by(self) -> float:
        """Monotonic. A task that still executes then has ignored its timeout or its cancellation. Infinite for a task
        with a process of its own: `Processes` kills that.
        """
        limit = min(self.timeout_limit, self.cancel_limit)
        return limit if limit == math.inf or not self.is_isolated else math.inf

    @property
    def is_isolated(self) -> bool:
        """It runs in a process of its own."""
        return self.has_own_process or self.wants_own_process

    @property
    def wants_own_process(self) -> bool:
        """Its function says so."""
        return self.function is not None and self.function.task_options.isolation == "process"

    @property
    def is_contained(self) -> bool:
        """A suspect that cannot harm other tasks: it has a process of its own. If its workers have died all the same,
        several times, it counts as dangerous again.
        """
        return self.task.suspect and self.is_isolated and self.task.crash_count <= MOST_CONTAINED_RUNS

    @property
    def must_be_alone(self) -> bool:
        """No other task may execute in this worker meanwhile."""
        return self.task.suspect and not self.is_contained

    @property
    def needs_mark(self) -> bool:
        """It must be `running` in the database before its first line, because a crash has other consequences then."""
        return (self.task.suspect or self.task.on_crash == "fail") and not self.is_marked

    @property
    def is_blocked(self) -> bool:
        """Another session had locked its row when it was to be marked."""
        return self.not_before > 0.0

    @property
    def is_loaded(self) -> bool:
        """Its arguments are here."""
        return self.claimed.args is not None

    @property
    def needs_preparation(self) -> bool:
        """It must be marked or loaded before it starts. Called for every task, so it calls no other property."""
        task = self.task
        is_unmarked = (task.suspect or task.on_crash == "fail") and not self.is_marked
        return is_unmarked or self.claimed.args is None

    def give_own_process(self) -> None:
        """A thread attends to its process, even if its function is async."""
        self.has_own_process = True
        self.is_coroutine = False

    def load(self, args: str, kwargs: str) -> None:
        self.claimed = self.claimed._replace(args=args, kwargs=kwargs)
        self.loaded_bytes = len(args) + len(kwargs)

    def unload(self) -> None:
        """It has ended: only its outcome is still needed."""
        self.claimed = self.claimed._replace(args=None, kwargs=None)
        self.loaded_bytes = 0

    def is_late(self, now: datetime) -> bool:
        return self.task.expires_at is not None and now >= self.task.expires_at

    def begin(self, delta_seconds: float) -> None:
        """The time that is left until the deadline of all attempts is this attempt's timeout, if it is shorter."""
        self.started = time.monotonic()
        if self.task.deadline_at is not None:
            now = self.task.claimed_at + timedelta(seconds=self.started - self._held_since)
            self.task = self.task._replace(timeout_seconds=seconds_for(self.task, now))
            self.claimed = self.claimed._replace(held=self.task)  # for a process of its own
        if self.task.timeout_seconds is not None:
            self.deadline = self.started + self.task.timeout_seconds
            self.timeout_limit = self.deadline + delta_seconds

    def started_by(self, clock: DatabaseClock) -> datetime:
        if self.started_at is None:
            self.started_at = clock.reading.at(self.started)
        return self.started_at

    def ask_to_cancel(self, asked_at: datetime, delta_seconds: float) -> None:
        self.task = self.task._replace(cancel_asked_at=asked_at)
        self.cancel_limit = time.monotonic() + delta_seconds

    def interrupt(self, kind: type[TaskInterrupt]) -> None:
        """Only the first call has an effect: a second exception could break the clean-up that the first one caused."""
        with _one_at_a_time:
            if self.interrupt_kind is not None:
                return
            self.interrupt_kind = kind
        inside = self.inside  # read once: the runner may clear it
        if inside is not None:
            inside.interrupt(kind, self)


def _as_function_says(task: HeldTask, function: TaskFunction[..., Any] | None) -> HeldTask:
    """The function's `on_crash="fail"` holds even if the submitter did not know the function."""
    if task.on_crash is None and function is not None and function.task_options.on_crash == "fail":
        return task._replace(on_crash="fail")
    return task


class Interruptible(Protocol):
    """Where a task executes: a thread, an event loop or a process."""

    def interrupt(self, kind: type[TaskInterrupt], execution: Execution, /) -> None: ...


class InterruptibleThread:
    """Raises an exception inside the current thread, but only while that executes the given task.

    The exception may be raised in a `finally` of the user's code. In a C call that does not return it is never raised.
    If it is still pending when the function has ended, it is made to be raised here. It cannot be withdrawn by setting
    no exception: CPython 3.11 then keeps its eval breaker set for ever, which slows down every thread, and under a
    tracer stops all of them.
    """

    __slots__ = ("_execution", "_lock", "_thread_id", "_was_sent")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread_id = threading.get_ident()
        self._execution: object = None
        self._was_sent = False

    def enter(self, execution: object) -> None:
        with self._lock:
            self._execution = execution

    def leave(self) -> None:
        """After this no exception can come any more."""
        was_sent = False
        while True:
            try:
                with self._lock:
                    self._execution = None
                    was_sent, self._was_sent = self._was_sent, False
                if was_sent:
                    self._await_exception()
                break
            except TaskInterrupt:
                continue  # it was raised here, after the function had ended

    def interrupt(self, kind: type[TaskInterrupt], execution: object) -> None:
        """Nothing happens if the thread executes another task by now."""
        with self._lock:
            if self._execution is execution:
                self._was_sent = True
                _raise_in_thread(self._thread_id, kind)

    def _await_exception(self) -> None:
        """The exception may have been raised in the function already. So another one replaces it, to be raised here."""
        _raise_in_thread(self._thread_id, TaskInterrupt)
        while True:
            pass


def _raise_in_thread(thread_id: int, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(kind))
