"""A steady load on three workers, while they are killed one after another, while PostgreSQL restarts, while both happen
at once, and while workers are frozen until others think them dead.

Nothing that was acknowledged may be lost, nothing may run twice at once, and what a killed worker held must go on soon.
What was submitted, and what ran, is journaled outside the database; tests/support/invariants.sql compares the two at
the end.

    python3 dev.py soak                             everything, in a quarter of an hour
    python3 dev.py soak --kills 20 --restarts 10
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

import psycopg

import tasklib
from tasklib import embedded, migrate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

from tests.campaigns import soak_worker as tasks
from tests.support.invariants import AT_ANY_TIME, make_journal_tables, violations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.support.raw_sql import Conn

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 3
STOP_SECONDS = 30.0
STILL_RUNNING = -1000
LOOK_SECONDS = 2.0
RECOVERY_SLACK_SECONDS = 5.0  # beyond the lease: the reaper's pause, and suspects that wait to be alone
FREEZE_SLACK_SECONDS = 5.0  # beyond the lease: until others have taken what a frozen worker held
# What a worker must never say, whatever happens to it and to its database.
BAD_EVENTS = ("loop.failed", "finish.refused", "task.unrecoverable", "backoff.failed", "worker.abandoned", "Traceback")
Outcome = Literal["ok", "unknown", "refused"]
_RANK: dict[Outcome, int] = {"refused": 0, "unknown": 1, "ok": 2}


@dataclass(frozen=True)
class Options:
    kills: int
    restarts: int
    mixed: int
    freezes: int
    rate: float
    seconds_per_kill: float
    seconds_per_restart: float
    lease_seconds: float
    drain_seconds: float
    recovery_seconds: float | None
    ruthless: bool
    seed: int
    directory: str | None


# --- PostgreSQL ------------------------------------------------------------------------------------------------------


class Server:
    """One directory, on which the server starts again after each stop. fsync is on: it is the default."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open = contextlib.ExitStack()
        self._running: embedded.EmbeddedPostgres | None = None
        self.dsn = ""

    def start(self) -> None:
        self._running = self._open.enter_context(embedded.postgres(self._directory))
        assert self.dsn in ("", self._running.dsn)
        self.dsn = self._running.dsn

    def stop(self, mode: Literal["fast", "immediate"]) -> None:
        assert self._running is not None
        self._running.stop(mode)
        self._open.close()


# --- Submitting ------------------------------------------------------------------------------------------------------


def draw_task(dice: random.Random) -> tasklib.NewTask:
    """One of the mix. Long ones are few: a task that was running when its worker died runs alone the next time."""
    options: tasklib.SubmitOptions = {"priority": dice.choice([-5, 0, 0, 0, 10])}
    if dice.random() < 0.1:
        options["queue"] = "other"
    if dice.random() < 0.1:
        options["delay_seconds"] = dice.uniform(0.1, 2)
    elif dice.random() < 0.02:
        options["expires_at"] = datetime.now(UTC) + timedelta(seconds=dice.uniform(0.1, 3))
    kinds: dict[str, tuple[float, Callable[[], tasklib.NewTask]]] = {
        "instant": (30, lambda: tasks.work.options(**options).new(0.0)),
        "instant_async": (15, lambda: tasks.work_async.options(**options).new(0.0)),
        "short": (15, lambda: tasks.work.options(**options).new(dice.uniform(0.01, 0.05))),
        "short_async": (12, lambda: tasks.work_async.options(**options).new(dice.uniform(0.01, 0.05))),
        "long": (2, lambda: tasks.work.options(**options).new(dice.uniform(0.5, 3))),
        "long_async": (2, lambda: tasks.work_async.options(**options).new(dice.uniform(0.5, 3))),
        "once": (2, lambda: tasks.work_once.options(**options).new(dice.uniform(0.01, 2))),
        "once_async": (1, lambda: tasks.work_once_async.options(**options).new(dice.uniform(0.01, 2))),
        "flaky": (6, lambda: tasks.flaky.options(**options).new(dice.randint(1, 2))),
        "eager": (4, lambda: tasks.eager.options(**options).new(dice.randint(1, 2))),
        "sleepy": (4, lambda: tasks.sleepy.options(**options).new(dice.randint(1, 2), dice.choice([0, 0.3]))),
        "hopeless": (2, lambda: tasks.hopeless.options(**options).new()),
        "told": (2, lambda: tasks.told.options(**options).new()),
        "gives_up": (1, lambda: tasks.gives_up.options(**options).new()),
        "late": (1, lambda: tasks.late.options(**options).new()),
        "late_async": (1, lambda: tasks.late_async.options(**options).new()),
    }
    weights = [weight for weight, _ in kinds.values()]
    _, make = dice.choices(list(kinds.values()), weights)[0]
    return make()


