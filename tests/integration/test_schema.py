"""The table keeps its invariants against whoever writes, and raw SQL gets right defaults."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from psycopg import errors

import tasklib
from tasklib.outcomes import HeldTask
from tasklib.sql import columns, queries
from tasklib.statements import MAX_LIST_LIMIT
from tasklib.states import TRANSITIONS, UNSUCCESSFUL, State
from tasklib.submission import _SQL_DEFAULTS
from tests.support.raw_sql import Conn, literal
from tools.schema_snapshot import SNAPSHOT, snapshot

pytestmark = pytest.mark.postgres_versions

FINAL = "completed_at => now()"
COLUMNS_OF_TASKLIB = (
    "id", "name", "state", "scheduled_at", "started_at", "completed_at", "created_at", "args", "kwargs", "result",
    "error", "retry_count", "max_retries", "next_retry_at", "worker_id", "locked_until", "timeout_seconds", "priority",
    "tags",
)  # fmt: skip


RECORDS = ["1 pending", "2 running", "3 completed", "4 failed", "5 failed"]
EXAMPLES = {  # started_at, completed_at, error, retry_count, next_retry_at, locked_until
    "1": ("null", "null", "null", "0", "null", "null"),
    "2": ("'2025-10-25T18:05:23'", "null", "null", "0", "null", "'2025-10-25T18:15:23'"),
    "3": ("'2025-10-25T18:05:12'", "'2025-10-25T18:05:18'", "null", "0", "null", "null"),
    "4": ("'2025-10-25T18:10:00'", "null", "'SMTPException: Connection timeout'", "1", "'2025-10-25T18:10:05'", "null"),
    "5": ("'2025-10-25T18:20:30'", "'2025-10-25T18:20:35'", "'ValidationError: Invalid'", "3", "null", "null"),
}


def insert(conn: Conn, **values: str) -> tuple[Any, ...]:
    """Insert a row by raw SQL; the values are SQL expressions."""
    row = {"name": "'t'", **values}
    sql = f"insert into tasklib.tasks ({', '.join(row)}) values ({', '.join(row.values())}) returning id, ready"
    found = conn.execute(literal(sql)).fetchone()
    assert found is not None
    return found


def test_the_snapshot_is_what_the_migrations_make(database_url: str) -> None:
    """Committed, readable, and the same on PostgreSQL 15 and 18. Write it anew with `python3 dev.py schema`."""
    assert snapshot(database_url) == SNAPSHOT.read_text(encoding="utf-8")


@pytest.mark.parametrize("table", ["tasks", "workers", "claims", "task_rollups"])
def test_vacuum_keeps_pace_with_what_changes_all_the_time(conn: Conn, table: str) -> None:
    """By default it waits for a fifth of a table."""
    row = conn.execute(
        """select option_value::float from pg_class, pg_options_to_table(reloptions)
            where oid = ('tasklib.' || %s)::regclass and option_name = 'autovacuum_vacuum_scale_factor'""",
        [table],
    ).fetchone()
    assert row is not None
    assert row[0] <= 0.05


@pytest.mark.parametrize(
    "noun",
    [
        "tasks",
        "queues",
        "workers",
        "claims",
        "outcomes",
        "crashes",
        "elections",
        "janitor",
        "worker_states",
        "testing",
        "doorbell",
        "doctor",
    ],
)
def test_every_named_query_can_be_prepared(conn: Conn, noun: str) -> None:
    """A query that names a missing column fails here, not in production."""
    for number, sql in enumerate(queries(noun, "tasklib").values()):
        conn.execute(literal(f"prepare query_{number} as {sql}"))


def test_states_are_the_ones_of_the_check(conn: Conn) -> None:
    """states.py and the table list the same states."""
    row = conn.execute(
        "select pg_get_constraintdef(oid) from pg_constraint where conname = 'tasks_state_whole'"
    ).fetchone()
    assert row is not None
    assert set(re.findall(r"'(\w+)'", row[0])) == set(State)


def test_transitions_only_name_states_and_leave_completed_tasks_alone() -> None:
    """Nothing but a person's `retry` leads out of `completed`."""
    for verb, (sources, target) in TRANSITIONS.items():
        assert sources <= set(State)
        assert target in State
        assert verb == "retry" or State.COMPLETED not in sources


