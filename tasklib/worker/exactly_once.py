"""The exactly-once COMMIT: what a task writes on its own connection and its completion are one transaction.

The completion is the guarded statement that settles every task, sent on the task's connection before its COMMIT. So a
worker that has lost its lease completes nothing and writes nothing. If the answer to the COMMIT is lost, the worker
gives the task back by the same guarded statement: had the COMMIT succeeded, the worker no longer holds the task, and
the statement changes nothing.

There is one path for sync and async tasks; task_connection.py explains how.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import psycopg
from psycopg import conninfo
from psycopg.pq import ConnStatus

from tasklib.clock import time
from tasklib.connection import OWN_SETTINGS, SEARCH_PATH, BoundedAsyncConnection, BoundedConnection, set_local
from tasklib.connection_string import connection_string
from tasklib.current import USE_ASYNC_CONNECTION, USE_CONNECTION
from tasklib.database_errors import is_connection_lost
from tasklib.errors import InvalidOptions, NoCurrentTask
from tasklib.log import log
from tasklib.outcomes import (
    Completed,
    Failed,
    Interrupted,
    Outcome,
    Settlement,
    Snoozed,
    TimedOut,
    delay_of_free_run,
    has_free_runs,
)
from tasklib.runtime.loop import FIRST_PAUSE_SECONDS
from tasklib.statements import Statement, WorkerStatements, settlement_json
from tasklib.worker.problems import problem_of
from tasklib.worker.task_call import outcome_of
from tasklib.worker.task_connection import (
    BUSY,
    AsyncTaskConnection,
    SyncTaskConnection,
    TaskConnection,
    answer,
    log_broken,
    run_blocking,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime
    from uuid import UUID

    from tasklib.config import Config
    from tasklib.runtime.database_clock import DatabaseClock
    from tasklib.runtime.observer import WorkerObserver
    from tasklib.worker.execution import Execution

LONGEST_PAUSE_SECONDS = 1.0  # between two attempts to connect
WAITED_SHARE = 0.1  # of a task's timeout: a shorter wait for the connection does not excuse the timeout

# From now on the task's row is locked: if this worker falls silent, the server must not wait for it. The search_path
# and the role of the session belong to the task. We replace them for the completion alone, since deferred triggers of
# the task's tables run after it.
_TAKE_OVER = """select pg_catalog.date_part('epoch', pg_catalog.now()) operator(pg_catalog.=) $4::double precision,
                       pg_catalog.current_setting('search_path'),
                       pg_catalog.current_setting('role'),
                       pg_catalog.set_config('idle_in_transaction_session_timeout', $1, true),
                       pg_catalog.set_config('search_path', $2, true),
                       pg_catalog.set_config('role', $3, true)"""
_GIVE_BACK = "select pg_catalog.set_config('search_path', $1, true), pg_catalog.set_config('role', $2, true)"
_SET_OUR_SETTINGS: Any = set_local(OWN_SETTINGS).decode()  # put together from constants
_OUR_SETTINGS: Statement[None] = Statement(_SET_OUR_SETTINGS, (), lambda _: None)

C = TypeVar("C", bound="TaskConnection")


class TaskSettings(NamedTuple):
    """The task's own settings, as they were when it returned."""

    is_same_transaction: bool
    search_path: str
    role: str


