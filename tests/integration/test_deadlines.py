"""A deadline over all attempts: nothing starts after it, nothing runs on after it, and nothing is retried after it."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

import tasklib
from tests.support.raw_sql import literal
from tests.support.working import get, running, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from uuid import UUID

    from tests.support.raw_sql import Conn

pytestmark = pytest.mark.postgres_versions

PAST = "clock_timestamp() - interval '1 s'"


def soon(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def outlive(conn: Conn) -> None:
    """All deadlines have passed."""
    conn.execute(literal(f"update tasklib.tasks set deadline_at = {PAST}, due_at = {PAST} where completed_at is null"))


def passed(task: tasklib.Task) -> bool:
    return (task.state, task.error_code, task.ready, task.due_at) == ("failed", "DEADLINE_PASSED", False, None)


@pytest.mark.parametrize("way", ["submit", "submit_many", "decorator", "parent", "sql", "sql many", "insert"])
def test_a_deadline_is_stored_whichever_way_a_task_comes(client: tasklib.Client, conn: Conn, way: str) -> None:
    """In seconds from the submit, by the database's clock. It is due then, so that it is ended soon after."""
    work = tasklib.task(name="work")(lambda: None)
    match way:
        case "submit":
            client.submit(work.options(deadline_seconds=60).new())
        case "submit_many":
            client.submit_many([work.options(deadline_seconds=60).new()])
        case "decorator":
            client.submit(tasklib.task(name="own", deadline_seconds=60)(lambda: None).new())
        case "parent":
            client.submit_task("nobodys", deadline_seconds=60)
        case "sql":
            conn.execute("select tasklib.submit('a', deadline_seconds => 60)")
        case "sql many":
            conn.execute("""select tasklib.submit_many('[{"name": "a", "deadline_seconds": 60}]')""")
        case _:
            conn.execute(
                """insert into tasklib.tasks (name, created_at, deadline_at)
                   select 'a', now, now + interval '60 s' from clock_timestamp() as now"""
            )
    found = conn.execute("select deadline_at - created_at, due_at = deadline_at, ready from tasklib.tasks").fetchall()
    assert found == [(timedelta(seconds=60), True, True)]
    (task,) = client.list_tasks()
    assert task.deadline_at == task.created_at + timedelta(seconds=60)


def test_a_moment_replaces_the_seconds_of_the_function(client: tasklib.Client, conn: Conn) -> None:
    own = tasklib.task(name="own", deadline_seconds=60)(lambda: None)
    moment = soon(3600)
    assert get(client, client.submit(own.options(deadline_at=moment).new())).deadline_at == moment
    with pytest.raises(tasklib.InvalidOptions, match="not both"):
        own.options(deadline_at=moment, deadline_seconds=5)
    with pytest.raises(tasklib.InvalidOptions, match="deadline_seconds must be a positive number"):
        own.options(deadline_seconds=0)


@pytest.mark.parametrize("given", ["deadline_seconds => -1", "deadline_seconds => 'NaN'", "deadline_at => 'infinity'"])
def test_sql_refuses_a_deadline_that_is_none(conn: Conn, given: str) -> None:
    """Without the row in the server's log: a domain refuses it, and not the table."""
    with pytest.raises(Exception, match="value for domain"):
        conn.execute(literal(f"select tasklib.submit('a', {given})"))


@pytest.mark.parametrize("delay", [0, 3600])
def test_a_task_that_was_not_started_in_time_fails(client: tasklib.Client, conn: Conn, delay: int) -> None:
    """Ready or delayed, without any worker. It is not an attempt."""
    task_id = client.submit_task("late", deadline_seconds=60, delay_seconds=delay)
    assert client.expire_tasks() == 0
    outlive(conn)
    assert client.expire_tasks() == 1
    task = get(client, task_id)
    assert passed(task)
    assert tasklib.is_failed(task)
    assert task.error is not None
    assert task.error.startswith(
        f"DeadlinePassed: not started before the deadline {task.deadline_at:%Y-%m-%d %H:%M:%S}"
    )
    assert (task.attempt, client.get_attempts(task_id)) == (0, [])


