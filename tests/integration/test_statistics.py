"""Statistics: how the queues are, what became of tasks over a window, and how much there is to do."""

from __future__ import annotations

import contextlib
import json
import re
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest

import tasklib
from tasklib.duties.janitor import Janitor, Retention
from tasklib.duties.rollups import Rollups
from tasklib.duties.statements import KeeperStatements
from tasklib.outcomes import Completed, Failed, Problem, Settlement
from tasklib.runtime.metrics import SECONDS, Counts, histogram
from tasklib.runtime.session import Session
from tasklib.statements import settlement_json
from tasklib.states import State
from tasklib.statistics import StatisticsStatements
from tests.support.explain import explain
from tests.support.raw_sql import literal
from tests.support.working import ManualWorker, running
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.raw_sql import Conn

pytestmark = pytest.mark.postgres_versions

NOTHING = (0, 0, 0, 0, 0)


@pytest.fixture
def worker(config: tasklib.Config) -> Iterator[ManualWorker]:
    made = ManualWorker(config, "worker")
    yield made
    made.close()


@pytest.fixture
def session(config: tasklib.Config) -> Iterator[Session]:
    with contextlib.closing(Session(config, "test")) as made:
        yield made


def counts(client: tasklib.Client, queue: str = "default") -> tuple[int, ...]:
    """Ready, scheduled, retrying, claimed, running."""
    for each in client.queue_statistics(queue):
        return each.ready, each.scheduled, each.retrying, each.claimed, each.running
    return NOTHING


# --- queues ---


def test_every_task_that_is_not_done_is_counted_by_what_it_waits_for(
    client: tasklib.Client, worker: ManualWorker
) -> None:
    """Ready, later, its next attempt, its worker's slot, or its end."""
    assert client.queue_statistics() == []
    for number in range(6):
        client.submit_task("work", number=number)
    client.submit_task("work", delay_seconds=60)
    assert counts(client) == (6, 1, 0, 0, 0)
    first, second, third, fourth = (worker.claim("work", limit=1)[0] for _ in range(4))
    worker.start(second)
    worker.finish(third, Failed(Problem("OOPS", "oops", "Oops: oops")))
    worker.finish(fourth)
    assert counts(client) == (2, 1, 1, 1, 1)
    (found,) = client.queue_statistics()
    assert (found.queue, found.length) == ("default", 6)
    worker.finish(first)
    worker.finish(second)
    assert counts(client) == (2, 1, 1, 0, 0)


def test_a_task_that_its_worker_has_claimed_twice_is_held_once(client: tasklib.Client, worker: ManualWorker) -> None:
    """It was given back and taken again, and stands in both claims as long as there is more in the first."""
    for number in range(2):
        client.submit_task("work", number=number)
    first, _ = worker.claim("work", limit=2)
    now = first.held.claimed_at
    released = settlement_json(first.held, Settlement(State.PENDING), started_at=None, finished_at=now)
    assert worker.session.run(worker.statements.settle(worker.id, [released])) == [first.held.id]
    worker.claim("work")
    assert counts(client) == (0, 0, 0, 2, 0)
    assert client.backlog() == 2


def test_what_stands_in_an_old_claim_is_held_by_its_present_worker(
    client: tasklib.Client, worker: ManualWorker, conn: Conn
) -> None:
    """A worker that is gone may have left its claim behind: what another holds now is held once."""
    client.submit_task("work")
    (task,) = worker.claim("work")
    conn.execute(
        "insert into tasklib.claims (worker_id, locked_until, task_ids) values ('gone', now(), %s)", [[task.held.id]]
    )
    assert counts(client) == (0, 0, 0, 1, 0)
    assert client.backlog() == 1


def test_a_ready_task_that_will_expire_is_ready_and_nothing_else(client: tasklib.Client) -> None:
    """Its end stands in the same index as the time of those that wait."""
    client.submit_task("work", expires_at=datetime.now(UTC) + timedelta(hours=1))
    assert counts(client) == (1, 0, 0, 0, 0)
    assert client.backlog() == 1


