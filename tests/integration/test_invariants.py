"""Each invariant of tests/support/invariants.sql is silent after a clean run, and speaks when it is broken."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import psycopg
import pytest

import tasklib
from tasklib import embedded, migrate
from tasklib.registry import default_registry
from tests.support.invariants import INVARIANTS, make_journal_tables, violations
from tests.support.raw_sql import literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.raw_sql import Conn, NewDatabase

pytestmark = [
    pytest.mark.postgres_versions,
    pytest.mark.direct("looks for sessions that were left behind; a pooler keeps its own"),
]

# In a clean run the attempts tell what a journal of the bodies would.
_JOURNAL = """
insert into chaos.submit select id, idempotency_key, 'ok' from tasklib.tasks;
insert into chaos.run
select task_id, fencing_token, attempt, worker_id, worker_pid, started_at, finished_at,
       case outcome when 'COMPLETED' then 'returned' else 'raised' end, false
from tasklib.task_attempts;
"""

# So that each of them can be broken alone.
_UNFOLD = """
insert into tasklib.attempts select * from tasklib.folded_attempts;
update tasklib.tasks set completed_by = null;
"""

A_COMPLETED = "(select id from tasklib.tasks where name = 'fine' and idempotency_key is null)"
A_RETRIED = "(select id from tasklib.tasks where name = 'flaky')"
A_HOPELESS = "(select id from tasklib.tasks where name = 'hopeless')"
_WAITS = f"""
alter table tasklib.tasks drop constraint tasks_state_whole;
update tasklib.tasks set completed_at = null where id = {A_COMPLETED};
"""
_LEASED = f"""
{_WAITS}
update tasklib.tasks set state = 'running', worker_id = 'w', claimed_at = now(),
    locked_until = now() + interval '1 hour',
    attempt = attempt + 1 where id = {A_COMPLETED};
