"""A busy daemon whose workers' scoreboards are read as fast as it goes: no value is ever seen half written, and no
worker is ever called hung.

    python3 dev.py soak daemon torn-reads [--seconds 300]

Each worker has a reader of its own, a process that the supervisor forks off after the worker: it maps the same
scoreboard, and reads it as the supervisor does. What it sees must make sense by itself, and follow from what it saw
before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

import tasklib
from tasklib import embedded, migrate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

from tasklib_daemon.children import Children
from tests.campaigns.daemon_counters import UNFINISHED
from tests.campaigns.soak import say
from tests.daemon_app import mixed
from tools import measures
from tools.daemons import daemon
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasklib_daemon.child_process import ChildProcess
    from tasklib_daemon.plan import Slot
    from tasklib_daemon.scoreboard import ScoreboardEntry, ScoreboardView
    from tasklib_daemon.settings import Settings
    from tests.support.raw_sql import Conn
    from tools.daemons import Daemon

JOURNAL = "DAEMON_BEACON_JOURNAL"
NAME = "beacon"
WORKER_ID = re.compile(rf"{NAME}-[0-9a-f-]{{36}}")
READS_AT_A_TIME = 2_000  # before it looks whether its worker is alive
MOST_PROBLEMS = 20  # of one reader
BACKLOG = 2_000
MOST_WAITING = 100_000  # in a worker's buffer
MOST_TOKENS = 1_000  # claims of one task
MOST_PID = 2**22
FUTURE_SECONDS = 3600.0
NEVER_SAID = ("worker.hung", "worker.died", "worker.killed", "supervisor.failed", "loop.failed")


@dataclass(frozen=True)
class Options:
    seconds: float
    workers: int
    seed: int


# --- the readers ---


def faults(view: ScoreboardView, before: ScoreboardView, started: float, now: float) -> Iterator[str]:
    if view.beacon < before.beacon or view.beacon > now:
        yield f"the beacon was {before.beacon}, and is {view.beacon} at {now}"
    if not before.ended <= view.ended <= before.ended + MOST_WAITING:
        yield f"{before.ended} tasks had ended, and now {view.ended}"
    if view.waiting > MOST_WAITING:
        yield f"{view.waiting} tasks wait"
    if view.worker_id != before.worker_id and not WORKER_ID.fullmatch(view.worker_id):
        yield f"its name was {before.worker_id!r}, and is {view.worker_id!r}"
    if not all(0 < pid <= MOST_PID for pid in view.backends):
        yield f"its backends are {view.backends}"
    yield from (
        f"an entry says {each}" for each in (*view.executing, *view.done) if not _makes_sense(each, started, now)
    )


def _makes_sense(entry: ScoreboardEntry, started: float, now: float) -> bool:
    is_begun = 0 < entry.token <= MOST_TOKENS and started <= entry.started <= now
    is_limited = entry.must_end_by < now + FUTURE_SECONDS or entry.must_end_by == float("inf")
    return entry.task_id.version == 7 and is_begun and entry.must_end_by > entry.started and is_limited


def read_without_rest(child: ChildProcess, journal: Path) -> None:
    """Until the worker or the supervisor is gone."""
    reads, problems, parent = 0, 0, os.getppid()
    before = child.scoreboard.read()
    while _exists(child.pid) and os.getppid() == parent:
        found: list[str] = []
        for _ in range(READS_AT_A_TIME):
            view = child.scoreboard.read()
            found += faults(view, before, child.started, time.monotonic())
            before = view
        reads += READS_AT_A_TIME
        problems += len(found)
        lines = [{"problem": each} for each in found[:MOST_PROBLEMS]] if problems <= MOST_PROBLEMS else []
        _append(journal, [*lines, {"pid": child.pid, "reads": reads, "problems": problems}])


def _append(journal: Path, lines: list[dict[str, Any]]) -> None:
    with journal.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class WatchedChildren(Children):
    def _fork(self, slot: Slot, generation: int, settings: Settings) -> ChildProcess:
        child = super()._fork(slot, generation, settings)
        if child.is_worker and os.fork() == 0:
            try:
                self._let_go_of_all()
                read_without_rest(child, Path(os.environ[JOURNAL]))
            finally:
                os._exit(0)
        return child

    def _let_go_of_all(self) -> None:
        """A process that waits for the end of one of these must not wait for the reader, too."""
        self._guardian.close()
        for each in (*self.inputs, *(child.channel for child in self)):
            each.close()


def run_daemon(settings_file: str) -> None:
    """As `tasklibd run`, with readers."""
    from tasklib_daemon import settings, supervisor  # noqa: PLC0415 - only in the daemon's process

    supervisor.Children = WatchedChildren  # type: ignore[attr-defined]
    sys.exit(supervisor.Supervisor(settings.load(Path(settings_file))).run())


# --- the campaign ---


def load(options: Options, client: tasklib.Client, conn: Conn) -> int:
    """Tasks of all kinds, some of them cancelled, as many as the workers can do. How many."""
    dice = random.Random(options.seed)
    ends = time.monotonic() + options.seconds
    submitted = 0
    while time.monotonic() < ends:
        waiting = conn.execute(UNFINISHED).fetchone()
        missing = BACKLOG - (waiting[0] if waiting else 0)
        if missing > 0:
            client.submit_many([mixed.draw(dice) for _ in range(missing)])
            submitted += missing
        client.cancel_task(client.submit_task(mixed.take_too_long, priority=9))
        submitted += 1
        time.sleep(0.05)
    return submitted


def watch(options: Options) -> list[str]:
    with embedded.postgres() as server, tempfile.TemporaryDirectory(prefix="tasklib-beacon-") as scratch:
        journal = Path(scratch) / "journal"
        journal.touch()
        config = tasklib.Config(server.dsn)
        migrate.migrate(config)
        with (
            psycopg.connect(server.dsn, autocommit=True) as conn,
            tasklib.Client(config) as client,
            daemon(
                server.dsn, program=("-m", "tests.campaigns.daemon_torn_reads", "--daemon"), name=NAME,
                app=["tests.daemon_app.mixed"], workers=options.workers, concurrency=4,
                environment={JOURNAL: str(journal)}, waits=False,
            ) as started,
        ):  # fmt: skip
            started.wait_for("daemon.ready", seconds=90)  # its readers slow it down
            conn.execute("create table public.books (text text)")
            submitted = load(options, client, conn)
            wait_until(lambda: conn.execute(UNFINISHED).fetchone() == (0,), "all to end", seconds=300)
            say(f"{submitted} tasks have ended")
            return judge(started, journal, options)


def judge(started: Daemon, journal: Path, options: Options) -> list[str]:
    lines = [json.loads(line) for line in journal.read_text("utf-8").splitlines()]
    last = {line["pid"]: line for line in lines if "pid" in line}
    say(f"{sum(line['reads'] for line in last.values()):,} readings by {len(last)} readers")
    problems = [line["problem"] for line in lines if "problem" in line]
    problems += [f"{line['event']}: {line.get('why')}" for event in NEVER_SAID for line in started.lines(event)]
    if len(last) != options.workers:
        problems.append(f"{len(last)} scoreboards were read, of {options.workers} workers")
    return problems


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--daemon", help=argparse.SUPPRESS)
    given = vars(parser.parse_args(arguments))
    if settings_file := given.pop("daemon"):
        run_daemon(settings_file)
    options = Options(**given)
    say(f"beacon: {options}; {measures.load()}")
    problems = watch(options)
    for problem in problems:
        say(f"VIOLATION {problem}")
    say(f"{'FAILED' if problems else 'no value was read torn'}; {measures.load()}; seed {options.seed}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
