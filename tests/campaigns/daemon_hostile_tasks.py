"""Hostile tasks run one after another in the same workers as harmless ones, which use half of the capacity. Every
hostile task is buried or timed out. The harmless ones begin in time, and none of them is charged an attempt.
Finally a task kills its supervisor: no process of that daemon is left, and the next daemon goes on.

    python3 dev.py soak daemon hostile-tasks [--rounds 5]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, LiteralString

import tasklib
from tasklib import migrate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

from tests.campaigns import daemon_hostile_tasks_app as tasks
from tests.campaigns.daemon_campaign import GONE_SECONDS, end_in_good_order, wait_until_gone
from tests.campaigns.soak import Server, connect, say, scratch_directory, wait_for
from tests.support.invariants import make_journal_tables, violations
from tools import measures
from tools.daemons import daemon, is_alive

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.raw_sql import Conn
    from tools.daemons import Daemon

WORKERS = 3
CONCURRENCY = 8
FETCH_SECONDS = 0.3
ON_TIME_SECONDS = 1.0
ON_TIME_SHARE = 0.9
TIMEOUT_SECONDS = 0.5
MEMORY_SECONDS = 2.0  # allocating takes a while
END_SECONDS = 30.0  # a hostile task must have ended by then
TIMED_OUT, BURIED, OVER = ("failed", "TIMEOUT"), ("buried", None), (None, None)
# How each must end: its state, and its error code.
HOSTILE_TASKS: dict[tasklib.TaskFunction[[], Any], tuple[str | None, str | None]] = {
    tasks.segfault: BURIED,
    tasks.hold_gil: TIMED_OUT,
    tasks.close_descriptors: OVER,
    tasks.exit_at_once: BURIED,
    tasks.block_loop: TIMED_OUT,
    tasks.fork_bomb: TIMED_OUT,
    tasks.fill_memory: TIMED_OUT,
    tasks.backtrack: TIMED_OUT,
    tasks.segfault_isolated: BURIED,
    tasks.ignore_signals: TIMED_OUT,
    tasks.fill_memory_isolated: ("failed", "MEMORY_LIMIT"),
    tasks.exit_async: BURIED,
    tasks.fork_bomb_isolated: TIMED_OUT,
    tasks.hold_gil_isolated: TIMED_OUT,
    tasks.multiply: TIMED_OUT,
    tasks.close_descriptors_isolated: OVER,
    tasks.kill_parent_isolated: OVER,
}
INVARIANTS = ("I2", "I7", "I12", "I13", "I21", "I23")  # those that need no journal


@dataclass(frozen=True)
class Options:
    rounds: int
    tasks: int | None
    pause_seconds: float
    overlap: bool
    load: float
    lease_seconds: float
    bury_after: int
    drain_seconds: float
    on_time_percent: float
    seed: int
    directory: str | None


class Fetches(threading.Thread):
    """Submits harmless tasks at an even rate, a share of what the workers can execute."""

    def __init__(self, dsn: str, share: float) -> None:
        super().__init__(name="fetches", daemon=True)
        self._dsn = dsn
        self._pause_seconds = FETCH_SECONDS / (WORKERS * CONCURRENCY * share)
        self._done = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        due = time.monotonic()
        try:
            with tasklib.Client(tasklib.Config(self._dsn)) as client:
                for function in _in_turn(tasks.fetch, tasks.fetch_async):
                    client.submit(function.new(FETCH_SECONDS))
                    due = max(due + self._pause_seconds, time.monotonic() - 1)
                    if self._done.wait(max(due - time.monotonic(), 0)):
                        return
        except BaseException as error:  # noqa: BLE001 - reported at the end
            self.error = error

    def stop(self) -> None:
        self._done.set()
        self.join()


def _in_turn(*functions: Any) -> Any:
    while True:
        yield from functions


class HostileTasks:
    def __init__(self, options: Options, dsn: str, scratch: Path) -> None:
        self._options = options
        self._dsn = dsn
        self._scratch = scratch
        self._processes = scratch / "processes"
        self._processes.touch()
        self._dice = random.Random(options.seed)
        self._conn: Conn = connect(dsn)
        self._client = tasklib.Client(tasklib.Config(dsn))
        self.problems: list[str] = []

    def close(self) -> None:
        self._client.close()
        self._conn.close()

    def daemon(self, *, waits: bool = True) -> contextlib.AbstractContextManager[Daemon]:
        return daemon(
            self._dsn, waits=waits, environment={tasks.PROCESSES: str(self._processes)},
            app=["tests.campaigns.daemon_hostile_tasks_app"],
            workers=WORKERS, concurrency=CONCURRENCY, poll_interval_seconds=1.0, grace_seconds=5.0,
            timeout_delta_seconds=1.0, base_retry_delay_seconds=0.2, lease_seconds=self._options.lease_seconds,
            bury_after=self._options.bury_after, recycle={"max_memory_mb": tasks.MEMORY_LIMIT_MB},
        )  # fmt: skip

    # --- hostile tasks beside harmless ones ---

    def run_beside_load(self) -> None:
        with self.daemon() as started:
            fetches = Fetches(self._dsn, self._options.load)
            fetches.start()
            try:
                self._submit_rounds()
            finally:
                fetches.stop()
            if fetches.error is not None:
                self.problems.append(f"the submitter failed: {fetches.error!r}")
            self._drain()
            self._stop(started)
            self._judge_log(started)
        self._judge_fetches()
        self._judge_ends()
        self._judge_processes()

    def _submit_rounds(self) -> None:
        time.sleep(1.0)
        for number in range(1, self._options.rounds + 1):
            hostile = [*HOSTILE_TASKS][: self._options.tasks]
            self._dice.shuffle(hostile)
            for function in hostile:
                self._watch(function)
            say(f"round {number}/{self._options.rounds}: {len(hostile)} hostile tasks; {measures.load()}")

    def _watch(self, function: tasklib.TaskFunction[[], Any]) -> None:
        """Waits until it has ended, and a moment longer: one worker of three cannot carry half of the load while the
        others are replaced. With --overlap the next one follows at once.
        """
        came = self._submit(function)
        if not self._options.overlap:
            self._expect(lambda: self._is_final(came), END_SECONDS, f"{function.name} to be over")
        time.sleep(self._options.pause_seconds * self._dice.uniform(0.5, 1.5))

    def _submit(self, function: tasklib.TaskFunction[[], Any]) -> tasklib.TaskId:
        seconds = MEMORY_SECONDS if function in (tasks.fill_memory, tasks.fill_memory_isolated) else TIMEOUT_SECONDS
        return self._client.submit(function.options(timeout_seconds=seconds, max_retries=1).new())

    def _drain(self) -> None:
        began = time.monotonic()
        left = "select count(*) from tasklib.tasks where completed_at is null"
        self._expect(lambda: self._row(left) == (0,), self._options.drain_seconds, "every task is final")
        say(f"drained in {time.monotonic() - began:.1f} s")

    def _stop(self, started: Daemon) -> None:
        family = [*measures.family(started.pid)]
        code = started.stop(30)
        _, left = wait_until_gone(family, GONE_SECONDS)
        if code != 0 or left:
            self.problems.append(f"it ended with exit code {code}, and left {left}")

    # --- judging ---

    def _judge_fetches(self) -> None:
        rows = self._conn.execute(
            """
            select extract(epoch from min(attempt.started_at) - task.created_at)::float8
            from tasklib.tasks as task join tasklib.task_attempts as attempt on attempt.task_id = task.id
            where task.name like 'fetch%' group by task.id, task.created_at
            """
        ).fetchall()
        gaps = [row[0] for row in rows]
        share = 100 * len([gap for gap in gaps if gap <= ON_TIME_SECONDS]) / max(len(gaps), 1)
        say(f"harmless tasks, from submit to start: {measures.shown(gaps)}; {share:.1f} % on time; {measures.load()}")
        if share < self._options.on_time_percent:
            self.problems.append(f"only {share:.1f} % of the harmless tasks began within {ON_TIME_SECONDS:g} s")
        self._judge_costs()

    def _judge_costs(self) -> None:
        paid = self._conn.execute(
            """
            select id, state, error_code, retry_count, strikes from tasklib.tasks
            where name like 'fetch%' and (state <> 'completed' or retry_count > 0)
            """
        ).fetchall()
        self.problems += [f"a harmless task paid: {row}" for row in paid[:5]]
        query = """
            select outcome, count(*) from tasklib.task_attempts as attempt
            join tasklib.tasks as task on task.id = attempt.task_id where name like 'fetch%' group by 1
            """
        say(f"attempts of harmless tasks: {dict(self._conn.execute(query).fetchall())}")

    def _judge_ends(self) -> None:
        rows = self._conn.execute(
            """
            select name, state, error_code, attempt, extract(epoch from completed_at - created_at)::float8
            from tasklib.tasks where name not like 'fetch%' order by name
            """
        ).fetchall()
        ends: dict[str, list[str]] = collections.defaultdict(list)
        for name, state, code, attempts, seconds in rows:
            ends[name].append(f"{state} {code} after {attempts} attempts, {seconds or 0:.1f} s")
            wanted = next(end for function, end in HOSTILE_TASKS.items() if function.name == name)
            if any(want is not None and want != is_ for want, is_ in zip(wanted, (state, code), strict=True)):
                self.problems.append(f"{name} is {state} {code}, and not {wanted}")
        for name, each in ends.items():
            say(f"{name}: {'; '.join(each)}")

    def _judge_processes(self) -> None:
        """Every process that a fork bomb has started is gone."""
        pids = [int(line) for line in self._processes.read_text("ascii").split()]
        seconds, left = wait_until_gone(pids, GONE_SECONDS)
        say(f"started by fork bombs: {len(pids)}, all gone {seconds:.1f} s after the daemon")
        if left:
            self.problems.append(f"{len(left)} processes of fork bombs are left")

    def _judge_log(self, started: Daemon) -> None:
        (self._scratch / "log").write_text(started.output(), "utf-8")
        lines = started.lines()
        how = collections.Counter(line.get("how") for line in lines if line.get("event") == "worker.died")
        loud = collections.Counter(str(line.get("event")) for line in lines if line.get("level") != "info")
        say(f"workers died: {dict(how)}")
        say(f"the daemon said: {dict(sorted(loud.items()))}")
        fills_memory = tasks.fill_memory in [*HOSTILE_TASKS][: self._options.tasks]
        if fills_memory and not any(str(line.get("why")).startswith("it uses") for line in lines):
            self.problems.append("no worker was replaced for its memory")
        bad = ("keeper.died", "web.died", "daemon.failed", "recovery.failed", "task.unrecoverable", "child.failed")
        self.problems += [f"it said {event}, {loud[event]} times" for event in bad if loud[event]]

    def judge_invariants(self) -> None:
        make_journal_tables(self._conn)
        self.problems += [str(each) for each in violations(self._conn, INVARIANTS)]

    # --- a task that kills its supervisor ---

    def lose_supervisors(self) -> None:
        """Starts the next daemon after each death, until the task is buried."""
        killer, deaths = self._submit(tasks.kill_supervisor), 0
        while deaths <= self._options.bury_after:
            self._client.submit_many([tasks.fetch.new(FETCH_SECONDS) for _ in range(CONCURRENCY)])
            with self.daemon(waits=False) as started:
                if self._outlives(started, killer):
                    self._drain()
                    self._stop(started)
                    break
                deaths += 1
        row = self._row("select state, strikes, crash_count from tasklib.tasks where id = %s", killer)
        say(f"the task that kills its supervisor: (state, strikes, crashes) = {row}, after {deaths} deaths")
        if row is None or row[0] != "buried":
            self.problems.append(f"the task that kills its supervisor is not buried: {row}")
        self._judge_costs()

    def _outlives(self, started: Daemon, killer: tasklib.TaskId) -> bool:
        """Whether this daemon is still alive when the task is final. If not, none of its processes is left."""
        family: set[int] = set()

        def is_over() -> bool:
            family.update(measures.family(started.pid))
            return not is_alive(started.pid) or self._is_final(killer)

        self._expect(is_over, 3 * self._options.lease_seconds + 20, "the supervisor to be killed")
        if is_alive(started.pid):
            return True
        seconds, left = wait_until_gone([*family], GONE_SECONDS)
        say(f"a supervisor was killed by its task; its {len(family) - 1} processes were gone after {seconds:.2f} s")
        if left:
            self.problems.append(f"survivors of a supervisor, after {seconds:.1f} s: {left}")
        return False

    # --- the database ---

    def _is_final(self, task: tasklib.TaskId) -> bool:
        row = self._row("select completed_at is not null from tasklib.tasks where id = %s", task)
        return row == (True,)

    def _row(self, query: LiteralString, *parameters: Any) -> tuple[Any, ...] | None:
        return self._conn.execute(query, parameters).fetchone()

    def _expect(self, is_so: Callable[[], bool], seconds: float, what: str) -> None:
        try:
            wait_for(is_so, seconds, what)
        except TimeoutError as error:
            self.problems.append(str(error))


def run(options: Options, scratch: Path) -> Sequence[str]:
    server = Server(scratch / "postgres")
    server.start()
    try:
        migrate.migrate(tasklib.Config(server.dsn))
        with contextlib.closing(HostileTasks(options, server.dsn, scratch)) as campaign:
            campaign.run_beside_load()
            campaign.lose_supervisors()
            campaign.judge_invariants()
            return campaign.problems
    finally:
        server.stop("fast")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="each hostile task runs once per round")
    parser.add_argument("--tasks", type=int, help="only the first of them")
    parser.add_argument("--pause-seconds", type=float, default=1.0, help="pause between hostile tasks, on average")
    parser.add_argument("--overlap", action="store_true", help="do not wait for the end of one before the next")
    parser.add_argument("--load", type=float, default=0.5, help="harmless tasks, as a share of the capacity")
    parser.add_argument("--lease-seconds", type=float, default=15.0)
    parser.add_argument("--bury-after", type=int, default=3)
    parser.add_argument("--drain-seconds", type=float, default=60.0)
    parser.add_argument("--on-time-percent", type=float, default=100 * ON_TIME_SHARE)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--directory", help="keep the database and the log there")
    options = Options(**vars(parser.parse_args(arguments)))
    logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)
    end_in_good_order()
    say(f"hostile tasks: {options}; {measures.load()}")
    with scratch_directory(options.directory) as scratch:
        problems = run(options, scratch)
    for problem in problems:
        say(f"VIOLATION {problem}")
    say(f"{'FAILED' if problems else 'all bounds hold'}; {measures.load()}; seed {options.seed}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
