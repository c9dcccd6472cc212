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
from tasklib.statistics import MOST_COUNTED, PolicyReading, QueueStatistics, StatisticsStatements
from tasklib_daemon import gauges
from tasklib_daemon.gauges import Gauges, of_policies, of_queues
from tasklib_daemon.metrics import MOST_NAMES
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.raw_sql import Conn

EMPTY = QueueStatistics("default", 0, 0, 0, 0, 0, None, None)
NO_LIMIT = PolicyReading("mail", False, None, 0, 0, 0, None, None, None)


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


# --- policies ---


def of_queue(found: dict[tuple[str, ...], float], queue: str) -> dict[str, float]:
    """What is told of one queue's policy, without the prefix."""
    return {
        key[0].removeprefix("queue_"): value
        for key, value in found.items()
        if key[1:] == (queue,) and key[0] != "queue_oldest_ready_age_seconds"
    }


def test_a_cluster_without_policies_tells_of_none(scene: Scene, client: tasklib.Client) -> None:
    client.submit_task("work", queue="mail")
    assert of_queue(scene.read(), "mail") == {}


def test_a_policy_is_told_as_it_holds_now(scene: Scene, client: tasklib.Client, conn: Conn) -> None:
    """A queue that only has a row has no cap, no rate and no breaker. A pause that is over is none."""
    conn.execute("select tasklib.set_queue('mail')")
    assert of_queue(scene.read(), "mail") == {"waiting": 0, "paused": 0, "permits_forgotten": 0}
    client.submit_task("work", queue="mail")
    conn.execute("select tasklib.pause_queue('mail')")
    assert of_queue(scene.read(), "mail") == {"waiting": 1, "paused": 1, "permits_forgotten": 0}
    conn.execute("update tasklib.queues set (paused_at, paused_until) = (now() - interval '1 hour', now())")
    assert scene.read()["queue_paused", "mail"] == 0


def test_permits_are_told_with_those_that_nobody_will_give_back(scene: Scene, conn: Conn) -> None:
    """Of three workers, one lives, one is dead, and one is unknown. The last one is hungry."""
    conn.execute("select tasklib.set_queue('mail', '{\"max_running\": 10}')")
    for worker, wants in (("alive", 2), ("dead", 3), ("unknown", 9)):
        conn.execute("select tasklib.permit('mail', %s, %s, 0)", [worker, wants])
    conn.execute(
        """insert into tasklib.workers (worker_id, name, hostname, pid, process_name, task_names, concurrency,
                                        lease_until, died_at, features)
           select id, 'w', 'host', 1, 'p', '{}', 1, now() + interval '1 hour', died_at, '{policies}'
             from (values ('alive', null), ('dead', now())) as given (id, died_at)"""
    )
    told = of_queue(scene.read(), "mail")
    assert (told["cap"], told["permits"], told["permits_wanted"], told["permits_forgotten"]) == (10, 10, 4, 8)


def test_the_cap_over_all_queues_is_told_as_one_of_a_queue(scene: Scene, client: tasklib.Client, conn: Conn) -> None:
    conn.execute("select tasklib.set_cluster('{\"cluster_wide_cap\": 5}'), tasklib.permit('*', 'a', 2, 0)")
    client.submit_task("work")
    assert of_queue(scene.read(), "*") == {
        "waiting": 1, "paused": 0, "cap": 5, "permits": 2, "permits_wanted": 0, "permits_forgotten": 2
    }  # fmt: skip


def test_a_breaker_is_told_by_its_state(scene: Scene, conn: Conn) -> None:
    """While it is not closed it is the cap, too."""
    conn.execute("select tasklib.set_queue('mail', '{\"breaker_failures\": 1, \"breaker_probes\": 2}')")
    assert scene.read()["queue_breaker_state", "mail"] == 0
    conn.execute("select tasklib.report_breaker('mail', 1, 0, 1)")
    told = of_queue(scene.read(), "mail")
    assert (told["breaker_state"], told["cap"]) == (2, 0)
    conn.execute("update tasklib.breakers set open_until = now()")
    told = of_queue(scene.read(), "mail")
    assert (told["breaker_state"], told["cap"]) == (1, 2)


RATES = {
    "never asked": ('{"rate_limit": 5, "rate_seconds": 3600}', []),
    "some are left": ('{"rate_limit": 5, "rate_seconds": 3600}', [3]),
    "none is left": ('{"rate_limit": 5, "rate_seconds": 3600}', [3, 2]),
    "the burst is used": ('{"rate_limit": 6, "rate_seconds": 3600, "rate_burst": 2}', [2]),
    "one of the burst is left": ('{"rate_limit": 6, "rate_seconds": 3600, "rate_burst": 2}', [1]),
    "both are used": ('{"rate_limit": 2, "rate_seconds": 3600, "rate_burst": 1}', [1, 1]),
}


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("older", [0, 1, 5, 61])
def test_the_room_of_a_rate_is_what_would_be_granted(scene: Scene, conn: Conn, rate: str, older: int) -> None:
    """And the wait is the one that a worker would be told, also if the grants are so many minutes old."""
    policy, grants = RATES[rate]
    conn.execute("select tasklib.set_queue('mail', %s::jsonb)", [policy])
    for wants in grants:
        conn.execute("select tasklib.grant_starts('mail', %s)", [wants])
    conn.execute(
        """update tasklib.rates
              set at = array(select each - %s * interval '1 minute' from unnest(at) as each),
                  full_at = full_at - %s * interval '1 minute'""",
        [older, older],
    )
    told = of_queue(scene.read(), "mail")
    granted, wait = (
        conn.execute("select granted, next_seconds from tasklib.grant_starts('mail', 1000)").fetchone() or ()
    )
    assert told["rate_available_starts"] == granted
    assert told["rate_wait_seconds"] == (0 if granted else pytest.approx(wait, abs=5))


def test_queues_with_a_policy_are_told_up_to_a_bound() -> None:
    """Those in which tasks wait come first. `other` is neither paused nor open."""
    most = MOST_NAMES["queue"]
    policies = [replace(NO_LIMIT, queue=f"queue-{number:03}") for number in range(most)]
    policies += [replace(NO_LIMIT, queue="waits", is_paused=True), replace(NO_LIMIT, queue="other", is_paused=True)]
    samples = [*of_policies(policies, [replace(EMPTY, queue="waits", ready=1), replace(EMPTY, queue="other", ready=9)])]
    found = {(name, *labels): value for name, labels, value in samples}
    assert len(found) == len(samples) == 3 * most
    assert (found["queue_paused", "waits"], found["queue_waiting", "waits"]) == (1, 1)
    assert ("queue_paused", "other") not in found
    assert ("queue_paused", f"queue-{most - 1:03}") not in found


def test_policies_cost_one_statement_that_reads_no_task(scene: Scene, conn: Conn) -> None:
    """It is answered while nobody may look at the tasks."""
    with conn.transaction():
        conn.execute("lock tasklib.tasks in access exclusive mode")
        assert scene.session.run(StatisticsStatements(tasklib.Config("")).policies()) == []


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
