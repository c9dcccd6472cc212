"""Rolling restarts under load: SIGHUP after SIGHUP. Nothing is lost, no task is begun twice, and what is submitted
meanwhile is picked up as if nothing happened.

    python3 dev.py soak daemon rolling [--restarts 100]
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

from tests.campaigns import daemon_app
from tests.campaigns.daemon_campaign import Campaign, conclude, end_in_good_order
from tests.campaigns.soak import say, scratch_directory
from tests.campaigns.soak_worker import work, work_async
from tools import measures

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    import tasklib
    from tests.campaigns.soak import Run
    from tools.daemons import Daemon

WORKERS = 2
CONCURRENCY = 8
GRACE_SECONDS = 20.0  # far more than any of the tasks takes
RESTART_SECONDS = 60.0  # until it must be over
NAME = "rolling"


@dataclass(frozen=True)
class Options:
    restarts: int
    rate: float
    pause_seconds: float
    gap_seconds: float
    seed: int
    directory: str | None


def draw(dice: random.Random) -> tasklib.NewTask:
    """Half of the capacity is taken at most; some tasks last longer than it takes to start a worker."""
    function, low, high = dice.choices(
        [
            (work, 0.0, 0.05), (work_async, 0.0, 0.05), (daemon_app.write, 0.0, 0.05), (work, 0.5, 2.0),
            (work_async, 0.5, 2.0),
        ],
        [30, 30, 5, 4, 4],
    )[0]  # fmt: skip
    return function.new(dice.uniform(low, high))


class Restarter:
    def __init__(self, campaign: Campaign, options: Options) -> None:
        self._scene = campaign
        self._options = options
        self._daemon: Daemon = campaign.start(
            NAME, workers=WORKERS, concurrency=CONCURRENCY, grace_seconds=GRACE_SECONDS, poll_interval_seconds=1.0
        )
        self.seconds: list[float] = []

    def run(self) -> None:
        time.sleep(1.0)
        for number in range(1, self._options.restarts + 1):
            self._restart()
            if number % 10 == 0 or number == self._options.restarts:
                say(f"restart {number}/{self._options.restarts}: {self.seconds[-1]:.2f} s")
            time.sleep(self._options.pause_seconds * self._scene.dice.uniform(0, 2))

    def _restart(self) -> None:
        """Until others serve. Those before may still finish what they execute."""
        before, pid = self._serving(), self._daemon.pid
        began = time.monotonic()
        self._daemon.signal(signal.SIGHUP)
        self._scene.expect(lambda: self._has_replaced(before), RESTART_SECONDS, "a restart to be over")
        self.seconds.append(time.monotonic() - began)
        if self._daemon.popen.poll() is not None or self._daemon.status()["pid"] != pid:
            self._scene.problems.append("the supervisor is not the same")

    def _has_replaced(self, before: set[int]) -> bool:
        now = self._serving()
        return len(now) == WORKERS + 1 and not now & before

    def _serving(self) -> set[int]:
        status = self._daemon.status()
        children = [*status["workers"], status["keeper"]]
        return {each["pid"] for each in children if each["state"] == "ready"}


def judge(campaign: Campaign, runs: Sequence[Run], options: Options, restarter: Restarter) -> None:
    say(f"from SIGHUP until others serve: {measures.shown(restarter.seconds)}; {measures.load()}")
    created: dict[UUID, float] = dict(
        campaign.conn.execute("select id, extract(epoch from created_at)::float8 from tasklib.tasks").fetchall()
    )
    gaps = [run.began - created[run.task_id] for run in runs if run.task_id in created]
    say(f"from submit to start: {measures.shown(gaps)}; {measures.load()}")
    p99 = measures.percentile(gaps, 99)
    if p99 >= options.gap_seconds:
        campaign.problems.append(f"the gap between submit and start is {p99:.2f} s (p99)")
    judge_attempts(campaign)
    judge_log(campaign, options)


def judge_attempts(campaign: Campaign) -> None:
    """Each task was begun once, and no execution was cut short: all of them ended within the grace."""
    attempts, tasks = campaign.count("tasklib.task_attempts"), campaign.count("tasklib.tasks")
    if attempts != tasks:
        campaign.problems.append(f"{attempts} attempts for {tasks} tasks")
    cut = campaign.count("tasklib.task_attempts where outcome <> 'COMPLETED'")
    crashed = campaign.count("tasklib.tasks where crash_count > 0 or strikes > 0")
    campaign.problems += [
        f"{number} {what}" for what, number in {"cut short": cut, "crashed": crashed}.items() if number
    ]


def judge_log(campaign: Campaign, options: Options) -> None:
    said = [str(line.get("event")) for line in campaign.lines]
    done, replaced = said.count("reload.done"), said.count("worker.died")
    if done != options.restarts or replaced != WORKERS * (options.restarts + 1):
        campaign.problems.append(f"{done} reloads, and {replaced} workers that ended")
    loud = {"worker.killed", "worker.interrupted", "reload.failed", "reload.refused", "daemon.unhealthy"}
    campaign.problems += [f"the daemon said {event}" for event in sorted(loud & {*said})]


def campaign(options: Options, scratch: Path) -> int:
    with contextlib.ExitStack() as stack:
        campaign = Campaign(stack, scratch, rate=options.rate, seed=options.seed, draw=draw)
        restarter = Restarter(campaign, options)
        with campaign.load():
            restarter.run()
        campaign.drain(60)
        campaign.stop(NAME)
        judge(campaign, campaign.judge(), options, restarter)
        return conclude(campaign, options.seed)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=100)
    parser.add_argument("--rate", type=float, default=30.0, help="tasks submitted a second")
    parser.add_argument("--pause-seconds", type=float, default=0.5, help="between two restarts, on average")
    parser.add_argument("--gap-seconds", type=float, default=1.0, help="from submit to start, p99: the most allowed")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--directory", help="keep the database and the journals there")
    options = Options(**vars(parser.parse_args(arguments)))
    end_in_good_order()
    say(f"rolling: {options}; {measures.load()}")
    with scratch_directory(options.directory) as scratch:
        return campaign(options, scratch)


if __name__ == "__main__":
    sys.exit(main())
