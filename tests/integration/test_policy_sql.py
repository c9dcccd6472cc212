"""Caps, rates and breakers as SQL decides them."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import tasklib
from tasklib import migrate
from tests.support.raw_sql import literal
from tests.support.working import ManualWorker

if TYPE_CHECKING:
    from tests.support.raw_sql import Conn, NewDatabase

pytestmark = pytest.mark.postgres_versions


def one(conn: Conn, sql: str, *values: Any) -> Any:
    row = conn.execute(literal(sql), list(values)).fetchone()
    assert row is not None
    return row[0] if len(row) == 1 else row


def permit(conn: Conn, worker: str, wants: int, keeps: int = 0, queue: str = "mail") -> tuple[int | None, int | None]:
    row = one(conn, "select permits, target from tasklib.permit(%s, %s, %s, %s)", queue, worker, wants, keeps)
    return row[0], row[1]


def set_queue(conn: Conn, policy: str, queue: str = "mail") -> None:
    conn.execute("select tasklib.set_queue(%s, %s::jsonb)", [queue, policy])


def test_permits_never_exceed_the_cap(conn: Conn) -> None:
    """Each gets what is left, and its share once the others are hungry."""
    set_queue(conn, '{"max_running": 10}')
    assert permit(conn, "a", 8) == (8, 8)
    assert permit(conn, "b", 8) == (2, 2)
    assert permit(conn, "a", 8, keeps=8) == (8, 5)  # b is hungry: a comes down to its share as tasks end
    assert permit(conn, "a", 8, keeps=5) == (5, 5)
    assert permit(conn, "b", 8, keeps=2) == (5, 5)
    assert permit(conn, "a", 0) == (0, 0)
    assert permit(conn, "b", 8, keeps=5) == (8, 8)
    assert one(conn, "select count(*) from tasklib.permits") == 1


def test_a_cap_that_is_lowered_keeps_what_executes(conn: Conn) -> None:
    set_queue(conn, '{"max_running": 10}')
    assert permit(conn, "a", 10) == (10, 10)
    set_queue(conn, '{"max_running": 3}')
    assert permit(conn, "a", 10, keeps=10) == (10, 3)
    assert permit(conn, "b", 1) == (0, 0)
    assert permit(conn, "a", 10, keeps=2) == (2, 2)
    set_queue(conn, '{"max_running": null}')
    assert permit(conn, "a", 10, keeps=2) == (None, None)
    assert one(conn, "select count(*) from tasklib.permits where worker_id = 'a'") == 0


def test_permits_need_a_fresh_snapshot(conn: Conn, database_url: str) -> None:
    """A look that began before the lock was free would not see what its holder took."""
    set_queue(conn, '{"max_running": 10}')
    with psycopg.connect(database_url) as other:
        other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises(psycopg.errors.ActiveSqlTransaction, match="read committed"):
            other.execute("select tasklib.permit('mail', 'a', 1, 0)")


def test_permits_of_the_dead_stay_until_their_tasks_are_recovered(conn: Conn) -> None:
    set_queue(conn, '{"max_running": 2}')
    conn.execute("insert into tasklib.claims (worker_id, locked_until, task_ids) values ('a', now(), '{}')")
    permit(conn, "a", 1)
    permit(conn, "unknown", 1)
    conn.execute("select tasklib.forget_permits()")
    assert one(conn, "select array_agg(worker_id) from tasklib.permits") == ["a"]
    conn.execute("delete from tasklib.claims")
    conn.execute("select tasklib.forget_permits()")
    assert one(conn, "select count(*) from tasklib.permits") == 0


def test_one_cap_over_all_queues(conn: Conn) -> None:
    conn.execute("select tasklib.set_cluster('{\"cluster_wide_cap\": 3}')")
    assert permit(conn, "a", 5, queue="*") == (3, 3)
    assert permit(conn, "b", 5, queue="*") == (0, 0)


def grant(conn: Conn, wants: int) -> tuple[int, float | None]:
    row = one(conn, "select granted, next_seconds from tasklib.grant_starts('mail', %s)", wants)
    return row[0], row[1]


def test_a_rate_grants_so_many_in_a_period(conn: Conn) -> None:
    set_queue(conn, '{"rate_limit": 5, "rate_seconds": 3600}')
    assert grant(conn, 3) == (3, None)
    granted, wait = grant(conn, 3)
    assert granted == 2
    assert wait is not None
    assert 3500 < wait <= 3601
    assert grant(conn, 1)[0] == 0
    conn.execute("update tasklib.rates set at = array[at[1] - interval '1 hour'], full_at = now()")
    assert grant(conn, 9)[0] == 0  # those may still be on their way to their start
    conn.execute("update tasklib.rates set at = array[at[1] - interval '0.1 second'], full_at = now()")
    assert grant(conn, 9)[0] == 5


def test_a_burst_is_smaller_than_the_limit(conn: Conn) -> None:
    """Six an hour, two at once: the third has to wait for ten minutes."""
    set_queue(conn, '{"rate_limit": 6, "rate_seconds": 3600, "rate_burst": 2}')
    granted, wait = grant(conn, 5)
    assert granted == 2
    assert wait is not None
    assert 590 < wait <= 600


def test_a_clock_that_goes_back_grants_no_more(conn: Conn) -> None:
    set_queue(conn, '{"rate_limit": 5, "rate_seconds": 60}')
    grant(conn, 5)
    conn.execute("update tasklib.rates set at = array[now() + interval '1 day'], full_at = now() + interval '1 day'")
    granted, wait = grant(conn, 1)
    assert granted == 0
    assert wait is not None
    assert wait <= 61


def report(conn: Conn, succeeded: int, failed: int) -> str:
    epoch = one(conn, "select breaker_epoch from tasklib.queue_limits where queue = 'mail'")
    state = one(conn, "select tasklib.report_breaker('mail', %s, %s, %s)", epoch, succeeded, failed)
    return str(state)


def test_a_breaker_opens_probes_and_closes(conn: Conn) -> None:
    set_queue(conn, '{"breaker_failures": 3, "breaker_open_seconds": 60, "breaker_probes": 2}')
    assert permit(conn, "a", 5) == (5, 5)
    assert report(conn, 10, 2) == "closed"
    assert report(conn, 0, 1) == "open"
    assert permit(conn, "a", 5, keeps=1) == (1, 0)
    assert one(conn, "select again_seconds from tasklib.permit('mail', 'a', 5, 1)") > 50
    conn.execute("update tasklib.breakers set open_until = now()")
    assert one(conn, "select breaker from tasklib.queue_limits where queue = 'mail'") == "half_open"
    assert permit(conn, "a", 5) == (2, 2)
    assert report(conn, 1, 0) == "open"
    assert report(conn, 1, 0) == "closed"
    assert permit(conn, "a", 5) == (5, 5)


def test_attempts_of_another_epoch_say_nothing(conn: Conn) -> None:
    set_queue(conn, '{"breaker_failures": 1}')
    assert report(conn, 0, 1) == "open"
    assert one(conn, "select tasklib.report_breaker('mail', 1, 0, 5)") == "open"
    assert one(conn, "select epoch from tasklib.breakers") == 2


def test_every_change_raises_the_version(conn: Conn) -> None:
    version = "select version from tasklib.policy"
    seen = [one(conn, version)]
    for change in (
        "select tasklib.set_queue('mail', '{\"max_running\": 1}')",
        "update tasklib.queues set max_running = 2",
        "select tasklib.pause_queue('mail', 'why')",
        "select tasklib.resume_queue('mail')",
        "select tasklib.set_cluster('{\"cluster_wide_cap\": 3}')",
        "update tasklib.policy set cluster_wide_cap = null",
        "delete from tasklib.queues",
    ):
        conn.execute(literal(change))
        seen.append(one(conn, version))
    assert seen == sorted(set(seen))


def test_operators_are_audited(conn: Conn) -> None:
    set_queue(conn, '{"max_running": 1}')
    conn.execute("select tasklib.pause_queue('mail', 'too slow', null, 'alice')")
    conn.execute("select tasklib.resume_queue('mail', 'mended')")
    rows = conn.execute("select verb, queue, actor, before, after, reason from tasklib.task_transitions order by id")
    assert [row[:3] for row in rows] == [
        ("set_queue", "mail", "postgres"), ("pause_queue", "mail", "alice"), ("resume_queue", "mail", "postgres"),
    ]  # fmt: skip


def register(conn: Conn, features: str) -> None:
    conn.execute(
        """insert into tasklib.workers (
               worker_id, name, hostname, pid, process_name, task_names, concurrency, lease_until, features)
           values (gen_random_uuid(), 'w', 'host', 1, 'main', '{}', 1, now() + interval '1 hour', %s)""",
        [features],
    )


def test_a_worker_that_knows_no_policies_is_refused_while_they_are_used(conn: Conn) -> None:
    register(conn, "{}")
    with pytest.raises(psycopg.Error, match="does not know policies"):
        set_queue(conn, '{"max_running": 1}')
    set_queue(conn, '{"default_priority": 7}')  # old workers obey it
    conn.execute("delete from tasklib.workers")
    set_queue(conn, '{"max_running": 1}')
    with pytest.raises(psycopg.Error, match="does not know policies"):
        register(conn, "{}")
    register(conn, "{policies}")
    set_queue(conn, '{"max_running": null}')
    register(conn, "{}")  # nothing is in use any more that it does not know


AGES = """
insert into tasklib.tasks (name, priority, created_at, scheduled_at)
select 'job', priority, now() - age * interval '1 second', now() - age * interval '1 second'
  from unnest(%s::integer[], %s::double precision[]) as given (priority, age)
