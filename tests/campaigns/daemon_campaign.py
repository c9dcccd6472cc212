"""The parts that campaigns against daemons share: a database, a journaled load, daemons, hits (processes are killed or
frozen), and the judgement at the end. The tasks of a process that was hit are innocent: none may be charged for it.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tasklib
from tasklib import migrate
from tests.campaigns import daemon_app
from tests.campaigns.soak import (
    Server,
    Submitter,
    Watcher,
    connect,
    held_by,
    load_journals,
    read_runs,
    read_submits,
    say,
    wait_for,
)
from tests.campaigns.soak_worker import write
from tests.support.invariants import violations
from tools import measures
from tools.daemons import daemon, is_alive
from tools.waiting import START_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from uuid import UUID

    from tests.campaigns.soak import Run
    from tests.support.raw_sql import Conn
    from tools.daemons import Daemon

# Events that no daemon may log in any campaign.
BAD_EVENTS = (
    "loop.failed", "finish.refused", "task.unrecoverable", "outcomes.lost", "recovery.failed", "backends.left",
    "child.failed", "message.rejected", "spawn.failed", "guardian.not_started", "daemon.failed", "worker.hung",
)  # fmt: skip
GONE_SECONDS = 5.0
STOP_SECONDS = 30.0
LONG_TASK_SECONDS = 2.0


@dataclass(frozen=True)
class Hit:
    """Processes that were killed or frozen, with the tasks that they held."""

    pids: frozenset[int]
    at: float  # wall clock
    until: float  # they were dead, or thawed
    held: frozenset[UUID]


@dataclass(frozen=True)
class Recovery:
    """How long a task that was executing at a hit waited for its next run."""

    task_id: UUID
    hit: Hit
    seconds: float
    by: Run


class Campaign:
    def __init__(self, stack: contextlib.ExitStack, scratch: Path, *, rate: float, seed: int, draw: Any) -> None:
        self.scratch = scratch
        self.dice = random.Random(seed)
        self.problems: list[str] = []
        self.hits: list[Hit] = []
        self.daemons: dict[str, Daemon] = {}
        self.events: collections.Counter[str] = collections.Counter()
        self.lines: list[dict[str, Any]] = []  # of daemons that have ended
        self._ends: dict[str, contextlib.ExitStack] = {}
        self._pids: dict[str, int] = {}
        self.server = Server(scratch / "postgres")
        self.server.start()
        stack.callback(self.server.stop, "fast")
        self.dsn = self.server.dsn
        migrate.migrate(tasklib.Config(self.dsn))
        self.conn: Conn = stack.enter_context(connect(self.dsn))
        self.conn.execute(daemon_app.MAKE_EFFECTS)
        stack.callback(self._end_all)
        self._submitter = Submitter(self.dsn, scratch / "submits", rate, seed, draw)
        self._client = stack.enter_context(tasklib.Client(tasklib.Config(self.dsn, pool_size=1)))
        self._journal = os.open(scratch / "submits", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        stack.callback(os.close, self._journal)
        self._submitting = threading.Lock()
        self._watcher = Watcher(self.dsn)
        for name in ("runs", "processes"):
            (scratch / name).touch()

    # --- daemons ---

    def start(self, name: str, *, waits: bool = True, **settings: Any) -> Daemon:
        environment = {
            daemon_app.JOURNAL: str(self.scratch / "runs"), daemon_app.PROCESSES: str(self.scratch / "processes"),
        }  # fmt: skip
        given: dict[str, Any] = {"app": ["tests.campaigns.daemon_app"], "name": name, "concurrency": 4} | settings
        stack = contextlib.ExitStack()
        self.daemons[name] = stack.enter_context(daemon(self.dsn, environment=environment, waits=waits, **given))
        self._ends[name] = stack
        return self.daemons[name]

    def start_all(self, names: Sequence[str], **settings: Any) -> None:
        for name in names:
            self.start(name, waits=False, **settings)
        for name in names:
            self.daemons[name].wait_for("daemon.ready", seconds=START_SECONDS)

    def stop(self, name: str) -> None:
        """As an operator stops it. It must exit with code 0 and leave no process behind."""
        made = self.daemons[name]
        family = measures.family(made.pid)
        code = made.stop(STOP_SECONDS)
        if code != 0:
            self.problems.append(f"{name} ended with exit code {code}")
        left = [pid for pid in family if is_alive(pid)]
        if left:
            self.problems.append(f"{name} has ended, and left {left}")
        self.forget(name)

    def forget(self, name: str) -> None:
        """Keeps the log of a daemon that has ended."""
        made = self.daemons.pop(name)
        self.lines += made.lines()
        with (self.scratch / f"{name}.log").open("a", encoding="utf-8") as file:
            file.write(made.output())
        self._ends.pop(name).close()

    def started_processes(self) -> list[int]:
        """The processes that tasks have started and that are alive. A pid may belong to another process by now, so the
        environment of the process is compared.
        """
        mark = f"{daemon_app.PROCESSES}={self.scratch / 'processes'}".encode()
        started = map(int, (self.scratch / "processes").read_text("ascii").split())
        return [pid for pid in started if is_alive(pid) and mark in environment_of(pid)]

    def _end_all(self) -> None:
        for stack in self._ends.values():
            stack.close()
        for pid in self.started_processes():
            kill(pid)

    # --- the load ---

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        self._submitter.start()
        self._watcher.start()
        try:
            yield
        finally:
            self._submitter.stop()
        if self._submitter.error is not None:
            self.problems.append(f"the submitter failed: {self._submitter.error!r}")

    def drain(self, seconds: float) -> None:
        began = time.monotonic()
        self.expect(lambda: self.count("tasklib.tasks where completed_at is null") == 0, seconds, "every task is final")
        say(f"drained in {time.monotonic() - began:.1f} s")

    def expect(self, is_so: Callable[[], bool], seconds: float, what: str) -> None:
        """Notes a problem if it does not become true in time."""
        try:
            wait_for(is_so, seconds, what)
        except TimeoutError as error:
            self.problems.append(str(error))

    def count(self, what: str, *parameters: Any) -> int:
        row = self.conn.execute(f"select count(*) from {what}", parameters).fetchone()
        assert row is not None
        return int(row[0])

    def submit(self, tasks: Sequence[tasklib.NewTask]) -> None:
        """Beside the submitter, and in the same journal. One thread at a time submits."""
        with self._submitting:
            self._client.submit_many(tasks)
            for task in tasks:
                write(self._journal, id=str(task.id), key=None, outcome="ok")

    def waiting(self) -> int:
        """How many tasks are ready. Other threads may call this."""
        with connect(self.dsn) as conn:
            row = conn.execute("select count(*) from tasklib.tasks where ready").fetchone()
        assert row is not None
        return int(row[0])

    def executing(self, pid: int, task_ids: Sequence[UUID]) -> list[UUID]:
        """Those of the tasks that this worker executes, according to the database."""
        rows = self.conn.execute(
            """select task.id from tasklib.tasks as task join tasklib.workers using (worker_id)
                where pid = %s and died_at is null and state = 'running' and task.id = any(%s)""",
            [pid, list(task_ids)],
        )
        return [task_id for (task_id,) in rows]

    def held_by(self, *pids: int) -> frozenset[UUID]:
        return frozenset(task_id for pid in pids for task_id in held_by(self.conn, pid))

    def occupy(self, made: Daemon, draw: Callable[[random.Random, float], tasklib.NewTask]) -> frozenset[int]:
        """The pids of the daemon's workers, one of which has just begun a long task. A hit between two tasks would test
        nothing.
        """
        ends = time.monotonic() + LONG_TASK_SECONDS * 10
        while time.monotonic() < ends:
            workers = frozenset(int(each["pid"]) for each in made.status()["workers"] if each["pid"])
            if self._begins(draw(self.dice, LONG_TASK_SECONDS)) in workers:
                return workers
        raise TimeoutError(f"{made.settings_file} executes nothing:\n{made.tail()}")

    def _begins(self, task: tasklib.NewTask) -> int | None:
        """The pid of the worker, as soon as the body of the task has begun."""
        self._client.submit(task)
        write(self._journal, id=str(task.id), key=None, outcome="ok")
        until = time.monotonic() + LONG_TASK_SECONDS
        while time.monotonic() < until:
            for line in reversed((self.scratch / "runs").read_text("utf-8").splitlines()[-50:]):
                if str(task.id) in line:
                    return self._pid_of(json.loads(line)["worker_id"])
            time.sleep(0.01)
        return None

    def _pid_of(self, worker_id: str) -> int | None:
        row = self.conn.execute("select pid from tasklib.workers where worker_id = %s", [worker_id]).fetchone()
        return None if row is None else int(row[0])

    # --- the judgement ---

    def runs(self) -> list[Run]:
        """Every run of a body, with the pid of its worker, even if isolated. Runs that were hit are marked."""
        self._pids.update(self.conn.execute("select worker_id, pid from tasklib.workers").fetchall())
        runs = read_runs(self.scratch / "runs", [], [])
        for run in runs:
            run.pid = self._pids.get(run.worker_id, run.pid)
            hit = next((hit for hit in self.hits if is_hit_by(run, hit)), None)
            if hit is not None:
                run.was_hit = True
                run.finished = run.finished or hit.until
        return runs

    def judge(self) -> list[Run]:
        """After all daemons have stopped."""
        self._watcher.stop()
        runs = self.runs()
        submits = read_submits(self.scratch / "submits")
        load_journals(self.conn, submits, runs)
        self.problems += [str(each) for each in violations(self.conn)]
        self.problems += sorted(self._watcher.seen)
        self._judge_costs()
        self._judge_logs()
        outcomes = collections.Counter(outcome for _, outcome in submits.values())
        say(f"submitted: {dict(outcomes)}; bodies: {len(runs)}, hit {sum(run.was_hit for run in runs)}")
        say(f"tasks: {self._counts('select state, count(*) from tasklib.tasks group by 1')}")
        say(f"attempts: {self._counts('select outcome, count(*) from tasklib.task_attempts group by 1')}")
        strikes = "select strikes, count(*) from tasklib.tasks where strikes > 0 group by 1"
        say(f"tasks by strikes: {self._counts(strikes)}")
        return runs

    def _judge_costs(self) -> None:
        """No task of the load fails by itself, so every failure is a fault."""
        wrong = {
            "tasks that are not completed": "tasklib.tasks where state <> 'completed'",
            "tasks that were charged a retry": "tasklib.tasks where retry_count <> 0",
            "attempts that failed": "tasklib.task_attempts where outcome in ('FAILED', 'TIMED_OUT', 'CANCELLED')",
            "tasks that wrote twice": "(select from effects group by task_id having count(*) > 1) as twice",
            "writes without a completion":
                "effects left join tasklib.tasks as task on task.id = task_id and state = 'completed' where id is null",
        }  # fmt: skip
        found = {what: self.count(where) for what, where in wrong.items()}
        self.problems += [f"{number} {what}" for what, number in found.items() if number]

    def _judge_logs(self) -> None:
        said = collections.Counter(str(line.get("event")) for line in self.lines)
        loud = collections.Counter(
            str(line.get("event")) for line in self.lines if line.get("level") in {"warning", "error", "critical"}
        )
        self.problems += [f"a daemon said {event}, {said[event]} times" for event in BAD_EVENTS if said[event]]
        for bad in [line for line in self.lines if line.get("event") in BAD_EVENTS][:3]:
            about = [line for line in self.lines if bad.get("pid") in {line.get("pid"), line.get("process_id")}]
            for line in about[-20:]:
                say(str(line)[:2_000])
        say(f"daemons said: {dict(sorted(loud.items()))}")

    def _counts(self, query: str) -> dict[Any, int]:
        return dict(sorted(self.conn.execute(query).fetchall()))


def is_hit_by(run: Run, hit: Hit) -> bool:
    """Whether it was executing. An isolated task may have gone on for a moment."""
    return run.pid in hit.pids and run.began < hit.until and (run.finished is None or run.finished > hit.at)


def recoveries(hits: Sequence[Hit], runs: Sequence[Run]) -> list[Recovery]:
    """For each hit and each task that was executing, the time until the next run of its body began. If the task was hit
    again while it waited in another worker, the time counts from that hit. A task without a next run was completed or
    is lost; the invariants tell which.
    """
    by_task: dict[UUID, list[Run]] = collections.defaultdict(list)
    for run in sorted(runs, key=lambda run: run.token):
        by_task[run.task_id].append(run)
    found = []
    for hit in hits:
        for run in (run for run in runs if is_hit_by(run, hit)):
            following = next((each for each in by_task[run.task_id] if each.token > run.token), None)
            if following is not None:
                began = max(
                    [hit.at, *(each.at for each in hits if run.task_id in each.held and each.at < following.began)]
                )
                found.append(Recovery(run.task_id, hit, following.began - began, following))
    return found


def wait_until_gone(pids: Sequence[int], seconds: float) -> tuple[float, list[int]]:
    """How long it took, and the pids that are left."""
    began = time.monotonic()
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < began + seconds:
        time.sleep(0.002)
    return time.monotonic() - began, left


def environment_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def conclude(campaign: Campaign, seed: int) -> int:
    """The exit code."""
    for problem in campaign.problems:
        say(f"VIOLATION {problem}")
    say(f"{'FAILED' if campaign.problems else 'all invariants hold'}; {measures.load()}; seed {seed}")
    return 1 if campaign.problems else 0


def end_in_good_order() -> None:
    """SIGTERM ends the campaign as Ctrl-C does, so that its daemons are stopped too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
