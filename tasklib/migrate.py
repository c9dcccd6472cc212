"""Brings the schema to the library's version, and decides whether the library may use the schema that it finds.

Invariant: everything but indexes is applied in one transaction, under one advisory lock that ends with it. However many
migrators start at once, and wherever one is killed, the schema is as before or as after.

A migration is `NNNN_name.pre.sql`, `.post.sql` or `.index.sql`. A `pre` migration only adds, so that libraries of the
version before go on working: it runs before a rollout. A `post` migration removes what they need, and runs after the
rollout. An `index` migration has one `create index concurrently` for each of its indexes. They are built after the
transaction (index_builds.py), and no library needs them before they are there: it is recorded as `pre`.

Nobody waits long for a migration. It waits for a table only as long as TABLE_WAIT_SECONDS, since all later statements
on the table wait behind it; then it ends its transaction, lets the others go on, and tries again.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, LiteralString, NamedTuple, cast

import psycopg

from tasklib import index_builds
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
from tasklib.sql import folder, in_schema, queries, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from tasklib.index_builds import Index

Phase = Literal["pre", "post"]
Kind = Literal["pre", "post", "index"]
LOCK_WAIT_SECONDS = 60.0  # for another migrator, or until a table is free
# For a table's lock. A migration may wait for two tables, one after the other, and hold the first: what others wait is
# twice this time and what the statements take, together less than a second. It is also less than deadlock_timeout, so
# that the migration, and never a worker, is ended if two wait for each other.
TABLE_WAIT_SECONDS = 0.3
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0  # between two tries, while others use the table
FROZEN_SECONDS = 2.0  # the server ends the transaction of a migrator from which it has not heard for so long
LOOK_SECONDS = 0.1  # how often it is tried whether another migrator has ended

# Grows with every change of a file in sql/functions; a test compares it with their checksum. A checksum alone has no
# order: during a rollout, each of two versions would take the other's functions for outdated.
FUNCTIONS_REVISION = 18
# PostgreSQL resolves the names in the schema's own expressions when they are created: none must be found in `public`.
# `local`, for this transaction only, since a pooler may be in between.
_OWN_PATH: LiteralString = f"set local search_path = {SEARCH_PATH}"
_FILE_NAME = re.compile(r"(\d{4})_(\w+)\.(pre|post|index)")
# Statements in sql/functions that lock what workers use. They are left out if the catalogue has just that already: even
# without a change, a trigger waits for every transaction that has written to its table, and all writers behind it.
_LOCKING = re.compile(r"^create or replace (trigger|view) (?:tasklib\.)?(\w+).*?;$", re.MULTILINE | re.DOTALL)
_TRIGGER_OR_VIEW = re.compile(r"(?:table \w+ )?(trigger CREATE TRIGGER|view) (\w+) .*")


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    name: str
    kind: Kind
    sql: str

    @property
    def phase(self) -> Phase:
        """When it may run, as schema_migrations has it: older libraries read that."""
        return "post" if self.kind == "post" else "pre"

    @property
    def checksum(self) -> str:
        return _checksum(self.sql)

    def __str__(self) -> str:
        return f"{self.version:04}_{self.name} ({self.kind})"


@dataclass(frozen=True, slots=True)
class Applied:
    """One row of schema_migrations. The functions, which are replaced as a whole, are version 0 with a revision."""

    version: int
    name: str
    phase: str
    checksum: str
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Build:
    """An index migration that is not complete: not recorded, or with indexes that are missing or invalid."""

    migration: Migration
    missing: tuple[Index, ...]
    invalid: tuple[Index, ...]

    def __str__(self) -> str:
        names = [index.name for index in self.missing] + [f"{index.name}, invalid" for index in self.invalid]
        return f"{self.migration.version:04}_{self.migration.name} (index: {'; '.join(names) or 'built'})"


@dataclass(frozen=True, slots=True)
class Difference:
    """What a schema lacks for this library."""

    missing: bool
    pending: tuple[Migration, ...]  # for a transaction; with the indexes of a schema that is new
    stale_functions: bool
    builds: tuple[Build, ...] = ()

    @property
    def is_outdated(self) -> bool:
        """The library cannot use the schema. A missing `post` migration does not matter, since it only removes. Neither
        does a missing index: a feature that needs it is not switched on before.
        """
        return self.stale_functions or any(migration.kind != "post" for migration in self.pending)

    @property
    def is_incomplete(self) -> bool:
        """`tasklib migrate` has something to do before a rollout."""
        return self.missing or self.is_outdated or bool(self.builds)

    def __str__(self) -> str:
        waiting = [*map(str, self.pending), *["functions"] * self.stale_functions, *map(str, self.builds)]
        return ", ".join(waiting) or "nothing"


class Blocker(NamedTuple):
    """A transaction that holds a table. What a role may not see of another's session is None."""

    pid: int | None
    role: str | None
    application: str | None
    state: str | None
    seconds: float | None
    query_start: str | None
    tables: str

    def __str__(self) -> str:
        if self.pid is None:
            return f"a prepared transaction (it holds {self.tables}; see pg_prepared_xacts)"
        who = ", ".join(part for part in (self.role, self.application, self.state) if part)
        age = "its age is hidden" if self.seconds is None else f"its transaction is {self.seconds:.0f} s old"
        return f"pid {self.pid} ({who}; {age}, its query began at {self.query_start}; it holds {self.tables})"


