"""What a role may not read it is not told by errors, and PostgreSQL's log does not hold what tasks are given."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.types.json import Json

from tests.support.raw_sql import literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.raw_sql import Conn

pytestmark = pytest.mark.postgres_versions

SECRET = "the-secret-4711"
# Of every parameter of a submit: what is out of all bounds, and what only SQL can give.
EXTREMES: list[tuple[str, str, Any]] = [
    ("name", "text", ""), ("name", "text", "x" * 300), ("name", "text", None), ("name", "text", "a b"),
    ("kwargs", "jsonb", None), ("kwargs", "jsonb", Json([SECRET])),
    ("args", "jsonb", None), ("args", "jsonb", Json(SECRET)),
    ("queue", "text", None), ("queue", "text", "No Queue"), ("queue", "text", "q" * 49),
    ("priority", "integer", None), ("priority", "integer", -(2**31)), ("priority", "integer", 2**31 - 1),
    ("delay_seconds", "float8", None), ("delay_seconds", "float8", -1.0), ("delay_seconds", "float8", float("nan")),
    ("delay_seconds", "float8", 1e308), ("delay_seconds", "float8", float("inf")),
    ("scheduled_at", "timestamptz", "infinity"), ("scheduled_at", "timestamptz", "-infinity"),
    ("expires_at", "timestamptz", "infinity"), ("expires_at", "timestamptz", "-infinity"),
    ("max_retries", "integer", None), ("max_retries", "integer", -1), ("max_retries", "integer", 2**31 - 1),
    ("timeout_seconds", "float8", 0.0), ("timeout_seconds", "float8", -1.0), ("timeout_seconds", "float8", 1e308),
    ("timeout_seconds", "float8", float("nan")), ("timeout_seconds", "float8", float("inf")),
    ("tags", "jsonb", None), ("tags", "jsonb", Json({"not a key": 1})), ("tags", "jsonb", Json([1])),
    ("idempotency_key", "text", ""), ("idempotency_key", "text", "k" * 300),
    ("store_result", "boolean", None),
    ("on_crash", "text", None), ("on_crash", "text", "explode"),
]  # fmt: skip


@pytest.mark.parametrize(("parameter", "kind", "value"), EXTREMES)
def test_a_refused_submit_does_not_tell_its_arguments(conn: Conn, parameter: str, kind: str, value: Any) -> None:
    """PostgreSQL logs its errors. `Failing row contains` has the whole row in it: a value is refused before there is
    one. What is not refused is stored.
    """
    given = {"name": ("text", "t"), "kwargs": ("jsonb", Json({"password": SECRET}))} | {parameter: (kind, value)}
    call = ", ".join(f"{each} => %({each})s::{kind}" for each, (kind, _) in given.items())
    values = {each: value for each, (_, value) in given.items()}
    _is_refused_quietly(conn, f"select * from tasklib.submit({call})", values)


@pytest.mark.parametrize(("parameter", "kind", "value"), EXTREMES)
@pytest.mark.parametrize("other", [{}, {"idempotency_key": "k"}], ids=["plain", "keyed"])
def test_nor_does_a_refused_bulk(conn: Conn, parameter: str, kind: str, value: Any, other: dict[str, Any]) -> None:
    """The same for submit_many, with and without a key: numbers come as JSON, or as its strings."""
    plain = value.obj if isinstance(value, Json) else value
    if isinstance(plain, float) and (plain != plain or plain in {float("inf"), float("-inf")}):  # noqa: PLR0124 - NaN
        plain = str(plain)
    task = {"name": "t", "kwargs": {"password": SECRET}} | other | {parameter: plain}
    for each in ([task], [{"name": "good"}, task]):
        _is_refused_quietly(conn, "select * from tasklib.submit_many(%(tasks)s)", {"tasks": json.dumps(each)})


def _is_refused_quietly(conn: Conn, sql: str, values: dict[str, Any]) -> None:
    try:
        conn.execute(literal(sql), values)
    except psycopg.Error as error:
        said = error.diag
        fields = (said.message_primary, said.message_detail, said.message_hint, said.context, said.internal_query)
        assert SECRET not in " ".join(filter(None, fields))
        assert "Failing row" not in (said.message_detail or "")


# --- conflicts ---


@pytest.fixture
def roles(conn: Conn) -> Iterator[None]:
    """Two that may submit and nothing else; one that may read tasks too."""
    names = ("first_app", "second_app", "reading_app")
    for name in names:
        conn.execute(literal(f"create role {name}"))
        conn.execute(literal(f"grant usage on schema tasklib to {name}"))
        conn.execute(literal(f"grant execute on function tasklib.submit, tasklib.submit_many to {name}"))
    conn.execute("grant select on tasklib.tasks to reading_app")
    yield
    conn.execute("reset role")
    for name in names:
        conn.execute(literal(f"drop owned by {name}"))
        conn.execute(literal(f"drop role {name}"))


def submit(conn: Conn, role: str, payload: int, **more: Any) -> tuple[Any, ...]:
    conn.execute(literal(f"set role {role}"))
    given = {"idempotency_key": "key"} | more
    call = ", ".join(f"{name} => %({name})s" for name in given)
    row = conn.execute(
        literal(f"select id, existed from tasklib.submit('t', %(kwargs)s::jsonb, {call})"),
        {**given, "kwargs": Json({"payload": payload})},
    ).fetchone()
    assert row is not None
    return row


def refusal(conn: Conn, role: str, payload: int, **more: Any) -> str:
    with pytest.raises(psycopg.Error) as refused:
        submit(conn, role, payload, **more)
    assert refused.value.sqlstate == "TL409"
    return f"{refused.value.diag.message_primary} {refused.value.diag.message_detail} {refused.value.diag.message_hint}"


@pytest.mark.usefixtures("roles")
def test_a_conflict_tells_who_may_not_read_nothing_else(conn: Conn) -> None:
    """Neither the other task's id, nor whether its payload was guessed: both are the same words."""
    made, _ = submit(conn, "first_app", 1)
    words = {refusal(conn, "second_app", payload) for payload in (1, 2)}
    assert len(words) == 1
    assert str(made) not in words.pop()


