"""Every finding of `tasklib doctor` is made true on a real PostgreSQL, and gone when its remedy has been applied."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from typer.testing import CliRunner

import tasklib
from tasklib import embedded, migrate
from tasklib.budget import connection_budget, daemon_budget
from tasklib.commands import app
from tasklib.doctor import CHECKS, DEEP_CHECKS, Finding, Severity, Thresholds, run_checks, worst
from tasklib.doctor.probe import Server
from tasklib.doctor.run import REMEDY_ADDRESS, REMEDY_FULL, REMEDY_REFUSED
from tasklib.doctor.server import check_database
from tasklib.sql import queries
from tests.support.commands import COMMAND, run_tasklib
from tests.support.pooler import PROGRAM, WHY_NOT, pgbouncer
from tests.support.proxy import CuttingProxy, Fate, Said
from tests.support.raw_sql import literal
from tests.support.standby import SLOT, standby
from tests.support.working import ManualWorker, grown_up_reaper, running
from tools.daemons import PYTHONPATH
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tasklib.embedded import EmbeddedPostgres
    from tests.support.raw_sql import Conn

pytestmark = pytest.mark.direct("it has servers of its own")

OK, NOTE, WARNING, CRITICAL = Severity
PASSWORD = "S3CR3T-canary-47"
AT_ONCE = Thresholds(
    transaction_seconds=(0.0, 3600), unserved_seconds=-1, stuck_seconds=-1, paused_seconds=-1, breaker_seconds=-1
)
MAX_CONNECTIONS = 40


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    """Its settings, its roles and its queue of notifications are these tests' own."""
    settings: dict[str, object] = {"max_connections": MAX_CONNECTIONS, "max_prepared_transactions": 5}
    with embedded.postgres(settings=settings) as made:
        migrate.migrate(tasklib.Config(made.dsn_for("template1")))
        yield made


@pytest.fixture(scope="module")
def shared_url(server: EmbeddedPostgres) -> str:
    return make_database(server, "shared")


@pytest.fixture
def fresh() -> None:
    """Asked for by who changes the schema."""


@pytest.fixture
def url(server: EmbeddedPostgres, shared_url: str, request: pytest.FixtureRequest) -> str:
    """Of a migrated database without a row; of one that nobody else uses, if the test is to be `fresh`."""
    if "fresh" in request.fixturenames:
        return make_database(server, f"fresh_{time.monotonic_ns()}")
    with psycopg.connect(shared_url, autocommit=True) as conn:
        conn.execute(queries("testing", "tasklib")["empty"])
    return shared_url


def make_database(server: EmbeddedPostgres, name: str) -> str:
    """A copy of template1, which has been migrated."""
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    return server.dsn_for(name)


@pytest.fixture
def config(url: str) -> tasklib.Config:
    return tasklib.Config(url)


@pytest.fixture
def conn(url: str) -> Iterator[Conn]:
    with psycopg.connect(url, autocommit=True) as made:
        yield made


@pytest.fixture
def role(conn: Conn) -> Iterator[str]:
    """One that may do nothing; quoted, because it has to be."""
    conn.execute('drop role if exists "the App"')
    conn.execute('create role "the App" login')
    yield '"the App"'
    conn.execute('drop owned by "the App"')
    conn.execute('drop role "the App"')


def look(config: tasklib.Config, check: str, **options: Any) -> list[Finding]:
    """What one check finds."""
    known = CHECKS | DEEP_CHECKS
    assert check in known
    skip = [name for name in known if name != check]
    return run_checks(config, skip=skip, deep=check in DEEP_CHECKS, **options)


def one(config: tasklib.Config, check: str, severity: Severity, **options: Any) -> Finding:
    found = look(config, check, **options)
    assert [each.severity for each in found] == [severity], found
    assert found[0].check == check
    assert severity == OK or found[0].remedy
    return found[0]


def apply(conn: Conn, remedy: str) -> None:
    """What of it is SQL. Each by itself: some of it must not be in a transaction."""
    statements = re.findall(
        r"((?:alter|create|delete|drop|grant|insert|reindex|rollback|select|set|update) [^;]+;)", remedy
    )
    assert statements, remedy
    for statement in statements:
        conn.execute(literal(statement))


@contextlib.contextmanager
def server_setting(conn: Conn, name: str, value: str) -> Iterator[None]:
    """For the whole server, and seen by a new session."""
    conn.execute(literal(f"alter system set {name} = {value}"))
    try:
        _reload(conn, name, value)
        yield
    finally:
        conn.execute(literal(f"alter system reset {name}"))
        conn.execute("select pg_reload_conf()")


def _reload(conn: Conn, name: str, value: str) -> None:
    conn.execute("select pg_reload_conf()")
    wait_until(lambda: conn.execute(literal(f"show {name}")).fetchone() == (value,), f"{name} = {value}")


# --- a good day ---


def test_all_is_well(config: tasklib.Config, conn: Conn) -> None:
    """With a worker that serves what waits: every check says so, and the exit code is 0."""
    tasklib.task(name="job")(lambda: None)
    with running(config):
        conn.execute("select tasklib.submit('job')")
        found = run_checks(config, deep=True)
    assert {each.check: each.severity for each in found} == dict.fromkeys([*CHECKS, *DEEP_CHECKS], OK), found


@pytest.mark.usefixtures("fresh")
def test_another_schema_is_as_well(url: str) -> None:
    """Its name is put in wherever ours stands, also where the schema is compared with how it was made."""
    config = tasklib.Config(url, schema="order")
    migrate.migrate(config)
    found = run_checks(config, deep=True)
    assert [each for each in found if each.severity != OK and each.check != "workers"] == []
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute('drop index "order".tasks_claim')
    assert "tasks_claim" in one(config, "schema", CRITICAL).summary


def test_it_changes_nothing(config: tasklib.Config, conn: Conn) -> None:
    """No row is written, no session is left."""
    count = "select sum(n_tup_ins + n_tup_upd + n_tup_del) from pg_stat_xact_user_tables"
    before = conn.execute(count).fetchone()
    run_checks(config, deep=True)
    assert conn.execute(count).fetchone() == before
    left = "select from pg_stat_activity where application_name like 'tasklib%' and datname = current_database()"
    wait_until(lambda: conn.execute(left).fetchone() is None, "its session to end")


# --- database ---


def test_a_database_that_is_down() -> None:
    """The finding says what libpq said; nothing else is looked at."""
    found = run_checks(tasklib.Config(f"postgresql://app:{PASSWORD}@127.0.0.1:1/shop"))
    assert [(each.check, each.severity) for each in found] == [("database", CRITICAL)]
    assert "refused" in found[0].summary
    assert PASSWORD not in str(found)


def test_an_address_that_psycopg_refuses() -> None:
    """A finding, as it would be an error of every program that uses it."""
    found = run_checks(tasklib.Config("postgresql://app@127.0.0.1:1/shop?connect_timeout=soon"))
    assert [(each.check, each.severity) for each in found] == [("database", CRITICAL)]
    assert "connect_timeout" in found[0].summary
    assert found[0].remedy == REMEDY_ADDRESS


def test_a_server_that_lets_nobody_in(config: tasklib.Config, conn: Conn, role: str) -> None:
    """It runs and answers: the remedy is not to look whether it does. When it is full, that is said."""
    address = make_conninfo(config.database_url, dbname="no_such_database")
    assert one(tasklib.Config(address), "database", CRITICAL).remedy == REMEDY_REFUSED
    conn.execute(literal(f"alter role {role} connection limit 0"))
    found = one(as_role(config, role), "database", CRITICAL)
    assert (found.remedy, "too many connections" in found.summary) == (REMEDY_FULL, True)


def test_a_server_without_a_connection_left(config: tasklib.Config, url: str, role: str) -> None:
    """What comes after the warnings of `connections`: nobody is let in, the doctor neither."""
    mine = make_conninfo(url, user=role.strip('"'))
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(psycopg.OperationalError):
            for _ in range(MAX_CONNECTIONS):
                stack.enter_context(psycopg.connect(mine))
        assert one(as_role(config, role), "database", CRITICAL).remedy == REMEDY_FULL


