"""Tasks that write through the connection of their task, while their connections are cut before, during and after
COMMIT, their workers are killed, also in the middle of a COMMIT, and frozen until others have their tasks, and while
PostgreSQL restarts.

Effects = completions, no more, no less: every task is completed, by one attempt, and has one row, of that attempt. What
it submitted on the same connection is there once.

    python3 dev.py exactly-once                     1,000 tasks, in four minutes
    python3 dev.py exactly-once --tasks 100 --kills 5
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import logging
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tasklib
from tasklib import migrate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

from tests.campaigns import exactly_once_worker as tasks
from tests.campaigns import soak
from tests.campaigns.soak import connect, load_journals, read_runs, say, scratch_directory, wait_for
from tests.support.invariants import violations
from tests.support.proxy import CuttingProxy
from tests.support.raw_sql import literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.proxy import Fate, Said
    from tests.support.raw_sql import Conn

WORKERS = soak.WORKERS
HELD_SECONDS = 30.0  # a COMMIT that waits for nobody goes on
TRAP_SECONDS = 10.0
FREEZE_SLACK_SECONDS = 2.0  # beyond the lease: until others have taken what a frozen worker held
# A row that a frozen worker's transaction has locked cannot be recovered until it is let go.
BAD_EVENTS = tuple(event for event in soak.BAD_EVENTS if event != "task.unrecoverable")

# Every task in one row each: the effects that it has, and which attempt they are of.
JUDGEMENTS = {
    "not completed": "select id, state, error from tasklib.tasks where state <> 'completed'",
    "not one effect": """
        select task.id, task.state, count(effect.task_id) from tasklib.tasks as task
        left join effects as effect on effect.task_id = task.id
        group by task.id having count(effect.task_id) <> 1""",
    "an effect of no task": "select task_id from effects where task_id not in (select id from tasklib.tasks)",
    "an effect of another attempt than the completed one": """
        select effect.task_id, effect.attempt from effects as effect
        where (effect.task_id, effect.attempt) not in (
            select task_id, attempt from tasklib.task_attempts where outcome = 'COMPLETED')""",
    "not the children that it had": """
        select task.id, count(child.id) from tasklib.tasks as task
        left join tasklib.tasks as child on child.parent_id = task.id
        group by task.id having count(child.id) <> (task.kwargs ->> 'children')::integer""",
}


@dataclass(frozen=True)
class Options:
    tasks: int
    rate: float
    kills: int
    freezes: int
    restarts: int
    lease_seconds: float
    drain_seconds: float
    seed: int
    directory: str | None


# --- At a COMMIT -----------------------------------------------------------------------------------------------------


Kind = Literal["COMMIT", "completion"]


def kind_of(said: Said) -> Kind | None:
    """The end of a task's transaction: a statement that completes the task, if it is still ours, and COMMIT."""
    if said.is_commit:
        return "COMMIT"
    return "completion" if said.is_in_transaction and "settled as (" in said.sql else None


