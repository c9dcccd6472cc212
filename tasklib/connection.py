"""The library's own connections to PostgreSQL.

They never wait longer than their deadline, and they report a commit that the server did not fully confirm. `meet`
prepares a new connection: it finds out whether a pooler is in between, and applies the settings of the session.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import json
import math
import threading
from decimal import Decimal
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any, LiteralString, NamedTuple, Self, TypeVar, cast

import psycopg
from psycopg import capabilities, errors, generators, postgres, sql, waiting
from psycopg.adapt import AdaptersMap
from psycopg.rows import tuple_row
from psycopg.types import TypesRegistry
from psycopg.types.array import ListBinaryDumper, register_all_arrays
from psycopg.types.json import set_json_loads
from pydantic_core import from_json

from tasklib.clock import time
from tasklib.strict_json import MAX_NUMBER_DIGITS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from psycopg.pq.abc import PGconn


T = TypeVar("T")
RV = TypeVar("RV")
C = TypeVar("C", bound="psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]")
CANCEL_SECONDS = 2.0
HEAD_START_SECONDS = 0.2  # for the request to cancel, before the connection is closed
GREETING_SECONDS = 10.0
LOOK_SECONDS = 0.1  # how often a wait checks the deadline


# Where PostgreSQL looks for a name without a schema in our own sessions. The default includes `public`, where others
# may create an operator that fits our columns better than PostgreSQL's own; it would run with our privileges. pg_temp
# is named last, since PostgreSQL searches it first if it is not named.
SEARCH_PATH: LiteralString = "pg_catalog, pg_temp"
OWN_SETTINGS = {"search_path": SEARCH_PATH}

# Every statement of a worker uses an index. A plan that was made while the table was empty would read the whole table,
# and be kept until the first ANALYZE; the enable_* settings rule that out. The statements are guarded, so they need no
# stricter isolation, in which they might fail.
# jit: before PostgreSQL 18, a plan that breaks an enable_* setting gets an enormous cost, for which a server with LLVM
# (Debian's has it) compiles the plan every time: 0.2 to 1.1 s for a statement that takes 2 ms.
# plan_cache_mode: by default PostgreSQL plans the claim anew each time, since that plan looks a little cheaper. It took
# 0.8 ms of the 1.4 ms of an empty claim.
WORKER_SETTINGS = OWN_SETTINGS | {
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_bitmapscan": "off",
    "default_transaction_isolation": "read committed",
}


class DeadlinePassed(psycopg.OperationalError):
    """No answer came before the deadline. Whether the server did what was asked is not known."""


class CommitDoubtful(psycopg.OperationalError):
    """The server committed, but stopped waiting for its synchronous standby. It says so only in a warning."""


class Prepared(NamedTuple):
    """The one statement of a session that the library prepared itself. Each has a new number, since the server may have
    prepared one whose call was cancelled.
    """

    number: int
    sql: str | None  # None: it is not known whether the server has prepared it

    @property
    def name(self) -> bytes:
        return b"tasklib_%d" % self.number


class _WithDeadline:
    """Adds a time limit on the client's side, which psycopg does not have: `deadline`, in monotonic time."""

    pgconn: PGconn
    deadline = math.inf
    opened_at = -math.inf  # monotonic; before the connect, since a session reads the role's settings while it begins
    doubt: str | None = None
    is_pooled: bool = False  # behind a pooler: the next transaction may use another connection of the server
    prepared: Prepared | None = None

    def _look_at_deadline(self) -> None:
        if time.monotonic() > self.deadline:
            self.abandon()
            raise DeadlinePassed("no answer from PostgreSQL in time")

    def abandon(self) -> None:
        """Ask the server to cancel the statement, since its backend would go on otherwise. Then close the connection,
        since an answer may still come. A thread asks, so that the caller does not wait for a server that cannot be
        reached. It gets a short head start: a pooler can cancel nothing once the connection is closed.
        """
        self.deadline = math.inf
        with contextlib.suppress(psycopg.Error, RuntimeError):  # closed already; no thread starts while Python ends
            request = _cancel_request(self.pgconn)
            asking = threading.Thread(target=_ask, args=[request], name="tasklib-cancel", daemon=True)
            asking.start()
            asking.join(HEAD_START_SECONDS)
        self.pgconn.finish()


