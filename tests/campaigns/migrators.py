"""Many migrators at once, and migrators killed at any moment: one consistent schema, no stranded lock.

Run as a program for the long campaign; the suite runs a short one.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from typing import Any

import psycopg

import tasklib
from tasklib import embedded, migrate

# Connected and at the start line before the word is given, so that a kill lands inside the migration. With indexes of
# its own, if it is given their SQL.
_RACER = """
import sys, tasklib
from tasklib import migrate
config, known = tasklib.Config(sys.argv[1]), migrate.known_migrations()
indexes = [migrate.Migration(90, "indexes", "index", sql) for sql in sys.argv[2:]]
migrate.known_migrations = lambda: [*known, *indexes]
with migrate._connect(config) as conn:
    print("ready", flush=True)
    sys.stdin.readline()
    if migrate.apply(conn, config.schema).builds:
        migrate.build(conn, config.schema)
"""


def start_racer(url: str, *indexes: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _RACER, url, *indexes]
    racer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert racer.stdout is not None
    assert racer.stdout.readline() == "ready\n"
    return racer


def send_off(racer: subprocess.Popen[str]) -> None:
    assert racer.stdin is not None
    racer.stdin.write("go\n")
    racer.stdin.flush()


def finish(racer: subprocess.Popen[str]) -> int:
    racer.communicate(timeout=120)
    return racer.returncode


def race(url: str, count: int, *indexes: str) -> list[int]:
    """All of them at the same moment."""
    racers = [start_racer(url, *indexes) for _ in range(count)]
    for racer in racers:
        send_off(racer)
    return [finish(racer) for racer in racers]


def kill_one(url: str, after_seconds: float) -> None:
    racer = start_racer(url)
    send_off(racer)
    time.sleep(after_seconds)  # the moment of the kill is what is varied, not something that is waited for
    racer.kill()
    finish(racer)


def state_of(url: str) -> tuple[str, int]:
    """The schema as described, and the advisory locks that are still held once all backends have noticed."""
    with psycopg.connect(url, autocommit=True) as conn:
        _wait_for_dead_backends(conn)
        schema = migrate.describe(conn, "tasklib")
        row = conn.execute(
            """select count(*) from pg_locks
                where locktype = 'advisory'
                  and database = (select oid from pg_database where datname = current_database())"""
        ).fetchone()
    assert row is not None
    return schema, row[0]


def _wait_for_dead_backends(conn: psycopg.Connection[Any]) -> None:
    query = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    deadline = time.monotonic() + 20
    while conn.execute(query).fetchone() != (0,):
        assert time.monotonic() < deadline, "a killed migrator's backend lives on"
        time.sleep(0.01)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starters", type=int, default=20)
    parser.add_argument("--kills", type=int, default=50)
    options = parser.parse_args()
    with embedded.postgres() as server, psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute("create database race")
        codes = race(server.dsn_for("race"), options.starters)
        wanted, locks = state_of(server.dsn_for("race"))
        print(f"{options.starters} at once: exit codes {sorted(set(codes))}, {locks} advisory locks left")
        bad, half = any(codes) or locks > 0, 0
        for number in range(options.kills):
            admin.execute("drop database if exists killed")
            admin.execute("create database killed")
            kill_one(server.dsn_for("killed"), random.uniform(0, 0.12))
            before, locks = state_of(server.dsn_for("killed"))
            migrate.migrate(tasklib.Config(server.dsn_for("killed")))
            after, _ = state_of(server.dsn_for("killed"))
            half += before not in ("\n", wanted)
            bad = bad or locks > 0 or after != wanted
            print(f"kill {number + 1}/{options.kills}: {'before' if before == chr(10) else 'after'}", flush=True)
        print(f"{options.kills} kills: {half} half-made schemas; {'FAILED' if bad or half else 'all consistent'}")
    return 1 if bad or half else 0


if __name__ == "__main__":
    sys.exit(main())
