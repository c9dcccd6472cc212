"""What a task takes on disk and in the log, and what a daemon takes in memory and connections.

Tasks are no-ops whose payload has so many characters; they are submitted in bulk, then run; results and attempts are
kept. Sizes are those of the table with its indexes and TOAST, divided by the number of tasks; WAL is what the server
wrote from the first submit to the last finish, after a checkpoint, so full pages are in it. Memory is proportional
(PSS): what processes share is divided among them. Linux only.

python3 dev.py footprint --tasks 20000
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

import tasklib
from tasklib import TaskWorker, embedded, migrate

if TYPE_CHECKING:
    from collections.abc import Iterator

PAYLOADS = (100, 1_000, 10_000)
ROOT = Path(__file__).resolve().parents[1]
APPLICATION = """
import time
import tasklib


@tasklib.task
def nap(seconds: float) -> None:
    tasklib.current_task().connection.execute("select 1")
    time.sleep(seconds)
"""


@tasklib.task
def noop(text: str) -> int:
    return len(text)


@tasklib.task
def failure() -> None:
    raise ValueError("it failed, as it should")


def disk(tasks: int, characters: int) -> None:
    """On a server of its own: what was there before would be counted too."""
    with embedded.postgres() as server, psycopg.connect(server.dsn, autocommit=True) as admin:
        config = tasklib.Config(server.dsn)
        migrate.migrate(config)
        admin.execute("checkpoint")
        wal = _value(admin, "select pg_current_wal_insert_lsn() - '0/0'")
        with tasklib.Client(config) as client:
            for at in range(0, tasks, 1_000):
                texts = [os.urandom(characters // 2).hex() for _ in range(min(1_000, tasks - at))]
                client.submit_many([noop.new(text=text) for text in texts])
            waiting = _bytes(admin, "tasks") / tasks
            TaskWorker(config, concurrency=10).run_until_empty_sync()
        admin.execute("vacuum tasklib.tasks")
        written = (_value(admin, "select pg_current_wal_insert_lsn() - '0/0'") - wal) / tasks
        finished = _bytes(admin, "tasks") / tasks
        print(f"{characters:>7,} | {waiting:>8,.0f} | {finished:>8,.0f} | {written:>8,.0f}", flush=True)


def attempt(tasks: int) -> None:
    """One that failed is a row of its own."""
    with embedded.postgres() as server, psycopg.connect(server.dsn, autocommit=True) as admin:
        config = tasklib.Config(server.dsn, max_retries=0)
        with tasklib.Client(config) as client:
            client.submit_many([failure.new() for _ in range(tasks)])
            TaskWorker(config, concurrency=10).run_until_empty_sync()
        print(f"an attempt that failed: {_bytes(admin, 'attempts') / tasks:,.0f} bytes more")


def _bytes(conn: psycopg.Connection[Any], table: str) -> int:
    return _value(conn, f"select pg_total_relation_size('tasklib.{table}')")


def _value(conn: psycopg.Connection[Any], query: Any) -> int:
    row = conn.execute(query).fetchone()
    return int(row[0]) if row is not None else 0


def daemon(workers: int, concurrency: int) -> None:
    """Idle; then with every slot taken by a task that uses a connection of its own."""
    with (
        embedded.postgres(settings={"max_connections": 300}) as server,
        psycopg.connect(server.dsn, autocommit=True) as admin,
    ):
        migrate.migrate(tasklib.Config(server.dsn))
        with _tasklibd(server.dsn, workers, concurrency) as pid:
            _wait(admin, "select count(*) from tasklib.workers", workers)
            time.sleep(5)  # connections are opened when they are needed first
            _tell(f"{workers} workers, {concurrency} tasks each, idle", pid, admin)
            slots = workers * concurrency
            admin.execute("select tasklib.submit('nap', '{\"seconds\": 3600}') from generate_series(1, %s)", [slots])
            _wait(admin, "select count(*) from tasklib.tasks where state = 'running'", slots)
            _tell("    all slots busy, each with its connection", pid, admin)


def _wait(conn: psycopg.Connection[Any], query: Any, count: int) -> None:
    until = time.monotonic() + 60
    while _value(conn, query) < count:
        assert time.monotonic() < until, query
        time.sleep(0.1)


def _tell(what: str, pid: int, conn: psycopg.Connection[Any]) -> None:
    used = _value(conn, "select count(*) from pg_stat_activity where application_name like 'tasklib%'")
    sizes = [_memory(each) for each in (pid, *_children(pid))]
    print(f"{what}: {used} connections, {sum(sizes):.0f} MB in {len(sizes)} processes, the largest {max(sizes):.0f} MB")


def _children(pid: int) -> list[int]:
    direct = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()]
    return [every for child in direct for every in (child, *_children(child))]


def _memory(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


@contextlib.contextmanager
def _tasklibd(dsn: str, workers: int, concurrency: int) -> Iterator[int]:
    with tempfile.TemporaryDirectory(prefix="footprint-") as directory:
        Path(directory, "footprint_app.py").write_text(APPLICATION, encoding="utf-8")
        words = ["run", "--app", "footprint_app", "--workers", str(workers), "--concurrency", str(concurrency)]
        popen = subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, "-m", "tasklib_daemon", *words, "--web-port", "0", "--log-level", "error"],
            cwd=directory,
            env={**os.environ, "DATABASE_URL": dsn, "XDG_RUNTIME_DIR": directory},
        )
        try:
            yield popen.pid
        finally:
            popen.send_signal(signal.SIGQUIT)
            popen.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=20_000)
    options = parser.parse_args()
    logging.getLogger("tasklib").setLevel(logging.ERROR)  # a failure is a warning each
    print("payload | waiting  | finished | WAL, all in bytes a task")
    for characters in PAYLOADS:
        disk(options.tasks, characters)
    attempt(1_000)
    for workers, concurrency in ((2, 10), (4, 10), (2, 50)):
        daemon(workers, concurrency)
    return 0


if __name__ == "__main__":
    sys.exit(main())
