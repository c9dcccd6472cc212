"""The primary is lost, and a standby that lags behind takes its place: it does not know what was committed last. Every
task that it knows ends all the same, long before its lock has passed.

    python3 dev.py soak daemon failover [--rounds 10]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import psycopg
from psycopg.conninfo import conninfo_to_dict

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

import tasklib
from tasklib import embedded, migrate
from tests.campaigns import daemon_app
from tests.campaigns.daemon_campaign import end_in_good_order
from tests.campaigns.soak import say, scratch_directory
from tests.support.standby import standby
from tools import measures
from tools.daemons import daemon

if TYPE_CHECKING:
    from tasklib.embedded import EmbeddedPostgres
    from tests.support.standby import Standby

LAG_SECONDS = 0.7  # of commits that the standby never hears of


@dataclass(frozen=True)
class Options:
    rounds: int
    end_seconds: float
    seed: int


class Load(threading.Thread):
    """Submits until the primary is gone: short tasks, and some that are running when it goes."""

    def __init__(self, dsn: str, seed: int) -> None:
        super().__init__(name="load", daemon=True)
        self._client = tasklib.Client(tasklib.Config(dsn, database_timeout_seconds=2, pool_size=1))
        self._dice = random.Random(seed)
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.02):
            try:
                self._client.submit_many([daemon_app.draw(self._dice) for _ in range(3)])
            except tasklib.TasklibError:
                continue  # it is the outage

    def stop(self) -> None:
        self._done.set()
        self.join()
        self._client.close()


def both(primary: EmbeddedPostgres, second: Standby) -> str:
    """An address for whichever of the two takes writes."""
    first = conninfo_to_dict(primary.dsn)
    hosts = quote(f"{first['host']},{second.directory}", safe=",")
    ports = f"{first['port']},{second.port}"
    return f"postgresql://postgres@/postgres?host={hosts}&port={ports}&target_session_attrs=read-write"


def fail_over(primary: EmbeddedPostgres, second: Standby) -> int:
    """The standby is frozen, the primary goes on for a while and dies, the standby wakes up and is promoted. How many
    tasks it takes for unfinished that had ended.
    """
    processes = [second.pid, *measures.family(second.pid)]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    with psycopg.connect(primary.dsn, autocommit=True) as conn:  # else it would find in its socket what was sent since
        conn.execute("select pg_terminate_backend(pid) from pg_stat_replication")
    time.sleep(LAG_SECONDS)
    with psycopg.connect(primary.dsn) as conn:
        done = {row[0] for row in conn.execute("select id from tasklib.tasks where completed_at is not null")}
    primary.stop("immediate")
    for pid in processes:
        os.kill(pid, signal.SIGCONT)
    second.promote()
    with psycopg.connect(second.dsn_for("postgres")) as conn:
        open_ = {row[0] for row in conn.execute("select id from tasklib.tasks where completed_at is null")}
    return len(done & open_)


def one_round(options: Options, number: int, scratch: Path) -> list[str]:
    problems: list[str] = []
    with embedded.postgres(settings={"wal_level": "replica", "max_wal_senders": 10}) as primary:
        migrate.migrate(tasklib.Config(primary.dsn))
        with psycopg.connect(primary.dsn, autocommit=True) as conn:
            conn.execute(daemon_app.MAKE_EFFECTS)
        with standby(primary, settings={"max_standby_streaming_delay": -1}) as second:
            dsn = both(primary, second)
            environment = {daemon_app.JOURNAL: str(scratch / "runs"), daemon_app.PROCESSES: str(scratch / "processes")}
            app = ["tests.campaigns.daemon_app"]
            with daemon(dsn, environment=environment, app=app, workers=2, concurrency=4, web={"port": 0}) as made:
                load = Load(dsn, options.seed + number)
                load.start()
                time.sleep(3)
                lost = fail_over(primary, second)
                load.stop()
                with psycopg.connect(second.dsn_for("postgres"), autocommit=True) as conn:
                    seconds = wait_for_ends(conn, options.end_seconds)
                    problems += judge(conn, seconds, options)
                say(f"round {number}: {lost} ends were lost; all tasks ended after {seconds:.1f} s; {measures.load()}")
                if made.stop(30) != 0:
                    problems.append("the daemon did not leave in good order")
            if not lost:
                say("no end was lost: this round has tried nothing")
    return problems


def wait_for_ends(conn: psycopg.Connection[tuple[object, ...]], seconds: float) -> float:
    began = time.monotonic()
    is_open = "select from tasklib.tasks where completed_at is null limit 1"
    while conn.execute(is_open).fetchone() is not None and time.monotonic() < began + seconds:
        time.sleep(0.1)
    return time.monotonic() - began


def judge(conn: psycopg.Connection[tuple[object, ...]], seconds: float, options: Options) -> list[str]:
    left = conn.execute("select state, count(*) from tasklib.tasks where completed_at is null group by 1").fetchall()
    bad = conn.execute("select state, count(*) from tasklib.tasks where state <> 'completed' group by 1").fetchall()
    problems = [f"after {seconds:.0f} s these are left: {left}"] if left else []
    return problems + ([f"not completed: {bad}"] if bad and not left else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--end-seconds", type=float, default=60.0, help="all tasks have to end within")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = Options(**vars(parser.parse_args()))
    end_in_good_order()
    say(f"failover: {options}")
    problems: list[str] = []
    with scratch_directory(None) as scratch:
        for number in range(1, options.rounds + 1):
            problems += one_round(options, number, scratch)
    for problem in problems:
        say(f"VIOLATION {problem}")
    say(f"{'FAILED' if problems else 'all tasks have ended'}; {measures.load()}; seed {options.seed}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