class Submitter(threading.Thread):
    """At a steady rate, one by one, in batches and on a connection of its own. Every submit is journaled with what is
    known of it: an error after which nobody knows is not repeated until it is known.
    """

    def __init__(
        self,
        dsn: str,
        journal: Path,
        rate: float,
        seed: int,
        draw: Callable[[random.Random], tasklib.NewTask] = draw_task,
    ) -> None:
        super().__init__(name="submitter", daemon=True)
        self._draw = draw
        self._dsn = dsn
        self._file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._rate = rate
        self._dice = random.Random(seed)
        self._done = threading.Event()
        # A deadline below the length of an outage, so that some submits end without an answer.
        self._client = tasklib.Client(tasklib.Config(dsn, database_timeout_seconds=1, pool_size=2))
        self._own: Conn | None = None
        self._keys = itertools.count()
        self.error: BaseException | None = None

    def stop(self) -> None:
        self._done.set()
        self.join()
        self._client.close()
        if self._own is not None:
            self._own.close()

    def run(self) -> None:
        due = time.monotonic()
        try:
            while not self._done.wait(max(due - time.monotonic(), 0)):
                number = self._submit_some()
                due = max(due + number / self._rate, time.monotonic() - 1)
        except BaseException as error:  # noqa: BLE001 - told at the end
            self.error = error

    def _submit_some(self) -> int:
        way = self._dice.random()
        if way < 0.05:
            batch = [self._draw(self._dice) for _ in range(5)]
            self._journal(batch, self._try(lambda: self._client.submit_many(batch)))
            return len(batch)
        task = self._draw(self._dice)
        if way < 0.15:
            self._journal([task], self._submit_in_own_transaction(task))
            return 1
        if way < 0.2:
            return self._submit_with_key()
        outcome = self._try(lambda: self._client.submit(task))
        self._journal([task], outcome)
        if outcome == "unknown" and self._dice.random() < 0.5:  # to submit it twice is to submit it once
            self._journal([task], self._try(lambda: self._client.submit(task)))
        return 1

    def _submit_with_key(self) -> int:
        key = f"key-{next(self._keys)}"
        for _ in range(2):
            task = tasks.work.options(idempotency_key=key).new(0.01)
            found: list[tasklib.TaskId] = []
            outcome = self._try(lambda task=task, found=found: found.append(self._client.submit(task)))  # type: ignore[misc]
            tasks.write(self._file, id=str(found[0] if found else task.id), key=key, outcome=outcome)
        return 1

    def _submit_in_own_transaction(self, task: tasklib.NewTask) -> Outcome:
        try:
            if self._own is None or self._own.closed:
                self._own = psycopg.connect(self._dsn)
            self._client.submit(task, connection=self._own)
        except (psycopg.Error, tasklib.TasklibError):
            self._close_own()
            return "refused"
        try:
            self._own.commit()
        except psycopg.Error:
            self._close_own()
            return "unknown"
        return "ok"

    def _close_own(self) -> None:
        if self._own is not None:
            self._own.close()

    def _try(self, submit: Callable[[], object]) -> Outcome:
        try:
            submit()
        except tasklib.CommitUnknown:
            return "unknown"
        except tasklib.DatabaseUnavailable:
            return "refused"
        return "ok"

    def _journal(self, submitted: Sequence[tasklib.NewTask], outcome: Outcome) -> None:
        for each in submitted:
            tasks.write(self._file, id=str(each.id), key=None, outcome=outcome)


# --- Workers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    pid: int
    at: float  # wall clock
    died: float
    held: frozenset[UUID]
    is_timed: bool = True  # whether what it held must go on in time


@dataclass(frozen=True)
class Freeze:
    pid: int
    at: float
    until: float


