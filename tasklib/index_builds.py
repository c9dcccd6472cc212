"""Builds indexes on a live table: concurrently, outside of any transaction, one migrator at a time.

A concurrent build holds up no statement of a user. It waits itself, for every transaction that began before it. A
migrator that waited for its turn inside a transaction would be one of these, and both would wait for ever. So the turn
is a session's advisory lock that is tried again and again, and nothing is open in between.

A build that is cut short leaves an invalid index, which costs time at every write and serves no query. The next
migrator drops it and begins again. After a kill -9 of a migrator its server process goes on, and completes the index.
"""

from __future__ import annotations

import contextlib
import re
import threading
from typing import TYPE_CHECKING, LiteralString, NamedTuple

import psycopg

from tasklib.clock import time
from tasklib.connection import SEARCH_PATH
from tasklib.errors import SchemaBusy
from tasklib.sql import in_schema, queries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TRY_SECONDS = 0.1  # between two looks whether it is our turn
REPORT_SECONDS = 3.0
DEADLOCKS = 5  # so many builds that the server ended, because two waited for each other, are begun again

_STATEMENT = re.compile(r"create (?:unique )?index concurrently (\w+) on tasklib\.\w+ [^;]+")
_COMMENT = re.compile(r"--.*")


class Index(NamedTuple):
    name: str
    sql: str  # create index concurrently ...

    def build(self, schema: str) -> LiteralString:
        return in_schema(self.sql, schema)

    def drop(self, schema: str) -> LiteralString:
        return in_schema(f"drop index concurrently if exists tasklib.{self.name}", schema)


def parse(sql: str) -> list[Index]:
    """The statements of an index migration. Each names its index, so that an invalid one can be found."""
    statements = [part.strip() for part in _COMMENT.sub("", sql).split(";") if part.strip()]
    found = [(_STATEMENT.fullmatch(statement), statement) for statement in statements]
    wrong = [statement for match, statement in found if match is None]
    if wrong or not found:
        raise ValueError(f"not `create index concurrently NAME on tasklib.TABLE ...`: {wrong or 'no statement'}")
    return [Index(match[1], statement) for match, statement in found if match]


def in_transaction(sql: str) -> str:
    """For a table that is just being made: nobody waits for it."""
    return sql.replace(" concurrently", "")


def run(conn: psycopg.Connection, schema: str, find_steps: Callable[[], Sequence[LiteralString]]) -> None:
    """Run the steps, which are found when it is our turn: another migrator may have run them meanwhile."""
    with _turn(conn, schema):
        for _ in range(DEADLOCKS):
            with contextlib.suppress(psycopg.errors.DeadlockDetected):
                _run_each(conn, find_steps())
                return
        _run_each(conn, find_steps())


def _run_each(conn: psycopg.Connection, steps: Sequence[LiteralString]) -> None:
    for step in steps:
        conn.execute(step)


@contextlib.contextmanager
def _turn(conn: psycopg.Connection, schema: str) -> Iterator[None]:
    named = queries("index_builds", schema)
    if conn.execute(named["backend"]).fetchone() != (conn.info.backend_pid,):
        raise SchemaBusy(
            "an index is built over a direct connection, and this one leads through a pooler. Run `tasklib migrate` "
            "with the address of the server itself. All else is applied"
        )
    conn.execute(f"set search_path = {SEARCH_PATH}")
    conn.execute(named["settings"])
    while conn.execute(named["try_lock"]).fetchone() != (True,):
        time.sleep(TRY_SECONDS)
    try:
        yield
    finally:
        if not conn.closed:
            conn.execute(named["unlock"])


@contextlib.contextmanager
def reporting(
    connect: Callable[[], psycopg.Connection], schema: str, say: Callable[[str], None] | None
) -> Iterator[None]:
    """Tell how far the builds in this schema are, also those of another migrator for whose end this one waits."""
    if say is None:
        yield
        return
    is_over = threading.Event()
    reporter = threading.Thread(
        target=_report, args=(connect, schema, say, is_over), name="tasklib-progress", daemon=True
    )
    reporter.start()
    try:
        yield
    finally:
        is_over.set()
        reporter.join()


def _report(
    connect: Callable[[], psycopg.Connection], schema: str, say: Callable[[str], None], is_over: threading.Event
) -> None:
    """A report that fails is left out. The build does not depend on it."""
    while not is_over.wait(REPORT_SECONDS):
        with contextlib.suppress(psycopg.Error), connect() as conn:
            for line in progress(conn, schema):
                say(line)


def progress(conn: psycopg.Connection, schema: str) -> list[str]:
    with conn.transaction():
        conn.execute(f"set local search_path = {SEARCH_PATH}")
        return [_line(*row) for row in conn.execute(queries("index_builds", schema)["progress"])]


def _line(pid: int, index: str | None, phase: str | None, done: float | None, locker: str | None) -> str:
    line = f"index {index or '(new)'} (pid {pid}): {phase or 'runs'}"
    if done is not None:
        line += f", {done:.0%} of this phase"
    return f"{line}, waits for {locker}" if locker else line
