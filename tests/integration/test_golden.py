"""TaskLib's five example records and the story of a task, its specified behaviour, and the HTTP executor's scenarios:
replayed with a real worker.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import tasklib
from tasklib import TaskWorker
from tests.support.raw_sql import Conn, literal
from tests.support.working import ManualWorker, get, grown_up_reaper, quick_reaper, running, time_out, wait_final
from tools.waiting import wait_until

pytestmark = pytest.mark.postgres_versions

SECOND = timedelta(seconds=1)


class SMTPException(Exception):
    """Named like the one in the records."""


@pytest.fixture
def send_email() -> Any:
    """What it does depends on the subject."""
    release = threading.Event()

    @tasklib.task(timeout_seconds=30, max_retries=3)
    def send_email(to: str, subject: str, body: str = "") -> bool:
        if subject == "wait":
            assert release.wait(20)
        if subject == "Newsletter":
            raise SMTPException("Connection timeout")
        if to == "invalid-email-address":
            raise ValueError("Invalid email address")
        return True

    send_email.release = release  # type: ignore[attr-defined]
    yield send_email
    release.set()


def work(config: tasklib.Config) -> None:
    TaskWorker(config).run_until_empty_sync()


# --- the five records ---


def test_record_1_pending(client: tasklib.Client, send_email: Any) -> None:
    """Waiting to execute: nothing but what was submitted."""
    tags = {"batch": "welcome-emails", "cohort": "2025-10-25"}
    kwargs = {"to": "alice@example.com", "subject": "Welcome!", "body": "Hello Alice..."}
    task = get(client, client.submit_task(send_email, **kwargs, tags=tags, delay_seconds=3600))
    assert (task.name, task.state, task.args, task.kwargs, task.tags) == ("send_email", "pending", {}, kwargs, tags)
    assert (task.started_at, task.completed_at, task.result, task.error, task.next_retry_at) == (None,) * 5
    assert (task.retry_count, task.max_retries, task.timeout_seconds, task.priority) == (0, 3, 30, 0)
    assert (task.worker_id, task.locked_until) == (None, None)
    assert task.scheduled_at - task.created_at == timedelta(hours=1)


def test_record_2_running(client: tasklib.Client, config: tasklib.Config, send_email: Any) -> None:
    """Being executed by a worker, whose lock will expire ten minutes after the claim."""
    task_id = client.submit_task(send_email, to="bob@example.com", subject="wait")
    with running(config) as worker:
        wait_until(lambda: get(client, task_id).state == "running", "running")
        task = get(client, task_id)
        assert tasklib.is_running(task)
        assert task.worker_id == worker.worker_id
        assert task.claimed_at is not None
        assert task.locked_until == task.claimed_at + 600 * SECOND
        assert task.started_at is not None
        assert task.claimed_at <= task.started_at <= task.claimed_at + 10 * SECOND
        assert (task.completed_at, task.result, task.error, task.next_retry_at) == (None,) * 4
        assert (task.retry_count, task.attempt) == (0, 1)
        send_email.release.set()
        wait_final(client, task_id)


def test_record_3_completed(client: tasklib.Client, config: tasklib.Config, send_email: Any) -> None:
    """Finished: the result is stored, the lock is gone."""
    task_id = client.submit_task(send_email, to="charlie@example.com", subject="Success!")
    work(config)
    task = get(client, task_id)
    assert (task.state, task.result, task.error) == ("completed", {"value": True}, None)
    assert task.started_at is not None
    assert task.completed_at is not None
    assert task.created_at <= task.started_at <= task.completed_at
    assert (task.retry_count, task.next_retry_at, task.worker_id, task.locked_until) == (0, None, None, None)


def test_record_4_failed_and_scheduled_for_retry(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, send_email: Any
) -> None:
    """Failed attempt 1: retried five seconds later, with the whole traceback."""
    task_id = client.submit_task(send_email, to="david@example.com", subject="Newsletter")
    work(config)
    task = get(client, task_id)
    assert tasklib.is_retrying(task)
    assert (task.state, task.retry_count, task.max_retries, task.completed_at) == ("failed", 1, 3, None)
    assert task.error is not None
    assert task.error.startswith("SMTPException: Connection timeout\nTraceback:\n  File ")
    assert ", in send_email\n" in task.error
    assert task.started_at is not None
    assert task.next_retry_at is not None
    ended = conn.execute("select finished_at + interval '5 seconds' from tasklib.task_attempts").fetchone()
    assert ended == (task.next_retry_at,)
    assert (task.result, task.worker_id, task.locked_until) == (None, None, None)


def test_record_5_permanently_failed(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, send_email: Any
) -> None:
    """Four executions with delays of 5, 10 and 20 s, then it is given up: `completed_at` is set, no retry is."""
    task_id = client.submit_task(send_email, to="invalid-email-address", subject="Test")
    delays = []
    for _ in range(4):
        work(config)
        task = get(client, task_id)
        if task.next_retry_at is not None:
            last = conn.execute("select max(finished_at) from tasklib.task_attempts").fetchone()
            assert last is not None
            delays.append(round((task.next_retry_at - last[0]).total_seconds()))
        conn.execute(
            """update tasklib.tasks set next_retry_at = now(), due_at = now() where next_retry_at is not null"""
        )
    work(config)
    task = get(client, task_id)
    assert delays == [5, 10, 20]
    assert tasklib.is_failed(task)
    assert (task.state, task.retry_count, task.max_retries, task.next_retry_at) == ("failed", 3, 3, None)
    assert task.completed_at is not None
    assert task.error is not None
    assert task.error.startswith("ValueError: Invalid email address\nTraceback:\n")
    assert task.attempt == 4
    assert conn.execute("select count(*) from tasklib.task_attempts").fetchone() == (4,)


# --- the story of a task ---


@pytest.mark.usefixtures("app")
async def test_the_story_of_a_task(config: tasklib.Config, send_email: Any) -> None:
    """Submit, pick up, execute, update, query: as it is told, with its own code."""
    task_id = await tasklib.submit_task(send_email, to="user@example.com", subject="wait")
    task = tasklib.get_task(task_id)
    assert task is not None
    assert (task.state, task.kwargs) == ("pending", {"to": "user@example.com", "subject": "wait"})

    worker = TaskWorker(config, concurrency=1, poll_interval_seconds=1.0)
    run = asyncio.create_task(worker.run())

    async def until(state: str) -> Any:
        while (found := await tasklib.get_task_async(task_id)) is None or found.state != state:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return found

    taken = await asyncio.wait_for(until("running"), 20)
    assert taken.worker_id == worker.worker_id
    assert taken.locked_until > datetime.now(UTC) + timedelta(minutes=9)
    assert taken.started_at is not None

    send_email.release.set()
    await asyncio.wait_for(until("completed"), 20)
    worker.stop()
    await run
    task = tasklib.get_task(task_id)
    assert tasklib.is_completed(task)
    assert task.result == {"value": True}
    assert (task.worker_id, task.locked_until) == (None, None)


# --- behaviour: pickup, execution, recovery ---


def test_pickup_goes_by_priority_then_age(client: tasklib.Client, config: tasklib.Config) -> None:
    """ORDER BY priority DESC, created_at ASC."""
    ran: list[str] = []
    note = tasklib.task(name="note")(lambda word: ran.append(word))  # noqa: PLW0108 - its parameter has a name
    for word, priority in [("c", 0), ("a", 10), ("d", 0), ("b", 5), ("e", -3)]:
        client.submit_task(note, word=word, priority=priority)
    work(config)
    assert ran == ["a", "b", "c", "d", "e"]


def test_what_is_not_due_is_not_picked_up(client: tasklib.Client, config: tasklib.Config) -> None:
    """scheduled_at <= now, and next_retry_at too: neither delayed tasks nor tasks given up are run."""
    ran: list[int] = []

    @tasklib.task(max_retries=0)
    def later() -> None:
        ran.append(1)
        raise OSError

    client.submit_task(later, delay_seconds=3600)
    given_up = client.submit_task(later)
    for _ in range(3):
        work(config)
    assert ran == [1]
    assert tasklib.is_failed(get(client, given_up))


def test_a_timeout_is_like_any_other_exception(client: tasklib.Client, config: tasklib.Config) -> None:
    """TimeoutError is caught, and triggers the retry logic; sync and async."""
    inside: set[str] = set()

    @tasklib.task(timeout_seconds=60, backoff=tasklib.Fixed(3600))
    def slow_sync() -> None:
        while True:
            inside.add("sync")
            time.sleep(0.005)

    @tasklib.task(timeout_seconds=60, backoff=tasklib.Fixed(3600))
    async def slow_async() -> None:
        inside.add("async")
        await asyncio.sleep(3600)

    ids = [client.submit_task(slow_sync), client.submit_task(slow_async)]
    with running(config, concurrency=2) as worker:
        wait_until(lambda: len(inside) == 2, "both to run")
        time_out(worker)
        wait_until(lambda: all(tasklib.is_retrying(get(client, each)) for each in ids), "both to wait for a retry")
    for task_id in ids:
        task = get(client, task_id)
        assert (task.retry_count, task.error_code) == (1, "TIMEOUT")
        assert task.error is not None
        assert task.error.startswith("TimeoutError: timeout_seconds=60 passed\nTraceback:\n")


def test_a_dead_worker_is_recovered(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """The lock of a worker that nobody knows passes; the task is taken over and starts from the beginning."""
    ran = threading.Event()
    tasklib.task(name="orphan")(ran.set)
    conn.execute(
        """insert into tasklib.tasks (name, state, worker_id, started_at, locked_until)
           values ('orphan', 'running', 'worker-prod-01-uuid', now() - interval '11 min', now() - interval '1 min')"""
    )
    with quick_reaper(config) as reaper:
        reaper.run_once()
    with running(config):
        wait_until(ran.is_set, "the orphan to run")
        wait_until(lambda: client.list_tasks()[0].state == "completed", "completed")
    task = client.list_tasks()[0]
    assert (task.attempt, task.crash_count, task.retry_count) == (2, 1, 0)


def test_a_lock_that_has_not_passed_is_respected(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """Also of a worker that is in no list: it may be another program's."""
    tasklib.task(name="orphan")(lambda: None)
    conn.execute(
        """insert into tasklib.tasks (name, state, worker_id, started_at, locked_until)
           values ('orphan', 'running', 'worker-prod-01-uuid', now(), now() + interval '10 min')"""
    )
    quick = tasklib.Config(config.database_url, lease_seconds=0.3)
    with running(quick) as worker:
        rounds = worker._run.loops["duties"]  # type: ignore[union-attr]
        wait_until(lambda: rounds.beats > 15, "the reaper to have looked several times")
    assert client.list_tasks()[0].state == "running"