class Workers:
    def __init__(self, dsn: str, scratch: Path, lease_seconds: float) -> None:
        self._dsn = dsn
        self._journal = scratch / "runs"
        self._logs = scratch
        self._lease_seconds = lease_seconds
        self._started: dict[int, float] = {}
        self.processes: list[subprocess.Popen[bytes]] = [self._start() for _ in range(WORKERS)]

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self.processes]

    def dead(self) -> list[int]:
        return [each.pid for each in self.processes if each.poll() is not None]

    def elders(self) -> list[int]:
        """Those old enough to recover others' tasks: a reaper acts when it has been connected for a lease."""
        old = self._lease_seconds + 3
        return [pid for pid in self.pids if time.monotonic() - self._started[pid] > old]

    def freeze(self, victim: int, seconds: float) -> Freeze:
        process = self.processes[victim]
        at = time.time()
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        until = time.time()
        process.send_signal(signal.SIGCONT)
        return Freeze(process.pid, at, until)

    def kill(self, conn: Conn, victim: int, *, is_timed: bool) -> Kill:
        process = self.processes[victim]
        at = time.time()
        process.kill()
        process.wait()
        died = time.time()
        kill = Kill(process.pid, at, died, held_by(conn, process.pid), is_timed)
        self.processes[victim] = self._start()
        return kill

    def terminate(self) -> list[int]:
        for each in self.processes:
            each.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for each in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(max(deadline - time.monotonic(), 0.1))
        return [each.returncode if each.returncode is not None else STILL_RUNNING for each in self.processes]

    def destroy(self) -> None:
        for each in self.processes:
            each.kill()
            each.wait()

    def events(self) -> collections.Counter[str]:
        """What the workers said, by the name of the event."""
        found: collections.Counter[str] = collections.Counter()
        for log in self._logs.glob("worker-*.log"):
            found.update(re.findall(r"^[\d-]+ [\d:,]+ [A-Z]+ ([\w.]+)", log.read_text(), re.MULTILINE))
            found.update(re.findall(r"^Traceback", log.read_text(), re.MULTILINE))
        return found

    def _start(self) -> subprocess.Popen[bytes]:
        number = len(self._started)
        command = [sys.executable, "-m", "tests.campaigns.soak_worker", self._dsn, str(self._journal)]
        with (self._logs / f"worker-{number}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, str(self._lease_seconds), f"soak-{number}"], cwd=ROOT, stdout=log, stderr=log
            )
        self._started[process.pid] = time.monotonic()
        return process


def held_by(conn: Conn, pid: int) -> frozenset[UUID]:
    rows = conn.execute(
        """
        select task.id from tasklib.workers as worker
        join tasklib.claims as claim using (worker_id)
        cross join unnest(claim.task_ids) as taken (id)
        join tasklib.tasks as task on task.id = taken.id and task.worker_id = worker.worker_id
        where worker.pid = %s and worker.died_at is null
        """,
        [pid],
    ).fetchall()
    return frozenset(row[0] for row in rows)


# --- What happened ---------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A body that began."""

    task_id: UUID
    token: int
    attempt: int
    worker_id: str
    pid: int
    began: float
    finished: float | None = None
    ended: str | None = None
    was_hit: bool = False  # its process was killed or frozen under it


def read_runs(journal: Path, kills: Sequence[Kill], freezes: Sequence[Freeze]) -> list[Run]:
    runs: list[Run] = []
    running: dict[tuple[str, int, int], Run] = {}
    for line in journal.read_text().splitlines():
        said = json.loads(line)
        key = (said["task_id"], said["token"], said["pid"])
        if said["event"] == "began":
            run = Run(UUID(key[0]), key[1], said["attempt"], said["worker_id"], said["pid"], said["at"])
            runs.append(run)
            running[key] = run
        elif key in running:
            running[key].finished, running[key].ended = said["at"], said["event"]
    died = {kill.pid: kill.died for kill in kills}
    for run in runs:
        if run.finished is None and run.pid in died:
            run.finished, run.was_hit = died[run.pid], True
        for freeze in freezes:
            if run.pid == freeze.pid and run.began < freeze.until and (run.finished or freeze.until) > freeze.at:
                run.was_hit = True
    return runs


def read_submits(journal: Path) -> dict[str, tuple[str | None, Outcome]]:
    """By id: what is known best of it."""
    submits: dict[str, tuple[str | None, Outcome]] = {}
    for line in journal.read_text().splitlines():
        said = json.loads(line)
        known = submits.get(said["id"])
        if known is None or _RANK[said["outcome"]] > _RANK[known[1]]:
            submits[said["id"]] = (said["key"], said["outcome"])
    return submits


