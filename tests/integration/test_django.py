"""Django: submits in its transactions, its settings, its connections in workers. A real project, see django_project."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections, transaction
from django.test import override_settings

import tasklib
from tasklib import TaskWorker
from tasklib.worker import hooks
from tests.django_project import fixtures
from tests.support.working import running, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.raw_sql import Conn, NewDatabase

ROOT = Path(__file__).resolve().parents[2]
set_up_project = fixtures.set_up_project
project = fixtures.project
others = fixtures.others


class Undo(Exception):
    """Leaves an atomic block, so that it rolls back."""


def function(name: str) -> tasklib.TaskFunction[..., Any]:
    """A task of the project; its module can be imported only once there is a project."""
    from tests.django_project import tasks  # noqa: PLC0415 - see above

    found: tasklib.TaskFunction[..., Any] = getattr(tasks, name)
    return found


def names(conn: Conn) -> list[str]:
    return [row[0] for row in conn.execute("select name from tasklib.tasks order by id")]


# --- transactions ---


@pytest.mark.usefixtures("project")
def test_a_submit_is_part_of_atomic(others: Conn) -> None:
    """Nobody else sees it before the commit, everybody after it; no connection is passed."""
    with transaction.atomic():
        function("ship").submit_sync(1)
        assert names(others) == []
    assert names(others) == ["ship"]


@pytest.mark.usefixtures("project")
def test_a_rollback_leaves_nothing(others: Conn) -> None:
    """By function, by name, and many at once: all of it is gone, with the order that was written beside it."""
    from tests.django_project.models import Order  # noqa: PLC0415 - importable only in a project

    def submit_all() -> None:
        Order.objects.create(note="a book")
        function("ship").submit_sync(1)
        function("ship").options(delay_seconds=60).submit_sync(2)
        tasklib.submit_task_sync("ship", 3)
        tasklib.submit_many_sync([function("ship").new(n) for n in range(3)])

    with contextlib.suppress(Undo), transaction.atomic():
        submit_all()
        assert count_in_transaction() == 6
        raise Undo
    assert names(others) == []
    with transaction.atomic():
        submit_all()
    assert len(names(others)) == 6
    assert Order.objects.count() == 1


def count_in_transaction() -> int:
    with connection.cursor() as cursor:
        cursor.execute("select count(*) from tasklib.tasks")
        return int(cursor.fetchone()[0])


@pytest.mark.usefixtures("project")
def test_a_savepoint_takes_back_its_own_part(others: Conn) -> None:
    """An inner atomic that fails undoes what was submitted in it, and no more."""
    with transaction.atomic():
        tasklib.submit_task_sync("outer")
        with contextlib.suppress(Undo), transaction.atomic():
            tasklib.submit_task_sync("inner")
            raise Undo
        tasklib.submit_task_sync("after")
    assert names(others) == ["outer", "after"]


@pytest.mark.usefixtures("project")
def test_outside_of_atomic_a_submit_commits_at_once(others: Conn) -> None:
    """As every statement of Django's does."""
    tasklib.submit_task_sync("alone")
    assert names(others) == ["alone"]


@pytest.mark.usefixtures("project")
async def test_async_submits_take_the_same_way(others: Conn) -> None:
    """Through the thread in which async code reaches the ORM: there, too, the open transaction counts."""
    await function("ship").submit(1)
    await tasklib.submit_many([function("ship").new(2), function("ship").new(3)])
    assert len(names(others)) == 3
    begin, undo = transaction.atomic(), Undo()
    await sync_to_async(begin.__enter__)()
    await function("ship").submit(4)
    await sync_to_async(begin.__exit__)(Undo, undo, None)
    await sync_to_async(connections.close_all)()
    assert len(names(others)) == 3


@pytest.mark.usefixtures("project")
def test_a_connection_that_is_named_is_the_one_that_is_used(others: Conn) -> None:
    """`connection=` goes before Django's."""
    with contextlib.suppress(Undo), transaction.atomic():
        function("ship").options(connection=others).submit_sync(1)
        raise Undo
    assert names(others) == ["ship"]


def test_tasks_submit_in_transactions_too(project: tasklib.Config, others: Conn) -> None:
    """In a worker's thread atomic() is what it is elsewhere: one task commits its child, one takes it back."""
    good = function("order_and_ship").submit_sync("a book")
    bad = function("order_and_ship").options(max_retries=0).submit_sync("a tree", fail=True)
    TaskWorker(project).run_until_empty_sync()
    rows = others.execute("select name, state, result->>'value', parent_id from tasklib.tasks order by id").fetchall()
    assert [row[:3] for row in rows] == [
        ("order_and_ship", "completed", None),
        ("order_and_ship", "failed", None),
        ("ship", "completed", "shipped a book"),
    ]
    assert rows[2][3] == good
    assert bad != good


