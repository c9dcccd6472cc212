"""Workers are killed under a backlog that never ends, and beside tasks that take long. What they were executing begins
again within a second while there are fewer of them than workers, and within a few seconds if there are more.

    python3 dev.py soak daemon suspects [--kills 60]
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
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

from tests.campaigns import daemon_app, soak_worker
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
    from tools.daemons import Daemon

BACKLOG = 400  # tasks that are ready at any time, so that no worker is ever idle
VICTIM_SECONDS = 1.5
ABOVE_ALL = 50  # the priority of those that are meant to be hit


@dataclass(frozen=True)
class Options:
    kills: int
    seconds_per_kill: float
    recovery_seconds: float
    crowded_seconds: float
    seed: int
    directory: str | None


@dataclass(frozen=True)
class Phase:
    """How many workers there are, what else they do, and how long a victim may have to wait."""

    name: str
    workers: int
    concurrency: int
    others: tuple[float, float]  # seconds that other tasks take
    seconds: float


def phases(options: Options) -> list[Phase]:
    return [
        Phase("fewer suspects than workers, a backlog of short tasks", 4, 3, (0.01, 0.06), options.recovery_seconds),
        Phase("fewer suspects than workers, beside long tasks", 4, 3, (2.0, 5.0), options.recovery_seconds),
        Phase("more suspects than workers", 2, 8, (0.02, 0.1), options.crowded_seconds),
    ]


class Backlog(threading.Thread):
    """Keeps so many tasks ready."""

    def __init__(self, campaign: Campaign, phase: Phase) -> None:
        super().__init__(name="backlog", daemon=True)
        self._scene = campaign
        self._phase = phase
        self._done = threading.Event()
        self._most = BACKLOG if phase.others[1] < 1 else phase.workers * phase.concurrency // 2

    def run(self) -> None:
        dice = random.Random(1)
        while not self._done.wait(0.05):
            missing = self._most - self._scene.waiting()
            if missing > 0:
                functions = [dice.choice([soak_worker.work, soak_worker.work_async]) for _ in range(missing)]
                self._scene.submit([each.new(dice.uniform(*self._phase.others)) for each in functions])

    def stop(self) -> None:
        self._done.set()
        self.join()


def kill_one(campaign: Campaign, daemon: Daemon, phase: Phase) -> None:
    """The worker that executes most of the victims, once some of them have begun."""
    functions = [soak_worker.work, soak_worker.work_async]
    victims = [
        function.options(priority=ABOVE_ALL).new(VICTIM_SECONDS)
        for function in campaign.dice.choices(functions, k=phase.concurrency)
    ]
    campaign.submit(victims)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pids = [int(child["pid"]) for child in daemon.workers()]
        held = {pid: len(campaign.executing(pid, [each.id for each in victims])) for pid in pids}
        if held and max(held.values()) > 0:
            pid = max(held, key=lambda each: held[each])
            before = campaign.held_by(pid)
            at = time.time()
            kill(pid)
            wait_until_gone([pid], 1)
            campaign.hits.append(Hit(frozenset({pid}), at, time.time(), before))
            return
        time.sleep(0.02)
    raise TimeoutError("no worker executes what was submitted for it")


def run_phase(phase: Phase, options: Options, scratch: Path) -> int:
    say(f"-- {phase.name}: {phase.workers} workers, {phase.concurrency} tasks at a time")
    with contextlib.ExitStack() as stack:
        campaign = Campaign(stack, scratch, rate=1.0, seed=options.seed, draw=daemon_app.draw)
        daemon = campaign.start("suspects", workers=phase.workers, concurrency=phase.concurrency, web={"port": 0})
        with campaign.load():
            backlog = Backlog(campaign, phase)
            backlog.start()
            for number in range(1, options.kills + 1):
                time.sleep(options.seconds_per_kill * campaign.dice.uniform(0.5, 1.5))
                campaign.expect(lambda: len(daemon.workers()) == phase.workers, 60, "the daemon to be whole again")
                kill_one(campaign, daemon, phase)
                if number % 10 == 0 or number == options.kills:
                    say(f"kill {number}/{options.kills}")
            backlog.stop()
        campaign.drain(120)
        campaign.stop("suspects")
        found = recoveries(campaign.hits, campaign.judge())
        seconds = [each.seconds for each in found]
        say(f"suspects a kill: {len(found) / max(len(campaign.hits), 1):.1f}")
        say(f"from kill to the next start: {measures.shown(seconds)}; {measures.load()}")
        p99 = measures.percentile(seconds, 99)
        if not found or p99 >= phase.seconds:
            campaign.problems.append(f"{phase.name}: p99 {p99:.2f} s of {len(found)}, and {phase.seconds:g} is allowed")
        return conclude(campaign, options.seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="in each of three phases")
    parser.add_argument("--seconds-per-kill", type=float, default=2.0, help="on average")
    parser.add_argument("--recovery-seconds", type=float, default=1.0, help="p99 with fewer suspects than workers")
    parser.add_argument("--crowded-seconds", type=float, default=5.0, help="p99 with more suspects than workers")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--directory", help="keep the databases and the journals there")
    options = Options(**vars(parser.parse_args()))
    end_in_good_order()
    say(f"suspects: {options}")
    with scratch_directory(options.directory) as scratch:
        codes = []
        for number, phase in enumerate(phases(options)):
            (scratch / str(number)).mkdir()
            (scratch / str(number)).chmod(0o755)
            codes.append(run_phase(phase, options, scratch / str(number)))
        return max(codes)


if __name__ == "__main__":
    sys.exit(main())