class Transactions:
    """At most one for each task that runs, so at most as many connections as there are slots. Each is made for its task
    and closed with it: statements or settings that the task leaves behind must not reach the next task.
    """

    def __init__(
        self,
        config: Config,
        statements: WorkerStatements,
        clock: DatabaseClock,
        decide: Callable[[Execution, Outcome, datetime], Settlement],
        take_progress: Callable[[Execution], str | None],
        *,
        observer: WorkerObserver,
    ) -> None:
        self._dsn = conninfo.make_conninfo(connection_string(config), application_name="tasklib:task")
        self._seconds = config.database_timeout_seconds
        self._statements = statements
        self.clock = clock
        self._decide = decide
        self._take_progress = take_progress
        self._observer = observer
        self._lock = threading.Lock()

    # --- when the task asks for its connection ---

    def open(self, execution: Execution) -> BoundedConnection:
        if execution.is_coroutine:
            raise InvalidOptions(USE_ASYNC_CONNECTION)
        with self._lock:
            opening: threading.Lock = execution.opening or threading.Lock()
            execution.opening = opening
        with opening:  # the task may have threads of its own
            return run_blocking(self._open(execution, SyncTaskConnection)).conn

    async def open_async(self, execution: Execution) -> BoundedAsyncConnection:
        if not execution.is_coroutine:
            raise InvalidOptions(USE_CONNECTION)
        execution.opening = execution.opening or asyncio.Lock()
        async with execution.opening:  # two coroutines of the task may ask at once
            return (await self._open(execution, AsyncTaskConnection)).conn

    async def _open(self, execution: Execution, kind: type[C]) -> C:
        _refuse_ended(execution)
        if execution.transaction is None:
            with _measured_wait(execution):
                execution.transaction = await self._connect(execution, kind)
            conn = execution.transaction.conn
            self._observer.connected(_role(execution), 0 if conn.is_pooled else conn.info.backend_pid)
        return cast("C", execution.transaction)

    async def _connect(self, execution: Execution, kind: type[C]) -> C:
        """The task is not to blame for a server that is down or has no connection left: it waits, until its timeout."""
        while True:
            try:
                return await kind.open(self._dsn, self._seconds)
            except psycopg.Error as error:
                pause = _pause_after(execution, error)
            await answer(kind.sleep(pause))
            _refuse_stopped(execution)

    # --- when the task has ended ---

    def end(self, execution: Execution, outcome: Outcome) -> Outcome:
        """Commit if the function returned, else roll back. Returns what the outcome is after that."""
        execution.has_ended = True
        if execution.opening is None:
            return outcome
        with execution.opening:
            connection = execution.transaction
        return run_blocking(self._end(execution, outcome, connection))

    async def end_async(self, execution: Execution, outcome: Outcome) -> Outcome:
        """`end` for async tasks. A cancel in the middle of a COMMIT is ignored."""
        execution.has_ended = True
        if execution.opening is None:
            return outcome
        ending = asyncio.ensure_future(self._end_async(execution, outcome))
        while not ending.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(ending)
        return ending.result()

    async def _end_async(self, execution: Execution, outcome: Outcome) -> Outcome:
        async with execution.opening:
            connection = execution.transaction
        return await self._end(execution, outcome, connection)

    async def _end(self, execution: Execution, outcome: Outcome, connection: TaskConnection | None) -> Outcome:
        outcome = _without_the_wait(execution, outcome)
        if connection is None:
            return outcome
        is_completed = isinstance(outcome, Completed)
        with connection.alone(self._seconds if is_completed else 0.0) as is_alone:
            try:
                if not isinstance(outcome, Completed):
                    return outcome
                async with connection.time_limit(self._seconds):
                    return await self._complete(execution, outcome, connection) if is_alone else _spoilt(BUSY)
            except Exception as error:  # noqa: BLE001 - the thread, its slot and its task would be lost
                return _outcome_of(execution, error)
            finally:
                await connection.close(self._seconds, is_alone=is_alone)
                self._observer.disconnected(_role(execution))

    async def _complete(self, execution: Execution, outcome: Completed, connection: TaskConnection) -> Outcome:
        if reason := await connection.flaw(self._seconds / 2):
            return _spoilt(reason)
        settings = await connection.send(self._take_over(connection))
        if not settings.is_same_transaction:
            return _spoilt(_ENDED)
        if not await connection.send(self._completion(execution, outcome)):
            await connection.roll_back()
            return await self._not_completed(execution, connection)
        # Code that the task left running may have aborted the transaction since. Then the COMMIT fails, and says so.
        with contextlib.suppress(psycopg.errors.InFailedSqlTransaction):
            await connection.send(_give_back(settings))
        execution.is_committed = None  # unknown, until the answer to the COMMIT is here
        await connection.commit()
        execution.is_committed = True
        return outcome

    async def _not_completed(self, execution: Execution, connection: TaskConnection) -> Outcome:
        """The completion found no row that this worker holds. If the worker does hold the task after the rollback, the
        task itself had changed the row. If not, another worker has it.
        """
        held = await connection.ask_after_rollback(_OUR_SETTINGS, self._statements.arguments(execution.task))
        if held is not None:
            return _spoilt(_OWN_ROW)
        log.warning("lease.lost", task=execution.task.name, task_id=execution.id, token=execution.task.fencing_token)
        return Interrupted(began=True)

    def _take_over(self, connection: TaskConnection) -> Statement[TaskSettings]:
        idle_limit = str(max(int(self._seconds * 1000), 1))
        parameters = (idle_limit, SEARCH_PATH, connection.role, connection.began)
        return Statement(_TAKE_OVER, parameters, lambda rows: TaskSettings(*rows[0][:3]))

    def _completion(self, execution: Execution, outcome: Completed) -> Statement[list[UUID]]:
        now = self.clock.now()
        settled = settlement_json(
            execution.task, self._decide(execution, outcome, now), started_at=execution.started_by(self.clock),
            finished_at=now,
            progress=self._take_progress(execution),
        )  # fmt: skip
        return self._statements.settle(execution.task.worker_id, [settled])


