"""A migration of tables that are in use: it waits for nobody for long, so that nobody waits for long behind it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, LiteralString

import psycopg
import pytest

import tasklib
from tasklib import migrate
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.raw_sql import Conn, NewDatabase

pytestmark = [
    pytest.mark.postgres_versions,
    pytest.mark.direct("looks at the locks of its own sessions"),
]

CHANGE = migrate.Migration(90, "change", "pre", "alter table tasklib.tasks add column changed boolean")


@pytest.fixture
def config(new_database: NewDatabase) -> tasklib.Config:
    made = tasklib.Config(new_database())
    migrate.migrate(made)
    return made


@pytest.fixture
def change(config: tasklib.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration that came after the schema was made, and needs the table of tasks for itself."""
    known = [*migrate.known_migrations(), CHANGE]
    monkeypatch.setattr(migrate, "known_migrations", lambda: known)


@pytest.fixture
def reader(config: tasklib.Config) -> Iterator[psycopg.Connection]:
    """A report that has read tasks, and goes on: until it ends nobody has the table for himself."""
    with psycopg.connect(config.database_url, application_name="report") as made:
        made.execute("select count(*) from tasklib.tasks")
        yield made


@pytest.fixture
def conn(config: tasklib.Config) -> Iterator[Conn]:
    with psycopg.connect(config.database_url, autocommit=True) as made:
        yield made


def test_the_waits_of_others_are_less_than_a_second() -> None:
    """A migration may wait for tasks and for workers, one after the other; its statements take some 0.1 s. It gives up
    before the server looks for deadlocks, and ends one of the two that wait.
    """
    assert 2 * migrate.TABLE_WAIT_SECONDS + 0.3 < 1
    assert migrate.TABLE_WAIT_SECONDS < 1


@pytest.mark.usefixtures("change")
def test_others_go_on_while_a_migration_waits(
    config: tasklib.Config, conn: Conn, reader: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lets everybody pass between two tries, and is applied when the long transaction has ended."""
    tries: list[int] = []
    apply_once = migrate._apply_once

    def noted(conn: psycopg.Connection, schema: str, phase: migrate.Phase | None) -> migrate.Difference | None:
        tries.append(conn.info.backend_pid)
        return apply_once(conn, schema, phase)

    monkeypatch.setattr(migrate, "_apply_once", noted)
    migrator = threading.Thread(target=migrate.migrate, args=[config])
    migrator.start()
    for number in (1, 2):
        wait_until(lambda number=number: len(tries) >= number, "a try")  # type: ignore[misc]
        conn.execute("select tasklib.submit('a', '{}')")  # waits behind the try that runs, and not for the report
    assert migrator.is_alive()
    reader.rollback()
    migrator.join(30)
    assert not migrate.check(config).is_incomplete


@pytest.mark.usefixtures("change")
def test_who_holds_the_table_is_named(
    config: tasklib.Config, reader: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process, its age and its query, so that somebody can decide about it. Nothing was changed."""
    monkeypatch.setattr(migrate, "LOCK_WAIT_SECONDS", 0.0)
    with pytest.raises(tasklib.SchemaBusy) as refused:
        migrate.migrate(config)
    assert f"pid {reader.info.backend_pid} (postgres, report, idle in transaction; its transaction is" in str(
        refused.value
    )
    assert "its query began at 20" in str(refused.value)
    assert "it holds tasks" in str(refused.value)
    assert str(migrate.check(config)) == "0090_change (pre)"


@pytest.mark.usefixtures("change")
def test_a_frozen_migrator_keeps_no_lock(config: tasklib.Config, conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands still in its transaction, as one that was stopped or cut off. The server ends the transaction."""
    monkeypatch.setattr(migrate, "FROZEN_SECONDS", 0.05)
    joined = migrate._joined
    sleeping = "select from pg_stat_activity where state = 'idle in transaction' and datname = current_database()"

    def frozen(parts: Sequence[LiteralString]) -> LiteralString:
        wait_until(lambda: conn.execute(sleeping).fetchone() is None, "the end of the transaction")
        return joined(parts)

    monkeypatch.setattr(migrate, "_joined", frozen)
    with pytest.raises(tasklib.DatabaseUnavailable):
        migrate.migrate(config)
    assert str(migrate.check(config)) == "0090_change (pre)"


def test_functions_alone_wait_for_nobody(config: tasklib.Config, conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triggers and views that are as they should be are not made again: a trigger would wait for every transaction that
    has written to its table, and everybody who writes would wait behind it.
    """
    monkeypatch.setattr(migrate, "LOCK_WAIT_SECONDS", 0.0)
    make_stale(conn)
    with psycopg.connect(config.database_url) as writer:
        writer.execute("select tasklib.submit('a', '{}')")
        writer.execute("select from tasklib.queue_limits")
        writer.execute("delete from tasklib.workers")
        assert str(migrate.migrate(config)) == "functions"


def test_the_same_in_another_schema(new_database: NewDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is in the descriptions of triggers and views."""
    monkeypatch.setattr(migrate, "LOCK_WAIT_SECONDS", 0.0)
    config = tasklib.Config(new_database(), schema="user")
    migrate.migrate(config)
    with psycopg.connect(config.database_url) as writer:
        writer.execute('update "user".schema_migrations set revision = 1 where version = 0')
        writer.commit()
        writer.execute("""select "user".submit('a', '{}')""")
        assert str(migrate.migrate(config)) == "functions"


def test_a_trigger_that_differs_is_made_again(config: tasklib.Config, conn: Conn) -> None:
    """One that is missing, and one that was changed."""
    before = migrate.describe(conn, "tasklib")
    conn.execute("drop trigger ring_on_insert on tasklib.tasks")
    conn.execute("drop view tasklib.queue_limits cascade")
    conn.execute(
        """create or replace trigger refuse_old_worker before insert or update on tasklib.workers
           for each row execute function tasklib.refuse_old_worker()"""
    )
    make_stale(conn)
    migrate.migrate(config)
    assert migrate.describe(conn, "tasklib") == before


def make_stale(conn: Conn) -> None:
    conn.execute("update tasklib.schema_migrations set revision = revision - 1 where version = 0")
