"""Other clients use up the server's connections, again and again, under a daemon whose tasks write through connections
of their own. They wait for one, or are given back; none fails, none pays, and each writes once.

    python3 dev.py soak daemon connections [--rounds 50]
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

from tests.campaigns import daemon_app
from tests.campaigns.daemon_campaign import Campaign, conclude, end_in_good_order
from tests.campaigns.soak import say, scratch_directory
from tests.support.used_up_connections import all_connections

WORKERS = 2
PAUSE_SECONDS = (0.5, 2.0)
WARM_SECONDS = 30.0


@dataclass(frozen=True)
class Options:
    rounds: int
    longest_seconds: float
    rate: float
    seed: int
    directory: str | None


def use_up(campaign: Campaign, options: Options) -> tuple[int, float]:
    """How many connections the others had at most, and for how long altogether."""
    most, seconds = 0, 0.0
    for number in range(1, options.rounds + 1):
        time.sleep(campaign.dice.uniform(*PAUSE_SECONDS))
        holds = campaign.dice.uniform(options.longest_seconds / 4, options.longest_seconds)
        with all_connections(campaign.dsn) as taken:
            most = max(most, len(taken))
            time.sleep(holds)
        seconds += holds
        if number % 10 == 0 or number == options.rounds:
            done = campaign.count("tasklib.tasks where state = 'completed'")
            say(f"round {number}/{options.rounds}: {done} tasks are completed")
    return most, seconds


def judge(campaign: Campaign) -> None:
    waited = {line.get("task_id") for line in campaign.lines if line.get("event") == "transaction.waits"}
    snoozed = "(select distinct task_id from tasklib.task_attempts where outcome = 'SNOOZED') as snoozed"
    given_back = campaign.count(snoozed)
    say(f"tasks that waited for a connection: {len(waited)}; that were given back for it: {given_back}")
    if not waited:
        campaign.problems.append("no task has waited for a connection: nothing was tried")
    writers = "tasklib.tasks left join effects on task_id = id where starts_with(name, 'write')"
    unwritten = campaign.count(f"{writers} and task_id is null")
    if unwritten:
        campaign.problems.append(f"{unwritten} tasks have written nothing")


def campaign(options: Options, scratch: Path) -> int:
    with contextlib.ExitStack() as stack:
        campaign = Campaign(stack, scratch, rate=options.rate, seed=options.seed, draw=daemon_app.draw_writer)
        campaign.start("connections", workers=WORKERS, web={"port": 0}, poll_interval_seconds=1.0)
        with campaign.load():
            completed = "tasklib.tasks where state = 'completed'"
            campaign.expect(lambda: campaign.count(completed) >= 2 * WORKERS, WARM_SECONDS, "tasks that are completed")
            most, seconds = use_up(campaign, options)
        say(f"others had up to {most} connections, and all of them for {seconds:.0f} s in {options.rounds} rounds")
        campaign.drain(120)
        campaign.stop("connections")
        campaign.judge()
        judge(campaign)
        return conclude(campaign, options.seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--longest-seconds", type=float, default=8.0, help="that others keep all connections")
    parser.add_argument("--rate", type=float, default=8.0, help="tasks submitted a second")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--directory", help="keep the database and the journals there")
    options = Options(**vars(parser.parse_args()))
    end_in_good_order()
    say(f"connections: {options}")
    with scratch_directory(options.directory) as scratch:
        return campaign(options, scratch)


if __name__ == "__main__":
    sys.exit(main())
