"""A process says how many connections it may open, opens no more, and warns where the server has not so many left."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

import psycopg
import pytest

import tasklib
from tasklib import embedded, migrate
from tasklib.budget import KEEPER_LOOPS, Budget, BudgetCheck, connection_budget, daemon_budget
from tasklib.runtime.session import Session
from tests.support.pooler import PROGRAM, WHY_NOT, pgbouncer
from tests.support.working import running, wait_final
from tools.daemons import daemon
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasklib.embedded import EmbeddedPostgres
    from tests.support.raw_sql import Conn


@pytest.fixture(scope="module")
def small_server() -> Iterator[EmbeddedPostgres]:
    """Twenty connections, three of them for superusers."""
    with embedded.postgres(settings={"max_connections": 20, "superuser_reserved_connections": 3}) as server:
        yield server


def test_the_budget_of_a_worker_and_of_a_client() -> None:
    """One connection for each loop, one for each slot, the pools, and one for all who wait."""
    config = tasklib.Config("", pool_size=3)
    worker = connection_budget(config, concurrency=4)
    assert worker == Budget(worker=4, listener=1, tasks=4, clients=6, waiter=1)
    assert worker.total == 16
    assert connection_budget(config, concurrency=4, listen=False).total == 15
    client = connection_budget(config, event_loops=0)
    assert client == Budget(worker=0, listener=0, tasks=0, clients=3, waiter=1)


def test_the_budget_of_a_daemon() -> None:
    """Workers have three loops each; their keeper listens and has the duties, for all of them."""
    config = tasklib.Config("", pool_size=3)
    assert daemon_budget(config, workers=2, concurrency=4) == Budget(
        worker=6, listener=len(KEEPER_LOOPS), tasks=8, clients=12, waiter=2
    )


@pytest.mark.direct("counts backends, which a pooler shares out")
def test_a_daemon_opens_what_it_says(database_url: str, client: tasklib.Client, conn: Conn) -> None:
    """No more, and no fewer: while every worker has had a task, each of the loops has its connection."""
    budget = daemon_budget(client.config, workers=2, concurrency=1)
    names = """select application_name from pg_stat_activity
                where datname = current_database() and application_name like 'tasklib:%'"""

    def open_now() -> list[str]:
        return sorted(name.removeprefix("tasklib:") for (name,) in conn.execute(names))

    wanted = sorted([*KEEPER_LOOPS, *(2 * ["claim", "finish", "lease"])])
    with daemon(database_url, workers=2, concurrency=1, snapshot_seconds=0.2):
        for each in [client.submit_task("nap", seconds=0.3) for _ in range(2)]:
            wait_final(client, each)
        wait_until(lambda: open_now() == wanted, f"{wanted}")
    assert len(wanted) == budget.worker + budget.listener


@pytest.mark.direct("counts backends, which a pooler shares out")
def test_a_worker_opens_what_it_says(config: tasklib.Config, conn: Conn) -> None:
    """Its loops and its listener, while it works and nothing else is used."""
    names = """select application_name from pg_stat_activity
                where datname = current_database() and application_name like 'tasklib%'"""
    budget = connection_budget(config, concurrency=2)
    done = threading.Event()
    tasklib.task(name="job")(done.set)
    with running(config, concurrency=2):
        conn.execute("select tasklib.submit('job')")
        assert done.wait(20)
        open_now = [name for (name,) in conn.execute(names)]
    assert len(open_now) == len(set(open_now)) <= budget.worker + budget.listener


def scarcity(caplog: pytest.LogCaptureFixture, url: str, budget: Budget, *, others: int | None = 0) -> str:
    """What is said beside so many others (None: nobody can tell). A backend outlives its client's good-bye by a moment
    and would be counted: what earlier tests had open is waited for.
    """
    backends = "select sum(numbackends) from pg_stat_database where datid <> 0"
    with (
        caplog.at_level(logging.WARNING, "tasklib"),
        contextlib.closing(Session(tasklib.Config(url), "duties")) as session,
    ):
        if others is not None:
            conn = session.connection()
            wait_until(lambda: conn.execute(backends).fetchone() == (1 + others,), f"{others} others")
        BudgetCheck(session, budget).run_once()
    return "\n".join(record.message for record in caplog.records)


@pytest.mark.parametrize(("fits", "wanted"), [(True, 17), (False, 18)])
def test_too_few_connections_are_told_of(
    small_server: EmbeddedPostgres, caplog: pytest.LogCaptureFixture, fits: bool, wanted: int
) -> None:
    """With the figures and with what to do. What is reserved and what others use does not count as left."""
    budget = Budget(worker=4, listener=1, tasks=0, clients=wanted - 5, waiter=0)
    assert (scarcity(caplog, small_server.dsn, budget) == "") is fits
    with psycopg.connect(small_server.dsn), psycopg.connect(small_server.dsn):
        said = scarcity(caplog, small_server.dsn, budget, others=2)
    figures = f"connections.scarce may_open={wanted} left=15 max_connections=20 reserved=3 in_use=2"
    assert figures in said
    assert "pool_size" in said


def test_a_worker_tells_when_it_starts(small_server: EmbeddedPostgres, caplog: pytest.LogCaptureFixture) -> None:
    """Before anything is refused."""
    config = tasklib.Config(small_server.dsn, pool_size=50)
    migrate.migrate(config)
    with caplog.at_level(logging.WARNING, "tasklib"), running(config):
        wait_until(lambda: "connections.scarce" in caplog.text, "the warning")


def test_what_it_has_opened_itself_does_not_count_twice(
    small_server: EmbeddedPostgres, caplog: pytest.LogCaptureFixture
) -> None:
    """All loops start together: some have their connection when this looks."""
    budget = Budget(worker=4, listener=1, tasks=0, clients=12, waiter=0)
    with contextlib.closing(Session(tasklib.Config(small_server.dsn), "claim")) as other:
        other.connection()
        assert scarcity(caplog, small_server.dsn, budget, others=1) == ""


def test_a_role_without_privileges_counts_too(small_server: EmbeddedPostgres, caplog: pytest.LogCaptureFixture) -> None:
    """The sessions of others are hidden from it; their number is not."""
    with psycopg.connect(small_server.dsn, autocommit=True) as admin:
        admin.execute("create role plain_worker login")
        url = psycopg.conninfo.make_conninfo(small_server.dsn, user="plain_worker")
        said = scarcity(caplog, url, Budget(worker=4, listener=1, tasks=99, clients=0, waiter=0), others=1)
    assert "left=16 max_connections=20 reserved=3 in_use=1" in said


@pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)
def test_behind_a_pooler_nothing_is_counted(small_server: EmbeddedPostgres, caplog: pytest.LogCaptureFixture) -> None:
    """The server's connections are the pooler's, and there is no telling how many of those are left for us."""
    with pgbouncer(small_server.dsn) as pooler:
        said = scarcity(caplog, pooler.pooled(small_server.dsn), Budget(4, 1, 99, 0, 0), others=None)
    assert said == ""


def test_a_server_that_cannot_be_asked_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """A worker waits for its database; a warning that cannot be worked out must not end it."""
    assert scarcity(caplog, "host=127.0.0.1 port=1 connect_timeout=2", Budget(4, 1, 0, 0, 0), others=None) == ""