@pytest.mark.usefixtures("roles")
def test_the_role_that_used_a_key_can_repeat_it(conn: Conn) -> None:
    """It needs no right to read tasks, and is told of a conflict without the id."""
    made, _ = submit(conn, "first_app", 1)
    assert submit(conn, "first_app", 1) == (made, True)
    assert str(made) not in refusal(conn, "first_app", 2)


@pytest.mark.usefixtures("roles")
def test_who_may_read_tasks_is_told_of_them(conn: Conn) -> None:
    """Whoever submitted them."""
    made, _ = submit(conn, "first_app", 1)
    assert submit(conn, "reading_app", 1) == (made, True)
    assert str(made) in refusal(conn, "reading_app", 2)


@pytest.mark.usefixtures("roles")
def test_a_repeated_id_is_the_same_submit(conn: Conn) -> None:
    """After an unknown commit, on whatever connection: who knows the id has made it. Another payload is a conflict."""
    chosen = uuid4()
    submit(conn, "first_app", 1, id=chosen)
    assert submit(conn, "second_app", 1, id=chosen) == (chosen, True)
    assert "payload" not in refusal(conn, "second_app", 2, id=chosen).partition(".")[0]


@pytest.mark.usefixtures("roles")
def test_a_key_from_before_there_was_a_role_in_its_digest_can_be_repeated(conn: Conn) -> None:
    """By everybody, as it could when it was submitted."""
    made, _ = submit(conn, "first_app", 1)
    conn.execute("reset role")
    conn.execute("update tasklib.tasks set payload_digest = tasklib.payload_digest(name, args, kwargs)")
    assert submit(conn, "second_app", 1) == (made, True)
    assert str(made) not in refusal(conn, "second_app", 2)