def _give_back(settings: TaskSettings) -> Statement[None]:
    return Statement(_GIVE_BACK, (settings.search_path, settings.role), lambda _: None)


# --- Waiting for the connection --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _measured_wait(execution: Execution) -> Iterator[None]:
    """Only failed attempts count as a wait: a first attempt that succeeds does not, however slow it was."""
    began = time.monotonic()
    is_open = False
    try:
        yield
        is_open = True
    finally:
        if execution.failed_connects or not is_open:
            execution.waited_seconds += time.monotonic() - began


def _without_the_wait(execution: Execution, outcome: Outcome) -> Outcome:
    """If a task's time passed while it waited for its connection, the task is given back at no cost, even if it got the
    connection at last. A task that must not run twice is not given back.
    """
    limit = execution.task.timeout_seconds
    if not isinstance(outcome, TimedOut) or limit is None or execution.task.on_crash == "fail":
        return outcome
    return Snoozed(delay_of_free_run(execution.task)) if execution.waited_seconds > WAITED_SHARE * limit else outcome


def _pause_after(execution: Execution, error: psycopg.Error) -> float:
    """Grows from attempt to attempt, with some chance: many tasks must not come back at the same moment."""
    if not is_connection_lost(error):
        raise error
    execution.failed_connects += 1
    if execution.failed_connects == 1:
        log.warning(
            "transaction.waits",
            task=execution.task.name,
            task_id=execution.id,
            error=str(error).strip().partition("\n")[0],
            hint="the task waits for a connection of its own, until its timeout",
        )
    longest = min(FIRST_PAUSE_SECONDS * 2.0 ** min(execution.failed_connects - 1, 10), LONGEST_PAUSE_SECONDS)
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing


def _refuse_stopped(execution: Execution) -> None:
    """An interrupt is raised in the task's first thread only, and this may be another thread of the task."""
    _refuse_ended(execution)
    if execution.interrupt_kind is not None and not execution.is_coroutine:
        raise execution.interrupt_kind


def _refuse_ended(execution: Execution) -> None:
    if execution.has_ended:
        raise NoCurrentTask(f"the task {execution.id} has ended, and its connection is closed")


def _role(execution: Execution) -> str:
    return f"task {execution.id}"


# --- What an error means ---------------------------------------------------------------------------------------------


def _outcome_of(execution: Execution, error: Exception) -> Outcome:
    """The function has returned, but its work was not committed. If the connection broke, the work may be committed
    after all: then the task is given back at no cost, which changes nothing if it was. Any other error would happen
    again, and is a failure.
    """
    task = execution.task
    if isinstance(error, psycopg.errors.InFailedSqlTransaction):
        return _spoilt(_ABORTED)
    if isinstance(error, UnicodeEncodeError):
        return _spoilt(_ENCODING.format(error.encoding))
    if _is_connection_lost(execution, error):
        log_broken(error, task=task.name, task_id=task.id)
        if has_free_runs(task):
            return Interrupted(began=True)
    return outcome_of(execution, error)


def _is_connection_lost(execution: Execution, error: Exception) -> bool:
    """An error without a code may also be psycopg's own, about how the connection was used."""
    if isinstance(error, TimeoutError):
        return True
    if not isinstance(error, psycopg.Error) or not is_connection_lost(error):
        return False
    connection: Any = execution.transaction
    return error.sqlstate is not None or connection is None or connection.conn.pgconn.status != ConnStatus.OK


def _spoilt(reason: str) -> Failed:
    """Nothing can be completed in this transaction any more."""
    return Failed(problem_of(InvalidOptions(reason), code="TRANSACTION_SPOILT"))


_ENDED = (
    "the transaction of current_task().connection was ended by a COMMIT or ROLLBACK in the task's own SQL: what was "
    "written before it is not part of the completion. Leave both to the worker."
)
_OWN_ROW = (
    "the task has deleted or changed its own row in tasklib.tasks, by current_task().connection: it was rolled back. "
    "Leave that row to the worker; raise tasklib.Cancel, Fail or Snooze to say what shall become of the task."
)
_ENCODING = (
    "the client_encoding of current_task().connection, {}, cannot write the result: set it back to UTF8 before the "
    "task returns"
)
_ABORTED = (
    "an error on current_task().connection was caught, but PostgreSQL has aborted the transaction, and nothing of it "
    "can be committed. Use `with connection.transaction():` around statements that may fail."
)
