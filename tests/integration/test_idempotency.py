"""One key, one task: two submitters at once, in every order and every form."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

import psycopg
import pytest

import tasklib
from tools.waiting import wait_until_blocked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.raw_sql import Conn

pytestmark = pytest.mark.postgres_versions

Outcome = tuple[UUID, bool]


class Submit(Protocol):
    def __call__(self, conn: Conn, key: str, payload: int) -> Outcome: ...


@pytest.fixture(params=["single", "bulk", "sql", "sql_many"])
def submit(request: pytest.FixtureRequest, client: tasklib.Client) -> Submit:
    """The four ways in, on a connection whose transaction the test holds."""
    task = tasklib.task(name="once")(_once)

    def single(conn: Conn, key: str, payload: int) -> Outcome:
        made = client.submit(task.options(idempotency_key=key).new(payload), connection=conn)
        return made, made.existed

    def bulk(conn: Conn, key: str, payload: int) -> Outcome:
        others = [task.options(idempotency_key=f"{key}-{payload}-{n}").new(n) for n in range(3)]
        made = client.submit_many([*others, task.options(idempotency_key=key).new(payload)], connection=conn)[-1]
        return made, made.existed

    def sql(conn: Conn, key: str, payload: int) -> Outcome:
        row = conn.execute(
            "select * from tasklib.submit('once', %s, idempotency_key => %s)", [json.dumps({"payload": payload}), key]
        ).fetchone()
        assert row is not None
        return row[0], row[1]

    def sql_many(conn: Conn, key: str, payload: int) -> Outcome:
        tasks = [{"name": "once", "kwargs": {"payload": payload}, "idempotency_key": key}]
        row = conn.execute("select id, existed from tasklib.submit_many(%s)", [json.dumps(tasks)]).fetchone()
        assert row is not None
        return row[0], row[1]

    ways: dict[str, Submit] = {"single": single, "bulk": bulk, "sql": sql, "sql_many": sql_many}
    return ways[request.param]


def _once(payload: int) -> None: ...


@pytest.fixture
def two(database_url: str) -> Iterator[tuple[Conn, Conn]]:
    with (
        psycopg.connect(database_url, application_name="first") as first,
        psycopg.connect(database_url, application_name="second") as second,
    ):
        yield first, second


def run_second_while_first_is_open(
    two: tuple[Conn, Conn], watcher: Conn, submit: Submit, *, payload: int, end: Callable[[Conn], None]
) -> Outcome | Exception:
    """The second submit waits for the first one's transaction; then that ends, one way or the other."""
    first, second = two
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(submit, second, "key", payload)
        wait_until_blocked(watcher, second)
        end(first)
        error = waiting.exception(timeout=20)
    if error is None:
        second.commit()
        return waiting.result()
    second.rollback()
    assert isinstance(error, Exception)
    return error


def test_the_same_payload_after_a_commit_is_the_same_task(two: tuple[Conn, Conn], conn: Conn, submit: Submit) -> None:
    """The second waits, then is told the first one's id, and that it existed."""
    made, existed = submit(two[0], "key", 1)
    second = run_second_while_first_is_open(two, conn, submit, payload=1, end=lambda first: first.commit())
    assert existed is False
    assert second == (made, True)


def test_another_payload_after_a_commit_is_a_conflict(two: tuple[Conn, Conn], conn: Conn, submit: Submit) -> None:
    """The second waits, then is refused, with the key named."""
    submit(two[0], "key", 1)
    second = run_second_while_first_is_open(two, conn, submit, payload=2, end=lambda first: first.commit())
    assert is_conflict(second)


@pytest.mark.parametrize("payload", [1, 2])
def test_after_a_rollback_the_second_is_the_first(
    two: tuple[Conn, Conn], conn: Conn, submit: Submit, payload: int
) -> None:
    """What was rolled back never existed, so any payload is new."""
    made, _ = submit(two[0], "key", 1)
    second = run_second_while_first_is_open(two, conn, submit, payload=payload, end=lambda first: first.rollback())
    assert isinstance(second, tuple)
    assert second[0] != made
    assert second[1] is False
    assert conn.execute("select kwargs->'payload' from tasklib.tasks where idempotency_key = 'key'").fetchall() == [
        (payload,)
    ]


def test_within_one_transaction_the_first_is_seen(two: tuple[Conn, Conn], submit: Submit) -> None:
    """No waiting for oneself; the second call existed, another payload conflicts."""
    made, _ = submit(two[0], "key", 1)
    assert submit(two[0], "key", 1) == (made, True)
    with pytest.raises((tasklib.IdempotencyConflict, psycopg.Error)) as refused:
        submit(two[0], "key", 2)
    assert is_conflict(refused.value)


def test_under_repeatable_read_a_newer_task_is_a_serialization_failure(
    two: tuple[Conn, Conn], conn: Conn, submit: Submit
) -> None:
    """The snapshot cannot see the other task; PostgreSQL's usual answer is to repeat the transaction."""
    first, second = two
    second.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    second.execute("select 1")
    submit(first, "key", 1)
    first.commit()
    with pytest.raises((psycopg.errors.SerializationFailure, tasklib.DatabaseError)) as refused:
        submit(second, "key", 1)
    assert getattr(refused.value, "sqlstate", None) == "40001"
    second.rollback()