def load_journals(conn: Conn, submits: dict[str, tuple[str | None, Outcome]], runs: Sequence[Run]) -> None:
    make_journal_tables(conn)
    with conn.cursor() as cursor:
        with cursor.copy("copy chaos.submit from stdin") as copy:
            for task_id, (key, outcome) in submits.items():
                copy.write_row((task_id, key, outcome))
        with cursor.copy("copy chaos.run from stdin") as copy:
            for run in runs:
                times = (_moment(run.began), run.finished and _moment(run.finished))
                copy.write_row((
                    run.task_id, run.token, run.attempt, run.worker_id, run.pid, *times, run.ended, run.was_hit,
                ))  # fmt: skip


def _moment(wall_clock: float) -> datetime:
    return datetime.fromtimestamp(wall_clock, UTC)


def recovery_seconds(
    kills: Sequence[Kill], runs: Sequence[Run], final: dict[UUID, float]
) -> dict[tuple[int, UUID], float]:
    """For each kill and each task that it hit: until its next body began, or it became final. Not for one whose next
    worker was killed too, before the body began: then the clock starts again.
    """
    begins: dict[UUID, list[float]] = collections.defaultdict(list)
    for run in runs:
        begins[run.task_id].append(run.began)
    hits = {
        kill.pid: kill.held | {run.task_id for run in runs if run.was_hit and run.pid == kill.pid} for kill in kills
    }
    again: dict[UUID, list[float]] = collections.defaultdict(list)
    for kill in kills:
        for task_id in hits[kill.pid]:
            again[task_id].append(kill.at)
    found: dict[tuple[int, UUID], float] = {}
    for kill in kills:
        for task_id in hits[kill.pid]:
            went_on = [at for at in [*begins[task_id], final.get(task_id, 0.0)] if at > kill.died]
            next_hit = min((at for at in again[task_id] if at > kill.at), default=float("inf"))
            settled_in_time = not went_on and final.get(task_id, 0.0) > 0
            if kill.is_timed and not settled_in_time and min(went_on, default=float("inf")) <= next_hit:
                found[kill.pid, task_id] = min(went_on, default=float("inf")) - kill.at
    return found


# --- The campaign ----------------------------------------------------------------------------------------------------