# --- connections in workers ---


@pytest.mark.direct("ends the backend of Django's own connection")
@pytest.mark.parametrize("kind", ["", "_async"])
def test_a_connection_that_died_between_two_tasks_fails_none(
    project: tasklib.Config, others: Conn, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Persistent connections, and the server ends one: the next task has another, at its first attempt."""
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", None)
    pid, close = function(f"backend_pid{kind}"), function(f"close_connections{kind}")
    with tasklib.Client(project) as client, running(project):
        first = wait_final(client, pid.submit_sync()).result
        again = wait_final(client, pid.submit_sync()).result
        assert first == again is not None
        others.execute("select pg_terminate_backend(%s, 5000)", [again["value"]])
        task = wait_final(client, pid.submit_sync())
        wait_final(client, close.submit_sync())
    assert (task.state, task.attempt) == ("completed", 1)
    assert task.result != first


@pytest.mark.direct("counts backends, which a pooler keeps")
@pytest.mark.parametrize("kind", ["", "_async"])
def test_no_connection_outlives_its_task(project: tasklib.Config, others: Conn, kind: str) -> None:
    """By default (CONN_MAX_AGE=0) Django keeps none after a request, nor after a task."""
    with tasklib.Client(project) as client, running(project):
        task = wait_final(client, function(f"backend_pid{kind}").submit_sync())
        assert task.result is not None
        look, pid = "select count(*) from pg_stat_activity where pid = %s", task.result["value"]
        wait_until(lambda: others.execute(look, [pid]).fetchone() == (0,), "the connection to end")


class Around:
    """Notes what it is around; raises if it is told to."""

    def __init__(self, seen: list[str], *, fails: bool = False) -> None:
        self._seen = seen
        self._fails = fails

    def __enter__(self) -> None:
        self._seen.append("before")

    def __exit__(self, *_: object) -> None:
        self._seen.append("after")
        if self._fails:
            raise Undo

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()


def test_what_is_registered_is_around_each_task(
    config: tasklib.Config, client: tasklib.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sync and async functions; what is only a sync context manager leaves the async ones alone. No Django in here."""
    seen: list[str] = []
    monkeypatch.setattr(hooks, "_around", [])
    hooks.around_task(lambda: Around(seen))

    @hooks.around_task
    @contextlib.contextmanager
    def only_sync() -> Iterator[None]:
        seen.append("enter")
        yield
        seen.append("exit")

    @tasklib.task
    def plain() -> None:
        seen.append("plain")

    @tasklib.task
    async def coroutine() -> None:
        seen.append("coroutine")

    for task in (plain.new(), coroutine.new()):
        client.submit(task)
        TaskWorker(config).run_until_empty_sync()
    assert seen == ["before", "enter", "plain", "exit", "after", "before", "coroutine", "after"]


@pytest.mark.parametrize("name", ["plain", "coroutine"])
def test_what_fails_around_a_task_fails_the_task(
    config: tasklib.Config, client: tasklib.Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It is retried like any other failure."""
    monkeypatch.setattr(hooks, "_around", [lambda: Around([], fails=True)])

    @tasklib.task(max_retries=0)
    def plain() -> None: ...

    @tasklib.task(max_retries=0)
    async def coroutine() -> None: ...

    task_id = client.submit_task(name)
    TaskWorker(config).run_until_empty_sync()
    task = client.get_task(task_id)
    assert tasklib.is_failed(task)
    assert task.error_code == "Undo"


# --- settings ---


def parts(config: tasklib.Config) -> dict[str, Any]:
    return dict(psycopg.conninfo.conninfo_to_dict(config.database_url))


@pytest.mark.usefixtures("project")
def test_the_database_is_djangos() -> None:
    """Name, host, port, user, password and libpq's options; what only Django understands is left out."""
    from tasklib.django import config  # noqa: PLC0415 - importable only in a project

    given = {
        "NAME": "shop", "USER": "me", "PASSWORD": "p w'd", "HOST": "/run/postgresql", "PORT": 5433,
        "OPTIONS": {
            "sslmode": "disable", "pool": True, "server_side_binding": True, "isolation_level": 3,
            "options": "-c statement_timeout=5s", "assume_role": "the owner",
        },
    }  # fmt: skip
    with mock.patch.dict(connections["default"].settings_dict, given):
        found = parts(config())
    assert found == {
        "dbname": "shop", "user": "me", "password": "p w'd", "host": "/run/postgresql", "port": "5433",
        "sslmode": "disable", "client_encoding": "UTF8", "options": r"-c statement_timeout=5s -c role=the\ owner",
    }  # fmt: skip


@pytest.mark.usefixtures("project")
def test_a_service_file_can_name_the_database() -> None:
    """Django needs no NAME then, nor does tasklib."""
    from tasklib.django import config  # noqa: PLC0415 - importable only in a project

    given = {"NAME": "", "USER": "", "HOST": "", "PORT": "", "OPTIONS": {"service": "shop"}}
    with mock.patch.dict(connections["default"].settings_dict, given):
        assert parts(config()) == {"service": "shop", "client_encoding": "UTF8"}


@pytest.mark.direct("sets options, which PgBouncer refuses")
@pytest.mark.usefixtures("project")
def test_an_assumed_role_is_assumed(others: Conn) -> None:
    """Connections of tasklib's own act as the role that Django's act as."""
    from tasklib.django import config  # noqa: PLC0415 - importable only in a project

    others.execute('create role "the owner"')
    try:
        with mock.patch.dict(connections["default"].settings_dict, OPTIONS={"assume_role": "the owner"}):
            url = config().database_url
        with psycopg.connect(url) as conn:
            assert conn.execute("select current_user::text").fetchone() == ("the owner",)
    finally:
        others.execute('drop role "the owner"')


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"MAX_RETRYS": 1}, "has no MAX_RETRYS; there are: DATABASE, TASK_MODULES, MAX_RETRIES"),
        ({"max_retries": 1}, "has no max_retries"),
        ({"MAX_RETRIES": -1}, "Config.max_retries: must be a whole number from 0 to 1000000, got -1"),
        ({"SCHEMA": "Tasks"}, "'Tasks' cannot be the schema"),
        ({"DATABASE_URL": "postgresql:///"}, "has no DATABASE_URL"),
    ],
)
def test_a_wrong_setting_is_told(given: dict[str, Any], problem: str) -> None:
    """What it is, and what there is instead."""
    from tasklib.django import config  # noqa: PLC0415 - importable only in a project

    with override_settings(TASKLIB=given), pytest.raises(ImproperlyConfigured, match=problem):
        config()


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: a project can be set up only once in each."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


