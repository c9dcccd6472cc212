"""The connection that a task may ask for: what it writes there and its completion are one transaction.

The completion is the guarded statement that settles every task, sent on this connection before its COMMIT. So a worker
that has lost its lease completes nothing and writes nothing; and if the COMMIT's answer is lost, the task is given back
by the same guarded statement: had it been committed after all, nobody holds it any more, and nothing is changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import psycopg
from psycopg import conninfo
from psycopg.pq import ConnStatus, PipelineStatus, TransactionStatus

from tasklib.clock import time
from tasklib.connection import (
    OWN_SETTINGS,
    SEARCH_PATH,
    BoundedConnection,
    WatchedConnection,
    connection_string,
    has_open_stream,
    is_connection_lost,
    meet,
    meet_async,
    send,
    send_async,
    set_local,
)
from tasklib.errors import InvalidOptions, NoCurrentTask
from tasklib.log import log
from tasklib.outcomes import Completed, Failed, Interrupted, Snoozed, TimedOut
from tasklib.statements import Statement, settlement_json
from tasklib.worker.loop import FIRST_PAUSE_SECONDS
from tasklib.worker.problems import problem_of
from tasklib.worker.runners import delay_of_free_run, has_free_runs, outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime
    from uuid import UUID

    from tasklib.config import Config
    from tasklib.outcomes import Outcome, Settlement
    from tasklib.statements import WorkerStatements
    from tasklib.worker.clock import DatabaseClock
    from tasklib.worker.execution import Execution
    from tasklib.worker.witness import Witness

C = TypeVar("C", BoundedConnection, WatchedConnection)

LONGEST_PAUSE_SECONDS = 1.0  # between two tries to connect
LEAVE_SECONDS = 2.0  # for another thread to leave a connection that is to be closed
TURN_SECONDS = 0.1  # for who is using a task's connection at its end, before it is asked whether that can end
WAITED_SHARE = 0.1  # of a task's time: what is less is not why it was over

# A task may think for as long as its own timeout says. When the transaction began tells it from another one, after a
# COMMIT or ROLLBACK in the task's own SQL, which psycopg cannot refuse. A setting would be gone after RESET ALL.
_BEGIN = """select pg_catalog.set_config('idle_in_transaction_session_timeout', '0', true),
                   pg_catalog.date_part('epoch', pg_catalog.now()),
                   pg_catalog.current_setting('role')"""

# From now on the task's row is locked: if we fall silent, the server must not wait for us. The session is the task's,
# and so are its search_path and its role. They are ours for the completion alone: deferred triggers of the task's
# tables come after it.
_TAKE_OVER = """select pg_catalog.date_part('epoch', pg_catalog.now()) operator(pg_catalog.=) $4::double precision,
                       pg_catalog.current_setting('search_path'),
                       pg_catalog.current_setting('role'),
                       pg_catalog.set_config('idle_in_transaction_session_timeout', $1, true),
                       pg_catalog.set_config('search_path', $2, true),
                       pg_catalog.set_config('role', $3, true)"""
_BEGINNING: Statement[tuple[float, str]] = Statement(_BEGIN, (), lambda rows: (rows[0][1], rows[0][2]))
_OUR_SETTINGS = set_local(OWN_SETTINGS)
_GIVE_BACK = "select pg_catalog.set_config('search_path', $1, true), pg_catalog.set_config('role', $2, true)"


@dataclass(frozen=True, slots=True)
class Transaction(Generic[C]):
    """Open while its task runs. psycopg's own block around it refuses a commit or rollback by the task itself."""

    conn: C
    block: Any  # psycopg's Transaction or AsyncTransaction
    began: float  # by the database's clock
    role: str  # as the setting has it: "none", unless the URL says otherwise


class TaskSettings(NamedTuple):
    """The task's own settings, as they were when it returned."""

    is_same_transaction: bool
    search_path: str
    role: str


