"""W13: what one task costs when many sleep at the same queue. Daemons with many workers are idle, and a task comes
every 10 ms; then many connections submit at once.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg

from bench.harness import Measured
from bench.systems import BARE, TASKLIB
from bench.workloads import tables
from tools import measures
from tools.daemons import daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.harness import Bench
    from bench.systems import System
    from tools.daemons import Daemon

PAUSE_SECONDS = 0.01
START_SECONDS = 120.0
APP = "bench.drivers.run_tasklib"
# The submitter has a role of its own: its statements are not the daemons'.
COUNT_STATEMENTS = [
    "create extension pg_stat_statements",
    "alter database bench set pg_stat_statements.track = 'top'",
    "drop role if exists submitter",
    "create role submitter superuser login",
]
STATEMENTS = """
select coalesce(sum(calls), 0)::bigint from pg_stat_statements
 where userid = current_user::regrole and dbid = (select oid from pg_database where datname = current_database())
"""


@dataclass(frozen=True)
class Taken:
    """So far, by all daemons."""

    at: float
    statements: int
    daemon_seconds: float
    postgresql_seconds: float


def storm(bench: Bench, system: System) -> Measured:
    """Queries per daemon and task. All that the daemons send counts, also what they would have sent anyway."""
    count = max(int(bench.size.storm_seconds / PAUSE_SECONDS), 1)
    with bench.database(system) as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        for statement in COUNT_STATEMENTS:
            conn.execute(statement)
        with _daemons(bench, dsn) as daemons:
            before_idle = _taken(bench, conn, daemons)
            time.sleep(bench.size.storm_seconds / 2)
            before = _taken(bench, conn, daemons)
            _pace(bench, system, dsn, count)
            after = _taken(bench, conn, daemons)
            also = {
                "idle_queries_per_second": (before.statements - before_idle.statements) / (before.at - before_idle.at),
                "daemons_us": (after.daemon_seconds - before.daemon_seconds) / count * 1e6,
                "postgresql_us": (after.postgresql_seconds - before.postgresql_seconds) / count * 1e6,
                "crowd_per_second": _crowd(bench, TASKLIB, dsn),
                "bare_crowd_per_second": _crowd(bench, BARE, dsn),
            }
            tables.wait(lambda: conn.execute(system.left).fetchone() == (False,), "the daemons have run everything")
    return Measured((after.statements - before.statements) / count / bench.size.daemons, also)


@contextmanager
def _daemons(bench: Bench, dsn: str) -> Iterator[list[Daemon]]:
    """As an operator would start them: `tasklibd`, with its defaults but for the number of workers."""
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                daemon(
                    dsn,
                    waits=False,
                    app=[APP],
                    name=f"storm-{number}",
                    workers=bench.size.daemon_workers,
                    concurrency=10,
                    poll_interval_seconds=1.0,
                )
            )
            for number in range(bench.size.daemons)
        ]
        for each in started:
            each.wait_for("daemon.ready", seconds=START_SECONDS)
        time.sleep(2 * bench.size.settle_seconds)
        yield started


def _pace(bench: Bench, system: System, dsn: str, count: int) -> None:
    with bench.submitter(system, _as_submitter(dsn)) as submitter:
        submitter.ask("pace", count=count, pause=PAUSE_SECONDS)


def _crowd(bench: Bench, system: System, dsn: str) -> float:
    """Submits a second by so many connections at once, each waiting for its own commits."""
    count = bench.size.submits * 3
    connections = bench.size.storm_connections
    with bench.submitter(system, _as_submitter(dsn), connections=connections, kind="crowd") as submitter:
        return count / float(submitter.ask("submit", count=count, concurrency=connections)["seconds"])


def _as_submitter(dsn: str) -> str:
    return dsn.replace("://postgres@", "://submitter@")


def _taken(bench: Bench, conn: psycopg.Connection[Any], daemons: list[Daemon]) -> Taken:
    row = conn.execute(STATEMENTS).fetchone()
    assert row is not None
    return Taken(
        at=time.monotonic(),
        statements=row[0],
        daemon_seconds=sum(measures.cpu_seconds(each.pid) for each in daemons),
        postgresql_seconds=bench.spent().postgresql_seconds,
    )
