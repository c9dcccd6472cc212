"""One bad row never fails its batch, for every duty: rows with extreme but storable values in every column lie beside
healthy ones, and what is healthy is recovered, promoted, expired, pruned and run.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import tasklib
from tasklib import migrate
from tasklib.doctor import Severity, run_checks
from tasklib.duties.expirer import Expirer
from tasklib.duties.janitor import Janitor, Retention
from tasklib.duties.promoter import Promoter
from tasklib.duties.rollups import Rollups
from tasklib.duties.snapshots import ClaimSettings, Snapshots, WorkerState
from tasklib.duties.statements import KeeperStatements
from tasklib.duties.unserved_names import UnservedNames
from tasklib.outcomes import Crashed, Rules, decide
from tasklib.runtime.outcome_writer import Decided, RecoveryWriter
from tasklib.runtime.session import Session
from tasklib.statements import WorkerStatements
from tasklib_daemon.crashes import CrashReport, Executing, Recoveries
from tasklib_daemon.election import Election
from tests.support import extreme_rows
from tests.support.extreme_rows import EXTREMES, KINDS, NAME, OF_THE_KIND, insert, poison
from tests.support.raw_sql import literal
from tests.support.working import ManualWorker, grown_up_reaper, running
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from uuid import UUID

    from tasklib.runtime.metrics import Amounts
    from tests.support.raw_sql import Conn, NewDatabase

pytestmark = [
    pytest.mark.postgres_versions,
    pytest.mark.direct("the extremes are the rows' and not the connections'"),
]

BOUNDS = {
    "tasks": ("tasks_timeout_positive", "tasks_counts_whole", "tasks_times_in_calendar"),
}


@pytest.fixture(params=["bounded", "from before"])
def era(request: pytest.FixtureRequest, conn: Conn) -> Iterator[Callable[[], None]]:
    """Rows that keep the bounds; and rows that were stored before there were any, which nobody can change now. Called
    when they are there.
    """
    ((definitions,),) = conn.execute(DEFINITIONS, [list(BOUNDS["tasks"])]).fetchall()
    drop = ", ".join(f"drop constraint {name}" for name in definitions)
    add = ", ".join(f"add constraint {name} {text}" for name, text in definitions.items())
    assert len(definitions) == len(BOUNDS["tasks"])
    if request.param == "bounded":
        yield lambda: None
        return
    conn.execute(literal(f"alter table tasklib.tasks {drop}"))

    def bound() -> None:
        conn.execute(literal(f"alter table tasklib.tasks {add}"))

    yield bound
    conn.execute("delete from tasklib.tasks")
    conn.execute(literal(f"alter table tasklib.tasks {drop.replace('drop constraint', 'drop constraint if exists')}"))
    bound()


DEFINITIONS = """
select jsonb_object_agg(conname, pg_get_constraintdef(oid)) from pg_constraint
 where conrelid = 'tasklib.tasks'::regclass and conname = any(%s)
