"""A connection to PostgreSQL as the library wants it: never waits for ever, never takes a doubtful
commit for a certain one, and speaks of its failures in our errors.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psycopg
from psycopg import conninfo, errors
from psycopg.types.json import set_json_loads
from pydantic_core import from_json

from tasklib.errors import (
    DatabaseError,
    DatabaseUnavailable,
    IdempotencyConflict,
    InvalidConfig,
    InvalidOptions,
    SchemaMissing,
    TasklibError,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from tasklib.config import Config

RV = TypeVar("RV")

# A peer that vanished without a word is noticed within 30 s; the system's defaults take hours.
# What the user's URL says comes first.
_CONNECTION_DEFAULTS = {
    "application_name": "tasklib",
    "connect_timeout": "10",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
}


def connection_string(config: Config) -> str:
    try:
        given = conninfo.conninfo_to_dict(config.database_url)
    except psycopg.ProgrammingError:
        # libpq's own message repeats parts of the string, and with them the password.
        raise InvalidConfig(
            "database_url cannot be read: write postgresql://user:password@host:port/database or libpq's key=value form"
        ) from None
    return conninfo.make_conninfo("", **{**_CONNECTION_DEFAULTS, **given})


class DeadlinePassed(psycopg.OperationalError):
    """No answer came in time. What the server did, or will do, is not known."""


class CommitDoubtful(psycopg.OperationalError):
    """The server committed, but stopped waiting for its synchronous standby, and said so only in a warning."""


class BoundedConnection(psycopg.Connection[Any]):
    """Psycopg's sync connection has no time limit on the client's side; this one has: `deadline`, in monotonic time."""

    deadline = float("inf")
    doubt: str | None = None

    def wait(self, gen: Generator[Any, Any, RV], *args: Any, **kwargs: Any) -> RV:
        return super().wait(self._until_deadline(gen), *args, **kwargs)

    def _until_deadline(self, gen: Generator[Any, Any, RV]) -> Generator[Any, Any, RV]:
        try:
            wanted = next(gen)
            while True:
                # psycopg comes back here ten times a second, also when nothing has happened.
                ready = yield wanted
                if time.monotonic() > self.deadline:
                    raise DeadlinePassed("no answer from PostgreSQL in time")
                wanted = gen.send(ready)
        except StopIteration as stop:
            return cast("RV", stop.value)


class WatchedConnection(psycopg.AsyncConnection[Any]):
    doubt: str | None = None


def prepare_connection(conn: BoundedConnection | WatchedConnection) -> None:
    """What each connection of ours gets when it is new."""
    set_json_loads(from_json, conn)

    def notice(diagnostic: errors.Diagnostic) -> None:
        # Our statements raise no warnings of their own. This one comes when the wait for a synchronous
        # standby is cancelled: the server reports success all the same.
        if diagnostic.severity_nonlocalized == "WARNING":
            conn.doubt = diagnostic.message_primary or "warning"

    conn.add_notice_handler(notice)


def raise_doubt(conn: BoundedConnection | WatchedConnection) -> None:
    doubt, conn.doubt = conn.doubt, None
    if doubt is not None:
        raise CommitDoubtful(doubt)


def is_connection_lost(error: psycopg.Error) -> bool:
    """The connection is of no use any more, or could not be made; another one may work."""
    if isinstance(error, errors.AdminShutdown | errors.CrashShutdown | errors.CannotConnectNow):
        return True
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and error.sqlstate is None


def is_passing_conflict(error: psycopg.Error) -> bool:
    return isinstance(error, errors.SerializationFailure | errors.DeadlockDetected)


def translate(error: psycopg.Error) -> TasklibError:
    """Our error for PostgreSQL's. The original stays behind it as the cause."""
    message = error.diag.message_primary or str(error).strip()
    if error.sqlstate == "TL409":
        return IdempotencyConflict(f"{message}. {error.diag.message_hint}")
    if error.sqlstate == "TL400":
        return InvalidOptions(" ".join(filter(None, [message, error.diag.message_hint])))
    if isinstance(error, errors.CheckViolation | errors.NotNullViolation | psycopg.DataError):
        return InvalidOptions(f"PostgreSQL refused a value: {message}")
    if isinstance(error, errors.InvalidSchemaName | errors.UndefinedTable | errors.UndefinedFunction):
        return SchemaMissing(f"{message}. Run `tasklib migrate`.")
    if is_connection_lost(error) or isinstance(error, errors.TooManyConnections):
        return DatabaseUnavailable(f"PostgreSQL cannot be reached: {message}")
    return DatabaseError(message, sqlstate=error.sqlstate)
