"""What has been kept for long enough goes, page by page, and nothing that somebody may still want."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import psycopg
import pytest

import tasklib
from tasklib import migrate
from tasklib.duties import janitor
from tasklib.duties.janitor import DAY_SECONDS, EVERY_SECONDS, Janitor, Retention
from tasklib.duties.reaper import Reaper
from tasklib.duties.statements import KeeperStatements
from tasklib.runtime.session import Session
from tasklib.statements import WorkerStatements
from tests.support.explain import explain
from tests.support.history import id_of, keep
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.raw_sql import Conn, NewDatabase

pytestmark = pytest.mark.postgres_versions

NEVER = Retention(completed_seconds=None, failed_seconds=None, states_seconds=None, audit_seconds=None)
FIRST, LAST = UUID(int=0), UUID(int=2**128 - 1)


def left(conn: Conn) -> set[UUID]:
    attempts = {row[0] for row in conn.execute("select task_id from tasklib.task_attempts")}
    tasks = {row[0] for row in conn.execute("select id from tasklib.tasks")}
    assert attempts == tasks, "attempts go with their task"
    return tasks


@pytest.fixture
def session(config: tasklib.Config) -> Iterator[Session]:
    made = Session(config, "test")
    yield made
    made.close()


@pytest.fixture
def pass_once(config: tasklib.Config, session: Session) -> Callable[[Retention], int]:
    """One pass of a janitor; answers how many rounds it took."""

    def run(retention: Retention) -> int:
        janitor, rounds = Janitor(session, KeeperStatements(config), retention), 1
        while (pause := janitor.run_once()) != EVERY_SECONDS:
            assert pause is not None
            assert pause <= 5
            rounds += 1
        return rounds

    return run


def test_what_is_old_enough_goes_with_its_attempts(conn: Conn, pass_once: Callable[[Retention], int]) -> None:
    """Completed, cancelled and expired after 30 days, failed after 90; buried never, nor what still waits."""
    old = [keep(conn, state, 31) for state in ("completed", "cancelled", "expired")] + [keep(conn, "failed", 91)]
    kept = [keep(conn, state, 29) for state in ("completed", "cancelled", "expired")]
    kept += [keep(conn, "failed", 89), keep(conn, "buried", 9_000)]
    kept += [keep(conn, "pending", 9_000), keep(conn, "retrying", 9_000)]
    # Made long ago, and finished lately.
    kept.append(keep(conn, "completed", 60, completed_at=datetime.now(UTC)))
    pass_once(Retention())
    assert left(conn) == set(kept)
    assert not left(conn) & set(old)


def test_none_keeps_for_ever(conn: Conn, pass_once: Callable[[Retention], int]) -> None:
    """Each kind by itself; and with all of them the tasks are not even looked at."""
    completed, failed = keep(conn, "completed", 9_000), keep(conn, "failed", 9_000)
    assert pass_once(NEVER) == 1
    assert left(conn) == {completed, failed}
    pass_once(Retention(completed_seconds=None))
    assert left(conn) == {completed}
    pass_once(Retention(failed_seconds=None))
    assert left(conn) == set()


def test_steps_of_a_workflow_stay(conn: Conn, pass_once: Callable[[Retention], int]) -> None:
    """They go together with it, or not at all."""
    step = keep(conn, "completed", 9_000, workflow_id=uuid4())
    pass_once(Retention())
    assert left(conn) == {step}


@pytest.mark.parametrize("id_", [uuid4(), UUID(int=1), UUID(int=2**128 - 2)])
def test_ids_that_others_made_are_found_too(conn: Conn, pass_once: Callable[[Retention], int], id_: UUID) -> None:
    """An id that says nothing about the time may lie at either end."""
    keep(conn, "completed", 31, id=id_)
    recent = keep(conn, "completed", 1, id=UUID(int=id_.int ^ 1))
    pass_once(Retention())
    assert left(conn) == {recent}


def test_it_goes_page_by_page_from_where_it_was(
    conn: Conn, pass_once: Callable[[Retention], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No statement takes more than a batch, and no page is looked at twice: also not where everything stays."""
    monkeypatch.setattr(janitor, "BATCH", 10)
    kept = {keep(conn, "buried", 100 + number / 1000) for number in range(25)}
    old = {keep(conn, "completed", 50 + number / 1000) for number in range(25)}
    # Five pages of tasks, the end of each of two ranges, and one look at the snapshots.
    assert pass_once(Retention()) == 5 + 2 + 1
    assert left(conn) == kept
    assert not left(conn) & old