def test_one_queue_or_all_of_them(client: tasklib.Client) -> None:
    """In the order of their names; a queue in which there is nothing is not there."""
    for queue in ("mail", "bulk", "bulk"):
        client.submit_task("work", queue=queue)
    assert [(each.queue, each.ready) for each in client.queue_statistics()] == [("bulk", 2), ("mail", 1)]
    assert [(each.queue, each.ready) for each in client.queue_statistics("mail")] == [("mail", 1)]
    assert client.queue_statistics("default") == []


def test_ages_are_those_of_the_first_and_the_last_that_could_run(client: tasklib.Client, conn: Conn) -> None:
    """Whatever their priorities: who waits at the lowest one waits longest."""
    conn.execute(
        """insert into tasklib.tasks (name, priority, created_at, scheduled_at)
           select 'work', priority, now() - age * interval '1 second', now() - age * interval '1 second'
             from (values (5, 1000), (5, 2000), (0, 30000), (0, 700), (-5, 10000)) as given (priority, age)"""
    )
    (found,) = client.queue_statistics()
    assert found.oldest_ready_age_seconds == pytest.approx(30000, abs=100)
    assert found.newest_ready_age_seconds == pytest.approx(700, abs=100)


def test_a_task_that_was_delayed_is_not_old_because_it_was_made_long_ago(client: tasklib.Client, conn: Conn) -> None:
    """It has been ready since its time came; a retry, since the time of its next attempt."""
    conn.execute(
        """insert into tasklib.tasks (name, created_at, scheduled_at, ready)
           values ('work', now() - interval '1 day', now() - interval '3 minutes', true)"""
    )
    conn.execute(
        """insert into tasklib.tasks (name, state, created_at, scheduled_at, next_retry_at, ready, due_at, error_code)
           values ('work', 'failed', now() - interval '1 day', now() - interval '1 day', now() - interval '9 minutes',
                   true, now() - interval '9 minutes', 'OOPS')"""
    )
    (found,) = client.queue_statistics()
    assert found.oldest_ready_age_seconds == pytest.approx(540, abs=100)


def test_many_retries_do_not_hide_who_waits_behind_them(client: tasklib.Client, conn: Conn) -> None:
    """They were made long before, so they stand first, and have only just become ready again. What is new starves
    behind them, and that is what somebody has to hear of.
    """
    conn.execute(
        """insert into tasklib.tasks (name, state, created_at, scheduled_at, next_retry_at, ready, error_code)
           select 'work', 'failed', now() - interval '1 day', now() - interval '1 day', now() - interval '2 seconds',
                  true, 'OOPS'
             from generate_series(1, 3000)"""
    )
    conn.execute(
        """insert into tasklib.tasks (name, created_at, scheduled_at)
           select 'work', now() - n * interval '1 second', now() - n * interval '1 second'
             from generate_series(1, 1000) as n"""
    )
    (found,) = client.queue_statistics()
    assert found.oldest_ready_age_seconds is not None
    assert 500 < found.oldest_ready_age_seconds < 1100


def test_many_queues_are_not_compared_with_each_other(conn: Conn) -> None:
    """With a queue for each customer: what it costs grows with their number, and not with its square."""
    conn.execute(
        "insert into tasklib.tasks (name, queue) select 'work', 'customer-' || n from generate_series(1, 300) n"
    )
    row = conn.execute("select prosrc, proconfig from pg_proc where proname = 'queue_statistics'").fetchone()
    assert row is not None
    body, settings = row
    with conn.transaction():
        for name, value in (each.split("=") for each in settings):
            conn.execute("select set_config(%s, %s, true)", [name, value])
        conn.execute(literal(f"prepare figures (text, bigint) as {body}"))
        (plan,) = conn.execute("explain (analyze, format json) execute figures (null, 1000)").fetchone() or ()
    conn.execute("deallocate figures")
    compared = [int(each) for each in re.findall(r'"Rows Removed by Join Filter": (\d+)', json.dumps(plan))]
    assert sum(compared) < 3000