"""

_A_WORKER = """
insert into tasklib.workers (worker_id, name, hostname, pid, process_name, task_names, concurrency, lease_until)
values ('w', 'w', 'h', 1, 'p', '{}', 1, now())"""

# The invariant, what breaks it, and how that is done.
BREACHES = [
    ("I1", "a submit that was acknowledged is gone", f"delete from tasklib.tasks where id = {A_COMPLETED}"),
    ("I2", "a task is not final", _WAITS),
    ("I3", "a task that nobody submitted", "insert into tasklib.tasks (name) values ('stray')"),
    ("I3", "a refused submit is there", f"update chaos.submit set outcome = 'refused' where id = {A_COMPLETED}"),
    ("I7", "an attempt is missing", f"delete from tasklib.attempts where task_id = {A_RETRIED} and attempt = 1"),
    ("I7", "the counter runs ahead", f"update tasklib.tasks set attempt = attempt + 1 where id = {A_COMPLETED}"),
    ("I7", "attempts start at 2", f"update tasklib.attempts set attempt = 2 where task_id = {A_COMPLETED}"),
    ("I7", "more retries than allowed", f"update tasklib.tasks set max_retries = 0 where id = {A_RETRIED}"),
    ("I7", "a snooze cost a retry", "update tasklib.tasks set retry_count = 1 where name = 'sleepy'"),
    ("I7", "a crash that is not counted", f"""
        update tasklib.attempts set outcome = 'WORKER_FAILURE' where task_id = {A_HOPELESS} and attempt = 1;
        update tasklib.tasks set retry_count = retry_count - 1 where id = {A_HOPELESS}"""),
    ("I7", "an attempt without a task", """
        insert into tasklib.attempts (
            task_id, fencing_token, started_at, finished_at, attempt, will_retry, outcome, worker_id)
        values (gen_random_uuid(), 1, now(), now(), 1, false, 'COMPLETED', 'w')"""),
    ("I9", "a token is used by two attempts", f"""
        update tasklib.attempts set fencing_token = 1 where task_id = {A_RETRIED}"""),
    ("I9", "the task's token was reset", f"update tasklib.tasks set fencing_token = 0 where id = {A_COMPLETED}"),
    ("I9", "two bodies with one token", f"insert into chaos.run select * from chaos.run where task_id = {A_COMPLETED}"),
    ("I9", "a stale body begins late", f"""
        insert into chaos.run select task_id, 0, 1, 'w', 1, began + interval '1 ms', finished, 'raised', false
        from chaos.run where task_id = {A_COMPLETED}"""),
    ("I10", "an attempt after the completed one", f"""
        update tasklib.attempts set outcome = 'COMPLETED' where task_id = {A_HOPELESS} and attempt = 1"""),
    ("I10", "an attempt after the last one", f"""
        update tasklib.attempts set will_retry = false where task_id = {A_RETRIED} and attempt = 1"""),
    ("I10", "a body begins after the end", f"""
        insert into chaos.run select task_id, token + 1, 2, 'w', 1, began + interval '1 minute', null, null, false
        from chaos.run where task_id = {A_COMPLETED}"""),
    ("I11", "completed, and no attempt did it", f"delete from tasklib.attempts where task_id = {A_COMPLETED}"),
    ("I11", "completed, but not by its state", f"""
        update tasklib.tasks set state = 'cancelled', error_code = 'X' where id = {A_COMPLETED}"""),
    ("I11", "completed twice", f"""
        update tasklib.attempts set outcome = 'COMPLETED' where task_id = {A_RETRIED}"""),
    ("I11", "completed without a body that returned", f"""
        update chaos.run set ended = 'raised' where task_id = {A_COMPLETED}"""),
    ("I12", "half a lease", f"""
        alter table tasklib.tasks drop constraint tasks_state_whole;
        update tasklib.tasks set worker_id = 'w' where id = {A_COMPLETED}"""),
    ("I12", "leased, and no claim says so", _LEASED),
    ("I12", "leased, and the claim is another worker's", f"""
        {_LEASED};
        insert into tasklib.claims (worker_id, locked_until, task_ids) values ('v', now(), array[{A_COMPLETED}])"""),
    ("I13", "held past its lock", f"""
        {_LEASED}; update tasklib.tasks set locked_until = now() - interval '31 seconds' where id = {A_COMPLETED}"""),
    ("I13", "due, and nobody looks", f"""
        {_WAITS}; update tasklib.tasks set state = 'pending', due_at = now() - interval '31 seconds'
        where id = {A_COMPLETED}"""),
    ("I13", "a claim is left over", f"""
        insert into tasklib.claims (worker_id, locked_until, task_ids) values ('w', now(), array[{A_COMPLETED}])"""),
    ("I13", "a worker's row is left over", _A_WORKER),
    ("I19", "one key, two tasks", """
        drop index tasklib.tasks_idempotency_key;
        insert into tasklib.tasks (name, idempotency_key) values ('fine', 'key')"""),
    ("I19", "one key, two answers", "insert into chaos.submit values (gen_random_uuid(), 'key', 'ok')"),
    ("I21", "failed with retries left", f"update tasklib.tasks set max_retries = 9 where id = {A_HOPELESS}"),
    ("I21", "failed by a crash that should be retried", f"""
        update tasklib.attempts set outcome = 'WORKER_FAILURE' where task_id = {A_HOPELESS} and attempt = 3"""),
    ("I21", "failed, and the attempt promised a retry", f"""
        update tasklib.attempts set will_retry = true where task_id = {A_HOPELESS}"""),
    ("I21", "failed without an attempt", f"delete from tasklib.attempts where task_id = {A_HOPELESS}"),
    ("I21", "expired too early", f"""
        update tasklib.tasks set state = 'expired', error_code = 'EXPIRED', expires_at = now() + interval '1 hour'
        where id = {A_COMPLETED}"""),
    ("I21", "buried without a strike", f"""
        update tasklib.tasks set state = 'buried', error_code = 'BURIED' where id = {A_HOPELESS}"""),
    ("I21", "completed by an attempt that was none", f"""
        update tasklib.attempts set outcome = 'SNOOZED' where task_id = {A_COMPLETED}"""),
    ("I22", "two bodies at once", f"""
        update chaos.run set finished = finished + interval '1 hour' where task_id = {A_RETRIED} and attempt = 1"""),
    ("I22", "a body that never ended, and another", f"""
        update chaos.run set finished = null where task_id = {A_RETRIED} and attempt = 1"""),
    ("I24", "a task too many", "insert into tasklib.tasks (name) values ('stray')"),
    ("I24", "a task too few", f"delete from tasklib.tasks where id = {A_COMPLETED}"),
]  # fmt: skip

# What looks like a breach and is none.
ALLOWED = [
    ("an unknown submit that did not happen", "insert into chaos.submit values (gen_random_uuid(), null, 'unknown')"),
    ("an unknown submit that did", "update chaos.submit set outcome = 'unknown'"),
    ("a refused submit", "insert into chaos.submit values (gen_random_uuid(), 'key', 'refused')"),
    ("overlap with a killed process", f"""
        update chaos.run set finished = finished + interval '1 hour', was_hit = true
        where task_id = {A_RETRIED} and attempt = 1"""),
    ("overlap after a lost lease", f"""
        update chaos.run set finished = null where task_id = {A_RETRIED} and attempt = 1;
        update tasklib.attempts set outcome = 'LEASE_LOST' where task_id = {A_RETRIED} and attempt = 1;
        update tasklib.tasks set retry_count = retry_count - 1, crash_count = 1 where id = {A_RETRIED}"""),
    ("a crash that was not to be retried", f"""
        update tasklib.attempts set outcome = 'WORKER_FAILURE' where task_id = {A_HOPELESS} and attempt = 3;
        update tasklib.tasks set crash_count = 1, on_crash = 'fail', error_code = 'WORKER_CRASHED', max_retries = 9
        where id = {A_HOPELESS}"""),
    ("told not to retry", f"""
        update tasklib.tasks set max_retries = 9, error_code = 'FAILED' where id = {A_HOPELESS}"""),
    ("the row of a worker that was declared dead", f"{_A_WORKER}; update tasklib.workers set died_at = now()"),
    ("the row of a worker that lives", f"insert into chaos.live values (1); {_A_WORKER}"),
]  # fmt: skip


def _run_a_few_tasks(url: str) -> None:
    seen: dict[str, int] = {}

    def is_early(name: str) -> bool:
        seen[name] = seen.get(name, 0) + 1
        return seen[name] == 1

    @tasklib.task
    def fine() -> str:
        return "done"

    @tasklib.task
    def flaky() -> None:
        if is_early("flaky"):
            raise ValueError("not yet")

    @tasklib.task(max_retries=2)
    def hopeless() -> None:
        raise ValueError("never")

    @tasklib.task
    async def sleepy() -> None:
        if is_early("sleepy"):
            raise tasklib.Snooze(0)

    @tasklib.task
    def told() -> None:
        raise tasklib.Fail("no use")

    config = tasklib.Config(url, base_retry_delay_seconds=0)
    with tasklib.Client(config) as client:
        client.submit_many([each.new() for each in (fine, flaky, hopeless, sleepy, told)])
        client.submit_task(fine, idempotency_key="key")
    tasklib.TaskWorker(config, concurrency=2).run_until_empty_sync()


@pytest.fixture(scope="module")
def drained_url(new_database: NewDatabase) -> str:
    """A database after a small run, with its journal."""
    url = new_database()
    migrate.migrate(tasklib.Config(url))
    before = dict(default_registry._functions)
    _run_a_few_tasks(url)
    default_registry._functions = before
    with psycopg.connect(url, autocommit=True) as conn:
        make_journal_tables(conn)
        conn.execute(literal(_JOURNAL))
    return url


@pytest.fixture
def drained(drained_url: str) -> Iterator[Conn]:
    """Whatever a test does to it is rolled back."""
    with psycopg.connect(drained_url) as conn:
        yield conn
        conn.rollback()


@pytest.fixture
def unfolded(drained: Conn) -> Conn:
    """With a row for every attempt, also for those by which tasks succeeded."""
    drained.execute(literal(_UNFOLD))
    return drained


def broken(conn: Conn) -> set[str]:
    return {each.invariant.number for each in violations(conn)}


def test_a_clean_run_breaks_nothing(drained: Conn) -> None:
    """After retries, a snooze, a failure and a repeated key, every invariant is silent."""
    assert [str(each) for each in violations(drained)] == []
    states = drained.execute("select state, count(*) from tasklib.tasks group by 1 order by 1").fetchall()
    assert states == [("completed", 4), ("failed", 2)]


@pytest.mark.parametrize(("number", "what", "how"), BREACHES, ids=[f"{each[0]} {each[1]}" for each in BREACHES])
def test_a_breach_is_seen(unfolded: Conn, number: str, what: str, how: str) -> None:
    """A check that has never fired proves nothing."""
    unfolded.execute(literal(how))
    assert number in broken(unfolded)


def test_an_attempt_may_be_kept_in_its_task(drained: Conn) -> None:
    """There, too, it is missed; and kept twice, it is one too many."""
    with drained.transaction(force_rollback=True):
        drained.execute(literal(f"update tasklib.tasks set completed_by = null where id = {A_COMPLETED}"))
        assert "I11" in broken(drained)
    drained.execute("insert into tasklib.attempts select * from tasklib.folded_attempts")
    assert "I11" in broken(drained)


@pytest.mark.parametrize(("what", "how"), ALLOWED, ids=[each[0] for each in ALLOWED])
def test_what_is_allowed_is_not_a_breach(unfolded: Conn, what: str, how: str) -> None:
    """A check that cries wolf is switched off."""
    unfolded.execute(literal(how))
    assert [str(each) for each in violations(unfolded)] == []


def test_each_invariant_has_its_breach() -> None:
    """Those that need other sessions have tests of their own below."""
    assert {each[0] for each in BREACHES} | {"I23"} == set(INVARIANTS)


@pytest.mark.parametrize(
    ("leak", "application"),
    [
        ("select 1", "tasklib:claim"),
        ("begin", "somebody"),
        ("select pg_advisory_lock(1)", "somebody"),
    ],
    ids=["a worker's session", "an open transaction", "an advisory lock"],
)
def test_a_leaked_session_is_seen(drained: Conn, drained_url: str, leak: str, application: str) -> None:
    """Where no worker lives, nothing of one may be left."""
    with psycopg.connect(drained_url, application_name=application, autocommit=True) as other:
        other.execute(literal(leak))
        assert broken(drained) == {"I23"}


def test_the_sessions_of_a_live_worker_are_no_leak(drained: Conn, drained_url: str) -> None:
    """They go when it does."""
    drained.execute("insert into chaos.live values (1)")
    with psycopg.connect(drained_url, application_name="tasklib:claim", autocommit=True) as other:
        other.execute("select 1")
        assert violations(drained) == []


@pytest.mark.slow
def test_prepared_transactions_and_unread_notifications_are_seen() -> None:
    """On a server of its own: others would wait for both."""
    with ExitStack() as stack:
        server = stack.enter_context(embedded.postgres(settings={"max_prepared_transactions": 1}))
        migrate.migrate(tasklib.Config(server.dsn))
        conn = stack.enter_context(psycopg.connect(server.dsn, autocommit=True))
        make_journal_tables(conn)
        assert violations(conn) == []
        conn.execute("begin; create table t (); prepare transaction 'forgotten'")
        assert [row[0] for row in violations(conn)[0].rows] == ["prepared transaction"]
        conn.execute("rollback prepared 'forgotten'")
        deaf = stack.enter_context(psycopg.connect(server.dsn, autocommit=True))
        deaf.execute("listen heap")
        deaf.execute("begin; select 1")  # one that does not end its transaction keeps the queue for everybody
        conn.execute("select pg_notify('heap', repeat('x', 7900) || number) from generate_series(1, 12000) as number")
        assert "notification queue" in [row[0] for row in violations(conn)[0].rows]
