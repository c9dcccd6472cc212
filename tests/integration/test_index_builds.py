"""Indexes on a table that is in use: built by one migrator while everybody works, and never half."""

from __future__ import annotations

import subprocess
import threading
from typing import TYPE_CHECKING

import psycopg
import pytest

import tasklib
from tasklib import embedded, index_builds, migrate
from tasklib.doctor import CHECKS, Severity, run_checks
from tests.campaigns.migrators import finish, race, send_off, start_racer, state_of
from tests.support.pooler import PROGRAM, WHY_NOT, pgbouncer
from tools.waiting import wait_until

if TYPE_CHECKING:
    from tasklib.embedded import EmbeddedPostgres
    from tests.support.raw_sql import Conn, NewDatabase

pytestmark = [
    pytest.mark.postgres_versions,
    pytest.mark.direct("an index is built over a direct connection"),
]

SQL = """-- Two, so that one may be there already.
create index concurrently tasks_by_one on tasklib.tasks (name, id);
create index concurrently tasks_by_two on tasklib.tasks (priority, id) where priority > 0;
"""
INDEXES = migrate.Migration(90, "indexes", "index", SQL)
WAITING = "0090_indexes (index: tasks_by_one; tasks_by_two)"
STATES = (
    "select relname, indisvalid from pg_index, pg_class where oid = indexrelid and relname ~ 'tasks_by_' order by 1"
)
BUILT = [("tasks_by_one", True), ("tasks_by_two", True)]
TRIED = """
select from pg_stat_activity
 where datname = current_database() and query ~ 'advisory_lock' and pid not in (%s, pg_backend_pid())
"""
BUILDING = "select pid, phase from pg_stat_progress_create_index where datname = current_database()"


@pytest.fixture
def config(new_database: NewDatabase, monkeypatch: pytest.MonkeyPatch) -> tasklib.Config:
    """A schema in use, and a library that knows indexes which it has not."""
    made = tasklib.Config(new_database())
    migrate.migrate(made)
    known = [*migrate.known_migrations(), INDEXES]
    monkeypatch.setattr(migrate, "known_migrations", lambda: known)
    return made


@pytest.fixture
def conn(config: tasklib.Config) -> Conn:  # type: ignore[misc]
    with psycopg.connect(config.database_url, autocommit=True) as made:
        yield made


class Migrator(threading.Thread):
    """Runs `migrate` and keeps its error."""

    def __init__(self, config: tasklib.Config) -> None:
        super().__init__(daemon=True)
        self._config = config
        self.said: list[str] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            migrate.migrate(self._config, say=self.said.append)
        except tasklib.TasklibError as error:
            self.error = error

    def end(self) -> None:
        self.join(60)
        assert not self.is_alive(), "the migrator did not end"


def open_write(config: tasklib.Config) -> psycopg.Connection:
    """A transaction that a concurrent build has to wait for."""
    made = psycopg.connect(config.database_url)
    made.execute("insert into tasklib.tasks (name) values ('held')")
    return made


def wait_until_it_waits(conn: Conn) -> int:
    """The server process that builds an index, and waits for older transactions."""

    def waiting() -> list[tuple[int, str]]:
        return [row for row in conn.execute(BUILDING).fetchall() if row[1].startswith("waiting")]

    wait_until(lambda: bool(waiting()), "a build that waits")
    return waiting()[0][0]


def test_missing_indexes_are_built_and_recorded(config: tasklib.Config, conn: Conn) -> None:
    """`migrate` tells them, `check` misses them before and nothing after."""
    assert str(migrate.check(config)) == WAITING
    assert str(migrate.migrate(config)) == WAITING
    assert conn.execute(STATES).fetchall() == BUILT
    row = conn.execute("select name, phase from tasklib.schema_migrations where version = 90").fetchone()
    assert row == ("indexes", "pre")
    assert str(migrate.migrate(config)) == "nothing"