def test_counting_ends_at_the_most_that_is_asked_for(client: tasklib.Client, conn: Conn, session: Session) -> None:
    """So that the figures cost the same with a million tasks."""
    conn.execute("insert into tasklib.tasks (name) select 'work' from generate_series(1, 500)")
    (found,) = session.run(StatisticsStatements(client.config).queues(most=100))
    assert found.ready == 100


# --- the backlog ---


def test_the_backlog_is_what_there_is_to_do(client: tasklib.Client, worker: ManualWorker) -> None:
    """Ready or held; what is scheduled for later is nothing to do yet."""
    assert client.backlog() == 0
    for queue in ("default", "default", "mail"):
        client.submit_task("work", queue=queue)
    client.submit_task("work", delay_seconds=60)
    assert client.backlog() == 3
    claimed = worker.claim("work", limit=1)
    assert client.backlog() == 3
    assert (client.backlog(["default"]), client.backlog(["mail"]), client.backlog(["nothing"])) == (2, 1, 0)
    worker.finish(claimed[0], Completed(None))
    assert client.backlog() == 2


def test_what_is_due_counts_although_no_worker_has_made_it_ready(client: tasklib.Client, conn: Conn) -> None:
    """A scaler that went down to no workers would never come back: nobody promotes."""
    conn.execute(
        """insert into tasklib.tasks (name, queue, scheduled_at, due_at, ready)
           select 'work', 'mail', now() - interval '1 second', now() - interval '1 second', false
             from generate_series(1, 3)"""
    )
    assert (client.backlog(), client.backlog(["mail"]), client.backlog(["default"])) == (3, 3, 0)


def test_what_will_never_run_is_no_backlog(client: tasklib.Client, conn: Conn) -> None:
    """It was not started in time, and only waits to be marked so. A scaler would keep a worker for it."""
    conn.execute(
        """insert into tasklib.tasks (name, scheduled_at, expires_at, due_at, ready)
           values ('work', now() + interval '1 day', now() - interval '1 second', now() - interval '1 second', false)"""
    )
    assert client.backlog() == 0


DUE = """
insert into tasklib.tasks (name, queue, scheduled_at, due_at, ready)
select 'work', %s, now() - %s::interval, now() - %s::interval, false from generate_series(1, %s)
"""


def test_a_paused_queue_is_no_backlog(client: tasklib.Client, conn: Conn, worker: ManualWorker) -> None:
    """Whoever scales by it would start workers that may start nothing. What is held counts, and so does a queue whose
    pause is over.
    """
    for queue in ("mail", "mail", "default"):
        client.submit_task("work", queue=queue)
    conn.execute(DUE, ["mail", "1 second", "1 second", 3])
    assert len(worker.claim("work", limit=1, queue="mail")) == 1
    assert (client.backlog(), client.backlog(["mail"])) == (6, 5)
    conn.execute("select tasklib.pause_queue('mail')")
    assert (client.backlog(), client.backlog(["mail"]), client.backlog(["default"])) == (2, 1, 1)
    conn.execute("update tasklib.queues set (paused_at, paused_until) = (now() - interval '1 hour', now())")
    assert (client.backlog(), client.backlog(["mail"])) == (6, 5)


def test_a_task_of_a_paused_queue_is_not_late(config: tasklib.Config, conn: Conn, session: Session) -> None:
    """There may be no worker left to make it ready. Behind a thousand of them, nothing is late."""
    statement = StatisticsStatements(config).cluster()
    conn.execute(DUE, ["mail", "1 hour", "1 hour", 999])
    conn.execute(DUE, ["default", "2 minutes", "2 minutes", 1])
    conn.execute("select tasklib.pause_queue('mail')")
    assert session.run(statement).due_lag_seconds == pytest.approx(120, abs=10)
    conn.execute("select tasklib.pause_queue('default')")
    assert session.run(statement).due_lag_seconds is None