class Transactions:
    """At most one for each task that runs, so at most as many connections as there are slots. Each is made for its task
    and closed with it: what the task has left running, or has set, must not reach the next one's transaction.
    """

    def __init__(
        self,
        config: Config,
        statements: WorkerStatements,
        clock: DatabaseClock,
        decide: Callable[[Execution, Outcome, datetime], Settlement],
        take_progress: Callable[[Execution], str | None],
        *,
        witness: Witness,
    ) -> None:
        self._dsn = conninfo.make_conninfo(connection_string(config), application_name="tasklib:task")
        self._seconds = config.database_timeout_seconds
        self._statements = statements
        self.clock = clock
        self._decide = decide
        self._take_progress = take_progress
        self._witness = witness
        self._lock = threading.Lock()

    def open(self, execution: Execution) -> BoundedConnection:
        if execution.is_coroutine:
            raise InvalidOptions("in an async function: await current_task().async_connection()")
        with self._lock:
            opening: threading.Lock = execution.opening or threading.Lock()
            execution.opening = opening
        with opening:  # the task may have threads of its own
            _refuse_ended(execution)
            if execution.transaction is None:
                with _measured_wait(execution):
                    execution.transaction = self._begin_when_possible(execution)
                self._tell_connected(execution)
            conn: BoundedConnection = execution.transaction.conn
            return conn

    async def open_async(self, execution: Execution) -> WatchedConnection:
        if not execution.is_coroutine:
            raise InvalidOptions("in a function that is not async: current_task().connection")
        execution.opening = execution.opening or asyncio.Lock()
        async with execution.opening:  # two may ask at once
            _refuse_ended(execution)
            if execution.transaction is None:
                with _measured_wait(execution):
                    execution.transaction = await self._begin_when_possible_async(execution)
                self._tell_connected(execution)
            conn: WatchedConnection = execution.transaction.conn
            return conn

    def end(self, execution: Execution, outcome: Outcome) -> Outcome:
        """The function has ended so: commit, or roll back. The answer is what the outcome is after that."""
        execution.has_ended = True
        if execution.opening is None:
            return outcome
        with execution.opening:
            transaction = execution.transaction
        outcome = _without_the_wait(execution, outcome)
        return outcome if transaction is None else self._end(execution, outcome, transaction)

    def _end(self, execution: Execution, outcome: Outcome, transaction: Transaction[BoundedConnection]) -> Outcome:
        conn = transaction.conn
        with _alone_on(conn, self._seconds if isinstance(outcome, Completed) else 0.0) as is_alone:
            conn.deadline = time.monotonic() + self._seconds
            try:
                if isinstance(outcome, Completed):
                    return self._complete(execution, outcome, transaction) if is_alone else _spoilt(_BUSY)
            except Exception as error:  # noqa: BLE001 - the thread, its slot and its task would be lost
                return _outcome_of(execution, error)
            finally:
                _close(transaction, is_alone=is_alone)
                self._witness.disconnected(_role(execution))
            return outcome

    def _complete(
        self, execution: Execution, outcome: Completed, transaction: Transaction[BoundedConnection]
    ) -> Outcome:
        conn = transaction.conn
        if reason := _unfit(conn):
            return _spoilt(reason)
        settings = send(conn, [self._take_over(transaction)])[0]
        if not settings.is_same_transaction:
            return _spoilt(_ENDED)
        if not send(conn, [self._completion(execution, outcome)])[0]:
            transaction.block.__exit__(psycopg.Rollback, psycopg.Rollback(), None)
            conn.execute(_OUR_SETTINGS)
            held = send(conn, [self._statements.arguments(execution.task)])[0]
            conn.rollback()
            return _not_completed(execution, is_held=held is not None)
        with _left_to_the_commit():
            send(conn, [_give_back(settings)])
        execution.is_committed = None  # from here on nobody knows, until the answer comes
        transaction.block.__exit__(None, None, None)
        execution.is_committed = True
        return outcome

    async def end_async(self, execution: Execution, outcome: Outcome) -> Outcome:
        """Not to be cancelled in the middle of a COMMIT."""
        execution.has_ended = True
        if execution.opening is None:
            return outcome
        ending = asyncio.ensure_future(self._end_async(execution, outcome))
        while not ending.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(ending)
        return ending.result()

    async def _end_async(self, execution: Execution, outcome: Outcome) -> Outcome:
        assert execution.opening is not None  # noqa: S101 - see above
        async with execution.opening:
            transaction = execution.transaction
        outcome = _without_the_wait(execution, outcome)
        if transaction is None:
            return outcome
        try:
            if isinstance(outcome, Completed):
                async with asyncio.timeout(self._seconds):
                    return await self._complete_async(execution, outcome, transaction)
        except Exception as error:  # noqa: BLE001 - as above
            return _outcome_of(execution, error)
        finally:
            await _close_async(transaction, self._seconds)
            self._witness.disconnected(_role(execution))
        return outcome

    async def _complete_async(
        self, execution: Execution, outcome: Completed, transaction: Transaction[WatchedConnection]
    ) -> Outcome:
        conn = transaction.conn
        if reason := await _unfit_async(conn, self._seconds / 2):
            return _spoilt(reason)
        settings = (await send_async(conn, [self._take_over(transaction)]))[0]
        if not settings.is_same_transaction:
            return _spoilt(_ENDED)
        if not (await send_async(conn, [self._completion(execution, outcome)]))[0]:
            await transaction.block.__aexit__(psycopg.Rollback, psycopg.Rollback(), None)
            await conn.execute(_OUR_SETTINGS)
            held = (await send_async(conn, [self._statements.arguments(execution.task)]))[0]
            await conn.rollback()
            return _not_completed(execution, is_held=held is not None)
        with _left_to_the_commit():
            await send_async(conn, [_give_back(settings)])
        execution.is_committed = None
        await transaction.block.__aexit__(None, None, None)
        execution.is_committed = True
        return outcome

    def _tell_connected(self, execution: Execution) -> None:
        assert execution.transaction is not None  # noqa: S101 - it was just made
        conn: BoundedConnection | WatchedConnection = execution.transaction.conn
        self._witness.connected(_role(execution), 0 if conn.is_pooled else conn.info.backend_pid)

    def _take_over(self, transaction: Transaction[Any]) -> Statement[TaskSettings]:
        idle_limit = str(max(int(self._seconds * 1000), 1))
        parameters = (idle_limit, SEARCH_PATH, transaction.role, transaction.began)
        return Statement(_TAKE_OVER, parameters, lambda rows: TaskSettings(*rows[0][:3]))

    def _completion(self, execution: Execution, outcome: Completed) -> Statement[list[UUID]]:
        now = self.clock.now()
        settled = settlement_json(
            execution.task, self._decide(execution, outcome, now), started_at=execution.started_by(self.clock),
            finished_at=now,
            progress=self._take_progress(execution),
        )  # fmt: skip
        return self._statements.settle(execution.task.worker_id, [settled])

    def _begin_when_possible(self, execution: Execution) -> Transaction[BoundedConnection]:
        """A server that has no connection left, or is not there, is no fault of the task's: it waits, for as long as it
        may run.
        """
        while True:
            try:
                return self._begin()
            except psycopg.Error as error:
                time.sleep(_pause_after(execution, error))
            _refuse_stopped(execution)

    async def _begin_when_possible_async(self, execution: Execution) -> Transaction[WatchedConnection]:
        while True:
            try:
                return await self._begin_async()
            except psycopg.Error as error:
                await asyncio.sleep(_pause_after(execution, error))
            _refuse_stopped(execution)

    def _begin(self) -> Transaction[BoundedConnection]:
        conn = BoundedConnection.connect(self._dsn, context=psycopg.adapters)
        try:
            conn.deadline = time.monotonic() + self._seconds
            meet(conn, {})
            conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED  # its row is changed by the worker meanwhile
            block = conn.transaction()
            block.__enter__()
            began, role = send(conn, [_BEGINNING])[0]
            conn.deadline = math.inf  # from here on it is the task's, which has a limit of its own
        except BaseException:  # an interrupt of the task, too
            conn.pgconn.finish()
            raise
        return Transaction(conn, block, began, role)

    async def _begin_async(self) -> Transaction[WatchedConnection]:
        conn = await WatchedConnection.connect(self._dsn, context=psycopg.adapters)
        try:
            await meet_async(conn, {})
            conn.deadline = time.monotonic() + self._seconds
            await conn.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
            block = conn.transaction()
            await block.__aenter__()
            began, role = (await send_async(conn, [_BEGINNING]))[0]
            conn.deadline = math.inf
        except BaseException:
            conn.pgconn.finish()
            raise
        return Transaction(conn, block, began, role)


