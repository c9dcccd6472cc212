"""How fast submits are, beside bare INSERT and COPY into a table of the same shape without triggers.

Every way is measured in every round, in turn, on a PostgreSQL of its own with fsync on; what counts is the ratio of
medians within one run. Absolute figures vary with the machine and with whatever else it does.

python3 dev.py bench --rounds 7 --seconds 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

import tasklib
from tasklib import embedded
from tasklib.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

RESULTS = Path(__file__).parent / "results"
SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "4GB", "fsync": "on", "synchronous_commit": "on"}
BULK = 1_000
KWARGS: dict[str, Any] = {"to": "alice@example.com", "subject": "Welcome!", "number": 12345}
BARE_INSERT = "insert into bare.tasks (id, name, kwargs, ready) values (%s, 'send_email', %s, true)"
BARE_COPY = "copy bare.tasks (id, name, kwargs, ready) from stdin"


@tasklib.task
def send_email(to: str, subject: str, number: int) -> None: ...


@dataclass(frozen=True)
class Way:
    """One way to get tasks into the table, and the bare one that it is compared with."""

    name: str
    beside: str | None
    run: Callable[[float], Awaitable[float]]  # for so many seconds; tasks per second


async def repeat(seconds: float, workers: int, once: Callable[[int], Awaitable[int]]) -> float:
    """`workers` coroutines do it again and again until the time is up; how many tasks a second that made."""
    began = time.perf_counter()

    async def work(number: int) -> int:
        count = 0
        while time.perf_counter() - began < seconds:
            count += await once(number)
        return count

    counts = await asyncio.gather(*(work(number) for number in range(workers)))
    return sum(counts) / (time.perf_counter() - began)


def ways(client: tasklib.AsyncClient, bare: list[psycopg.AsyncConnection[Any]]) -> list[Way]:
    kwargs_json = json.dumps(KWARGS)

    async def insert(number: int) -> int:
        await bare[number].execute(BARE_INSERT, [new_id(), kwargs_json])
        return 1

    async def submit(_: int) -> int:
        await client.submit_task(send_email, **KWARGS)
        return 1

    async def copy(_: int) -> int:
        async with bare[0].cursor() as cursor, cursor.copy(BARE_COPY) as stream:
            for _row in range(BULK):
                await stream.write_row((new_id(), "send_email", kwargs_json, True))
        return BULK

    async def submit_many(_: int) -> int:
        return len(await client.submit_many([send_email.new(**KWARGS) for _ in range(BULK)]))

    return [
        Way("INSERT, 1 connection", None, lambda seconds: repeat(seconds, 1, insert)),
        Way("submit, 1 coroutine", "INSERT, 1 connection", lambda seconds: repeat(seconds, 1, submit)),
        Way("INSERT, 10 connections", None, lambda seconds: repeat(seconds, 10, insert)),
        Way("submit, 10 coroutines", "INSERT, 10 connections", lambda seconds: repeat(seconds, 10, submit)),
        Way("COPY, 1,000 rows", None, lambda seconds: repeat(seconds, 1, copy)),
        Way("submit_many, 1,000 tasks", "COPY, 1,000 rows", lambda seconds: repeat(seconds, 1, submit_many)),
    ]


async def measure(dsn: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    async with tasklib.AsyncClient(tasklib.Config(dsn)) as client:
        await client.list_tasks()
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as admin:
            await admin.execute("create schema bare")
            await admin.execute("create table bare.tasks (like tasklib.tasks including all)")
            bare = [await psycopg.AsyncConnection.connect(dsn, autocommit=True) for _ in range(10)]
            for number in range(rounds):
                for way in ways(client, bare):
                    await admin.execute("truncate bare.tasks, tasklib.tasks")
                    await admin.execute("checkpoint")
                    found.setdefault(way.name, []).append(await way.run(seconds))
                    print(f"round {number + 1}/{rounds}  {way.name:26} {found[way.name][-1]:9,.0f}/s", flush=True)
            for conn in bare:
                await conn.close()
    return found


def report(found: dict[str, list[float]]) -> str:
    lines = ["", "| | tasks/s (median) | of the bare one |", "|---|---:|---:|"]
    for way in ways(tasklib.AsyncClient(tasklib.Config("")), []):
        median = statistics.median(found[way.name])
        ratio = f"{median / statistics.median(found[way.beside]):.2f}" if way.beside else ""
        lines.append(f"| {way.name} | {median:,.0f} | {ratio} |")
    return "\n".join(lines)


def assert_durable(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            assert conn.execute("select current_setting(%s)", [setting]).fetchone() == ("on",), setting


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each way in each round")
    options = parser.parse_args()
    with embedded.postgres(settings=SETTINGS) as server:
        assert_durable(server.dsn)
        found = asyncio.run(measure(server.dsn, options.rounds, options.seconds))
        about = {"python": platform.python_version(), "psycopg": psycopg.__version__, "postgresql": server.version}
    print(report(found))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"submit-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps({"about": about, "settings": SETTINGS, "tasks_per_second": found}, indent=2))
    print(f"\n{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