def test_a_database_that_does_not_answer() -> None:
    """Connected, and not a word: it is given up when the time is up."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = run_checks(tasklib.Config(f"postgresql://app@127.0.0.1:{silent.getsockname()[1]}/shop"), seconds=0.5)
    assert [(each.check, each.severity) for each in found] == [("database", CRITICAL)]
    assert "within 0.5 s" in found[0].summary


def test_a_connection_that_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up before all of the time is: then it is known that it is the connection."""
    monkeypatch.setattr("tasklib.doctor.probe.CONNECT_SECONDS", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = run_checks(tasklib.Config(f"postgresql://app@127.0.0.1:{silent.getsockname()[1]}/shop"), seconds=60)
    assert "PostgreSQL cannot be reached" in found[0].summary


def test_a_database_that_falls_silent(url: str, open_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found before is told all the same."""
    is_silent, may_go_on = threading.Event(), threading.Event()
    really = threading.Thread.join

    def decide(said: Said) -> Fate:
        if "select name, setting from pg_settings" in said.sql:
            is_silent.set()
            may_go_on.wait(60)
        return "pass"

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        """The doctor's time is up when the database has fallen silent, and not before."""
        if timeout == 300:
            assert is_silent.wait(60)
        else:
            really(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", join)
    with CuttingProxy(url, open_directory, decide) as to:
        found = run_checks(tasklib.Config(to.url), seconds=300)
        may_go_on.set()
    assert (found[-1].check, found[-1].severity) == ("database", CRITICAL)
    assert "durability" in found[-1].summary
    assert {each.check for each in found} >= {"schema", "clock"}


def test_a_connection_that_is_lost(url: str, open_directory: Path) -> None:
    """In the middle: critical, and no traceback."""
    with CuttingProxy(url, open_directory, lambda said: "before" if "pg_stat_progress" in said.sql else "pass") as to:
        found = run_checks(tasklib.Config(to.url))
    assert (found[-1].check, found[-1].severity) == ("database", CRITICAL)


def test_a_standby() -> None:
    """Nothing can be claimed there. Its slot, when it has gone, keeps dead rows for it."""
    with (
        embedded.postgres() as primary,
        standby(primary, settings={"hot_standby_feedback": "on", "wal_receiver_status_interval": 1}) as other,
        psycopg.connect(primary.dsn, autocommit=True) as conn,
    ):
        config = tasklib.Config(primary.dsn)
        there = tasklib.Config(other.dsn_for("postgres"))
        assert "standby" in one(there, "database", CRITICAL).summary
        assert one(there, "pooler", NOTE).remedy == "see `database`"
        both = f"host={conn.info.host},{other.directory} port={other.port} dbname=postgres user=postgres"
        one(tasklib.Config(f"{both} target_session_attrs=read-write"), "database", OK)
        kept = "select from pg_replication_slots where xmin is not null"
        wait_until(lambda: conn.execute(kept).fetchone() is not None, "the standby's feedback")
        one(config, "transactions", OK)
        other.stop()
        wait_until(lambda: conn.execute(f"{kept} and not active").fetchone() is not None, "the standby to be gone")
        slot = one(config, "transactions", WARNING)
        assert SLOT in slot.summary
        apply(conn, slot.remedy)
        one(config, "transactions", OK)


@pytest.mark.parametrize(
    "whom", ["database {database}", "role {role}", "role {role} in database {database}", "role all"]
)
def test_a_read_only_database(config: tasklib.Config, conn: Conn, whom: str) -> None:
    """Set by somebody who forgot it. Who applies the remedy is read-only himself, to begin with."""
    setting = "default_transaction_read_only"
    whose = whom.format(database=conn.info.dbname, role=conn.info.user)
    conn.execute(literal(f"alter {whose} set {setting} = on"))
    try:
        found = one(config, "database", CRITICAL)
        with psycopg.connect(config.database_url, autocommit=True) as new:
            apply(new, found.remedy)
        one(config, "database", OK)
    finally:
        conn.execute(literal(f"alter {whose} reset {setting}"))


@pytest.mark.direct
def test_a_read_only_server(config: tasklib.Config, conn: Conn) -> None:
    """As some providers make it when the disk is full. Or only the address says so."""
    with server_setting(conn, "default_transaction_read_only", "on"):
        found = one(config, "database", CRITICAL)
        assert "disk" in found.remedy
        with psycopg.connect(config.database_url, autocommit=True) as new:
            apply(new, found.remedy)
        _reload(conn, "default_transaction_read_only", "off")
        one(config, "database", OK)
    asked = make_conninfo(config.database_url, options="-c default_transaction_read_only=on")
    assert "out of `options`" in one(tasklib.Config(asked), "database", CRITICAL).remedy


def test_another_encoding(server: EmbeddedPostgres, conn: Conn) -> None:
    """Works, and refuses some text."""
    conn.execute("create database old_encoding template template0 encoding 'LATIN1'")
    config = tasklib.Config(server.dsn_for("old_encoding"))
    try:
        assert "LATIN1" in one(config, "database", NOTE).summary
    finally:
        conn.execute("drop database old_encoding")


def test_an_old_server() -> None:
    """There is none that old to be tried: what the server would say is given."""
    said = Server("14.19", 140019, "app", "shop", is_standby=False, is_read_only=False, encoding="UTF8")
    probe: Any = SimpleNamespace(server=said)
    assert [each.severity for each in check_database(probe, Thresholds())] == [OK, CRITICAL]


# --- schema ---


def test_a_missing_schema(server: EmbeddedPostgres, conn: Conn) -> None:
    """Of what needs it, none is a traceback."""
    conn.execute("create database without_schema template template0")
    try:
        found = run_checks(tasklib.Config(server.dsn_for("without_schema")), deep=True)
        by_check = {each.check: each for each in found}
        assert by_check["schema"].severity == CRITICAL
        assert by_check["schema"].remedy == "tasklib migrate"
        assert by_check["leases"].severity == NOTE
        assert worst(each for each in found if each.check != "schema") == NOTE
        migrate.migrate(tasklib.Config(server.dsn_for("without_schema")))
        one(tasklib.Config(server.dsn_for("without_schema")), "schema", OK)
    finally:
        conn.execute("drop database without_schema with (force)")


@pytest.mark.usefixtures("fresh")
def test_an_older_schema(config: tasklib.Config, conn: Conn) -> None:
    """The library would refuse it."""
    conn.execute("update tasklib.schema_migrations set revision = revision - 1 where version = 0")
    assert one(config, "schema", CRITICAL).remedy == "tasklib migrate"
    migrate.migrate(config)
    one(config, "schema", OK)


@pytest.mark.usefixtures("fresh")
def test_an_upgrade_that_is_not_finished(config: tasklib.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes away can wait, and must not be forgotten."""
    known = [*migrate.known_migrations(), migrate.Migration(99, "tidy", "post", "select 1")]
    monkeypatch.setattr(migrate, "known_migrations", lambda: known)
    assert "0099_tidy" in one(config, "schema", NOTE).summary
    migrate.migrate(config)
    one(config, "schema", OK)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("phase", "severity"), [("post", CRITICAL), ("pre", OK)])
def test_a_newer_schema(config: tasklib.Config, conn: Conn, phase: str, severity: Severity) -> None:
    """One that took something away cannot be worked with; one that only adds can, and what it added is no drift."""
    conn.execute("create index of_the_next_version on tasklib.tasks (name)")
    insert = "insert into tasklib.schema_migrations (version, name, phase, checksum) values (9999, 'next', %s, '')"
    conn.execute(insert, [phase])
    assert "9999" in one(config, "schema", severity).summary


@pytest.mark.usefixtures("fresh")
def test_a_schema_of_a_development_version(config: tasklib.Config, conn: Conn) -> None:
    """A migration that was applied with other contents."""
    conn.execute("update tasklib.schema_migrations set checksum = 'x' where version = 1")
    assert "0001_tasks" in one(config, "schema", CRITICAL).summary


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("drop index tasklib.tasks_claim", "tasks_claim"),
        ("drop index tasklib.tasks_due; create index tasks_due on tasklib.tasks (id)", "tasks_due"),
        ("alter table tasklib.tasks drop constraint tasks_state_whole", "tasks_state_whole"),
        ("alter table tasklib.attempts drop constraint attempts_pkey", "attempts_pkey"),
        (
            "alter table tasklib.workers drop constraint workers_pkey, add constraint workers_pkey unique (pid)",
            "workers_pkey",
        ),
        ("drop view tasklib.folded_attempts cascade", "folded_attempts"),
        ("drop trigger tell_done on tasklib.tasks", "tell_done"),
        ("drop trigger keep_attempt on tasklib.task_attempts", "keep_attempt"),
        ("drop trigger policy_changed on tasklib.queues", "policy_changed"),
        ("drop function tasklib.policy_row_changed cascade", "policy_row_changed"),
        ("drop trigger refuse_old_worker on tasklib.workers", "refuse_old_worker"),
        ("create or replace function tasklib.ring(queue text) returns void language sql as 'select'", "function ring"),
    ],
)
def test_a_schema_that_was_changed_by_hand(config: tasklib.Config, conn: Conn, change: str, named: str) -> None:
    """A part that is missing is named: without that index every claim reads all that is ready. Its remedy works."""
    conn.execute(literal(change))
    found = one(config, "schema", CRITICAL)
    assert named in found.summary
    apply(conn, found.remedy)
    if "tasklib migrate" in found.remedy:
        migrate.migrate(config)
    one(config, "schema", OK)


@pytest.mark.usefixtures("fresh")
def test_the_remedy_for_an_index_runs_as_one_command(config: tasklib.Config, conn: Conn, url: str) -> None:
    """`psql -c` sends what it is given as one transaction, in which no index can be built while others work. Each index
    has a finding of its own: missing, changed, never finished, and beside other parts that are missing.
    """
    conn.execute("drop index tasklib.tasks_claim")
    conn.execute("drop index tasklib.tasks_due; create index tasks_due on tasklib.tasks (id)")
    conn.execute("drop index tasklib.tasks_idempotency_key")
    conn.execute("alter table tasklib.tasks drop constraint tasks_state_whole")
    conn.execute("alter table tasklib.attempts drop constraint attempts_pkey")
    conn.execute("update pg_index set indisvalid = false where indexrelid = 'tasklib.tasks_unsuccessful'::regclass")
    found = look(config, "schema")
    assert len(found) == 5
    psql = str(embedded.find_binaries() / "psql")
    for each in found:
        command = [psql, "-v", "ON_ERROR_STOP=1", "-c", each.remedy, url]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    one(config, "schema", OK)


@pytest.mark.usefixtures("fresh")
def test_a_part_that_cannot_be_put_back(config: tasklib.Config, conn: Conn) -> None:
    """A column is gone with what was in it, and of a function there is but a digest: the remedy says from where."""
    conn.execute("alter table tasklib.tasks drop column tags")
    conn.execute("create or replace function tasklib.uuid7() returns uuid language sql as 'select null::uuid'")
    remedy = one(config, "schema", CRITICAL).remedy
    assert remedy.startswith("as in tasklib/sql/migrations, or from a backup: uuid7, table tasks column tags ")


@pytest.mark.usefixtures("fresh")
def test_a_part_without_effect(config: tasklib.Config, conn: Conn, url: str) -> None:
    """It is there, and the catalogue shows it as it was made; but a trigger is off, and an index was never finished."""
    conn.execute("alter table tasklib.tasks disable trigger task_defaults")
    off = one(config, "schema", CRITICAL)
    assert off.details == {"table": "tasks", "trigger": "task_defaults"}
    apply(conn, off.remedy)
    one(config, "schema", OK)
    conn.execute("drop index tasklib.tasks_due")
    with psycopg.connect(url) as holder:
        holder.execute("select tasklib.submit('a')")
        conn.execute("set lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            conn.execute("create index concurrently tasks_due on tasklib.tasks (due_at) where due_at is not null")
    invalid = one(config, "schema", CRITICAL)
    assert invalid.details == {"table": "tasks", "index": "tasks_due"}
    conn.execute("reset lock_timeout")
    apply(conn, invalid.remedy)
    one(config, "schema", OK)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("table", "trigger"),
    [("queues", "policy_changed"), ("policy", "policy_row_changed"), ("workers", "refuse_old_worker")],
)
def test_a_trigger_of_the_policies_that_is_off(config: tasklib.Config, conn: Conn, table: str, trigger: str) -> None:
    """Workers would not hear of a pause, or one that knows no pause would be let in."""
    conn.execute(literal(f"alter table tasklib.{table} disable trigger {trigger}"))
    off = one(config, "schema", CRITICAL)
    assert off.details == {"table": table, "trigger": trigger}
    apply(conn, off.remedy)
    one(config, "schema", OK)


@pytest.mark.usefixtures("fresh")
def test_a_schema_with_additions(config: tasklib.Config, conn: Conn) -> None:
    """Somebody's own index is theirs; who may execute a function is no part of it."""
    conn.execute("revoke execute on all functions in schema tasklib from public")
    one(config, "schema", OK)
    conn.execute("create index mine on tasklib.tasks (name)")
    assert "mine" in one(config, "schema", NOTE).summary
    conn.execute(
        "create trigger mine before update on tasklib.tasks execute function suppress_redundant_updates_trigger()"
    )
    conn.execute("alter table tasklib.tasks disable trigger mine")
    one(config, "schema", NOTE)


@pytest.mark.usefixtures("fresh")
def test_the_wording_of_the_session_does_not_matter(config: tasklib.Config, conn: Conn) -> None:
    """PostgreSQL shows times in constraints by the session's time zone, and types by its search path."""
    name = conn.info.dbname
    for setting in ("timezone = 'Asia/Tokyo'", "search_path = tasklib", "datestyle = 'German'"):
        conn.execute(literal(f"alter database {name} set {setting}"))
    one(config, "schema", OK)


# --- grants ---


def as_role(config: tasklib.Config, role: str) -> tasklib.Config:
    return replace(config, database_url=make_conninfo(config.database_url, user=role.strip('"')))


def test_a_role_that_may_not_use_the_schema(config: tasklib.Config, conn: Conn, role: str) -> None:
    """The first thing that is missing; its remedy leads to the next."""
    found = run_checks(as_role(config, role))
    by_check = {each.check: each for each in found}
    assert by_check["grants"].severity == CRITICAL
    assert by_check["schema"].severity == by_check["leases"].severity == NOTE
    apply(conn, by_check["grants"].remedy)
    missing = one(as_role(config, role), "grants", CRITICAL)
    assert "select on tasks" in missing.details["missing"]
    assert "execute on submit" in missing.details["missing"]
    apply(conn, missing.remedy)
    one(as_role(config, role), "grants", OK)


@pytest.mark.parametrize(
    ("revoked", "missing"),
    [
        ("delete on tasklib.tasks", "delete on tasks"),
        ("update on tasklib.workers", "update on workers"),
        ("execute on function tasklib.submit_many", "execute on submit_many"),
    ],
)
def test_a_right_that_is_missing(config: tasklib.Config, conn: Conn, role: str, revoked: str, missing: str) -> None:
    """Named, with the statement that grants it."""
    for what in ("usage on schema", "select, insert, update, delete on all tables in schema"):
        conn.execute(literal(f"grant {what} tasklib to {role}"))
    conn.execute(literal(f"grant execute on all functions in schema tasklib to {role}"))
    conn.execute(literal(f"revoke {revoked} from {role}"))
    found = one(as_role(config, role), "grants", CRITICAL)
    assert found.details == {"missing": [missing]}
    apply(conn, found.remedy)
    one(as_role(config, role), "grants", OK)


def test_a_role_that_only_submits(config: tasklib.Config, conn: Conn, role: str) -> None:
    """Nothing is wrong with it."""
    conn.execute(literal(f"grant usage on schema tasklib to {role}"))
    conn.execute(literal(f"grant execute on all functions in schema tasklib to {role}"))
    found = run_checks(as_role(config, role))
    assert worst(found) == NOTE
    assert next(each for each in found if each.check == "grants").severity == NOTE


# --- clock ---


@pytest.mark.parametrize(
    ("ahead", "severity", "side"),
    [(0.5, OK, ""), (5, WARNING, "ahead of"), (-5, WARNING, "behind"), (90, CRITICAL, "")],
)
def test_a_clock_that_is_wrong(config: tasklib.Config, ahead: float, severity: Severity, side: str) -> None:
    """The host's own cannot be set here: one is given that is wrong by so much."""
    found = one(config, "clock", severity, wall_clock=lambda: time.time() + ahead)
    assert side in found.summary
    if severity != OK:
        assert found.details["skew_seconds"] == pytest.approx(-ahead, abs=0.2)


def test_a_long_way_is_no_wrong_clock(url: str, open_directory: Path) -> None:
    """What the way takes is doubt, and not a difference."""

    def decide(said: Said) -> Fate:
        time.sleep(0.2 if "clock_timestamp" in said.sql else 0)
        return "pass"

    with CuttingProxy(url, open_directory, decide) as slow:
        one(tasklib.Config(slow.url), "clock", OK, thresholds=Thresholds(clock_seconds=(0.05, 60)))


@pytest.mark.parametrize(("seconds", "severity"), [(0, OK), (10, WARNING), (100, CRITICAL)])
def test_a_database_whose_clock_was_set_back(
    config: tasklib.Config, conn: Conn, seconds: int, severity: Severity
) -> None:
    """A lease that was renewed in the future tells of it."""
    insert_worker(conn, "w", renewed=f"+ interval '{seconds} seconds'")
    one(config, "clock", severity)


# --- what changes sessions without a word ---


@pytest.mark.usefixtures("fresh")
def test_rows_that_are_hidden(config: tasklib.Config, conn: Conn, role: str) -> None:
    """Row-level security shows a role nothing, and tells nobody. Also if it is not the role that asks."""
    conn.execute("alter table tasklib.claims enable row level security")
    found = one(config, "row_security", CRITICAL)
    assert found.details == {"tables": ["claims"]}
    assert "but for others" in found.summary
    conn.execute(literal(f"grant usage on schema tasklib to {role}"))
    assert "this role too" in one(as_role(config, role), "row_security", CRITICAL).summary
    apply(conn, found.remedy)
    one(config, "row_security", OK)


@pytest.mark.parametrize(
    "whom", ["role {role}", "database {database}", "role {role} in database {database}", "role all"]
)
@pytest.mark.parametrize(
    ("setting", "severity"),
    [
        ("session_replication_role = replica", CRITICAL),
        ("statement_timeout = '5s'", WARNING),
        ("statement_timeout = 50", CRITICAL),
        ("lock_timeout = '20 ms'", WARNING),
        ("lock_timeout = '1ms'", CRITICAL),
        ("idle_in_transaction_session_timeout = '0.9s'", CRITICAL),
        ("idle_session_timeout = '30s'", WARNING),
    ],
)
def test_a_setting_that_cripples_sessions(
    config: tasklib.Config, conn: Conn, role: str, whom: str, setting: str, severity: Severity
) -> None:
    """Of whomever: it may be who runs tasks, or who submits. The remedy takes it back."""
    conn.execute(literal(f"alter {whom.format(role=role, database=conn.info.dbname)} set {setting}"))
    found = one(config, "sessions", severity)
    assert setting.partition(" ")[0] in found.summary
    apply(conn, found.remedy)
    one(config, "sessions", OK)


def test_a_limit_on_transactions(config: tasklib.Config, conn: Conn, role: str) -> None:
    """From PostgreSQL 17 on."""
    if conn.info.server_version < 170000:
        pytest.skip("PostgreSQL has no transaction_timeout before 17")
    conn.execute(literal(f"alter role {role} set transaction_timeout = '100ms'"))
    apply(conn, one(config, "sessions", CRITICAL).remedy)
    one(config, "sessions", OK)


def test_settings_that_do_no_harm(config: tasklib.Config, conn: Conn, role: str) -> None:
    """Thresholds as one would set them for an application, none at all, and those of another database."""
    conn.execute(literal(f"alter role {role} set statement_timeout = '30s'"))
    conn.execute(literal(f"alter role {role} set lock_timeout = '2s'"))
    conn.execute(literal(f"alter role {role} set idle_in_transaction_session_timeout = '5min'"))
    conn.execute(literal(f"alter role {role} set idle_session_timeout = 0"))
    conn.execute(literal(f"alter role {role} set session_replication_role = origin"))
    conn.execute(literal(f"alter role {role} in database postgres set statement_timeout = '1ms'"))
    one(config, "sessions", OK)


def test_a_server_and_an_address_that_cripple_sessions(config: tasklib.Config, conn: Conn) -> None:
    """Each says where it comes from."""
    by_address = make_conninfo(config.database_url, options="-c idle_in_transaction_session_timeout=500")
    assert "options" in one(tasklib.Config(by_address), "sessions", CRITICAL).remedy
    conn.execute("alter system set idle_session_timeout = '20s'")
    try:
        _reload(conn, "idle_session_timeout", "20s")
        found = one(config, "sessions", WARNING)
        assert "server" in found.summary
        apply(conn, found.remedy)
        _reload(conn, "idle_session_timeout", "0")
        one(config, "sessions", OK)
    finally:
        conn.execute("alter system reset idle_session_timeout")


# --- durability ---


@pytest.mark.parametrize(
    ("name", "value", "severity"),
    [("fsync", "off", CRITICAL), ("full_page_writes", "off", WARNING), ("synchronous_commit", "off", WARNING)],
)
def test_a_server_that_may_lose_what_it_confirmed(
    config: tasklib.Config, conn: Conn, name: str, value: str, severity: Severity
) -> None:
    """Each setting for itself, until it is set right."""
    with server_setting(conn, name, value):
        found = one(config, "durability", severity)
        assert name in found.summary
        apply(conn, found.remedy)
        _reload(conn, name, "on")
        one(config, "durability", OK)


def test_an_address_that_does_not_wait_for_the_disk(config: tasklib.Config) -> None:
    """By its own options: nothing that is said to the server would help."""
    options = make_conninfo(config.database_url, options="-c synchronous_commit=off")
    assert "options" in one(tasklib.Config(options), "durability", WARNING).remedy


def test_a_server_and_a_role_that_do_not_wait_for_the_disk(config: tasklib.Config, conn: Conn, role: str) -> None:
    """Both are told: the one would hide the other."""
    conn.execute(literal(f"alter role {role} set synchronous_commit = off"))
    with server_setting(conn, "synchronous_commit", "off"):
        found = look(config, "durability")
        assert [each.severity for each in found] == [WARNING, WARNING]
        for each in found:
            apply(conn, each.remedy)
        _reload(conn, "synchronous_commit", "on")
        one(config, "durability", OK)


@pytest.mark.parametrize(
    "whom", ["role {role}", "database {database}", "role {role} in database {database}", "role all"]
)
def test_a_role_that_does_not_wait_for_the_disk(config: tasklib.Config, conn: Conn, role: str, whom: str) -> None:
    """Also if it is not the one that asks: it may be the one that submits."""
    conn.execute(literal(f"alter {whom.format(role=role, database=conn.info.dbname)} set synchronous_commit = off"))
    found = one(config, "durability", WARNING)
    apply(conn, found.remedy)
    one(config, "durability", OK)


def test_a_role_that_does_not_wait_in_another_database(config: tasklib.Config, conn: Conn, role: str) -> None:
    """That is no matter of this queue."""
    conn.execute(literal(f"alter role {role} in database postgres set synchronous_commit = off"))
    one(config, "durability", OK)


def test_a_table_that_a_crash_would_empty(config: tasklib.Config, conn: Conn) -> None:
    """Somebody wanted it faster."""
    conn.execute("alter table tasklib.attempts set unlogged")
    found = one(config, "durability", CRITICAL)
    assert found.details == {"tables": ["attempts"]}
    apply(conn, found.remedy)
    one(config, "durability", OK)


# --- autovacuum, transactions, notifications ---


@pytest.mark.parametrize("name", ["autovacuum", "track_counts"])
def test_a_server_that_does_not_vacuum(config: tasklib.Config, conn: Conn, name: str) -> None:
    """Without counts it would not know what to."""
    with server_setting(conn, name, "off"):
        found = one(config, "autovacuum", CRITICAL)
        assert name in found.summary
        apply(conn, found.remedy)
        _reload(conn, name, "on")
        one(config, "autovacuum", OK)


def test_a_table_that_is_not_vacuumed(config: tasklib.Config, conn: Conn) -> None:
    """For one table alone."""
    conn.execute("alter table tasklib.tasks set (autovacuum_enabled = off)")
    found = one(config, "autovacuum", CRITICAL)
    apply(conn, found.remedy)
    one(config, "autovacuum", OK)


def test_dead_rows_that_stay(config: tasklib.Config, conn: Conn, url: str) -> None:
    """More than twice what autovacuum waits for, because a snapshot holds it back; gone after a vacuum."""
    conn.execute("insert into tasklib.tasks (name) select 'a' from generate_series(1, 300)")
    conn.execute("vacuum analyze tasklib.tasks")
    with psycopg.connect(url) as holder:
        holder.execute("set transaction isolation level repeatable read")
        holder.execute("select 1 from pg_class")
        update(conn, "limit 120")
        one(config, "autovacuum", OK, thresholds=Thresholds(dead_rows=100))  # not twice what it waits for
        for _ in range(2):
            update(conn, "limit 300")
        update(conn, "limit 100")
        found = one(config, "autovacuum", WARNING, thresholds=Thresholds(dead_rows=500))
        assert (found.details["table"], found.details["dead"], found.details["threshold"]) == ("tasks", 820, 65)
    one(config, "autovacuum", OK)  # of a hundred thousand it would tell by itself
    conn.execute("vacuum tasklib.tasks")
    one(config, "autovacuum", OK, thresholds=Thresholds(dead_rows=500))


def update(conn: Conn, rows: str) -> None:
    """So many dead rows more, and counted."""
    conn.execute(
        literal(f"update tasklib.tasks set priority = priority + 1 where id in (select id from tasklib.tasks {rows})")
    )
    conn.execute("select pg_stat_force_next_flush()")
    conn.execute("select 1")


@pytest.mark.usefixtures("fresh")
def test_what_autovacuum_waits_for(config: tasklib.Config, conn: Conn) -> None:
    """By the options of the table; 18 has an upper bound, which the server has too."""
    if conn.info.server_version < 180000:
        pytest.skip("before 18 there is no upper bound")
    conn.execute("alter table tasklib.tasks set (autovacuum_vacuum_threshold = 1000)")
    conn.execute("insert into tasklib.tasks (name) select 'a' from generate_series(1, 100)")
    conn.execute("vacuum analyze tasklib.tasks")
    update(conn, "limit 30")
    one(config, "autovacuum", OK, thresholds=Thresholds(dead_rows=20))
    conn.execute("alter table tasklib.tasks set (autovacuum_vacuum_max_threshold = 10)")
    assert one(config, "autovacuum", WARNING, thresholds=Thresholds(dead_rows=20)).details["threshold"] == 10


def test_a_long_transaction(config: tasklib.Config, conn: Conn, url: str) -> None:
    """Whose it is, for how long, and how to end it. A vacuum's own, and those of other databases, are none."""
    one(config, "transactions", OK, thresholds=AT_ONCE)
    with psycopg.connect(make_conninfo(url, application_name="report")) as holder:
        holder.execute("select tasklib.submit('a')")
        found = one(config, "transactions", WARNING, thresholds=AT_ONCE)
        assert "report" in found.summary
        assert "idle in transaction" in found.summary
        assert found.details["name"] == str(holder.info.backend_pid)
        longer = replace(AT_ONCE, transaction_seconds=(0.0, 0.0))
        one(config, "transactions", CRITICAL, thresholds=longer)
        apply(conn, found.remedy.split(" and ")[0])
        with contextlib.suppress(psycopg.OperationalError):
            holder.rollback()
    one(config, "transactions", OK, thresholds=AT_ONCE)


def test_a_prepared_transaction(config: tasklib.Config, conn: Conn, url: str) -> None:
    """It outlives its session, and every restart."""
    with psycopg.connect(url, autocommit=True) as other:
        other.execute("begin")
        other.execute("create table of_mine ()")
        other.execute("prepare transaction 'somebody''s'")
    found = one(config, "transactions", WARNING, thresholds=AT_ONCE)
    apply(conn, found.remedy.split("or: ")[1])
    one(config, "transactions", OK, thresholds=AT_ONCE)


def test_transactions_that_hold_up_nobody(
    config: tasklib.Config, conn: Conn, url: str, server: EmbeddedPostgres
) -> None:
    """Those of other databases, prepared ones too; a vacuum; a slot of nobody; and a query in parallel is one."""
    elsewhere = server.dsn
    with psycopg.connect(elsewhere, autocommit=True) as other:
        other.execute("begin")
        other.execute("create table of_mine ()")
        other.execute("prepare transaction 'elsewhere'")
        other.execute("select pg_create_physical_replication_slot('of_nobody')")
        try:
            with psycopg.connect(elsewhere) as holder, vacuuming(conn, url):
                holder.execute("create temp table held ()")
                one(config, "transactions", OK, thresholds=AT_ONCE)
        finally:
            other.execute("rollback prepared 'elsewhere'")
            other.execute("select pg_drop_replication_slot('of_nobody')")
    with in_parallel(conn, url):
        one(config, "transactions", WARNING, thresholds=AT_ONCE)


@contextlib.contextmanager
def vacuuming(conn: Conn, url: str) -> Iterator[None]:
    """Slowly."""
    conn.execute("insert into tasklib.tasks (name) select 'a' from generate_series(1, 3000)")
    options = "-c vacuum_cost_delay=100 -c vacuum_cost_limit=1"
    with meanwhile(make_conninfo(url, options=options), "vacuum (disable_page_skipping) tasklib.tasks"):
        progress = "select from pg_stat_progress_vacuum where heap_blks_scanned > 0"
        wait_until(lambda: conn.execute(progress).fetchone() is not None, "the vacuum to begin")
        yield


@contextlib.contextmanager
def in_parallel(conn: Conn, url: str) -> Iterator[None]:
    name = "debug_parallel_query" if conn.info.server_version >= 160000 else "force_parallel_mode"
    with meanwhile(make_conninfo(url, options=f"-c {name}=on"), "select pg_sleep(60)"):
        worker = "select from pg_stat_activity where backend_type = 'parallel worker' and xact_start is not null"
        wait_until(lambda: conn.execute(worker).fetchone() is not None, "the worker to begin")
        yield


@contextlib.contextmanager
def meanwhile(url: str, statement: str) -> Iterator[None]:
    """For as long as the block takes."""
    with psycopg.connect(url, autocommit=True) as busy:

        def run() -> None:
            with contextlib.suppress(psycopg.errors.QueryCanceled):
                busy.execute(literal(statement))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            busy.cancel_safe()
            thread.join()


def test_a_slot_that_keeps_the_log(config: tasklib.Config, conn: Conn) -> None:
    """Of a standby without feedback: it holds up no vacuum, and fills the disk."""
    conn.execute("select pg_create_physical_replication_slot('of_the_gone', true)")
    try:
        one(config, "transactions", OK)
        conn.execute("select pg_logical_emit_message(true, 'a', repeat('x', 100000))")
        found = one(config, "transactions", WARNING, thresholds=Thresholds(slot_wal_bytes=50_000))
        assert found.details["slot"] == "of_the_gone"
        assert found.details["wal_bytes"] > 100_000
        apply(conn, found.remedy)
        one(config, "transactions", OK, thresholds=Thresholds(slot_wal_bytes=50_000))
    finally:
        conn.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots")


def test_transactions_that_are_hidden(config: tasklib.Config, conn: Conn, url: str, role: str) -> None:
    """A role without the right to see them is told which right that is."""
    with psycopg.connect(url) as holder:
        holder.execute("select tasklib.submit('a')")
        found = one(as_role(config, role), "transactions", NOTE, thresholds=AT_ONCE)
        assert found.details == {"pids": [holder.info.backend_pid]}
        apply(conn, found.remedy)
        one(as_role(config, role), "transactions", WARNING, thresholds=AT_ONCE)


def test_a_queue_of_notifications_that_fills(config: tasklib.Config, conn: Conn, url: str) -> None:
    """Somebody listens and never ends its transaction. The queue holds 8 GB: the limit is set to what is in it."""
    with psycopg.connect(url, autocommit=True) as holder:
        holder.execute("listen task_new")
        holder.execute("begin")
        holder.execute("select 1")
        for n in range(50):
            conn.execute("select pg_notify('task_new', repeat('x', 7990) || %s)", [n])
        ((usage,),) = conn.execute("select pg_notification_queue_usage()").fetchall()
        assert usage > 0
        one(config, "notify_queue", OK)
        one(config, "notify_queue", WARNING, thresholds=Thresholds(notify_queue_share=(usage / 2, 0.5)))
        full = Thresholds(notify_queue_share=(usage / 3, usage / 2))
        found = one(config, "notify_queue", CRITICAL, thresholds=full)
        assert "submit" in found.summary
        (select,) = re.findall(r"(select pid, [^;]+);", found.remedy)
        ((pid, *_), *_) = conn.execute(literal(select)).fetchall()
        conn.execute(literal(re.findall(r"then: (.*);", found.remedy)[0].replace("PID", str(pid))))
        wait_until(lambda: look(config, "notify_queue", thresholds=full)[0].severity == OK, "the queue to empty")
        with pytest.raises(psycopg.OperationalError):
            holder.execute("select 1")


# --- pooler and connections ---


@pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)
def test_a_pooler_in_the_way(server: EmbeddedPostgres, url: str, conn: Conn) -> None:
    """A worker behind it hears nothing, unless it has a direct address for that, of the same database, that answers."""
    with pgbouncer(server.dsn) as pooler:
        behind = tasklib.Config(pooler.pooled(url))
        assert "TASKLIB_LISTEN_DATABASE_URL" in one(behind, "pooler", WARNING).remedy
        assert "direct address" in one(replace(behind, listen_database_url=url), "pooler", OK).summary
        dead = replace(behind, listen_database_url="postgresql://127.0.0.1:1/x")
        assert "refused" in one(dead, "pooler", WARNING).summary
        assert worst(run_checks(replace(behind, listen_database_url=url))) == NOTE  # nobody works
        insert_worker(conn, "w", concurrency=10 * MAX_CONNECTIONS)
        one(behind, "connections", OK)  # how many there are is the pooler's to say


def test_an_address_for_listening_that_hears_nothing(
    server: EmbeddedPostgres, config: tasklib.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leads to another database."""
    monkeypatch.setattr("tasklib.doctor.connections.HEAR_SECONDS", 0.3)
    elsewhere = replace(config, listen_database_url=server.dsn)
    assert "another database" in one(elsewhere, "pooler", WARNING).summary
    one(config, "pooler", OK)


def test_a_server_that_is_nearly_full(config: tasklib.Config, url: str, conn: Conn) -> None:
    """Of what is not reserved for superusers."""
    ((used, usable),) = conn.execute(
        """select (select sum(numbackends)::int from pg_stat_database), current_setting('max_connections')::int
                  - current_setting('superuser_reserved_connections')::int
                  - coalesce(current_setting('reserved_connections', true), '0')::int"""
    ).fetchall()
    with contextlib.ExitStack() as stack:

        def open_until(share: float) -> None:
            while stack_size[0] + used + 1 <= share * usable:
                stack.enter_context(psycopg.connect(url))
                stack_size[0] += 1

        stack_size = [0]
        one(config, "connections", OK)
        open_until(0.85)
        found = one(config, "connections", WARNING)
        assert found.details["limit"] == usable
        open_until(1.0)
        one(config, "connections", CRITICAL)


@pytest.mark.parametrize("whose", ["role", "database"])
def test_a_limit_of_its_own(config: tasklib.Config, conn: Conn, role: str, whose: str) -> None:
    """A role, or a database, may have fewer connections than the server."""
    name, limit = (role, 3) if whose == "role" else (conn.info.dbname, 4)
    conn.execute(literal(f"alter {whose} {name} connection limit {limit}"))
    mine = as_role(config, role)
    with psycopg.connect(mine.database_url), psycopg.connect(mine.database_url):
        found = one(mine, "connections", CRITICAL)
        assert found.details == {"limit": limit, "used": limit}
        apply(conn, found.remedy)
        one(mine, "connections", OK)


def test_workers_that_may_open_too_many(config: tasklib.Config, conn: Conn) -> None:
    """Ten workers with four slots each: told before it is an error in the middle of the work."""
    for number in range(4):
        insert_worker(conn, f"w{number}", concurrency=4)
    one(config, "connections", OK)
    insert_worker(conn, "w5", concurrency=4)
    found = one(config, "connections", WARNING)
    assert found.details == {"workers": 5, "may_open": 45, "limit": MAX_CONNECTIONS - 3}


def test_workers_of_daemons_that_may_open_too_many(config: tasklib.Config, conn: Conn) -> None:
    """A daemon's keeper has five for all of its workers, and they have three each: as many as it would tell itself."""
    for number in range(4):
        insert_worker(conn, f"w{number}", concurrency=2, name=f"pod-{number % 3}")
    one(config, "connections", OK)
    conn.execute(
        """insert into tasklib.worker_states (worker_id, hostname, pid, processes, tasks_running, tasks_claimed,
               recovery_config)
           select worker_id, hostname, pid, 1, 0, 0, '{}' from tasklib.workers"""
    )
    one(config, "connections", OK)
    insert_worker(conn, "alone", concurrency=1)
    budgets = [daemon_budget(config, workers=workers, concurrency=2) for workers in (2, 1, 1)]
    budgets.append(connection_budget(config, concurrency=1))
    may_open = sum(each.worker + each.listener + each.tasks for each in budgets)
    found = one(config, "connections", WARNING)
    assert found.details == {"workers": 5, "may_open": may_open, "limit": MAX_CONNECTIONS - 3}


# --- workers and leases ---


def insert_worker(
    conn: Conn, worker_id: str, lease: str = "+ interval '1 minute'", renewed: str = "", concurrency: int = 1,
    names: str = "{}", queues: str | None = None, died: str = "null", name: str = "w",
    features: str = "{policies}",
) -> None:  # fmt: skip
    conn.execute(
        literal(f"""insert into tasklib.workers (worker_id, name, hostname, pid, process_name, queues, task_names,
                        concurrency, renewed_at, lease_until, died_at, features)
                    values (%s, %s, 'host', 1, 'p', %s, %s, %s, clock_timestamp() {renewed}, clock_timestamp() {lease},
                            {died}, %s)"""),
        [worker_id, name, queues, names, concurrency, features],
    )


def test_nobody_works(config: tasklib.Config, conn: Conn) -> None:
    """A note while nothing waits, or not for long; critical when something has."""
    assert "nothing waits" in one(config, "workers", NOTE).summary
    insert_worker(conn, "dead", lease="- interval '1 second'", names="{a}")
    conn.execute("select tasklib.submit('a', queue => 'mail')")
    one(config, "workers", NOTE)
    found = one(config, "workers", CRITICAL, thresholds=AT_ONCE)
    assert found.details["waiting"][0] | {"seconds": 0} == {"queue": "mail", "name": "a", "count": 1, "seconds": 0}


@pytest.mark.parametrize(
    ("names", "queues", "severity"), [("{b}", None, WARNING), ("{a}", "{other}", WARNING), ("{a}", "{mail}", OK)]
)
def test_a_name_that_nobody_serves(
    config: tasklib.Config, conn: Conn, names: str, queues: str | None, severity: Severity
) -> None:
    """A live worker must know the function and serve the queue, or tasks wait in vain. What is delayed does not."""
    insert_worker(conn, "w", names=names, queues=queues)
    conn.execute("select tasklib.submit('a', queue => 'mail'), tasklib.submit('later', delay_seconds => 60)")
    found = one(config, "workers", severity, thresholds=AT_ONCE)
    assert severity == OK or "a in queue mail (1)" in found.summary


def test_a_task_waits_from_when_it_is_due(config: tasklib.Config, conn: Conn) -> None:
    """Not from when it was submitted."""
    conn.execute("select tasklib.submit('a')")
    conn.execute("update tasklib.tasks set created_at = created_at - interval '1 day', scheduled_at = now()")
    one(config, "workers", NOTE)
    conn.execute("update tasklib.tasks set scheduled_at = created_at")
    one(config, "workers", CRITICAL)


def test_a_name_behind_many_others(config: tasklib.Config, conn: Conn) -> None:
    """Found among thousands of a queue that are served."""
    insert_worker(conn, "w", names="{a}")
    conn.execute("insert into tasklib.tasks (name) select 'a' from generate_series(1, 3000)")
    conn.execute("select tasklib.submit('b')")
    assert "b in queue default (1)" in one(config, "workers", WARNING, thresholds=AT_ONCE).summary


def test_a_paused_queue_needs_no_worker(config: tasklib.Config, conn: Conn) -> None:
    """Its workers may have been taken away."""
    conn.execute("select tasklib.submit('a', queue => 'mail')")
    conn.execute(
        "update tasklib.tasks set (created_at, scheduled_at) = (now() - interval '1 day', now() - interval '1 day')"
    )
    one(config, "workers", CRITICAL)
    conn.execute("select tasklib.pause_queue('mail')")
    assert "nothing waits" in one(config, "workers", NOTE).summary


def test_a_lease_that_ran_out_and_nobody_noticed(config: tasklib.Config, conn: Conn) -> None:
    """No worker and no keeper is left to declare it dead."""
    insert_worker(conn, "w", lease="- interval '1 second'")
    found = one(config, "leases", CRITICAL, thresholds=AT_ONCE)
    assert "w (pid 1 on host)" in found.summary
    one(config, "leases", OK)  # within the time in which others notice


def test_tasks_of_the_dead_that_nobody_recovers(config: tasklib.Config, conn: Conn) -> None:
    """Until a reaper has been there."""
    short = replace(config, lease_seconds=0.3)
    conn.execute("select tasklib.submit('a'), tasklib.submit('a')")
    with contextlib.closing(ManualWorker(short, "dead")) as worker:
        assert len(worker.claim("a")) == 2
        conn.execute("update tasklib.workers set died_at = clock_timestamp() - interval '1 second'")
    found = one(config, "leases", CRITICAL, thresholds=AT_ONCE)
    assert found.details["tasks"] == 2
    reap(short)
    one(config, "leases", OK, thresholds=AT_ONCE)


def test_nobody_is_late_while_the_server_is_young(config: tasklib.Config, conn: Conn) -> None:
    """It was down: leases ran out because nobody could renew them, and nobody is dead before they have had the time."""
    conn.execute("select tasklib.submit('a')")
    with contextlib.closing(ManualWorker(config, "w")) as worker:
        worker.claim("a")
    long_ago = "clock_timestamp() - interval '2 days'"
    conn.execute(literal(f"update tasklib.workers set renewed_at = {long_ago}, lease_until = {long_ago}"))
    conn.execute(literal(f"update tasklib.claims set locked_until = {long_ago}"))
    one(config, "leases", OK, thresholds=Thresholds(stuck_seconds=86400))
    found = look(config, "leases", thresholds=AT_ONCE)
    assert [each.severity for each in found] == [CRITICAL, CRITICAL]


def test_a_lock_that_passed(config: tasklib.Config, conn: Conn) -> None:
    """Of a worker whose row is gone: a restore without it, or somebody's delete."""
    conn.execute("select tasklib.submit('a')")
    with contextlib.closing(ManualWorker(config, "gone")) as worker:
        worker.claim("a")
    conn.execute("delete from tasklib.workers")
    one(config, "leases", OK, thresholds=AT_ONCE)
    conn.execute("update tasklib.tasks set locked_until = clock_timestamp()")
    conn.execute("update tasklib.claims set locked_until = clock_timestamp()")
    one(config, "leases", CRITICAL, thresholds=AT_ONCE)
    reap(replace(config, lease_seconds=0.3))
    one(config, "leases", OK, thresholds=AT_ONCE)


def test_a_task_that_cannot_be_stopped(config: tasklib.Config, conn: Conn) -> None:
    """Its worker lives and renews; its thread is deaf."""
    conn.execute("select tasklib.submit('a', timeout_seconds => 5)")
    with contextlib.closing(ManualWorker(config, "deaf")) as worker:
        began = time.monotonic()
        worker.start(*worker.claim("a"))
        one(config, "leases", OK, thresholds=AT_ONCE)
        conn.execute("update tasklib.tasks set started_at = started_at - interval '20 seconds'")
        conn.execute(
            """insert into tasklib.claims (worker_id, locked_until, task_ids)
               select 'who lost it', now() + interval '1 hour', array_agg(id) from tasklib.tasks"""
        )
        found = one(config, "leases", WARNING, thresholds=AT_ONCE)
    assert 15 <= found.details["seconds"] <= round(15 + time.monotonic() - began)
    assert found.details["worker_id"] == worker.id


def test_a_lease_that_no_claim_tells_of(config: tasklib.Config, conn: Conn) -> None:
    """Nobody would ever look after it. The remedy notes it, and when its lock has passed the task is runnable."""
    conn.execute("select tasklib.submit('a')")
    with contextlib.closing(ManualWorker(config, "gone")) as worker:
        worker.claim("a")
    conn.execute("delete from tasklib.workers")
    one(config, "unnoted_leases", OK)
    conn.execute("delete from tasklib.claims")
    found = one(config, "unnoted_leases", CRITICAL)
    apply(conn, found.remedy)
    one(config, "unnoted_leases", OK)
    conn.execute("update tasklib.tasks set locked_until = clock_timestamp()")
    conn.execute("update tasklib.claims set locked_until = clock_timestamp()")
    reap(replace(config, lease_seconds=0.3))
    assert conn.execute("select state, ready from tasklib.tasks").fetchone() == ("pending", True)


def reap(config: tasklib.Config) -> None:
    with contextlib.closing(ManualWorker(config, "reaper", lives=False)) as worker:
        grown_up_reaper(config, worker.session).run_once()


# --- policies ---


def test_permits_of_workers_that_are_gone(config: tasklib.Config, conn: Conn) -> None:
    """Of a dead and of an unknown one. Not of one that lives, nor of one whose tasks wait to be recovered; nor at once,
    because the next round of the duties frees them.
    """
    conn.execute("select tasklib.set_queue('mail', '{\"max_running\": 10}')")
    insert_worker(conn, "alive")
    insert_worker(conn, "dead", died="clock_timestamp()")
    insert_worker(conn, "to_recover", died="clock_timestamp()")
    conn.execute("insert into tasklib.claims (worker_id, locked_until, task_ids) values ('to_recover', now(), '{}')")
    for worker in ("alive", "dead", "to_recover", "unknown"):
        conn.execute("select tasklib.permit('mail', %s, 2, 0)", [worker])
    one(config, "policies", OK)
    found = one(config, "policies", WARNING, thresholds=AT_ONCE)
    assert (found.details["queue"], found.details["permits"]) == ("mail", 4)
    apply(conn, found.remedy)
    one(config, "policies", OK, thresholds=AT_ONCE)
    assert conn.execute("select count(*) from tasklib.permits").fetchone() == (2,)


def test_a_pause_that_was_forgotten(config: tasklib.Config, conn: Conn) -> None:
    """For more than a day, without an end, while tasks wait."""
    conn.execute("select tasklib.pause_queue('mail', 'the provider is down', actor => 'ann')")
    one(config, "policies", OK, thresholds=AT_ONCE)  # nothing waits
    conn.execute("select tasklib.submit('a', queue => 'mail')")
    one(config, "policies", OK)
    conn.execute("update tasklib.queues set paused_at = paused_at - interval '3 days'")
    found = one(config, "policies", WARNING)
    assert "queue mail was paused 3 days ago by ann (the provider is down)" in found.summary
    conn.execute("update tasklib.queues set paused_until = now() + interval '1 hour'")
    one(config, "policies", OK)
    conn.execute("update tasklib.queues set paused_until = null")
    apply(conn, found.remedy)
    one(config, "policies", OK, thresholds=AT_ONCE)
    assert conn.execute("select is_paused from tasklib.queue_limits").fetchone() == (False,)


@pytest.mark.parametrize(
    ("policy", "queue"),
    [
        ("select tasklib.set_queue('mail', '{\"max_running\": 0}')", "mail"),
        ("select tasklib.set_cluster('{\"cluster_wide_cap\": 0}')", "*"),
    ],
)
def test_a_cap_of_nothing(config: tasklib.Config, conn: Conn, policy: str, queue: str) -> None:
    """A typing error, or a pause that has no author."""
    conn.execute(literal(policy))
    one(config, "policies", OK)  # nothing waits
    conn.execute("select tasklib.submit('a', queue => 'mail')")
    found = one(config, "policies", WARNING)
    assert found.details == {"queue": queue}
    apply(conn, found.remedy)
    one(config, "policies", OK)


@pytest.mark.parametrize(
    ("stuck", "told"),
    [
        ("open_until = now() - interval '11 minutes'", "has been half open for 11 min"),
        ("open_until = now() + interval '3 hours'", "stays open for 3 h more"),
    ],
)
def test_a_breaker_that_is_stuck(config: tasklib.Config, conn: Conn, stuck: str, told: str) -> None:
    """Nobody probes, or its time was set by another policy or another clock. One that is open for as long as it should
    be is none, nor one behind which nothing waits.
    """
    conn.execute("select tasklib.set_queue('mail', '{\"breaker_failures\": 1, \"breaker_open_seconds\": 60}')")
    conn.execute("select tasklib.report_breaker('mail', 1, 0, 1), tasklib.submit('a', queue => 'mail')")
    one(config, "policies", OK)
    conn.execute(literal(f"update tasklib.breakers set {stuck}"))
    found = one(config, "policies", WARNING)
    assert told in found.summary
    conn.execute("update tasklib.tasks set queue = 'other'")
    one(config, "policies", OK)
    conn.execute("update tasklib.tasks set queue = 'mail'")
    apply(conn, found.remedy)
    one(config, "policies", OK)
    closed = conn.execute("select breaker, breaker_epoch from tasklib.queue_limits").fetchone()
    assert closed == ("closed", 3)


def test_a_worker_that_does_not_know_the_policies(config: tasklib.Config, conn: Conn) -> None:
    """It came in while the trigger was off. A dead one does no harm, nor does one while no policy is in use."""
    insert_worker(conn, "old", features="{}")
    one(config, "policies", OK)
    conn.execute("update tasklib.policy set features = '{policies}'")
    found = one(config, "policies", CRITICAL)
    assert "old (pid 1 on host, lacks policies)" in found.summary
    conn.execute("update tasklib.workers set died_at = now()")
    one(config, "policies", OK)


# --- questions that are not answered ---


def test_a_locked_table(config: tasklib.Config, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not queue up behind the lock for long: others would queue behind it."""
    monkeypatch.setattr("tasklib.doctor.probe.LOCK_SECONDS", 0.1)
    with psycopg.connect(url) as holder:
        holder.execute("lock table tasklib.tasks")
        assert "lock" in one(config, "workers", WARNING).summary


def test_an_answer_that_takes_too_long(config: tasklib.Config, conn: Conn, url: str) -> None:
    """The server's own limit ends it, here by hand; what comes after is looked at."""
    found: list[Finding] = []
    with psycopg.connect(url) as holder:
        holder.execute("lock table tasklib.workers")
        skip = [name for name in CHECKS if name not in {"workers", "database"}]
        thread = threading.Thread(target=lambda: found.extend(run_checks(config, skip=skip, deep=True)))
        thread.start()
        waiting = """select pg_cancel_backend(pid) from pg_stat_activity
                      where application_name = 'tasklib:doctor' and wait_event_type = 'Lock'"""
        wait_until(lambda: conn.execute(waiting).fetchone() is not None, "the doctor to wait")
        thread.join()
    assert [(each.check, each.severity) for each in found] == [
        ("database", OK),
        ("workers", WARNING),
        ("unnoted_leases", OK),
    ]
    assert "no answer within" in found[1].summary


# --- the command ---


@pytest.fixture
def run(url: str, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {"DATABASE_URL": url, "PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": PYTHONPATH}
        ended = run_tasklib("doctor", *words, variables=variables | environment, directory=tmp_path)
        assert "Traceback" not in ended.stderr
        assert PASSWORD not in ended.stdout + ended.stderr
        return ended

    return run


def test_exit_codes_and_the_first_line(run: Callable[..., subprocess.CompletedProcess[str]], conn: Conn) -> None:
    """0 well, 1 warning, 2 critical, 3 nothing to look at: as Nagios reads them, with the worst in the first line."""
    well = run()
    assert (well.returncode, well.stderr) == (0, "")
    assert re.match(r"OK \(1 note, \d+ ok\)\nnote     workers        no worker is alive", well.stdout)
    conn.execute("alter role all set synchronous_commit = off")
    try:
        warned, skipped = run(), run("--skip", "durability")
    finally:
        conn.execute("alter role all reset synchronous_commit")
    assert (warned.returncode, skipped.returncode) == (1, 0)
    assert re.match(r"WARNING: durability: .* \(1 warning, 1 note, \d+ ok\)\nwarning ", warned.stdout)
    assert "-> alter role all reset synchronous_commit;\n" in warned.stdout
    dead = run(DATABASE_URL=f"postgresql://app:{PASSWORD}@127.0.0.1:1/x")
    assert dead.returncode == 2
    assert dead.stdout.startswith("CRITICAL: database: PostgreSQL cannot be reached")
    nowhere = run(DATABASE_URL="")
    assert nowhere.returncode == 3
    assert nowhere.stderr.startswith("UNKNOWN: no database is configured")


def test_the_exit_code_does_not_depend_on_who_reads(url: str, tmp_path: Path) -> None:
    """A reader that has seen enough, or a full disk, changes nothing in what was found: 1 would be a warning."""
    environment = {"DATABASE_URL": url, "PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": PYTHONPATH}
    for options, where in (
        ((), "| true"),
        (("--json",), "| true"),
        ((), ">/dev/full"),
        (("--json",), ">/dev/full"),
        ((), ">&-"),
    ):
        words = ["bash", "-o", "pipefail", "-c", f'"$@" {where}', "bash", str(COMMAND), "doctor", *options]
        ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert "Traceback" not in ended.stderr
        assert ("cannot be written" in ended.stderr) == ("full" in where)


def test_a_bug_is_no_warning(config: tasklib.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ends with 1, which would mean that it works, but not for long."""

    def stumble(*_: object) -> Iterator[Finding]:
        raise LookupError(str(config))

    monkeypatch.setattr("tasklib.doctor.run.CHECKS", {"clock": stumble})
    monkeypatch.setenv("DATABASE_URL", config.database_url)
    ended = CliRunner().invoke(app, ["doctor"])
    assert ended.exit_code == 3
    assert ended.stderr.startswith("UNKNOWN: LookupError, which is a bug of tasklib\nTraceback")


@pytest.mark.usefixtures("fresh")
def test_json_for_monitoring(run: Callable[..., subprocess.CompletedProcess[str]], conn: Conn) -> None:
    """Every check that was made, with its remedy and figures."""
    conn.execute("drop index tasklib.tasks_claim")
    ended = run("--json", "--deep")
    told = json.loads(ended.stdout)
    assert (ended.returncode, told["exit_code"], told["severity"]) == (2, 2, "critical")
    assert [each["check"] for each in told["findings"]] == [*CHECKS, *DEEP_CHECKS]
    schema = next(each for each in told["findings"] if each["check"] == "schema")
    assert set(schema) == {"check", "severity", "summary", "remedy", "details"}
    assert schema["details"]["missing"][0].startswith("table tasks index CREATE INDEX tasks_claim")
    assert "there are: database, grants" in run("--skip", "nonsense").stderr


@pytest.mark.usefixtures("fresh")
def test_names_in_the_database_cannot_write_to_a_terminal(
    run: Callable[..., subprocess.CompletedProcess[str]], conn: Conn
) -> None:
    """Who may name a table, a role or a worker could otherwise."""
    conn.execute('create index "mine\x1b[2Jw" on tasklib.tasks (name)')
    said = run().stdout
    assert "\x1b" not in said
    assert r"\x1b[2Jw" in said


def test_progress_on_a_terminal(url: str) -> None:
    """On the terminal, while it looks; what is printed is the same."""
    environment = {"DATABASE_URL": url, "PATH": os.environ["PATH"], "PYTHONPATH": PYTHONPATH, "TERM": "xterm"}
    terminal = subprocess.run(
        ["script", "-qec", f"{COMMAND} doctor", "/dev/null"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "looking at" in terminal.stdout
    assert "as tasklib made it" in terminal.stdout
