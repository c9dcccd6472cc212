"""For the tests of applications: a test runs the tasks of a test database, inspects them, and moves them in time.

Nothing is faked: arguments go through the real encoding, tasks through PostgreSQL and a real worker. This module works
with any test framework; pytest finds the fixtures in `tasklib_pytest` by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, overload
from uuid import uuid4

import psycopg
from psycopg import sql
from pydantic_core import from_json, to_json

from tasklib import application, migrate
from tasklib.arguments import EncodedArguments, encode_untyped
from tasklib.client import Client
from tasklib.config import Config
from tasklib.connection import BoundedAsyncConnection, BoundedConnection, prepare_connection
from tasklib.connection_string import connection_string
from tasklib.current import USE_ASYNC_CONNECTION, USE_CONNECTION, CurrentTask, enter_task
from tasklib.database import Database
from tasklib.errors import InvalidArguments, InvalidOptions, TaskNotRegistered
from tasklib.handles import result_of
from tasklib.ids import new_id
from tasklib.options import CENTURY_SECONDS, RESERVED_PARAMETERS, checked_options
from tasklib.registry import default_registry
from tasklib.sql import queries
from tasklib.statements import MAX_LIST_LIMIT, Statement, Statements
from tasklib.states import State
from tasklib.task import TaskFunction
from tasklib.worker import TaskWorker
from tasklib.worker.result_encoding import encode_result
from tasklib.worker.served import is_async
from tasklib.worker.task_call import refuse_unfinished

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence

    from tasklib.embedded import EmbeddedPostgres, ExternalPostgres
    from tasklib.record import Task

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

TOLERANCE_SECONDS = 1.0  # the test and the code that it tests do not read the clock at the same moment
MAX_SHOWN = 20


class TasksFailed(AssertionError):
    """Tasks that `run_until_empty` ran have failed: `tasks`. The message has the first one's traceback."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        first, *others = tasks
        again = "" if first.next_retry_at is None else ", and would be tried again"
        more = f"\n(and {len(others)} more: {', '.join(each.name for each in others)})" if others else ""
        super().__init__(
            f"task {_call(first.name, first.args, first.kwargs)} failed{again}: {first.error}{more}\n"
            f"(where failures are part of the test: run_until_empty(raise_errors=False))"
        )


@contextlib.contextmanager
def new_database(server: EmbeddedPostgres | ExternalPostgres) -> Iterator[Config]:
    """A database of its own on that server, with tasklib's schema, for the length of a `with` block."""
    name = f"tasklib_test_{uuid4().hex}"
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        conn.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    try:
        config = Config(server.dsn_for(name))
        migrate.migrate(config)
        yield config
    finally:
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            conn.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