"""


@pytest.fixture
def session(config: tasklib.Config) -> Iterator[Session]:
    made = Session(config, "duties", settings="-c lock_timeout=2s")
    yield made
    made.close()


@pytest.fixture
def statements(config: tasklib.Config) -> WorkerStatements:
    return WorkerStatements(config)


def states(conn: Conn, ids: list[UUID]) -> set[tuple[str, bool]]:
    return set(conn.execute("select state, ready from tasklib.tasks where id = any(%s)", [ids]).fetchall())


def die(conn: Conn, *, worker_id: str = "dead") -> None:
    conn.execute(
        """insert into tasklib.workers (worker_id, name, hostname, pid, process_name, task_names, concurrency,
                                        lease_until, died_at)
           values (%s, 'w', 'h', 1, 'p', '{}', 1, clock_timestamp(), clock_timestamp())""",
        [worker_id],
    )


def test_every_column_is_tried(conn: Conn) -> None:
    """A new column has to say what its extremes are."""
    columns = "select attname from pg_attribute where attrelid = 'tasklib.tasks'::regclass and attnum > 0"
    assert {name for (name,) in conn.execute(columns)} == set(EXTREMES) | OF_THE_KIND


def test_every_number_has_a_bound(conn: Conn) -> None:
    """Whatever could not be computed with is refused when it is written."""
    for column in ("attempt", "crash_count", "strikes", "fencing_token", "timeout_seconds"):
        assert insert(conn, "ready", {column: EXTREMES[column][-1]}) is None, column
        assert insert(conn, "ready", {column: "1"}) is not None, column
    for column in ("started_at", "claimed_at", "locked_until", "cancel_asked_at"):
        for value in extreme_rows.TIMES[:4]:
            assert insert(conn, "running", {column: value}) is None, (column, value)
    assert insert(conn, "old", {"completed_at": "'infinity'"}) is None


def test_the_reaper_recovers_the_others(conn: Conn, database_url: str, era: Callable[[], None]) -> None:
    """Of a dead worker: what it had claimed and what it ran is ready again, what was asked to stop is cancelled."""
    config = tasklib.Config(database_url, lease_seconds=0.5)
    made = poison(conn, ["claimed", "running", "asked"])
    era()
    die(conn)
    session = Session(config, "reaper", settings="-c lock_timeout=2s")
    grown_up_reaper(config, session).run_once()
    session.close()
    assert states(conn, made["claimed"] + made["running"]) == {("pending", True)}
    assert states(conn, made["asked"]) == {("cancelled", False)}


def test_the_keeper_recovers_the_others(
    conn: Conn, config: tasklib.Config, session: Session, statements: WorkerStatements, era: Callable[[], None]
) -> None:
    """Of a worker whose death was seen, with what it executed."""
    made = poison(conn, ["claimed", "running", "asked"])
    era()
    executing = tuple(Executing(task_id, 7, 1e18) for task_id in made["running"][:1])
    report = CrashReport(
        worker_id="dead", name="w", hostname="h", pid=1, slot=0, how="killed by signal 9", cause="crash",
        executing=executing,
    )  # fmt: skip
    healthy_report = replace(report, worker_id="dead-2", executing=())
    keeper_statements = KeeperStatements(config)
    recoveries = Recoveries(config, session, statements, keeper_statements)
    recoveries.add(report)
    other = insert(conn, "running", {"worker_id": "'dead-2'"})
    assert other is not None
    recoveries.add(healthy_report)
    recoveries.run_once()
    assert not recoveries.is_waiting
    assert states(conn, made["claimed"] + made["running"][1:]) == {("pending", True)}
    assert states(conn, made["asked"]) == {("cancelled", False)}
    assert states(conn, [other]) == {("pending", True)}


def test_the_promoter_promotes_the_others(
    conn: Conn, session: Session, statements: WorkerStatements, era: Callable[[], None]
) -> None:
    """What is due, and what waits for its retry."""
    made = poison(conn, ["due", "retrying"])
    era()
    promoter = Promoter(session, statements)
    wait_until(lambda: promoter.promote().promoted == 0, "everything to be promoted")
    assert {ready for _, ready in states(conn, made["due"] + made["retrying"])} == {True}


def test_the_expirer_ends_the_others(
    conn: Conn, session: Session, statements: WorkerStatements, era: Callable[[], None]
) -> None:
    """What was not started in time."""
    made = poison(conn, ["late"])
    era()
    expirer = Expirer(session, statements)
    wait_until(lambda: expirer.run_once() != 0.0, "everything to be expired")
    assert states(conn, made["late"]) == {("expired", False)}


def test_the_janitor_prunes_the_others(
    conn: Conn, config: tasklib.Config, session: Session, era: Callable[[], None]
) -> None:
    """What is old. Also if a table of the user's refers to one of them, which then stays."""
    made = poison(conn, ["old", "failed"])
    era()
    kept = made["old"].pop()
    conn.execute("create table receipts (task_id uuid references tasklib.tasks)")
    try:
        conn.execute("insert into receipts values (%s)", [kept])
        janitor = Janitor(session, KeeperStatements(config), Retention())
        wait_until(lambda: janitor.run_once() == 3600, "a pass")
        assert states(conn, made["old"] + made["failed"]) == set()
        assert states(conn, [kept]) == {("completed", False)}
    finally:
        conn.execute("drop table receipts")


def test_the_census_and_the_statistics_answer(
    conn: Conn, config: tasklib.Config, session: Session, statements: WorkerStatements, era: Callable[[], None]
) -> None:
    """And the doctor, whose questions are all answered."""
    poison(conn, [*KINDS])
    era()
    die(conn)
    conn.execute("update tasklib.workers set died_at = null, lease_until = 'infinity', concurrency = 1000000000")
    unserved_names = UnservedNames(session, statements)
    unserved_names.run_once()
    assert "nobodys" in unserved_names.unserved or NAME in unserved_names.unserved
    with tasklib.Client(config) as client:
        assert {each.queue for each in client.queue_statistics()} >= {"default"}
        client.task_statistics()
        assert client.backlog() > 0
    found = run_checks(config, deep=True)
    assert [each for each in found if "refused to answer" in each.summary or "not to be seen" in each.summary] == []


