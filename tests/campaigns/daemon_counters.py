"""Workers are killed under a mixed load, again and again, and every attempt is counted once all the same: what the
counters of the daemon say at the end is what a recount of the rows says.

    python3 dev.py soak daemon counters [--kills 100] [--keepers 0.2]

With --keepers, the keeper that recovers a worker is killed too, for such a share of the deaths. It is hit between the
write and its counters now and then: a difference of a few attempts in a hundred kills is no fault, more is.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

import tasklib
from tasklib import embedded, migrate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

from tests.campaigns.soak import say
from tests.daemon_app import isolated, mixed
from tests.support.promtool import by_labels
from tests.support.recount import differences
from tests.support.scraping import free_port, scrape
from tools import measures
from tools.daemons import daemon
from tools.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.raw_sql import Conn
    from tools.daemons import Daemon

UNFINISHED = "select count(*) from tasklib.tasks where completed_at is null"


@dataclass(frozen=True)
class Options:
    kills: int
    tasks_per_kill: int
    isolated_per_kill: int
    workers: int
    keepers: float
    seed: int


def load_and_kill(options: Options, started: Daemon, client: tasklib.Client, dice: random.Random) -> None:
    for number in range(1, options.kills + 1):
        client.submit_many([mixed.draw(dice) for _ in range(options.tasks_per_kill)])
        client.submit_many([isolated.crash_alone.new() for _ in range(options.isolated_per_kill)])
        time.sleep(dice.uniform(0.0, 0.3))  # so that it is hit at any moment of a batch
        wait_until(lambda: bool(started.workers()), "a worker to kill")
        with contextlib.suppress(ProcessLookupError, IndexError):  # it may be dead already
            os.kill(dice.choice(started.workers())["pid"], signal.SIGKILL)
        if dice.random() < options.keepers:
            time.sleep(dice.uniform(0.0, 0.03))  # while it recovers
            with contextlib.suppress(ProcessLookupError, KeyError, TypeError):
                os.kill(started.child("keeper"), signal.SIGKILL)
        if number % 25 == 0 or number == options.kills:
            say(f"kill {number}/{options.kills}")


def judge(conn: Conn, port: int) -> list[str]:
    """The last counts take a second."""
    wait_until(lambda: conn.execute(UNFINISHED).fetchone() == (0,), "all to end", seconds=120)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: differences(conn, scrape(port)) == [], seconds=5)
    series = scrape(port)
    say(f"deaths: {by_labels(series, 'tasklib_worker_deaths_total', 'cause')}")
    say(f"attempts: {by_labels(series, 'tasklib_tasks_finished_total', 'outcome')}")
    return differences(conn, series)


def count(options: Options) -> list[str]:
    dice = random.Random(options.seed)
    port = free_port()
    with embedded.postgres() as server:
        config = tasklib.Config(server.dsn)
        migrate.migrate(config)
        with (
            psycopg.connect(server.dsn, autocommit=True) as conn,
            tasklib.Client(config) as client,
            daemon(
                server.dsn, app=["tests.daemon_app.mixed", "tests.daemon_app.isolated"], workers=options.workers,
                concurrency=4, web={"port": port}, restart={"longest_seconds": 0.1}, waits=False,
            ) as started,
        ):  # fmt: skip
            started.wait_for("daemon.ready", seconds=90)
            conn.execute("create table public.books (text text)")
            load_and_kill(options, started, client, dice)
            return judge(conn, port)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--tasks-per-kill", type=int, default=60)
    parser.add_argument("--isolated-per-kill", type=int, default=4, help="tasks whose own process dies: three times")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--keepers", type=float, default=0.0, help="share of deaths at which the keeper dies, too")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = Options(**vars(parser.parse_args(arguments)))
    say(f"counters: {options}; {measures.load()}")
    problems = count(options)
    for problem in problems:
        say(f"VIOLATION {problem}")
    say(f"{'FAILED' if problems else 'all counters agree'}; {measures.load()}; seed {options.seed}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
