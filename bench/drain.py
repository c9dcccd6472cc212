"""How fast a backlog is run, beside a bare loop of claim and finish in SQL; how soon a task starts; what idling costs.

Every way is measured in every round, in turn, on a PostgreSQL of its own with fsync on. Tasks are no-ops with a small
payload; results and attempts are kept. The bare loop claims and finishes 500 rows at a time with the same statements
and runs nothing: what is above it is the price of running Python.

python3 dev.py bench drain --rounds 5 --tasks 20000
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg

import tasklib
from tasklib import TaskWorker, embedded
from tasklib.outcomes import Completed, Rules, decide
from tasklib.statements import WorkerDescription, WorkerStatements, settlement_json
from tasklib.worker.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "4GB", "fsync": "on", "synchronous_commit": "on"}
BATCH = 500
began: list[float] = []


@tasklib.task
def sync_noop(number: int, text: str) -> int:  # noqa: ARG001 - a payload
    return number


@tasklib.task
async def async_noop(number: int, text: str) -> int:  # noqa: ARG001 - a payload
    return number


@tasklib.task
def note() -> None:
    began.append(time.perf_counter())


def drain(config: tasklib.Config, concurrency: int) -> Callable[[], None]:
    return lambda: TaskWorker(config, concurrency=concurrency).run_until_empty_sync()


def bare_loop(config: tasklib.Config) -> None:
    statements, session = WorkerStatements(config), Session(config, "bare")
    worker_id = f"bare-{time.monotonic_ns()}"
    session.run(statements.register(WorkerDescription(worker_id, "bare", "host", 1, "bare", None, [], 1)))
    while claimed := session.run(statements.claim(worker_id, "default", ["sync_noop"], BATCH, suspects=True)):
        now = datetime.now(UTC)
        settled = [
            settlement_json(
                each.held, decide(each.held, Completed('{"value":1}'), now, Rules()), started_at=now, finished_at=now
            )
            for each in claimed
        ]
        session.run(statements.settle(worker_id, settled, {each.claim_id for each in claimed}))
    session.run(statements.deregister(worker_id))
    session.close()


def rate(
    client: tasklib.Client, admin: psycopg.Connection[Any], task: Any, count: int, way: Callable[[], None]
) -> float:
    for at in range(0, count, 1_000):
        client.submit_many([task.new(number=at + n, text="alice@example.com") for n in range(min(1_000, count - at))])
    admin.execute("vacuum analyze tasklib.tasks")
    admin.execute("checkpoint")
    start = time.perf_counter()
    way()
    return count / (time.perf_counter() - start)


def latency(config: tasklib.Config, client: tasklib.Client, count: int = 200) -> tuple[float, float, float]:
    """Submit to the first line of the function, of an idle worker, in ms: p50, p95; and its CPU share while idle."""
    worker = TaskWorker(config)
    thread = threading.Thread(target=worker.run_sync)
    thread.start()
    time.sleep(2)
    used = time.process_time()
    time.sleep(5)
    idle = (time.process_time() - used) / 5
    late = []
    for _ in range(count):
        before, start = len(began), time.perf_counter()
        client.submit_task(note)
        while len(began) == before:
            time.sleep(0.0002)
        late.append((began[-1] - start) * 1_000)
        time.sleep(0.01)
    worker.stop()
    thread.join()
    late.sort()
    return late[count // 2], late[count * 95 // 100], idle


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=20_000)
    options = parser.parse_args()
    with embedded.postgres(settings=SETTINGS) as server, psycopg.connect(server.dsn, autocommit=True) as admin:
        config = tasklib.Config(server.dsn)
        with tasklib.Client(config) as client:
            client.list_tasks()
            ways: dict[str, tuple[Any, Callable[[], None]]] = {
                "bare loop": (sync_noop, lambda: bare_loop(config)),
                "sync, concurrency 1": (sync_noop, drain(config, 1)),
                "sync, concurrency 10": (sync_noop, drain(config, 10)),
                "async, concurrency 50": (async_noop, drain(config, 50)),
            }
            rates: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(options.rounds):
                for name, (task, way) in ways.items():
                    rates[name].append(rate(client, admin, task, options.tasks, way))
                    print(f"round {number + 1}: {name}: {rates[name][-1]:,.0f} tasks/s", flush=True)
            bare = statistics.median(rates["bare loop"])
            for name, each in rates.items():
                print(f"{name:22} median {statistics.median(each):8,.0f} tasks/s, {statistics.median(each) / bare:.2f}")
            p50, p95, idle = latency(config, client)
            print(f"idle: submit to start p50 {p50:.1f} ms, p95 {p95:.1f} ms; {idle:.2%} of a core")
    return 0


if __name__ == "__main__":
    sys.exit(main())