class Queue:
    """The queue of a test database. A `with` block is one test: it begins with an empty queue and calls `tasklib.init`.
    Its end restores what was initialised before, and forgets task functions that were defined inside a function.

    Connections are kept from one block to the next, until `close`.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._database = _KeptDatabase(config)
        self._client = Client(config, self._database)
        self._statements = Statements(config)
        self._sql = queries("testing", config.schema)
        self._known: set[str] = set()
        self._previous: Any = None
        self._frozen_at: datetime | None = None

    def __enter__(self) -> Self:
        self.empty()
        self._known = {each.name for each in default_registry}
        self._frozen_at = None
        self._previous = application.set_aside()
        application.init(self.config)
        for client in (application.default_client(), application.default_async_client()):
            client.database = self._database
        return self

    def __exit__(self, *_: object) -> None:
        application.put_back(self._previous)
        _forget_local_functions(self._known)

    def close(self) -> None:
        self._database.close_now()

    def empty(self) -> None:
        """Delete every task."""
        self._run(Statement(self._sql["empty"], (), lambda _: None))

    # --- run ---

    def run_until_empty(
        self,
        *,
        queues: Sequence[str] | None = None,
        tasks: Iterable[TaskFunction[..., Any] | str] | None = None,
        concurrency: int = 1,
        raise_errors: bool = True,
    ) -> list[Task]:
        """Run all due tasks, and those that they submit, with a real worker; only of these queues and tasks, if given.
        Returns the tasks that ran, in the order in which they began, as they are now.

        Raises `TasksFailed` if one of them failed, even if it would be tried again, and `TaskNotRegistered` if a task
        waits whose function is not known here.
        """
        __tracebackhide__ = True
        worker = self._worker(queues, tasks, concurrency)
        worker.run_until_empty_sync()
        return self._checked(worker, raise_errors=raise_errors, runs_all=queues is None and tasks is None)

    async def run_until_empty_async(
        self,
        *,
        queues: Sequence[str] | None = None,
        tasks: Iterable[TaskFunction[..., Any] | str] | None = None,
        concurrency: int = 1,
        raise_errors: bool = True,
    ) -> list[Task]:
        """`run_until_empty`, without blocking the test's event loop."""
        __tracebackhide__ = True
        worker = self._worker(queues, tasks, concurrency)
        await worker.run_until_empty()
        return self._checked(worker, raise_errors=raise_errors, runs_all=queues is None and tasks is None)

    def travel(self, seconds: float | timedelta) -> None:
        """Let time pass for tasks that wait: delays, retries and expiries come nearer by so much.

        No clock is changed. The times of all waiting tasks are moved back instead, as if they had been submitted that
        much earlier; your own code, and tasks that are submitted later, see the real time. Nothing runs by itself: call
        `run_until_empty` next. It runs what is due by then, and expires what has passed its time.
        """
        length = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        if not 0 <= length <= CENTURY_SECONDS:
            raise InvalidOptions(f"travel goes forward, by a number of seconds or a timedelta, got {seconds!r}")
        self._run(Statement(self._sql["travel"], (float(length),), lambda _: None))

    def freeze(self) -> None:
        """Stop the time for tasks that wait, until the end of the test. Delays, retries and expiries come nearer only
        by `travel`, and by the time that tasks take to run. Before tasks are run, the times of the waiting tasks are
        moved accordingly.
        """
        self._frozen_at = self._now()

    # --- look ---

    def submitted(self, task: TaskFunction[..., Any] | str | None = None, /, *args: Any, **kwargs: Any) -> list[Task]:
        """The tasks that were submitted and committed, in that order, whatever their state is now.

        Takes the arguments of `submit_task`, and returns the tasks that fit: the same function, the same arguments (if
        any are given; compared as they are stored, with the function's defaults filled in), and the same options. Times
        fit if they are less than a second apart, `delay_seconds` counts from the submit, and `tags` have to be among
        the task's.

        With `connection`, it also sees what the transaction of that connection has not committed yet.
        """
        return self._matching(_Wanted.of(task, args, kwargs))

    def assert_submitted(
        self, task: TaskFunction[..., Any] | str, /, *args: Any, count: int | None = None, **kwargs: Any
    ) -> list[Task]:
        """Fails unless such a task was submitted; with `count`, exactly so many times. Returns those tasks.
        (If the function has a parameter `count`, it is that argument instead.)
        """
        __tracebackhide__ = True
        if count is not None and _takes(task, "count"):
            kwargs, count = kwargs | {"count": count}, None
        wanted = _Wanted.of(task, args, kwargs)
        found = self._matching(wanted)
        if not found and count != 0:
            raise AssertionError(f"{wanted} was not submitted. {self._all_described(wanted)}")
        if count not in {None, len(found)}:
            raise AssertionError(
                f"{wanted} was submitted {len(found)} times, not {count}. {self._all_described(wanted)}"
            )
        return found

    def assert_not_submitted(
        self, task: TaskFunction[..., Any] | str | None = None, /, *args: Any, **kwargs: Any
    ) -> None:
        """Fails if such a task was submitted; without arguments, if any task was."""
        __tracebackhide__ = True
        wanted = _Wanted.of(task, args, kwargs)
        if self._matching(wanted):
            raise AssertionError(f"{wanted} was submitted. {self._all_described(wanted)}")

    # --- how ---

    def _run(self, statement: Statement[T], connection: Any = None) -> T:
        return self._database.run(statement, connection=connection)[0]

    def _now(self) -> datetime:
        """By the database's clock."""
        clock: Statement[datetime] = Statement(self._sql["clock"], (), lambda rows: rows[0][0], is_change=False)
        return self._run(clock)

    def _worker(self, queues: Any, tasks: Any, concurrency: int) -> TaskWorker:
        """The worker's own expirer runs once a second, and the worker may have stopped by then."""
        if self._frozen_at is not None:
            self._run(Statement(self._sql["hold"], (self._frozen_at,), lambda _: None))
        self._client.expire_tasks()
        return TaskWorker(self.config, concurrency, queues=queues, tasks=tasks, grace_seconds=1.0)

    def _checked(self, worker: TaskWorker, *, raise_errors: bool, runs_all: bool) -> list[Task]:
        __tracebackhide__ = True
        self._run(Statement(self._sql["pass_last_end"], (worker.worker_id,), lambda _: None))
        if self._frozen_at is not None:
            self._frozen_at = self._now()
        by_id = {task.id: task for task in self._all()}
        executed = self._run(
            Statement(self._sql["executed"], (worker.worker_id,), lambda rows: [row[0] for row in rows])
        )
        ran = [by_id[task_id] for task_id in executed if task_id in by_id]
        failed = [task for task in ran if task.state in {State.FAILED, State.BURIED}]
        if raise_errors and failed:
            raise TasksFailed(failed)
        if raise_errors and runs_all:
            for left in (task for task in by_id.values() if task.ready):
                default_registry.get(left.name)  # raises, and says which there are
        return ran

    def _matching(self, wanted: _Wanted) -> list[Task]:
        return [task for task in self._all(wanted.connection) if wanted.fits(task)]

    def _all(self, connection: Any = None) -> list[Task]:
        tasks: list[Task] = []
        while True:
            after = tasks[-1].id if tasks else None
            page = self._run(self._statements.list(None, None, MAX_LIST_LIMIT, after=after), connection)
            tasks += page
            if len(page) < MAX_LIST_LIMIT:
                return tasks[::-1]

    def _all_described(self, wanted: _Wanted) -> str:
        tasks = self._all(wanted.connection)
        if not tasks:
            return "Nothing was submitted, or it is not committed."
        lines = [wanted.described(task) for task in tasks[:MAX_SHOWN]]
        more = [f"and {len(tasks) - MAX_SHOWN} more"] if len(tasks) > MAX_SHOWN else []
        return "\n  ".join(["These were:", *lines, *more])


