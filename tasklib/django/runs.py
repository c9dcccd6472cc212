"""One run of a task of `django.tasks` in a worker: its context, its signals, its return value."""

from __future__ import annotations

from inspect import iscoroutinefunction
from traceback import format_exception
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async

from tasklib.current import current_task
from tasklib.django.contract import Task, TaskContext, TaskError, normalize_json, task_finished, task_started

if TYPE_CHECKING:
    from collections.abc import Callable


def runnable(task: Task[..., Any]) -> Callable[..., Any]:
    """The function that a worker calls. It takes any arguments: Django's are JSON, whatever the annotations say."""

    def run(*positional: Any, **named: Any) -> Any:
        run = _Run(task)
        try:
            value = normalize_json(task.func(*run.context, *positional, **named))
        except Exception as error:
            run.failed(error)
            raise
        run.succeeded(value)
        return value

    async def run_async(*positional: Any, **named: Any) -> Any:
        run = await sync_to_async(_Run)(task)
        try:
            value = normalize_json(await task.func(*run.context, *positional, **named))
        except Exception as error:
            await sync_to_async(run.failed)(error)
            raise
        await sync_to_async(run.succeeded)(value)
        return value

    chosen: Callable[..., Any] = run_async if iscoroutinefunction(task.func) else run
    vars(chosen)["django_task"] = task  # for `get_result`
    return chosen


class _Run:
    """The signals are about this attempt; whether another one follows is decided later. An error in a receiver is only
    logged, because the work has been done.
    """

    def __init__(self, task: Task[..., Any]) -> None:
        from tasklib.django import results  # noqa: PLC0415 - tasks may be defined before models can be

        backend = task.get_backend()
        self._results = results
        self._sender = type(backend)
        self._result = results.started(backend.get_result(str(current_task().id)))
        self.context = [TaskContext(task_result=self._result)] if task.takes_context else []
        task_started.send_robust(self._sender, task_result=self._result)

    def succeeded(self, value: Any) -> None:
        task_finished.send_robust(self._sender, task_result=self._results.succeeded(self._result, value))

    def failed(self, error: Exception) -> None:
        kind = type(error)
        told = TaskError(
            exception_class_path=f"{kind.__module__}.{kind.__qualname__}", traceback="".join(format_exception(error))
        )
        task_finished.send_robust(self._sender, task_result=self._results.failed(self._result, told))
