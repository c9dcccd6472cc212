"""Brings the schema to the library's version, and decides whether the library may use the schema that it finds.

Invariant: everything is applied in one transaction, under one advisory lock that ends with it. However many migrators
start at once, and wherever one is killed, the schema is as before or as after.

A migration is `NNNN_name.pre.sql` or `.post.sql`. A `pre` migration only adds, so that libraries of the version before
go on working: it runs before a rollout. A `post` migration removes what they need, and runs after the rollout.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, LiteralString, cast

import psycopg

from tasklib.clock import time
from tasklib.config import Config
from tasklib.connection import SEARCH_PATH, BoundedConnection
from tasklib.connection_string import connection_string
from tasklib.database_errors import translate
from tasklib.errors import (
    InvalidConfig,
    SchemaBusy,
    SchemaChanged,
    SchemaMissing,
    SchemaOutdated,
    SchemaTooNew,
    TasklibError,
)
from tasklib.sql import folder, in_schema, queries

if TYPE_CHECKING:
    from collections.abc import Sequence

Phase = Literal["pre", "post"]
LOCK_WAIT = "60s"
TABLE_WAIT = "5s"  # for a table's lock: all later statements on the table wait behind the migration

# Grows with every change of a file in sql/functions; a test compares it with their checksum. A checksum alone has no
# order: during a rollout, each of two versions would take the other's functions for outdated.
FUNCTIONS_REVISION = 18
# PostgreSQL resolves the names in the schema's own expressions when they are created: none must be found in `public`.
# `local`, for this transaction only, since a pooler may be in between.
_OWN_PATH: LiteralString = f"set local search_path = {SEARCH_PATH}"
_FILE_NAME = re.compile(r"(\d{4})_(\w+)\.(pre|post)")


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    name: str
    phase: Phase
    sql: str

    @property
    def checksum(self) -> str:
        return _checksum(self.sql)


@dataclass(frozen=True, slots=True)
class Applied:
    """One row of schema_migrations. The functions, which are replaced as a whole, are version 0 with a revision."""

    version: int
    name: str
    phase: str
    checksum: str
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """What a schema lacks for this library."""

    missing: bool
    pending: tuple[Migration, ...]
    stale_functions: bool

    @property
    def is_outdated(self) -> bool:
        """The library cannot use the schema. A missing `post` migration does not matter, since it only removes."""
        return self.stale_functions or any(migration.phase == "pre" for migration in self.pending)

    def __str__(self) -> str:
        waiting = [f"{migration.version:04}_{migration.name} ({migration.phase})" for migration in self.pending]
        return ", ".join(waiting + ["functions"] * self.stale_functions) or "nothing"


def known_migrations() -> list[Migration]:
    named = ((_FILE_NAME.fullmatch(name), sql) for name, sql in folder("migrations"))
    return [Migration(int(name[1]), name[2], cast("Phase", name[3]), sql) for name, sql in named if name]


def compare(applied: Sequence[Applied] | None, known: Sequence[Migration]) -> Difference:
    """Pure: what is missing, or an error if the schema is not one that this library may touch."""
    if applied is None:
        return Difference(missing=True, pending=tuple(known), stale_functions=True)
    by_version = {row.version: row for row in applied}
    _refuse_changed(by_version, known)
    is_newer = _refuse_incompatible(applied, known)
    stale = not is_newer and (0 not in by_version or by_version[0].revision < FUNCTIONS_REVISION)
    pending = tuple(migration for migration in known if migration.version not in by_version)
    return Difference(missing=False, pending=pending, stale_functions=stale)


def ensure(config: Config) -> None:
    """Before first use: create a missing schema, and refuse an older one, unless `auto_migrate` is set.

    A role that may only submit cannot read the schema's version. Its first call fails if the schema does not fit.
    """
    with _connect(config, seconds=config.database_timeout_seconds) as conn:
        difference = _difference_if_visible(conn, config.schema)
        if difference is None:
            return
        if difference.missing or (difference.is_outdated and config.auto_migrate):
            apply(conn, config.schema)
        elif difference.is_outdated:
            raise SchemaOutdated(
                f"schema {config.schema} is older than this tasklib (waiting: {difference}). "
                f"Run `tasklib migrate`, or set Config.auto_migrate."
            )


def _difference_if_visible(conn: psycopg.Connection, schema: str) -> Difference | None:
    try:
        return find_difference(conn, schema)
    except psycopg.errors.InsufficientPrivilege:
        return None
    except psycopg.Error as error:
        raise translate(error) from error


def migrate(config: Config, *, phase: Phase | None = None) -> Difference:
    """Apply what is missing; with phase="pre" only what may run before a rollout. Returns what was applied."""
    with _connect(config) as conn:
        return apply(conn, config.schema, phase=phase)


def check(config: Config) -> Difference:
    with _connect(config) as conn:
        try:
            return find_difference(conn, config.schema)
        except psycopg.Error as error:
            raise translate(error) from error


def apply(conn: psycopg.Connection, schema: str, *, phase: Phase | None = None) -> Difference:
    try:
        with conn.transaction():
            for step in _preparation(schema):
                conn.execute(step)
            difference = _only(find_difference(conn, schema), phase)
            for step in steps(difference, schema):
                conn.execute(step)
            return difference
    except psycopg.errors.LockNotAvailable:
        raise SchemaBusy(
            f"schema {schema} is in use: another migration runs (waited {LOCK_WAIT}), or a transaction holds a table "
            f"(waited {TABLE_WAIT}). Nothing was changed; try again later"
        ) from None
    except psycopg.errors.InsufficientPrivilege as error:
        raise SchemaMissing(
            f"role {conn.info.user} may not create or change schema {schema} ({error.diag.message_primary}). "
            f"Run `tasklib migrate` as a role that may, or give the output of `tasklib migrate --sql` to one that may."
        ) from error
    except psycopg.Error as error:
        raise translate(error) from error


def _preparation(schema: str) -> list[LiteralString]:
    """Override the settings of the role and the database: after the lock, other migrators' commits are visible."""
    return [
        "set transaction isolation level read committed",
        _OWN_PATH,
        "set local statement_timeout = 0",
        _with_literals("set_lock_timeout", schema, LOCK_WAIT),
        queries("schema_migrations", schema)["lock"],
        _with_literals("set_lock_timeout", schema, TABLE_WAIT),
    ]


