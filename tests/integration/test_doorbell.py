"""The doorbell: inserts notify only sleeping workers, and no worker sleeps while a task waits."""

from __future__ import annotations

import math
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm

import tasklib
from tasklib import TaskWorker, embedded, migrate
from tasklib.worker import sleep
from tasklib.worker.claims import Claims
from tasklib.worker.doorbell import Doorbell
from tests.support.raw_sql import Conn, literal
from tests.support.working import running, sleep_on, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.raw_sql import NewDatabase

pytestmark = [
    pytest.mark.postgres_versions,
    pytest.mark.direct("is about LISTEN, and locks of sessions"),
]

NEVER = 60.0  # seconds between polls: what is found, is found otherwise

_ASLEEP = """
select distinct pid from pg_locks
 where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())
   and classid = (hashtext('tasklib.sleep')::bigint & 4294967295)::oid and granted
"""


def sleepers(conn: Conn) -> set[int]:
    """The sessions of those that have said that they sleep."""
    return {pid for (pid,) in conn.execute(_ASLEEP)}


def asleep(conn: Conn) -> int:
    """How many have said that they sleep."""
    return len(sleepers(conn))


def wait_asleep(conn: Conn, count: int = 1) -> None:
    wait_until(lambda: asleep(conn) == count, f"{count} to be asleep")


def rings(listener: Conn) -> int:
    """How many have been sent since the last time: a notification of our own marks the end."""
    listener.execute("select pg_notify('end', '')")
    for count, notify in enumerate(listener.notifies(timeout=20)):
        if notify.channel == "end":
            return count
    raise AssertionError("the listener's own notification did not come")


@pytest.fixture
def listener(database_url: str) -> Iterator[Conn]:
    """A connection that only listens."""
    with psycopg.connect(database_url, autocommit=True) as made:
        made.execute('listen task_new; listen "end"')
        yield made


@pytest.fixture
def other(database_url: str) -> Iterator[Conn]:
    with psycopg.connect(database_url) as made:
        yield made


@pytest.fixture
def ran() -> threading.Event:
    """Set by the task `job`."""
    made = threading.Event()
    tasklib.task(name="job")(made.set)
    return made


@pytest.fixture
def never_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker takes back what it has said of its sleep, and so says nothing anew by chance."""
    monkeypatch.setattr(sleep, "BUSY_SECONDS", NEVER)


def insert(conn: Conn, queue: str = "default") -> None:
    conn.execute("insert into tasklib.tasks (name, queue) values ('job', %s)", [queue])


# --- which inserts ring ---


def test_nobody_asleep_nothing_sent(listener: Conn, conn: Conn, client: tasklib.Client) -> None:
    """A notifying commit holds a lock of the whole server."""
    client.submit_task("job")
    client.submit_many([tasklib.task(name="other")(lambda: None).new() for _ in range(100)])
    insert(conn)
    assert rings(listener) == 0


def test_one_who_sleeps_has_listener_for_once_a_statement(listener: Conn, conn: Conn, other: Conn) -> None:
    sleep_on(conn, "default")
    other.execute("insert into tasklib.tasks (name) select 'job' from generate_series(1, 50)")
    other.commit()
    assert rings(listener) == 1
    insert(other)
    other.rollback()
    assert rings(listener) == 0


@pytest.mark.parametrize(
    ("sleeps_on", "expected"), [(["default"], 0), (["busy"], 1), (["default", "busy"], 1), (["*"], 1)]
)
def test_an_idle_queue_does_not_ring_for_a_busy_one(
    listener: Conn, conn: Conn, other: Conn, sleeps_on: list[str], expected: int
) -> None:
    """A sleeping worker names its queues."""
    sleep_on(conn, *sleeps_on)
    insert(other, "busy")
    other.commit()
    assert rings(listener) == expected


def test_a_schema_has_a_doorbell_of_its_own(new_database: NewDatabase) -> None:
    url = new_database()
    for schema in ("tasklib", "another"):
        migrate.migrate(tasklib.Config(url, schema=schema))
    with psycopg.connect(url, autocommit=True) as listener, psycopg.connect(url, autocommit=True) as other:
        listener.execute('listen task_new; listen "end"')
        sleep_on(listener, "*")
        other.execute("select another.submit('job')")
        assert rings(listener) == 0
        other.execute("select tasklib.submit('job')")
        assert rings(listener) == 1


def test_a_cancelled_insert_leaves_no_lock(conn: Conn, other: Conn) -> None:
    """At whatever moment it is cancelled: the session may be a pool's, and would ring, or be rung for, for ever."""
    cancelled = 0
    for milliseconds in range(1, 41):
        other.execute(literal(f"set local statement_timeout = {milliseconds}"))
        try:
            other.execute("select tasklib.ring('default') from generate_series(1, 1000000)")
        except psycopg.errors.QueryCanceled:
            cancelled += 1
        other.rollback()
        assert conn.execute("select count(*) from pg_locks where locktype = 'advisory'").fetchone() == (0,)
    assert cancelled > 20


