"""`@task`: a function that can still be called as it is, and that can also be submitted."""

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
from tasklib.results import result_schema
from tasklib.submission import NewTask, new_task, terms_of
from tasklib.unawaited import told_if_unawaited

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
    from uuid import UUID

    from tasklib.ids import TaskId
    from tasklib.results import ResultSchema
    from tasklib.retry import Backoff

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
ExceptionTypes: TypeAlias = "type[BaseException] | Iterable[type[BaseException]]"


class TaskFunction(Generic[P, R_co]):
    """A task function. Call it like the function that it wraps, or submit it:

    await send_email.submit(to="alice@example.com")
    await send_email.options(queue="mail", delay_seconds=60).submit(to="alice@example.com")
    """

    __name__: str
    __qualname__: str

    def __init__(
        self, function: Callable[P, R_co], *, name: str | None = None, options: TaskOptions | None = None
    ) -> None:
        functools.update_wrapper(self, function, updated=())  # the function's own attributes may be called like ours
        self.function = function
        self.name = _name_of(function) if name is None else check_task_name(name)
        self.task_options = options or TaskOptions()
        # Another one each time that its module is loaded: by that, a reload is told from a second definition.
        self.module_spec = getattr(sys.modules.get(getattr(function, "__module__", "")), "__spec__", None)
        self.arguments = ArgumentSchema(function, self.name)
        _refuse_reserved_parameters(function, self.name)
        _refuse_methods(function, self.name)
        _refuse_generators(function, self.name)
        _refuse_lost_results(self)
        self._plainly = Submitter(self, {})

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self.function(*args, **kwargs)

    if not TYPE_CHECKING:  # a checker is to find misspelt names

        def __getattr__(self, name: str) -> Any:
            """Names that other queues have, and this one has not."""
            instead = f". Instead of {name}, use {ATTRIBUTES[name]}" if name in ATTRIBUTES else ""
            raise AttributeError(f"task function {self.__dict__.get('name')!r} has no attribute {name!r}{instead}")

    def __reduce__(self) -> str:
        """Found again by its place in its module, as functions are."""
        if "<locals>" in self.__qualname__:
            raise PicklingError(
                f"task function {self.name!r} is defined inside another function, where no other process finds it: "
                f"move it to the top level of a module, or send its name"
            )
        return self.__qualname__

    def __repr__(self) -> str:
        return f"<task function {self.name!r}>"

    def options(self, **options: Unpack[SubmitOptions]) -> Submitter[P, R_co]:
        """The function with options for its next submits; the types of its arguments are kept."""
        return Submitter(self, options)

    @told_if_unawaited
    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, TaskId]:
        return self._plainly.send(args, kwargs)

    def submit_sync(self, /, *args: P.args, **kwargs: P.kwargs) -> TaskId:
        return self._plainly.submit_sync(*args, **kwargs)

    @overload
    async def submit_handle(
        self: TaskFunction[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Handle[T]: ...
    @overload
    async def submit_handle(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]: ...
    @told_if_unawaited
    async def submit_handle(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[Any]:
        """Submit, and get hold of the result: `await (await add.submit_handle(1, 2)).result(timeout=10)`."""
        return self.handle(await self._plainly.send(args, kwargs))

    @overload
    def submit_handle_sync(
        self: TaskFunction[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Handle[T]: ...
    @overload
    def submit_handle_sync(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]: ...
    def submit_handle_sync(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[Any]:
        return self.handle(self._plainly.submit_sync(*args, **kwargs))

    @overload
    def handle(self: TaskFunction[..., Coroutine[Any, Any, T]], task_id: UUID | str) -> Handle[T]: ...
    @overload
    def handle(self, task_id: UUID | str) -> Handle[R_co]: ...
    def handle(self, task_id: UUID | str) -> Handle[Any]:
        """For a task of this function that was submitted before."""
        return Handle(task_id, None, self.returns)

    @functools.cached_property
    def returns(self) -> ResultSchema | None:
        """What writes and reads its result; None: as the JSON value that it is, also where the annotation names
        something that does not exist at run time.
        """
        try:
            return result_schema(self.function, self.name)
        except InvalidTaskDefinition:
            return None

    def new(self, /, *args: P.args, **kwargs: P.kwargs) -> NewTask:
        """A validated task that is not submitted yet, for `submit_many` or a client's `submit`."""
        return new_task(self, args, kwargs, self._plainly.terms)


class Submitter(Generic[P, R_co]):
    """A task function together with the options of a submit."""

    def __init__(self, task: TaskFunction[P, R_co], options: SubmitOptions) -> None:
        self.name = task.name
        self._task = task
        self._options = options
        self.terms = terms_of(task, options)

    def options(self, **options: Unpack[SubmitOptions]) -> Submitter[P, R_co]:
        return Submitter(self._task, {**self._options, **options})

    @told_if_unawaited
    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, TaskId]:
        return self.send(args, kwargs)

    def submit_sync(self, /, *args: P.args, **kwargs: P.kwargs) -> TaskId:
        return default_client().submit(self._new(args, kwargs), connection=self._options.get("connection"))

    @overload
    async def submit_handle(
        self: Submitter[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Handle[T]: ...
    @overload
    async def submit_handle(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]: ...
    @told_if_unawaited
    async def submit_handle(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[Any]:
        return self._task.handle(await self.send(args, kwargs))

    @overload
    def submit_handle_sync(
        self: Submitter[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Handle[T]: ...
    @overload
    def submit_handle_sync(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]: ...
    def submit_handle_sync(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[Any]:
        return self._task.handle(self.submit_sync(*args, **kwargs))

    def new(self, /, *args: P.args, **kwargs: P.kwargs) -> NewTask:
        if self._options.get("connection") is not None:
            raise InvalidOptions("a new task holds no connection: pass connection= to submit or submit_many")
        return self._new(args, kwargs)

    def send(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Coroutine[Any, Any, TaskId]:
        """`submit` for this module: awaited on the spot."""
        return default_async_client().send(self._new(args, kwargs), self._options.get("connection"))

    def _new(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NewTask:
        return new_task(self._task, args, kwargs, self.terms)


@overload
def task(function: Callable[P, R], /) -> TaskFunction[P, R]: ...


@overload
def task(
    *,
    name: str | None = None,
    queue: str = DEFAULT_QUEUE,
    priority: int = 0,
    max_retries: int | None = None,
    timeout_seconds: float | None = None,
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
    """What is known of one task function."""

    function: Callable[..., Any]
    arguments: ArgumentSchema
    options: TaskOptions


def get_registered_tasks() -> dict[str, RegisteredTask]:
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
    unknown = sorted(options.keys() - set(TaskOptions.__slots__))
    if unknown:
        raise InvalidTaskDefinition(
            f"@task has no option {', '.join(unknown)}; it has: {', '.join(TaskOptions.__slots__)}."
            f"{instead_of(unknown, DEFINITION)}"
        )
    for name in {"retry_on", "no_retry_on"} & options.keys():
        options[name] = _as_tuple(options[name])
    return TaskOptions(**options)


def _as_tuple(types: Any) -> tuple[Any, ...] | None:
    return types if types is None else tuple(types) if isinstance(types, list | tuple | set | frozenset) else (types,)


def _refuse_reserved_parameters(function: Callable[..., Any], name: str) -> None:
    taken = sorted(RESERVED_PARAMETERS & set(inspect.signature(function).parameters))
    if taken:
        raise InvalidTaskDefinition(
            f"task {name!r}: parameter {', '.join(taken)} is called like an option of submit, which would take "
            f"its value. Rename the parameter."
        )


def _refuse_lost_results(task: TaskFunction[..., Any]) -> None:
    """A return type may be defined below the task: then `returns` tries again when it is first needed."""
    if task.task_options.store_result:
        with contextlib.suppress(UnresolvedAnnotation):
            vars(task)["returns"] = result_schema(task.function, task.name)


def _refuse_generators(function: Callable[..., Any], name: str) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidTaskDefinition(f"task {name!r} is a generator: a worker would run nothing of it. Return a list.")


def _refuse_methods(function: Callable[..., Any], name: str) -> None:
    if next(iter(inspect.signature(function).parameters), None) in {"self", "cls"}:
        raise InvalidTaskDefinition(
            f"task {name!r} looks like a method: a worker has no object to call it on. Make it a function or a static "
            f"method (@staticmethod above @task), and pass what it needs as arguments."
        )