def test_a_record_has_every_column(conn: Conn) -> None:
    """Task, the queries and the table agree; the original columns come first. The limit is the one that SQL knows."""
    in_the_table = {row[0] for row in conn.execute(
        "select attname from pg_attribute where attrelid = 'tasklib.tasks'::regclass and attnum > 0"
    )}  # fmt: skip
    names = [field.name for field in fields(tasklib.Task)]
    assert set(names) == in_the_table - {"audited"}  # which concerns the trigger alone
    assert tuple(names[:19]) == COLUMNS_OF_TASKLIB
    assert columns("task_columns") == names
    for query in ("list", "list_unsuccessful"):
        assert f"limit {MAX_LIST_LIMIT}\n" in queries("tasks", "tasklib")[query]


def test_a_held_task_has_the_columns_of_its_queries() -> None:
    """`held_columns` are read in this order, and a claim answers what else a worker needs to know of a task."""
    assert columns("held_columns") == [*HeldTask._fields]
    known_to_the_worker = {"queue", "state", "worker_id", "claimed_at", "started_at", "cancel_asked_at"}
    assert {*HeldTask._fields} - {*columns("claimed_columns")} == known_to_the_worker


def test_a_raw_insert_gets_right_defaults(conn: Conn) -> None:
    """A name is all that is needed."""
    insert(conn)
    row = conn.execute(
        """select state, queue, priority, max_retries, retry_count, attempt, fencing_token, ready, args, kwargs, tags,
                  created_at - scheduled_at < interval '1 second', uuid_extract.version
             from tasklib.tasks, lateral (select substr(id::text, 15, 1) as version) as uuid_extract"""
    ).fetchone()
    assert row == ("pending", "default", 0, 3, 0, 0, 0, True, {}, {}, {}, True, "7")


@pytest.mark.parametrize(
    ("values", "ready"),
    [
        ({}, True),
        ({"scheduled_at": "now() + interval '1 hour'"}, False),
        ({"scheduled_at": "now() - interval '1 hour'"}, True),
        ({"pending_parents": "1"}, False),
        ({"state": "'failed'", "next_retry_at": "now() - interval '1 s'"}, True),
        ({"state": "'failed'", "next_retry_at": "now() + interval '1 h'"}, False),
        ({"state": "'completed'", "completed_at": "now()"}, False),
        ({"state": "'failed'", "completed_at": "now()"}, False),
    ],
)
def test_a_raw_insert_is_ready_when_its_time_has_come(conn: Conn, values: dict[str, str], ready: bool) -> None:
    """`ready` is what claims go by; a delayed task that claims to be ready would run too early."""
    assert insert(conn, **values)[1] is ready


