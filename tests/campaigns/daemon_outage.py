"""PostgreSQL goes away under a daemon, and comes back after minutes. The daemon waits: the same processes, hardly a
processor, and no crash. When the database is back, work goes on within seconds; what had ended meanwhile is written,
and nobody pays.

    python3 dev.py soak daemon outage [--seconds 600]
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import tasklib
from tasklib import migrate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

from tests.campaigns.daemon_idle import ORDINARY
from tests.campaigns.soak import Server, connect, say, scratch_directory, wait_for
from tests.daemon_app import tasks
from tools import measures
from tools.daemons import TASKLIBD, daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.raw_sql import Conn
    from tools.daemons import Daemon, Line

MOST_CPU_PERCENT = 2.0
FIRST_TASK_SECONDS = 5.0
NOTICE_SECONDS = 3.0  # until everybody has noticed that the database is away; not measured
WAITING = 20  # tasks that nobody has claimed when the database goes
DRAIN_SECONDS = 60.0


@dataclass(frozen=True)
class Options:
    seconds: float
    cpu_percent: float
    lease_seconds: float
    first_task_seconds: float
    directory: str | None


class Outage:
    def __init__(self, options: Options, server: Server, started: Daemon) -> None:
        self._options = options
        self._server = server
        self._daemon = started
        self.problems: list[str] = []

    def run(self) -> None:
        before = self._processes()
        executing = self._submit_some()
        self._go_away()
        self._compare(before, "while PostgreSQL was away")
        returned = self._come_back()
        with connect(self._server.dsn) as conn:
            self._judge_start(conn, returned)
            self._judge_tasks(conn, executing)
        self._compare(before, "when PostgreSQL was back")
        self._judge_log()

    def _submit_some(self) -> list[tasklib.TaskId]:
        """Some execute when the database goes: a few end soon, one would still be at it when its lease has passed."""
        with tasklib.Client(tasklib.Config(self._server.dsn)) as client, connect(self._server.dsn) as conn:
            lease = self._options.lease_seconds
            short = [client.submit(tasks.nap.new(lease / 6 + 0.7)) for _ in range(3)]
            long = client.submit(tasks.nap.new(1.3 * lease + 1))
            running = "select count(*) from tasklib.tasks where state = 'running'"
            wait_for(lambda: conn.execute(running).fetchone() == (4,), 20, "four tasks that execute")
            client.submit_many([tasks.echo.options(delay_seconds=1.0).new(str(number)) for number in range(WAITING)])
            return [*short, long]

    def _go_away(self) -> None:
        self._server.stop("fast")
        say("PostgreSQL has gone")
        time.sleep(NOTICE_SECONDS)
        lines = len(self._daemon.lines())
        meter = measures.Meter("daemon", self._daemon.pid)
        time.sleep(max(self._options.seconds - NOTICE_SECONDS, 1.0))
        said = self._daemon.lines()[lines:]
        say(str(meter))
        told = collections.Counter(map(_told, said))
        say(f"it said, meanwhile: {dict(told)}")
        # Once: a loop that has nothing to ask without a lease goes on in peace.
        flapping = {what: times for what, times in told.items() if what.startswith("database.back") and times > 1}
        self.problems += [
            f"it said {what} {times} times, of a database that was away" for what, times in flapping.items()
        ]
        if meter.percent() >= self._options.cpu_percent:
            self.problems.append(f"it took {meter.percent():.2f} % of a core while PostgreSQL was away")
        status = self._daemon.status()
        if status["database"] or not status["is_healthy"]:
            self.problems.append(f"it thinks: database {status['database']}, healthy {status['is_healthy']}")

    def _come_back(self) -> datetime:
        """The moment from which on it answers, at the latest."""
        self._server.start()
        returned = datetime.now(UTC)
        say("PostgreSQL is back")
        with tasklib.Client(tasklib.Config(self._server.dsn)) as client:
            client.submit(tasks.echo.new("after"))
        return returned

    def _judge_start(self, conn: Conn, returned: datetime) -> None:
        began = "select started_at from tasklib.task_attempts where started_at > %s order by started_at limit 1"
        self._expect(lambda: conn.execute(began, [returned]).fetchone() is not None, 60.0, "a task that begins")
        row = conn.execute(began, [returned]).fetchone()
        seconds = (row[0] - returned).total_seconds() if row is not None else float("inf")
        say(f"the first task began {seconds:.2f} s after the return")
        if seconds > self._options.first_task_seconds:
            self.problems.append(f"the first task began only {seconds:.2f} s after the return")

    def _judge_tasks(self, conn: Conn, executing: Sequence[tasklib.TaskId]) -> None:
        left = "select count(*) from tasklib.tasks where completed_at is null"
        self._expect(lambda: conn.execute(left).fetchone() == (0,), DRAIN_SECONDS, "every task is final")
        rows = conn.execute(
            "select id, state, retry_count, crash_count, attempt from tasklib.tasks where state <> 'completed'"
            " or retry_count > 0 or crash_count > 0"
        ).fetchall()
        self.problems += [f"a task paid: {row}" for row in rows]
        query = "select attempt, outcome from tasklib.task_attempts where task_id = %s order by attempt"
        attempts = [[outcome for _, outcome in conn.execute(query, [each.hex]).fetchall()] for each in executing]
        say(f"what executed when PostgreSQL went: {attempts}")
        self.problems += [f"an outcome was lost: {each}" for each in attempts[:-1] if each != ["COMPLETED"]]

    def _judge_log(self) -> None:
        said = collections.Counter(str(line.get("event")) for line in self._daemon.lines())
        bad = ("worker.died", "keeper.died", "web.died", "guardian.died", "daemon.unhealthy", "outcomes.lost")
        self.problems += [f"it said {event}, {said[event]} times" for event in bad if said[event]]

    def _processes(self) -> list[int]:
        return sorted(measures.family(self._daemon.pid))

    def _compare(self, before: list[int], when: str) -> None:
        if self._processes() != before:
            self.problems.append(f"not the same processes {when}: {before} before, {self._processes()} now")

    def _expect(self, is_so: Callable[[], bool], seconds: float, what: str) -> None:
        try:
            wait_for(is_so, seconds, what)
        except TimeoutError as error:
            self.problems.append(str(error))


def _told(line: Line) -> str:
    return " ".join(str(line[key]) for key in ("event", "process", "loop") if key in line)


def outage(options: Options, scratch: Path) -> list[str]:
    server = Server(scratch / "postgres")
    server.start()
    try:
        migrate.migrate(tasklib.Config(server.dsn))
        with daemon(server.dsn, program=TASKLIBD, lease_seconds=options.lease_seconds, **ORDINARY) as started:
            campaign = Outage(options, server, started)
            campaign.run()
            code = started.stop()
            return campaign.problems + ([f"it ended with exit code {code}"] if code != 0 else [])
    finally:
        server.stop("fast")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="without PostgreSQL")
    parser.add_argument("--cpu-percent", type=float, default=MOST_CPU_PERCENT, help="the most that is allowed")
    parser.add_argument("--lease-seconds", type=float, default=15.0)
    parser.add_argument("--first-task-seconds", type=float, default=FIRST_TASK_SECONDS, help="after the return")
    parser.add_argument("--directory", help="keep the database there")
    options = Options(**vars(parser.parse_args(arguments)))
    say(f"outage: {options}; {measures.load()}")
    with scratch_directory(options.directory) as scratch:
        problems = outage(options, scratch)
    for problem in problems:
        say(f"VIOLATION {problem}")
    say(f"{'FAILED' if problems else 'all bounds hold'}; {measures.load()}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
