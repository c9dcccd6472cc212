"""The metrics of real daemons: under failures and crashes, without a database, and asked for again and again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import tasklib
from tasklib import embedded, migrate
from tests.daemon_app import mixed
from tests.support.promtool import Series, by_labels, check_metrics, needs_promtool, value
from tests.support.recount import differences
from tests.support.scraping import ask, free_port, scrape
from tools.daemons import daemon
from tools.waiting import START_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.raw_sql import Conn, NewDatabase
    from tools.daemons import Daemon

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc"),
    pytest.mark.direct("recounts what workers wrote, whose backends are ended by their numbers"),
]
APP: dict[str, Any] = {"app": ["tests.daemon_app.mixed"], "concurrency": 4}


@pytest.fixture
def books(new_database: NewDatabase) -> Iterator[Conn]:
    """A database in which nothing was counted before."""
    config = tasklib.Config(new_database())
    migrate.migrate(config)
    with psycopg.connect(config.database_url, autocommit=True) as conn:
        conn.execute("create table public.books (text text)")
        yield conn


def url(conn: Conn) -> str:
    return conn.info.dsn + f" password={conn.info.password}" if conn.info.password else conn.info.dsn


def submit_all(client: tasklib.Client, dice: random.Random, count: int) -> None:
    client.submit_many([mixed.draw(dice) for _ in range(count)])


def kill_a_worker(made: Daemon, dice: random.Random, killed: set[int]) -> None:
    """One that was not killed before: that it is dead may not be known yet."""

    def left() -> list[int]:
        return [each["pid"] for each in made.workers() if each["pid"] not in killed]

    wait_until(lambda: bool(left()), "a worker that can be killed")
    pid = dice.choice(left())
    killed.add(pid)
    with contextlib.suppress(ProcessLookupError):  # it has crashed meanwhile
        os.kill(pid, signal.SIGKILL)


def test_counters_agree_with_a_recount_by_sql(books: Conn) -> None:
    """Under a mixed load, while workers are killed and crash: every attempt is counted once, also one whose worker did
    not live to count it. And the statistics by the minute have them all when the daemon has stopped.
    """
    dice = random.Random(7)
    killed: set[int] = set()
    port = free_port()
    unfinished = "select count(*) from tasklib.tasks where completed_at is null"
    with (
        daemon(url(books), workers=3, web={"port": port}, bury_after=2, **APP) as made,
        tasklib.Client(tasklib.Config(url(books))) as client,
    ):
        client.submit(mixed.crash.new())
        for _ in range(10):
            submit_all(client, dice, 60)
            time.sleep(dice.uniform(0.05, 0.25))  # so that it is hit at any moment of a batch
            kill_a_worker(made, dice, killed)
        wait_until(lambda: books.execute(unfinished).fetchone() == (0,), "all to end", seconds=40)
        with contextlib.suppress(AssertionError):  # the last counts take a second
            wait_until(lambda: differences(books, scrape(port)) == [])
        series = scrape(port)
        assert differences(books, series) == []
        assert by_labels(series, "tasklib_worker_deaths_total", "cause")["crash",] >= len(killed)
        recoveries = value(series, "tasklib_recovery_duration_seconds_count")
        assert recoveries is not None
        assert recoveries >= 8
        started = value(series, "tasklib_tasks_started_total")
        assert started is not None
        assert started >= sum(by_labels(series, "tasklib_tasks_finished_total", "task").values()) * 0.9
        # More than once if a worker is killed while it has a process of its own there: that is no strike.
        assert by_labels(series, "tasklib_tasks_suspected_total", "task")["crash",] >= 1
        assert by_labels(series, "tasklib_tasks_lost_total", "cause")["worker_died",] > 0
        made.stop()
        attempts = books.execute("select count(*) from tasklib.task_attempts").fetchone()
        assert attempts == (sum(each.attempts for each in client.task_statistics(3600)),)


@needs_promtool
def test_what_a_daemon_tells_passes_promtool(books: Conn) -> None:
    """`promtool check metrics`, on a daemon that has run something."""
    port = free_port()
    with (
        daemon(url(books), web={"port": port}, **APP),
        tasklib.Client(tasklib.Config(url(books))) as client,
    ):
        submit_all(client, random.Random(1), 20)
        client.submit_task("succeed", delay_seconds=600)
        wait_until(lambda: "tasklib_queue_tasks" in ask(port)[1], "the gauges of the cluster")
        assert check_metrics(ask(port)[1]) == ""


def test_the_cluster_is_told_by_one_daemon_at_a_time(books: Conn) -> None:
    """Of two, the elected one; when it has left, the other. So a sum over all daemons counts nothing twice."""
    ports = [free_port(), free_port()]

    def tellers() -> list[int]:
        return [port for port in ports if "tasklib_cluster_slots" in ask(port)[1]]

    with contextlib.ExitStack() as stack:
        daemons = {
            port: stack.enter_context(daemon(url(books), name=f"daemon-{port}", web={"port": port}, waits=False, **APP))
            for port in ports
        }
        for each in daemons.values():
            each.wait_for("daemon.ready", seconds=START_SECONDS)
        wait_until(lambda: len(tellers()) == 1, "one of them to tell")
        (first,) = tellers()
        # It tells what it has read at once, and every second how it is.
        wait_until(lambda: value(scrape(first), "tasklib_elected") == 1, "it to be the elected one")
        (other,) = set(ports) - {first}
        assert value(scrape(other), "tasklib_elected") == 0
        daemons[first].stop()
        ports.remove(first)
        wait_until(lambda: tellers() == [other], "the other one to tell")
        alive = {"state": "alive"}
        wait_until(lambda: value(scrape(other), "tasklib_cluster_workers", **alive) == 1, "its own reading")


def test_a_dead_database_leaves_metrics_and_livez_answering() -> None:
    """While it is away, and with what is known: that loops fail because of it."""
    port = free_port()
    with embedded.postgres() as server:
        migrate.migrate(tasklib.Config(server.dsn))
        with daemon(server.dsn, web={"port": port}, **APP):
            wait_until(lambda: value(scrape(port), "tasklib_database_up") == 1, "the database to be up")
            server.stop("immediate")
            wait_until(lambda: outages(scrape(port)) >= 5, "loops to notice")
            for _ in range(20):
                assert ask(port, "/livez")[0] == 200
                assert ask(port)[0] == 200
            wait_until(lambda: (value(scrape(port), "tasklib_status_age_seconds") or 99) < 5, "the supervisor's word")


def outages(series: Series) -> float:
    return by_labels(series, "tasklib_database_errors_total", "kind").get(("outage",), 0.0)


def test_a_hundred_scrapes_a_second_are_answered_for_little(books: Conn) -> None:
    """While tasks run. What they cost is the web child's alone, and little: the text is made once a second. (That the
    workers' throughput does not suffer is measured by `dev.py soak daemon scrapes`.)
    """
    port = free_port()
    with (
        daemon(url(books), web={"port": port}, **APP) as made,
        tasklib.Client(tasklib.Config(url(books))) as client,
    ):
        submit_all(client, random.Random(2), 100)
        web = made.child("web")
        before, began = cpu_seconds(web), time.monotonic()
        scrapes = 150
        for number in range(scrapes):
            code, text = ask(port)
            assert code == 200
            assert "tasklib_workers" in text
            time.sleep(max(began + (number + 1) / 100 - time.monotonic(), 0.0))
        assert (cpu_seconds(web) - before) / scrapes < 0.005
        done = "select count(*) from tasklib.tasks where completed_at is null"
        wait_until(lambda: books.execute(done).fetchone() == (0,), "all to end")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
