"""What a hundred scrapes a second cost the workers: the same backlog is drained with and without them, in turns.

python3 dev.py soak daemon scrapes [--rounds 5]
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

import tasklib
from tasklib import embedded, migrate
from tasklib_daemon.exit_codes import Exit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

from tests.campaigns.soak import say
from tests.daemon_app import mixed
from tests.support.scraping import free_port
from tools import measures
from tools.daemons import daemon
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.raw_sql import Conn
    from tools.daemons import Daemon

WORKERS = 2
LEAST_SHARE = 0.9  # of the throughput without scrapes; less is noise
LEFT = "select exists (select from tasklib.tasks where ready) or exists (select from tasklib.claims)"
REQUEST = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"


@dataclass(frozen=True)
class Options:
    rounds: int
    tasks: int
    rate: float
    least_share: float


class Scraper(threading.Thread):
    """Asks so often, and notes how long each answer took. No more than a socket: it shares the machine."""

    def __init__(self, port: int, rate: float) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._pause = 1 / rate
        self._ended = threading.Event()
        self.seconds: list[float] = []
        self.failures = 0

    def run(self) -> None:
        due = time.monotonic()
        while not self._ended.wait(max(due - time.monotonic(), 0.0)):
            due += self._pause
            began = time.monotonic()
            try:
                self.failures += not self._scrape().startswith(b"HTTP/1.1 200")
            except OSError:
                self.failures += 1
            self.seconds.append(time.monotonic() - began)

    def _scrape(self) -> bytes:
        with socket.create_connection(("127.0.0.1", self._port), timeout=5) as sock:
            sock.sendall(REQUEST)
            parts = []
            while part := sock.recv(1 << 20):
                parts.append(part)
            return b"".join(parts)

    def stop(self) -> None:
        self._ended.set()
        self.join()


@contextlib.contextmanager
def scraping(port: int, rate: float, *, is_on: bool) -> Iterator[Scraper | None]:
    scraper = Scraper(port, rate) if is_on else None
    if scraper is not None:
        scraper.start()
    yield scraper
    if scraper is not None:
        scraper.stop()


def drain(started: Daemon, client: tasklib.Client, conn: Conn, tasks: int) -> float:
    """Tasks a second."""
    started.ask("pause")
    for _ in range(tasks // 1000):
        client.submit_many([mixed.succeed_async.new() for _ in range(1000)])
    conn.execute("vacuum analyze tasklib.tasks")
    conn.execute("checkpoint")
    began = time.monotonic()
    started.ask("resume")
    wait_until(lambda: conn.execute(LEFT).fetchone() == (False,), "the backlog to be drained", seconds=120)
    return tasks / (time.monotonic() - began)


def measure(options: Options) -> list[str]:
    port = free_port()
    rates: dict[bool, list[float]] = {False: [], True: []}
    answers: list[float] = []
    failures = 0
    with embedded.postgres() as server:
        config = tasklib.Config(server.dsn)
        migrate.migrate(config)
        with (
            psycopg.connect(server.dsn, autocommit=True) as conn,
            tasklib.Client(config) as client,
            daemon(
                server.dsn, app=["tests.daemon_app.mixed"], workers=WORKERS, concurrency=100, web={"port": port},
                log={"level": "warning", "format": "json"}, waits=False,
            ) as started,
        ):  # fmt: skip
            wait_until(lambda: _is_ready(started), "the workers to be ready")
            drain(started, client, conn, options.tasks)
            for number in range(options.rounds * 2):
                is_on = number % 2 == 1
                with scraping(port, options.rate, is_on=is_on) as scraper:
                    rates[is_on].append(drain(started, client, conn, options.tasks))
                if scraper is not None:
                    answers += scraper.seconds
                    failures += scraper.failures
                say(f"{'with' if is_on else 'without'} scrapes: {rates[is_on][-1]:,.0f} tasks/s")
    return judge(options, rates, answers, failures)


def _is_ready(started: Daemon) -> bool:
    """Its log does not say so at this level; and until it has a socket, nobody answers."""
    with contextlib.suppress(Exit, OSError):
        return len(started.workers()) == WORKERS
    return False


def judge(options: Options, rates: dict[bool, list[float]], answers: list[float], failures: int) -> list[str]:
    without, with_ = statistics.median(rates[False]), statistics.median(rates[True])
    share = with_ / without
    say(f"median without scrapes {without:,.0f} tasks/s, with {options.rate:g} a second {with_:,.0f}: {share:.2f}")
    say(f"answers: {measures.shown(answers)}")
    problems = [f"{failures} scrapes failed"] if failures else []
    if share < options.least_share:
        problems.append(f"with scrapes there is {share:.2f} of the throughput")
    return problems


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=100.0, help="scrapes a second")
    parser.add_argument("--least-share", type=float, default=LEAST_SHARE, help="of the throughput without them")
    options = Options(**vars(parser.parse_args(arguments)))
    say(f"scrapes: {options}; {measures.load()}")
    problems = measure(options)
    for problem in problems:
        say(f"VIOLATION {problem}")
    say(f"{'FAILED' if problems else 'all bounds hold'}; {measures.load()}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
