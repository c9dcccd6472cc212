"""Where task functions execute: sync ones in threads of their own, async ones on an event loop of their own, isolated
ones in processes of their own, each attended to by a thread.

A runner takes an execution from the buffer, calls its function in a copy of the worker's context, turns what happened
into an Outcome, and reports it. User code that blocks its thread or its loop blocks nothing of the worker's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

from tasklib.clock import time, with_real_time
from tasklib.current import enter_task
from tasklib.errors import DatabaseUnavailable, TaskNotRegistered
from tasklib.log import log
from tasklib.outcomes import (
    LONGEST_DELAY_SECONDS,
    Cancel,
    CancelInterrupt,
    Cancelled,
    Completed,
    Expired,
    Fail,
    Failed,
    Interrupted,
    Problem,
    Retry,
    Snooze,
    Snoozed,
    TaskInterrupt,
    TimedOut,
    TimeoutInterrupt,
    free_runs,
)
from tasklib.worker.execution import ThreadSeat
from tasklib.worker.hooks import await_inside_hooks, call_inside_hooks, has_around_hooks
from tasklib.worker.problems import problem_of
from tasklib.worker.results import encode_result

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tasklib.current import CurrentTask
    from tasklib.options import TaskOptions
    from tasklib.outcomes import HeldTask, Outcome
    from tasklib.worker.buffer import Buffer
    from tasklib.worker.execution import Execution
    from tasklib.worker.forks import Original
    from tasklib.worker.processes import Processes
    from tasklib.worker.transactions import Transactions

MOST_FREE_RUNS = 10  # that a database which is away may cause, before it is taken for the task's own fault

Report: TypeAlias = "tuple[Execution, Outcome, float]"  # how it has ended, and when: monotonic
Begin: TypeAlias = "Callable[[Execution], bool]"
ReportAll: TypeAlias = "Callable[[Sequence[Report]], None]"
Describe: TypeAlias = "Callable[[Execution], CurrentTask]"
NOBODY = UUID(int=0)
NewLoop: TypeAlias = "Callable[[], asyncio.AbstractEventLoop]"


def prepared_call(execution: Execution) -> Callable[[], Any] | Failed:
    """The function with its arguments; or why it cannot be called. To try again would not help: the row, or this
    program, has to be changed first.
    """
    function = execution.function
    if function is None:
        missing = TaskNotRegistered(
            f"no task function is called {execution.task.name!r} in this worker: does it import the module that "
            f"defines it, at its top level?"
        )
        return Failed(problem_of(missing, code="UNKNOWN_TASK"), may_retry=False)
    try:
        args, kwargs = function.arguments.decode(execution.claimed.args or "", execution.claimed.kwargs or "")
    except Exception as error:  # noqa: BLE001 - a validator of the user's may raise anything
        return Failed(problem_of(error, code="INVALID_ARGUMENTS"), may_retry=False)
    return functools.partial(function.function, *args, **kwargs)


def completed(execution: Execution, value: object) -> Completed:
    if not execution.claimed.store_result:
        return Completed(None)
    returns = None if execution.function is None else execution.function.returns
    return Completed(encode_result(execution.task, value, returns))


def refuse_unfinished(value: object) -> object:
    """What still has to be run, has not been run."""
    if inspect.iscoroutine(value):
        value.close()
    if inspect.isawaitable(value) or inspect.isasyncgen(value) or inspect.isgenerator(value):
        raise Fail(
            f"it returned a {type(value).__name__}, of which nothing has run: is there a decorator over an async def?"
        )
    return value


def outcome_of(execution: Execution, error: BaseException) -> Outcome:
    """What an exception from a task function means. Also one that cannot be looked at is an outcome."""
    try:
        return _meaning(execution, error)
    except Exception as broken:  # noqa: BLE001 - an exception's own properties may raise
        return Failed(Problem("UNREADABLE_ERROR", type(broken).__name__, f"{type(error).__qualname__}: (unreadable)"))


def _meaning(execution: Execution, error: BaseException) -> Outcome:
    options = execution.function.task_options if execution.function is not None else None
    codes = options.error_codes if options is not None else None
    match error:
        case TaskInterrupt() | asyncio.CancelledError() if execution.interrupt_kind is not None:
            return _stopped(execution, error)
        case Retry():
            return Failed(problem_of(error, codes), delay_seconds=error.delay_seconds)
        case Snooze():
            return Snoozed(error.delay_seconds)
        case Cancel():
            return Cancelled(problem_of(error, code="CANCELLED"))
        case Fail():
            return Failed(problem_of(error, codes), may_retry=False)
        case _:
            return _raised(execution.task, error, options)


def _raised(task: HeldTask, error: BaseException, options: TaskOptions | None) -> Outcome:
    """A database that is away is not the task's fault. What must not run twice does not, all the same."""
    may_retry = _may_retry(error, options)
    is_free = isinstance(error, DatabaseUnavailable) and may_retry and task.on_crash != "fail" and has_free_runs(task)
    if is_free:
        return Snoozed(delay_of_free_run(task))
    return Failed(problem_of(error, None if options is None else options.error_codes), may_retry=may_retry)