def is_conflict(error: object) -> bool:
    if isinstance(error, tasklib.IdempotencyConflict):
        return "'key'" in str(error)
    return isinstance(error, psycopg.Error) and error.sqlstate == "TL409"


def test_overlapping_bulks_wait_for_each_other_in_one_order(
    two: tuple[Conn, Conn], conn: Conn, database_url: str, client: tasklib.Client
) -> None:
    """Forced: both bulks have begun when a third transaction, which holds a key in the middle, lets go.

    In the order given, each would hold what the other needs next; in the order of the keys, one waits for the other.
    """
    task = tasklib.task(name="once")(_once)

    def submit_keys(mine: Conn, keys: str) -> list[tasklib.TaskId]:
        made = client.submit_many([task.options(idempotency_key=key).new(1) for key in keys], connection=mine)
        mine.commit()
        return made

    with psycopg.connect(database_url) as gate, ThreadPoolExecutor(2) as pool:
        client.submit(task.options(idempotency_key="m").new(1), connection=gate)
        forth, back = (pool.submit(submit_keys, mine, keys) for mine, keys in zip(two, ("amz", "zma"), strict=True))
        for mine in two:
            wait_until_blocked(conn, mine)
        gate.rollback()
        assert forth.result(timeout=20) == back.result(timeout=20)[::-1]


def test_a_sql_bulk_goes_by_the_order_of_its_keys(
    two: tuple[Conn, Conn], conn: Conn, database_url: str, client: tasklib.Client
) -> None:
    """The same for tasklib.submit_many called from any other language, which does not sort by itself."""

    def submit_keys(mine: Conn, keys: str) -> dict[str, UUID]:
        tasks = json.dumps([{"name": "once", "idempotency_key": key} for key in keys])
        rows = mine.execute("select ordinal, id from tasklib.submit_many(%s)", [tasks]).fetchall()
        mine.commit()
        return {keys[ordinal - 1]: task_id for ordinal, task_id in rows}

    with psycopg.connect(database_url) as gate, ThreadPoolExecutor(2) as pool:
        client.submit_task("once", idempotency_key="m", connection=gate)
        forth, back = (pool.submit(submit_keys, mine, keys) for mine, keys in zip(two, ("amz", "zma"), strict=True))
        for mine in two:
            wait_until_blocked(conn, mine)
        gate.rollback()
        assert forth.result(timeout=20) == back.result(timeout=20)


def test_the_same_new_tasks_in_opposite_orders_cannot_deadlock(
    two: tuple[Conn, Conn], conn: Conn, database_url: str, client: tasklib.Client
) -> None:
    """Without keys they meet by their ids: those have an order too."""
    first, middle, last = (tasklib.task(name="once")(_once).new(1) for _ in range(3))

    def submit_in(mine: Conn, news: list[tasklib.NewTask]) -> int:
        made = client.submit_many(news, connection=mine)
        mine.commit()
        return len(made)

    with psycopg.connect(database_url) as gate, ThreadPoolExecutor(2) as pool:
        client.submit(middle, connection=gate)
        orders = ([first, middle, last], [last, middle, first])
        waiting = [pool.submit(submit_in, mine, order) for mine, order in zip(two, orders, strict=True)]
        for mine in two:
            wait_until_blocked(conn, mine)
        gate.rollback()
        assert [each.result(timeout=20) for each in waiting] == [3, 3]
    assert len(client.list_tasks()) == 3


def test_a_key_twice_in_one_bulk(client: tasklib.Client) -> None:
    """The same payload is one task, whose second mention existed; another payload refuses the whole bulk."""
    task = tasklib.task(name="once")(_once).options(idempotency_key="twice")
    first, second = client.submit_many([task.new(1), task.new(1)])
    assert first == second
    assert (first.existed, second.existed) == (False, True)
    with pytest.raises(tasklib.IdempotencyConflict):
        client.submit_many([task.options(idempotency_key="other").new(1), task.options(idempotency_key="other").new(2)])
    assert len(client.list_tasks()) == 1


def test_another_task_with_the_same_key_is_a_conflict(client: tasklib.Client) -> None:
    """The name is part of the payload; options such as the queue or the delay are not."""
    client.submit_task("a", idempotency_key="key")
    assert client.submit_task("a", idempotency_key="key", queue="other", delay_seconds=5, tags={"x": 1}).existed
    with pytest.raises(tasklib.IdempotencyConflict, match="new key for new work"):
        client.submit_task("b", idempotency_key="key")


def test_an_id_that_belongs_to_another_task_is_a_conflict(client: tasklib.Client, conn: Conn) -> None:
    """Nothing is lost in silence when a foreign producer repeats an id for other work."""
    made = client.submit_task("a", n=1)
    with pytest.raises(psycopg.Error, match="another payload") as refused:
        conn.execute("select * from tasklib.submit('a', '{\"n\": 2}', id => %s)", [made])
    assert refused.value.sqlstate == "TL409"
