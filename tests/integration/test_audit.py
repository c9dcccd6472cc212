"""The audit: what operators did, and what became of tasks of audited queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import tasklib
from tasklib import migrate
from tests.integration.test_earlier_versions import ROLE, at_version, old_database
from tests.support.raw_sql import literal
from tests.support.working import get, running, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from tests.support.raw_sql import Conn

pytestmark = pytest.mark.postgres_versions
__all__ = ["old_database"]  # a fixture


def audit(conn: Conn, queue: str = "default") -> None:
    conn.execute("select tasklib.set_queue(%s, '{\"audit\": true}')", [queue])
    conn.execute("delete from tasklib.task_transitions")


def transitions(conn: Conn, task_id: UUID) -> list[tuple[Any, ...]]:
    return conn.execute(
        """select verb, before ->> 'state', after ->> 'state', reason from tasklib.task_transitions
            where task_id = %s order by id""",
        [task_id],
    ).fetchall()


def test_every_change_of_an_audited_task_is_written(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, app: None
) -> None:
    """By whom, from what, to what. A failure has its code, and the worker that held the task is the actor."""
    audit(conn)
    calls: list[int] = []

    @tasklib.task(max_retries=1, backoff=lambda _: 0.0)
    def unsteady() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("not yet")

    task_id = client.submit(unsteady.new())
    with running(config):
        wait_final(client, task_id)
    states = [(verb, before, after) for verb, before, after, _ in transitions(conn, task_id)]
    assert states == [
        ("claimed", "pending", "claimed"), ("failed", "claimed", "failed"),
        ("claimed", "failed", "claimed"), ("completed", "claimed", "completed"),
    ]  # fmt: skip
    rows = conn.execute(
        "select actor, queue, after from tasklib.task_transitions where task_id = %s order by id", [task_id]
    ).fetchall()
    (worker,) = {actor for actor, _, _ in rows}
    assert get(client, task_id).completed_by == worker
    assert {queue for _, queue, _ in rows} == {"default"}
    assert rows[1][2] == {"state": "failed", "attempt": 1, "error_code": "ValueError"}


@pytest.mark.parametrize("way", ["submit", "submit_plain", "submit_many", "by name", "insert"])
def test_a_task_is_audited_from_its_submit_on(client: tasklib.Client, conn: Conn, way: str) -> None:
    """Whichever way it came. A queue that says nothing costs its tasks nothing."""
    audit(conn)
    work = tasklib.task(name="work")(lambda: None)
    match way:
        case "submit":
            client.submit(work.options(priority=1).new())
        case "submit_plain":
            client.submit(work.new())
        case "submit_many":
            client.submit_many([work.new(), work.options(idempotency_key="k").new()])
        case "by name":
            client.submit_task("nobodys")
        case _:
            conn.execute("insert into tasklib.tasks (name) values ('work')")
    client.submit(work.options(queue="other").new())
    found = conn.execute("select distinct queue, audited from tasklib.tasks order by queue").fetchall()
    assert found == [("default", True), ("other", None)]


def test_what_does_not_change_the_state_is_not_written(conn: Conn) -> None:
    audit(conn)
    conn.execute("insert into tasklib.tasks (name) values ('a')")
    conn.execute("update tasklib.tasks set priority = 7")
    conn.execute("update tasklib.tasks set state = state")
    assert conn.execute("select count(*) from tasklib.task_transitions").fetchall() == [(0,)]


def test_every_cancel_and_retry_is_written(client: tasklib.Client, conn: Conn) -> None:
    """Of any task: it is an operator's act. One that changed nothing is none."""
    task_id = client.submit_task("a")
    assert client.cancel_task(task_id, "ordered twice") == "cancelled"
    assert client.cancel_task(task_id) is None
    assert client.retry_task(task_id)
    assert not client.retry_task(task_id)
    assert transitions(conn, task_id) == [
        ("cancel", "pending", "cancelled", "ordered twice"), ("retry", "cancelled", "pending", None),
    ]  # fmt: skip
    conn.execute(
        """update tasklib.tasks set state = 'claimed', ready = false, worker_id = 'w', claimed_at = now(),
                  locked_until = now() + interval '1 h', fencing_token = 1"""
    )
    assert client.cancel_task(task_id, "too slow") == "asked"
    assert transitions(conn, task_id)[2:] == [("cancel", "claimed", "claimed", "too slow")]
    (actor,) = conn.execute("select distinct actor from tasklib.task_transitions").fetchall()
    assert actor == ("postgres",)


