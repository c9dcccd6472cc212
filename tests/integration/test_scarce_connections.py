"""A server without a free connection is no fault of the tasks: they wait, or are given back, and pay no retry."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import tasklib
from tasklib import embedded, migrate, outcomes
from tasklib.outcomes import MOST_FREE_RUNS
from tasklib.registry import default_registry
from tests.support.used_up_connections import all_connections
from tests.support.working import get, running, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from tests.support.raw_sql import Conn

kinds = pytest.mark.parametrize("kind", ["sync", "async", "process"])


@pytest.fixture(scope="module", autouse=True)
def tasks() -> Iterator[ModuleType]:
    """Imported for this module alone: other tests' workers would start a fork server for them."""
    functions = dict(default_registry._functions)
    yield importlib.import_module("tests.support.scarce_tasks")
    default_registry._functions = functions
    del sys.modules["tests.support.scarce_tasks"]


@pytest.fixture(scope="module")
def small_server() -> Iterator[str]:
    with embedded.postgres(settings={"max_connections": 25}) as server:
        migrate.migrate(tasklib.Config(server.dsn))
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            conn.execute("create table effects (task_id uuid)")
        yield server.dsn


@pytest.fixture
def config(small_server: str) -> tasklib.Config:
    return tasklib.Config(small_server, pool_size=2)


@pytest.fixture
def conn(small_server: str) -> Iterator[Conn]:
    with psycopg.connect(small_server, autocommit=True) as made:
        made.execute("truncate effects, tasklib.tasks cascade")
        yield made


@pytest.fixture
def client(config: tasklib.Config, conn: Conn) -> Iterator[tasklib.Client]:
    with tasklib.Client(config) as made:
        made.list_tasks()  # its connection is there before the others are gone
        yield made


@contextlib.contextmanager
def working(client: tasklib.Client, **options: Any) -> Iterator[None]:
    """A worker whose own connections are there before the others are gone."""
    warm = tasklib.task(name="warm")(lambda: None)
    with running(client.config, **options):
        wait_final(client, client.submit(warm.new()))
        yield


def effects(conn: Conn) -> int:
    return len(conn.execute("select from effects").fetchall())


@kinds
def test_a_task_waits_for_its_own_connection(client: tasklib.Client, conn: Conn, tasks: ModuleType, kind: str) -> None:
    """It has no time limit, so it waits for as long as it takes: one attempt, one effect."""
    write = tasks.KINDS[kind].options(max_retries=0)
    with working(client):
        with all_connections(client.config.database_url):
            task_id = client.submit(write.new())
            wait_until(lambda: get(client, task_id).state == "running", "it to run")
            assert effects(conn) == 0
        task = wait_final(client, task_id)
    assert (task.state, task.attempt, task.retry_count) == ("completed", 1, 0)
    assert effects(conn) == 1


@kinds
def test_a_task_whose_time_is_over_before_it_has_its_connection_does_not_pay(
    client: tasklib.Client, conn: Conn, tasks: ModuleType, kind: str
) -> None:
    """It is given back at no cost, again and again, and completes when there is a connection."""
    write = tasks.KINDS[kind].options(max_retries=0, timeout_seconds=0.5)
    with working(client):
        with all_connections(client.config.database_url):
            task_id = client.submit(write.new())
            wait_until(lambda: get(client, task_id).attempt >= 2, "it to be given back twice", seconds=40)
            assert get(client, task_id).retry_count == 0
            more = "update tasklib.tasks set timeout_seconds = 60 where id = %s and state = 'pending' returning id"
            wait_until(lambda: conn.execute(more, [task_id]).fetchone() is not None, "it to wait for its next run")
        task = wait_final(client, task_id, seconds=60)
    outcomes = {
        row[0] for row in conn.execute("select outcome from tasklib.task_attempts where task_id = %s", [task_id])
    }
    assert (task.state, task.retry_count, outcomes) == ("completed", 0, {"SNOOZED", "COMPLETED"})
    assert effects(conn) == 1


@kinds
def test_what_must_not_run_twice_does_not_run_twice_for_a_connection(
    client: tasklib.Client, conn: Conn, tasks: ModuleType, kind: str
) -> None:
    """Its time is over, and it has begun: it fails, as any other that must not run twice."""
    write = tasks.KINDS[kind].options(max_retries=0, timeout_seconds=0.5, on_crash="fail")
    with working(client), all_connections(client.config.database_url):
        task = wait_final(client, client.submit(write.new()))
    assert (task.state, task.error_code, task.attempt) == ("failed", "TIMEOUT", 1)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_worker_that_stops_does_not_wait_for_connections(
    client: tasklib.Client, conn: Conn, tasks: ModuleType, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A task that waits for one is interrupted like all others, and goes back at no cost."""
    write = tasks.KINDS[kind].options(max_retries=0)
    with contextlib.ExitStack() as until_the_end, working(client, grace_seconds=0.1):
        until_the_end.enter_context(all_connections(client.config.database_url))
        task_id = client.submit(write.new())
        wait_until(lambda: "transaction.waits" in caplog.text, "it to wait")
    task = get(client, task_id)
    assert (task.state, task.retry_count) == ("pending", 0)


def test_a_child_that_cannot_be_submitted_costs_nothing(client: tasklib.Client, conn: Conn) -> None:
    """The function lets DatabaseUnavailable out: it is given back, and runs again when the database is to be had."""
    impatient = tasklib.Client(tasklib.Config(client.config.database_url, database_timeout_seconds=0.5))
    child = tasklib.task(name="child", queue="elsewhere")(lambda: None)

    @tasklib.task(max_retries=0)
    def parent() -> None:
        impatient.submit(child.new())

    with impatient, working(client, queues=["default"]):
        with all_connections(client.config.database_url):
            task_id = client.submit(parent.new())
            wait_until(lambda: get(client, task_id).attempt >= 2, "it to be given back twice", seconds=40)
        task = wait_final(client, task_id, seconds=60)
    assert (task.state, task.retry_count) == ("completed", 0)
    assert len(client.list_tasks(name="child")) == 1


def test_a_database_that_never_comes_back_is_the_tasks_own_fault(
    client: tasklib.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another one, of the task's own: then the error counts like any other, after ten runs for free."""
    monkeypatch.setattr(outcomes, "LONGEST_DELAY_SECONDS", 0.0)

    @tasklib.task(max_retries=0)
    def ask() -> None:
        raise tasklib.DatabaseUnavailable("somewhere else")

    with working(client):
        task = wait_final(client, client.submit(ask.new()), seconds=60)
    assert (task.state, task.error_code, task.attempt) == ("failed", "DatabaseUnavailable", MOST_FREE_RUNS + 1)


@pytest.mark.parametrize("options", [{"no_retry_on": (tasklib.TasklibError,)}, {"retry_on": (ValueError,)}])
def test_a_task_may_say_that_it_gives_up_without_a_database(client: tasklib.Client, options: Any) -> None:
    """What retry_on and no_retry_on say comes first."""

    @tasklib.task(**options)
    def ask() -> None:
        raise tasklib.DatabaseUnavailable("away")

    with working(client):
        task = wait_final(client, client.submit(ask.new()))
    assert (task.state, task.error_code, task.attempt) == ("failed", "DatabaseUnavailable", 1)