def submit_in_two_phases(dsn: str) -> None:
    """By SQLAlchemy, as docs/sqlalchemy.md says."""
    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    with tasklib.Client(tasklib.Config(dsn)) as client, orm.Session(engine, twophase=True) as session:
        session.execute(sqlalchemy.text("set local tasklib.doorbell = off"))
        client.submit_task("job", connection=session)
        session.commit()
    engine.dispose()


def test_prepared_transactions_with_the_doorbell_off(ran: threading.Event) -> None:
    """PostgreSQL does not prepare what has notified. Off, nothing is sent and nothing locked."""
    with embedded.postgres(settings={"max_prepared_transactions": 2}) as server:
        migrate.migrate(tasklib.Config(server.dsn))
        with psycopg.connect(server.dsn) as other, psycopg.connect(server.dsn, autocommit=True) as conn:
            sleep_on(conn, "*")
            insert(other)
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="NOTIFY"):
                other.execute("prepare transaction 'loud'")
            other.rollback()
            other.execute("set local tasklib.doorbell = off")
            insert(other)
            other.execute("prepare transaction 'silent'")
            assert sleep_on(conn, "*"), "no insert says that it is about to commit"
            conn.execute("commit prepared 'silent'")
            submit_in_two_phases(server.dsn)
            assert conn.execute("select count(*) from tasklib.tasks").fetchone() == (2,)
        TaskWorker(tasklib.Config(server.dsn)).run_until_empty_sync()
    assert ran.is_set()


# --- when a worker sleeps ---


def test_a_task_of_one_who_looked_before_somebody_slept_is_found(
    config: tasklib.Config, conn: Conn, other: Conn, ran: threading.Event
) -> None:
    """That insert notifies no worker. The worker knows of an open insert, and looks again, less and less often."""
    insert(other)
    began = time.monotonic()
    with running(config, poll_interval_seconds=NEVER) as worker:
        wait_asleep(conn)
        run = worker._run
        assert run is not None
        wait_until(lambda: run.claimer._sleep.doorbell.until_asked() > 0.25, "its pauses to grow")
        assert 5 < run.loops["claim"].beats < 25, "the pauses double: an open transaction must not make it spin"
        assert not ran.is_set()
        other.commit()
        assert ran.wait(2 * (time.monotonic() - began) + 20)  # the longer it was open, the longer is the pause


def test_rings_do_not_use_up_the_doubt(
    config: tasklib.Config, conn: Conn, other: Conn, client: tasklib.Client, ran: threading.Event, never_busy: None
) -> None:
    """Other submits make the worker look. When it asks for open inserts again depends on the clock alone."""
    insert(other)
    tasklib.task(name="more")(lambda: None)
    with running(config, poll_interval_seconds=NEVER):
        wait_asleep(conn)
        began = time.monotonic()
        for _ in range(30):
            wait_final(client, client.submit_task("more"))
        other.commit()
        assert ran.wait(2 * (time.monotonic() - began) + 20)  # thirty rings would double the pause up to the poll


