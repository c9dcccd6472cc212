"""Two daemons under load, whose supervisors are killed in turn. Nobody of the family survives, also if it has left the
session; and what was executing begins again at the other daemon, when the lease of the dead has run out.

    python3 dev.py soak daemon supervisors [--kills 100]
"""

from __future__ import annotations

import argparse
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
    GONE_SECONDS,
    Campaign,
    Hit,
    conclude,
    end_in_good_order,
    is_hit_by,
    kill,
    recoveries,
    wait_until_gone,
)
from tests.campaigns.soak import say, scratch_directory
from tools import measures

if TYPE_CHECKING:
    from collections.abc import Sequence

    import tasklib
    from tests.campaigns.soak import Run

NAMES = ("one", "other")


@dataclass(frozen=True)
class Options:
    kills: int
    rate: float
    lease_seconds: float
    recovery_seconds: float
    seed: int
    directory: str | None


class Killer:
    def __init__(self, campaign: Campaign, options: Options) -> None:
        self._scene = campaign
        self._options = options
        self._settings: dict[str, Any] = {"workers": 2, "lease_seconds": options.lease_seconds}
        self.gone_seconds: list[float] = []
        self.families: list[int] = []
        campaign.start_all(NAMES, **self._settings)

    def run(self) -> None:
        for number in range(1, self._options.kills + 1):
            time.sleep(self._scene.dice.uniform(0.5, 1.5))
            self._kill(NAMES[number % 2], number)

    def _kill(self, name: str, number: int) -> None:
        """Every other time it is started again at once, and otherwise when the other daemon has taken over."""
        campaign, daemon = self._scene, self._scene.daemons[name]
        workers = campaign.occupy(daemon, with_children if number % 2 else daemon_app.draw_long)
        family = [*measures.family(daemon.pid)]
        children = {*campaign.started_processes()}.intersection(family)
        at = time.time()
        kill(daemon.pid)
        seconds, left = wait_until_gone(family, GONE_SECONDS + 5)
        held = campaign.held_by(*workers)
        campaign.hits.append(Hit(workers, at, time.time(), held))
        self._note(family, seconds, left)
        say(
            f"kill {number}/{self._options.kills}: {len(family)} processes, {len(children)} of them started by tasks, "
            f"gone after {seconds:.2f} s; {len(held)} tasks held"
        )
        campaign.forget(name)
        if number % 4 < 2:  # each of the two, now and then
            self._wait_for_recovery(campaign.hits[-1])
            campaign.start(name, **self._settings)
        else:
            campaign.start(name, **self._settings)
            self._wait_for_recovery(campaign.hits[-1])

    def _note(self, family: Sequence[int], seconds: float, left: Sequence[int]) -> None:
        self.gone_seconds.append(seconds)
        self.families.append(len(family))
        if seconds > GONE_SECONDS:
            who = {pid: measures.name_of(pid) for pid in left}
            self._scene.problems.append(f"survivors of a supervisor, after {seconds:.1f} s: {who or 'all gone late'}")

    def _wait_for_recovery(self, hit: Hit) -> None:
        """How long it took is judged in the end; here it is only waited for."""
        hit_tasks = [run.task_id for run in self._scene.runs() if is_hit_by(run, hit)]
        idle = "tasklib.tasks where completed_at is null and id = any(%s)"
        limit = self._options.recovery_seconds + 10
        self._scene.expect(lambda: self._scene.count(idle, hit_tasks) == 0, limit, "what was executing to be done")


def with_children(_dice: random.Random, seconds: float) -> tasklib.NewTask:
    return daemon_app.work_with_children.new(seconds)


def judge(campaign: Campaign, runs: Sequence[Run], options: Options, killer: Killer) -> None:
    found = recoveries(campaign.hits, runs)
    seconds = [each.seconds for each in found]
    say(f"processes of a daemon: {min(killer.families)} to {max(killer.families)}")
    say(f"from kill until the last of them was gone: {measures.shown(killer.gone_seconds)}")
    say(f"from kill to the next start by another daemon: {measures.shown(seconds)}; {measures.load()}")
    late = [each for each in found if each.seconds > options.recovery_seconds]
    if late:
        shown = "; ".join(f"{each.task_id} {each.seconds:.1f} s" for each in late[:5])
        campaign.problems.append(f"{len(late)} tasks began again too late ({options.recovery_seconds:g} s): {shown}")
    if not found:
        campaign.problems.append("no kill has hit a task: nothing was tried")


def campaign(options: Options, scratch: Path) -> int:
    with contextlib.ExitStack() as stack:
        campaign = Campaign(stack, scratch, rate=options.rate, seed=options.seed, draw=daemon_app.draw_with_children)
        killer = Killer(campaign, options)
        with campaign.load():
            killer.run()
        campaign.drain(60)
        for name in NAMES:
            campaign.stop(name)
        if left := campaign.started_processes():
            campaign.problems.append(f"processes that tasks had started are left: {left}")
        runs = campaign.judge()
        judge(campaign, runs, options, killer)
        return conclude(campaign, options.seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rate", type=float, default=4.0, help="tasks submitted a second")
    parser.add_argument("--lease-seconds", type=float, default=15.0)
    parser.add_argument("--recovery-seconds", type=float, default=20.0, help="the longest that is allowed")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--directory", help="keep the database, the journals and the logs there")
    options = Options(**vars(parser.parse_args()))
    end_in_good_order()
    say(f"supervisors: {options}")
    with scratch_directory(options.directory) as scratch:
        return campaign(options, scratch)


if __name__ == "__main__":
    sys.exit(main())
