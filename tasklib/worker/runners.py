"""Where task functions execute: sync ones in threads of their own, async ones on an event loop of their own.

A runner takes an execution from the buffer, calls its function in a copy of the worker's context, turns what happened
into an Outcome, and reports it. User code that blocks its thread or its loop blocks nothing of the worker's.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import TYPE_CHECKING, Any

import structlog

from tasklib.errors import InvalidArguments, TaskNotRegistered
from tasklib.outcomes import (
    Cancel,
    CancelInterrupt,
    Cancelled,
    Completed,
    Expired,
    Fail,
    Failed,
    Interrupted,
    Retry,
    Snooze,
    Snoozed,
    TaskInterrupt,
    TimedOut,
    TimeoutInterrupt,
)
from tasklib.worker.execution import CoroutineSeat, ThreadSeat
from tasklib.worker.problems import problem_of
from tasklib.worker.results import encode_result

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from tasklib.options import TaskOptions
    from tasklib.outcomes import Outcome
    from tasklib.worker.buffer import Buffer
    from tasklib.worker.execution import Execution


def arguments_of(execution: Execution) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if execution.function is None:
        raise TaskNotRegistered(f"no task function is called {execution.task.name!r} in this worker")
    return execution.function.arguments.decode(execution.claimed.args, execution.claimed.kwargs)


def outcome_of(execution: Execution, error: BaseException) -> Outcome:
    """What an exception from a task function means."""
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
            return Failed(problem_of(error, codes), may_retry=_may_retry(error, options))


def _stopped(execution: Execution, error: BaseException) -> Outcome:
    if execution.interrupt_kind is TimeoutInterrupt:
        late = TimeoutError(f"timeout_seconds={execution.task.timeout_seconds:g} passed")
        return TimedOut(problem_of(late.with_traceback(error.__traceback__), code="TIMEOUT"))
    if execution.interrupt_kind is CancelInterrupt:
        return Cancelled(problem_of(Cancel("on request").with_traceback(error.__traceback__), code="CANCELLED"))
    return Interrupted(began=True)


def _may_retry(error: BaseException, options: TaskOptions | None) -> bool:
    if options is None or isinstance(error, options.no_retry_on):
        return False
    return options.retry_on is None or isinstance(error, options.retry_on)


def unrunnable(error: InvalidArguments | TaskNotRegistered) -> Failed:
    """Trying again would not help: the row, or this program, has to be changed first."""
    code = "INVALID_ARGUMENTS" if isinstance(error, InvalidArguments) else "UNKNOWN_TASK"
    return Failed(problem_of(error, code=code), may_retry=False)


def bind_log_context(execution: Execution) -> None:
    """For the task's own logger, where structlog is set up to look at context variables."""
    task = execution.task
    structlog.contextvars.bind_contextvars(
        task_id=str(task.id), task=task.name, queue=task.queue, attempt=task.attempt + 1, worker_id=task.worker_id
    )


class Runner:
    """Takes executions, begins them, reports how they ended; each in its own copy of the worker's context."""

    def __init__(
        self, buffer: Buffer, begin: Callable[[Execution], bool], report: Callable[[Execution, Outcome], None]
    ) -> None:
        self._buffer = buffer
        self._begin = begin
        self._report = report
        self._context = contextvars.copy_context()


class ThreadRunner(Runner):
    """Threads, started as they are needed, at most one a slot. Daemons: a stuck one does not keep the process."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._threads: list[threading.Thread] = []

    def provide(self) -> None:
        """Enough threads for what waits."""
        for _ in range(self._buffer.threads_wanted(len(self._threads))):
            thread = threading.Thread(target=self._work, name=f"tasklib-run-{len(self._threads) + 1}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        seat = ThreadSeat()
        while (execution := self._buffer.wait_and_take()) is not None:
            self._report(execution, self._context.copy().run(self._execute, execution, seat))

    def _execute(self, execution: Execution, seat: ThreadSeat) -> Outcome:
        if not self._begin(execution):
            return Expired()
        try:
            args, kwargs = arguments_of(execution)
        except (InvalidArguments, TaskNotRegistered) as error:
            return unrunnable(error)
        assert execution.function is not None  # noqa: S101 - arguments_of has looked
        bind_log_context(execution)
        execution.inside = seat
        try:
            try:
                seat.sit_down()
                if execution.interrupt_kind is not None:
                    raise execution.interrupt_kind
                value = execution.function.function(*args, **kwargs)
            finally:
                seat.stand_up()
            return Completed(encode_result(execution.task, value) if execution.claimed.store_result else None)
        except BaseException as error:  # noqa: BLE001 - SystemExit and its kind must not end the worker's thread
            return outcome_of(execution, error)


class CoroutineRunner(Runner):
    """An event loop in a thread of its own. It takes from the buffer by itself, as slots get free."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._loop = asyncio.new_event_loop()
        self._running: dict[asyncio.Task[Outcome], Execution] = {}
        self._thread = threading.Thread(target=self._serve, name="tasklib-loop", daemon=True)
        self._is_filling = False

    def start(self) -> None:
        self._thread.start()

    def provide(self) -> None:
        if not self._is_filling and not self._loop.is_closed():
            self._is_filling = True  # one call is enough for all that comes until it runs
            self._loop.call_soon_threadsafe(self._fill)

    def run(self, work: Callable[[], Awaitable[Any]]) -> None:
        """For the worker's hooks: what they open belongs to the tasks' own loop."""

        async def awaited() -> None:
            await work()

        asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()

    def stop(self, seconds: float) -> bool:
        """False: the loop is blocked by a task that does not end."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            for left in asyncio.all_tasks(self._loop):
                left.cancel()
            self._loop.run_until_complete(_gathered(asyncio.all_tasks(self._loop)))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _fill(self) -> None:
        self._is_filling = False
        while (execution := self._buffer.take(is_coroutine=True)) is not None:
            if not self._begin(execution):
                self._report(execution, Expired())
                continue
            task = self._loop.create_task(self._outcome(execution), context=self._context.copy())
            execution.inside = CoroutineSeat(self._loop, task)
            self._running[task] = execution
            task.add_done_callback(self._ended)
            if execution.interrupt_kind is not None:
                task.cancel()

    def _ended(self, task: asyncio.Task[Outcome]) -> None:
        """Not at the end of the coroutine: one that is cancelled before its first line never gets there."""
        execution = self._running.pop(task)
        outcome = outcome_of(execution, asyncio.CancelledError()) if task.cancelled() else task.result()
        self._report(execution, outcome)
        self._fill()

    async def _outcome(self, execution: Execution) -> Outcome:
        try:
            args, kwargs = arguments_of(execution)
        except (InvalidArguments, TaskNotRegistered) as error:
            return unrunnable(error)
        assert execution.function is not None  # noqa: S101 - arguments_of has looked
        bind_log_context(execution)
        try:
            coroutine: Coroutine[Any, Any, Any] = execution.function.function(*args, **kwargs)
            value = await coroutine
            return Completed(encode_result(execution.task, value) if execution.claimed.store_result else None)
        except BaseException as error:  # noqa: BLE001 - SystemExit and its kind must not end the loop
            return outcome_of(execution, error)


async def _gathered(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