def test_a_worker_runs_the_others(conn: Conn, config: tasklib.Config, era: Callable[[], None]) -> None:
    """It claims, marks, finishes, promotes, and recovers, whatever lies at the head of its queue."""

    def healthy(**_: Any) -> None:
        time.sleep(0.06)  # long enough to be marked as running

    tasklib.task(name=NAME)(healthy)
    made = poison(conn, ["ready", "due"], count=30, healthy=10)
    era()
    ids = made["ready"] + made["due"]
    with running(config, concurrency=50):
        wait_until(
            lambda: {state for state, _ in states(conn, ids)} == {"completed"}, "what is healthy to be run", seconds=60
        )


@pytest.mark.parametrize("refusal", ["check", "trigger"])
def test_a_row_that_cannot_be_claimed_is_named(
    conn: Conn, config: tasklib.Config, caplog: pytest.LogCaptureFixture, refusal: str
) -> None:
    """It lies at the head of the queue, and no claim can take it. The others run, and an error says which it is."""
    tasklib.task(name=NAME)(lambda: None)
    bad = insert(conn, "ready", {"priority": "100", "fencing_token": "4611686018427387904"})
    if refusal == "trigger":
        conn.execute("update tasklib.tasks set fencing_token = 5 where id = %s", [bad])
        conn.execute(MAKE_TRIGGER)
        conn.execute(literal(f"alter function refuse() set tests.refused = '{bad}'"))
    good = [insert(conn, "ready", {}) for _ in range(20)]
    try:
        with running(config, concurrency=4):
            wait_until(lambda: states(conn, [each for each in good if each]) == {("completed", False)}, "the others")
    finally:
        conn.execute("drop function if exists refuse() cascade")
    told = [record for record in caplog.records if "task.not_claimed" in record.getMessage()]
    assert told
    assert all(str(bad) in record.getMessage() for record in told)


MAKE_TRIGGER = """
create function refuse() returns trigger language plpgsql as $$
begin
    if new.id::text = current_setting('tests.refused') then
        raise exception using errcode = 'MY001', message = 'not this one';
    end if;
    return new;
end
$$;
create trigger refuse before update on tasklib.tasks for each row execute function refuse();
"""


def test_statistics_of_the_others_are_written(conn: Conn, config: tasklib.Config, session: Session) -> None:
    """A row of this minute that has no room for more keeps no other function's counts from being written."""
    for minutes in (0, 1):
        conn.execute(
            """insert into tasklib.task_rollups (minute, name, queue, completed)
               select date_trunc('minute', clock_timestamp()) + %s * interval '1 minute', 'full', 'q', 1000000000000""",
            [minutes],
        )
    counted: Amounts = {("finished", name, "q", "completed"): [1.0] for name in ("a", "full", "z")}
    rollups = Rollups(config, session, lambda: counted)
    rollups.run_once()
    written: dict[str, int] = dict(
        conn.execute("select name, sum(completed) from tasklib.task_rollups group by 1").fetchall()
    )
    assert (written["a"], written["z"]) == (1, 1)
    assert rollups._unwritten == {}


def test_snapshots_of_the_others_are_written(conn: Conn, config: tasklib.Config, session: Session) -> None:
    """One worker whose figures make no sense is left out."""
    workers = [
        WorkerState("a", "h", 1, 0, 0, memory_bytes=1),
        WorkerState("bad", "h", -1, 0, 0, cpu_percent=float("nan")),
        WorkerState("c", "h", 1, 0, 0),
    ]
    Snapshots(session, KeeperStatements(config), ClaimSettings(None, 1, None, {}), take=lambda: workers).run_once()
    assert {name for (name,) in conn.execute("select worker_id from tasklib.worker_states")} == {"a", "c"}


@pytest.mark.parametrize("until", ["'infinity'", "clock_timestamp() + interval '3 years'"])
def test_an_election_that_would_never_end_ends(
    conn: Conn, config: tasklib.Config, session: Session, until: str
) -> None:
    """The clock was set back, or somebody wrote it by hand: without it nobody would do any duty."""
    conn.execute(literal(f"insert into tasklib.elections values ('duties', 'gone', 4611686018427387904, {until})"))
    election = Election(session, KeeperStatements(config), name="duties", holder="me", ttl_seconds=60)
    election.run_once()
    assert election.is_held()


