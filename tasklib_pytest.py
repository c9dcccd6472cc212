"""The pytest plugin: a real PostgreSQL, a database in it, and the queue of a test as fixtures. docs/testing.md.

pytest imports this module in every run of an environment that has tasklib, even if no test uses it. So it is outside
of the package, whose import takes some tenths of a second, and imports only pytest until a fixture is asked for.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasklib import Config
    from tasklib.embedded import EmbeddedPostgres, ExternalPostgres
    from tasklib.testing import Queue


@pytest.fixture(scope="session")
def tasklib_postgres() -> Iterator[EmbeddedPostgres | ExternalPostgres]:
    """A temporary server for the whole run, unless TASKLIB_TEST_DSN names another."""
    from tasklib import embedded  # noqa: PLC0415 - see above; so are the others

    if dsn := os.environ.get("TASKLIB_TEST_DSN"):
        yield embedded.ExternalPostgres(dsn)
        return
    with embedded.postgres() as server:
        yield server


@pytest.fixture(scope="session")
def tasklib_config(tasklib_postgres: EmbeddedPostgres | ExternalPostgres) -> Iterator[Config]:
    """A new database with tasklib's schema, for the whole run; each process of pytest-xdist has its own. Override this
    fixture to use the test database that your application has already: its queue is emptied before each test.
    """
    from tasklib import testing  # noqa: PLC0415

    with testing.new_database(tasklib_postgres) as config:
        yield config


@pytest.fixture(scope="session")
def _tasklib_session_queue(tasklib_config: Config) -> Iterator[Queue]:
    from tasklib import testing  # noqa: PLC0415

    queue = testing.Queue(tasklib_config)
    yield queue
    queue.close()


@pytest.fixture
def tasklib_database(_tasklib_session_queue: Queue) -> Config:
    """The database of `tasklib_config`, with no tasks in it."""
    _tasklib_session_queue.empty()
    return _tasklib_session_queue.config


@pytest.fixture
def tasklib_queue(_tasklib_session_queue: Queue) -> Iterator[Queue]:
    """The empty queue of this test, ready for submits: `tasklib.init` has been called."""
    with _tasklib_session_queue as queue:
        yield queue