SET_UP = """
import django
from django.conf import settings
settings.configure(
    DATABASES={{"default": {{"ENGINE": "django.db.backends.{engine}", "NAME": "nowhere", "HOST": "/nowhere"}}}},
    INSTALLED_APPS=["tasklib.django"], TASKLIB={tasklib},
)
django.setup()
"""


def test_another_database_is_refused_at_the_start() -> None:
    """In words that say which, and what to do."""
    run = python(SET_UP.format(engine="sqlite3", tasklib={}))
    assert run.returncode == 1
    expected = "ImproperlyConfigured: tasklib needs PostgreSQL, and DATABASES['default'] is sqlite."
    assert expected in run.stderr


def test_the_start_opens_no_connection() -> None:
    """The database need not be there: the settings name a socket that does not exist."""
    run = python(SET_UP.format(engine="postgresql", tasklib={}) + "print('started')")
    assert (run.returncode, run.stdout, run.stderr) == (0, "started\n", "")


def test_the_schema_may_have_another_name(new_database: NewDatabase) -> None:
    """Submits, the models and the backend use it; it is made at the first use, in the middle of a transaction too."""
    program = """
        import django
        from tests.django_project import settings as given
        given.TASKLIB = {"SCHEMA": "queue_of_ours", "TASK_MODULES": ["tasks"]}
        django.setup()
        from django.db import transaction
        from tasklib.django.models import Task
        from tests.django_project import tasks
        with transaction.atomic():
            result = tasks.add.enqueue(1, b=2)
            tasks.ship.submit_sync(1)
            assert tasks.add.get_result(result.id).status == "READY"
        print([task.name for task in Task.objects.all()], Task._meta.db_table)
    """
    run = python(
        textwrap.dedent(program), DATABASE_URL=new_database(), DJANGO_SETTINGS_MODULE="tests.django_project.settings"
    )
    assert run.stdout == "['ship', 'tests.django_project.tasks.add'] \"queue_of_ours\".\"tasks\"\n", run.stderr