def known_migrations() -> list[Migration]:
    named = ((_FILE_NAME.fullmatch(name), sql) for name, sql in folder("migrations"))
    return [Migration(int(name[1]), name[2], cast("Kind", name[3]), sql) for name, sql in named if name]


def compare(
    applied: Sequence[Applied] | None, known: Sequence[Migration], indexes: Mapping[str, bool] | None = None
) -> Difference:
    """Pure: what is missing, or an error if the schema is not one that this library may touch. `indexes` are those in
    the schema, and whether each is valid.
    """
    if applied is None:
        return Difference(missing=True, pending=tuple(known), stale_functions=True)
    by_version = {row.version: row for row in applied}
    _refuse_changed(by_version, known)
    is_newer = _refuse_incompatible(applied, known)
    stale = not is_newer and (0 not in by_version or by_version[0].revision < FUNCTIONS_REVISION)
    pending = tuple(each for each in known if each.version not in by_version and each.kind != "index")
    builds = tuple(_builds(by_version.keys(), known, indexes or {}))
    return Difference(missing=False, pending=pending, stale_functions=stale, builds=builds)


def _builds(applied: AbstractSet[int], known: Sequence[Migration], indexes: Mapping[str, bool]) -> Iterator[Build]:
    for migration in known:
        if migration.kind != "index":
            continue
        later = [each.sql for each in known if each.version > migration.version and each.version in applied]
        wanted = [index for index in index_builds.parse(migration.sql) if not _is_dropped(index, later)]
        missing = tuple(index for index in wanted if index.name not in indexes)
        invalid = tuple(index for index in wanted if indexes.get(index.name) is False)
        if missing or invalid or migration.version not in applied:
            yield Build(migration, missing, invalid)


def _is_dropped(index: Index, later: Sequence[str]) -> bool:
    return any(re.search(rf"\bdrop index (if exists )?tasklib\.{index.name}\b", sql) for sql in later)


def ensure(config: Config) -> None:
    """Before first use: create a missing schema, and refuse an older one, unless `auto_migrate` is set.

    A role that may only submit cannot read the schema's version. Its first call fails if the schema does not fit.
    """
    with _connect(config, seconds=config.database_timeout_seconds) as conn:
        difference = _difference_if_visible(conn, config.schema)
        if difference is None:
            return
        if difference.missing or (difference.is_outdated and config.auto_migrate):
            apply(conn, config.schema)  # without indexes, which may take longer than any call
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


def migrate(config: Config, *, phase: Phase | None = None, say: Callable[[str], None] | None = None) -> Difference:
    """Apply what is missing; with phase="pre" only what may run before a rollout. Returns what was applied.

    `say` is told every few seconds how far an index is.
    """
    with _connect(config) as conn:
        applied = apply(conn, config.schema, phase=phase)
        if not applied.builds:
            return applied
        with index_builds.reporting(lambda: _connect(config), config.schema, say):
            build(conn, config.schema)
        rest = apply(conn, config.schema, phase=phase)  # what waited for the indexes
        return dataclasses.replace(applied, pending=applied.pending + rest.pending)


def check(config: Config) -> Difference:
    with _connect(config) as conn:
        try:
            return find_difference(conn, config.schema)
        except psycopg.Error as error:
            raise translate(error) from error


def apply(conn: psycopg.Connection, schema: str, *, phase: Phase | None = None) -> Difference:
    """Everything but the indexes of a schema that is in use: see `build`. Returns what was applied, and those."""
    try:
        return _apply_with_patience(conn, schema, phase)
    except psycopg.errors.InsufficientPrivilege as error:
        raise _no_right(conn, schema, error) from error
    except psycopg.Error as error:
        raise translate(error) from error


def _apply_with_patience(conn: psycopg.Connection, schema: str, phase: Phase | None) -> Difference:
    give_up_at = min(time.monotonic() + LOCK_WAIT_SECONDS, getattr(conn, "deadline", math.inf))
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            difference = _apply_once(conn, schema, phase)
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            if time.monotonic() + pause > give_up_at:
                raise SchemaBusy(_busy_table(conn, schema)) from None
            time.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
            continue
        if difference is not None:
            return difference
        if time.monotonic() + LOOK_SECONDS > give_up_at:
            raise SchemaBusy(f"schema {schema} is in use: another migration runs. Nothing was changed; try again later")
        time.sleep(LOOK_SECONDS)


