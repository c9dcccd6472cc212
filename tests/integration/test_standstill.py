"""A worker that sees waiting tasks in the statistics, and can claim none of them, says so."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import tasklib
from tasklib.duties.standstill import Standstill
from tasklib.duties.unserved_names import UnservedNames
from tasklib.runtime.session import Session
from tasklib.statements import WorkerStatements
from tests.support.raw_sql import literal
from tests.support.working import ManualWorker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from tests.support.raw_sql import Conn

pytestmark = pytest.mark.direct("roles and policies are the server's")

ROLE = "hidden_from"
MAKE_OLD = """
update tasklib.tasks set (created_at, scheduled_at) = (now() - hour, now() - hour)
  from (values (interval '1 hour')) as one (hour)
"""


@pytest.fixture
def session(conn: Conn, database_url: str) -> Iterator[Session]:
    """Of a role that may do what a worker does, and that a policy may concern."""
    conn.execute(literal(f"create role {ROLE} login"))
    conn.execute(literal(f"grant usage on schema tasklib to {ROLE}"))
    conn.execute(literal(f"grant select, insert, update, delete on all tables in schema tasklib to {ROLE}"))
    conn.execute(literal(f"grant execute on all functions in schema tasklib to {ROLE}"))
    made = Session(tasklib.Config(make_conninfo(database_url, user=ROLE)), "duties")
    yield made
    made.close()
    conn.execute("alter table tasklib.tasks disable row level security")
    conn.execute("drop policy if exists a_part on tasklib.tasks")
    conn.execute(literal(f"drop owned by {ROLE}; drop role {ROLE}"))


def standstill(session: Session, queues: list[str] | None = None, old_seconds: float = 0.0) -> Standstill:
    config = tasklib.Config("")
    return Standstill(config, session, WorkerStatements(config), queues, old_seconds=old_seconds)


POLICIES = {
    "none": "",
    "for reading": "create policy a_part on tasklib.tasks for select using (true)",
    "of another queue": "create policy a_part on tasklib.tasks using (queue = 'other')",
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("queues", [None, ["default"]])
def test_tasks_that_a_policy_hides(
    conn: Conn, session: Session, caplog: pytest.LogCaptureFixture, policy: str, queues: list[str] | None
) -> None:
    """Nothing is refused: claims come back empty. At the second look it is an error, told once, and over when the rows
    can be seen.
    """
    conn.execute("insert into tasklib.tasks (name) values ('job')")
    conn.execute("alter table tasklib.tasks enable row level security")
    if POLICIES[policy]:
        conn.execute(literal(POLICIES[policy]))
    duty = standstill(session, queues)
    duty.run_once()
    assert duty.hidden == []
    for _ in range(2):
        duty.run_once()
        assert duty.hidden == ["default"]
    told = [record.getMessage() for record in caplog.records if "tasks.unclaimable" in record.getMessage()]
    assert len(told) == 1
    assert "tasklib doctor" in told[0]
    conn.execute("alter table tasklib.tasks disable row level security")
    duty.run_once()
    assert duty.hidden == []


def test_a_lock_that_nobody_gives_back(conn: Conn, session: Session, database_url: str) -> None:
    """The only task that waits is held by somebody's transaction."""
    conn.execute("insert into tasklib.tasks (name) values ('job')")
    duty = standstill(session)
    with psycopg.connect(database_url) as holder:
        holder.execute("select from tasklib.tasks for update")
        duty.run_once()
        duty.run_once()
        assert duty.hidden == ["default"]
    duty.run_once()
    assert duty.hidden == []


CLOSED = {
    "paused": "select tasklib.pause_queue('mail')",
    "capped": """
        select tasklib.set_queue('mail', '{"max_running": 3}'), tasklib.permit('mail', 'a', 2, 0),
               tasklib.permit('mail', 'b', 2, 0)
    """,
    "capped to nothing": """select tasklib.set_queue('mail', '{"max_running": 0}')""",
}


@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("queues", [None, ["mail", "other"]])
def test_a_closed_queue_is_no_standstill(
    conn: Conn, session: Session, database_url: str, closed: str, queues: list[str] | None
) -> None:
    """Who has paused a queue may hold its rows for as long as he corrects them. A queue that stands still beside it is
    found, and named alone. A cap of which a part is free closes nothing.
    """
    conn.execute("insert into tasklib.tasks (name, queue) values ('job', 'mail')")
    conn.execute(literal(CLOSED[closed]))
    duty = standstill(session, queues)
    with psycopg.connect(database_url) as holder:
        holder.execute("select from tasklib.tasks for update")
        for _ in range(3):
            duty.run_once()
            assert duty.hidden == []
        conn.execute("insert into tasklib.tasks (name, queue) values ('job', 'other')")
        holder.execute("select from tasklib.tasks for update")
        for _ in range(3):  # it was not the one that was seen before
            duty.run_once()
        assert duty.hidden == ["other"]
        conn.execute("delete from tasklib.permits where worker_id = 'b'")
        conn.execute("select tasklib.resume_queue('mail'), tasklib.set_queue('mail', '{\"max_running\": 3}')")
        for _ in range(3):  # it was not the one that was seen before
            duty.run_once()
        assert duty.hidden == ["mail", "other"]