def test_a_cancel_that_waited_names_the_state_that_it_found(
    client: tasklib.Client, conn: Conn, database_url: str, direct: Callable[[str], str]
) -> None:
    """Two operators at once: the second one finds the task as the first has left it."""
    task_id = client.submit_task("a")
    with psycopg.connect(direct(database_url)) as other:
        other.execute(
            """update tasklib.tasks set state = 'failed', error_code = 'X', ready = false,
                      next_retry_at = now() + interval '1 h', due_at = now() + interval '1 h'"""
        )
        with psycopg.connect(direct(database_url), autocommit=True) as second:
            with second.pipeline():
                asked = second.execute("select tasklib.cancel(%s)", [task_id])
                second.pgconn.flush()
                _wait_for_lock(conn, second.info.backend_pid)
                other.commit()
            assert asked.fetchall() == [("cancelled",)]
    assert transitions(conn, task_id) == [("cancel", "failed", "cancelled", None)]


def _wait_for_lock(conn: Conn, pid: int) -> None:
    waits = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
    wait_until(lambda: conn.execute(literal(waits), [pid]).fetchone() == (True,), "the other session to wait")


@pytest.mark.direct("roles are the server's")
@pytest.mark.parametrize("right", ["update", "update (state, ready, due_at, next_retry_at, completed_at)"])
def test_who_could_cancel_can_cancel_after_the_migration(
    old_database: str, monkeypatch: pytest.MonkeyPatch, right: str
) -> None:
    """The right to change tasks brings the right to add to the audit, and no more."""
    at_version(monkeypatch, old_database, 11)
    with psycopg.connect(old_database, autocommit=True) as conn:
        conn.execute(literal(f"grant {right} on tasklib.tasks to {ROLE}"))
        migrate.migrate(tasklib.Config(old_database))
        rights = conn.execute(
            """select has_table_privilege(%(role)s, 'tasklib.task_transitions', 'insert'),
                      has_table_privilege(%(role)s, 'tasklib.task_transitions', 'select, update, delete')""",
            {"role": ROLE},
        ).fetchall()
        assert rights == [(True, False)]
        if right == "update":
            conn.execute(literal(f"grant select on tasklib.tasks to {ROLE}"))
            conn.execute("insert into tasklib.tasks (name) values ('a')")
            conn.execute(literal(f"set role {ROLE}"))
            assert conn.execute("select tasklib.cancel(id) from tasklib.tasks").fetchall() == [("cancelled",)]
            conn.execute("reset role")
            assert conn.execute("select verb, actor from tasklib.task_transitions").fetchall() == [("cancel", ROLE)]


@pytest.mark.direct("roles are the server's")
def test_an_audited_role_needs_no_right_on_the_audit(old_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right on tasks that was given later is enough, and the change is written all the same."""
    at_version(monkeypatch, old_database, 11)
    migrate.migrate(tasklib.Config(old_database))
    with psycopg.connect(old_database, autocommit=True) as conn:
        audit(conn)
        conn.execute(literal(f"grant select, update on tasklib.tasks to {ROLE}"))
        conn.execute("insert into tasklib.tasks (name) values ('a')")
        conn.execute(literal(f"set role {ROLE}"))
        conn.execute(
            """update tasklib.tasks set state = 'cancelled', error_code = 'X', ready = false, completed_at = now()"""
        )
        conn.execute("reset role")
        found = conn.execute("select verb, actor from tasklib.task_transitions").fetchall()
        assert found == [("cancelled", ROLE)]
