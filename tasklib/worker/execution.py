"""One claimed task inside this worker, from the claim until its settlement is committed."""

from __future__ import annotations

import ctypes
import math
import threading
from typing import TYPE_CHECKING, Any, Protocol

from tasklib.clock import time
from tasklib.outcomes import TaskInterrupt

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from tasklib.outcomes import HeldTask
    from tasklib.statements import ClaimedTask
    from tasklib.task import TaskFunction
    from tasklib.worker.clock import DatabaseClock
    from tasklib.worker.transactions import Transaction


MOST_CONTAINED_RUNS = 2  # crashes after which a suspect may run beside others, in a process of its own
_one_at_a_time = threading.Lock()


class Execution:
    """The task, where it runs, and the way to stop it. Its fields change under the buffer's lock, or by its runner."""

    started = math.inf  # monotonic
    started_at: datetime | None = None  # by the database's clock, once somebody has been told
    deadline = math.inf  # when it is told to stop
    timeout_limit = math.inf  # after that; two, since two threads write them
    cancel_limit = math.inf
    is_marked = False  # `running` in the database
    waits_since = math.inf  # monotonic: it has to be marked, to be loaded, or to be alone before it starts
    not_before = 0.0  # monotonic: somebody had locked its row, and it is tried again then
    has_own_process = False  # it was given one because it is a suspect
    may_have_own_process = False  # as far as its function and its worker go
    is_patient = True  # it waits longer than a moment for its worker to be empty
    loaded_bytes = 0  # of arguments that did not come with the claim
    is_reported_stuck = False
    interrupt_kind: type[TaskInterrupt] | None = None
    inside: Seat | None = None
    transaction: Transaction[Any] | None = None
    opening: Any = None  # a lock, from the first time that the task asks for its connection
    failed_connects = 0  # of its own connection
    waited_seconds = 0.0  # for that
    has_ended = False  # its function has
    is_committed: bool | None = False  # in its own transaction; None: the answer was lost

    def __init__(self, claimed: ClaimedTask, function: TaskFunction[..., Any] | None, *, is_coroutine: bool) -> None:
        self.claimed = claimed
        self.task: HeldTask = _as_function_says(claimed.held, function)
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
        """Monotonic. What executes at this moment has ignored that it was told to stop, by its timeout or a cancel. Not
        for one with a process of its own: whoever started that ends it.
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
        """A suspect that can harm nobody: it has a process of its own. Should its worker have died under it time and
        again all the same, then it is no longer trusted.
        """
        return self.task.suspect and self.is_isolated and self.task.crash_count <= MOST_CONTAINED_RUNS

    @property
    def must_be_alone(self) -> bool:
        """In its worker."""
        return self.task.suspect and not self.is_contained

    @property
    def needs_mark(self) -> bool:
        """Must be `running` in the database before its first line: whether it had begun decides its fate in a crash."""
        return (self.task.suspect or self.task.on_crash == "fail") and not self.is_marked

    @property
    def is_blocked(self) -> bool:
        """Somebody had locked its row when it should have been marked."""
        return self.not_before > 0.0

    @property
    def is_loaded(self) -> bool:
        """Its arguments are here."""
        return self.claimed.args is not None

    @property
    def needs_care(self) -> bool:
        """It cannot start as it is. Every task is asked, and so this calls no other property."""
        task = self.task
        is_unmarked = (task.suspect or task.on_crash == "fail") and not self.is_marked
        return is_unmarked or self.claimed.args is None

    def give_own_process(self) -> None:
        """A thread attends to it, whatever kind of function it is."""
        self.has_own_process = True
        self.is_coroutine = False

    def load(self, args: str, kwargs: str) -> None:
        self.claimed = self.claimed._replace(args=args, kwargs=kwargs)
        self.loaded_bytes = len(args) + len(kwargs)

    def unload(self) -> None:
        """It has ended, and is kept until that is written."""
        self.claimed = self.claimed._replace(args=None, kwargs=None)
        self.loaded_bytes = 0

    def is_late(self, now: datetime) -> bool:
        return self.task.expires_at is not None and now >= self.task.expires_at

    def begin(self, delta_seconds: float) -> None:
        self.started = time.monotonic()
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
        """Once: a second exception could land in the clean-up that the first one caused."""
        with _one_at_a_time:
            if self.interrupt_kind is not None:
                return
            self.interrupt_kind = kind
        inside = self.inside  # once: its runner may take it away
        if inside is not None:
            inside.interrupt(kind, self)


def _as_function_says(task: HeldTask, function: TaskFunction[..., Any] | None) -> HeldTask:
    """Who submitted it may not have known the function: what must not run twice does not, however it was submitted."""
    if task.on_crash is None and function is not None and function.task_options.on_crash == "fail":
        return task._replace(on_crash="fail")
    return task


class Seat(Protocol):
    """Where it executes, for who has to stop it."""

    def interrupt(self, kind: type[TaskInterrupt], occupant: Execution, /) -> None: ...


class ThreadSeat:
    """Raises an exception inside the thread that sits in it, and only while it does.

    The exception may land in a `finally` of the user's, or, in a C call that does not return, never. One that is still
    on its way when the function has ended is made to land here. It must not be taken back instead, by setting none:
    CPython 3.11 then keeps its eval breaker set for ever, which slows down every thread, and under a tracer stops all.
    """

    __slots__ = ("_lock", "_occupant", "_thread_id", "_was_sent")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread_id = threading.get_ident()
        self._occupant: object = None
        self._was_sent = False

    def sit_down(self, occupant: object) -> None:
        with self._lock:
            self._occupant = occupant

    def stand_up(self) -> None:
        """After this no exception can come any more."""
        was_sent = False
        while True:
            try:
                with self._lock:
                    self._occupant = None
                    was_sent, self._was_sent = self._was_sent, False
                if was_sent:
                    self._let_it_land()
                break
            except TaskInterrupt:
                continue  # it landed here, after the function had ended

    def interrupt(self, kind: type[TaskInterrupt], occupant: object) -> None:
        """The thread may have gone on to another task since it was last looked at."""
        with self._lock:
            if self._occupant is occupant:
                self._was_sent = True
                _raise_in_thread(self._thread_id, kind)

    def _let_it_land(self) -> None:
        """Whether it has landed already, in the function, nobody knows: another one takes its place, and lands."""
        _raise_in_thread(self._thread_id, TaskInterrupt)
        while True:
            pass


def _raise_in_thread(thread_id: int, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(kind))