@dataclass
class Soak:
    options: Options
    server: Server
    workers: Workers
    conn: Conn
    watcher: Watcher
    dice: random.Random
    kills: list[Kill] = field(default_factory=list)
    freezes: list[Freeze] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def kill_workers(self) -> None:
        wait_for(lambda: len(self.workers.elders()) > 0, self.options.lease_seconds + 10, "a worker that can recover")
        for number in range(self.options.kills):
            time.sleep(self.dice.expovariate(1 / self.options.seconds_per_kill))  # the moment is what is varied
            kill = self.workers.kill(self.conn, self._victim(), is_timed=True)
            self.kills.append(kill)
            say(f"kill {number + 1}/{self.options.kills}: {len(kill.held)} tasks held")
        self._wait_for_recovery()

    def _wait_for_recovery(self) -> None:
        """Before PostgreSQL restarts: for a lease after that nobody is declared dead."""
        hit = [task_id for kill in self.kills for task_id in kill.held]
        with self._tolerated():
            self._wait_for_the_dead()
            suspects = "tasklib.tasks where suspect and completed_at is null and id = any(%s)"
            what = "what the killed workers held to go on"
            wait_for(lambda: self._count(suspects, hit) == 0, self.options.drain_seconds, what)

    def _wait_for_the_dead(self) -> None:
        live = self.workers.pids
        wait_for(lambda: self._count("tasklib.workers where died_at is null and pid <> all(%s)", live) == 0,
                 self.options.lease_seconds + 10, "the dead to be declared dead")  # fmt: skip

    @contextlib.contextmanager
    def _tolerated(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            self.problems.append(str(error))

    def _victim(self) -> int:
        """Never the last one that is old enough to recover what the others leave behind: the time to recover is
        promised where there is such a worker.
        """
        elders = self.workers.elders()
        spared = set(elders) if len(elders) == 1 and not self.options.ruthless else set()
        return self.dice.choice([at for at, pid in enumerate(self.workers.pids) if pid not in spared])

    def restart_server(self) -> None:
        before = self.workers.pids
        for number in range(self.options.restarts):
            self._restart(f"restart {number + 1}/{self.options.restarts}", number)
        if self.workers.dead() or self.workers.pids != before:
            self.problems.append(f"workers ended while PostgreSQL restarted: {self.workers.dead()}")

    def restart_and_kill(self) -> None:
        """A worker that has just come back, and compares what it holds with what the database says."""
        for number in range(self.options.mixed):
            self._restart(f"restart and kill {number + 1}/{self.options.mixed}", number)
            time.sleep(self.dice.uniform(0, 1))
            self.kills.append(self.workers.kill(self.conn, self.dice.randrange(WORKERS), is_timed=False))

    def freeze_workers(self) -> None:
        """Until others have recovered what it held; then it finds that out."""
        for number in range(self.options.freezes):
            wait_for(
                lambda: len(self.workers.elders()) > 1, self.options.lease_seconds * 2 + 10, "two that can recover"
            )
            seconds = self.options.lease_seconds + FREEZE_SLACK_SECONDS
            self.freezes.append(self.workers.freeze(self.dice.randrange(WORKERS), seconds))
            say(f"freeze {number + 1}/{self.options.freezes}: {seconds:g} s")

    def _restart(self, what: str, number: int) -> None:
        time.sleep(self.options.seconds_per_restart * self.dice.uniform(2 / 3, 4 / 3))
        mode: Literal["fast", "immediate"] = "immediate" if number % 2 else "fast"
        began = time.monotonic()
        self.server.stop(mode)
        time.sleep(self.dice.uniform(0, 1))
        self.server.start()
        self.conn.close()
        self.conn = connect(self.server.dsn)
        say(f"{what}: {mode}, down for {time.monotonic() - began:.1f} s")

    def drain(self) -> None:
        began = time.monotonic()
        with self._tolerated():
            wait_for(lambda: self._count("tasklib.tasks where completed_at is null") == 0, self.options.drain_seconds,
                     "every task to be final")  # fmt: skip
            self._wait_for_the_dead()
            live = "tasklib.workers where died_at is null and pid = any(%s)"
            wait_for(lambda: self._count(live, self.workers.pids) == WORKERS, 20, "all workers to be up")
        say(f"drained in {time.monotonic() - began:.1f} s")

    def stop_workers(self) -> None:
        self.problems += [f"worker {pid} ended by itself" for pid in self.workers.dead()]
        codes = self.workers.terminate()
        if codes != [0] * WORKERS:
            self.problems.append(f"exit codes after SIGTERM: {codes}")

    def judge(self, scratch: Path) -> None:
        runs = read_runs(scratch / "runs", self.kills, self.freezes)
        submits = read_submits(scratch / "submits")
        load_journals(self.conn, submits, runs)
        self.problems += [str(each) for each in violations(self.conn)]
        self.problems += sorted(self.watcher.seen)
        events = self.workers.events()
        self.problems += [f"a worker said {event}, {events[event]} times" for event in BAD_EVENTS if events[event]]
        self._judge_recovery(runs)
        outcomes = collections.Counter(outcome for _, outcome in submits.values())
        say(f"submitted: {dict(outcomes)}; bodies: {len(runs)}, hit {sum(run.was_hit for run in runs)}")
        say(f"tasks: {self._counts('select state, count(*) from tasklib.tasks group by 1')}")
        say(f"attempts: {self._counts('select outcome, count(*) from tasklib.task_attempts group by 1')}")
        strikes = "select strikes, count(*) from tasklib.tasks where strikes > 0 group by 1"
        say(f"tasks by strikes: {self._counts(strikes)}")
        say(f"workers said: {dict(sorted(events.items()))}")

    def _judge_recovery(self, runs: Sequence[Run]) -> None:
        rows = self.conn.execute("select id, extract(epoch from completed_at)::float8 from tasklib.tasks").fetchall()
        final = {row[0]: row[1] or 0.0 for row in rows}
        recovered = recovery_seconds(self.kills, runs, final)
        if not recovered:
            return
        times = sorted(recovered.values())
        limit = self.options.recovery_seconds or self.options.lease_seconds + RECOVERY_SLACK_SECONDS
        p50, p95 = times[len(times) // 2], times[len(times) * 95 // 100]
        say(
            f"recovery of {len(times)} tasks: p50 {p50:.1f} s, p95 {p95:.1f} s, max {times[-1]:.1f} s (limit {limit:g})"
        )
        late = {key: seconds for key, seconds in recovered.items() if seconds > limit}
        if late and not self.options.ruthless:
            shown = "; ".join(
                f"{task_id} of pid {pid}: {seconds:.1f} s" for (pid, task_id), seconds in list(late.items())[:5]
            )
            self.problems.append(f"{len(late)} tasks recovered too late: {shown}")

    def close(self) -> None:
        self.conn.close()

    def _count(self, what: str, *parameters: Any) -> int:
        row = self.conn.execute(f"select count(*) from {what}", parameters).fetchone()
        assert row is not None
        return int(row[0])

    def _counts(self, query: str) -> dict[Any, int]:
        return dict(sorted(self.conn.execute(query).fetchall()))


class Watcher(threading.Thread):
    """Looks at those invariants that hold at any moment, all the time."""

    def __init__(self, dsn: str) -> None:
        super().__init__(name="watcher", daemon=True)
        self._dsn = dsn
        self._done = threading.Event()
        self.seen: set[str] = set()
        self.looks = 0

    def stop(self) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        while not self._done.wait(LOOK_SECONDS):
            with contextlib.suppress(psycopg.OperationalError), connect(self._dsn) as conn:
                self.seen.update(f"during the run: {each}" for each in violations(conn, AT_ANY_TIME))
                self.looks += 1


def connect(dsn: str) -> Conn:
    return psycopg.connect(dsn, autocommit=True)


def wait_for(is_so: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(0.1)


def say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", flush=True)


@contextlib.contextmanager
def scratch_directory(chosen: str | None) -> Iterator[Path]:
    """Enterable by every user: a server started by root runs as another."""
    with contextlib.ExitStack() as stack:
        made = Path(chosen or stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        made.mkdir(exist_ok=True)
        made.chmod(0o755)
        yield made


def soak(options: Options, scratch: Path) -> list[str]:
    with contextlib.ExitStack() as stack:
        server = Server(scratch / "postgres")
        server.start()
        stack.callback(server.stop, "fast")
        migrate.migrate(tasklib.Config(server.dsn))
        workers = Workers(server.dsn, scratch, options.lease_seconds)
        stack.callback(workers.destroy)
        submitter = Submitter(server.dsn, scratch / "submits", options.rate, options.seed)
        watcher = Watcher(server.dsn)
        campaign = Soak(options, server, workers, connect(server.dsn), watcher, random.Random(options.seed))
        stack.callback(campaign.close)
        submitter.start()
        watcher.start()
        campaign.kill_workers()
        campaign.restart_server()
        campaign.restart_and_kill()
        campaign.freeze_workers()
        submitter.stop()
        if submitter.error is not None:
            campaign.problems.append(f"the submitter failed: {submitter.error!r}")
        campaign.drain()
        watcher.stop()
        campaign.stop_workers()
        campaign.judge(scratch)
        return campaign.problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--restarts", type=int, default=50)
    parser.add_argument("--mixed", type=int, default=10, help="restarts with a kill right after")
    parser.add_argument("--freezes", type=int, default=4, help="workers stopped for longer than a lease")
    parser.add_argument("--rate", type=float, default=30.0, help="tasks submitted a second")
    parser.add_argument("--seconds-per-kill", type=float, default=2.0, help="on average")
    parser.add_argument("--seconds-per-restart", type=float, default=6.0, help="on average, besides the restart itself")
    parser.add_argument("--lease-seconds", type=float, default=15.0)
    parser.add_argument("--drain-seconds", type=float, default=120.0, help="until every task must be final")
    parser.add_argument(
        "--recovery-seconds", type=float, help="the longest that is allowed; by default a lease and 5 s"
    )
    parser.add_argument("--ruthless", action="store_true", help="kill whomever; the time to recover is only told")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--directory", help="keep the database, the journals and the logs there")
    options = Options(**vars(parser.parse_args()))
    logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)  # lost connections are what this is about
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without ending the workers
    say(f"soak: {options}")
    with scratch_directory(options.directory) as scratch:
        problems = soak(options, scratch)
    for problem in problems:
        say(f"VIOLATION {problem}")
    say(f"{'FAILED' if problems else 'all invariants hold'}; seed {options.seed}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