def test_a_new_schema_has_its_indexes_at_once(
    new_database: NewDatabase, config: tasklib.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its one transaction: first use needs no second step."""
    monkeypatch.setattr(index_builds, "run", None)
    fresh = tasklib.Config(new_database())
    with tasklib.Client(fresh) as client:
        client.submit_task("a")
    assert str(migrate.check(fresh)) == "nothing"


def test_first_use_does_not_wait_for_an_index(config: tasklib.Config) -> None:
    """A schema without one is used as it is: what needs the index is not switched on yet."""
    for each in (config, tasklib.Config(config.database_url, auto_migrate=True)):
        with tasklib.Client(each) as client:
            client.submit_task("a")
    assert str(migrate.check(config)) == WAITING


def test_a_long_transaction_holds_up_the_build_and_nobody_else(config: tasklib.Config, conn: Conn) -> None:
    """Submits, updates and reads go on, with no time to wait."""
    with open_write(config) as held:
        migrator = Migrator(config)
        wait_until_it_waits(conn)
        conn.execute("set lock_timeout = '1ms'")
        conn.execute("select tasklib.submit('a', '{}')")
        conn.execute("update tasklib.tasks set priority = 3 where name = 'a'")
        assert conn.execute("select count(*) from tasklib.tasks").fetchone() == (1,)
        assert migrator.is_alive()
        held.commit()
        migrator.end()
    assert migrator.error is None
    assert conn.execute(STATES).fetchall() == BUILT


def test_a_long_build_tells_how_far_it_is(config: tasklib.Config, conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for whom it waits."""
    monkeypatch.setattr(index_builds, "REPORT_SECONDS", 0.01)
    with open_write(config) as held:
        holder = held.info.backend_pid
        migrator = Migrator(config)
        wait_until(lambda: any("waits for" in line for line in migrator.said), "a report")
        held.commit()
        migrator.end()
    told = next(line for line in migrator.said if "waits for" in line)
    assert "waiting for" in told
    assert f"pid {holder} (since 20" in told


def test_the_command_tells_it_on_stderr(config: tasklib.Config, capsys: pytest.CaptureFixture[str]) -> None:
    """The standard output has the result alone."""
    migrate._say("index x: half of it")
    assert capsys.readouterr() == ("", "tasklib: index x: half of it\n")


def test_migrators_at_once_build_each_index_once(config: tasklib.Config, conn: Conn) -> None:
    """Six start together. Five wait for their turn with no transaction open, or the first would wait for them."""
    conn.execute("insert into tasklib.tasks (name, priority) select 'a', 1 from generate_series(1, 5000)")
    assert race(config.database_url, 6, SQL) == [0] * 6
    assert conn.execute(STATES).fetchall() == BUILT
    conn.close()
    assert state_of(config.database_url)[1] == 0


def test_a_migrator_that_waits_for_its_turn_holds_nothing(config: tasklib.Config, conn: Conn) -> None:
    """Two migrators, and a transaction that ends only when the second one waits: neither waits for the other."""
    with open_write(config) as held:
        first = Migrator(config)
        builder = wait_until_it_waits(conn)
        second = Migrator(config)
        wait_until(lambda: conn.execute(TRIED, [builder]).fetchone() is not None, "the second one's try")
        held.commit()
        first.end()
        second.end()
    assert (first.error, second.error) == (None, None)
    assert conn.execute(STATES).fetchall() == BUILT


def test_a_kill_in_mid_build_loses_nothing(config: tasklib.Config, conn: Conn) -> None:
    """After a kill -9 its server process goes on. The next migrator waits for that, and records what was built."""
    with open_write(config) as held:
        killed = start_racer(config.database_url, SQL)
        send_off(killed)
        wait_until_it_waits(conn)
        killed.kill()
        finish(killed)
        assert str(migrate.check(config)) == "0090_indexes (index: tasks_by_two; tasks_by_one, invalid)"
        following = Migrator(config)
        held.commit()
        following.end()
    assert following.error is None
    assert conn.execute(STATES).fetchall() == BUILT
    assert str(migrate.check(config)) == "nothing"


def test_an_invalid_index_is_made_again(config: tasklib.Config, conn: Conn) -> None:
    """Its server process ended in mid build. What is left costs time and serves nothing: it is dropped first."""
    with open_write(config) as held:
        migrator = Migrator(config)
        conn.execute("select pg_terminate_backend(%s)", [wait_until_it_waits(conn)])
        migrator.end()
        assert isinstance(migrator.error, tasklib.DatabaseUnavailable)
        assert conn.execute(STATES).fetchall() == [("tasks_by_one", False)]
        assert "tasks_by_one, invalid" in str(migrate.check(config))
        held.commit()
    migrate.migrate(config)
    assert conn.execute(STATES).fetchall() == BUILT


def test_what_removes_waits_for_the_indexes_before_it(
    config: tasklib.Config, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is never without the index that another one replaces."""
    replaced = migrate.Migration(91, "replaced", "post", "drop index tasklib.tasks_unsuccessful")
    known = [*migrate.known_migrations(), replaced]
    monkeypatch.setattr(migrate, "known_migrations", lambda: known)
    old = "select from pg_class where relname = 'tasks_unsuccessful'"
    with open_write(config) as held:
        migrator = Migrator(config)
        wait_until_it_waits(conn)
        assert conn.execute(old).fetchone() is not None
        held.commit()
        migrator.end()
    assert conn.execute(old).fetchone() is None
    assert str(migrate.check(config)) == "nothing"


@pytest.mark.parametrize("is_invalid", [False, True])
def test_the_printed_script_builds_them(config: tasklib.Config, conn: Conn, is_invalid: bool) -> None:
    """It runs in psql: after the COMMIT, each statement alone."""
    if is_invalid:
        conn.execute("create index tasks_by_one on tasklib.tasks (name)")
        conn.execute("update pg_index set indisvalid = false where indexrelid = 'tasklib.tasks_by_one'::regclass")
    script = migrate.script(config, migrate.check(config))
    assert ("drop index concurrently" in script) == is_invalid
    psql = [str(embedded.find_binaries() / "psql"), "--no-psqlrc", config.database_url]
    run = subprocess.run(psql, input=script, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert conn.execute(STATES).fetchall() == BUILT
    assert str(migrate.check(config)) == "nothing"


def test_the_printed_script_gives_way_to_a_migrator(config: tasklib.Config, conn: Conn) -> None:
    """It cannot wait without a transaction; it stops, and says so."""
    script = migrate.script(config, migrate.check(config))
    conn.execute("select pg_advisory_lock(hashtextextended('tasklib.index_builds', 0))")
    psql = [str(embedded.find_binaries() / "psql"), "--no-psqlrc", config.database_url]
    run = subprocess.run(psql, input=script, capture_output=True, text=True, check=False)
    assert run.returncode == 3
    assert "another migration builds indexes" in run.stderr
    assert conn.execute(STATES).fetchall() == []


@pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)
def test_a_pooler_is_told_apart(config: tasklib.Config, conn: Conn, tasklib_postgres: EmbeddedPostgres) -> None:
    """A session's lock would stay with the pooler. The error names the remedy, and all else is applied."""
    conn.execute("update tasklib.schema_migrations set revision = revision - 1 where version = 0")
    with pgbouncer(tasklib_postgres.dsn) as pooler:
        pooled = tasklib.Config(pooler.pooled(config.database_url))
        with pytest.raises(tasklib.SchemaBusy, match="direct connection"):
            migrate.migrate(pooled)
    assert str(migrate.check(config)) == WAITING
    assert conn.execute("select from pg_locks where locktype = 'advisory'").fetchall() == []


def test_another_schema_has_indexes_of_its_own(new_database: NewDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same name as those of the first."""
    config = tasklib.Config(new_database(), schema="jobs")
    migrate.migrate(config)
    migrate.migrate(tasklib.Config(config.database_url))
    known = [*migrate.known_migrations(), INDEXES]
    monkeypatch.setattr(migrate, "known_migrations", lambda: known)
    assert str(migrate.migrate(config)) == WAITING
    assert str(migrate.check(config)) == "nothing"
    assert str(migrate.check(tasklib.Config(config.database_url))) == WAITING


def test_the_doctor_tells_of_an_index_that_is_not_built(config: tasklib.Config) -> None:
    """It is a part of the upgrade that is not finished."""
    (found,) = run_checks(config, skip=[name for name in CHECKS if name != "schema"])
    assert (found.severity, found.remedy) == (Severity.NOTE, "tasklib migrate")
    assert WAITING in found.summary


@pytest.mark.parametrize("state", ["missing", "invalid", "valid"])
def test_a_feature_can_ask_for_its_index(config: tasklib.Config, conn: Conn, state: str) -> None:
    """`use_feature` calls this for a feature that needs one: refused until it is valid, with the command to run."""
    if state != "missing":
        conn.execute("create index tasks_by_one on tasklib.tasks (name)")
    if state == "invalid":
        conn.execute("update pg_index set indisvalid = false where indexrelid = 'tasklib.tasks_by_one'::regclass")
    if state == "valid":
        conn.execute("select tasklib.require_index('tasks_by_one')")
        return
    with pytest.raises(psycopg.Error, match="tasks_by_one is not built yet") as refused:
        conn.execute("select tasklib.require_index('tasks_by_one')")
    assert refused.value.sqlstate == "TL426"
    assert "tasklib migrate" in str(refused.value.diag.message_hint)


def test_check_exits_with_one_while_an_index_is_missing(
    config: tasklib.Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the script that asks before a rollout."""
    monkeypatch.setenv("DATABASE_URL", config.database_url)
    assert migrate.main(["--check"]) == 1
    assert WAITING in capsys.readouterr().out
    assert migrate.main([]) == 0
    assert migrate.main(["--check"]) == 0
