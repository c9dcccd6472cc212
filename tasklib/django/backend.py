"""`django.tasks` on tasklib: enqueue is a submit in the thread's transaction, and workers run the tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from uuid import UUID

from django.apps import apps
from django.core import checks
from django.utils import timezone

from tasklib.application import default_client
from tasklib.django.contract import (
    BaseTaskBackend,
    InvalidTask,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_enqueued,
)
from tasklib.django.runs import runnable
from tasklib.errors import InvalidOptions, InvalidTaskDefinition, TasklibError
from tasklib.names import check_queue
from tasklib.options import TaskOptions
from tasklib.registry import default_registry
from tasklib.submission import new_task, terms_of
from tasklib.task import TaskFunction

if TYPE_CHECKING:
    from datetime import datetime


P = ParamSpec("P")
R = TypeVar("R")


class TasklibBackend(BaseTaskBackend):
    """OPTIONS are those of `@tasklib.task`: max_retries, timeout_seconds, backoff ..."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self._task_options = TaskOptions(**self.options, error_codes=_ClassPaths())

    def validate_task(self, task: Task[..., Any]) -> None:
        """Django calls this when a task is defined. From then on, a worker in this process can run it."""
        super().validate_task(task)
        try:
            check_queue(task.queue_name)
            self._function_of(task)
        except (InvalidOptions, InvalidTaskDefinition) as error:
            raise InvalidTask(str(error)) from None

    def enqueue(self, task: Task[P, R], args: list[Any], kwargs: dict[str, Any]) -> TaskResult[P, R]:
        """Part of the transaction that is open in this thread; without one, committed at once."""
        self.validate_task(task)
        function = self._function_of(task)
        terms = terms_of(
            function, {"queue": task.queue_name, "priority": task.priority, "scheduled_at": _aware(task.run_after)}
        )
        result: TaskResult[P, R] = TaskResult(
            task=task, id="", status=TaskResultStatus.READY, enqueued_at=timezone.now(), started_at=None,
            finished_at=None, last_attempted_at=None, args=args, kwargs=kwargs, backend=self.alias, errors=[],
            worker_ids=[],
        )  # fmt: skip
        task_id = default_client().submit(new_task(function, result.args, result.kwargs, terms))
        object.__setattr__(result, "id", str(task_id))
        task_enqueued.send_robust(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult[..., Any]:
        """Reads in the thread's transaction, so it finds what was enqueued in it."""
        from tasklib.django.models import Task as Row  # noqa: PLC0415 - tasks may be defined before models can be
        from tasklib.django.results import result_of  # noqa: PLC0415 - as above

        row = Row.objects.filter(id=_uuid(result_id)).first()
        if row is None:
            raise TaskResultDoesNotExist(result_id)
        function = default_registry.get(row.name).function if row.name in default_registry else None
        task = getattr(function, "django_task", None)
        if task is None:
            raise TaskResultDoesNotExist(f"{result_id}: {row.name!r} is not a task of django.tasks in this process")
        return result_of(row, task, self.alias)

    def check(self, **_: Any) -> Iterator[checks.CheckMessage]:  # type: ignore[override] # any iterable will do
        if not apps.is_installed("tasklib.django"):
            hint = "Add 'tasklib.django' to INSTALLED_APPS."
            yield checks.Error("TasklibBackend needs its app.", hint, id="tasklib.E001")
        for queue in sorted(self.queues):
            try:
                check_queue(queue)
            except TasklibError as error:
                yield checks.Error(f"TASKS[{self.alias!r}]['QUEUES']: {error}", id="tasklib.E002")

    def _function_of(self, task: Task[..., Any]) -> TaskFunction[..., Any]:
        name = task.module_path
        if name not in default_registry:
            default_registry.add(TaskFunction(runnable(task), name=name, options=self._task_options))
        return default_registry.get(name)


class _ClassPaths(Mapping[type[BaseException], str]):
    """The code of an error is the path of its class, for `TaskError.exception_class`."""

    def __getitem__(self, kind: type[BaseException]) -> str:
        return f"{kind.__module__}.{kind.__qualname__}"

    def __iter__(self) -> Iterator[type[BaseException]]:
        yield BaseException  # stands for all others, too

    def __len__(self) -> int:
        return 1


def _aware(moment: datetime | None) -> datetime | None:
    """Without USE_TZ, Django's times are naive, in its own time zone."""
    return timezone.make_aware(moment) if moment is not None and timezone.is_naive(moment) else moment


def _uuid(result_id: str) -> UUID:
    try:
        return UUID(result_id)
    except (ValueError, AttributeError, TypeError):
        raise TaskResultDoesNotExist(result_id) from None