def test_a_task_is_late_once_its_time_has_come_and_nobody_made_it_ready(
    config: tasklib.Config, conn: Conn, session: Session
) -> None:
    """Not while it is ready, nor because a ready one should have been started by now."""
    statement = StatisticsStatements(config).cluster()
    conn.execute(
        """insert into tasklib.tasks (name, expires_at, due_at, ready)
           values ('work', now() - interval '1 hour', now() - interval '1 hour', true)"""
    )
    assert session.run(statement).due_lag_seconds is None
    conn.execute(
        """insert into tasklib.tasks (name, scheduled_at, due_at, ready)
           values ('work', now() - interval '2 minutes', now() - interval '2 minutes', false)"""
    )
    assert session.run(statement).due_lag_seconds == pytest.approx(120, abs=60)


def test_the_backlog_is_counted_up_to_a_bound(client: tasklib.Client, conn: Conn, session: Session) -> None:
    """Ten thousand, unless one says otherwise."""
    conn.execute("insert into tasklib.tasks (name) select 'work' from generate_series(1, 300)")
    assert session.run(StatisticsStatements(client.config).backlog(most=100)) == 100
    assert conn.execute("select tasklib.backlog('{default}', 250)").fetchone() == (250,)


def test_figures_are_not_compiled(conn: Conn, session: Session) -> None:
    """Before PostgreSQL 18, a scan that is off and taken all the same looks so dear that a server with LLVM compiles
    the plan at every call: a second for figures that take two milliseconds, for the scaler, the keeper, every worker.
    """
    functions = ["backlog", "queue_statistics", "task_statistics"]
    found = conn.execute(
        "select proname from pg_proc where 'jit=off' = any(proconfig) and proname = any(%s) order by 1", [functions]
    ).fetchall()
    assert [name for (name,) in found] == functions
    assert session.connection().execute("show jit").fetchone() == ("off",)


def test_a_role_that_may_ask_for_figures_sees_no_tasks(conn: Conn) -> None:
    """For a scaler or a dashboard: EXECUTE on the functions is all that it needs, and nobody has it unasked."""
    conn.execute("create role looker")
    try:
        conn.execute("grant usage on schema tasklib to looker")
        conn.execute("set role looker")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("select tasklib.backlog()")
        conn.execute("reset role")
        for function in (
            "backlog(text[], bigint)",
            "queue_statistics(text, bigint)",
            "task_statistics(interval, text)",
        ):
            conn.execute(literal(f"grant execute on function tasklib.{function} to looker"))
        conn.execute("set role looker")
        assert conn.execute("select tasklib.backlog()").fetchone() == (0,)
        conn.execute("select from tasklib.queue_statistics()")
        conn.execute("select from tasklib.task_statistics()")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("select from tasklib.tasks")
    finally:
        conn.execute("reset role")
        conn.execute("drop owned by looker")
        conn.execute("drop role looker")


# --- tasks over a window ---


def test_a_worker_writes_down_what_became_of_its_tasks(client: tasklib.Client, config: tasklib.Config) -> None:
    """By the minute; what it has counted when it stops, too. Nothing is asked of the tasks themselves."""

    @tasklib.task(max_retries=0)
    def divide(by: int) -> float:
        return 1 / by

    began = time.monotonic()
    for by in (0, 1, 2, 4):
        client.submit(divide.new(by))
    with running(config):
        wait_until(lambda: counts(client) == NOTHING, "all to be done")
    elapsed = time.monotonic() - began
    (found,) = client.task_statistics(60)
    assert (found.name, found.attempts, found.completed, found.failed, found.retried) == ("divide", 4, 3, 1, 0)
    assert 0 < found.per_second <= 4
    assert found.average_seconds is not None
    assert 0 < found.average_seconds <= elapsed
    assert found.p95_wait_seconds is not None
    assert found.average_wait_seconds is not None
    assert 0 <= found.average_wait_seconds <= elapsed


