"""How many connections a process may open, stated in one place and compared with what the server has left."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, NamedTuple

import psycopg

from tasklib.log import log
from tasklib.statements import Statement

if TYPE_CHECKING:
    from tasklib.config import Config
    from tasklib.runtime.session import Session

WORKER_LOOPS = ("claim", "finish", "lease", "duties")
KEEPER_LOOPS = ("duties", "crashes", "history", "listen", "gauges")  # of a daemon: once, for all of its workers


class Budget(NamedTuple):
    """The most connections of each part. All are opened when needed; only those of the first two stay open."""

    worker: int  # its loops, one each
    listener: int
    tasks: int  # current_task().connection, for as long as a task uses it
    clients: int  # for submitting and reading: a pool for threads, and one for each event loop
    waiter: int  # one, shared by all waits for results

    @property
    def total(self) -> int:
        return sum(self)


def connection_budget(config: Config, *, concurrency: int = 0, listen: bool = True, event_loops: int = 1) -> Budget:
    """The budget of a worker's process; with concurrency 0, of a process that only submits."""
    is_worker = concurrency > 0
    return Budget(
        worker=len(WORKER_LOOPS) if is_worker else 0,
        listener=1 if is_worker and listen else 0,
        tasks=concurrency,
        clients=config.pool_size * (1 + event_loops),
        waiter=1,
    )


def daemon_budget(config: Config, *, workers: int, concurrency: int) -> Budget:
    """The budget of all processes of a daemon. Its keeper runs the duties and listens: its workers have three loops."""
    one = connection_budget(config, concurrency=concurrency, listen=False)
    together = Budget(*(workers * each for each in one._replace(worker=one.worker - 1)))
    return together._replace(listener=len(KEEPER_LOOPS))


class BudgetCheck:
    """A duty that runs once, at the start."""

    def __init__(self, session: Session, budget: Budget) -> None:
        self._session = session
        self._budget = budget

    def run_once(self) -> float:
        with contextlib.suppress(psycopg.Error):  # the loops will meet and report it
            if not self._session.is_pooled:  # only the pooler can count the server's connections
                self._warn_if_scarce(*self._session.run(_SLOTS))
        return math.inf

    def _warn_if_scarce(self, most: int, reserved: int, used: int, ours: int) -> None:
        """At the start, before a missing connection is an error in the middle of the work."""
        budget = self._budget
        used -= min(ours, budget.total)  # the connections that we have opened already are in the budget
        left = most - reserved - used
        if budget.total > left:
            log.warning(
                "connections.scarce",
                may_open=budget.total,
                left=left,
                max_connections=most,
                reserved=reserved,
                in_use=used,
                parts=" ".join(f"{name}={count}" for name, count in budget._asdict().items()),
                hint="lower Config.pool_size or the concurrency, put PgBouncer in between, or raise max_connections",
            )


# Every role may read these counts, while it sees next to nothing of other roles' sessions. Our connections are known by
# their names. Those of other workers count too, so that workers that start together do not warn of each other.
_SLOTS = Statement(
    """
    select current_setting('max_connections')::int,
           current_setting('superuser_reserved_connections')::int
               + coalesce(current_setting('reserved_connections', true), '0')::int,
           (select sum(numbackends)::int - 1 from pg_stat_database),
           (select count(*) from pg_stat_activity
             where usename = current_user and pid <> pg_backend_pid()
               and starts_with(application_name, split_part(current_setting('application_name'), ':', 1) || ':'))
    """,
    (),
    lambda rows: (int(rows[0][0]), int(rows[0][1]), int(rows[0][2]), int(rows[0][3])),
    is_change=False,
)
