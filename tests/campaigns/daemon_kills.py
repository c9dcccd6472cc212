"""Random children of a daemon are killed under load, one after another: workers mostly, keeper and web child too. What
was executing begins again within a second, and nobody pays for it.

    python3 dev.py soak daemon kills [--kills 500]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

from tests.campaigns import daemon_app
from tests.campaigns.daemon_campaign import (
    Campaign,
    Hit,
    conclude,
    end_in_good_order,
    kill,
    recoveries,
    wait_until_gone,
)
from tests.campaigns.soak import say, scratch_directory
from tools import measures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.campaigns.soak import Run
    from tools.daemons import Daemon

WORKERS = 3
ROLES = {"worker": 8, "keeper": 1, "web": 1}  # how often each is hit
BURY_AFTER = 3  # the default
BUSY_SECONDS = 0.5


@dataclass(frozen=True)
class Options:
    kills: int
    seconds_per_kill: float
    rate: float
    recovery_seconds: float
    seed: int
    directory: str | None


class Killer:
    def __init__(self, campaign: Campaign, daemon: Daemon, options: Options) -> None:
        self._scene = campaign
        self._daemon = daemon
        self._options = options
        self.killed: collections.Counter[str] = collections.Counter()
        self.spared = 0

    def run(self) -> None:
        for number in range(1, self._options.kills + 1):
            time.sleep(self._options.seconds_per_kill * self._scene.dice.uniform(0.5, 1.5))
            self._kill_one()
            if number % 25 == 0 or number == self._options.kills:
                say(f"kill {number}/{self._options.kills}: {dict(self.killed)}")

    def _kill_one(self) -> None:
        role, child = self._victim()
        pid, campaign = int(child["pid"]), self._scene
        held = campaign.held_by(pid) if role == "worker" else frozenset()
        at = time.time()
        kill(pid)
        wait_until_gone([pid], 1)
        if role == "worker":
            campaign.hits.append(Hit(frozenset({pid}), at, time.time(), held))
        self.killed[role if child["state"] == "ready" else f"{role}, {child['state']}"] += 1

    def _victim(self) -> tuple[str, dict[str, Any]]:
        """Any child that lives; but for a worker whose task would be buried. One that has nothing to do is given a
        moment to get something: what it executes is what is tried.
        """
        patience = time.monotonic() + BUSY_SECONDS
        while True:
            role = self._scene.dice.choices(list(ROLES), list(ROLES.values()))[0]
            slot = self._scene.dice.randrange(WORKERS)
            while is_idle(child := self._child(role, slot)) and time.monotonic() < patience:
                time.sleep(0.005)
            if child["pid"] is not None and not self._is_spared(child):
                return role, child
            time.sleep(0.01)

    def _child(self, role: str, slot: int) -> dict[str, Any]:
        status = self._daemon.status()
        found: dict[str, Any] = status["workers"][slot] if role == "worker" else status[role]
        return found

    def _is_spared(self, child: dict[str, Any]) -> bool:
        """A task under which its worker has died four times, three times when it was alone, is as good as guilty: there
        is nothing by which to tell chance from guilt.
        """
        doomed = "tasklib.tasks where worker_id = %s and strikes >= %s"
        if not child.get("worker_id") or not self._scene.count(doomed, child["worker_id"], BURY_AFTER - 1):
            return False
        self.spared += 1
        return True


def is_idle(child: dict[str, Any]) -> bool:
    return child["state"] == "ready" and child.get("running") == 0


def is_whole(daemon: Daemon) -> bool:
    status = daemon.status()
    return len(daemon.workers()) == WORKERS and all(status[role]["state"] == "ready" for role in ("keeper", "web"))


def judge(campaign: Campaign, runs: Sequence[Run], options: Options) -> None:
    found = recoveries(campaign.hits, runs)
    seconds = [each.seconds for each in found]
    say(f"from kill to the next start: {measures.shown(seconds)}; {measures.load()}")
    settled = [float(line["seconds"]) for line in campaign.lines if line.get("event") == "worker.recovered"]
    say(f"from death to what it held being runnable: {measures.shown(settled)}")
    boots = [float(line["seconds"]) for line in campaign.lines if line.get("event") == "worker.ready"]
    say(f"from fork to a worker that claims: {measures.shown(boots)}")
    p99 = measures.percentile(seconds, 99)
    if p99 >= options.recovery_seconds:
        late = sorted(found, key=lambda each: -each.seconds)[: max(len(found) // 100, 5)]
        shown = "; ".join(f"{each.task_id} {each.seconds:.2f} s" for each in late)
        campaign.problems.append(f"p99 {p99:.2f} s, and {options.recovery_seconds:g} is allowed. The last: {shown}")
    if campaign.hits and not found:
        campaign.problems.append("no kill has hit a task: nothing was tried")


def campaign(options: Options, scratch: Path) -> int:
    with contextlib.ExitStack() as stack:
        campaign = Campaign(stack, scratch, rate=options.rate, seed=options.seed, draw=daemon_app.draw)
        daemon = campaign.start("kills", workers=WORKERS, web={"port": 0}, poll_interval_seconds=1.0)
        supervisor = daemon.status()["pid"]
        killer = Killer(campaign, daemon, options)
        with campaign.load():
            killer.run()
            campaign.expect(lambda: is_whole(daemon), 60, "the daemon to be whole again")
        campaign.drain(60)
        if daemon.status()["pid"] != supervisor:
            campaign.problems.append("another supervisor")
        campaign.stop("kills")
        runs = campaign.judge()
        judge(campaign, runs, options)
        say(f"killed: {dict(killer.killed)}; spared, because a task of theirs would have been buried: {killer.spared}")
        return conclude(campaign, options.seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seconds-per-kill", type=float, default=2.0, help="on average")
    parser.add_argument("--rate", type=float, default=4.0, help="tasks submitted a second")
    parser.add_argument("--recovery-seconds", type=float, default=1.0, help="from kill to the next start, p99")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--directory", help="keep the database and the journals there")
    options = Options(**vars(parser.parse_args()))
    end_in_good_order()
    say(f"kills: {options}")
    with scratch_directory(options.directory) as scratch:
        return campaign(options, scratch)


if __name__ == "__main__":
    sys.exit(main())
