"""The management commands, as processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

import tasklib
from tests.support.working import wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.raw_sql import NewDatabase

ROOT = Path(__file__).resolve().parents[2]


def command(url: str, *words: str) -> tuple[list[str], dict[str, str]]:
    project = {"DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.django_project.settings", "PYTHONPATH": str(ROOT)}
    return [sys.executable, "-W", "error", "-m", "django", *words], os.environ | project


def manage(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    program, environment = command(url, *words)
    return subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def url(new_database: NewDatabase) -> str:
    return new_database()


@pytest.fixture
def worker(url: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts one, and ends what is left of it."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        program, environment = command(url, "tasklib_worker", *words)
        started.append(subprocess.Popen(program, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def test_the_worker_serves_every_app_and_drains(url: str, worker: Callable[..., subprocess.Popen[str]]) -> None:
    """Tasks of both kinds, found in tasks.py, in the queues that are named; SIGTERM lets it finish and end well."""
    process = worker("--concurrency", "2", "--queues", "default", "mail", "--poll-interval", "0.2", "--no-listen")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving: backend_pid, ")
    assert "tests.django_project.tasks.add," in line
    with tasklib.Client(tasklib.Config(url)) as client:
        other = client.submit_task("backend_pid", queue="other")
        done = [client.submit_task("backend_pid"), client.submit_task("tests.django_project.tasks.add", 1, 2)]
        states = [wait_final(client, task_id).state for task_id in done]
        workers = _workers(url)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        left = client.get_task(other)
    assert (process.returncode, states, workers) == (0, ["completed", "completed"], [(2, ["default", "mail"])])
    assert tasklib.is_pending(left)
    assert _workers(url) == []


def _workers(url: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url) as conn:
        return conn.execute("select concurrency, queues from tasklib.workers").fetchall()


@pytest.mark.direct("holds an advisory lock in its own session")
def test_a_worker_finishes_what_executes(url: str, worker: Callable[..., subprocess.Popen[str]]) -> None:
    """SIGTERM in the middle of a task: it is completed before the process ends."""
    process = worker()
    with tasklib.Client(tasklib.Config(url)) as client, psycopg.connect(url, autocommit=True) as conn:
        client.list_tasks()  # makes the schema, unless the worker was first
        conn.execute("select pg_advisory_lock(4)")
        task_id = client.submit_task("wait_for_lock", 4)
        waiting = "select count(*) from pg_stat_activity where wait_event = 'advisory'"
        wait_until(lambda: conn.execute(waiting).fetchone() == (1,), "the task to run")
        process.send_signal(signal.SIGTERM)
        stopping = "select stopping from tasklib.workers"
        wait_until(lambda: conn.execute(stopping).fetchone() == (True,), "the signal to be heard")
        conn.execute("select pg_advisory_unlock(4)")
        process.communicate(timeout=30)
        assert process.returncode == 0
        assert tasklib.is_completed(client.get_task(task_id))


def test_a_wrong_option_is_told(url: str) -> None:
    """In one line, not in a traceback."""
    run = manage(url, "tasklib_worker", "--concurrency", "0")
    assert run.returncode == 1
    assert run.stderr == "CommandError: concurrency must be a whole number from 1 on, got 0\n"


def test_migrate(url: str) -> None:
    """Checks, prints and creates; a second time there is nothing to do."""
    missing = manage(url, "tasklib_migrate", "--check")
    assert (missing.returncode, missing.stdout.startswith("schema tasklib: waiting: 0001")) == (1, True), missing
    script = manage(url, "tasklib_migrate", "--sql")
    assert (script.returncode, script.stdout.startswith("begin;")) == (0, True)
    assert manage(url, "tasklib_migrate", "--check").returncode == 1
    made = manage(url, "tasklib_migrate")
    assert (made.returncode, made.stdout.startswith("schema tasklib: applied: 0001")) == (0, True), made
    there = manage(url, "tasklib_migrate", "--check")
    assert (there.returncode, there.stdout) == (0, "schema tasklib: waiting: nothing\n")
    again = manage(url, "tasklib_migrate", "--sql")
    assert "create table" not in again.stdout


def test_djangos_own_commands_leave_our_tables_alone(url: str) -> None:
    """No migration is made for them, none is missing, and the project passes Django's checks."""
    checked = manage(url, "check", "--fail-level", "WARNING")
    assert (checked.returncode, checked.stdout) == (0, "System check identified no issues (0 silenced).\n"), checked
    assert manage(url, "makemigrations", "--check", "--dry-run").stdout == "No changes detected\n"
    assert manage(url, "migrate", "--run-syncdb").returncode == 0
    with psycopg.connect(url) as conn:
        assert conn.execute("select to_regnamespace('tasklib')").fetchone() == (None,)
        permissions = "select codename from auth_permission where codename like '%\\_task' order by 1"
        assert conn.execute(permissions).fetchall() == [("control_task",), ("view_task",)]
