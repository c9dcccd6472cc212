"""The schema on a real database: made once by many, by anyone who may, and never half."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import pytest
from psycopg import sql

import tasklib
from tasklib import migrate
from tests.campaigns.migrators import kill_one, race, state_of
from tests.support.raw_sql import NewDatabase, literal
from tools.schema_snapshot import snapshot
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.postgres_versions


def test_first_use_makes_the_schema(new_database: NewDatabase) -> None:
    """Nothing but a URL is needed."""
    with tasklib.Client(tasklib.Config(new_database())) as client:
        assert client.submit_task("a").version == 7


async def test_first_use_makes_the_schema_async(new_database: NewDatabase) -> None:
    """Also over the async client, also for many at once."""
    async with tasklib.AsyncClient(tasklib.Config(new_database())) as client:
        assert await asyncio.gather(*(client.list_tasks() for _ in range(20))) == [[]] * 20


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_first_users_at_once_make_one_schema(
    new_database: NewDatabase, direct: Callable[[str], str], isolation: str
) -> None:
    """Each looks, finds nothing, waits for the lock, and must see what was made meanwhile, whatever its settings."""
    url = new_database()
    with psycopg.connect(direct(url), autocommit=True) as conn:
        conn.execute(literal(f"alter database {conn.info.dbname} set default_transaction_isolation = '{isolation}'"))
    together = threading.Barrier(8)

    def first_use(_: int) -> int:
        with tasklib.Client(tasklib.Config(url)) as client:
            together.wait(timeout=20)
            return client.submit_task("a").version or 0

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(first_use, range(8))) == [7] * 8


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_what_another_made_in_between_is_seen(
    new_database: NewDatabase, direct: Callable[[str], str], isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another migrator has the lock at the first try. At the second it commits when this transaction has begun already,
    and has not asked for the lock yet. A snapshot from before must not be asked.
    """
    url = new_database()
    with psycopg.connect(direct(url), autocommit=True) as conn:
        conn.execute(literal(f"alter database {conn.info.dbname} set default_transaction_isolation = '{isolation}'"))
    preparation = migrate._preparation
    other = psycopg.connect(direct(url))

    def first_try(schema: str) -> Iterator[LiteralString]:
        yield from preparation(schema)
        other.execute("select pg_advisory_xact_lock(hashtextextended('tasklib.migrate', 0))")
        monkeypatch.setattr(migrate, "_preparation", second_try)

    def second_try(schema: str) -> Iterator[LiteralString]:
        yield from preparation(schema)
        monkeypatch.undo()
        other.rollback()
        migrate.migrate(tasklib.Config(url))

    monkeypatch.setattr(migrate, "_preparation", first_try)
    with other, tasklib.Client(tasklib.Config(url)) as client:
        assert client.submit_task("a").version == 7


def described(url: str) -> str:
    with psycopg.connect(url) as conn:
        return migrate.describe(conn, "tasklib")


@pytest.mark.direct("waits until the migrators' backends have gone; a pooler keeps them")
def test_many_at_once_make_one_schema(new_database: NewDatabase, database_url: str) -> None:
    """The first one in makes it; the others wait for the lock and find it made. (Twenty by `dev.py migrators`.)"""
    url = new_database()
    assert race(url, 6) == [0] * 6
    assert state_of(url) == (described(database_url), 0)