def noted(config: tasklib.Config, session: Session, name: str, seconds: list[float], waits: list[float]) -> None:
    """Written down as a worker does."""
    own = Counts()
    own.add({
        ("finished", name, "default", "completed"): [float(len(seconds))],
        ("duration", name, "default"): histogram(SECONDS, seconds),
        ("wait", name, "default"): histogram(SECONDS, waits),
    })  # fmt: skip
    Rollups(config, session, own.take).run_once()


def test_counts_of_several_writers_add_up(client: tasklib.Client, config: tasklib.Config, session: Session) -> None:
    """Whoever writes in the same minute adds to the same row, bucket by bucket."""
    noted(config, session, "mail", [0.002] * 10, [0.2] * 10)
    noted(config, session, "mail", [2.0] * 10, [])
    noted(config, session, "report", [40.0], [0.01])
    mail, report = client.task_statistics(120)
    assert (mail.name, mail.attempts, report.attempts) == ("mail", 20, 1)
    assert mail.average_seconds == pytest.approx(1.001)
    assert mail.average_wait_seconds == pytest.approx(0.2)
    assert [each.name for each in client.task_statistics(120, "report")] == ["report"]


def test_an_attempt_whose_worker_was_lost_has_crashed(
    client: tasklib.Client, config: tasklib.Config, session: Session
) -> None:
    """By its death, or by its silence."""
    own = Counts()
    own.add({("finished", "mail", "default", outcome): [1.0] for outcome in ("worker_failure", "lease_lost")})
    Rollups(config, session, own.take).run_once()
    (found,) = client.task_statistics(60)
    assert (found.attempts, found.crashed) == (2, 2)


def test_figures_are_written_in_the_order_of_their_key(config: tasklib.Config, session: Session, conn: Conn) -> None:
    """Two daemons that write the same rows at once wait for each other; in other orders they would deadlock."""
    conn.execute("truncate tasklib.task_rollups")  # a row takes the place of a deleted one, if there is any
    own = Counts()
    names = [f"task_{number}" for number in (3, 1, 2, 0)]
    own.add({("finished", name, queue, "completed"): [1.0] for name in names for queue in ("mail", "bulk")})
    Rollups(config, session, own.take).run_once()
    written = conn.execute("select name, queue from tasklib.task_rollups order by ctid").fetchall()
    assert written == sorted(written)
    assert len(written) == 8


@pytest.mark.parametrize(
    ("seconds", "p50", "p99"),
    [
        ([0.002] * 100, (0.001, 0.0025), (0.001, 0.0025)),
        ([0.002] * 98 + [20.0] * 2, (0.001, 0.0025), (10.0, 30.0)),
        ([0.0] * 10, (0.0, 0.001), (0.0, 0.001)),
        ([100_000.0] * 10, (7200.0, 7200.0), (7200.0, 7200.0)),
    ],
)
def test_percentiles_lie_in_their_bucket(
    client: tasklib.Client,
    config: tasklib.Config,
    session: Session,
    seconds: list[float],
    p50: tuple[float, float],
    p99: tuple[float, float],
) -> None:
    """As exact as the buckets are; what is beyond the last bound is said to be at it."""
    noted(config, session, "mail", seconds, seconds)
    (found,) = client.task_statistics(60)
    assert found.p50_seconds is not None
    assert found.p99_wait_seconds is not None
    assert p50[0] <= found.p50_seconds <= p50[1]
    assert p99[0] <= found.p99_wait_seconds <= p99[1]


def test_the_bounds_are_those_that_workers_count_by(conn: Conn) -> None:
    """They stand in the function, and in Python."""
    row = conn.execute("select prosrc from pg_proc where proname = 'task_statistics'").fetchone()
    assert row is not None
    assert "0, " + ", ".join(f"{bound:g}" for bound in SECONDS) in row[0]