# --- concurrency ---


def test_four_at_a_time(client: tasklib.Client, config: tasklib.Config) -> None:
    """TaskWorker(config, concurrency=4): four run at once, never five, each in a thread."""
    barrier = threading.Barrier(4)
    together: list[int] = []
    lock = threading.Lock()
    now = 0

    @tasklib.task
    def meet() -> str:
        nonlocal now
        with lock:
            now += 1
            together.append(now)
        barrier.wait(20)
        with lock:
            now -= 1
        return threading.current_thread().name

    ids = [client.submit_task(meet) for _ in range(12)]
    TaskWorker(config, concurrency=4).run_until_empty_sync()
    names = {get(client, task_id).result["value"] for task_id in ids}  # type: ignore[index]
    assert max(together) == 4
    assert len(names) == 4
    assert "MainThread" not in names


def test_two_workers_never_run_the_same_task(client: tasklib.Client, config: tasklib.Config) -> None:
    """FOR UPDATE SKIP LOCKED: what one holds, the other passes over."""
    ran: list[int] = []
    once = tasklib.task(name="once")(lambda n: ran.append(n))  # noqa: PLW0108 - its parameter has a name
    client.submit_many([once.new(n=n) for n in range(500)])
    with running(config, concurrency=3), running(config, concurrency=3):
        wait_until(lambda: len(ran) >= 500, "all to run")
        wait_until(lambda: not client.list_tasks(state="claimed"), "all to be settled")
    assert sorted(ran) == list(range(500))