def find_difference(conn: psycopg.Connection, schema: str) -> Difference:
    exists = conn.execute(_with_literals("exists", schema, schema)).fetchone() == (True,)
    rows = conn.execute(queries("schema_migrations", schema)["applied"]) if exists else None
    return compare(None if rows is None else [Applied(*row) for row in rows], known_migrations())


def steps(difference: Difference, schema: str) -> list[LiteralString]:
    """The statements that close the difference, in order."""
    if not (difference.pending or difference.stale_functions):
        return []
    return [
        _with_literals("bootstrap", schema, schema),
        *(step for migration in difference.pending for step in _migration_steps(migration, schema)),
        *(in_schema(sql, schema) for _, sql in folder("functions")),
        _with_literals("record", schema, 0, "functions", "functions", functions_checksum(), FUNCTIONS_REVISION),
    ]


def script(config: Config, difference: Difference | None = None, *, phase: Phase | None = None) -> str:
    """The SQL that `migrate` would run, for psql. Without a difference: everything, for an empty database."""
    difference = _only(difference or compare(None, known_migrations()), phase)
    parts = ["begin", *_preparation(config.schema), *steps(difference, config.schema), "commit"]
    return "\n\n".join(sql.rstrip().rstrip(";") + ";" for sql in parts) + "\n"


def describe(conn: psycopg.Connection, schema: str) -> str:
    """The schema as the catalogue has it, in a form that is the same on every PostgreSQL version: for comparing."""
    with conn.transaction():
        conn.execute(_OWN_PATH)
        lines = conn.execute(_with_literals("describe", schema, schema)).fetchall()
    return "\n".join(line for (line,) in lines) + "\n"