def test_a_migrator_waits_for_another(
    new_database: NewDatabase, direct: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time. The lock is tried before anything is looked at, and nothing stays open between two tries."""
    url = new_database()
    tries = []
    apply_once = migrate._apply_once

    def noted(conn: psycopg.Connection, schema: str, phase: migrate.Phase | None) -> migrate.Difference | None:
        tries.append(apply_once(conn, schema, phase))
        return tries[-1]

    monkeypatch.setattr(migrate, "_apply_once", noted)
    with psycopg.connect(direct(url)) as other:
        other.execute("select pg_advisory_xact_lock(hashtextextended('tasklib.migrate', 0))")
        migrator = threading.Thread(target=lambda: migrate.migrate(tasklib.Config(url)))
        migrator.start()
        wait_until(lambda: len(tries) > 1 or not migrator.is_alive(), "two tries")
        assert tries == [None] * len(tries)
        other.rollback()
        migrator.join(30)
    assert str(tries[-1]) == EVERYTHING
    assert str(migrate.migrate(tasklib.Config(url))) == "nothing"


@pytest.mark.slow
@pytest.mark.direct("waits until the migrator's backend has gone; a pooler keeps it")
def test_a_killed_migrator_leaves_all_or_nothing(new_database: NewDatabase, database_url: str) -> None:
    """A kill -9 spread over the time that a migration takes; no lock is stranded, and the next run completes it.

    The long campaign is `python3 dev.py migrators`.
    """
    wanted = described(database_url)
    for step in range(10):
        url = new_database()
        kill_one(url, after_seconds=step * 0.01)
        schema, locks = state_of(url)
        assert schema in ("\n", wanted)
        assert locks == 0
        migrate.migrate(tasklib.Config(url))
        assert state_of(url)[0] == wanted


def test_an_older_schema_is_refused_with_the_command_to_run(new_database: NewDatabase) -> None:
    """Unless auto_migrate is set."""
    url = new_database()
    make_outdated(url)
    with tasklib.Client(tasklib.Config(url)) as client, pytest.raises(tasklib.SchemaOutdated, match="tasklib migrate"):
        client.submit_task("a")
    with tasklib.Client(tasklib.Config(url, auto_migrate=True)) as client:
        assert client.submit_task("a").version == 7


def test_a_newer_incompatible_schema_is_refused(new_database: NewDatabase) -> None:
    """By first use and by migrate alike; and what the newer one made is not touched."""
    url = new_database()
    migrate.migrate(tasklib.Config(url))
    record(url, 9999, "next", "post")
    before = snapshot(url)
    with tasklib.Client(tasklib.Config(url)) as client, pytest.raises(tasklib.SchemaTooNew, match="Upgrade"):
        client.list_tasks()
    with pytest.raises(tasklib.SchemaTooNew):
        migrate.migrate(tasklib.Config(url))
    assert snapshot(url) == before


def test_a_newer_compatible_schema_is_used_and_left_alone(new_database: NewDatabase) -> None:
    """During a rollout old workers run on the schema of the new ones."""
    url = new_database()
    make_outdated(url)
    record(url, 9999, "next", "pre")
    with tasklib.Client(tasklib.Config(url, auto_migrate=True)) as client:
        client.submit_task("a")
    with psycopg.connect(url) as conn:
        found = conn.execute("select revision from tasklib.schema_migrations where version = 0").fetchone()
    assert found == (migrate.FUNCTIONS_REVISION - 1,)


def test_without_the_right_to_create_the_error_names_command_and_role(new_database: NewDatabase) -> None:
    """The usual state of affairs at work: the application's role owns nothing."""
    url = new_database()
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("drop role if exists plain_app")
        conn.execute("create role plain_app login password 'x'")
    as_app = psycopg.conninfo.make_conninfo(url, user="plain_app", password="x")
    with tasklib.Client(tasklib.Config(as_app)) as client, pytest.raises(tasklib.SchemaMissing) as refused:
        client.submit_task("a")
    assert "plain_app" in str(refused.value)
    assert "tasklib migrate" in str(refused.value)
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(sql.SQL("drop role plain_app"))


def test_a_role_that_may_only_submit_submits(new_database: NewDatabase) -> None:
    """Usage of the schema and execute on two functions: no right on any table, and no look at the schema's version."""
    url = new_database()
    migrate.migrate(tasklib.Config(url))
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("drop role if exists submitter")
        conn.execute("create role submitter login password 'x'")
        conn.execute("grant usage on schema tasklib to submitter")
    as_submitter = tasklib.Config(psycopg.conninfo.make_conninfo(url, user="submitter", password="x"))
    with tasklib.Client(as_submitter) as client:
        with pytest.raises(tasklib.DatabaseError, match="may not do this"):
            client.submit_task("a")
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute("grant execute on all functions in schema tasklib to submitter")
        task = tasklib.task(name="by_submitter")(lambda: None)
        first = client.submit(task.options(idempotency_key="k").new())
        assert client.submit_many([task.options(idempotency_key="k").new(), task.new()])[0] == first
        with pytest.raises(tasklib.DatabaseError, match="may not do this"):
            client.list_tasks()
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("drop owned by submitter")
        conn.execute("drop role submitter")


def test_first_use_has_a_deadline(new_database: NewDatabase) -> None:
    """Somebody who locks the list of migrations makes a call fail in time, not hang."""
    url = new_database()
    migrate.migrate(tasklib.Config(url))
    with psycopg.connect(url) as holder, tasklib.Client(tasklib.Config(url, database_timeout_seconds=0.5)) as client:
        holder.execute("lock table tasklib.schema_migrations")
        with pytest.raises(tasklib.DatabaseUnavailable):
            client.submit_task("a")


def test_the_printed_sql_makes_the_same_schema(new_database: NewDatabase, database_url: str) -> None:
    """What `--sql` prints is what `migrate` runs."""
    url = new_database()
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(literal(migrate.script(tasklib.Config(""))))
    assert snapshot(url) == snapshot(database_url)
    assert str(migrate.check(tasklib.Config(url))) == "nothing"


def test_another_schema_name_everywhere(new_database: NewDatabase, database_url: str) -> None:
    """Put in once, at load: the description differs in the name alone, and nothing lands elsewhere."""
    url = new_database()
    migrate.migrate(tasklib.Config(url, schema="jobs"))
    with psycopg.connect(url) as conn, psycopg.connect(database_url) as other:
        described = migrate.describe(conn, "jobs").replace('"jobs".', "tasklib.").replace("jobs.", "tasklib.")
        expected = migrate.describe(other, "tasklib")
        assert conn.execute("select to_regnamespace('tasklib')").fetchone() == (None,)
    assert without_bodies(described) == without_bodies(expected)


def test_a_busy_lock_is_waited_for_and_then_named(new_database: NewDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """A migrator that hangs must not make every start hang with it."""
    monkeypatch.setattr(migrate, "LOCK_WAIT_SECONDS", 0.05)
    url = new_database()
    with psycopg.connect(url) as holder:
        holder.execute("select pg_advisory_xact_lock(hashtextextended('tasklib.migrate', 0))")
        with pytest.raises(tasklib.SchemaBusy, match="another migration"):
            migrate.migrate(tasklib.Config(url))


def test_what_read_and_wrote_attempts_as_a_table_goes_on(
    new_database: NewDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They became a view. A role that could read them still can, and a worker of the version before still inserts."""
    config = tasklib.Config(new_database())
    known = migrate.known_migrations()
    monkeypatch.setattr(migrate, "known_migrations", lambda: known[:4])
    monkeypatch.setattr(migrate, "folder", lambda _: [])
    migrate.migrate(config)
    with psycopg.connect(config.database_url, autocommit=True) as conn:
        conn.execute("create role analyst")
        conn.execute("grant usage on schema tasklib to analyst")
        conn.execute("grant select on tasklib.task_attempts to analyst")
        conn.execute(ATTEMPT, [1])
        monkeypatch.undo()
        migrate.migrate(config)
        conn.execute(ATTEMPT, [2])
        conn.execute("set role analyst")
        assert conn.execute("select attempt from tasklib.task_attempts order by 1").fetchall() == [(1,), (2,)]
        conn.execute("reset role")
        conn.execute("drop owned by analyst")
        conn.execute("drop role analyst")


ATTEMPT = """
with given (attempt) as (values (%s::integer)), kept as (
    insert into tasklib.task_attempts (task_id, fencing_token, started_at, finished_at, attempt, worker_pid, will_retry,
                                       outcome, worker_id)
    select '00000000-0000-7000-8000-000000000000', attempt, now(), now(), attempt, 1, true, 'FAILED', 'w' from given)
select"""
EVERYTHING = ", ".join(
    [f"{each.version:04}_{each.name} ({each.kind})" for each in migrate.known_migrations()] + ["functions"]
)


def test_pre_leaves_what_takes_away(new_database: NewDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--pre` before the rollout, the rest after it."""
    tidy = migrate.Migration(99, "tidy", "post", "drop index tasklib.tasks_unsuccessful")
    known = [*migrate.known_migrations(), tidy]
    monkeypatch.setattr(migrate, "known_migrations", lambda: known)
    config = tasklib.Config(new_database())
    assert str(migrate.migrate(config, phase="pre")) == EVERYTHING
    assert str(migrate.migrate(config)) == "0099_tidy (post)"
    assert str(migrate.migrate(config)) == "nothing"


@pytest.mark.parametrize("words", [["-m", "tasklib.migrate"], ["-m", "tasklib.migrate", "--pre"]])
def test_the_module_needs_no_extra(new_database: NewDatabase, words: list[str]) -> None:
    """`python -m tasklib.migrate`: check says no, migrate makes, check says yes, --sql has nothing to do."""
    url = new_database()

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", *words, *more]
        environment = {"DATABASE_URL": url, "PATH": ""}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert run("--check").returncode == 1
    made = run()
    assert (made.returncode, made.stderr) == (0, "")
    assert f"applied: {EVERYTHING}" in made.stdout
    assert run("--check").returncode == 0
    assert "create table" not in run("--sql").stdout


def test_sql_without_a_database_is_for_an_empty_one() -> None:
    """For who has to hand a script to somebody else."""
    command = [sys.executable, "-m", "tasklib.migrate"]
    printed = subprocess.run([*command, "--sql"], env={"PATH": ""}, capture_output=True, text=True, check=True)
    assert "create table tasklib.tasks" in printed.stdout
    refused = subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "DATABASE_URL" in refused.stderr
    assert "Traceback" not in refused.stderr


def make_outdated(url: str) -> None:
    migrate.migrate(tasklib.Config(url))
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("update tasklib.schema_migrations set revision = revision - 1 where version = 0")


def record(url: str, version: int, name: str, phase: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        insert = "insert into tasklib.schema_migrations (version, name, phase, checksum) values (%s, %s, %s, '')"
        conn.execute(insert, [version, name, phase])


def without_bodies(described: str) -> list[Any]:
    """Function bodies are told by a digest, which the schema's name changes."""
    return sorted(line.rsplit(" ", 1)[0] if line.startswith("function") else line for line in described.splitlines())