def test_a_closed_queue_hides_no_standstill_behind_it(conn: Conn, session: Session, database_url: str) -> None:
    """Rows of the paused queue can be locked; those of the other one cannot."""
    conn.execute("insert into tasklib.tasks (name, queue) values ('job', 'a_paused_one'), ('job', 'mail')")
    conn.execute("select tasklib.pause_queue('a_paused_one')")
    duty = standstill(session)
    with psycopg.connect(database_url) as holder:
        holder.execute("select from tasklib.tasks where queue = 'mail' for update")
        for _ in range(3):  # it was not the one that was seen before
            duty.run_once()
        assert duty.hidden == ["mail"]


def test_a_cap_over_all_queues_that_is_in_use_is_no_standstill(conn: Conn, session: Session, database_url: str) -> None:
    conn.execute("insert into tasklib.tasks (name) values ('job')")
    conn.execute("select tasklib.set_cluster('{\"cluster_wide_cap\": 1}'), tasklib.permit('*', 'a', 1, 0)")
    duty = standstill(session)
    with psycopg.connect(database_url) as holder:
        holder.execute("select from tasklib.tasks for update")
        for _ in range(3):
            duty.run_once()
            assert duty.hidden == []


def test_what_is_no_standstill(conn: Conn, session: Session) -> None:
    """Tasks that could be claimed, also if nobody does; queues of others; what is new; what is not ready."""
    conn.execute("insert into tasklib.tasks (name, queue) values ('job', 'other')")
    conn.execute("insert into tasklib.tasks (name, scheduled_at) values ('later', now() + interval '1 hour')")
    for duty in (standstill(session), standstill(session, ["default"])):
        for _ in range(3):
            duty.run_once()
            assert duty.hidden == []
    conn.execute("alter table tasklib.tasks enable row level security")
    duty = standstill(session, old_seconds=3600)
    for _ in range(3):
        duty.run_once()
        assert duty.hidden == []


@pytest.mark.parametrize("queues", [None, ["default"]])
def test_only_a_task_that_was_seen_before_is_locked_by_the_look(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, session: Session, queues: list[str] | None
) -> None:
    """A claim passes over what is locked: a worker that looks for its first task at that moment would go to sleep, and
    run_until_empty() would end. The age alone is not enough: `travel` makes tasks old that become ready only now.
    """
    statements = WorkerStatements(config)
    seen: list[UUID] = []
    with contextlib.closing(ManualWorker(config, "worker")) as worker:
        for is_old in (False, True):
            task_id = client.submit_task("job")
            if is_old:
                conn.execute(MAKE_OLD)
            session.connection().execute("begin")
            can_claim, seen = session.run(statements.lockable(queues, 10.0, None))
            assert (can_claim, seen) == (not is_old, [task_id])
            assert len(worker.claim("job")) == 1
            session.connection().execute("rollback")
        client.submit_task("job")
        conn.execute(MAKE_OLD)
        assert session.run(statements.lockable(queues, 10.0, seen))[0]  # the other one was claimed
        _, seen = session.run(statements.lockable(queues, 10.0, None))
        session.connection().execute("begin")
        assert session.run(statements.lockable(queues, 10.0, seen))[0]
        assert worker.claim("job") == []
        session.connection().execute("rollback")
        assert len(worker.claim("job")) == 1


@pytest.mark.parametrize("queues", [None, ["mail", "default"]])
def test_a_paused_queue_needs_no_worker(
    conn: Conn, config: tasklib.Config, session: Session, queues: list[str] | None
) -> None:
    """Its workers may have been taken away. Names that wait elsewhere are told."""
    conn.execute("insert into tasklib.tasks (name, queue) values ('a', 'mail'), ('b', 'default')")
    duty = UnservedNames(session, WorkerStatements(config), queues)
    duty.run_once()
    assert duty.unserved == ["a", "b"]
    conn.execute("select tasklib.pause_queue('mail')")
    duty.run_once()
    assert duty.unserved == ["b"]
    conn.execute("update tasklib.queues set (paused_at, paused_until) = (now() - interval '1 hour', now())")
    duty.run_once()
    assert duty.unserved == ["a", "b"]