@contextlib.contextmanager
def _measured_wait(execution: Execution) -> Iterator[None]:
    """A connection that was opened at once was not waited for, however slow that was."""
    began = time.monotonic()
    was_opened_at_once = False
    try:
        yield
        was_opened_at_once = execution.failed_connects == 0
    finally:
        if not was_opened_at_once:
            execution.waited_seconds += time.monotonic() - began


def _without_the_wait(execution: Execution, outcome: Outcome) -> Outcome:
    """A task that has waited for its connection has not used its time itself, also if it got one at last: it is given
    back at no cost, however often. What must not run twice does not, all the same.
    """
    limit = execution.task.timeout_seconds
    if not isinstance(outcome, TimedOut) or limit is None or execution.task.on_crash == "fail":
        return outcome
    return Snoozed(delay_of_free_run(execution.task)) if execution.waited_seconds > WAITED_SHARE * limit else outcome


def _pause_after(execution: Execution, error: psycopg.Error) -> float:
    """Never twice the same: many tasks must not come back at the same moment."""
    if not is_connection_lost(error):
        raise error
    execution.failed_connects += 1
    if execution.failed_connects == 1:
        log.warning(
            "transaction.waits",
            task=execution.task.name,
            task_id=execution.id,
            error=str(error).strip().partition("\n")[0],
            hint="it waits for a connection of its own, within its time limit",
        )
    longest = min(FIRST_PAUSE_SECONDS * 2.0 ** min(execution.failed_connects - 1, 10), LONGEST_PAUSE_SECONDS)
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing


