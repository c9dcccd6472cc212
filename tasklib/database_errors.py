"""The meaning of PostgreSQL's errors: whether a retry may help, and which of our errors a user gets."""

from __future__ import annotations

import psycopg
from psycopg import errors

from tasklib.errors import (
    DatabaseError,
    DatabaseUnavailable,
    IdempotencyConflict,
    InvalidOptions,
    SchemaMissing,
    TasklibError,
    UnknownQueue,
    WorkerTooOld,
)

# Shutdown by an administrator, crash, start-up; the database was dropped; an idle session or transaction was ended; too
# many connections, which a pooler may report in the middle of a session.
_CONNECTION_ENDED = frozenset({"57P01", "57P02", "57P03", "57P04", "57P05", "25P03", "25P04", "53300"})
# Read-only; no privilege (the session may have another role); cancelled by a time limit; a plan whose types have
# changed or whose objects are gone; a schema, table, function or type that is not visible.
_SESSION_STATES = frozenset({"25006", "42501", "57014", "0A000", "XX000", "3F000", "42P01", "42883", "42704"})
_RAISED_BY_US = {  # by the functions in tasklib/sql
    "TL400": InvalidOptions,
    "TL404": UnknownQueue,
    "TL409": IdempotencyConflict,
    "TL426": WorkerTooOld,
    "TL500": InvalidOptions,
}
_VALUE_REFUSED = frozenset({"23502", "23514"})  # not null, check
_SCHEMA_MISSING = frozenset({"3F000", "42P01", "42883"})  # schema, table, function
_NO_PRIVILEGE = "42501"
_ABORTED = "25P02"


def is_connection_lost(error: psycopg.Error) -> bool:
    """The connection cannot be used any more, or could not be made. A new one may work."""
    if error.sqlstate is not None:
        return _is_end(error.sqlstate)
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)


def may_be_the_session(error: psycopg.Error) -> bool:
    """The error may concern only this session, and a new one may work. A session keeps the settings of its role and
    database as they were when it began, it stays connected to a server that has become a standby, and its plans may
    name objects that were dropped since.
    """
    return error.sqlstate in _SESSION_STATES


def is_passing_conflict(error: psycopg.Error) -> bool:
    return isinstance(error, errors.SerializationFailure | errors.DeadlockDetected)


def is_about_rows(error: psycopg.Error) -> bool:
    """PostgreSQL or a trigger refused a value or a row; without that row the statement would succeed. An error code
    that psycopg does not know comes from a trigger.
    """
    refusals = (
        psycopg.DataError, psycopg.IntegrityError, errors.RaiseException, errors.ProgramLimitExceeded,
        errors.DataCorrupted,
    )  # fmt: skip
    return isinstance(error, refusals) or (type(error) is psycopg.DatabaseError and error.sqlstate is not None)


def translate(error: psycopg.Error) -> TasklibError:
    """Our error for an error of psycopg's."""
    message = error.diag.message_primary or str(error).strip()
    if error.sqlstate is not None:
        return error_for_sqlstate(error.sqlstate, message, error.diag.message_hint)
    if isinstance(error, psycopg.DataError):
        return InvalidOptions(f"PostgreSQL refused a value: {message}")
    if is_connection_lost(error):
        return DatabaseUnavailable(f"PostgreSQL cannot be reached: {message}")
    return DatabaseError(message)


def error_for_sqlstate(sqlstate: str, message: str, hint: str | None = None) -> TasklibError:
    """Our error for what PostgreSQL itself reports, which is the same with every driver."""
    if sqlstate in _RAISED_BY_US:
        return _RAISED_BY_US[sqlstate](f"{message}. {hint}" if hint else message)
    if sqlstate in _VALUE_REFUSED or sqlstate.startswith("22"):
        return InvalidOptions(f"PostgreSQL refused a value: {message}")
    if sqlstate in _SCHEMA_MISSING:
        return SchemaMissing(f"{message}. Run `tasklib migrate`.")
    if _is_end(sqlstate):
        return DatabaseUnavailable(f"PostgreSQL cannot be reached: {message}")
    if sqlstate == _NO_PRIVILEGE:
        message = f"the role of this connection may not do this: {message}"
    elif sqlstate == _ABORTED:
        message = (
            f"{message}: an earlier statement of this transaction failed, so PostgreSQL refuses all further ones. Roll "
            f"it back and begin again; run statements that may fail in a savepoint"
        )
    return DatabaseError(message, sqlstate=sqlstate)


def _is_end(sqlstate: str) -> bool:
    return sqlstate in _CONNECTION_ENDED or sqlstate.startswith("08")