def test_a_window_begins_with_a_full_minute(client: tasklib.Client, conn: Conn) -> None:
    """What lies before it is not counted."""
    conn.execute(
        """insert into tasklib.task_rollups (minute, name, queue, completed)
           select date_trunc('minute', clock_timestamp()) - n * interval '1 minute', 'mail', 'default', 1
             from generate_series(0, 99) as n"""
    )
    (found,) = client.task_statistics(600)
    assert found.attempts in {11, 12}  # a minute may pass meanwhile
    assert client.task_statistics(86400)[0].attempts == 100


def test_a_window_is_found_by_its_key(conn: Conn, config: tasklib.Config) -> None:
    """A week of twenty functions: an hour costs what an hour holds, and no task is read."""
    conn.execute(
        """insert into tasklib.task_rollups (minute, name, queue, completed, durations, waits)
           select date_trunc('minute', now()) - n * interval '1 minute', 'task_' || f, 'default', 1, '{1,2}', '{3}'
             from generate_series(0, 10000) as n, generate_series(1, 10) as f"""
    )
    before = conn.execute("select seq_scan, idx_scan from pg_stat_user_tables where relname = 'tasks'").fetchone()
    plan = explain(conn, "auto", StatisticsStatements(config).tasks(3600))
    assert plan.pages <= 700, plan
    after = conn.execute("select seq_scan, idx_scan from pg_stat_user_tables where relname = 'tasks'").fetchone()
    assert before == after


def test_what_cannot_be_written_is_written_later(client: tasklib.Client, config: tasklib.Config, conn: Conn) -> None:
    """An outage costs no figures."""
    own = Counts()
    session = Session(config, "test")
    rollups = Rollups(config, session, own.take)
    own.add({("finished", "mail", "default", "completed"): [3.0]})
    conn.execute("alter table tasklib.task_rollups rename to elsewhere")
    try:
        with pytest.raises(psycopg.Error):
            rollups.run_once()
    finally:
        conn.execute("alter table tasklib.elsewhere rename to task_rollups")
    own.add({("finished", "mail", "default", "completed"): [1.0]})
    rollups.run_once()
    rollups.run_once()
    session.close()
    assert client.task_statistics(60)[0].completed == 4


def test_figures_by_the_minute_go_with_the_snapshots(conn: Conn, config: tasklib.Config, session: Session) -> None:
    """After a week, by default."""
    conn.execute(
        """insert into tasklib.task_rollups (minute, name, queue)
           select now() - n * interval '1 day', 'mail', 'default' from generate_series(0, 9) as n"""
    )
    janitor = Janitor(session, KeeperStatements(config), Retention(completed_seconds=None, failed_seconds=None))
    janitor.run_once()
    assert conn.execute("select count(*) from tasklib.task_rollups").fetchone() == (7,)


@pytest.mark.parametrize("window", [0, -1, True, 10**9])
def test_a_window_must_be_a_time(client: tasklib.Client, window: float) -> None:
    """The error says what is expected."""
    with pytest.raises(tasklib.InvalidOptions, match="window_seconds"):
        client.task_statistics(window)


def test_queues_are_a_list(client: tasklib.Client) -> None:
    """A string would be taken for its letters."""
    with pytest.raises(tasklib.InvalidOptions, match="list"):
        client.backlog("default")


async def test_the_same_for_asyncio_and_for_the_module(app: None, async_client: tasklib.AsyncClient) -> None:
    """Three figures, three ways to ask."""
    await async_client.submit_task("work")
    assert [each.ready for each in await async_client.queue_statistics()] == [1]
    assert await async_client.backlog() == 1
    assert await async_client.task_statistics() == []
    assert [each.ready for each in tasklib.queue_statistics()] == [1]
    assert [each.ready for each in await tasklib.queue_statistics_async()] == [1]
    assert tasklib.backlog() == await tasklib.backlog_async() == 1
    assert tasklib.task_statistics(60) == await tasklib.task_statistics_async(60) == []
