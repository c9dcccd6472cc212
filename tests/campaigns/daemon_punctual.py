"""How late an idle daemon starts a task that is due at a time, how late a retry, and how soon it is to be seen that a
task runs. On a machine with other work these figures say little: the suite proves only that a worker wakes for them.

    python3 dev.py soak daemon punctual [--rounds 50]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

import tasklib
from tasklib import embedded, migrate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

from tests.campaigns.daemon_idle import ORDINARY
from tests.campaigns.soak import say, scratch_directory, wait_for
from tests.daemon_app import tasks
from tools import measures
from tools.daemons import TASKLIBD, daemon

if TYPE_CHECKING:
    from tests.support.raw_sql import Conn

MOST_LATE_SECONDS = 0.020
VISIBLE_SECONDS = 0.100
DELAY_SECONDS = 0.7
RETRY_SECONDS = 0.3
NAP_SECONDS = 1.0
START_SECONDS = 30.0


@dataclass(frozen=True)
class Options:
    rounds: int
    late_seconds: float
    visible_seconds: float


class Idle:
    """A daemon with nothing else to do."""

    def __init__(self, conn: Conn, client: tasklib.Client, scratch: Path) -> None:
        self._conn = conn
        self._client = client
        self._scratch = scratch

    def late_by(self, number: int) -> float:
        """A task that is scheduled."""
        journal = self._scratch / f"delayed {number}"
        due, at = datetime.now(UTC) + timedelta(seconds=DELAY_SECONDS), time.monotonic() + DELAY_SECONDS
        self._client.submit(tasks.nap.options(scheduled_at=due).new(0.0, str(journal)))
        return _begins(journal, 1)[0] - at

    def retries_late_by(self, number: int) -> list[float]:
        """From the end of an attempt to the begin of the next: beyond the delay."""
        journal = self._scratch / f"retried {number}"
        retried = tasks.try_again.options(max_retries=3)
        self._client.submit(retried.new(str(journal), RETRY_SECONDS))
        return [later - earlier - RETRY_SECONDS for earlier, later in itertools.pairwise(_begins(journal, 4))]

    def visible_after(self, number: int) -> float:
        journal = self._scratch / f"seen {number}"
        task_id = self._client.submit(tasks.nap.new(NAP_SECONDS, str(journal)))
        is_running = "select from tasklib.tasks where id = %s and state <> 'pending' and started_at is not null"
        wait_for(lambda: self._conn.execute(is_running, [task_id]).fetchone() is not None, START_SECONDS, "a mark")
        return time.monotonic() - _begins(journal, 1)[0]


def _begins(journal: Path, count: int) -> list[float]:
    """When the tasks of this journal began; monotonic."""

    def lines() -> list[str]:
        return journal.read_text("utf-8").splitlines() if journal.exists() else []

    wait_for(lambda: len(lines()) == count, START_SECONDS, f"{count} to begin")
    return [float(line.split()[1]) for line in lines()]


def judge(options: Options, idle: Idle) -> list[str]:
    delayed = [idle.late_by(number) for number in range(options.rounds)]
    retried = [each for number in range(options.rounds) for each in idle.retries_late_by(number)]
    visible = [idle.visible_after(number) for number in range(options.rounds)]
    problems = []
    for what, found, most in (
        ("a delayed task begins late by", delayed, options.late_seconds),
        ("a retry begins late by", retried, options.late_seconds),
        ("a task is seen to run after", visible, options.visible_seconds),
    ):
        say(f"{what}: {measures.shown(found)}")
        if measures.percentile(found, 50) > most:
            problems.append(f"{what} {measures.percentile(found, 50):.3f} s, half of the time")
    return problems + ([f"one began {-min(delayed):.3f} s before its time"] if min(delayed) < 0 else [])


def punctual(options: Options, scratch: Path) -> list[str]:
    with embedded.postgres() as server:
        config = tasklib.Config(server.dsn)
        migrate.migrate(config)
        with (
            daemon(server.dsn, program=TASKLIBD, **ORDINARY),
            tasklib.Client(config) as client,
            psycopg.connect(server.dsn, autocommit=True) as conn,
        ):
            return judge(options, Idle(conn, client, scratch))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--late-seconds", type=float, default=MOST_LATE_SECONDS, help="the most that is allowed")
    parser.add_argument("--visible-seconds", type=float, default=VISIBLE_SECONDS, help="the most that is allowed")
    options = Options(**vars(parser.parse_args(arguments)))
    say(f"punctual: {options}; {measures.load()}")
    with scratch_directory(None) as scratch:
        problems = punctual(options, scratch)
    for problem in problems:
        say(f"VIOLATION {problem}")
    say(f"{'FAILED' if problems else 'all bounds hold'}; {measures.load()}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
