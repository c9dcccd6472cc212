"""A task queue for Python that needs nothing but PostgreSQL.

Each name is imported when it is first used: a program that only submits does not wait until the worker is imported.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasklib.application import (
        as_completed,
        as_completed_sync,
        backlog,
        backlog_async,
        cancel_task,
        cancel_task_async,
        close,
        close_async,
        expire_tasks,
        expire_tasks_async,
        get_attempts,
        get_attempts_async,
        get_cluster,
        get_cluster_async,
        get_queue,
        get_queue_async,
        get_task,
        get_task_async,
        handle,
        init,
        list_queues,
        list_queues_async,
        list_tasks,
        list_tasks_async,
        list_transitions,
        list_transitions_async,
        pause_queue,
        pause_queue_async,
        queue_statistics,
        queue_statistics_async,
        resume_queue,
        resume_queue_async,
        retry_task,
        retry_task_async,
        set_cluster,
        set_cluster_async,
        set_queue,
        set_queue_async,
        submit_many,
        submit_many_sync,
        submit_task,
        submit_task_sync,
        task_statistics,
        task_statistics_async,
        wait_for,
        wait_for_sync,
    )
    from tasklib.client import AsyncClient, Client
    from tasklib.config import Config
    from tasklib.current import CurrentTask, current_task, is_running_task
    from tasklib.errors import (
        CommitUnknown,
        DatabaseError,
        DatabaseUnavailable,
        EmbeddedPostgresError,
        IdempotencyConflict,
        InvalidArguments,
        InvalidConfig,
        InvalidOptions,
        InvalidResult,
        InvalidTaskDefinition,
        NoCurrentTask,
        NotInitialised,
        ResultTimeout,
        SchemaBusy,
        SchemaChanged,
        SchemaError,
        SchemaMissing,
        SchemaOutdated,
        SchemaTooNew,
        TaskBuried,
        TaskCancelled,
        TaskExpired,
        TaskFailed,
        TasklibError,
        TaskNotFound,
        TaskNotRegistered,
        UnknownQueue,
        WorkerTooOld,
    )
    from tasklib.handles import Handle
    from tasklib.ids import TaskId
    from tasklib.options import OnCrash, SubmitOptions, TaskOptions
    from tasklib.outcomes import (
        Cancel,
        CancelInterrupt,
        Fail,
        PauseQueue,
        Retry,
        Snooze,
        StopInterrupt,
        TaskInterrupt,
        TimeoutInterrupt,
    )
    from tasklib.queue_options import UNCHANGED, Unchanged
    from tasklib.queues import ClusterPolicy, Queue, Transition
    from tasklib.record import (
        Attempt,
        Task,
        is_buried,
        is_cancelled,
        is_completed,
        is_expired,
        is_failed,
        is_final,
        is_pending,
        is_retrying,
        is_running,
    )
    from tasklib.retry import Exponential, Fixed, Linear
    from tasklib.statements import ListFilters
    from tasklib.states import State
    from tasklib.statistics import QueueStatistics, TaskStatistics
    from tasklib.submission import NewTask
    from tasklib.task import RegisteredTask, Submitter, TaskFunction, get_registered_tasks, task
    from tasklib.version import __version__
    from tasklib.worker import TaskWorker
    from tasklib.worker.hooks import around_task, on_worker_start, on_worker_stop

__all__ = [
    "UNCHANGED",
    "AsyncClient",
    "Attempt",
    "Cancel",
    "CancelInterrupt",
    "Client",
    "ClusterPolicy",
    "CommitUnknown",
    "Config",
    "CurrentTask",
    "DatabaseError",
    "DatabaseUnavailable",
    "EmbeddedPostgresError",
    "Exponential",
    "Fail",
    "Fixed",
    "Handle",
    "IdempotencyConflict",
    "InvalidArguments",
    "InvalidConfig",
    "InvalidOptions",
    "InvalidResult",
    "InvalidTaskDefinition",
    "Linear",
    "ListFilters",
    "NewTask",
    "NoCurrentTask",
    "NotInitialised",
    "OnCrash",
    "PauseQueue",
    "Queue",
    "QueueStatistics",
    "RegisteredTask",
    "ResultTimeout",
    "Retry",
    "SchemaBusy",
    "SchemaChanged",
    "SchemaError",
    "SchemaMissing",
    "SchemaOutdated",
    "SchemaTooNew",
    "Snooze",
    "State",
    "StopInterrupt",
    "SubmitOptions",
    "Submitter",
    "Task",
    "TaskBuried",
    "TaskCancelled",
    "TaskExpired",
    "TaskFailed",
    "TaskFunction",
    "TaskId",
    "TaskInterrupt",
    "TaskNotFound",
    "TaskNotRegistered",
    "TaskOptions",
    "TaskStatistics",
    "TaskWorker",
    "TasklibError",
    "TimeoutInterrupt",
    "Transition",
    "Unchanged",
    "UnknownQueue",
    "WorkerTooOld",
    "__version__",
    "around_task",
    "as_completed",
    "as_completed_sync",
    "backlog",
    "backlog_async",
    "cancel_task",
    "cancel_task_async",
    "close",
    "close_async",
    "current_task",
    "expire_tasks",
    "expire_tasks_async",
    "get_attempts",
    "get_attempts_async",
    "get_cluster",
    "get_cluster_async",
    "get_queue",
    "get_queue_async",
    "get_registered_tasks",
    "get_task",
    "get_task_async",
    "handle",
    "init",
    "is_buried",
    "is_cancelled",
    "is_completed",
    "is_expired",
    "is_failed",
    "is_final",
    "is_pending",
    "is_retrying",
    "is_running",
    "is_running_task",
    "list_queues",
    "list_queues_async",
    "list_tasks",
    "list_tasks_async",
    "list_transitions",
    "list_transitions_async",
    "on_worker_start",
    "on_worker_stop",
    "pause_queue",
    "pause_queue_async",
    "queue_statistics",
    "queue_statistics_async",
    "resume_queue",
    "resume_queue_async",
    "retry_task",
    "retry_task_async",
    "set_cluster",
    "set_cluster_async",
    "set_queue",
    "set_queue_async",
    "submit_many",
    "submit_many_sync",
    "submit_task",
    "submit_task_sync",
    "task",
    "task_statistics",
    "task_statistics_async",
    "wait_for",
    "wait_for_sync",
]

# The modules of the names above, for `__getattr__`; what is not listed is in tasklib.application. A test compares this
# with the imports for type checkers.
_NAMES = {
    "tasklib.client": "AsyncClient Client",
    "tasklib.config": "Config",
    "tasklib.current": "CurrentTask current_task is_running_task",
    "tasklib.errors": (
        "CommitUnknown DatabaseError DatabaseUnavailable EmbeddedPostgresError IdempotencyConflict InvalidArguments "
        "InvalidConfig InvalidOptions InvalidResult InvalidTaskDefinition NoCurrentTask NotInitialised ResultTimeout "
        "SchemaBusy SchemaChanged SchemaError SchemaMissing SchemaOutdated SchemaTooNew TaskBuried TaskCancelled "
        "TaskExpired TaskFailed TasklibError TaskNotFound TaskNotRegistered UnknownQueue WorkerTooOld"
    ),
    "tasklib.handles": "Handle",
    "tasklib.ids": "TaskId",
    "tasklib.options": "OnCrash SubmitOptions TaskOptions",
    "tasklib.outcomes": (
        "Cancel CancelInterrupt Fail PauseQueue Retry Snooze StopInterrupt TaskInterrupt TimeoutInterrupt"
    ),
    "tasklib.queue_options": "UNCHANGED Unchanged",
    "tasklib.queues": "ClusterPolicy Queue Transition",
    "tasklib.record": (
        "Attempt Task is_buried is_cancelled is_completed is_expired is_failed is_final is_pending is_retrying "
        "is_running"
    ),
    "tasklib.retry": "Exponential Fixed Linear",
    "tasklib.statements": "ListFilters",
    "tasklib.states": "State",
    "tasklib.statistics": "QueueStatistics TaskStatistics",
    "tasklib.submission": "NewTask",
    "tasklib.task": "RegisteredTask Submitter TaskFunction get_registered_tasks task",
    "tasklib.version": "__version__",
    "tasklib.worker": "TaskWorker",
    "tasklib.worker.hooks": "around_task on_worker_start on_worker_stop",
}
_MODULES = dict.fromkeys(__all__, "tasklib.application")
_MODULES.update((name, module) for module, names in _NAMES.items() for name in names.split())


if not TYPE_CHECKING:  # a type checker that sees it takes every name for an existing one

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'tasklib' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps the decorator `tasklib.task`, which Python would replace when it imports the module of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "task" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