def _apply_once(conn: psycopg.Connection, schema: str, phase: Phase | None) -> Difference | None:
    """None if another migrator is at work."""
    with conn.transaction():
        for step in _preparation(schema):
            conn.execute(step)
        if conn.execute(queries("schema_migrations", schema)["try_lock"]).fetchone() != (True,):
            return None
        difference = _applicable(find_difference(conn, schema), phase)
        unchanged = _unchanged(conn, schema, difference)
        # All in one message: while tables are locked, nothing waits for this process, which may be slow.
        conn.execute(_joined(steps(difference, schema, unchanged)))
        return difference


def _busy_table(conn: psycopg.Connection, schema: str) -> str:
    with conn.transaction():
        conn.execute(_OWN_PATH)
        found = conn.execute(_with_literals("blockers", schema, schema, f"{TABLE_WAIT_SECONDS}s")).fetchall()
    who = "; ".join(str(Blocker(*row)) for row in found) or "transactions that have ended by now"
    return (
        f"schema {schema} is in use: a table that the migration changes was locked for {LOCK_WAIT_SECONDS:g} s by "
        f"{who}. Nothing was changed; try again when it has ended"
    )


def _no_right(conn: psycopg.Connection, schema: str, error: psycopg.Error) -> SchemaMissing:
    return SchemaMissing(
        f"role {conn.info.user} may not create or change schema {schema} ({error.diag.message_primary}). "
        f"Run `tasklib migrate` as a role that may, or give the output of `tasklib migrate --sql` to one that may."
    )


def build(conn: psycopg.Connection, schema: str) -> None:
    """Build the indexes that are missing, and record their migrations. It takes as long as it takes."""

    def find_steps() -> list[LiteralString]:
        return [step for each in find_difference(conn, schema).builds for step in build_steps(each, schema)]

    try:
        index_builds.run(conn, schema, find_steps)
    except psycopg.errors.InsufficientPrivilege as error:
        raise _no_right(conn, schema, error) from error
    except psycopg.Error as error:
        raise translate(error) from error


def _preparation(schema: str) -> list[LiteralString]:
    """Override the settings of the role and the database: after the lock, other migrators' commits are visible."""
    return [
        "set transaction isolation level read committed",
        _OWN_PATH,
        "set local statement_timeout = 0",
        _with_literals("set_idle_timeout", schema, f"{FROZEN_SECONDS * 1000:.0f}ms"),
        _with_literals("set_lock_timeout", schema, f"{TABLE_WAIT_SECONDS * 1000:.0f}ms"),
    ]


def find_difference(conn: psycopg.Connection, schema: str) -> Difference:
    exists = conn.execute(_with_literals("exists", schema, schema)).fetchone() == (True,)
    if not exists:
        return compare(None, known_migrations())
    applied = [Applied(*row) for row in conn.execute(queries("schema_migrations", schema)["applied"])]
    indexes: dict[str, bool] = dict(conn.execute(_with_literals("indexes", schema, schema)).fetchall())
    return compare(applied, known_migrations(), indexes)


def steps(difference: Difference, schema: str, unchanged: AbstractSet[str] = frozenset()) -> list[LiteralString]:
    """The statements that close the difference, in order, but for the indexes that are built outside. `unchanged` are
    triggers and views that need not be replaced.
    """
    if not (difference.pending or difference.stale_functions):
        return []
    return [
        _with_literals("bootstrap", schema, schema),
        *(step for migration in difference.pending for step in _migration_steps(migration, schema)),
        *(in_schema(_without(unchanged, sql), schema) for _, sql in folder("functions")),
        _with_literals("record", schema, 0, "functions", "functions", functions_checksum(), FUNCTIONS_REVISION),
    ]


def _without(unchanged: AbstractSet[str], functions: str) -> str:
    return _LOCKING.sub(lambda found: "" if f"{found[1]} {found[2]}" in unchanged else found[0], functions)


def _unchanged(conn: psycopg.Connection, schema: str, difference: Difference) -> AbstractSet[str]:
    """The triggers and views that the catalogue describes just as the snapshot of this version does."""
    if difference.missing or not (difference.pending or difference.stale_functions):
        return frozenset()
    found = {
        line.replace(f'"{schema}".', "tasklib.").replace(f"{schema}.", "tasklib.") for line in _lines(conn, schema)
    }
    named = (_TRIGGER_OR_VIEW.fullmatch(line) for line in found.intersection(snapshot()))
    return {f"{part[1].split()[0]} {part[2]}" for part in named if part}