def test_an_idle_worker_does_not_storm(config: tasklib.Config, conn: Conn) -> None:
    """It sleeps poll_interval_seconds between looks."""
    with running(config, poll_interval_seconds=0.2) as worker:
        loop = worker._run.loops["claim"]  # type: ignore[union-attr]

        def is_calm() -> bool:
            before, began = loop.beats, time.monotonic()
            wait_until(lambda: loop.beats >= before + 5, "five rounds")
            return time.monotonic() - began > 0.7

        wait_until(is_calm, "the excitement of the start to be over")


# --- failure modes ---


def test_corrupted_data_fails_its_task_and_nothing_else(
    client: tasklib.Client, conn: Conn, config: tasklib.Config
) -> None:
    """Logged, marked as failed, never retried; the worker goes on."""
    tasklib.task(name="typed")(_typed)
    bad = {
        "no such argument": """'{"wrong": 1}'""",
        "wrong type": """'{"number": "many"}'""",
        "a number that Python cannot hold": """'{"number": 1e131071}'""",
    }
    for kwargs in bad.values():
        conn.execute(literal(f"insert into tasklib.tasks (name, kwargs, priority) values ('typed', {kwargs}, 9)"))
    good = client.submit_task("typed", number=1)
    work(config)
    assert get(client, good).state == "completed"
    for task in client.list_tasks(state="failed"):
        assert tasklib.is_failed(task)
        assert (task.error_code, task.retry_count) == ("INVALID_ARGUMENTS", 0)
    assert len(client.list_tasks(state="failed")) == len(bad)