def test_what_somebody_holds_is_left_for_the_next_time(
    conn: Conn, pass_once: Callable[[Retention], int], database_url: str, direct: Callable[[str], str]
) -> None:
    """It is done while somebody holds it; and what a person is just retrying is not deleted under their hands."""
    retried, other = keep(conn, "completed", 31), keep(conn, "completed", 31)
    with psycopg.connect(direct(database_url)) as person:
        person.execute("select tasklib.retry(%s)", [retried])
        pass_once(Retention())
        assert left(conn) == {retried}
        person.commit()
    pass_once(Retention())
    assert left(conn) == {retried}
    assert other not in left(conn)


def test_snapshots_are_kept_for_a_week(conn: Conn, pass_once: Callable[[Retention], int]) -> None:
    """In batches too."""
    conn.execute("truncate tasklib.worker_states")
    conn.execute(
        """insert into tasklib.worker_states (worker_id, hostname, pid, processes, tasks_running, tasks_claimed,
                                              recovery_config, snapshot_at)
           select 'w', 'h', 1, 1, 0, 0, '{}', now() - n * interval '1 hour' from generate_series(1, 2400) as n"""
    )
    assert pass_once(NEVER) == 1
    assert pass_once(Retention(states_seconds=7 * DAY_SECONDS)) == 2 + 3  # 2232 of them in three batches
    row = conn.execute("select count(*), min(snapshot_at) > now() - interval '7 days' from tasklib.worker_states")
    assert row.fetchone() == (167, True)


@pytest.mark.parametrize(("kept_seconds", "is_left"), [(3600.0, False), (86400.0, True), (None, True)])
def test_rows_of_dead_workers_are_kept_as_long_as_said(
    conn: Conn, config: tasklib.Config, session: Session, kept_seconds: float | None, is_left: bool
) -> None:
    """They are where the heartbeats are. None: for ever."""
    config = tasklib.Config(config.database_url, lease_seconds=0.3)
    conn.execute(
        """insert into tasklib.workers (worker_id, name, hostname, pid, process_name, task_names, concurrency,
                                        lease_until, died_at)
           values ('w', 'w', 'h', 1, 'p', '{}', 1, now(), now() - interval '2 hours')"""
    )
    reaper = Reaper(config, session, WorkerStatements(config), keep_dead_seconds=kept_seconds)
    session.connection()
    wait_until(lambda: session.age_seconds > config.lease_seconds, "one lease")  # nobody is touched before
    reaper.run_once()
    assert (conn.execute("select count(*) from tasklib.workers").fetchone() == (1,)) is is_left


@pytest.fixture(scope="module")
def filled(new_database: NewDatabase) -> str:
    """80,000 finished tasks of the last hundred days, and snapshots."""
    url = new_database()
    migrate.migrate(tasklib.Config(url))
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(
            """insert into tasklib.tasks (id, name, state, ready, created_at, completed_at)
               select (lpad(to_hex((extract(epoch from at) * 1000)::bigint), 12, '0') || lpad(to_hex(n), 20, '0')
                      )::uuid,
                      't', 'completed', false, at, at
                 from generate_series(1, 80000) as n, lateral (select now() - n * interval '100 s') as made (at)"""
        )
        conn.execute(
            """insert into tasklib.worker_states (worker_id, hostname, pid, processes, tasks_running, tasks_claimed,
                                                  recovery_config, snapshot_at)
               select 'w', 'h', 1, 1, 0, 0, '{}', now() - n * interval '10 seconds'
                 from generate_series(80000, 1, -1) as n"""
        )
    return url