@pytest.mark.parametrize(("expires", "deadline", "state"), [(1, 2, "expired"), (2, 1, "failed"), (1, 1, "failed")])
def test_of_two_limits_the_earlier_one_counts(
    client: tasklib.Client, conn: Conn, expires: int, deadline: int, state: str
) -> None:
    task_id = client.submit_task("late", expires_at=soon(60 + expires), deadline_at=soon(60 + deadline))
    conn.execute(
        """update tasklib.tasks set due_at = now() - interval '1 min',
                  expires_at = now() - interval '1 min' + %s * interval '1 s',
                  deadline_at = now() - interval '1 min' + %s * interval '1 s'""",
        [expires, deadline],
    )
    assert client.expire_tasks() == 1
    assert get(client, task_id).state == state


def test_a_worker_does_not_start_what_is_too_late(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """It waited in a backlog until then: in the table, or in the worker's buffer."""
    ran: list[int] = []
    free = threading.Event()
    tasklib.task(name="block")(lambda: free.wait(20))
    late = tasklib.task(name="late")(lambda: ran.append(1))
    blocking = client.submit_task("block")
    ids = [client.submit(late.options(deadline_seconds=1).new()) for _ in range(3)]
    with running(config, concurrency=1):
        time_left = get(client, ids[0]).deadline_at
        assert time_left is not None
        wait_until(lambda: datetime.now(UTC) > time_left + timedelta(seconds=0.2), "the deadline")
        free.set()
        assert all(passed(wait_final(client, each)) for each in ids)
        wait_final(client, blocking)
    assert ran == []


def test_a_claimed_task_that_is_too_late_is_not_begun(
    client: tasklib.Client, conn: Conn, config: tasklib.Config
) -> None:
    """Even if nobody has ended it before the claim: the row is not looked for by its time."""
    ran: list[int] = []
    late = tasklib.task(name="late")(lambda: ran.append(1))
    task_id = client.submit(late.options(deadline_seconds=60).new())
    conn.execute(literal(f"update tasklib.tasks set deadline_at = {PAST}, due_at = null"))
    with running(config):
        assert passed(wait_final(client, task_id))
    assert ran == []


def test_a_retry_after_the_deadline_is_not_scheduled(
    client: tasklib.Client, conn: Conn, config: tasklib.Config
) -> None:
    """The task has failed for good, at once. The error names both times, and keeps the last traceback."""

    @tasklib.task(backoff=lambda _: 3600.0)
    def fails() -> None:
        raise ValueError("no luck")

    task_id = client.submit(fails.options(deadline_seconds=600).new())
    in_time = client.submit(fails.options(deadline_seconds=7200).new())
    with running(config):
        task = wait_final(client, task_id)
        wait_until(lambda: tasklib.is_retrying(get(client, in_time)), "its retry")
    assert passed(task)
    assert task.error is not None
    assert "ValueError: no luck" in task.error
    assert f"the deadline is {task.deadline_at}" in task.error
    (attempt,) = client.get_attempts(task_id)
    assert (attempt.outcome, attempt.will_retry, attempt.error_code) == ("FAILED", False, "DEADLINE_PASSED")
    waiting = get(client, in_time)
    assert waiting.due_at == waiting.next_retry_at
    conn.execute("update tasklib.tasks set next_retry_at = now(), due_at = now() where id = %s", [in_time])
    conn.execute("select tasklib.promote()")
    waiting = get(client, in_time)
    assert (waiting.ready, waiting.due_at) == (True, waiting.deadline_at)
    outlive(conn)
    assert client.expire_tasks() == 1
    task = get(client, in_time)
    assert passed(task)
    assert task.error is not None
    assert "no luck" in task.error


@pytest.mark.parametrize("timeout", [None, 60.0])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_run_is_over_at_the_deadline(
    client: tasklib.Client, config: tasklib.Config, kind: str, timeout: float | None
) -> None:
    """Its timeout is longer, or it has none. There is no retry, and the attempt has timed out."""
    if kind == "sync":

        def body() -> None:
            while True:
                time.sleep(0.01)
    else:

        async def body() -> None:  # type: ignore[misc]
            await asyncio.sleep(60)

    work: Any = tasklib.task(name="endless", timeout_seconds=timeout)(body)
    task_id = client.submit(work.options(deadline_seconds=1).new())
    with running(config):
        task = wait_final(client, task_id)
    assert passed(task)
    assert task.completed_at is not None
    assert task.deadline_at is not None
    assert task.completed_at >= task.deadline_at
    assert task.error is not None
    assert f"it still ran at its deadline {task.deadline_at}" in task.error
    (attempt,) = client.get_attempts(task_id)
    assert (attempt.outcome, attempt.will_retry) == ("TIMED_OUT", False)


def test_a_task_may_ask_how_long_it_has(client: tasklib.Client, config: tasklib.Config) -> None:
    """The shorter one of its timeout and of what is left."""
    seen: list[float | None] = []
    ask: Any = tasklib.task(name="ask")(lambda: seen.append(tasklib.current_task().timeout_seconds))
    client.submit(ask.options(timeout_seconds=5, deadline_seconds=600).new())
    last = client.submit(ask.options(timeout_seconds=3600, deadline_seconds=600).new())
    with running(config, concurrency=1):
        wait_final(client, last)
        wait_until(lambda: len(seen) == 2, "both")
    short, long = sorted(each for each in seen if each is not None)
    assert short == 5
    assert 500 < long <= 600


def test_a_person_who_retries_removes_a_deadline_that_has_passed(client: tasklib.Client, conn: Conn) -> None:
    """One that lies ahead stays."""
    late, ahead = client.submit_task("a", deadline_seconds=60), client.submit_task("b", deadline_seconds=600)
    conn.execute(literal(f"update tasklib.tasks set deadline_at = {PAST}, due_at = {PAST} where id = %s"), [late])
    client.expire_tasks()
    client.cancel_task(ahead)
    assert client.retry_task(late)
    assert client.retry_task(ahead)
    task = get(client, late)
    assert (task.state, task.ready, task.deadline_at, task.due_at, task.error) == ("pending", True, None, None, None)
    task = get(client, ahead)
    assert task.due_at == task.deadline_at is not None


def recovered(conn: Conn, task_id: UUID) -> None:
    conn.execute(
        """update tasklib.tasks set state = 'running', ready = false, due_at = null, worker_id = 'gone',
                  claimed_at = now(), started_at = now(), locked_until = now(), fencing_token = 1, attempt = 1
            where id = %s""",
        [task_id],
    )
    conn.execute(
        "insert into tasklib.claims (worker_id, locked_until, task_ids) values ('gone', now() - interval '1 h', %s)",
        [[task_id]],
    )


def test_what_a_dead_worker_held_does_not_run_again_after_its_deadline(
    client: tasklib.Client, conn: Conn, database_url: str
) -> None:
    """The reaper decides by the same rule."""
    config = tasklib.Config(database_url, lease_seconds=0.5)
    ran: list[int] = []
    work = tasklib.task(name="work")(lambda: ran.append(1))
    late, in_time = (client.submit(work.options(deadline_seconds=each).new()) for each in (60, 3600))
    for each in (late, in_time):
        recovered(conn, each)
    conn.execute(literal(f"update tasklib.tasks set deadline_at = {PAST} where id = %s"), [late])
    with running(config):
        assert passed(wait_final(client, late, seconds=30))
        assert tasklib.is_completed(wait_final(client, in_time, seconds=30))
    assert ran == [1]