def _ask(request: Callable[[], None]) -> None:
    with contextlib.suppress(psycopg.Error):  # a server that cannot be reached notices the closed connection itself
        request()


def _cancel_request(pgconn: PGconn) -> Callable[[], None]:
    """A function that asks the server to cancel. It works after the connection was closed, too."""
    if not capabilities.has_cancel_safe():
        return pgconn.get_cancel().cancel
    request = pgconn.cancel_conn()
    give_up_at = time.monotonic() + CANCEL_SECONDS

    def look() -> None:
        if time.monotonic() > give_up_at:
            raise DeadlinePassed("PostgreSQL cannot be asked to stop")

    def ask() -> None:
        request.start()
        waiting.wait_conn(with_looks(generators.cancel(request), look), interval=LOOK_SECONDS)

    return ask


def with_looks(gen: Generator[Any, Any, RV], look: Callable[[], None]) -> Generator[Any, Any, RV]:
    """Call `look` whenever a generator of psycopg's waits: it is resumed ten times a second, even if no data came."""
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            look()
            wanted = gen.send(ready)
    except StopIteration as stop:
        return cast("RV", stop.value)


@functools.cache
def own_adapters() -> AdaptersMap:
    """How our values are written and our answers are read: psycopg's defaults. An application may have changed
    `psycopg.adapters`, which holds for all connections of its process.
    """
    types = TypesRegistry()
    postgres.register_default_types(types)
    made = AdaptersMap(types=types)
    postgres.register_default_adapters(made)
    register_all_arrays(made)
    set_json_loads(load_json, made)
    made.register_dumper(list, ListBinaryDumper)  # a fifth of the price of text
    return made


class BoundedConnection(_WithDeadline, psycopg.Connection[Any]):
    """Uses the library's adapters. A connection for the application's use is made with `context=psycopg.adapters`."""

    @classmethod
    def connect(cls, *args: Any, **kwargs: Any) -> Self:
        opened_at = time.monotonic()
        conn = super().connect(*args, **{"context": own_adapters(), **kwargs})
        conn.opened_at = opened_at
        return conn

    def wait(self, gen: Generator[Any, Any, RV], *args: Any, **kwargs: Any) -> RV:
        return super().wait(with_looks(gen, self._look_at_deadline), *args, **kwargs)


class BoundedAsyncConnection(_WithDeadline, psycopg.AsyncConnection[Any]):
    @classmethod
    async def connect(cls, *args: Any, **kwargs: Any) -> Self:
        opened_at = time.monotonic()
        conn = await super().connect(*args, **{"context": own_adapters(), **kwargs})
        conn.opened_at = opened_at
        return conn

    async def wait(self, gen: Generator[Any, Any, RV], *args: Any, **kwargs: Any) -> RV:
        return await super().wait(with_looks(gen, self._look_at_deadline), *args, **kwargs)


def prepare_connection(conn: BoundedConnection | BoundedAsyncConnection) -> None:
    """Make a new connection notice commits that are in doubt."""

    def notice(diagnostic: errors.Diagnostic) -> None:
        # A server that is cancelled while it waits for its synchronous standby still reports success, and tells of it
        # in a warning. The warning's text depends on the language; the name of the source function does not.
        if diagnostic.source_function == "SyncRepWaitForLSN":
            conn.doubt = diagnostic.message_primary or "no word from the synchronous standby"

    conn.add_notice_handler(notice)


def meet(conn: BoundedConnection, settings: Mapping[str, str] = OWN_SETTINGS) -> None:
    """Prepare a new connection, and find out whether a pooler is in between. If there is none, the session is ours
    alone, and gets the settings.
    """
    prepare_connection(conn)
    deadline = conn.deadline
    conn.deadline = min(deadline, time.monotonic() + GREETING_SECONDS)
    with with_own_adapters(conn.cursor(row_factory=tuple_row)) as cursor:
        _note_pooler(conn, cursor.execute(*_greeting(conn, settings)).fetchone())
    if not conn.autocommit:
        conn.rollback()
    conn.deadline = deadline


