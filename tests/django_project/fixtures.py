"""The project, set up once in the process: Django cannot be set up twice, nor taken down."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from unittest import mock

import django
import psycopg
import pytest
from django.core.management import call_command
from django.db import connections

import tasklib
from tasklib import TaskWorker
from tasklib.registry import default_registry
from tasklib.worker import hooks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasklib.task import TaskFunction
    from tests.support.raw_sql import Conn, NewDatabase


class Project:
    """What setting it up left behind, to be put in place for each test that wants it, and taken away again."""

    def __init__(self, url: str) -> None:
        self.url = url
        around = list(hooks._around)
        vars(connections).pop("settings", None)  # another test may have looked before there was a project
        names = {"DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.django_project.settings"}
        with mock.patch.dict(os.environ, names):
            django.setup()
        call_command("migrate", run_syncdb=True, verbosity=0)
        connections.close_all()
        self.functions: list[TaskFunction[..., object]] = list(default_registry)
        self.around = [hook for hook in hooks._around if hook not in around]
        hooks._around[:] = around


_projects: list[Project] = []  # at most one


@pytest.fixture(scope="session")
def set_up_project(new_database: NewDatabase) -> Project:
    """Each module that imports this fixture has one of its own; the project is the same."""
    if not _projects:
        _projects.append(Project(new_database()))
    return _projects[0]


@pytest.fixture
def project(set_up_project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[tasklib.Config]:
    """The project as a started process has it, with no tasks."""
    from tasklib.django import config, connection  # noqa: PLC0415 - importable only in a project
    from tests.django_project.models import Order  # noqa: PLC0415 - as above

    for function in set_up_project.functions:
        default_registry._functions[function.name] = function
    monkeypatch.setattr(hooks, "_around", set_up_project.around)
    connection.initialise()
    connection.ensure_schema()
    with psycopg.connect(set_up_project.url, autocommit=True) as conn:
        conn.execute("delete from tasklib.tasks; delete from tasklib.claims; delete from tasklib.workers")
    Order.objects.all().delete()
    yield config()
    connections.close_all()
    tasklib.close()


def run_tasks(config: tasklib.Config) -> None:
    """All that can run now, and their retries: those without a delay are due at once, give or take a millisecond."""
    due = "select count(*) from tasklib.tasks where due_at < now() + interval '1 minute'"
    with psycopg.connect(config.database_url, autocommit=True, prepare_threshold=None) as conn:
        TaskWorker(config).run_until_empty_sync()
        while conn.execute(due).fetchone() != (0,):
            TaskWorker(config).run_until_empty_sync()


@pytest.fixture
def others(set_up_project: Project) -> Iterator[Conn]:
    """What everybody else sees."""
    with psycopg.connect(set_up_project.url, autocommit=True, prepare_threshold=None) as conn:
        yield conn
