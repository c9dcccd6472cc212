"""The call of a task function: its arguments, and the outcome that its return value or its exception stands for."""

from __future__ import annotations

import asyncio
import functools
import inspect
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tasklib.errors import DatabaseUnavailable, TaskNotRegistered
from tasklib.outcomes import (
    Cancel,
    CancelInterrupt,
    Cancelled,
    Completed,
    Fail,
    Failed,
    HeldTask,
    Interrupted,
    Outcome,
    PauseQueue,
    Problem,
    Retry,
    Snooze,
    Snoozed,
    TaskInterrupt,
    TimedOut,
    TimeoutInterrupt,
    delay_of_free_run,
    has_free_runs,
)
from tasklib.worker.policy_watch import READ_EVERY_SECONDS
from tasklib.worker.problems import problem_of
from tasklib.worker.result_encoding import encode_result

if TYPE_CHECKING:
    from collections.abc import Callable

    from tasklib.options import TaskOptions
    from tasklib.worker.execution import Execution


def prepared_call(execution: Execution) -> Callable[[], Any] | Failed:
    """The function with its arguments; or why it cannot be called. A retry would not help: the row or the program has
    to be changed first.
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
    except Exception as error:  # noqa: BLE001 - the user's validator may raise anything
        return Failed(problem_of(error, code="INVALID_ARGUMENTS"), may_retry=False)
    return functools.partial(function.function, *args, **kwargs)


def completed(execution: Execution, value: object) -> Completed:
    if not execution.claimed.store_result:
        return Completed(None)
    returns = None if execution.function is None else execution.function.returns
    return Completed(encode_result(execution.task, value, returns))


def refuse_unfinished(value: object) -> object:
    """A coroutine or a generator that was returned has not run."""
    if inspect.iscoroutine(value):
        value.close()
    if inspect.isawaitable(value) or inspect.isasyncgen(value) or inspect.isgenerator(value):
        raise Fail(
            f"it returned a {type(value).__name__}, of which nothing has run: is there a decorator over an async def?"
        )
    return value


def outcome_of(execution: Execution, error: BaseException) -> Outcome:
    """What an exception from a task function means. An exception that cannot be read is an outcome, too."""
    try:
        return _meaning(execution, error)
    except Exception as broken:  # noqa: BLE001 - an exception's own methods may raise
        return Failed(Problem("UNREADABLE_ERROR", type(broken).__name__, f"{type(error).__qualname__}: (unreadable)"))


def _meaning(execution: Execution, error: BaseException) -> Outcome:  # noqa: PLR0911 - one for each signal
    options = execution.function.task_options if execution.function is not None else None
    codes = options.error_codes if options is not None else None
    match error:
        case TaskInterrupt() | asyncio.CancelledError() if execution.interrupt_kind is not None:
            return _stopped(execution, error)
        case Retry():
            return Failed(problem_of(error, codes), delay_seconds=error.delay_seconds)
        case Snooze():
            return Snoozed(error.delay_seconds)
        case PauseQueue():
            return _paused(error)
        case Cancel():
            return Cancelled(problem_of(error, code="CANCELLED"))
        case Fail():
            return Failed(problem_of(error, codes), may_retry=False)
        case _:
            return _raised(execution.task, error, options)


def _paused(error: PauseQueue) -> Snoozed:
    """The task waits until every worker knows of the pause."""
    until = datetime.now(UTC) + error.until if isinstance(error.until, timedelta) else error.until
    return Snoozed(READ_EVERY_SECONDS, error.reason or "paused by a task", None if until is None else until.timestamp())


def _raised(task: HeldTask, error: BaseException, options: TaskOptions | None) -> Outcome:
    """The task is not to blame for a database that is down: the run costs no retry. A task that must not run twice does
    not run again even so.
    """
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


def _may_retry(error: BaseException, options: TaskOptions | None) -> bool:
    if options is None or isinstance(error, options.no_retry_on):
        return False
    return options.retry_on is None or isinstance(error, options.retry_on)