@pytest.mark.parametrize(
    ("values", "constraint"),
    [
        ({"state": "'done'", "ready": "false"}, "tasks_state_whole"),
        ({"state": "'completed'", "completed_at": "now()", "ready": "true"}, "tasks_state_whole"),
        ({"state": "'failed'", "completed_at": "now()", "error_code": "'x'", "ready": "true"}, "tasks_state_whole"),
        ({"pending_parents": "1", "ready": "true"}, "tasks_state_whole"),
        ({"state": "'running'"}, "tasks_state_whole"),
        (
            {
                "state": "'running'",
                "worker_id": "'w'",
                "claimed_at": "now()",
                "locked_until": "now()",
                "ready": "false",
            },
            "tasks_state_whole",
        ),
        ({"resolved_at": "now()", "resolved_by": "'ann'"}, "tasks_resolution_whole"),
        ({"scheduled_at": "'infinity'"}, "moment_in_calendar"),
        ({"expires_at": "'12000-01-01'"}, "moment_in_calendar"),
        ({"scheduled_at": "'0005-01-01 BC'"}, "moment_in_calendar"),
        ({"state": "'claimed'", "worker_id": "'w'"}, "tasks_state_whole"),
        ({"worker_id": "'w'", "claimed_at": "now()", "locked_until": "now()"}, "tasks_state_whole"),
        ({"state": "'completed'"}, "tasks_state_whole"),
        ({"state": "'cancelled'"}, "tasks_state_whole"),
        ({"state": "'expired'"}, "tasks_state_whole"),
        ({"state": "'buried'"}, "tasks_state_whole"),
        ({"completed_at": "now()"}, "tasks_state_whole"),
        ({"state": "'failed'"}, "tasks_state_whole"),
        ({"state": "'failed'", "completed_at": "now()", "next_retry_at": "now()"}, "tasks_state_whole"),
        ({"next_retry_at": "now()"}, "tasks_state_whole"),
        ({"state": "'failed'", "completed_at": "now()", "ready": "false"}, "tasks_state_whole"),
        ({"max_retries": "-1"}, "tasks_counts_whole"),
        ({"fencing_token": "-1"}, "tasks_counts_whole"),
        ({"timeout_seconds": "0"}, "tasks_timeout_positive"),
        ({"timeout_seconds": "'NaN'"}, "tasks_timeout_positive"),
        ({"on_crash": "'ignore'"}, "tasks_on_crash_known"),
        ({"resolved_by": "'ann'"}, "tasks_resolution_whole"),
        ({"resolution_note": "'fine'"}, "tasks_resolution_whole"),
        ({"name": "'no spaces'"}, "task_name_valid"),
        ({"name": "repeat('n', 201)"}, "task_name_valid"),
        ({"name": "''"}, "task_name_valid"),
        ({"name": "E'line\\n'"}, "task_name_valid"),
        ({"queue": "'Upper'"}, "queue_name_valid"),
        ({"queue": "repeat('q', 49)"}, "queue_name_valid"),
        ({"queue": "E'q\\n'"}, "queue_name_valid"),
        ({"tags": "'[]'"}, "task_tags_object"),
        ({"tags": """'{"no spaces": 1}'"""}, "task_tags_keys"),
        ({"tags": """'{"": 1}'"""}, "task_tags_keys"),
        ({"tags": "jsonb_build_object('a', repeat('x', 70000))"}, "task_tags_size"),
        ({"args": "'1'"}, "task_args_shape"),
        ({"kwargs": "'[]'"}, "task_kwargs_object"),
        ({"kwargs": "jsonb_build_object('a', repeat('x', 9000000))"}, "task_kwargs_size"),
        ({"idempotency_key": "''"}, "task_key_valid"),
        ({"serial_key": "repeat('k', 256)"}, "task_key_valid"),
    ],
)
def test_a_row_that_makes_no_sense_is_refused(conn: Conn, values: dict[str, str], constraint: str) -> None:
    """Whoever writes: the constraint is named in the error."""
    with pytest.raises(errors.CheckViolation) as refused:
        insert(conn, **values)
    assert refused.value.diag.constraint_name == constraint


@pytest.mark.parametrize("queue", ["q" * 48, "a.b-c_1"])
def test_the_longest_queue_name_can_be_notified(conn: Conn, queue: str) -> None:
    """A longer channel would make pg_notify raise inside the user's insert."""
    insert(conn, queue=f"'{queue}'")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.split()[0])
def test_the_five_records_can_be_inserted_as_printed(conn: Conn, record: str) -> None:
    """With the columns that the original documentation has, and no others: what is new is filled in."""
    number, state = record.split()
    start, end, error, retries, again, lease = EXAMPLES[number]
    values = {
        "id": "gen_random_uuid()", "name": "'send_email'", "state": f"'{state}'",
        "scheduled_at": "'2025-10-25T18:00:00'", "started_at": start, "completed_at": end,
        "created_at": "'2025-10-25T17:00:00'", "args": "'{}'", "kwargs": """'{"to": "bob@example.com"}'""",
        "error": error, "retry_count": retries, "max_retries": "3", "next_retry_at": again,
        "worker_id": "'worker-prod-01-uuid'" if lease != "null" else "null", "locked_until": lease,
        "timeout_seconds": "30", "priority": "0", "tags": "'{}'",
    }  # fmt: skip
    insert(conn, **values)


def test_an_unsuccessful_raw_row_gets_an_error_code(conn: Conn) -> None:
    """Lists of failures go by the code's index, so none may be without."""
    for state in sorted(UNSUCCESSFUL):
        insert(conn, state=f"'{state}'", completed_at="now()")
    codes = [row[0] for row in conn.execute("select error_code from tasklib.tasks order by 1")]
    assert codes == ["BURIED", "CANCELLED", "EXPIRED", "FAILED"]


def test_a_raw_insert_with_a_key_has_its_digest(conn: Conn, client: tasklib.Client) -> None:
    """Equal payloads have equal digests, whoever wrote them, whatever the order of the keys."""
    insert(conn, idempotency_key="'k'", kwargs="""'{"b": [1, 2], "a": "x"}'""")
    again = client.submit_task("t", a="x", b=[1, 2], idempotency_key="k")
    assert again.existed
    with pytest.raises(tasklib.IdempotencyConflict):
        client.submit_task("t", a="x", b=[2, 1], idempotency_key="k")