@pytest.mark.direct("asks for the plans of prepared statements, in sessions of its own")
@pytest.mark.parametrize("plan_mode", ["auto", "force_generic_plan"])
@pytest.mark.parametrize("is_analyzed", [False, True])
def test_a_page_is_read_by_the_key(filled: str, plan_mode: str, is_analyzed: bool) -> None:
    """Whatever the planner knows: a page costs what is on it, not what is in the table."""
    statements = KeeperStatements(tasklib.Config(filled))
    after, before = Retention().ranges(time.time())[0]
    with psycopg.connect(filled, autocommit=True) as conn:
        if is_analyzed:
            conn.execute("analyze tasklib.tasks, tasklib.worker_states")
        tasks = explain(
            conn,
            plan_mode,
            statements.prune_tasks(after, before, completed_seconds=30 * DAY_SECONDS, failed_seconds=None, limit=100),
        )
        assert tasks.ways_to("tasks") == {"tasks_pkey", "ctid"}, tasks
        # Of 80,000 rows; before version 17 each key is looked up from the root of the index.
        is_new = conn.info.server_version >= 170000
        assert tasks.pages_of("tasks") <= 100 * (6 if is_new else 9), tasks
        states = explain(conn, plan_mode, statements.prune_states(7 * DAY_SECONDS, 100))
        assert states.ways_to("worker_states") <= {"worker_states_time", "worker_states_pkey"}, states
        assert states.pages_of("worker_states") <= 100 * (1 if is_new else 3), states


def test_the_ranges_leave_out_what_cannot_be_old() -> None:
    """The end of the index at which tasks come and go is never read."""
    now = time.time()
    (first, old), (future, last) = Retention().ranges(now)
    assert (first, last) == (FIRST, LAST)
    assert id_of(30.1) < old < id_of(29.9)
    assert future > id_of(-0.9)
    assert Retention(completed_seconds=None).ranges(now)[0][1] < id_of(89.9)
    assert NEVER.ranges(now) == []


@pytest.mark.parametrize(("kept_seconds", "left"), [(365 * DAY_SECONDS, 1), (400 * DAY_SECONDS, 2), (None, 3)])
def test_the_audit_is_kept_as_long_as_said(
    conn: Conn, pass_once: Callable[[Retention], int], kept_seconds: float | None, left: int
) -> None:
    """None: for ever."""
    conn.execute(
        """insert into tasklib.task_transitions (at, actor, verb)
           select now() - days * interval '1 day', 'a', 'v' from unnest(array[364, 366, 500]) as days"""
    )
    pass_once(Retention(None, None, None, audit_seconds=kept_seconds))
    assert conn.execute("select count(*) from tasklib.task_transitions").fetchall() == [(left,)]


def test_a_queue_has_a_retention_of_its_own(conn: Conn, pass_once: Callable[[Retention], int]) -> None:
    """For all its finished tasks, shorter or longer than the daemon's. Buried tasks stay, and so do other queues."""
    for queue, days in (("short", 1), ("long", 1000), ("plain", None)):
        conn.execute("insert into tasklib.queues (name, retention_days) values (%s, %s)", [queue, days])
    states = ("completed", "cancelled", "expired", "failed", "buried")
    ages = {queue: [keep(conn, state, 31, queue=queue) for state in states] for queue in ("short", "long", "plain")}
    young = keep(conn, "failed", 0.9, queue="short")
    pass_once(Retention(completed_seconds=30 * DAY_SECONDS, failed_seconds=None))
    left = {row[0] for row in conn.execute("select id from tasklib.tasks")}
    assert left == {ages["short"][4], young, *ages["long"], *ages["plain"][3:]}


def test_a_queue_is_pruned_where_nothing_else_is(conn: Conn, pass_once: Callable[[Retention], int]) -> None:
    """The daemon keeps everything for ever."""
    conn.execute("insert into tasklib.queues (name, retention_days) values ('short', 1)")
    keep(conn, "completed", 2, queue="short")
    kept = keep(conn, "completed", 2)
    pass_once(Retention(None, None))
    assert conn.execute("select id from tasklib.tasks").fetchall() == [(kept,)]