def _refuse_stopped(execution: Execution) -> None:
    """The interrupt lands in the task's own thread, and this may be another one that it has started."""
    _refuse_ended(execution)
    if execution.interrupt_kind is not None and not execution.is_coroutine:
        raise execution.interrupt_kind


@contextlib.contextmanager
def _alone_on(conn: BoundedConnection, seconds: float) -> Iterator[bool]:
    """Nobody else sends anything there meanwhile: what the task has left running waits, and then finds it closed.
    False: something holds psycopg's lock for longer than these seconds, or for ever, as an open stream does.
    """
    lock, first = conn.lock, min(seconds, TURN_SECONDS)
    is_alone = lock.acquire(timeout=first) or (
        seconds > 0 and not has_open_stream(conn) and lock.acquire(timeout=seconds - first)
    )
    if not is_alone:
        yield False
        return
    conn.lock = ours = cast("threading.Lock", threading.RLock())  # psycopg takes it for each statement
    with ours:
        yield True
    lock.release()


def _unfit(conn: BoundedConnection | WatchedConnection) -> str | None:
    """Why nothing can be completed on it, whatever is sent."""
    if conn.closed:
        return _CLOSED
    if conn.info.pipeline_status != PipelineStatus.OFF:
        return _PIPELINE
    return _BUSY if conn.info.transaction_status == TransactionStatus.ACTIVE else None


async def _unfit_async(conn: WatchedConnection, seconds: float) -> str | None:
    if conn.lock.locked() and has_open_stream(conn):
        return _BUSY
    try:
        async with asyncio.timeout(seconds), conn.lock:
            return _unfit(conn)
    except TimeoutError:
        return _BUSY


def _close(transaction: Transaction[BoundedConnection], *, is_alone: bool) -> None:
    """What is still open is rolled back; what cannot be is rolled back by the server, when it is closed. That needs no
    lock of psycopg's.
    """
    conn = transaction.conn
    if not is_alone and not has_open_stream(conn):
        _leave_to_its_user(conn)
        return
    try:
        if not is_alone or conn.info.transaction_status == TransactionStatus.ACTIVE:  # in the middle of a query
            conn.abandon()
        elif _is_to_roll_back(conn):
            transaction.block.__exit__(psycopg.Rollback, psycopg.Rollback(), None)
    except Exception as error:  # noqa: BLE001 - see above
        _tell_broken(error)
    conn.pgconn.finish()


def _leave_to_its_user(conn: BoundedConnection) -> None:
    """Another thread is inside of libpq: to close the connection under it would crash the process. Its own wait looks
    at the deadline ten times a second, has the query cancelled, and closes the connection.
    """
    conn.deadline = -math.inf
    if conn.lock.acquire(timeout=LEAVE_SECONDS):
        conn.lock.release()
        conn.pgconn.finish()


