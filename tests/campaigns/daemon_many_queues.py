"""Many queues, many task names and many large arguments must not slow down other tasks.

python3 dev.py soak daemon many-queues [--queues 10000]
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import string
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

import tasklib
from tasklib import embedded, migrate
from tests.campaigns import daemon_many_queues_app as app
from tests.campaigns.daemon_campaign import end_in_good_order
from tests.campaigns.soak import say
from tools import measures
from tools.daemons import daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.daemons import Daemon

Conn = psycopg.Connection[tuple[Any, ...]]
WARM_UP = 20  # tasks, before any are timed


@dataclass(frozen=True)
class Options:
    queues: int
    tasks: int
    large: int
    names: int
    least_share: float
    default_seconds: float
    memory_mb: float
    more_seconds: float
    round_trips: int


@dataclass(frozen=True)
class Stage:
    conn: Conn
    client: tasklib.Client
    daemon: Daemon


@contextlib.contextmanager
def staged(names: int = 0, before: str = "", **settings: Any) -> Iterator[Stage]:
    """A new server, and a daemon that serves all queues."""
    with embedded.postgres() as server, contextlib.ExitStack() as stack:
        migrate.migrate(tasklib.Config(server.dsn))
        conn = stack.enter_context(psycopg.connect(server.dsn, autocommit=True))
        if before:
            conn.execute(before.encode())
        client = stack.enter_context(tasklib.Client(tasklib.Config(server.dsn, pool_size=2)))
        given: dict[str, Any] = {
            "app": ["tests.campaigns.daemon_many_queues_app"],
            "workers": 2,
            "concurrency": 10,
        } | settings
        environment = {app.NAMES: str(names)}
        made = stack.enter_context(daemon(server.dsn, environment=environment, web={"port": 0}, **given))
        made.wait_for("daemon.ready", seconds=120)
        yield Stage(conn, client, made)


def drained(conn: Conn, seconds: float = 600) -> bool:
    ends = time.monotonic() + seconds
    while conn.execute("select 1 from tasklib.tasks where completed_at is null limit 1").fetchone():
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def round_trips(client: tasklib.Client, count: int) -> list[float]:
    took = []
    for _ in range(count):
        began = time.monotonic()
        client.handle(client.submit(app.quick.new())).result_sync(timeout=300)
        took.append(time.monotonic() - began)
    return took


def rate(options: Options, queues: int) -> tuple[float, list[float]]:
    """How many tasks of a backlog in so many queues are done in a second; and the round trips of tasks in `default`
    beside it.
    """
    with staged() as stage:
        round_trips(stage.client, WARM_UP)
        began = time.monotonic()
        stage.conn.execute(
            "insert into tasklib.tasks (name, queue) select 'quick', 'q' || n %% %s from generate_series(1, %s) n",
            [queues, options.tasks],
        )
        took = round_trips(stage.client, options.round_trips)
        drained(stage.conn)
        return options.tasks / (time.monotonic() - began), took


def try_queues(options: Options) -> list[str]:
    one, _ = rate(options, 1)
    many, took = rate(options, options.queues)
    say(f"one queue: {one:.0f} tasks/s; {options.queues} queues: {many:.0f} tasks/s, {many / one:.2f} of it")
    say(f"a task in `default` beside these: {measures.shown(took)}")
    problems = []
    if many / one < options.least_share:
        problems.append(f"{many / one:.2f} of the rate of one queue, and {options.least_share:g} is the least")
    if measures.percentile(took, 99) > options.default_seconds:
        problems.append(f"p99 {measures.percentile(took, 99):.2f} s in `default`, {options.default_seconds:g} allowed")
    return problems


def try_large(options: Options) -> list[str]:
    """8 MB each, near the limit of the schema, of random text that hardly compresses."""
    text = "".join(random.Random(1).choices(string.ascii_letters + string.digits, k=8_000_000))
    most: dict[int, float] = {}
    with staged() as stage:
        for _ in range(options.large):
            stage.conn.execute(
                "insert into tasklib.tasks (name, kwargs) values ('measure', jsonb_build_object('text', %s::text))",
                [text],
            )
            look_at_memory(stage, most)
        while stage.conn.execute("select 1 from tasklib.tasks where completed_at is null limit 1").fetchone():
            look_at_memory(stage, most)
            time.sleep(0.05)
        bad = stage.conn.execute("select count(*) from tasklib.tasks where state <> 'completed'").fetchone()
    say(f"{options.large} tasks of 8 MB: workers took {', '.join(f'{each:.0f}' for each in most.values())} MB at most")
    problems = [f"{bad[0]} large tasks were not completed"] if bad and bad[0] else []
    if max(most.values()) > options.memory_mb:
        problems.append(f"a worker took {max(most.values()):.0f} MB, and {options.memory_mb:g} are allowed")
    return problems


def look_at_memory(stage: Stage, most: dict[int, float]) -> None:
    for child in stage.daemon.workers():
        pid = int(child["pid"])
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
            most[pid] = max(most.get(pid, 0.0), pages * 4096 / 2**20)


def try_names(options: Options) -> list[str]:
    unserved = f"insert into tasklib.tasks (name) select 'unserved_' || n from generate_series(1, {options.names}) n"
    with staged() as stage:
        round_trips(stage.client, WARM_UP)
        few = statistics.median(round_trips(stage.client, options.round_trips))
    with staged(names=options.names, before=unserved) as stage:
        round_trips(stage.client, WARM_UP)
        many = statistics.median(round_trips(stage.client, options.round_trips))
    say(f"idle, few names: {few * 1000:.1f} ms; {options.names} names and unserved tasks: {many * 1000:.1f} ms")
    if many - few > options.more_seconds:
        return [f"{many - few:.3f} s more, and {options.more_seconds:g} are allowed"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queues", type=int, default=10_000)
    parser.add_argument("--tasks", type=int, default=40_000)
    parser.add_argument("--large", type=int, default=300)
    parser.add_argument("--names", type=int, default=5_000)
    parser.add_argument("--least-share", type=float, default=0.5, help="of the rate with one queue")
    parser.add_argument("--default-seconds", type=float, default=2.0, help="p99 of a task in `default`")
    parser.add_argument("--memory-mb", type=float, default=512.0, help="of a worker")
    parser.add_argument("--more-seconds", type=float, default=0.05, help="that a task takes beside many names")
    parser.add_argument("--round-trips", type=int, default=60, help="tasks that are timed, in each part")
    options = Options(**vars(parser.parse_args()))
    end_in_good_order()
    say(f"many queues: {options}")
    problems = [*try_queues(options), *try_large(options), *try_names(options)]
    for problem in problems:
        say(f"VIOLATION {problem}")
    say(f"{'FAILED' if problems else 'all bounds hold'}; {measures.load()}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