def test_a_task_of_one_who_looks_after_somebody_slept_rings(
    config: tasklib.Config, conn: Conn, other: Conn, ran: threading.Event
) -> None:
    """However long its transaction is open."""
    with running(config, poll_interval_seconds=NEVER) as worker:
        wait_asleep(conn)
        run = worker._run
        assert run is not None
        wait_until(lambda: not run.claimer._sleep.doorbell.is_in_doubt, "it to be sure")
        insert(other)
        assert run.claimer._sleep.doorbell.until_asked() == math.inf, "nothing but the ring makes it look"
        other.commit()
        assert ran.wait(20)


def test_what_is_committed_between_the_look_and_the_sleep_is_found(
    config: tasklib.Config, conn: Conn, ran: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks once more after it has said that it sleeps."""
    arm = Doorbell.arm
    inserted: list[int] = []

    def late(self: Doorbell) -> None:
        if not inserted:
            inserted.append(asleep(conn))
            insert(conn)
        arm(self)

    with running(config, poll_interval_seconds=NEVER) as worker:
        wait_asleep(conn)
        worker.pause()  # it wakes
        wait_asleep(conn, 0)
        monkeypatch.setattr(Doorbell, "arm", late)
        worker.resume()
        assert ran.wait(20)
    assert inserted == [0]


def test_one_who_is_looking_for_sleepers_does_not_keep_a_worker_from_sleep(
    config: tasklib.Config, conn: Conn, other: Conn, ran: threading.Event
) -> None:
    """An insert holds the lock for a moment, so the worker tries again soon."""
    other.execute("select pg_advisory_xact_lock(hashtext('tasklib.sleep'), hashtext('*'))")
    with running(config, poll_interval_seconds=NEVER) as worker:
        run = worker._run
        assert run is not None
        wait_until(lambda: run.claimer._sleep.doorbell.until_asked() < math.inf, "it to have tried in vain")
        assert asleep(conn) == 1, "only the insert that looks for sleepers"
        other.rollback()
        wait_asleep(conn)
        insert(conn)
        assert ran.wait(20)


def test_a_busy_worker_is_not_rung_for_and_misses_nothing(
    config: tasklib.Config, client: tasklib.Client, conn: Conn, listener: Conn, ran: threading.Event
) -> None:
    """It has no room, and looks when it has."""
    release = threading.Event()
    tasklib.task(name="long")(lambda: release.wait(20))
    with running(config, poll_interval_seconds=NEVER):
        wait_asleep(conn)
        client.submit_task("long")
        wait_asleep(conn, 0)
        rings(listener)
        client.submit_task("job")
        assert rings(listener) == 0
        release.set()
        assert ran.wait(20)
        wait_asleep(conn)


def test_a_steady_load_does_not_ring(
    config: tasklib.Config, client: tasklib.Client, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has room all the time, and work without a break: it looks by itself, and sleeps when that ends."""
    monkeypatch.setattr(sleep, "BREAK_SECONDS", 1.0)  # on a busy machine this test pauses for a moment between submits
    done: list[int] = []
    submitted: list[int] = []
    tasklib.task(name="quick")(lambda: done.append(1))
    with running(config, concurrency=50, poll_interval_seconds=NEVER):
        wait_asleep(conn)
        deadline = time.monotonic() + 20
        while asleep(conn):  # it asks to be rung for
            assert time.monotonic() < deadline
            conn.execute("select tasklib.submit('quick')")
            submitted.append(1)
        wait_until(lambda: len(done) == len(submitted), "all of them")
        wait_asleep(conn)
        client.submit_task("quick")
        wait_until(lambda: len(done) == len(submitted) + 1, "one more")


def test_a_database_that_is_slow_to_answer_makes_nobody_busy(
    config: tasklib.Config, client: tasklib.Client, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that takes long is one look: else it would say anew that it sleeps, and look again, after every task."""
    claim, disarm = Claims._claim, Doorbell.disarm
    taken_back: list[Doorbell] = []

    def slowly(self: Claims, *args: Any) -> Any:
        time.sleep(2 * sleep.BUSY_SECONDS)
        return claim(self, *args)

    def counted(self: Doorbell) -> None:
        if self.is_armed:
            taken_back.append(self)
        disarm(self)

    monkeypatch.setattr(Claims, "_claim", slowly)
    monkeypatch.setattr(Doorbell, "disarm", counted)
    tasklib.task(name="quick")(lambda: None)
    with running(config, concurrency=5, poll_interval_seconds=NEVER) as worker:
        wait_asleep(conn)
        run = worker._run
        assert run is not None
        for _ in range(5):
            wait_until(lambda: run.claimer._sleep.asleep_since < time.monotonic() - 0.05, "it to sleep")
            wait_final(client, client.submit_task("quick"))
        assert taken_back == []


def test_a_paused_worker_is_not_rung_for(
    config: tasklib.Config, client: tasklib.Client, conn: Conn, ran: threading.Event
) -> None:
    with running(config, poll_interval_seconds=NEVER) as worker:
        wait_asleep(conn)
        worker.pause()
        wait_asleep(conn, 0)
        client.submit_task("job")
        worker.resume()
        assert ran.wait(20)


def test_one_whom_nobody_wakes_does_not_say_that_it_sleeps(
    config: tasklib.Config, client: tasklib.Client, conn: Conn, ran: threading.Event
) -> None:
    """Without a listener, unless another process listens for it."""
    with running(config, listen=False, poll_interval_seconds=0.05) as worker:
        client.submit_task("job")
        assert ran.wait(20)
        run = worker._run
        assert run is not None
        beats = run.loops["claim"].beats
        wait_until(lambda: run.loops["claim"].beats > beats + 3, "it to sleep and wake")
        assert asleep(conn) == 0
        worker.has_listener = True
        wait_asleep(conn)
        worker.has_listener = False
        wait_asleep(conn, 0)


def test_a_lost_connection_is_said_anew(
    config: tasklib.Config, client: tasklib.Client, conn: Conn, ran: threading.Event, never_busy: None
) -> None:
    """While it sleeps it does not notice: the next poll does, and says again that it sleeps."""
    with running(config, poll_interval_seconds=1.0):
        wait_asleep(conn)
        before = sleepers(conn)
        conn.execute(
            """select pg_terminate_backend(pid) from pg_stat_activity
                where datname = current_database() and application_name = 'tasklib:claim'"""
        )
        wait_until(lambda: not sleepers(conn) & before, "what was said to be lost")
        client.submit_task("job")
        assert ran.wait(20)
        wait_asleep(conn)


def test_nothing_is_left_when_it_stops(config: tasklib.Config, conn: Conn) -> None:
    with running(config):
        wait_asleep(conn)
    wait_asleep(conn, 0)


def test_transactions_of_all_lengths_around_short_sleeps_lose_nothing(config: tasklib.Config) -> None:
    """A worker that falls asleep again and again, and never polls: all are found soon after the last commit."""
    done: list[int] = []
    tasklib.task(name="quick")(lambda: done.append(1))

    def submit_some(seed: int) -> int:
        dice = random.Random(seed)
        with psycopg.connect(config.database_url) as own:
            for _ in range(100):
                own.execute("select tasklib.submit('quick')")
                time.sleep(dice.choice([0, 0, 0.001, 0.004, 0.02]))
                own.commit()
                time.sleep(dice.choice([0, 0, 0.002, 0.01, 0.03]))
        return 100

    with running(config, concurrency=4, poll_interval_seconds=NEVER), ThreadPoolExecutor(3) as pool:
        submitted = sum(pool.map(submit_some, range(3)))
        wait_until(lambda: len(done) == submitted, "all of them")