def test_the_digest_cannot_be_forged(conn: Conn) -> None:
    """It is computed by the table, for what has a key."""
    insert(conn, payload_digest="'x'")
    insert(conn, payload_digest="'x'", idempotency_key="'k'")
    digests = {row[0] for row in conn.execute("select payload_digest from tasklib.tasks")}
    assert None in digests
    assert len(digests) == 2
    assert b"x" not in digests


def test_ids_made_by_the_database_are_time_ordered(conn: Conn) -> None:
    """Raw inserts must not scatter over the primary key."""
    row = conn.execute(
        """select array_agg(id order by n) = array_agg(id order by id), count(distinct id)
             from (select n, tasklib.uuid7() as id, pg_sleep(0.001) from generate_series(1, 50) as n) as made"""
    ).fetchone()
    assert row == (True, 50)


def test_the_sql_that_tasklib_printed_still_runs(conn: Conn) -> None:
    """Every query of the original documentation, as written, with the schema on the search path."""
    conn.execute("set search_path = tasklib")
    insert(conn)
    for statement in PRINTED_SQL:
        with conn.transaction(force_rollback=True):
            conn.execute(literal(statement))


PICK_UP = """
SELECT * FROM tasks
WHERE state IN ('pending', 'failed')
  AND scheduled_at <= NOW()
  AND (locked_until IS NULL OR locked_until < NOW())
ORDER BY priority DESC{tie}
LIMIT 1
FOR UPDATE;
"""
PRINTED_SQL = [
    PICK_UP.format(tie=""),
    PICK_UP.format(tie=", created_at ASC"),
    "CREATE INDEX ix_tasks_state ON tasks (state);",
    "CREATE INDEX ix_tasks_scheduled_at ON tasks (scheduled_at);",
    "CREATE INDEX ix_tasks_locked_until ON tasks (locked_until);",
    "CREATE INDEX ix_tasks_priority ON tasks (priority);",
    "CREATE INDEX ix_tasks_name ON tasks (name);",
    """DELETE FROM tasks
       WHERE state = 'completed'
       AND completed_at < NOW() - INTERVAL '30 days';""",
    """DELETE FROM tasks
       WHERE state = 'failed'
       AND completed_at < NOW() - INTERVAL '90 days'
       AND retry_count >= max_retries;""",
    "DELETE FROM tasks WHERE state='completed' AND completed_at < NOW() - INTERVAL '30 days';",
    "SELECT id, name FROM tasks WHERE state = 'pending';",
    "SELECT id, name, error FROM tasks WHERE state = 'failed' AND completed_at > NOW() - INTERVAL '1 hour';",
    """SELECT name, COUNT(*), AVG(EXTRACT(EPOCH FROM (completed_at - started_at)))
       FROM tasks WHERE state = 'completed'
       GROUP BY name;""",
]


def test_python_and_sql_have_the_same_defaults(conn: Conn) -> None:
    """A bulk submit leaves out what equals the default of the database: the two lists must not drift apart. All ways in
    have the same.
    """
    conn.execute("""select from tasklib.submit_many('[{"name": "a", "resolved": true}, {"name": "a"}]')""")
    conn.execute("select from tasklib.submit('a')")
    conn.execute("insert into tasklib.tasks (name) values ('a')")
    rows = [row for (row,) in conn.execute("select to_jsonb(tasks) from tasklib.tasks")]
    not_stored = {"delay_seconds", "deadline_seconds", "scheduled_at"}
    defaults = {option: value for option, value in _SQL_DEFAULTS.items() if option not in not_stored}
    assert [{option: row[option] for option in defaults} for row in rows] == [defaults] * 4


def test_a_task_that_waits_waits_for_something(conn: Conn) -> None:
    """Not ready, without parents and without a time at which it is looked at, it would be lost: none can be written."""
    conn.execute("insert into tasklib.tasks (name, scheduled_at) values ('a', now() + interval '1 h')")
    with pytest.raises(errors.CheckViolation, match="tasks_state_whole"):
        conn.execute("update tasklib.tasks set due_at = null")
    conn.execute("insert into tasklib.tasks (name, expires_at) values ('b', now() + interval '1 h')")
    with pytest.raises(errors.CheckViolation, match="tasks_state_whole"):
        conn.execute("update tasklib.tasks set due_at = null where name = 'b'")