async def _close_async(transaction: Transaction[WatchedConnection], seconds: float) -> None:
    conn = transaction.conn
    try:
        async with asyncio.timeout(seconds):
            if conn.info.transaction_status == TransactionStatus.ACTIVE:
                await conn.cancel_safe(timeout=seconds)
            elif _is_to_roll_back(conn):
                await transaction.block.__aexit__(psycopg.Rollback, psycopg.Rollback(), None)
    except Exception as error:  # noqa: BLE001 - as above
        _tell_broken(error)
    conn.pgconn.finish()


def _is_to_roll_back(conn: BoundedConnection | WatchedConnection) -> bool:
    is_idle = conn.info.transaction_status == TransactionStatus.IDLE
    return not conn.closed and not is_idle and conn.info.pipeline_status == PipelineStatus.OFF


def _give_back(settings: TaskSettings) -> Statement[None]:
    return Statement(_GIVE_BACK, (settings.search_path, settings.role), lambda _: None)


def _left_to_the_commit() -> contextlib.suppress:
    """What the task has left running may have aborted the transaction since its completion: the COMMIT shows it."""
    return contextlib.suppress(psycopg.errors.InFailedSqlTransaction)


def _role(execution: Execution) -> str:
    return f"task {execution.id}"


def _refuse_ended(execution: Execution) -> None:
    if execution.has_ended:
        raise NoCurrentTask(f"the task {execution.id} has ended: its connection went with it")


def _not_completed(execution: Execution, *, is_held: bool) -> Outcome:
    """Its row was not as it must be; all is rolled back by now. If the worker holds the task still, it was the task
    itself that had changed the row. If not, another worker has it.
    """
    if is_held:
        return _spoilt(_OWN_ROW)
    log.warning("lease.lost", task=execution.task.name, task_id=execution.id, token=execution.task.fencing_token)
    return Interrupted(began=True)


def _outcome_of(execution: Execution, error: Exception) -> Outcome:
    """The function has returned, and its work was not committed; or, if the connection broke, perhaps was. Then the
    task is given back at no cost, which changes nothing if it was. Whatever would happen again is a failure.
    """
    task = execution.task
    if isinstance(error, psycopg.errors.InFailedSqlTransaction):
        return _spoilt(_ABORTED)
    if isinstance(error, UnicodeEncodeError):
        return _spoilt(_ENCODING.format(error.encoding))
    if _is_lost(execution, error):
        _tell_broken(error, task=task.name, task_id=task.id)
        if has_free_runs(task):
            return Interrupted(began=True)
    return outcome_of(execution, error)


def _is_lost(execution: Execution, error: Exception) -> bool:
    """The connection is. An error without a code may as well be psycopg's, about how it was used."""
    if isinstance(error, TimeoutError):
        return True
    if not isinstance(error, psycopg.Error) or not is_connection_lost(error):
        return False
    transaction = execution.transaction
    return error.sqlstate is not None or transaction is None or transaction.conn.pgconn.status != ConnStatus.OK


_CLOSED = "current_task().connection was closed, by the task or by the server, before the task had ended"
_ENDED = (
    "the transaction of current_task().connection was ended by a COMMIT or ROLLBACK in the task's own SQL: what was "
    "written before it is not part of the completion. Leave both to the worker."
)
_BUSY = (
    "current_task().connection was still in use when the task returned: nothing could be completed there. Read a "
    "stream() to its end or close it, leave the `with` block of a COPY, and wait for threads that use the connection."
)
_PIPELINE = (
    "a pipeline of current_task().connection was still open when the task returned. Use "
    "`with connection.pipeline():` (`async with` in an async function), and return after the block."
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
    "an error on current_task().connection was not let through: PostgreSQL has given up the transaction, and nothing "
    "of it can be committed. Use `with connection.transaction():` around what may fail."
)


def _spoilt(reason: str) -> Failed:
    """Nothing can be completed in this transaction any more."""
    return Failed(problem_of(InvalidOptions(reason), code="TRANSACTION_SPOILT"))


def _tell_broken(error: Exception, **about: object) -> None:
    log.warning("transaction.broken", error=str(error).partition("\n")[0] or type(error).__name__, **about)