"""
IN_ORDER = """
select id from tasklib.tasks where ready
 order by priority + least(floor(extract(epoch from clock_timestamp() - created_at) / 60), 1000) desc, priority desc,
          created_at, id
 limit %s
"""


def test_a_claim_by_age_takes_what_brute_force_would(conn: Conn, config: tasklib.Config) -> None:
    """Random backlogs. Ages keep away from full steps, so that the clock between the two looks does not matter."""
    dice = random.Random(17)
    with contextlib.closing(ManualWorker(config, "worker")) as worker:
        for _ in range(30):
            count, limit = dice.randrange(1, 80), dice.randrange(1, 30)
            priorities = [dice.choice([-5, 0, 0, 3, 10]) for _ in range(count)]
            ages = [60 * dice.randrange(20) + dice.uniform(5, 55) for _ in range(count)]
            conn.execute(AGES, [priorities, ages])
            wanted = [row[0] for row in conn.execute(literal(IN_ORDER), [limit])]
            claim = worker.session.run(
                worker.statements.claim_aged(worker.id, "default", ["job"], limit, ageing_seconds=60.0)
            )
            assert [task.held.id for task in claim.tasks] == wanted
            assert claim.is_short == (count < limit)
            conn.execute("delete from tasklib.tasks")


@pytest.mark.direct("roles are the server's")
def test_who_may_read_the_policies_may_read_what_follows_from_them(new_database: NewDatabase) -> None:
    """A daemon's role that has no default privileges, after an upgrade: its workers ask queue_limits for permits."""
    url = new_database()
    migrate.migrate(tasklib.Config(url))
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("create role reads_policies; create role reads_nothing")
        try:
            conn.execute("grant select on tasklib.queues to reads_policies")
            conn.execute("update tasklib.schema_migrations set revision = revision - 1 where version = 0")
            migrate.migrate(tasklib.Config(url))
            may = "select has_table_privilege(%s, 'tasklib.queue_limits', 'select')"
            assert one(conn, may, "reads_policies")
            assert not one(conn, may, "reads_nothing")
        finally:
            conn.execute("drop owned by reads_policies, reads_nothing")
            conn.execute("drop role reads_policies, reads_nothing")
