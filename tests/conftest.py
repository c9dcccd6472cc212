"""Fixtures: one real PostgreSQL per run, one migrated database in it, emptied before each test that asks for it."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

import tasklib
from tasklib import migrate
from tasklib.embedded import ExternalPostgres
from tasklib.registry import default_registry
from tasklib.sql import queries
from tests.support.pooler import pgbouncer
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tasklib.embedded import EmbeddedPostgres
    from tests.support.pooler import Pooler
    from tests.support.raw_sql import Conn, NewDatabase


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Through a pooler, what is about direct connections is left out."""
    if os.environ.get("TASKLIB_TEST_POOLER"):
        left_out = [item for item in items if item.get_closest_marker("direct")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


# A shell starts what runs in its background with SIGINT ignored, and children inherit that: those of the tests that
# wait for a SIGINT would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests of outages hold hundreds of connections, and both ends of each: a plain user's usual limit is 1,024 descriptors.
_most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
_files = 65_536 if _most_files == resource.RLIM_INFINITY else min(_most_files, 65_536)
resource.setrlimit(resource.RLIMIT_NOFILE, (_files, _most_files))


@pytest.fixture(scope="session")
def suite_pooler(tasklib_postgres: EmbeddedPostgres) -> Iterator[Pooler | None]:
    """With TASKLIB_TEST_POOLER, the databases of the tests are reached by way of a PgBouncer in transaction mode."""
    if not os.environ.get("TASKLIB_TEST_POOLER"):
        yield None
        return
    # Every test has a database of its own: the server would soon be full of connections that nobody needs any more.
    with pgbouncer(tasklib_postgres.dsn, more="server_idle_timeout = 3") as pooler:
        yield pooler


@pytest.fixture(scope="session")
def direct(suite_pooler: Pooler | None) -> Callable[[str], str]:
    """For connections of a test's own that need a session: the way to a database that goes by no pooler."""
    return suite_pooler.direct if suite_pooler else str


@pytest.fixture(scope="session")
def new_database(
    tasklib_postgres: EmbeddedPostgres | ExternalPostgres, suite_pooler: Pooler | None
) -> Iterator[NewDatabase]:
    """Makes an empty database and returns its URL."""
    made: list[str] = []
    with psycopg.connect(tasklib_postgres.dsn, autocommit=True) as conn:

        def make() -> str:
            made.append(f"test_{os.getpid()}_{len(made)}")
            conn.execute(sql.SQL("create database {}").format(sql.Identifier(made[-1])))
            url = tasklib_postgres.dsn_for(made[-1])
            return suite_pooler.pooled(url) if suite_pooler else url

        yield make
        # Our own server goes with its databases. To drop one takes a checkpoint, which is a second on a busy disk.
        if isinstance(tasklib_postgres, ExternalPostgres):
            for name in made:
                conn.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def migrated_url(new_database: NewDatabase) -> str:
    url = new_database()
    migrate.migrate(tasklib.Config(url))
    return url


@pytest.fixture
def database_url(migrated_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A migrated database with no tasks in it. A test that leaves a connection open in it fails, not the one after."""
    with psycopg.connect(migrated_url, autocommit=True) as conn:
        conn.execute(queries("testing", "tasklib")["empty"])
    yield migrated_url
    if not os.environ.get("TASKLIB_TEST_POOLER") and "pooler" not in request.fixturenames:
        with psycopg.connect(migrated_url, autocommit=True) as conn:
            _all_are_closed(conn)


def _all_are_closed(conn: Conn) -> None:
    try:
        wait_until(lambda: conn.execute(_OPEN).fetchone() is None, "the test's connections to be closed")
    finally:
        conn.execute(f"select pg_terminate_backend(pid) from ({_OPEN}) as still_open")


_OPEN = """
select pid from pg_stat_activity
 where datname = current_database() and application_name like 'tasklib%' and pid <> pg_backend_pid()
"""


@pytest.fixture
def config(database_url: str) -> tasklib.Config:
    return tasklib.Config(database_url)


@pytest.fixture
def client(config: tasklib.Config) -> Iterator[tasklib.Client]:
    with tasklib.Client(config) as made:
        yield made


@pytest.fixture
async def async_client(config: tasklib.Config) -> AsyncIterator[tasklib.AsyncClient]:
    async with tasklib.AsyncClient(config) as made:
        yield made


@pytest.fixture
def conn(database_url: str, direct: Callable[[str], str]) -> Iterator[Conn]:
    with psycopg.connect(direct(database_url), autocommit=True) as made:
        yield made


@pytest.fixture
def app(config: tasklib.Config) -> Iterator[None]:
    """`tasklib.init` has been called."""
    tasklib.init(config)
    yield
    tasklib.close()


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user may enter: pytest's own are private, and a server started by root is not root's."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


def pytest_collection_finish() -> None:
    """Every worker of every test would start a fork server for it."""
    isolated = [each.name for each in default_registry if each.task_options.isolation == "process"]
    assert not isolated, f"these are registered by an import of the tests: {isolated}. Import them in a fixture."


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    """Task functions that a test defines are forgotten after it."""
    before = dict(default_registry._functions)
    yield
    default_registry._functions = before


@pytest.fixture(scope="session")
def jsonb(tasklib_postgres: EmbeddedPostgres) -> Iterator[Callable[[str], str]]:
    """JSON text to the text that PostgreSQL gives back for it."""
    with psycopg.connect(tasklib_postgres.dsn, autocommit=True) as conn:

        def there_and_back(text: str) -> str:
            row = conn.execute("select %s::jsonb::text", [text]).fetchone()
            assert row is not None
            return str(row[0])

        yield there_and_back
