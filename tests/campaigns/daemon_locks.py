"""Somebody locks rows of tasks that a daemon executes: the tasks themselves, on their own connections, and users. What
everybody else does goes on as before.

    python3 dev.py soak daemon locks [--seconds 60]

With `--round-trips`, a phase lasts until that many tasks that nobody locked have ended: this needs no fast machine.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

import tasklib
from tests.campaigns import daemon_app, soak_worker
from tests.campaigns.daemon_campaign import Campaign, conclude, end_in_good_order
from tests.campaigns.soak import say, scratch_directory
from tools import measures

HELD_SECONDS = 3.0
USERS = 3
BYSTANDER = 1  # the priority of tasks that nobody locks: they must not notice


@dataclass(frozen=True)
class Options:
    seconds: float
    round_trips: int
    least_share: float
    seed: int
    directory: str | None


class Locker(threading.Thread):
    """A user who takes a row of a running or claimed task now and then, and thinks for a while."""

    def __init__(self, dsn: str, seed: int) -> None:
        super().__init__(name="locker", daemon=True)
        self._dsn = dsn
        self._dice = random.Random(seed)
        self._done = threading.Event()
        self.locked = 0

    def run(self) -> None:
        with psycopg.connect(self._dsn) as conn:
            while not self._done.is_set():
                rows = conn.execute(
                    """select id from tasklib.tasks where id in (select unnest(task_ids) from tasklib.claims)
                        and priority <> %s limit 5 for update skip locked""",
                    [BYSTANDER],
                ).fetchall()
                self.locked += len(rows)
                self._done.wait(self._dice.uniform(0.2, HELD_SECONDS) if rows else 0.05)
                conn.rollback()

    def stop(self) -> None:
        self._done.set()
        self.join()


@dataclass(frozen=True)
class Phase:
    """How long each task took that was submitted after the one before had ended, and how long they took together."""

    took: list[float]
    seconds: float

    @property
    def rate(self) -> float:
        return len(self.took) / self.seconds


def round_trips(campaign: Campaign, client: tasklib.Client, *, seconds: float, least: int) -> Phase:
    """For so many seconds, and until there were so many."""
    took: list[float] = []
    began = time.monotonic()
    while (now := time.monotonic()) < began + seconds or len(took) < least:
        task = soak_worker.work_async.options(priority=BYSTANDER).new(0.0)
        campaign.submit([task])
        while (found := client.get_task(task.id)) is None or found.completed_at is None:
            time.sleep(0.002)  # a client that waits for a result holds a lock of its own
        took.append(time.monotonic() - now)
    return Phase(took, time.monotonic() - began)


def campaign(options: Options, scratch: Path) -> int:
    with contextlib.ExitStack() as stack:
        campaign = Campaign(stack, scratch, rate=3.0, seed=options.seed, draw=daemon_app.draw)
        campaign.start("locks", workers=2, concurrency=8, web={"port": 0})
        client = tasklib.Client(tasklib.Config(campaign.dsn, pool_size=2))
        stack.callback(client.close)
        with campaign.load():
            before = round_trips(campaign, client, seconds=options.seconds / 2, least=options.round_trips)
            lockers = [Locker(campaign.dsn, options.seed + number) for number in range(USERS)]
            for each in lockers:
                each.start()
            is_over = threading.Event()
            holders = threading.Thread(target=hold_rows, args=[campaign, is_over], daemon=True)
            holders.start()
            beside = round_trips(campaign, client, seconds=options.seconds, least=options.round_trips)
            is_over.set()
            holders.join()
            for each in lockers:
                each.stop()
        campaign.drain(60)
        campaign.stop("locks")
        campaign.judge()
        say(f"rows that users locked: {sum(each.locked for each in lockers)}")
        say(f"round trips before: {measures.shown(before.took)}")
        say(f"round trips beside the locks: {measures.shown(beside.took)}; {measures.load()}")
        share = beside.rate / before.rate
        say(f"round trips a second: {share:.2f} of before")
        if share < options.least_share:
            campaign.problems.append(f"{share:.2f} of the round trips, and {options.least_share:g} is the least")
        return conclude(campaign, options.seed)


def hold_rows(campaign: Campaign, is_over: threading.Event) -> None:
    while not is_over.is_set():
        campaign.submit([daemon_app.hold_itself.new(HELD_SECONDS) for _ in range(3)])
        is_over.wait(HELD_SECONDS / 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="with locks; half of it without comes first")
    parser.add_argument("--round-trips", type=int, default=1, help="at least so many, without locks and with them")
    parser.add_argument("--least-share", type=float, default=0.6, help="of the round trips without locks")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--directory", help="keep the database and the journals there")
    options = Options(**vars(parser.parse_args()))
    end_in_good_order()
    say(f"locks: {options}")
    with scratch_directory(options.directory) as scratch:
        return campaign(options, scratch)


if __name__ == "__main__":
    sys.exit(main())
