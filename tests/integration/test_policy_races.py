"""Races about permits, grants and breakers, each forced with two connections. A call is stopped in the middle by a lock
that another transaction holds, and let go when that has done its work.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from tasklib.policies.queue_limit import QueueLimit
from tasklib.policies.queue_policy import QueuePolicy
from tests.integration.test_policy_sql import one, permit, register, set_queue
from tools.waiting import wait_until_blocked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from tests.support.raw_sql import Conn

pytestmark = [pytest.mark.postgres_versions, pytest.mark.direct]

STATE = "select breaker from tasklib.queue_limits where queue = 'mail'"
LOCK = "select pg_advisory_xact_lock(hashtextextended('tasklib.permits mail', 0))"


@pytest.fixture
def other(database_url: str) -> Iterator[Conn]:
    """A connection for the call that is stopped in the middle."""
    with psycopg.connect(database_url, autocommit=True) as made:
        yield made


@pytest.fixture
def holder(database_url: str) -> Iterator[Conn]:
    """A connection whose transaction is open until its commit."""
    with psycopg.connect(database_url) as made:
        yield made


@pytest.fixture
def second() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def blocked(conn: Conn, other: Conn, pool: ThreadPoolExecutor, call: Callable[[], Any]) -> Future[Any]:
    future = pool.submit(call)
    wait_until_blocked(conn, other)
    return future


# --- permits ---


def test_tasks_that_start_during_the_question_are_within_the_permits(
    conn: Conn, other: Conn, holder: Conn, second: ThreadPoolExecutor
) -> None:
    """The cap is lowered, and its worker asks. Until the answer comes, it starts as many as it may."""
    set_queue(conn, '{"max_running": 5}')
    permit(conn, "a", 5)
    limit = QueueLimit(QueuePolicy("mail", has_cap=True), 10)
    limit.own = limit.held = 5
    limit.executing, limit.waiting = 2, 9
    set_queue(conn, '{"max_running": 3}')
    question = limit.permit_question(0.0, free_slots=8)
    assert question is not None
    holder.execute(LOCK)
    answer = blocked(conn, other, second, lambda: permit(other, "a", question.wants, question.keeps))
    while limit.room(0.0):
        limit.begin()
    holder.commit()
    permits, target = answer.result(10)
    limit.note_permits(question, permits, target, 0.0)
    assert one(conn, "select permits from tasklib.permits") >= limit.executing
    assert permit(conn, "b", 5) == (0, 0)
    for _ in range(3):
        limit.end()
    assert limit.room(0.0) <= 1


def test_permits_are_reckoned_after_the_lock_is_there(
    conn: Conn, other: Conn, holder: Conn, second: ThreadPoolExecutor
) -> None:
    """Whoever waited for the lock sees what its holder took."""
    set_queue(conn, '{"max_running": 3}')
    assert permit(holder, "a", 3) == (3, 3)
    answer = blocked(conn, other, second, lambda: permit(other, "b", 3))
    holder.commit()
    assert answer.result(10) == (0, 0)
    assert one(conn, "select sum(permits) from tasklib.permits") == 3


def test_permits_of_a_dead_worker_are_free_when_its_tasks_are_recovered(conn: Conn) -> None:
    """Not when it is declared dead: its tasks may still be recovered, and counted for nobody meanwhile."""
    set_queue(conn, '{"max_running": 1}')
    conn.execute("insert into tasklib.claims (worker_id, locked_until, task_ids) values ('a', now(), '{}')")
    permit(conn, "a", 1)
    register(conn, "{policies}")
    conn.execute("update tasklib.workers set worker_id = 'a'")
    conn.execute("update tasklib.workers set died_at = clock_timestamp()")
    conn.execute("select tasklib.forget_permits()")
    assert permit(conn, "b", 1) == (0, 0)
    conn.execute("delete from tasklib.claims")
    conn.execute("select tasklib.forget_permits()")
    assert permit(conn, "b", 1) == (1, 1)


def test_a_late_call_of_a_dead_worker_is_swept_by_the_next_round(conn: Conn, holder: Conn) -> None:
    """It was under way when the worker died, and is committed after its permits were forgotten."""
    set_queue(conn, '{"max_running": 1}')
    assert permit(holder, "dead", 1) == (1, 1)
    conn.execute("select tasklib.forget_permits()")
    holder.commit()
    assert permit(conn, "b", 1) == (0, 0)
    conn.execute("select tasklib.forget_permits()")
    conn.execute("select tasklib.permit('mail', 'b', 1, 0)")
    assert one(conn, "select array_agg(worker_id) from tasklib.permits") == ["b"]


def test_shares_leave_no_permit_unused(conn: Conn) -> None:
    """Rounded down, four workers would use eight of ten."""
    set_queue(conn, '{"max_running": 10}')
    held = dict.fromkeys("abcd", 0)
    for _ in range(6):
        for worker, executing in held.items():
            permits, target = permit(conn, worker, 10, keeps=executing)
            assert permits is not None
            assert target is not None
            held[worker] = min(permits, target)  # tasks have ended since
            permit(conn, worker, 10, keeps=held[worker])
    assert one(conn, "select sum(permits) from tasklib.permits") == 10
    assert one(conn, "select min(permits) from tasklib.permits") >= 1


def test_an_open_transaction_of_an_operator_holds_up_no_question(conn: Conn, holder: Conn) -> None:
    policy = '{"max_running": 5, "rate_limit": 5, "rate_seconds": 60, "breaker_failures": 5}'
    set_queue(conn, policy)
    set_queue(holder, '{"max_running": 1}')
    holder.execute("select tasklib.set_cluster('{\"cluster_wide_cap\": 1}')")
    holder.execute("select from tasklib.queues for update")
    conn.execute("set lock_timeout = '2s'")
    assert permit(conn, "a", 3) == (3, 3)
    assert one(conn, "select granted from tasklib.grant_starts('mail', 2)") == 2
    assert one(conn, "select tasklib.report_breaker('mail', 1, 1, 1)") == "closed"
    assert one(conn, "select count(*) from tasklib.queue_limits") == 1
    conn.execute("select tasklib.forget_permits()")


def test_versions_are_committed_in_their_order(
    conn: Conn, other: Conn, holder: Conn, second: ThreadPoolExecutor
) -> None:
    """A worker that reads a version has seen all changes up to it. So a later change waits for an earlier one."""
    set_queue(conn, '{"max_running": 4}')  # switches the feature on, which locks the row as well
    set_queue(holder, '{"max_running": 5}')
    later = blocked(conn, other, second, lambda: set_queue(other, '{"max_running": 6}', "other"))
    before = one(conn, "select version from tasklib.policy")
    holder.commit()
    later.result(10)
    assert one(conn, "select version from tasklib.policy") >= before + 2


# --- grants ---


def test_the_clock_of_a_rate_is_read_after_its_lock(
    conn: Conn, other: Conn, holder: Conn, second: ThreadPoolExecutor
) -> None:
    """Whoever waited for the row would date its starts too early, and the period would end before its time."""
    set_queue(conn, '{"rate_limit": 5, "rate_seconds": 60}')
    assert one(holder, "select granted from tasklib.grant_starts('mail', 1)") == 1
    answer = blocked(conn, other, second, lambda: one(other, "select granted from tasklib.grant_starts('mail', 1)"))
    time.sleep(0.2)
    freed_at = one(conn, "select clock_timestamp()")
    holder.commit()
    assert answer.result(10) == 1
    assert one(conn, "select at[cardinality(at)] from tasklib.rates") >= freed_at


def test_grants_that_share_an_entry_count_from_the_later_one(conn: Conn) -> None:
    set_queue(conn, '{"rate_limit": 5, "rate_seconds": 640}')
    conn.execute("select tasklib.grant_starts('mail', 1)")
    before = one(conn, "select clock_timestamp()")
    conn.execute("select tasklib.grant_starts('mail', 1)")
    assert one(conn, "select cardinality(at), taken[1], at[1] >= %s from tasklib.rates", before) == (1, 2, True)


def test_a_clock_that_goes_back_forgets_no_start(conn: Conn) -> None:
    """What was granted counts from now, also if the burst is there again."""
    set_queue(conn, '{"rate_limit": 5, "rate_seconds": 60}')
    conn.execute("select tasklib.grant_starts('mail', 5)")
    conn.execute("update tasklib.rates set at = array[now() + interval '1 day'], full_at = 'epoch'")
    assert one(conn, "select granted from tasklib.grant_starts('mail', 1)") == 0


# --- breakers ---


def test_two_reports_at_once_open_a_breaker_once(
    conn: Conn, other: Conn, holder: Conn, second: ThreadPoolExecutor
) -> None:
    """The later one is about the epoch before. It neither opens the breaker again nor prolongs it."""
    set_queue(conn, '{"breaker_failures": 3, "breaker_open_seconds": 60}')
    report = "select tasklib.report_breaker('mail', 1, 0, 3)"
    conn.execute("insert into tasklib.breakers (queue) values ('mail')")
    assert one(holder, report) == "open"
    answer = blocked(conn, other, second, lambda: one(other, report))
    holder.commit()
    assert answer.result(10) == "open"
    assert one(conn, "select epoch, failed from tasklib.breakers") == (2, 0)


def test_late_successes_do_not_close_a_breaker_that_is_half_open(conn: Conn) -> None:
    """They began before it opened. Late failures do not keep it open either."""
    set_queue(conn, '{"breaker_failures": 1, "breaker_open_seconds": 2, "breaker_probes": 1}')
    assert one(conn, "select tasklib.report_breaker('mail', 1, 0, 1)") == "open"
    conn.execute("update tasklib.breakers set open_until = clock_timestamp()")
    assert one(conn, STATE) == "half_open"
    one(conn, "select tasklib.report_breaker('mail', 1, 9, 0)")
    one(conn, "select tasklib.report_breaker('mail', 1, 0, 9)")
    assert one(conn, STATE) == "half_open"
    assert one(conn, "select tasklib.report_breaker('mail', 2, 1, 0)") == "closed"