async def meet_async(conn: BoundedAsyncConnection, settings: Mapping[str, str] = OWN_SETTINGS) -> None:
    prepare_connection(conn)
    conn.deadline = time.monotonic() + GREETING_SECONDS
    async with with_own_adapters(conn.cursor(row_factory=tuple_row)) as cursor:
        await cursor.execute(*_greeting(conn, settings))
        _note_pooler(conn, await cursor.fetchone())
    if not conn.autocommit:
        await conn.rollback()
    conn.deadline = math.inf


def _greeting(
    conn: BoundedConnection | BoundedAsyncConnection, settings: Mapping[str, str]
) -> tuple[sql.Composed, list[int]]:
    """A query that returns the server's process id, and sets the settings in the same round trip if the session is ours
    alone. Behind a pooler it must not: the next client would inherit them. The connection parameter `options` could set
    them too, but PgBouncer refuses it. Every name has its schema, since the search_path is not ours yet.
    """
    is_direct = sql.SQL("pg_catalog.pg_backend_pid() operator(pg_catalog.=) %s")
    given = sql.SQL("").join(
        sql.SQL(", case when {} then pg_catalog.set_config({}, {}, false) end").format(is_direct, name, value)
        for name, value in settings.items()
    )
    return sql.SQL("select pg_catalog.pg_backend_pid()") + given, [conn.info.backend_pid] * len(settings)


def set_local(settings: Mapping[str, str]) -> bytes:
    """The query that applies the settings to one transaction, which is necessary behind a pooler."""
    given = [sql.SQL("pg_catalog.set_config({}, {}, true)").format(name, value) for name, value in settings.items()]
    return (sql.SQL("select ") + sql.SQL(", ").join(given)).as_bytes(own_adapters())


def _note_pooler(conn: BoundedConnection | BoundedAsyncConnection, greeted: Sequence[Any] | None) -> None:
    """A pooler invents a process id for each client, so that it can tell whose statement a request cancels."""
    conn.is_pooled = greeted is None or greeted[0] != conn.info.backend_pid
    if conn.is_pooled:
        conn.prepare_threshold = None


def with_own_adapters(cursor: C) -> C:
    """Psycopg copies a connection's adapters for each cursor. This replaces the copy, not those of the connection."""
    cursor._adapters = own_adapters()  # noqa: SLF001 - there is no public way to begin with other ones
    return cursor


def has_open_stream(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Whether a stream() or a COPY is open on the connection, and is not being read at this moment. Each is a generator
    of psycopg's that holds the connection's lock, and can be found only among all objects of the process. That is slow:
    ask only if the lock is held.
    """
    for each in gc.get_objects():
        code, frame = None, None
        if type(each) is GeneratorType and not each.gi_running:
            code, frame = each.gi_code, each.gi_frame
        elif type(each) is AsyncGeneratorType and not each.ag_running:
            code, frame = each.ag_code, each.ag_frame
        if code in _STREAMS and frame is not None and frame.f_locals["self"].connection is conn:
            return True
    return False


_STREAMS = frozenset(
    inspect.unwrap(method).__code__
    for kind in (psycopg.Cursor, psycopg.AsyncCursor)
    for method in (kind.stream, kind.copy)
)


def load_json(data: str | bytes) -> Any:
    """Read any JSON that PostgreSQL stores: one row that Python cannot read must not hide the others of a list.

    A number that no int or float can hold becomes a Decimal. A value that is nested too deeply becomes a note about it.
    """
    try:
        return from_json(data)
    except ValueError as error:
        unreadable = {"unreadable": str(error)}
    try:
        return json.loads(data, parse_int=_whole_number)
    except (ValueError, RecursionError):
        return unreadable


def _whole_number(digits: str) -> int | Decimal:
    return int(digits) if len(digits) <= MAX_NUMBER_DIGITS else Decimal(digits)


def raise_doubt(conn: BoundedConnection | BoundedAsyncConnection) -> None:
    doubt, conn.doubt = conn.doubt, None
    if doubt is not None:
        raise CommitDoubtful(doubt)