class _KeptDatabase(Database):
    """`tasklib.close` ends a test, but keeps the connections: new ones would take longer than most tests."""

    def close(self) -> None: ...

    def close_now(self) -> None:
        super().close()


def _forget_local_functions(known: set[str]) -> None:
    """Two tests may define functions of the same name. Functions of modules stay: no import would bring them back."""
    kept = [each for each in default_registry if each.name in known or "<locals>" not in each.__qualname__]
    default_registry.clear()
    for each in kept:
        default_registry.add(each)


# --- which tasks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a submitted task is compared with."""

    name: str | None
    function: TaskFunction[..., Any] | None
    arguments: EncodedArguments | None
    options: Mapping[str, Any]
    connection: Any

    @classmethod
    def of(cls, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Self:
        function = _function_of(task)
        name = task if isinstance(task, str) else None if function is None else function.name
        given = {key: value for key, value in kwargs.items() if key in RESERVED_PARAMETERS}
        named = {key: value for key, value in kwargs.items() if key not in RESERVED_PARAMETERS}
        if name is None and (args or named):
            raise InvalidOptions("to compare arguments, name the task")
        encode = functools.partial(encode_untyped, str(name)) if function is None else function.arguments.encode
        arguments = encode(args, named) if args or named else None
        return cls(name, function, arguments, checked_options(given), given.get("connection"))

    def fits(self, task: Task) -> bool:
        return (
            self.name in {None, task.name}
            and all(_FITS.get(key, _equals)(task, key, value) for key, value in self.options.items())
            and (self.arguments is None or self._has_arguments(task, self.arguments))
        )

    def _has_arguments(self, task: Task, wanted: EncodedArguments) -> bool:
        if (_plain(task.args), task.kwargs) == (_plain(from_json(wanted.args)), from_json(wanted.kwargs)):
            return True
        stored = EncodedArguments(to_json(task.args).decode(), to_json(task.kwargs).decode())
        try:
            return self.function is not None and _filled(self.function, stored) == _filled(self.function, wanted)
        except InvalidArguments:  # another program wrote the row
            return False

    def described(self, task: Task) -> str:
        """With the options that were asked for."""
        asked = {"queue": task.queue} | {key: _SHOWN.get(key, getattr)(task, key) for key in self.options}
        return f"{_call(task.name, task.args, task.kwargs)} {_listed(asked)} ({task.state})"

    def __str__(self) -> str:
        with_options = f" with {_listed(self.options)}" if self.options else ""
        if self.arguments is None:
            return f"{'a task' if self.name is None else self.name}{with_options}"
        return _call(str(self.name), from_json(self.arguments.args), from_json(self.arguments.kwargs)) + with_options


def _function_of(task: Any) -> TaskFunction[..., Any] | None:
    if task is None or isinstance(task, TaskFunction):
        return task
    if isinstance(task, str):
        return default_registry.get(task) if task in default_registry else None
    raise TaskNotRegistered(f"{task!r} is no task function: pass a function with @tasklib.task, or a task's name")


def _takes(task: TaskFunction[..., Any] | str, parameter: str) -> bool:
    function = _function_of(task)
    return function is not None and parameter in inspect.signature(function.function).parameters


def _filled(function: TaskFunction[..., Any], encoded: EncodedArguments) -> dict[str, Any]:
    """The arguments as the function gets them, by name, with its defaults."""
    args, kwargs = function.arguments.decode(encoded.args, encoded.kwargs)
    bound = inspect.signature(function.function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _plain(args: dict[str, Any] | list[Any]) -> list[Any]:
    return args if isinstance(args, list) else []


def _equals(task: Task, option: str, wanted: object) -> bool:
    return bool(getattr(task, option) == wanted)


def _is_near(task: Task, option: str, wanted: datetime) -> bool:
    moment: datetime | None = getattr(task, option)
    return moment is not None and abs((moment - wanted).total_seconds()) < TOLERANCE_SECONDS


def _delay_seconds(task: Task, _: str = "") -> float:
    return (task.scheduled_at - task.created_at).total_seconds()


def _deadline_seconds(task: Task, _: str = "") -> float:
    return math.inf if task.deadline_at is None else (task.deadline_at - task.created_at).total_seconds()


_FITS: Mapping[str, Callable[[Task, str, Any], bool]] = {
    "delay_seconds": lambda task, _, wanted: abs(_delay_seconds(task) - wanted) < TOLERANCE_SECONDS,
    "scheduled_at": _is_near,
    "expires_at": _is_near,
    "deadline_at": _is_near,
    "deadline_seconds": lambda task, _, wanted: abs(_deadline_seconds(task) - wanted) < TOLERANCE_SECONDS,
    "tags": lambda task, _, wanted: bool(task.tags | from_json(wanted) == task.tags),
}
_SHOWN: Mapping[str, Callable[[Task, str], Any]] = {
    "delay_seconds": _delay_seconds,
    "deadline_seconds": _deadline_seconds,
}


def _call(name: str, args: dict[str, Any] | list[Any], kwargs: dict[str, Any]) -> str:
    return f"{name}({', '.join([*map(repr, _plain(args)), _listed(kwargs)]).strip(', ')})"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}={str(value) if isinstance(value, datetime) else repr(value)}" for key, value in values.items()
    )


