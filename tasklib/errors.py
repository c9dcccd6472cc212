"""Every error that a user of the library can meet. Each says what is wrong and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uuid import UUID


class TasklibError(Exception):
    """The base of every error that the library raises on purpose."""


class NotInitialised(TasklibError):
    """A module-level function was called before `tasklib.init(Config(...))`."""


class InvalidConfig(TasklibError):
    """A setting is missing or out of range."""


class InvalidTaskDefinition(TasklibError, TypeError):
    """A function cannot be a task as it is written."""


class TaskNotRegistered(TasklibError, LookupError):
    """No task function is known under that name."""


class InvalidArguments(TasklibError, ValueError):
    """A task's arguments do not fit its function, or cannot be stored as JSON without a change."""


class InvalidOptions(TasklibError, ValueError):
    """A submit option (queue, priority, tags, times ...) is out of range."""


class UnknownQueue(TasklibError, LookupError):
    """The queue has no row in `queues`, and submits to such queues are refused. The message names queues that are
    called much like it, and says how to create it.
    """


class IdempotencyConflict(TasklibError):
    """The idempotency key, or the id, already belongs to a task with another payload."""


class WorkerTooOld(TasklibError):
    """A live worker is of a version that does not know the policy that was to be set, or that is in force. Upgrade all
    workers first.
    """


class NoCurrentTask(TasklibError, LookupError):
    """`current_task()` was called where no task is running."""


class TaskNotFound(TasklibError, LookupError):
    """There is no task with that id."""


class ResultTimeout(TasklibError, TimeoutError):
    """The task was not final in time. It goes on. The message says its state, and whether no live worker serves it."""


class InvalidResult(TasklibError, ValueError):
    """The task completed, but its stored result, `value`, does not have the type that its function returns."""

    def __init__(self, message: str, value: object = None) -> None:
        super().__init__(message)
        self.value = value


class TaskFailed(TasklibError):
    """The task whose result was asked for did not succeed.

    It has the task's `task_id`, `name`, `state` and error `code`. `message` is "Type: what happened". `traceback` is
    the stored text, which begins with the message; Python prints it below the error, as a note.
    """

    def __init__(self, *, task_id: UUID, name: str, state: str, code: str, error: str) -> None:
        self.task_id = task_id
        self.name = name
        self.state = state
        self.code = code
        self.message = error.partition("\n")[0]
        self.traceback = error
        super().__init__(f"{name} ({task_id}) {state}: {self.message}")
        if "\n" in error:
            self.add_note(f"\nIn the worker, {error}")

    def __reduce__(self) -> tuple[Any, ...]:
        values = {"task_id": self.task_id, "name": self.name, "state": self.state, "code": self.code}
        return _rebuild, (type(self), values | {"error": self.traceback})


class TaskCancelled(TaskFailed):
    """The task was cancelled."""


class TaskExpired(TaskFailed):
    """The task was not started before its `expires_at`."""


class TaskBuried(TaskFailed):
    """The task killed its workers too often, or was held for too long too often."""


def _rebuild(kind: type[TaskFailed], values: dict[str, Any]) -> TaskFailed:
    """For pickle, which calls an exception's class with positional arguments only."""
    return kind(**values)


class DatabaseUnavailable(TasklibError):
    """PostgreSQL could not be reached, or did not answer in time. Nothing was changed."""


class CommitUnknown(DatabaseUnavailable):
    """The connection failed while a change was being committed: it may or may not have happened."""


class DatabaseError(TasklibError):
    """PostgreSQL refused a statement for a reason that the library does not handle; `sqlstate` is its error code."""

    def __init__(self, message: str, *, sqlstate: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class SchemaError(TasklibError):
    """The database schema does not fit this version of the library."""


class SchemaMissing(SchemaError):
    """The schema does not exist and could not be created."""


class SchemaOutdated(SchemaError):
    """The schema is older than the library: run `tasklib migrate`."""


class SchemaTooNew(SchemaError):
    """The schema was changed by a newer, incompatible library: upgrade tasklib."""


class SchemaBusy(SchemaError):
    """Another migration runs, or a table that the migration changes is in use: try again later."""


class SchemaChanged(SchemaError):
    """An applied migration differs from the one that the library carries."""


class EmbeddedPostgresError(TasklibError):
    """An embedded PostgreSQL could not be found or started."""
