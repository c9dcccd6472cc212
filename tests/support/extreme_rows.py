"""Rows with extreme values in every column, as far as PostgreSQL stores them, beside healthy ones: for tests and
campaigns that show that one bad row never fails its batch.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import psycopg

from tests.support.raw_sql import literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.raw_sql import Conn

NAME = "healthy"
TIMES = [
    "'infinity'", "'-infinity'", "'4713-01-01 00:00:00+00 BC'", "'294276-12-31 23:59:59.999999+00'",
    "'0001-01-02 00:00:00+00'", "'9999-12-30 00:00:00+00'", "clock_timestamp() - interval '100 years'",
]  # fmt: skip
INTEGERS = ["-2147483648", "-1", "0", "999999999", "1000000000", "2147483646", "2147483647"]
TEXTS = ["''", "repeat('x', 200)", "repeat('y', 100000)", "E'\\n\\t\\x01'", "U&'\\+01F600'"]
DOCUMENTS = [
    "'{}'", "'[]'", "'null'", "'{\"a\": 1e400}'", "'{\"a\": \"\\\\ud83d\\\\ude00\"}'",
    "jsonb_build_object('a', repeat('z', 1000000))", "(repeat('[', 6000) || repeat(']', 6000))::jsonb",
]  # fmt: skip
BOOLEANS = ["true", "false"]
UUIDS = ["'00000000-0000-0000-0000-000000000000'", "'ffffffff-ffff-ffff-ffff-ffffffffffff'"]

# By column: what is tried. `state`, `ready` and `due_at` say what kind of row it is, and are the kinds' own.
EXTREMES: dict[str, list[str]] = {
    "id": UUIDS,
    **dict.fromkeys(
        [
            "created_at",
            "scheduled_at",
            "expires_at",
            "deadline_at",
            "next_retry_at",
            "started_at",
            "completed_at",
            "claimed_at",
            "locked_until",
            "cancel_asked_at",
            "resolved_at",
        ],
        TIMES,
    ),
    **dict.fromkeys(
        ["priority", "retry_count", "max_retries", "attempt", "crash_count", "strikes", "pending_parents"], INTEGERS
    ),
    "fencing_token": ["1", "4611686018427387903", "4611686018427387904", "9223372036854775806", "9223372036854775807"],
    "timeout_seconds": ["5e-324", "3153600000", "3153600001", "1e15", "1e300", "1e308", "'infinity'", "'NaN'"],
    **dict.fromkeys(["suspect", "store_result", "audited"], BOOLEANS),
    "on_crash": ["'fail'"],
    **dict.fromkeys(["queue", "name", "serial_key", "idempotency_key"], TEXTS),
    **dict.fromkeys(["error", "error_code", "worker_id", "resolved_by", "resolution_note", "step_name"], TEXTS),
    **dict.fromkeys(["args", "kwargs", "tags", "result", "progress", "trace_headers"], DOCUMENTS),
    "payload_digest": ["'\\x'", "decode(repeat('00', 100000), 'hex')"],
    **dict.fromkeys(["parent_id", "workflow_id"], UUIDS),
    "completed_by": ["row(repeat('w', 100000), '', '', 2147483647)", "row(null, null, null, null)"],
}
OF_THE_KIND = {"state", "ready", "due_at"}

LONG_AGO = "clock_timestamp() - interval '200 days'"
HELD = {
    "fencing_token": "7", "attempt": "1", "claimed_at": LONG_AGO, "locked_until": LONG_AGO, "ready": "false",
    "worker_id": "'dead'", "name": f"'{NAME}'",
}  # fmt: skip
# What each kind of row is before somebody does his duty by it.
KINDS: dict[str, dict[str, str]] = {
    "claimed": {**HELD, "state": "'claimed'", "attempt": "0"},
    "running": {**HELD, "state": "'running'", "started_at": LONG_AGO},
    "asked": {**HELD, "state": "'running'", "started_at": LONG_AGO, "cancel_asked_at": LONG_AGO},
    "ready": {"state": "'pending'", "ready": "true", "name": f"'{NAME}'"},
    "due": {"state": "'pending'", "ready": "false", "due_at": LONG_AGO, "name": f"'{NAME}'"},
    "retrying": {
        "state": "'failed'", "ready": "false", "due_at": LONG_AGO, "next_retry_at": LONG_AGO, "error_code": "'X'",
        "name": f"'{NAME}'",
    },
    "late": {"state": "'pending'", "ready": "true", "due_at": LONG_AGO, "expires_at": LONG_AGO, "name": "'nobodys'"},
    "old": {"state": "'completed'", "ready": "false", "completed_at": LONG_AGO, "name": f"'{NAME}'"},
    "failed": {
        "state": "'failed'", "ready": "false", "completed_at": LONG_AGO, "error_code": "'X'", "name": f"'{NAME}'",
    },
}  # fmt: skip


def old_id() -> UUID:
    """As it would have been made long ago, so that the janitor looks at it."""
    return UUID(int=uuid4().int >> 8 | 1 << 80)


def insert(conn: Conn, kind: str, values: dict[str, str]) -> UUID | None:
    """None: PostgreSQL refuses to store it."""
    row = {"id": f"'{old_id()}'", **KINDS[kind], **values}
    columns, expressions = ", ".join(row), ", ".join(row.values())
    try:
        with conn.transaction():
            found = conn.execute(
                literal(f"insert into tasklib.tasks ({columns}) values ({expressions}) returning id")
            ).fetchone()
            assert found is not None
            task_id: UUID = found[0]
            if "worker_id" in row:
                conn.execute(NOTE_CLAIM, [task_id])
    except psycopg.Error:
        return None
    return task_id


NOTE_CLAIM = """
insert into tasklib.claims (worker_id, locked_until, task_ids)
select worker_id, '2020-01-01', array[id] from tasklib.tasks where id = %s
"""


def mixtures(kinds: Sequence[str], seed: int, count: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Every extreme alone, in each kind; then some together."""
    yield from ((kind, {column: value}) for kind in kinds for column, values in EXTREMES.items() for value in values)
    dice = random.Random(seed)
    for _ in range(count):
        columns = dice.sample(sorted(EXTREMES), dice.randint(2, 5))
        yield dice.choice(kinds), {column: dice.choice(EXTREMES[column]) for column in columns}


def poison(conn: Conn, kinds: Sequence[str], *, seed: int = 0, count: int = 100, healthy: int = 20) -> dict[str, Any]:
    """Fills the table. By kind: the ids of healthy rows, which lie among the others in every order."""
    made: dict[str, list[UUID]] = {kind: [] for kind in kinds}
    stored = 0
    mixed = list(mixtures(kinds, seed, count))
    every = max(len(mixed) // healthy, 1)
    for number, (kind, values) in enumerate(mixed):
        stored += insert(conn, kind, values) is not None
        if number % every == 0:
            for each in kinds:
                task_id = insert(conn, each, {})
                assert task_id is not None
                made[each].append(task_id)
    assert stored > len(mixed) / 10, "hardly anything was stored: nothing is tried"
    return made
