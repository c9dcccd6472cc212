"""What lies in tasklib's tables: filled for a workload, and looked at when a run is over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from psycopg import sql

from bench.drivers.driver import TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    import psycopg

    from bench.harness import Bench, Process

WAIT_SECONDS = 900.0
PAGE = 100_000  # rows of one statement

FILL_READY = """
insert into tasklib.tasks (name, kwargs, ready)
select 'async_task', jsonb_build_object('number', number, 'text', %(text)s::text), true
  from generate_series(%(first)s::integer, %(last)s::integer) as number
"""
# Copies of tasks that were really run, whatever columns those have by then. The keys of the copies differ in the part
# that is made from the time, and so lie in the past, a millisecond for each set of copies.
COPY_FINISHED = """
insert into {table} ({key}, {columns})
select (lpad(to_hex(%(past)s::bigint + copy), 12, '0') || substr(replace({key}::text, '-', ''), 13))::uuid, {columns}
  from {table} cross join generate_series(%(first)s::bigint, %(last)s::bigint) as copy
 where {key} > %(mark)s
"""
COPIES_AGE_SECONDS = 86400.0
COLUMNS = """
select array_agg(attname::text order by attnum)
  from pg_attribute join pg_class on pg_class.oid = attrelid and relkind = 'r'
 where attrelid = %s::regclass and attnum > 0 and not attisdropped and attgenerated = '' and attname <> %s
"""
# Tasks that a drain left without what it promises to keep.
INCOMPLETE = """
select task.id, task.state
  from tasklib.tasks as task
 where task.id > %s and task.completed_at is not null
   and (task.state <> 'completed' or task.result is null or not exists (
       select from tasklib.task_attempts as attempt
        where attempt.task_id = task.id and attempt.outcome = 'COMPLETED' and attempt.worker_id is not null
          and attempt.started_at is not null and attempt.finished_at is not null))
 limit 1
"""
COMPLETED = "select count(*) from tasklib.tasks where id > %s and completed_at is not null"


def fill_ready(conn: psycopg.Connection[Any], count: int) -> None:
    """Like so many submits, but in seconds; nobody is notified."""
    _fill(conn, sql.SQL(FILL_READY), count, text=TEXT)


def fill_finished(conn: psycopg.Connection[Any], count: int, mark: UUID) -> None:
    """Copies of the finished tasks from the key `mark` on, with their attempts where those have rows of their own."""
    originals = completed(conn, mark)
    past = int((time.time() - COPIES_AGE_SECONDS) * 1_000)
    for table, key in (("tasklib.tasks", "id"), ("tasklib.task_attempts", "task_id")):
        (columns,) = conn.execute(COLUMNS, [table, key]).fetchone() or (None,)
        if columns is not None:
            statement = sql.SQL(COPY_FINISHED).format(
                table=sql.SQL(table),
                key=sql.Identifier(key),
                columns=sql.SQL(", ").join(map(sql.Identifier, columns)),
            )
            _fill(conn, statement, count // originals, PAGE // originals, past=past, mark=mark)


def _fill(
    conn: psycopg.Connection[Any], statement: sql.SQL | sql.Composed, count: int, page: int = PAGE, **arguments: object
) -> None:
    """Scoreboard by page: one statement over millions of rows would hold a snapshot for minutes."""
    conn.execute("set session_replication_role = replica")
    for first in range(0, count, page):
        conn.execute(statement, {**arguments, "first": first, "last": min(first + page, count) - 1})
    conn.execute("reset session_replication_role")


def are_ready(conn: psycopg.Connection[Any]) -> bool:
    return conn.execute("select exists (select from tasklib.tasks where ready)").fetchone() == (True,)


def make_tidy(conn: psycopg.Connection[Any]) -> None:
    """Before a drain: every system starts from the same state, and pays for its own dirt alone."""
    conn.execute("vacuum analyze")
    conn.execute("checkpoint")


def completed(conn: psycopg.Connection[Any], mark: UUID) -> int:
    row = conn.execute(COMPLETED, [mark]).fetchone()
    assert row is not None
    return int(row[0])


def check_complete(conn: psycopg.Connection[Any], mark: UUID, count: int) -> None:
    """Every task that was run since has its result, and its attempt with its worker and both times."""
    found = completed(conn, mark)
    if found != count:
        raise RuntimeError(f"{count} tasks have begun, and {found} are completed")
    if incomplete := conn.execute(INCOMPLETE, [mark]).fetchone():
        raise RuntimeError(f"task {incomplete[0]} is {incomplete[1]} and has no result, or no attempt")


# --- waiting ---------------------------------------------------------------------------------------------------------


def wait_until_begun(workers: Sequence[Process], count: int) -> None:
    wait(lambda: sum(worker.begun for worker in workers) >= count, f"{count} tasks have begun")


def wait(is_so: Callable[[], bool], what: str) -> float:
    """When it was last seen to be not yet so, or nearly: each look costs a little."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        looked = time.monotonic()
        if is_so():
            return looked
        time.sleep(0.005)
    raise RuntimeError(f"not within {WAIT_SECONDS:.0f} s: {what}")


def settle(bench: Bench) -> None:
    """Workers start, and fall idle."""
    time.sleep(bench.size.settle_seconds)