def _stopped(execution: Execution, error: BaseException) -> Outcome:
    if execution.interrupt_kind is TimeoutInterrupt:
        late = TimeoutError(f"timeout_seconds={execution.task.timeout_seconds:g} passed")
        return TimedOut(problem_of(late.with_traceback(error.__traceback__), code="TIMEOUT"))
    if execution.interrupt_kind is CancelInterrupt:
        return Cancelled(problem_of(Cancel("on request").with_traceback(error.__traceback__), code="CANCELLED"))
    return Interrupted(began=True, may_repeat=False)


def has_free_runs(task: HeldTask) -> bool:
    return free_runs(task) < MOST_FREE_RUNS


def delay_of_free_run(task: HeldTask) -> float:
    return min(2.0 ** min(free_runs(task), 10), LONGEST_DELAY_SECONDS)


def _may_retry(error: BaseException, options: TaskOptions | None) -> bool:
    if options is None or isinstance(error, options.no_retry_on):
        return False
    return options.retry_on is None or isinstance(error, options.retry_on)


# What structlog.contextvars.bind_contextvars would make, at a fifth of its price.
_LOGGED_ID: contextvars.ContextVar[str] = contextvars.ContextVar("structlog_task_id")
_LOGGED_NAME: contextvars.ContextVar[str] = contextvars.ContextVar("structlog_task")
_LOGGED_QUEUE: contextvars.ContextVar[str] = contextvars.ContextVar("structlog_queue")
_LOGGED_ATTEMPT: contextvars.ContextVar[int] = contextvars.ContextVar("structlog_attempt")
_LOGGED_WORKER: contextvars.ContextVar[str] = contextvars.ContextVar("structlog_worker_id")


def _set_logged(name: str, queue: str, worker_id: str) -> None:
    _LOGGED_NAME.set(name)
    _LOGGED_QUEUE.set(queue)
    _LOGGED_WORKER.set(worker_id)


class Runner:
    """Takes executions, begins them, reports how they ended; each in its own copy of the worker's context."""

    def __init__(
        self,
        buffer: Buffer,
        begin: Begin,
        report_all: ReportAll,
        describe: Describe,
        transactions: Transactions,
        *,
        original: Original,
    ) -> None:
        self._buffer = buffer
        self._original = original
        self._begin = begin
        self._report_all = report_all
        self._describe = describe
        self._transactions = transactions
        self._context = contextvars.copy_context()
        self._contexts: dict[tuple[str, str, str], contextvars.Context] = {}

    def _context_for(self, task: HeldTask) -> contextvars.Context:
        """A copy of its own, with what a logger of the task's may want to know, where structlog is set up to look at
        context variables. What many tasks have in common is set once.
        """
        common = (task.name, task.queue, task.worker_id)
        context = self._contexts.get(common)
        if context is None:
            context = self._context.copy()
            context.run(_set_logged, *common)
            self._contexts[common] = context
        return context.copy()

    def _enter(self, execution: Execution) -> None:
        """What the function finds around it."""
        _LOGGED_ID.set(execution.claimed.id_text)
        _LOGGED_ATTEMPT.set(execution.task.attempt + 1)
        enter_task(functools.partial(self._describe, execution))


