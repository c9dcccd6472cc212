"""Workers of a daemon are killed under load, one after another, while rows with extreme values lie in every table, and
some of them among what the victims hold: rows that keep the bounds of the schema, and rows from before there were any,
which nobody can change. Whatever is healthy is recovered and completed, and nobody pays for it.

    python3 dev.py soak daemon bad-rows [--kills 60]
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

from tests.campaigns import daemon_app, daemon_kills
from tests.campaigns.daemon_campaign import Campaign, conclude, end_in_good_order, recoveries
from tests.campaigns.soak import say, scratch_directory
from tests.campaigns.soak_worker import work, work_async
from tests.support import extreme_rows
from tests.support.extreme_rows import EXTREMES, KINDS
from tests.support.raw_sql import literal
from tools import measures

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.daemons import Daemon

BOUNDS = ("tasks_timeout_positive", "tasks_counts_whole", "tasks_times_in_calendar")
HELD = ("claimed", "running", "asked")
STILL_LOOKS, LOOK_SECONDS = 10, 0.5
LONG_SECONDS = 4.0
PLANTED = 6  # rows among what a victim holds, each time
# A term without an end, claims of nothing and of nobody, a minute that is full, a worker that never dies.
ODD_ROWS = """
insert into tasklib.elections values ('duties', 'nobody', 4611686018427387904, 'infinity');
insert into tasklib.claims (worker_id, locked_until, task_ids) values
    ('nobody', '-infinity', '{}'), ('nobody', '-infinity', '{null}'), ('', 'infinity', '{}');
insert into tasklib.workers (worker_id, name, hostname, pid, process_name, queues, task_names, concurrency, lease_until)
values ('undying', '', '', 2147483647, '', '{}', '{}', 1000000000, 'infinity'),
       ('long dead', '', '', 0, '', null, '{}', 0, '-infinity');
insert into tasklib.task_rollups (minute, name, queue, completed, seconds)
select date_trunc('minute', now()) + number * interval '1 minute', 'work', 'default', 1000000000000, 1e15
  from generate_series(0, 60) as number;
"""


@dataclass(frozen=True)
class Options:
    kills: int
    seconds_per_kill: float
    rate: float
    share: float
    recovery_seconds: float
    seed: int
    directory: str | None


class Bed:
    """Where bad rows are planted, and what they are known by."""

    def __init__(self, campaign: Campaign) -> None:
        self._dice = campaign.dice
        self.conn = campaign.conn
        self.planted = 0
        ((self._bounds,),) = self.conn.execute(DEFINITIONS, [list(BOUNDS)]).fetchall()
        self.conn.execute("create table poisoned (id uuid primary key)")

    def plant_everywhere(self, share: float) -> None:
        """Every extreme alone, in rows of every kind, or so many of them; and odd rows in the other tables."""
        self.conn.execute(literal(ODD_ROWS))
        with self._without_bounds():
            self._plant_some(share)
        self._plant_some(share)
        say(f"planted: {self.planted} rows")

    def _plant_some(self, share: float) -> None:
        for kind, values in extreme_rows.mixtures([*KINDS], self._dice.randrange(10**6), 100):
            if self._dice.random() < share:
                self._plant(kind, values)

    def plant_among(self, worker_id: str) -> None:
        """What this worker holds."""
        dice = self._dice
        with self._without_bounds():
            for _ in range(PLANTED):
                columns = dice.sample(sorted(set(EXTREMES) - {"worker_id"}), dice.randint(1, 3))
                values = {column: dice.choice(EXTREMES[column]) for column in columns}
                self._plant(dice.choice(HELD), {**values, "worker_id": f"'{worker_id}'"})

    @contextlib.contextmanager
    def _without_bounds(self) -> Iterator[None]:
        """In one transaction: nobody else writes a row that keeps none."""
        names = ", ".join(f"drop constraint {name}" for name in self._bounds)
        texts = ", ".join(f"add constraint {name} {text}" for name, text in self._bounds.items())
        with self.conn.transaction():
            self.conn.execute(literal(f"alter table tasklib.tasks {names}"))
            yield
            self.conn.execute(literal(f"alter table tasklib.tasks {texts}"))

    def _plant(self, kind: str, values: dict[str, str]) -> None:
        task_id = extreme_rows.insert(self.conn, kind, values)
        if task_id is not None:
            self.planted += 1
            self.conn.execute("insert into poisoned values (%s) on conflict do nothing", [task_id])

    def pull_up(self) -> set[str]:
        """What was planted goes, with the claims that tell of it: the judgement is on what is healthy."""
        planted = {str(task_id) for (task_id,) in self.conn.execute("select id from poisoned")}
        self.conn.execute("delete from tasklib.claims where task_ids && array(select id from poisoned)")
        self.conn.execute("delete from tasklib.claims where worker_id in ('nobody', '')")
        self.conn.execute("delete from tasklib.tasks where id in (select id from poisoned)")
        self.conn.execute("delete from tasklib.workers where worker_id in ('undying', 'long dead')")
        return planted


class Poisoner(daemon_kills.Killer):
    """Plants bad rows among what each victim holds, then kills it."""

    def __init__(self, campaign: Campaign, daemon: Daemon, options: Any, bed: Bed) -> None:
        super().__init__(campaign, daemon, options)
        self._bed = bed

    def _victim(self) -> tuple[str, dict[str, Any]]:
        """A worker that has just begun something long: what it executes is what is tried."""
        while True:
            pid = self._scene._begins(self._scene.dice.choice([work, work_async]).new(LONG_SECONDS))
            child = next((each for each in self._daemon.status()["workers"] if each["pid"] == pid), None)
            if child is not None and child.get("worker_id") and not self._is_spared(child):
                self._bed.plant_among(child["worker_id"])
                return "worker", child


DEFINITIONS = """
select jsonb_object_agg(conname, pg_get_constraintdef(oid)) from pg_constraint
 where conrelid = 'tasklib.tasks'::regclass and conname = any(%s)