# --- one task, here and now ------------------------------------------------------------------------------------------


@overload
def run_inline(
    task: TaskFunction[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
) -> Coroutine[Any, Any, T]: ...
@overload
def run_inline(task: TaskFunction[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
def run_inline(task: TaskFunction[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Any:
    """Run a task function here and now, as a worker would: the arguments go through JSON, `current_task()` works, and
    the result is what `handle.result()` would return. `await` it if the function is async.

    Whatever the function raises is raised, also `Retry`, `Snooze`, `Cancel` and `Fail`. Nothing is submitted, and there
    is no timeout. `current_task().connection` belongs to the database of `tasklib.init`, and commits at the end.
    """
    if not isinstance(task, TaskFunction):
        raise TaskNotRegistered(f"{task!r} is no task function: pass a function with @tasklib.task")
    encoded = task.arguments.encode(args, kwargs)
    received, named = task.arguments.decode(encoded.args, encoded.kwargs)
    function: Callable[..., Any] = task.function
    call = functools.partial(function, *received, **named)
    inline = _Inline(task)
    return inline.run_async(call) if is_async(function) else inline.run(call)


class _Inline:
    """The task context of a function that runs inline: nothing stops it."""

    cancel_asked = False
    should_stop = False

    def __init__(self, task: TaskFunction[..., Any]) -> None:
        self._task = task
        self._id = new_id()
        self._is_async = is_async(task.function)
        self._conn: BoundedConnection | None = None
        self._async_conn: BoundedAsyncConnection | None = None
        self._exits = contextlib.ExitStack()
        self._async_exits = contextlib.AsyncExitStack()

    def run(self, call: Callable[[], Any]) -> Any:
        with self._exits:
            value = refuse_unfinished(self._context().run(call))
        return self._as_stored(value)

    async def run_async(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        async with self._async_exits:
            value = await asyncio.get_running_loop().create_task(call(), context=self._context())
        return self._as_stored(value)

    def note_progress(self, progress: str) -> None: ...

    def connection(self) -> BoundedConnection:
        if self._is_async:
            raise InvalidOptions(USE_ASYNC_CONNECTION)
        if self._conn is None:
            conn = BoundedConnection.connect(_default_dsn(), context=psycopg.adapters)
            self._conn = self._exits.enter_context(conn)
            prepare_connection(self._conn)
            self._exits.enter_context(self._conn.transaction())
        return self._conn

    async def async_connection(self) -> BoundedAsyncConnection:
        if not self._is_async:
            raise InvalidOptions(USE_CONNECTION)
        if self._async_conn is None:
            self._async_conn = await self._async_exits.enter_async_context(
                await BoundedAsyncConnection.connect(_default_dsn(), context=psycopg.adapters)
            )
            prepare_connection(self._async_conn)
            await self._async_exits.enter_async_context(self._async_conn.transaction())
        return self._async_conn

    def _context(self) -> contextvars.Context:
        """A copy, as in a worker: variables that the function sets end with it."""
        options = self._task.task_options
        current = CurrentTask(
            id=self._id,
            name=self._task.name,
            queue=options.queue,
            attempt=1,
            retry_count=0,
            started_at=datetime.now(UTC),
            timeout_seconds=options.timeout_seconds,
            parent_id=None,
            tags_json="{}",
            task_context=self,
        )
        context = contextvars.copy_context()
        context.run(enter_task, lambda: current)
        return context

    def _as_stored(self, value: object) -> Any:
        row: Any = SimpleNamespace(id=self._id, name=self._task.name)  # the fields that are read here
        returns = self._task.returns
        row.result = from_json(encode_result(row, value, returns)) if self._task.task_options.store_result else None
        return result_of(row, returns)


def _default_dsn() -> str:
    return connection_string(application.default_client().config)