class ThreadRunner(Runner):
    """Threads, started as they are needed, at most one a slot. Daemons: a stuck one does not keep the process."""

    def __init__(
        self,
        buffer: Buffer,
        begin: Begin,
        report_all: ReportAll,
        describe: Describe,
        transactions: Transactions,
        *,
        original: Original,
        processes: Processes,
    ) -> None:
        super().__init__(buffer, begin, report_all, describe, transactions, original=original)
        self._processes = processes
        self._threads: list[threading.Thread] = []

    def provide(self) -> None:
        """Enough threads for what waits."""
        for _ in range(self._buffer.threads_wanted(len(self._threads))):
            thread = threading.Thread(target=self._work, name=f"tasklib-run-{len(self._threads) + 1}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        seat = ThreadSeat()
        while (execution := self._buffer.wait_and_take()) is not None:
            outcome = self._context_for(execution.task).run(self._execute, execution, seat)
            seat.stand_up()  # an interrupt may have come in the way of the first time
            self._report_all([(execution, self._transactions.end(execution, outcome), time.monotonic())])

    def _execute(self, execution: Execution, seat: ThreadSeat) -> Outcome:
        """Nothing may escape: the thread, its slot and its task would be lost."""
        try:
            return self._begin_and_call(execution, seat)
        except BaseException as error:  # noqa: BLE001 - SystemExit and its kind must not end the worker's thread
            return outcome_of(execution, error)

    def _begin_and_call(self, execution: Execution, seat: ThreadSeat) -> Outcome:
        if not self._begin(execution):
            return Expired()
        if execution.is_isolated:
            return self._processes.run(execution)
        call = prepared_call(execution)
        if isinstance(call, Failed):
            return call
        self._enter(execution)
        execution.inside = seat
        try:
            seat.sit_down(execution)
            if execution.interrupt_kind is not None:
                raise execution.interrupt_kind
            return completed(execution, refuse_unfinished(call_inside_hooks(call)))
        finally:
            self._original.end_if_copy(execution.id)
            seat.stand_up()


class CoroutineRunner(Runner):
    """An event loop in a thread of its own. It takes from the buffer by itself, as slots get free."""

    def __init__(
        self,
        buffer: Buffer,
        begin: Begin,
        report_all: ReportAll,
        describe: Describe,
        transactions: Transactions,
        *,
        original: Original,
        new_loop: NewLoop,
    ) -> None:
        super().__init__(buffer, begin, report_all, describe, transactions, original=original)
        self._loop = with_real_time(new_loop())
        self._running: dict[Execution, asyncio.Task[Outcome]] = {}
        self._reports: list[Report] = []
        self._thread = threading.Thread(target=self._serve, name="tasklib-loop", daemon=True)
        self._is_turn_due = False
        self._is_stopping = False
        self._forked_by = NOBODY  # in a copy of this process: the task that has made it

    def start(self) -> None:
        self._thread.start()
        _loops.add(self)

    def provide(self) -> None:
        if not self._is_turn_due and not self._loop.is_closed():
            self._is_turn_due = True  # one call is enough for all that comes until it runs
            self._loop.call_soon_threadsafe(self._turn)

    def run(self, work: Callable[[], Awaitable[Any]], gives_up: Callable[[], bool]) -> None:
        """For the worker's hooks: what they open belongs to the tasks' own loop."""

        async def awaited() -> None:
            await work()

        future = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        while not future.done():
            if gives_up():
                future.cancel()
                raise TimeoutError("the hook did not end in time")
            concurrent.futures.wait([future], timeout=0.05)
        future.result()

    def stop(self, seconds: float) -> bool:
        """False: the loop is blocked by a task that does not end."""
        self._is_stopping = True
        if self._thread.is_alive() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._is_stopping:
                self._run_forever()
            for left in asyncio.all_tasks(self._loop):
                left.cancel()
            self._loop.run_until_complete(_gathered(asyncio.all_tasks(self._loop)))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._turn()
        finally:
            self._loop.close()

    def _run_forever(self) -> None:
        """Until it is told to stop: not when a task calls loop.stop(), or what it has started calls sys.exit()."""
        try:
            self._loop.run_forever()
        except BaseException:  # noqa: BLE001 - see above
            self._original.end_if_copy(self._forked_by)
            log.exception("loop.interrupted")
        self._original.end_if_copy(self._forked_by)

    def leave_if_copied(self) -> None:
        """In a process that was just forked. If it was forked on the loop, it has the loop's other tasks, too: none of
        them may go on in it when the one that has forked returns, or waits for something.
        """
        if threading.get_ident() == self._thread.ident:
            current = asyncio.current_task(self._loop)
            self._forked_by = next((each.id for each, task in self._running.items() if task is current), NOBODY)
            self._loop.stop()
            with contextlib.suppress(AttributeError):  # uvloop shows it to nobody; asyncio's own ends without it
                self._loop._ready.clear()  # type: ignore[attr-defined]  # noqa: SLF001

    def _turn(self) -> None:
        """Once in a turn of the loop: what has ended in it is reported, and what may start is started."""
        self._original.end_if_copy(self._forked_by)
        self._is_turn_due = False
        reports, self._reports = self._reports, []
        if reports:
            self._report_all(reports)
        for execution in self._buffer.take_all():
            self._start(execution)

    def interrupt(self, _kind: type[TaskInterrupt], occupant: Execution) -> None:
        """From any thread. The runner is the seat of all its executions: one that led to its own task would be a cycle
        for the collector, 20 us a task.
        """
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel, occupant)

    def _cancel(self, occupant: Execution) -> None:
        if occupant in self._running:
            self._running[occupant].cancel()

    def _start(self, execution: Execution) -> None:
        if not self._begin(execution):
            self._note_end(execution, Expired())
            self._take_turn_soon()
            return
        task = self._loop.create_task(self._outcome(execution), context=self._context_for(execution.task))
        execution.inside = self
        self._running[execution] = task
        task.add_done_callback(functools.partial(self._ended, execution))
        if execution.interrupt_kind is not None:
            task.cancel()

    def _ended(self, execution: Execution, task: asyncio.Task[Outcome]) -> None:
        """Not at the end of the coroutine: one that is cancelled before its first line never gets there."""
        del self._running[execution]
        outcome = outcome_of(execution, asyncio.CancelledError()) if task.cancelled() else task.result()
        self._note_end(execution, outcome)
        if self._running:
            self._take_turn_soon()
        else:
            self._turn()  # there is nobody to share it with

    def _note_end(self, execution: Execution, outcome: Outcome) -> None:
        self._reports.append((execution, outcome, time.monotonic()))

    def _take_turn_soon(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self._loop.call_soon(self._turn)

    async def _outcome(self, execution: Execution) -> Outcome:
        outcome: Outcome
        try:
            call = prepared_call(execution)
            if isinstance(call, Failed):
                outcome = call
            else:
                self._enter(execution)
                outcome = completed(execution, await (await_inside_hooks(call) if has_around_hooks() else call()))
        except BaseException as error:  # noqa: BLE001 - SystemExit and its kind must not end the loop
            outcome = outcome_of(execution, error)
        execution.has_ended = True
        if execution.opening is None:
            return outcome
        self._original.end_if_copy(execution.id)
        return await self._transactions.end_async(execution, outcome)


_loops: weakref.WeakSet[CoroutineRunner] = weakref.WeakSet()


def _leave_loops() -> None:
    for runner in list(_loops):
        runner.leave_if_copied()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_loops)


async def _gathered(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