"""
WAITING = f"tasklib.tasks where ready and name = '{extreme_rows.NAME}'"
HEALTHY_OPEN = "tasklib.tasks where completed_at is null and id not in (select id from poisoned)"


def judge(campaign: Campaign, planted: set[str], options: Options) -> None:
    """Of a bad row an error may tell, and has to name it. Of nothing else."""
    about_bad = [line for line in campaign.lines if str(line.get("task_id")) in planted]
    named = {line["event"] for line in about_bad if line.get("level") == "error"}
    say(f"errors that name a bad row: {sorted(named)}")
    if not named & {"task.unrecoverable", "task.not_claimed", "task.not_promoted", "task.not_expired"}:
        campaign.problems.append("no bad row was met: nothing was tried")
    campaign.lines = [line for line in campaign.lines if str(line.get("task_id")) not in planted]
    failed = [line for line in campaign.lines if line.get("event") in {"duty.failed", "database.refused"}]
    # To plant what the schema refuses takes the table for a moment.
    campaign.problems += [f"a daemon said {line}" for line in failed if "lock timeout" not in str(line.get("error"))][
        :3
    ]
    found = recoveries(campaign.hits, campaign.judge())
    seconds = [each.seconds for each in found]
    say(f"from kill to the next start of what is healthy: {measures.shown(seconds)}; {measures.load()}")
    if not found:
        campaign.problems.append("no kill has hit a task: nothing was tried")
    elif measures.percentile(seconds, 99) >= options.recovery_seconds:
        campaign.problems.append(
            f"p99 {measures.percentile(seconds, 99):.2f} s: {options.recovery_seconds:g} is allowed"
        )


def digest(campaign: Campaign) -> None:
    """What no bound refuses is run like any other, and would only be a backlog: until no more of it is run."""
    counts: list[int] = []
    while len(counts) < STILL_LOOKS or len(set(counts[-STILL_LOOKS:])) > 1:
        counts.append(campaign.count(WAITING))
        time.sleep(LOOK_SECONDS)
    say(f"of {counts[0]} bad rows that are ready, {counts[-1]} cannot be claimed")


def campaign(options: Options, scratch: Path) -> int:
    with contextlib.ExitStack() as stack:
        campaign = Campaign(stack, scratch, rate=options.rate, seed=options.seed, draw=daemon_app.draw)
        campaign._watcher._done.set()  # it does not know a bad row from a healthy one
        bed = Bed(campaign)
        bed.plant_everywhere(options.share)
        app = ["tests.campaigns.daemon_app", "tests.campaigns.daemon_bad_rows_app"]
        settings: dict[str, Any] = {"workers": daemon_kills.WORKERS, "web": {"port": 0}, "lease_seconds": 4.0}
        daemon = campaign.start("poison", waits=False, app=app, **settings)
        daemon.wait_for("daemon.ready", seconds=90)
        digest(campaign)
        poisoner = Poisoner(campaign, daemon, options, bed)
        with campaign.load():
            poisoner.run()
            campaign.expect(lambda: daemon_kills.is_whole(daemon), 60, "the daemon to be whole again")
        campaign.expect(lambda: campaign.count(HEALTHY_OPEN) == 0, 120, "every healthy task to be final")
        campaign.stop("poison")
        say(f"planted: {bed.planted} rows; killed: {dict(poisoner.killed)}; spared: {poisoner.spared}")
        judge(campaign, bed.pull_up(), options)
        return conclude(campaign, options.seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seconds-per-kill", type=float, default=2.0, help="on average")
    parser.add_argument("--rate", type=float, default=4.0, help="tasks submitted a second")
    parser.add_argument("--share", type=float, default=1.0, help="of all extremes that are planted at the start")
    parser.add_argument("--recovery-seconds", type=float, default=60.0, help="from kill to the next start, p99")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--directory", help="keep the database and the journals there")
    options = Options(**vars(parser.parse_args()))
    end_in_good_order()
    say(f"poison: {options}")
    with scratch_directory(options.directory) as scratch:
        return campaign(options, scratch)


if __name__ == "__main__":
    sys.exit(main())
