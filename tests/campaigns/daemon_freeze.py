"""Two daemons under load, of which one is frozen, every process of it, until the other has taken over; then it goes on
where it was. What it writes too late changes nothing, and it is one of them again.

    python3 dev.py soak daemon freeze [--freezes 10]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
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
    is_hit_by,
    recoveries,
)
from tests.campaigns.soak import say, scratch_directory, wait_for
from tools import measures
from tools.daemons import is_alive

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from tests.campaigns.soak import Run
    from tools.daemons import Daemon

NAMES = ("one", "other")
WORKERS = 2
PAST_SECONDS = 1.0  # beyond the lease, at least
REJOIN_SECONDS = 20.0
_ROWS = """
select to_jsonb(task) as task, array(
           select to_jsonb(attempt) from tasklib.task_attempts as attempt where task_id = task.id order by attempt)
from tasklib.tasks as task where id = any(%s) and completed_at is not null order by id
"""


@dataclass(frozen=True)
class Options:
    freezes: int
    rate: float
    lease_seconds: float
    recovery_seconds: float
    seed: int
    directory: str | None


class Freezer:
    def __init__(self, campaign: Campaign, options: Options) -> None:
        self._scene = campaign
        self._options = options
        self.rejoined_seconds: list[float] = []
        self._taken_over: dict[UUID, Any] = {}  # rows of tasks that others had finished before the thaw
        campaign.start_all(NAMES, workers=WORKERS, lease_seconds=options.lease_seconds)

    def run(self) -> None:
        for number in range(1, self._options.freezes + 1):
            time.sleep(self._scene.dice.uniform(0.5, 1.5))
            self._freeze(self._scene.daemons[NAMES[number % 2]], number)

    def _freeze(self, daemon: Daemon, number: int) -> None:
        campaign = self._scene
        workers = campaign.occupy(daemon, daemon_app.draw_long)
        frozen = stop_all(daemon.pid)
        at = time.time()
        held = campaign.held_by(*workers)
        taken = self._wait_for_takeover(Hit(workers, at, float("inf"), held))
        time.sleep(max(at + self._options.lease_seconds + PAST_SECONDS - time.time(), 0))
        until = time.time()
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        campaign.hits.append(Hit(workers, at, until, held))
        self._wait_for_rejoin(daemon, workers, until)
        say(
            f"freeze {number}/{self._options.freezes}: {len(frozen)} processes for {until - at:.1f} s, "
            f"{len(taken)} tasks executing; back after {self.rejoined_seconds[-1]:.2f} s"
        )

    def _wait_for_takeover(self, hit: Hit) -> list[UUID]:
        """Until the others have done all that it executes; it may take no longer than the limit."""
        campaign = self._scene
        executing = [run.task_id for run in campaign.runs() if is_hit_by(run, hit)]
        undone = "tasklib.tasks where completed_at is null and id = any(%s)"
        limit = self._options.recovery_seconds + 5
        campaign.expect(lambda: campaign.count(undone, executing) == 0, limit, "others to do the frozen tasks")
        dead = "tasklib.workers where died_at is null and pid = any(%s)"
        campaign.expect(lambda: campaign.count(dead, [*hit.pids]) == 0, limit, "the frozen workers to be declared dead")
        for task, attempts in campaign.conn.execute(_ROWS, [executing]).fetchall():
            self._taken_over[task["id"]] = (task, attempts)
        return executing

    def _wait_for_rejoin(self, daemon: Daemon, workers: frozenset[int], since: float) -> None:
        """The same processes, registered anew; and one of them executes something."""
        campaign, began = self._scene, time.monotonic()
        alive = "tasklib.workers where died_at is null and lease_until > clock_timestamp() and pid = any(%s)"

        def has_rejoined() -> bool:
            is_back = campaign.count(alive, [*workers]) == WORKERS
            return is_back and any(run.pid in workers and run.began > since for run in campaign.runs())

        campaign.expect(has_rejoined, REJOIN_SECONDS, "a thawed daemon to take part again")
        self.rejoined_seconds.append(time.monotonic() - began)
        now = frozenset(int(each["pid"]) for each in daemon.status()["workers"] if each["pid"])
        if now != workers:
            campaign.problems.append(f"other workers after the thaw: {sorted(workers)}, {sorted(now)}")

    def judge(self, runs: Sequence[Run]) -> None:
        campaign = self._scene
        rows = campaign.conn.execute(_ROWS, [[*self._taken_over]]).fetchall()
        now = {task["id"]: (task, attempts) for task, attempts in rows}
        changed = [task_id for task_id, row in self._taken_over.items() if now.get(task_id) != row]
        if changed:
            campaign.problems.append(f"changed after others had finished them: {changed[:5]}")
        late = [run for run in runs for hit in campaign.hits if is_hit_by(run, hit) and run.ended]
        say(f"bodies that went on after the thaw, in vain: {len(late)}")
        found = recoveries(campaign.hits, runs)
        seconds = [each.seconds for each in found]
        say(f"from freeze to the next start by the other daemon: {measures.shown(seconds)}; {measures.load()}")
        say(f"from thaw to its next start: {measures.shown(self.rejoined_seconds)}")
        if measures.percentile(seconds, 100) > self._options.recovery_seconds:
            campaign.problems.append(f"began again too late: {max(seconds):.1f} s")
        if not found:
            campaign.problems.append("no freeze has hit a task: nothing was tried")


def stop_all(root: int) -> list[int]:
    """The whole family, also who is born meanwhile. They stand still when it returns."""
    stopped: list[int] = []
    while new := [pid for pid in measures.family(root) if pid not in stopped]:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped += new
    wait_for(lambda: all(stands_still(pid) for pid in stopped), 5, "everybody to stand still")
    return [pid for pid in stopped if is_alive(pid)]


def stands_still(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] in {"T", "Z"}
    return True


def campaign(options: Options, scratch: Path) -> int:
    with contextlib.ExitStack() as stack:
        campaign = Campaign(stack, scratch, rate=options.rate, seed=options.seed, draw=daemon_app.draw)
        freezer = Freezer(campaign, options)
        with campaign.load():
            freezer.run()
        campaign.drain(60)
        for name in NAMES:
            campaign.stop(name)
        freezer.judge(campaign.judge())
        return conclude(campaign, options.seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--freezes", type=int, default=10)
    parser.add_argument("--rate", type=float, default=6.0, help="tasks submitted a second")
    parser.add_argument("--lease-seconds", type=float, default=15.0)
    parser.add_argument("--recovery-seconds", type=float, default=20.0, help="the longest that is allowed")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--directory", help="keep the database, the journals and the logs there")
    options = Options(**vars(parser.parse_args()))
    end_in_good_order()
    say(f"freeze: {options}")
    with scratch_directory(options.directory) as scratch:
        return campaign(options, scratch)


if __name__ == "__main__":
    sys.exit(main())