def _migration_steps(migration: Migration, schema: str) -> list[LiteralString]:
    row = (migration.version, migration.name, migration.phase, migration.checksum, 0)
    return [in_schema(migration.sql, schema), _with_literals("record", schema, *row)]


def _only(difference: Difference, phase: Phase | None) -> Difference:
    pending = tuple(migration for migration in difference.pending if phase in (None, migration.phase))
    return Difference(missing=difference.missing, pending=pending, stale_functions=difference.stale_functions)


def _refuse_changed(applied: dict[int, Applied], known: Sequence[Migration]) -> None:
    for migration in known:
        row = applied.get(migration.version)
        if row is not None and row.checksum != migration.checksum:
            raise SchemaChanged(
                f"migration {migration.version:04}_{migration.name} was applied with other contents than this tasklib "
                f"has: is the schema from a development version?"
            )


def _refuse_incompatible(applied: Sequence[Applied], known: Sequence[Migration]) -> bool:
    """True if a newer library has changed the schema, and this library can still use it."""
    newest = max(migration.version for migration in known)
    newer = [row for row in applied if row.version > newest]
    if any(row.phase == "post" for row in newer):
        raise SchemaTooNew(
            f"the schema is at {newer[-1].version:04}_{newer[-1].name}, from a newer tasklib that this one "
            f"(up to {newest:04}) cannot work with. Upgrade tasklib-pg."
        )
    return bool(newer)


def functions_checksum() -> str:
    return _checksum("\n".join(sql for _, sql in folder("functions")))


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _with_literals(query: str, schema: str, *values: str | int) -> LiteralString:
    """The query with the values written into it. They are versions, names and checksums of our own files, and the
    checked name of the schema.
    """
    sql = queries("schema_migrations", schema)[query]
    filled: Any = re.sub(r"\$(\d)\b", lambda match: _literal(values[int(match[1]) - 1]), sql)
    return cast("LiteralString", filled)


def _literal(value: str | int) -> str:
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


def _connect(config: Config, *, seconds: float = math.inf) -> psycopg.Connection:
    """A migration has no time limit; a first use has that of any call."""
    try:
        conn = BoundedConnection.connect(connection_string(config), autocommit=True)
    except psycopg.Error as error:
        raise translate(error) from error
    conn.deadline = time.monotonic() + seconds
    return conn


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m tasklib.migrate`: needs no more than the library itself."""
    parser = argparse.ArgumentParser("python -m tasklib.migrate", description="Create or upgrade tasklib's schema.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the schema is not up to date")
    parser.add_argument("--sql", action="store_true", help="print the SQL instead of running it")
    parser.add_argument("--pre", action="store_true", help="only what may run before the new version is rolled out")
    options = parser.parse_args(arguments)
    try:
        return run_command(check_only=options.check, print_sql=options.sql, pre=options.pre)
    except TasklibError as error:
        print(f"tasklib: {error}", file=sys.stderr)
        return 1


def run_command(*, check_only: bool, print_sql: bool, pre: bool) -> int:
    phase: Phase | None = "pre" if pre else None
    if print_sql:
        print(_script_from_environment(phase), end="")
        return 0
    config = Config.from_environment()
    if check_only:
        difference = check(config)
        print(f"schema {config.schema}: waiting: {difference}")
        return 1 if difference.missing or difference.is_outdated else 0
    print(f"schema {config.schema}: applied: {migrate(config, phase=phase)}")
    return 0


def _script_from_environment(phase: Phase | None) -> str:
    """For the configured database. For an empty one if none is configured."""
    try:
        config = Config.from_environment()
    except InvalidConfig:
        return script(Config("", schema=os.environ.get("TASKLIB_SCHEMA", "tasklib")), phase=phase)
    return script(config, check(config), phase=phase)


if __name__ == "__main__":
    sys.exit(main())
