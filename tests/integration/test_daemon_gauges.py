"""The gauges of the cluster: what the elected keeper reads, how little it asks for, and what it tells."""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import tasklib
from tasklib.runtime.metrics import Counts
from tasklib.runtime.session import Session
from tasklib.statistics import MOST_COUNTED, QueueStatistics
from tasklib_daemon import gauges
from tasklib_daemon.gauges import Gauges, of_queues
from tasklib_daemon.metrics import MOST_NAMES
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.raw_sql import Conn

EMPTY = QueueStatistics("default", 0, 0, 0, 0, 0, None, None)


class Scene:
    """Gauges, and all that they have told."""

    def __init__(self, config: tasklib.Config) -> None:
        self.session = Session(config, "gauges", settings=gauges.SETTINGS)
        self.counts = Counts()
        self.told: list[dict[str, Any]] = []
        self.is_elected = True
        self.gauges = Gauges(
            config, self.session, self.counts, is_elected=lambda: self.is_elected, unserved=lambda: 3,
            send=self.told.append,
        )  # fmt: skip

    def read(self) -> dict[tuple[str, ...], float]:
        """What is told after one more reading."""
        self.gauges.run_once()
        return {(name, *labels): value for name, labels, value in self.told[-1]["samples"]}


@pytest.fixture
def scene(config: tasklib.Config) -> Iterator[Scene]:
    made = Scene(config)
    with contextlib.closing(made.session):
        yield made


def set_clock(monkeypatch: pytest.MonkeyPatch, times: Iterator[float]) -> None:
    """Of the gauges alone: what they see when they look."""
    monkeypatch.setattr("tasklib_daemon.gauges.time", SimpleNamespace(monotonic=lambda: next(times)))


def test_figures_are_those_of_the_database(scene: Scene, client: tasklib.Client) -> None:
    """Queues, what is late, tables, connections; and what the unserved_names knows."""
    for number in range(3):
        client.submit_task("work", queue="mail", number=number)
    client.submit_task("work", queue="mail", delay_seconds=60)
    found = scene.read()
    assert found["queue_tasks", "mail", "ready"] == 3
    assert found["queue_tasks", "mail", "scheduled"] == 1
    assert 0 <= found["queue_oldest_ready_age_seconds", "mail"] < 20
    assert found["due_lag_seconds",] == 0
    assert found["unserved_names",] == 3
    assert found["database_table_bytes", "tasks"] > 0
    assert 0 < found["database_connections",] < found["database_connections_limit",]
    assert found["gauges_read_duration_seconds",] > 0