def _typed(number: int) -> int:
    return number


# --- the HTTP executor ---


def test_a_delayed_task_becomes_ready_in_its_time(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """Delayed, watched, ready: nobody holds it while it waits."""
    tick = tasklib.task(name="tick")(lambda: None)
    task_id = client.submit_task(tick, delay_seconds=3600)
    work(config)
    assert (get(client, task_id).state, get(client, task_id).ready, get(client, task_id).worker_id) == (
        "pending", False, None,
    )  # fmt: skip
    conn.execute("update tasklib.tasks set scheduled_at = now(), due_at = now()")
    work(config)
    assert get(client, task_id).state == "completed"


def test_reserved_tasks_have_the_time_of_their_reservation(client: tasklib.Client, config: tasklib.Config) -> None:
    """A claim sets `claimed_at` (reserved_at), for every task of the buffer at once."""
    worker = ManualWorker(config, "executor")
    client.submit_many([tasklib.task(name="job")(lambda: None).new() for _ in range(5)])
    assert len(worker.claim("job", limit=100)) == 5
    assert all(task.state == "claimed" and task.claimed_at for task in client.list_tasks())
    worker.close()


@pytest.mark.parametrize("fails", ["error", "timeout"])
def test_a_failed_execution_is_retried_until_it_is_given_up(
    client: tasklib.Client, config: tasklib.Config, fails: str
) -> None:
    """By an error or by TASK_TIMEOUT: retry_count grows; at MAX_RETRIES it is over (Aborted)."""

    @tasklib.task(max_retries=2, timeout_seconds=0.05, backoff=tasklib.Fixed(0))
    def job() -> None:
        while fails == "timeout":
            time.sleep(0.005)
        raise OSError("no")

    task_id = client.submit_task(job)
    with running(config):
        task = wait_final(client, task_id)
    assert (task.state, task.retry_count, task.attempt) == ("failed", 2, 3)


def test_reserved_for_too_long_is_buried(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """current_time - reserved_at > TASK_TIMEOUT + DELTA, again and again: kept for a person, never run again."""
    strict = tasklib.Config(
        config.database_url, lease_seconds=0.3, timeout_delta_seconds=5, bury_after=2, lock_timeout_seconds=600
    )
    job = tasklib.task(name="job", timeout_seconds=10)(lambda: None)
    task_id = client.submit_task(job)
    grave = ManualWorker(strict, "reaper", lives=False)
    reaper = grown_up_reaper(strict, grave.session)
    for _ in range(2):
        executor = ManualWorker(replace(strict, lease_seconds=300), "executor")
        assert executor.claim("job")
        conn.execute(
            """update tasklib.tasks set claimed_at = now() - interval '16 s', locked_until = now() - interval '1 s';
               update tasklib.claims set locked_until = now() - interval '1 s'"""
        )
        reaper.run_once()
        executor.close()
    grave.close()
    task = get(client, task_id)
    assert (task.state, task.strikes, task.error_code, task.attempt) == ("buried", 2, "BURIED", 0)
    assert task.completed_at is not None
    work(strict)
    assert get(client, task_id).state == "buried"