def build_steps(each: Build, schema: str) -> list[LiteralString]:
    """Each is sent alone, outside of a transaction."""
    return [
        *(index.drop(schema) for index in each.invalid),
        *(index.build(schema) for index in (*each.invalid, *each.missing)),
        _record(each.migration, schema),
    ]


def script(config: Config, difference: Difference | None = None, *, phase: Phase | None = None) -> str:
    """The SQL that `migrate` would run, for psql. Without a difference: everything, for an empty database."""
    difference = difference or compare(None, known_migrations())
    first = _applicable(difference, phase)
    rest = dataclasses.replace(difference, pending=_later(difference, phase), stale_functions=False)
    parts = _transaction(first, config.schema)
    if difference.builds:
        parts += _builds_for_psql(difference, config.schema)
        parts += _transaction(rest, config.schema) if rest.pending else []
    stop = "\\set ON_ERROR_STOP on\n\n" if difference.builds else ""
    return stop + _joined(parts)


def _joined(parts: Sequence[LiteralString]) -> LiteralString:
    return "\n\n".join([part.rstrip().rstrip(";") + ";" for part in parts]) + "\n"


def _transaction(difference: Difference, schema: str) -> list[LiteralString]:
    """For psql: it waits once, and is run again by hand if that was not enough."""
    patience = _with_literals("set_lock_timeout", schema, f"{LOCK_WAIT_SECONDS:g}s")
    lock = queries("schema_migrations", schema)["lock"]
    impatience = _preparation(schema)[-1]
    return ["begin", *_preparation(schema), patience, lock, impatience, *steps(difference, schema), "commit"]


def _builds_for_psql(difference: Difference, schema: str) -> list[LiteralString]:
    named = queries("index_builds", schema)
    path: LiteralString = f"set search_path = {SEARCH_PATH}"
    indexes: list[LiteralString] = [step for each in difference.builds for step in build_steps(each, schema)]
    return [path, named["settings"], named["lock_or_fail"], *indexes, named["unlock"]]


def describe(conn: psycopg.Connection, schema: str) -> str:
    """The schema as the catalogue has it, in a form that is the same on every PostgreSQL version: for comparing."""
    return "\n".join(_lines(conn, schema)) + "\n"


def _lines(conn: psycopg.Connection, schema: str) -> list[str]:
    with conn.transaction():
        conn.execute(_OWN_PATH)
        return [line for (line,) in conn.execute(_with_literals("describe", schema, schema)).fetchall()]


def _migration_steps(migration: Migration, schema: str) -> list[LiteralString]:
    sql = index_builds.in_transaction(migration.sql) if migration.kind == "index" else migration.sql
    return [in_schema(sql, schema), _record(migration, schema)]


def _record(migration: Migration, schema: str) -> LiteralString:
    return _with_literals("record", schema, migration.version, migration.name, migration.phase, migration.checksum, 0)


def _applicable(difference: Difference, phase: Phase | None) -> Difference:
    """What may be applied at once."""
    later = _later(difference, phase)
    pending = tuple(each for each in difference.pending if phase in (None, each.phase) and each not in later)
    return dataclasses.replace(difference, pending=pending)


def _later(difference: Difference, phase: Phase | None) -> tuple[Migration, ...]:
    """What removes something waits for the indexes before it: one of them may replace what it removes."""
    if phase == "pre" or not difference.builds:
        return ()
    first = min(each.migration.version for each in difference.builds)
    return tuple(each for each in difference.pending if each.kind == "post" and each.version > first)


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
        return run_command(None, sys.stdout.write, check_only=options.check, print_sql=options.sql, pre=options.pre)
    except TasklibError as error:
        print(f"tasklib: {error}", file=sys.stderr)
        return 1


def run_command(
    config: Config | None, write: Callable[[str], object], *, check_only: bool, print_sql: bool, pre: bool
) -> int:
    """The exit code. Without a Config, the environment names the database."""
    phase: Phase | None = "pre" if pre else None
    if print_sql:
        write(_script(config, phase))
        return 0
    config = config or Config.from_environment()
    if check_only:
        difference = check(config)
        write(f"schema {config.schema}: waiting: {difference}\n")
        return 1 if difference.is_incomplete else 0
    write(f"schema {config.schema}: applied: {migrate(config, phase=phase, say=_say)}\n")
    return 0


def _say(line: str) -> None:
    print(f"tasklib: {line}", file=sys.stderr, flush=True)


def _script(config: Config | None, phase: Phase | None) -> str:
    """For the configured database. For an empty one if none is configured."""
    try:
        config = config or Config.from_environment()
    except InvalidConfig:
        return script(Config("", schema=os.environ.get("TASKLIB_SCHEMA", "tasklib")), phase=phase)
    return script(config, check(config), phase=phase)


if __name__ == "__main__":
    sys.exit(main())
