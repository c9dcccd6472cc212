"""An application may change how psycopg writes and reads values in all of its process; the library does not notice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest
from psycopg.adapt import Buffer, Dumper, Loader
from psycopg.pq import Format

import tasklib
from tasklib import doctor, migrate
from tasklib.connection import own_adapters
from tests.support.working import running

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK = "read by the application"
CHANGED = (
    *("bool", "int2", "int4", "int8", "float8", "numeric", "text", "name", "varchar", "uuid", "json", "jsonb"),
    *("timestamptz", "interval", "bytea", "oid"),
)


class TextLoader(Loader):
    def load(self, data: Buffer) -> str:  # noqa: ARG002 - whatever it is
        return MARK


class BinaryLoader(TextLoader):
    format = Format.BINARY


class Broken(Dumper):
    def dump(self, obj: Any) -> bytes:
        raise AssertionError(f"{type(obj).__name__} written by the application")


@pytest.fixture
def changed_adapters(config: tasklib.Config) -> Iterator[None]:
    """As by `psycopg.adapters.register_loader` at the import of the application."""
    known, ours = psycopg.adapters, vars(psycopg.adapters).copy()
    vars(known).update(vars(psycopg.adapt.AdaptersMap(known)))  # what is registered below is not shared with others
    for name in CHANGED:
        known.register_loader(name, TextLoader)
        known.register_loader(name, BinaryLoader)
    for written in (UUID, list, str, dict):
        known.register_dumper(written, Broken)
    yield
    vars(known).update(ours)


@pytest.fixture
def app(config: tasklib.Config, changed_adapters: None) -> Iterator[None]:
    tasklib.init(config)
    yield
    tasklib.close()


def one(conn: psycopg.Connection[Any]) -> Any:
    row = conn.execute("select 1").fetchone()
    return None if row is None else row[0]


async def test_clients_workers_and_who_waits(app: None, config: tasklib.Config) -> None:
    """Submits, single and in bulk, sync and async; claims, finishes, notifications; lists."""

    @tasklib.task
    def double(number: int) -> int:
        return 2 * number

    with running(config, concurrency=2):
        handles = [double.submit_handle_sync(1), await double.submit_handle(2)]
        ids = tasklib.submit_many_sync([double.new(3)])
        assert [await handle.result(20) for handle in handles] == [2, 4]
        assert [task.result for task in tasklib.wait_for_sync(ids, 20)] == [{"value": 6}]
    assert {task.kwargs["number"] for task in tasklib.list_tasks()} == {1, 2, 3}


@pytest.mark.parametrize("is_async", [False, True])
def test_the_connection_of_a_task_is_the_applications(app: None, config: tasklib.Config, is_async: bool) -> None:
    """What a task reads through it is read as the application wants; its completion is ours."""

    @tasklib.task
    def reads() -> Any:
        return one(tasklib.current_task().connection)

    @tasklib.task(name="reads_async")
    async def reads_async() -> Any:
        conn = await tasklib.current_task().async_connection()
        row = await (await conn.execute("select 1")).fetchone()
        return None if row is None else row[0]

    function = reads_async if is_async else reads
    handle = function.submit_handle_sync()
    with running(config):
        assert handle.result_sync(20) == MARK


async def test_a_connection_that_is_lent(app: None, config: tasklib.Config, database_url: str) -> None:
    """It keeps its adapters; what we send and read does not go by them."""

    @tasklib.task
    def lent(name: str) -> None: ...

    with psycopg.connect(database_url) as conn:
        ids = [lent.options(connection=conn).submit_sync("a")]
        assert one(conn) == MARK
    async with await psycopg.AsyncConnection.connect(database_url) as async_conn:
        ids.append(await lent.options(connection=async_conn).submit("b"))
    assert [task.id for task in reversed(tasklib.list_tasks())] == ids


def test_migrations_and_the_doctor(changed_adapters: None, config: tasklib.Config) -> None:
    """They read answers of all kinds."""
    migrate.migrate(config)
    findings = doctor.run_checks(config)
    assert findings
    assert not [each for each in findings if MARK in repr(each)]


def test_our_adapters_read_all_that_psycopg_reads() -> None:
    """Arrays are registered apart from the other types. A list of ids that came as text looked like a list with ids."""
    for wanted in (Format.TEXT, Format.BINARY):
        kept = own_adapters()
        missing = [
            each.name
            for each in psycopg.adapters.types
            for oid in (each.oid, each.array_oid)
            if psycopg.adapters.get_loader(oid, wanted) and not kept.get_loader(oid, wanted)
        ]
        assert missing == []