class Trap:
    """Holds the statement that falls into it, until it is let go."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._caught: queue.Queue[int] = queue.Queue()
        self._fate: queue.Queue[Fate] = queue.Queue()

    def hold(self, pid: int) -> Fate:
        self._caught.put(pid)
        try:
            return self._fate.get(timeout=HELD_SECONDS)
        except queue.Empty:
            return "pass"

    def catch(self) -> int | None:
        """The pid of who was about to say it; None: nobody was."""
        try:
            return self._caught.get(timeout=TRAP_SECONDS)
        except queue.Empty:
            return None

    def let_go(self, fate: Fate) -> None:
        self._fate.put(fate)


class Commits:
    """Says what becomes of each COMMIT: from a deck that is shuffled, so that every kind of cut comes soon."""

    cuts: tuple[Fate, ...] = ("before", "before", "during", "after", "after")
    passes: tuple[Fate, ...] = ("pass",) * 9

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._left: list[Fate] = []
        self._trap: Trap | None = None
        self._lock = threading.Lock()

    def set_trap(self, kind: Kind) -> Trap:
        self._trap = Trap(kind)
        return self._trap

    def decide(self, said: Said) -> Fate:
        kind = kind_of(said)
        with self._lock:
            trap = self._trap
            if trap is None or trap.kind != kind:
                return self._draw() if kind == "COMMIT" else "pass"
            self._trap = None
        return trap.hold(said.pid)

    def _draw(self) -> Fate:
        deck = self.cuts + self.passes
        self._left = self._left or self._dice.sample(deck, len(deck))
        return self._left.pop()


# --- Tasks and workers -----------------------------------------------------------------------------------------------


def draw_task(dice: random.Random, number: int) -> tasklib.NewTask:
    """Half of them sync, half async. One in three runs a while, one in four fails at first, one in four has a child."""
    function = (tasks.write, tasks.write_async)[number % 2]
    seconds = dice.choice([0.0, 0.0, dice.uniform(0.1, 3)])
    return function.new(seconds, dice.choice([0, 0, 0, 1, 0, 0, 0, 2]), dice.choice([0, 0, 0, 1]))


class Submitter(threading.Thread):
    """At a steady rate. To submit again what nobody knows of is to submit it once."""

    def __init__(self, dsn: str, new_tasks: Sequence[tasklib.NewTask], rate: float) -> None:
        super().__init__(name="submitter", daemon=True)
        self._config = tasklib.Config(dsn, pool_size=1)
        self._tasks = new_tasks
        self._rate = rate
        self._done = threading.Event()
        self.error: BaseException | None = None

    def stop(self) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        try:
            with tasklib.Client(self._config) as client:
                for task in self._tasks:
                    if self._done.wait(1 / self._rate):
                        return
                    _submit_surely(client, task)
        except BaseException as error:  # noqa: BLE001 - told at the end
            self.error = error


def _submit_surely(client: tasklib.Client, task: tasklib.NewTask) -> None:
    while True:
        with contextlib.suppress(tasklib.CommitUnknown, tasklib.DatabaseUnavailable):
            client.submit(task)
            return


class Workers(soak.Workers):
    def _start(self) -> subprocess.Popen[bytes]:
        number = len(self._started)
        module = "tests.campaigns.exactly_once_worker"
        command = [sys.executable, "-m", module, self._dsn, str(self._journal), str(self._lease_seconds)]
        with (self._logs / f"worker-{number}.log").open("wb") as log:
            process = subprocess.Popen([*command, f"once-{number}"], cwd=soak.ROOT, stdout=log, stderr=log)
        self._started[process.pid] = time.monotonic()
        return process

    def refused(self) -> int:
        """How many executions found at their end that others had their task."""
        lost = re.compile(r" lease\.lost .*task_id=(\S+) token=(\d+)")
        return len({found for log in self._logs.glob("worker-*.log") for found in lost.findall(log.read_text())})


# --- The campaign ----------------------------------------------------------------------------------------------------


@dataclass
class Campaign:
    options: Options
    server: soak.Server
    workers: Workers
    commits: Commits
    conn: Conn
    dice: random.Random
    kills: list[soak.Kill] = field(default_factory=list)
    freezes: list[soak.Freeze] = field(default_factory=list)
    happened: collections.Counter[str] = field(default_factory=collections.Counter)
    problems: list[str] = field(default_factory=list)

    def make_trouble(self) -> None:
        """In any order, at moments that vary, spread over the time in which tasks come."""
        given = self.options
        kills: list[Callable[[], None]] = [self._kill_in_commit, self._kill]
        freezes: list[Callable[[], None]] = [self._freeze_before_completion, self._freeze_in_commit, self._freeze]
        restarts: list[Callable[[], None]] = [lambda: self._restart("fast"), lambda: self._restart("immediate")]
        wanted = ((kills, given.kills), (freezes, given.freezes), (restarts, given.restarts))
        troubles = [trouble for kinds, number in wanted for trouble in itertools.islice(itertools.cycle(kinds), number)]
        self.dice.shuffle(troubles)
        until = time.monotonic() + given.tasks / given.rate
        for left in range(len(troubles), 0, -1):
            time.sleep(max(until - time.monotonic(), 0) / left * self.dice.uniform(0, 1))
            troubles[left - 1]()

    def _kill(self) -> None:
        self._kill_one(self.dice.randrange(WORKERS))
        self._note("killed")

    def _kill_in_commit(self) -> None:
        """The server hears the COMMIT all the same, or does not; nobody is there to hear the answer."""
        trap = self.commits.set_trap("COMMIT")
        pid = trap.catch()
        if pid in self.workers.pids:
            self._kill_one(self.workers.pids.index(pid))
            self._note("killed in COMMIT")
        trap.let_go(self.dice.choice(["pass", "before"]))

    def _kill_one(self, victim: int) -> None:
        self.kills.append(self.workers.kill(self.conn, victim, is_timed=False))

    def _freeze(self) -> None:
        """Until others have what it held."""
        self._await_elders()
        self._freeze_one(self.dice.randrange(WORKERS))
        self._note("frozen")

    def _freeze_in_commit(self) -> None:
        """The server hears the COMMIT while nobody can hear the answer; or its connection is gone when it wakes up."""
        self._await_elders()
        trap = self.commits.set_trap("COMMIT")
        pid = trap.catch()
        fate: Fate = self.dice.choice(["pass", "before", "after"])
        if pid in self.workers.pids:
            self._freeze_one(self.workers.pids.index(pid), lambda: trap.let_go(fate))
            self._note("frozen in COMMIT")
        trap.let_go(fate)

    def _freeze_before_completion(self) -> None:
        """The server hears who completes the task when others have it already."""
        self._await_elders()
        trap = self.commits.set_trap("completion")
        pid = trap.catch()
        if pid in self.workers.pids:
            self._freeze_one(self.workers.pids.index(pid))
            self._note("frozen before its completion")
        trap.let_go("pass")

    def _freeze_one(self, victim: int, when_frozen: Callable[[], None] = lambda: None) -> None:
        process, at = self.workers.processes[victim], time.time()
        process.send_signal(signal.SIGSTOP)
        when_frozen()
        time.sleep(self.options.lease_seconds + FREEZE_SLACK_SECONDS)
        process.send_signal(signal.SIGCONT)
        self.freezes.append(soak.Freeze(process.pid, at, time.time()))

    def _await_elders(self) -> None:
        wait_for(lambda: len(self.workers.elders()) > 1, self.options.lease_seconds * 2 + 20, "two that can recover")

    def _restart(self, mode: Literal["fast", "immediate"]) -> None:
        self.server.stop(mode)
        time.sleep(self.dice.uniform(0, 1))
        self.server.start()
        self.conn.close()
        self.conn = connect(self.server.dsn)
        self._note(f"restarted, {mode}")

    def _note(self, what: str) -> None:
        self.happened[what] += 1
        say(f"{what} ({self.happened[what]})")

    def drain(self) -> None:
        began = time.monotonic()
        try:
            wait_for(lambda: self._count("tasklib.tasks where completed_at is null") == 0, self.options.drain_seconds,
                     "every task to be final")  # fmt: skip
            live = self.workers.pids
            wait_for(lambda: self._count("tasklib.workers where died_at is null and pid <> all(%s)", live) == 0,
                     self.options.lease_seconds * 2 + 20, "the dead to be declared dead")  # fmt: skip
            wait_for(lambda: self._count("tasklib.workers where died_at is null and pid = any(%s)", live) == WORKERS,
                     20, "all workers to be up")  # fmt: skip
        except TimeoutError as error:
            self.problems.append(str(error))
        say(f"drained in {time.monotonic() - began:.1f} s")

    def stop_workers(self) -> None:
        self.problems += [f"worker {pid} ended by itself" for pid in self.workers.dead()]
        codes = self.workers.terminate()
        if codes != [0] * WORKERS:
            self.problems.append(f"exit codes after SIGTERM: {codes}")

    def judge(self, scratch: Path, submitted: Sequence[tasklib.NewTask], proxy: CuttingProxy) -> None:
        for what, query in JUDGEMENTS.items():
            rows = self.conn.execute(literal(query)).fetchall()
            self.problems += [f"{what}: {len(rows)} tasks: {rows[:5]}"] if rows else []
        outcomes: dict[str, tuple[str | None, soak.Outcome]] = {str(task.id): (None, "ok") for task in submitted}
        children = self.conn.execute("select id::text from tasklib.tasks where parent_id is not null").fetchall()
        outcomes |= {child: (None, "ok") for (child,) in children}
        load_journals(self.conn, outcomes, read_runs(scratch / "runs", self.kills, self.freezes))
        self.problems += [str(each) for each in violations(self.conn)]
        events = self.workers.events()
        self.problems += [f"a worker said {event}, {events[event]} times" for event in BAD_EVENTS if events[event]]
        cuts: tuple[Fate, ...] = ("before", "during", "after")
        self.problems += [f"no connection was cut {when} COMMIT" for when in cuts if not proxy.commits[when]]
        self._tell(proxy, events)

    def _tell(self, proxy: CuttingProxy, events: collections.Counter[str]) -> None:
        by_state = self._counts("select state, count(*) from tasklib.tasks group by 1")
        say(f"tasks: {by_state}, of which children: {self._count('tasklib.tasks where parent_id is not null')}")
        say(f"effects: {self._count('effects')}")
        say(f"attempts: {self._counts('select outcome, count(*) from tasklib.task_attempts group by 1')}")
        say(f"commits by where they were cut: {dict(sorted(proxy.commits.items()))}")
        say(f"answers lost after COMMIT: {dict(proxy.lost_answers)}; found to be committed: {events['commit.found']}")
        say(f"refused, since others had the task: {self.workers.refused()}")
        say(f"happened: {dict(sorted(self.happened.items()))}")
        quiet = {"task.completed", "task.interrupted"}
        say(f"workers said: { {name: events[name] for name in sorted(events) if name not in quiet} }")

    def close(self) -> None:
        self.conn.close()

    def _count(self, what: str, *parameters: Any) -> int:
        row = self.conn.execute(literal(f"select count(*) from {what}"), parameters).fetchone()
        assert row is not None
        return int(row[0])

    def _counts(self, query: str) -> dict[Any, int]:
        return dict(sorted(self.conn.execute(literal(query)).fetchall()))


def run(options: Options, scratch: Path) -> list[str]:
    dice = random.Random(options.seed)
    with contextlib.ExitStack() as stack:
        server = soak.Server(scratch / "postgres")
        server.start()
        stack.callback(server.stop, "fast")
        migrate.migrate(tasklib.Config(server.dsn))
        conn = connect(server.dsn)
        conn.execute(tasks.MAKE_EFFECTS)
        commits = Commits(random.Random(options.seed))
        sockets = scratch / "proxy"
        sockets.mkdir()
        proxy = stack.enter_context(CuttingProxy(server.dsn, sockets, commits.decide))
        workers = Workers(proxy.url, scratch, options.lease_seconds)
        stack.callback(workers.destroy)
        campaign = Campaign(options, server, workers, commits, conn, dice)
        stack.callback(campaign.close)
        submitted = [draw_task(dice, number) for number in range(options.tasks)]
        submitter = Submitter(server.dsn, submitted, options.rate)
        stack.callback(submitter.stop)
        submitter.start()
        campaign.make_trouble()
        submitter.join()
        if submitter.error is not None:
            campaign.problems.append(f"the submitter failed: {submitter.error!r}")
        campaign.drain()
        campaign.stop_workers()
        campaign.judge(scratch, submitted, proxy)
        return campaign.problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=6.0, help="tasks submitted a second")
    parser.add_argument("--kills", type=int, default=30, help="of workers; half of them in a COMMIT")
    parser.add_argument("--freezes", type=int, default=9, help="of workers, for longer than a lease")
    parser.add_argument("--restarts", type=int, default=8, help="of PostgreSQL; half of them immediate")
    parser.add_argument("--lease-seconds", type=float, default=3.0)
    parser.add_argument("--drain-seconds", type=float, default=120.0, help="until every task must be final")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--directory", help="keep the database, the journals and the logs there")
    options = Options(**vars(parser.parse_args()))
    logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)  # lost connections are what this is about
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without ending the workers
    say(f"exactly once: {options}")
    began = time.monotonic()
    with scratch_directory(options.directory) as scratch:
        problems = run(options, scratch)
    for problem in problems:
        say(f"VIOLATION {problem}")
    verdict = "FAILED" if problems else "effects = completions"
    say(f"{verdict}; {time.monotonic() - began:.0f} s, seed {options.seed}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
