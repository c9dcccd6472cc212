"""A handle: one submitted task, its state and its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from tasklib.errors import InvalidResult, TaskBuried, TaskCancelled, TaskExpired, TaskFailed, TaskNotFound
from tasklib.statements import as_uuid
from tasklib.states import State

if TYPE_CHECKING:
    from uuid import UUID

    from tasklib.client import AsyncClient, Client
    from tasklib.record import Task
    from tasklib.results import ResultSchema
    from tasklib.verbs import CancelAnswer

R = TypeVar("R")
_ERRORS = {State.CANCELLED: TaskCancelled, State.EXPIRED: TaskExpired, State.BURIED: TaskBuried}


class Handle(Generic[R]):
    """One submitted task, whose function returns an R.

    Without a client, it uses the default one that `tasklib.init` made.
    """

    __slots__ = ("_client", "_returns", "id")

    def __init__(
        self,
        task_id: UUID | str,
        client: Client | AsyncClient | None = None,
        returns: TypeAdapter[R] | ResultSchema | None = None,
    ) -> None:
        self.id = as_uuid(task_id)
        self._client = client
        self._returns = returns

    def __repr__(self) -> str:
        return f"Handle({str(self.id)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def task(self) -> Task:
        """The task as it is now: state, progress, times."""
        return _found(self.id, self._sync().get_task(self.id))

    async def task_async(self) -> Task:
        return _found(self.id, await self._async().get_task(self.id))

    def status(self) -> State:
        """The task's state, now."""
        return self.task().state

    async def status_async(self) -> State:
        return (await self.task_async()).state

    async def result(self, timeout: float | None = None) -> R:  # noqa: ASYNC109 - the timeout ends the wait, and cancels nothing
        """Wait until the task is final, retries included, and return what the function returned. `TaskFailed` if it did
        not succeed, `TaskNotFound` if there is no such task, `InvalidResult` if the stored result does not have the
        type that the function returns. `ResultTimeout` after `timeout` seconds (None: never); the task goes on, and
        `result` can be called again.
        """
        [task] = await self._async().wait_for([self.id], timeout)
        return self._value(task)

    def result_sync(self, timeout: float | None = None) -> R:
        """The sync form of `result`."""
        [task] = self._sync().wait_for([self.id], timeout)
        return self._value(task)

    def cancel(self, reason: str | None = None) -> CancelAnswer:
        """Cancel the task: see `tasklib.cancel_task`."""
        return self._sync().cancel_task(self.id, reason)

    async def cancel_async(self, reason: str | None = None) -> CancelAnswer:
        return await self._async().cancel_task(self.id, reason)

    def _value(self, task: Task) -> R:
        if task.state != State.COMPLETED:
            raise failure_of(task)
        return result_of(task, self._returns)

    def _sync(self) -> Client:
        from tasklib.application import default_client  # noqa: PLC0415 - that module imports this one

        return default_client() if self._client is None else self._client.as_sync()

    def _async(self) -> AsyncClient:
        from tasklib.application import default_async_client  # noqa: PLC0415 - as above

        return default_async_client() if self._client is None else self._client.as_async()


def failure_of(task: Task) -> TaskFailed:
    """The error for a task that is final and did not succeed."""
    kind = _ERRORS.get(task.state, TaskFailed)
    return kind(
        task_id=task.id, name=task.name, state=task.state, code=task.error_code or "", error=task.error or "no details"
    )


def result_of(task: Task, returns: TypeAdapter[R] | ResultSchema | None) -> R:
    """The stored result, as the type that the function returns, if it names one."""
    stored: Any = task.result
    if isinstance(stored, dict) and "not_stored" in stored:
        raise InvalidResult(f"{task.name} ({task.id}) completed, but its result was not stored: {stored['not_stored']}")
    value: Any = stored["value"] if isinstance(stored, dict) and "value" in stored else stored
    if returns is None or stored is None:
        return cast("R", value)
    if isinstance(stored, dict) and "changed" in stored:
        raise InvalidResult(f"{task.name} ({task.id}) completed, but {stored['changed']}", value)
    try:
        return cast("R", returns.validate_json(to_json(value)))
    except ValidationError as error:
        reasons = "; ".join(each["msg"] for each in error.errors(include_input=False))
        raise InvalidResult(
            f"{task.name} ({task.id}) completed, but the stored result is not of the type that it returns: {reasons}",
            value,
        ) from None


def _found(task_id: UUID, task: Task | None) -> Task:
    if task is None:
        raise TaskNotFound(f"there is no task {task_id}")
    return task
