"""Inserts ring once per statement and queue, while somebody sleeps; a ring carries nothing."""

from __future__ import annotations

from collections import Counter

import psycopg
import pytest

import tasklib
from tasklib import TaskWorker
from tests.support.raw_sql import Conn, literal
from tests.support.working import get, sleep_on

pytestmark = pytest.mark.postgres_versions


def heard(listener: Conn) -> Counter[tuple[str, str]]:
    """What has been sent up to now: a notification of our own marks the end."""
    listener.execute("select pg_notify('end', '')")
    found: Counter[tuple[str, str]] = Counter()
    for notify in listener.notifies(timeout=20):
        if notify.channel == "end":
            return found
        found[notify.channel, notify.payload] += 1
    raise AssertionError("the listener's own notification did not come")


@pytest.fixture
def listener(conn: Conn) -> Conn:
    """It hears everything, and sleeps on all queues."""
    for channel in ("task_new", "task_queue_default", '"task_queue_mail.out"', '"end"'):
        conn.execute(literal(f"listen {channel}"))
    sleep_on(conn, "*")
    return conn


def test_one_ring_per_statement_and_queue(listener: Conn, database_url: str) -> None:
    """Not per row: a notifying commit holds an instance-wide lock."""
    with psycopg.connect(database_url, autocommit=True) as other:
        other.execute(
            """insert into tasklib.tasks (name, queue)
               select 'a', queue from unnest('{default,mail.out}'::text[]) as queue, generate_series(1, 500)"""
        )
    assert heard(listener) == {("task_new", ""): 1, ("task_queue_default", ""): 1, ("task_queue_mail.out", ""): 1}


def test_every_way_in_rings(listener: Conn, client: tasklib.Client) -> None:
    """Single, bulk, SQL: a trigger does it, so that nobody can forget."""
    client.submit_task("a")
    assert heard(listener)["task_new", ""] == 1
    client.submit_many([tasklib.task(name="a")(lambda: None).new() for _ in range(100)])
    assert heard(listener)["task_new", ""] == 1
    with psycopg.connect(client.database._conninfo) as other:
        other.execute("select tasklib.submit('a')")
        other.execute("select tasklib.submit('a')")
    assert heard(listener) == {("task_new", ""): 1, ("task_queue_default", ""): 1}


def test_rolled_back_is_not_heard(listener: Conn, database_url: str) -> None:
    """Notifications are part of the transaction."""
    with psycopg.connect(database_url) as other:
        other.execute("select tasklib.submit('a')")
        other.rollback()
    assert heard(listener) == {}


@pytest.mark.parametrize(("delay", "rings"), [(0, 1), (30, 1), (3600, 0)])
def test_only_what_is_due_soon_rings(listener: Conn, client: tasklib.Client, delay: float, rings: int) -> None:
    """Nobody is woken for a task of tomorrow; one that is due before the next poll must be heard of."""
    client.submit_task("a", delay_seconds=delay)
    assert heard(listener)["task_new", ""] == rings


@pytest.mark.parametrize(("delay", "rings"), [(0, 1), (30, 1), (3600, 0)])
def test_a_retry_rings(
    listener: Conn, client: tasklib.Client, config: tasklib.Config, delay: float, rings: int
) -> None:
    """For the other workers: whoever has failed at it may be busy when it is due."""

    @tasklib.task(max_retries=1, backoff=tasklib.Fixed(delay))
    def flaky() -> None:
        if tasklib.current_task().retry_count == 0:
            raise OSError("again")

    task = client.submit_task(flaky)
    assert heard(listener)["task_new", ""] == 1
    TaskWorker(config).run_until_empty_sync()
    assert get(client, task).retry_count == 1
    assert heard(listener)["task_new", ""] == rings
