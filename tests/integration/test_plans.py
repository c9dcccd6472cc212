"""The plans of submit, get and list over a million rows: pinned, with fresh statistics, without any, and generic."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import psycopg
import pytest

import tasklib
from tasklib import migrate
from tasklib.sql import queries
from tests.support.raw_sql import Conn, NewDatabase, literal
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.postgres_versions,
    pytest.mark.direct("asks for the plans of prepared statements, in sessions of its own"),
]

# Mostly completed, one in a thousand failed, the newest thousand pending; five names, one of them rare. Ids grow with
# time, as those of uuid7() do, which would take twice as long as all the rest.
FILL = """
insert into tasklib.tasks (id, name, state, ready, created_at, scheduled_at, completed_at, error, error_code, kwargs,
                           idempotency_key, queue, priority, max_retries, store_result)
select lpad(to_hex(n), 32, '0')::uuid, case when n % 100000 = 0 then 'rare' else 'name_' || n % 4 end,
       case when n > 999000 then 'pending' when n % 1000 = 0 then 'failed' else 'completed' end, n > 999000,
       now() - (1000000 - n) * interval '1 second', now() - (1000000 - n) * interval '1 second',
       case when n <= 999000 then now() end, case when n <= 999000 and n % 1000 = 0 then 'OSError: no' end,
       case when n <= 999000 and n % 1000 = 0 then 'OSError' end, '{"to": "someone@example.com"}',
       case when n % 10 = 0 then 'key-' || n end, 'default', 0, 3, true
from generate_series(1, 1000000) as n
"""


@pytest.fixture(scope="module")
def million(new_database: NewDatabase) -> Iterator[Conn]:
    url = new_database()
    migrate.migrate(tasklib.Config(url))
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as conn:
        conn.execute("alter table tasklib.tasks set (autovacuum_enabled = off)")
        conn.execute("alter table tasklib.tasks disable trigger ring_on_insert")
        conn.execute(literal(FILL))
        conn.execute("alter table tasklib.tasks enable trigger ring_on_insert")
        yield conn


@pytest.fixture(params=["no statistics", "fresh statistics"])
def conn(request: pytest.FixtureRequest, million: Conn) -> Conn:
    if request.param == "no statistics":
        million.execute("delete from pg_statistic where starelid = 'tasklib.tasks'::regclass")
        million.execute("update pg_class set reltuples = -1, relpages = 0 where oid = 'tasklib.tasks'::regclass")
    else:
        million.execute("analyze tasklib.tasks")
    return million


@pytest.fixture(params=["auto", "force_generic_plan"])
def plan_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def explain(conn: Conn, plan_mode: str, query: str, *values: str) -> str:
    """The plan of a named query, run for real; the values are SQL literals."""
    conn.execute(literal(f"set plan_cache_mode = {plan_mode}"))
    conn.execute("deallocate all")
    conn.execute(literal(f"prepare query as {queries('tasks', 'tasklib')[query]}"))
    call = f"explain (analyze, buffers, costs off, timing off) execute query({', '.join(values)})"
    return "\n".join(row[0] for row in conn.execute(literal(call)))


def buffers(plan: str) -> int:
    """Pages touched by the execution: the first such line is the whole plan's."""
    found = re.search(r"Buffers: shared ([^\n]+)", plan)
    assert found is not None, plan
    return sum(int(count) for count in re.findall(r"(?:hit|read)=(\d+)", found[1]))


def middle_id(conn: Conn) -> str:
    row = conn.execute("select id from tasklib.tasks order by id desc offset 500000 limit 1").fetchone()
    assert row is not None
    return f"'{row[0]}'"


def listing(after: str = "null", state: str = "null", name: str = "null", limit: str = "100") -> list[str]:
    return [after, state, name, "null", "null", "null", "null", limit, "null"]


def test_get_reads_one_row_by_its_key(conn: Conn, plan_mode: str) -> None:
    """An index scan on the primary key."""
    plan = explain(conn, plan_mode, "get", middle_id(conn))
    assert "Index Scan using tasks_pkey" in plan
    assert buffers(plan) <= 8