def test_a_lock_on_another_row_sets_one_task_aside(
    conn: Conn, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A settlement needs a row that is none of its own, which a trigger writes, for instance, and somebody holds that.
    Its tasks are found by halving, in a number of statements that is bounded, and the others are recovered.
    """
    config = tasklib.Config(database_url)
    conn.execute("create table counters (name text primary key, value integer not null)")
    conn.execute("insert into counters values ('blocked', 0), ('free', 0)")
    conn.execute(MAKE_COUNTING)
    worker = ManualWorker(config, "w")
    session = Session(config, "reaper", settings="-c lock_timeout=100ms")
    try:
        conn.execute("insert into tasklib.tasks (name, step_name) select 'job', 'free' from generate_series(1, 30)")
        conn.execute("update tasklib.tasks set step_name = 'blocked' where id = (select id from tasklib.tasks limit 1)")
        claimed = worker.claim("job", limit=100)
        ((now,),) = conn.execute("select clock_timestamp()").fetchall()
        writer = RecoveryWriter(session, WorkerStatements(config))
        with psycopg.connect(database_url) as holder:
            holder.execute("select from counters where name = 'blocked' for update")
            decided = writer.decide(
                [each.held for each in claimed],
                lambda task: Decided(task, decide(task, Crashed("died"), now, Rules()), None),
            )
            sent = count_statements(session)
            assert writer.recover(worker.id, decided, now) == 29
            assert sum(sent) < 20
        assert any("recovery.blocked" in record.getMessage() for record in caplog.records)
        assert writer.recover(worker.id, decided, now) == 1
    finally:
        session.close()
        worker.close()
        conn.execute("drop function count_settled() cascade; drop table counters")


MAKE_COUNTING = """
create function count_settled() returns trigger language plpgsql as $$
begin
    update public.counters set value = value + 1 where name = new.step_name;
    return new;
end
$$;
create trigger count_settled before update on tasklib.tasks for each row
    when (old.worker_id is not null and new.worker_id is null) execute function count_settled();
"""


def count_statements(session: Session) -> list[int]:
    sent: list[int] = []
    run = session.run

    def counting(statement: Any, lock_seconds: float | None = None) -> Any:
        sent.append(1)
        return run(statement, lock_seconds)

    session.run = counting  # type: ignore[method-assign]
    return sent


def test_rows_beyond_the_bounds_are_brought_to_them(new_database: NewDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that was used before there were bounds: its rows are as before, but for what nobody could use."""
    config = tasklib.Config(new_database())
    known = migrate.known_migrations()
    with monkeypatch.context() as patch:
        patch.setattr(migrate, "known_migrations", lambda: [each for each in known if each.version != 9])
        migrate.migrate(config)  # all but the bounds: the functions of today need the tables of today
    with psycopg.connect(config.database_url, autocommit=True) as conn:
        ((definition,),) = conn.execute(DEFINITIONS, [["tasks_times_in_calendar"]]).fetchall()  # by a later migration
        conn.execute("alter table tasklib.tasks drop constraint tasks_times_in_calendar")
        poison(conn, [*KINDS], count=20)
        conn.execute(
            "update tasklib.tasks set deadline_at = null where deadline_at is not null"
        )  # there were none then
        count = conn.execute("select count(*) from tasklib.tasks").fetchone()
        conn.execute("insert into tasklib.elections values ('duties', 'x', 9223372036854775807, now())")
        conn.execute(
            "insert into tasklib.task_rollups (minute, name, queue, completed, seconds, durations)"
            " values (now(), 'n', 'q', 9223372036854775807, 'NaN', '{-1}')"
        )
        migrate.migrate(config)
        conn.execute(
            literal(
                "alter table tasklib.tasks drop constraint tasks_times_in_calendar,"
                f" add constraint tasks_times_in_calendar {definition['tasks_times_in_calendar']}"
            )
        )
        assert all(each.severity != Severity.CRITICAL for each in run_checks(config) if each.check == "schema")
        assert conn.execute("select count(*) from tasklib.tasks").fetchone() == count
        for name in BOUNDS["tasks"]:
            conn.execute(literal(f"alter table tasklib.tasks validate constraint {name}"))
        assert conn.execute("select from tasklib.tasks where timeout_seconds = 3153600000").fetchone() is not None
        with tasklib.Client(config) as client:
            client.list_tasks(limit=10_000)
