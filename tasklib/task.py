"""`@task`: makes a function that can be submitted, and that can still be called as before."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeAlias, TypeVar, Unpack, overload

from tasklib.application import default_async_client, default_client
from tasklib.arguments import ArgumentSchema, UnresolvedAnnotation
from tasklib.errors import InvalidOptions, InvalidTaskDefinition
from tasklib.handles import Handle
from tasklib.names import check_task_name
from tasklib.options import DEFAULT_QUEUE, RESERVED_PARAMETERS, Isolation, OnCrash, SubmitOptions, TaskOptions
from tasklib.other_queues import ATTRIBUTES, DEFINITION, instead_of
from tasklib.registry import default_registry
from tasklib.results import ResultSchema, result_schema
from tasklib.submission import NewTask, new_task, terms_of
from tasklib.unawaited import log_if_unawaited

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
    from uuid import UUID

    from tasklib.ids import TaskId
    from tasklib.retry import Backoff

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
ExceptionTypes: TypeAlias = "type[BaseException] | Iterable[type[BaseException]]"


class Submitter(Generic[P, R_co]):
    """A task function together with the options of its submits: what `options(...)` returns."""

    name: str

    def __init__(self, task: TaskFunction[P, R_co], options: SubmitOptions) -> None:
        self.name = task.name
        self.terms = terms_of(task, options)
        self._task = task
        self._options = options

    def options(self, **options: Unpack[SubmitOptions]) -> Submitter[P, R_co]:
        """The function with options for its next submits. The types of its arguments are kept."""
        return Submitter(self._task, {**self._options, **options})

    @log_if_unawaited
    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, TaskId]:
        """Submit a task with these arguments, and return its id once it is committed."""
        return self._send(args, kwargs)

    def submit_sync(self, /, *args: P.args, **kwargs: P.kwargs) -> TaskId:
        """The sync form of `submit`."""
        task = new_task(self._task, args, kwargs, self.terms)
        return default_client().submit(task, connection=self._options.get("connection"))

    @overload
    async def submit_handle(
        self: Submitter[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Handle[T]: ...
    @overload
    async def submit_handle(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]: ...
    @log_if_unawaited
    async def submit_handle(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[Any]:
        """Submit, and return a handle of the task: `await (await add.submit_handle(1, 2)).result(timeout=10)`."""
        return self._task.handle(await self._send(args, kwargs))

    @overload
    def submit_handle_sync(
        self: Submitter[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Handle[T]: ...
    @overload
    def submit_handle_sync(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]: ...
    def submit_handle_sync(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[Any]:
        """The sync form of `submit_handle`."""
        return self._task.handle(self.submit_sync(*args, **kwargs))

    def new(self, /, *args: P.args, **kwargs: P.kwargs) -> NewTask:
        """A validated task that is not submitted yet, for `submit_many` or a client's `submit`."""
        if self._options.get("connection") is not None:
            raise InvalidOptions("a new task holds no connection: pass connection= to submit or submit_many")
        return new_task(self._task, args, kwargs, self.terms)

    def _send(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Coroutine[Any, Any, TaskId]:
        """`submit` for this module, which awaits it at once."""
        task = new_task(self._task, args, kwargs, self.terms)
        return default_async_client()._send(task, self._options.get("connection"))  # noqa: SLF001 - not for users


class TaskFunction(Submitter[P, R_co]):
    """A task function. Call it like the function that it wraps, or submit it:

    await send_email.submit(to="alice@example.com")
    await send_email.options(queue="mail", delay_seconds=60).submit(to="alice@example.com")
    """

    __name__: str
    __qualname__: str

    def __init__(
        self, function: Callable[P, R_co], *, name: str | None = None, options: TaskOptions | None = None
    ) -> None:
        # `updated=()`: attributes of the function must not replace attributes of this object.
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.name = _name_of(function) if name is None else check_task_name(name)
        self.task_options = options or TaskOptions()
        # Each load of a module makes a new spec: the registry tells a reload from a second definition by it.
        self.module_spec = getattr(sys.modules.get(getattr(function, "__module__", "")), "__spec__", None)
        self.arguments = ArgumentSchema(function, self.name)
        _refuse_unfit(function, self.name)
        _refuse_lost_results(self)
        super().__init__(self, {})

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self.function(*args, **kwargs)

    if not TYPE_CHECKING:  # a type checker has to find misspelt names

        def __getattr__(self, name: str) -> Any:
            """An error that translates the names of other task queues."""
            instead = f". Instead of {name}, use {ATTRIBUTES[name]}" if name in ATTRIBUTES else ""
            raise AttributeError(f"task function {self.__dict__.get('name')!r} has no attribute {name!r}{instead}")

    def __reduce__(self) -> str:
        """Pickled by its place in its module, as functions are."""
        if "<locals>" in self.__qualname__:
            raise PicklingError(
                f"task function {self.name!r} is defined inside another function, where no other process finds it: "
                f"move it to the top level of a module, or send its name"
            )
        return self.__qualname__

    def __repr__(self) -> str:
        return f"<task function {self.name!r}>"

    @overload
    def handle(self: TaskFunction[..., Coroutine[Any, Any, T]], task_id: UUID | str) -> Handle[T]: ...
    @overload
    def handle(self, task_id: UUID | str) -> Handle[R_co]: ...
    def handle(self, task_id: UUID | str) -> Handle[Any]:
        """A handle for a task of this function that was submitted before."""
        return Handle(task_id, None, self.returns)

    @functools.cached_property
    def returns(self) -> ResultSchema | None:
        """Encodes and decodes the function's result. None: results stay plain JSON values; so they do where the
        annotation names something that does not exist at run time.
        """
        try:
            return result_schema(self.function, self.name)
        except InvalidTaskDefinition:
            return None


@overload
def task(function: Callable[P, R], /) -> TaskFunction[P, R]: ...


@overload
def task(
    *,
    name: str | None = None,
    queue: str = DEFAULT_QUEUE,
    priority: int | None = None,
    max_retries: int | None = None,
    timeout_seconds: float | None = None,
    deadline_seconds: float | None = None,
    retry_on: ExceptionTypes | None = None,
    no_retry_on: ExceptionTypes = (),
    store_result: bool = True,
    on_crash: OnCrash = "retry",
    backoff: Backoff | None = None,
    error_codes: Mapping[type[BaseException], str] = ...,
    isolation: Isolation = "worker",
    memory_limit_mb: int | None = None,
) -> Callable[[Callable[P, R]], TaskFunction[P, R]]: ...


def task(function: Callable[..., Any] | None = None, /, *, name: str | None = None, **options: Any) -> Any:
    """Register a function as a task, under its own name unless another is given.

    Use it bare or with defaults for every submit: `@task` or `@task(queue="mail", max_retries=5)`.
    """
    if function is not None and not callable(function):
        raise InvalidTaskDefinition(f"@task takes its name as a keyword: @task(name={function!r})")

    def register(function: Callable[P, R]) -> TaskFunction[P, R]:
        wrapped = TaskFunction(function, name=name, options=_task_options(options))
        default_registry.add(wrapped)
        return wrapped

    return register if function is None else register(function)


class RegisteredTask(NamedTuple):
    """One task function, as `get_registered_tasks` shows it."""

    function: Callable[..., Any]
    arguments: ArgumentSchema
    options: TaskOptions


def get_registered_tasks() -> dict[str, RegisteredTask]:
    """All task functions of this process, by name."""
    return {task.name: RegisteredTask(task.function, task.arguments, task.task_options) for task in default_registry}


def _name_of(function: Any) -> str:
    own = getattr(function, "__name__", None)
    if own is None or own == "<lambda>":
        what = f"a {type(function).__name__}" if own is None else "a lambda"
        raise InvalidTaskDefinition(
            f"{what} has no name under which a worker could find it: write a function with `def` at the top level of a "
            f'module, or give a name: tasklib.task(name="...")'
        )
    return check_task_name(own)


def _task_options(options: dict[str, Any]) -> TaskOptions:
    if unknown := sorted(options.keys() - set(TaskOptions.__slots__)):
        raise InvalidTaskDefinition(
            f"@task has no option {', '.join(unknown)}; it has: {', '.join(TaskOptions.__slots__)}."
            f"{instead_of(unknown, DEFINITION)}"
        )
    for name in {"retry_on", "no_retry_on"} & options.keys():
        options[name] = _as_tuple(options[name])
    return TaskOptions(**options)


def _as_tuple(types: Any) -> tuple[Any, ...] | None:
    return types if types is None else tuple(types) if isinstance(types, list | tuple | set | frozenset) else (types,)


def _refuse_unfit(function: Callable[..., Any], name: str) -> None:
    """A function whose parameters or kind would surprise its author in a worker."""
    parameters = list(inspect.signature(function).parameters)
    taken = sorted(RESERVED_PARAMETERS & set(parameters))
    if taken:
        raise InvalidTaskDefinition(
            f"task {name!r}: parameter {', '.join(taken)} is called like an option of submit, which would take "
            f"its value. Rename the parameter."
        )
    if parameters[:1] in (["self"], ["cls"]):
        raise InvalidTaskDefinition(
            f"task {name!r} looks like a method: a worker has no object to call it on. Make it a function or a static "
            f"method (@staticmethod above @task), and pass what it needs as arguments."
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidTaskDefinition(f"task {name!r} is a generator: a worker would not run its body. Return a list.")


def _refuse_lost_results(task: TaskFunction[..., Any]) -> None:
    """A return type may be defined below the task: then `returns` resolves it when it is first needed."""
    if task.task_options.store_result:
        with contextlib.suppress(UnresolvedAnnotation):
            vars(task)["returns"] = result_schema(task.function, task.name)