def test_the_beginning_of_an_id_is_a_range_of_the_primary_key(conn: Conn, plan_mode: str) -> None:
    """Also one that half of the table has."""
    plan = explain(conn, plan_mode, "ids_between", middle_id(conn), "'ffffffff-ffff-ffff-ffff-ffffffffffff'")
    assert re.search(r"Index (Only )?Scan using tasks_pkey", plan)
    assert "Sort" not in plan
    assert buffers(plan) <= 12


def test_attempts_are_found_by_the_key_of_their_task(conn: Conn, plan_mode: str) -> None:
    """In the table of attempts, and in the task's own row."""
    plan = explain(conn, plan_mode, "attempts", middle_id(conn))
    assert "Index Scan using tasks_pkey" in plan
    assert "Seq Scan on tasks" not in plan
    assert buffers(plan) <= 20


@pytest.mark.parametrize("state", ["null", "'completed'"])
def test_list_walks_the_primary_key_backwards(conn: Conn, plan_mode: str, state: str) -> None:
    """The newest hundred cost a few pages, whatever the size of the table."""
    plan = explain(conn, plan_mode, "list", *listing(state=state))
    assert "Index Scan Backward using tasks_pkey" in plan
    assert "Sort" not in plan
    assert buffers(plan) <= (2_000 if state != "null" else 200)


def test_a_page_in_the_middle_starts_there(conn: Conn, plan_mode: str) -> None:
    """`after` is a bound of the scan, not a filter: page 5,000 costs as much as page 1."""
    plan = explain(conn, plan_mode, "list", *listing(after=middle_id(conn)))
    assert "Index Scan Backward using tasks_pkey" in plan
    assert re.search(r"Index Cond: \(id < ", plan)
    assert buffers(plan) <= 200


def test_failures_are_found_among_a_million(conn: Conn, plan_mode: str) -> None:
    """Through the index that has nothing but unsuccessful tasks."""
    plan = explain(conn, plan_mode, "list_unsuccessful", *listing(state="'failed'"))
    assert "Index Scan Backward using tasks_unsuccessful" in plan
    assert "Sort" not in plan
    assert buffers(plan) <= 300


def test_a_rare_failure_is_looked_for_among_failures_only(conn: Conn, plan_mode: str) -> None:
    """A filter that matches nothing reads a thousand rows, not a million."""
    plan = explain(conn, plan_mode, "list_unsuccessful", *listing(state="'failed'", name="'no_such_name'"))
    assert "tasks_unsuccessful" in plan
    assert buffers(plan) <= 2_500


@pytest.mark.parametrize("key", ["null", "'new-key'", "'key-500000'"])
def test_submit_touches_a_few_pages(conn: Conn, plan_mode: str, key: str) -> None:
    """Also when the key is taken: found by its index, not by a scan."""
    name = "'rare'" if key == "'key-500000'" else "'fresh'"
    arguments = [
        "null", name, "'{}'", """'{"to": "someone@example.com"}'""", "'default'", "0", "0", "null", "null", "3",
        "null", "'{}'", key, "true", "'retry'", "null", "null", "'{}'",
    ]  # fmt: skip
    with conn.transaction(force_rollback=True):
        plan = explain(conn, plan_mode, "submit", *arguments)
    assert buffers(plan) <= 1_000, plan


def test_a_plan_from_when_the_table_was_small_does_no_harm(new_database: NewDatabase) -> None:
    """A connection that met an existing key in an almost empty table keeps that plan; it must not be a scan."""
    url = new_database()
    task = tasklib.task(name="once")(lambda: None)
    with psycopg.connect(url, autocommit=True) as other:
        with tasklib.Client(tasklib.Config(url, pool_size=1)) as client:
            client.list_tasks()
            other.execute("alter table tasklib.tasks set (autovacuum_enabled = off)")
            for _ in range(12):
                client.submit(task.options(idempotency_key="k").new())
            other.execute(
                """insert into tasklib.tasks (name, idempotency_key)
                   select 'once', 'k' || n from generate_series(1, 30000) as n"""
            )
            client.submit_many([task.options(idempotency_key=f"k{n}").new() for n in range(1, 200)])
        # A backend's counts are complete when it has gone.
        clients = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        wait_until(lambda: other.execute(clients).fetchone() == (0,), "the client's backend to go")
        read = "select seq_tup_read from pg_stat_user_tables where relname = 'tasks'"
        row = other.execute(read).fetchone()
    assert row is not None
    assert row[0] < 30_000
