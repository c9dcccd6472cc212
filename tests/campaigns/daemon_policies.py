"""Two daemons under a load in queues with a cap, a cap for each worker, a rate, a breaker and none, and a cap over all
queues. Policies change, queues are paused and resumed, workers and keepers are killed, and PostgreSQL restarts. The
bodies of the tasks journal when they begin and end, outside the database; by that journal no policy is ever broken, and
permits are used while tasks wait.

    python3 dev.py soak daemon policies [--tasks 20000]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import logging
import os
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

import tasklib

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

from tests.campaigns import daemon_policies_app as app
from tests.campaigns import policy_witness as witness
from tests.campaigns.daemon_campaign import Campaign, Hit, conclude, end_in_good_order, kill, wait_until_gone
from tests.campaigns.policy_witness import Timeline
from tests.campaigns.soak import connect, say, scratch_directory
from tests.campaigns.soak_worker import write
from tools import measures

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.campaigns.policy_witness import Body

DAEMONS = ("one", "two")
RATE_SECONDS = 2.0
PROBES = 2
BREAKER = {
    "breaker_failures": 5,
    "breaker_open_seconds": 2,
    "breaker_probes": PROBES,
    "breaker_codes": ["ConnectionError"],
}
SETTLE_SECONDS = 3.0  # after a change, until the use of permits is measured
BACKLOG = 150  # tasks that are kept ready in queues that are always busy
LEAST_BACKLOG = 20  # with fewer, the use of permits is not judged
FEED_SECONDS = 0.2
MOST_SHOWN = 5


@dataclass(frozen=True)
class Options:
    tasks: int
    chaos_seconds: float
    quiet_seconds: float
    step_seconds: float
    restarts: bool
    workers: int
    quiet_cap: int
    least_use: float
    drain_seconds: float
    seed: int
    directory: str | None


class PolicyCampaign(Campaign):
    def _judge_costs(self) -> None:
        """Tasks of this load fail and are retried by design."""


class Feeder(threading.Thread):
    """Keeps tasks ready in the queues with a cap or a rate, and gives the others a few at once from time to time."""

    def __init__(self, campaign: Campaign, tasks: int, seed: int) -> None:
        super().__init__(name="feeder", daemon=True)
        self._scene = campaign
        self._dice = random.Random(seed)
        self._file = os.open(campaign.scratch / "submits", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._client = tasklib.Client(tasklib.Config(campaign.dsn, database_timeout_seconds=1, pool_size=1))
        self.left = tasks
        self.backlogs: list[tuple[float, int]] = []  # of the queue with a cap
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while self.left > 0:
                time.sleep(FEED_SECONDS)
                with contextlib.suppress(psycopg.OperationalError):
                    self._feed(self._ready())
        except BaseException as error:  # noqa: BLE001 - told at the end
            self.error = error
        finally:
            self._client.close()

    def _ready(self) -> dict[str, int]:
        with connect(self._scene.dsn) as conn:
            rows = conn.execute("select queue::text, count(*) from tasklib.tasks where ready group by 1").fetchall()
        return dict(rows)

    def _feed(self, ready: dict[str, int]) -> None:
        self.backlogs.append((time.monotonic(), ready.get(app.CAPPED, 0)))
        for queue in (app.CAPPED, app.RATED):
            self._submit(queue, max(BACKLOG - ready.get(queue, 0), 0))
        for queue in (app.PER_WORKER, app.FRAGILE, app.PLAIN):
            if ready.get(queue, 0) < BACKLOG and self._dice.random() < 0.1:
                self._submit(queue, self._dice.randint(10, 50))

    def _submit(self, queue: str, number: int) -> None:
        batch = [app.draw(self._dice, queue) for _ in range(min(number, self.left))]
        if not batch:
            return
        outcome = "ok"
        try:
            self._client.submit_many(batch)
        except tasklib.CommitUnknown:
            outcome = "unknown"
        except tasklib.DatabaseUnavailable:
            outcome = "refused"
        for task in batch:
            write(self._file, id=str(task.id), key=None, outcome=outcome)
        if outcome == "ok":
            self.left -= len(batch)


class BreakerSamples(threading.Thread):
    """What the database says of the breaker, all the time: nobody outside of it knows."""

    def __init__(self, dsn: str) -> None:
        super().__init__(name="breaker", daemon=True)
        self._dsn = dsn
        self._done = threading.Event()
        self.samples: list[tuple[float, float, str, int, float]] = []  # asked, answered, state, epoch, seconds left

    def stop(self) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        while not self._done.wait(0.05):
            with contextlib.suppress(psycopg.OperationalError), connect(self._dsn) as conn:
                while not self._done.wait(0.05):
                    asked = time.monotonic()
                    row = conn.execute(
                        "select state, epoch, coalesce(extract(epoch from open_until - clock_timestamp()), 0)::float8 "
                        "from tasklib.breakers where queue = %s",
                        [app.FRAGILE],
                    ).fetchone()
                    if row is not None:
                        self.samples.append((asked, time.monotonic(), *row))

    def over(self, bodies: Sequence[Body]) -> list[str]:
        """Starts while it was open, but for the first moment, and more than its probes while it was half open."""
        opened: dict[int, float] = {}
        for _, answered, state, epoch, _ in self.samples:
            if state == "open":
                opened.setdefault(epoch, answered)
        found = []
        counted = list(witness.executing_at_starts(bodies))
        for (asked, _, state, epoch, left), (_, until, _, later_epoch, _) in zip(
            self.samples, self.samples[1:], strict=False
        ):
            if state != "open" or epoch != later_epoch:
                continue
            since = max(asked, opened[epoch] + witness.KNOWN_SECONDS)
            open_until = asked + left
            found += [
                f"{body.task_id} started {open_until - body.decided:.3f} s before the breaker was half open"
                for body, _ in counted
                if since < body.decided < min(open_until, until)
            ]
            found += [
                f"{body.task_id} was number {number} while the breaker was half open"
                for body, number in counted
                if number > PROBES and max(since, open_until) < body.decided < body.began < until
            ]
        return sorted(set(found))


class Operator:
    """Changes policies at random, and notes when each change was sent and confirmed."""

    def __init__(self, campaign: Campaign) -> None:
        self._scene = campaign
        self._dice = campaign.dice
        self.caps: Timeline[int | None] = Timeline()
        self.worker_caps: Timeline[int | None] = Timeline()
        self.cluster_caps: Timeline[int | None] = Timeline()
        self.rates: Timeline[int | None] = Timeline()
        self.pauses: dict[str, Timeline[bool]] = {queue: Timeline() for queue in app.QUEUES}
        self._outage = Path(campaign.scratch / "outage")
        self.done: collections.Counter[str] = collections.Counter()

    def set_queue(self, queue: str, **policy: Any) -> tuple[float, float]:
        return self._send("select tasklib.set_queue(%s, %s::jsonb)", queue, json.dumps(policy))

    def _send(self, sql: str, *values: Any) -> tuple[float, float]:
        """As often as it takes. If an answer was lost, the change came into force at some moment between the two."""
        sent = time.monotonic()
        while True:
            with contextlib.suppress(psycopg.OperationalError), connect(self._scene.dsn) as conn:
                conn.execute(sql, values)
                return sent, time.monotonic()
            time.sleep(0.05)

    def set_cap(self, cap: int | None) -> None:
        self.caps.note(*self.set_queue(app.CAPPED, max_running=cap), cap)

    def set_worker_cap(self, cap: int | None) -> None:
        self.worker_caps.note(*self.set_queue(app.PER_WORKER, max_per_worker=cap), cap)

    def set_rate(self, rate: int | None) -> None:
        limits = {"rate_limit": rate, "rate_seconds": rate and RATE_SECONDS, "rate_burst": rate and max(rate // 4, 1)}
        self.rates.note(*self.set_queue(app.RATED, **limits), rate)

    def set_cluster_cap(self, cap: int | None) -> None:
        sent = self._send("select tasklib.set_cluster(%s::jsonb)", json.dumps({"cluster_wide_cap": cap}))
        self.cluster_caps.note(*sent, cap)

    def pause(self, queue: str) -> None:
        self.pauses[queue].note(*self._send("select tasklib.pause_queue(%s, 'chaos')", queue), value=True)

    def resume(self, queue: str) -> None:
        self.pauses[queue].note(*self._send("select tasklib.resume_queue(%s)", queue), value=False)

    def set_outage(self, *, is_down: bool) -> None:
        self._outage.touch() if is_down else self._outage.unlink(missing_ok=True)

    def calm(self, cap: int) -> None:
        """All queues run, with limits that leave room."""
        self.set_outage(is_down=False)
        for queue in app.QUEUES:
            self.resume(queue)
        self.set_cluster_cap(24)
        self.set_cap(cap)
        self.set_worker_cap(2)
        self.set_rate(40)

    def change(self) -> None:
        dice = self._dice
        changes: dict[str, tuple[int, Callable[[], None]]] = {
            "cap": (6, lambda: self.set_cap(dice.choice([None, 0, 1, 3, 6, 10, 14]))),
            "cap of a worker": (2, lambda: self.set_worker_cap(dice.choice([None, 1, 1, 2, 3]))),
            "cap over all": (2, lambda: self.set_cluster_cap(dice.choice([None, None, 4, 10, 20]))),
            "rate": (2, lambda: self.set_rate(dice.choice([None, 10, 20, 40, 60]))),
            "pause": (3, lambda: self.pause(dice.choice(app.QUEUES))),
            "resume": (5, lambda: self.resume(dice.choice(app.QUEUES))),
            "outage": (2, lambda: self.set_outage(is_down=dice.random() < 0.4)),
        }
        name = dice.choices(list(changes), [weight for weight, _ in changes.values()])[0]
        changes[name][1]()
        self.done[name] += 1


class Chaos:
    def __init__(self, campaign: Campaign, operator: Operator, options: Options) -> None:
        self._scene = campaign
        self._operator = operator
        self._options = options
        self.deaths: dict[int, float] = {}  # by pid; monotonic
        self.done: collections.Counter[str] = collections.Counter()

    def run(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            time.sleep(self._options.step_seconds * self._scene.dice.uniform(0.2, 1.8))
            step = self._scene.dice.random()
            if step < 0.75:
                self._operator.change()
            elif step < 0.96 or not self._options.restarts:
                self.kill_one()
            else:
                self.restart()

    def kill_one(self) -> None:
        daemon = self._scene.daemons[self._scene.dice.choice(DAEMONS)]
        status = daemon.status()
        is_keeper = self._scene.dice.random() < 0.1
        child = status["keeper"] if is_keeper else self._scene.dice.choice(status["workers"])
        if child["pid"] is None:
            return
        pid, at = int(child["pid"]), time.time()
        self.deaths[pid] = time.monotonic()
        kill(pid)
        wait_until_gone([pid], 1)
        if not is_keeper:
            self._scene.hits.append(Hit(frozenset({pid}), at, time.time(), frozenset()))
        self.done["keeper killed" if is_keeper else "worker killed"] += 1

    def restart(self) -> None:
        mode = self._scene.dice.choice(["fast", "immediate"])
        self._scene.server.stop("fast" if mode == "fast" else "immediate")
        time.sleep(self._scene.dice.uniform(0.0, 1.0))
        self._scene.server.start()
        self._scene.conn.close()
        self._scene.conn = connect(self._scene.dsn)
        self.done[f"restart, {mode}"] += 1


class Drive:
    """Chaos and quiet by turns, until all tasks are submitted; then everything ends."""

    def __init__(self, campaign: Campaign, options: Options) -> None:
        self.scene = campaign
        self.options = options
        self.operator = Operator(campaign)
        self.chaos = Chaos(campaign, self.operator, options)
        self.feeder = Feeder(campaign, options.tasks, options.seed)
        self.breaker = BreakerSamples(campaign.dsn)
        self.quiet: list[tuple[float, float]] = []

    def run(self) -> None:
        self.operator.set_queue(app.FRAGILE, **BREAKER)
        self.operator.calm(self.options.quiet_cap)
        environment = {app.OUTAGE: str(self.scene.scratch / "outage")}
        os.environ.update(environment)  # inherited by the daemons
        self.scene.start_all(
            DAEMONS, app=["tests.campaigns.daemon_policies_app"], workers=self.options.workers, bury_after=50
        )
        self.breaker.start()
        self.feeder.start()
        with self.scene.load():
            while self.feeder.is_alive():
                self._rest()
                self.chaos.run(self.options.chaos_seconds)
                say(f"left to submit: {self.feeder.left}; {dict(self.chaos.done)}; {dict(self.operator.done)}")
        self.operator.calm(12)
        self.operator.set_cluster_cap(None)
        self.operator.set_rate(None)
        self.scene.drain(self.options.drain_seconds)
        self.scene.expect(lambda: self.scene.count("tasklib.permits") == 0, 10, "every permit to go back")
        left = self.scene.conn.execute(
            "select permits.*, name, died_at, lease_until > now() as lives from tasklib.permits "
            "left join tasklib.workers using (worker_id)"
        ).fetchall()
        self.scene.problems += [f"permits are left: {row}" for row in left]
        self.breaker.stop()
        for name in DAEMONS:
            self.scene.stop(name)

    def _rest(self) -> None:
        self.operator.calm(self.options.quiet_cap)
        self.scene.expect(self._is_whole, 60, "the daemons to be whole again")
        time.sleep(SETTLE_SECONDS)
        since = time.monotonic()
        time.sleep(self.options.quiet_seconds)
        self.quiet.append((since, time.monotonic()))

    def _is_whole(self) -> bool:
        return all(len(self.scene.daemons[name].workers()) == self.options.workers for name in DAEMONS)


def judge(drive: Drive) -> None:
    campaign, operator = drive.scene, drive.operator
    pids: dict[str, int] = dict(campaign.conn.execute("select worker_id, pid from tasklib.workers").fetchall())
    lines = (campaign.scratch / "runs").read_text("utf-8").splitlines()
    bodies, unknown = witness.read_bodies(lines, drive.chaos.deaths, pids)
    by_queue = {queue: [body for body in bodies if body.queue == queue] for queue in app.QUEUES}
    say(
        f"bodies: {len(bodies)}, {unknown} without an end; { ({queue: len(each) for queue, each in by_queue.items()}) }"
    )
    if drive.feeder.error is not None:
        campaign.problems.append(f"the feeder failed: {drive.feeder.error!r}")
    found = {
        "over the cap": witness.over_cap(by_queue[app.CAPPED], operator.caps),
        "over the cap of a worker": witness.over_cap(
            by_queue[app.PER_WORKER], operator.worker_caps, lambda body: body.worker_id
        ),
        "over the cap over all queues": witness.over_cap(bodies, operator.cluster_caps),
        "over the rate": witness.over_rate(by_queue[app.RATED], operator.rates, RATE_SECONDS),
        "while paused": [
            each
            for queue, pauses in operator.pauses.items()
            for each in witness.started_while_paused(by_queue[queue], pauses)
        ],
        "while the breaker forbade it": drive.breaker.over(by_queue[app.FRAGILE]),
    }  # fmt: skip
    for what, starts in found.items():
        say(f"starts {what}: {len(starts)}")
        if starts:
            campaign.problems.append(f"{len(starts)} starts {what}: {'; '.join(starts[:MOST_SHOWN])}")
    judge_use(drive, by_queue[app.CAPPED])


def judge_use(drive: Drive, capped: Sequence[Body]) -> None:
    shares = []
    for since, until in drive.quiet:
        looks = [(at, number) for at, number in drive.feeder.backlogs if since <= at <= until]
        is_fed = bool(looks) and looks[-1][0] > until - 1  # else all tasks had been submitted before its end
        if is_fed and min(number for _, number in looks) >= LEAST_BACKLOG:
            shares.append(witness.used_share(capped, drive.options.quiet_cap, since, until))
    say(f"share of the cap that executed: {', '.join(f'{share:.3f}' for share in shares)}; {len(drive.quiet)} looks")
    average = sum(shares) / max(len(shares), 1)
    say(f"permits used: {average:.3f} on average; {measures.load()}")
    if average < drive.options.least_use:
        drive.scene.problems.append(f"permits were used to {average:.3f}, and {drive.options.least_use} is the least")


def hits_of_crashes(scratch: Path) -> list[Hit]:
    """Tasks that kill their worker hit the others in it."""
    said = [json.loads(line) for line in (scratch / "runs").read_text("utf-8").splitlines() if '"crashed"' in line]
    return [Hit(frozenset({each["pid"]}), each["at"] - 0.01, each["at"] + 1, frozenset()) for each in said]


def campaign(options: Options, scratch: Path) -> int:
    with contextlib.ExitStack() as stack:
        campaign = PolicyCampaign(stack, scratch, rate=2.0, seed=options.seed, draw=app.draw_plain)
        drive = Drive(campaign, options)
        drive.run()
        campaign.hits += hits_of_crashes(scratch)
        campaign.judge()
        judge(drive)
        say(f"{dict(drive.chaos.done)}; changes: {dict(drive.operator.done)}")
        return conclude(campaign, options.seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--chaos-seconds", type=float, default=25.0, help="between two quiet phases")
    parser.add_argument("--quiet-seconds", type=float, default=8.0, help="in which the use of permits is measured")
    parser.add_argument("--step-seconds", type=float, default=0.6, help="on average, between two changes or kills")
    parser.add_argument("--no-restarts", dest="restarts", action="store_false", help="PostgreSQL is left alone")
    parser.add_argument("--workers", type=int, default=4, help="of each of the two daemons")
    parser.add_argument("--quiet-cap", type=int, default=6, help="while the use of permits is measured")
    parser.add_argument("--least-use", type=float, default=0.94, help="of the cap, in quiet phases")
    parser.add_argument("--drain-seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--directory", help="keep the database and the journals there")
    options = Options(**vars(parser.parse_args()))
    end_in_good_order()
    logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)  # lost connections are part of it
    say(f"policies: {options}")
    with scratch_directory(options.directory) as scratch:
        return campaign(options, scratch)


if __name__ == "__main__":
    sys.exit(main())