def test_a_queue_that_is_empty_again_is_told_as_nought_for_an_hour(
    scene: Scene, client: tasklib.Client, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A series that ends leaves a gap on the chart; one that is never forgotten costs for ever."""
    client.submit_task("work", queue="mail")
    scene.read()
    conn.execute("delete from tasklib.tasks")
    assert scene.read()["queue_tasks", "mail", "ready"] == 0
    set_clock(monkeypatch, itertools.repeat(time.monotonic() + gauges.REMEMBER_SECONDS + 1))
    assert ("queue_tasks", "mail", "ready") not in scene.read()


def test_queues_beyond_the_bound_are_told_together() -> None:
    """The longest are told apart. A queue that is called `other` is one of the rest: each series is there once."""
    queues = [replace(EMPTY, queue=f"queue-{number}", ready=number) for number in range(MOST_NAMES["queue"] + 50)]
    queues.append(replace(EMPTY, queue="other", ready=10**6, oldest_ready_age_seconds=7.0))
    samples = [*of_queues(queues)]
    found = {(name, *labels): value for name, labels, value in samples}
    assert len(found) == len(samples) == 6 * (MOST_NAMES["queue"] + 1)
    assert found["queue_tasks", "queue-149", "ready"] == 149
    assert found["queue_tasks", "other", "ready"] == 10**6 + sum(range(50))
    assert found["queue_oldest_ready_age_seconds", "other"] == 7.0


def test_who_is_not_elected_asks_nothing(scene: Scene) -> None:
    """N daemons would tell the same depth N times. What was told in office stays, until it is too old to be shown."""
    scene.read()
    scene.is_elected = False
    told = len(scene.told)
    assert scene.gauges.run_once() == gauges.NOT_ELECTED_SECONDS
    assert not scene.session.is_connected
    scene.gauges.run_once()
    assert len(scene.told) == told
    assert not scene.session.is_connected


def test_readings_take_a_twentieth_of_the_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every few seconds; a server on which they take long is asked more seldom."""
    assert scene.gauges.run_once() == gauges.EVERY_SECONDS
    set_clock(monkeypatch, itertools.count(0.0, 2.0))
    pause = scene.gauges.run_once()
    assert pause is not None
    assert pause >= gauges.REST * 2


def test_a_reading_that_takes_too_long_is_given_up_and_the_next_counts_less(
    scene: Scene, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the server, after two seconds. It is counted, nothing is told, and after a while more is tried again."""
    conn.execute("insert into tasklib.tasks (name) select 'work' from generate_series(1, 300)")
    monkeypatch.setattr(gauges, "LEAST_COUNTED", 100)
    monkeypatch.setattr(gauges, "MOST_COUNTED", 200)
    scene.gauges = Gauges(
        tasklib.Config(conn.info.dsn), scene.session, scene.counts, is_elected=lambda: True, unserved=lambda: 0,
        send=scene.told.append,
    )  # fmt: skip
    assert scene.read()["queue_tasks", "default", "ready"] == 200
    with conn.transaction():
        conn.execute("lock tasklib.tasks in access exclusive mode")
        scene.session.connection().execute("set lock_timeout = 0; set statement_timeout = '50ms'")
        pause = scene.gauges.run_once()
    assert pause is not None
    assert pause > 0
    assert scene.counts.take() == {("gauges_failures",): [1.0]}
    assert len(scene.told) == 1
    assert scene.read()["queue_tasks", "default", "ready"] == 100
    set_clock(monkeypatch, itertools.repeat(time.monotonic() + gauges.COUNT_MORE_SECONDS + 1))
    assert scene.read()["queue_tasks", "default", "ready"] == 200


def test_the_time_and_the_counting_are_bounded(scene: Scene, conn: Conn) -> None:
    """Two seconds for a statement, half a second for a lock; and somebody hears of it."""
    settings = "select current_setting('statement_timeout'), current_setting('lock_timeout')"
    assert scene.session.connection().execute(settings).fetchone() == ("2s", "500ms")
    assert MOST_COUNTED == 1_000_000
    with conn.transaction():
        conn.execute("lock tasklib.tasks in access exclusive mode")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            scene.gauges.run_once()
    assert scene.counts.take() == {("gauges_failures",): [1.0]}


@pytest.mark.direct("opens transactions in sessions of its own")
def test_the_oldest_transaction_is_one_that_holds_up_our_vacuum(scene: Scene, conn: Conn) -> None:
    """Those of other databases of the server do not: nobody is to be got up because of them."""
    here = make_conninfo(conn.info.dsn, password=conn.info.password)
    with psycopg.connect(make_conninfo(here, dbname="postgres")) as elsewhere:
        wait_until(lambda: age(elsewhere) > 0.3)
        least = age(elsewhere)
        assert scene.read()["database_oldest_transaction_age_seconds",] < least
    with psycopg.connect(here) as ours:
        wait_until(lambda: age(ours) > 0.3)
        assert scene.read()["database_oldest_transaction_age_seconds",] > 0.3


def age(conn: Conn) -> float:
    """Of its transaction."""
    row = conn.execute("select extract(epoch from clock_timestamp() - now())::double precision").fetchone()
    assert row is not None
    return float(row[0])
