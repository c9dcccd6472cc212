"""A zoo of hostile tasks, one after another, in the same workers as harmless ones that wait for something. The hostile
ones are buried or timed out; the harmless ones, at half of what the workers can take, begin in time, and do not pay.
Then one that kills its supervisor: it leaves nobody behind, and the next daemon goes on.

    python3 dev.py soak daemon zoo [--rounds 5]
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

from tests.campaigns import daemon_zoo_tasks as tasks
from tests.campaigns import measures
from tests.campaigns.daemon_scene import GONE_SECONDS, end_in_good_order, wait_until_gone
from tests.campaigns.soak import Server, connect, say, scratch_directory, wait_for
from tests.daemons import daemon, is_alive
from tests.invariants import make_journal_tables, violations

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.daemons import Daemon
    from tests.raw_sql import Conn

WORKERS = 3
CONCURRENCY = 8
FETCH_SECONDS = 0.3
ON_TIME_SECONDS = 1.0
ON_TIME_SHARE = 0.9
TIMEOUT_SECONDS = 0.5
HOG_SECONDS = 2.0  # it takes a while to be greedy
ANIMAL_SECONDS = 30.0  # until it must be over
TIMED_OUT, BURIED, OVER = ("failed", "TIMEOUT"), ("buried", None), (None, None)
# How each must end: its state, and its error code.
ANIMALS: dict[tasklib.TaskFunction[[], Any], tuple[str | None, str | None]] = {
    tasks.segfault: BURIED,
    tasks.hold_gil: TIMED_OUT,
    tasks.close_descriptors: OVER,
    tasks.exit_at_once: BURIED,
    tasks.block_loop: TIMED_OUT,
    tasks.fork_bomb: TIMED_OUT,
    tasks.hog: TIMED_OUT,
    tasks.backtrack: TIMED_OUT,
    tasks.segfault_apart: BURIED,
    tasks.ignore_signals: TIMED_OUT,
    tasks.hog_apart: ("failed", "MEMORY_LIMIT"),
    tasks.exit_async: BURIED,
    tasks.fork_bomb_apart: TIMED_OUT,
    tasks.hold_gil_apart: TIMED_OUT,
    tasks.multiply: TIMED_OUT,
    tasks.close_descriptors_apart: OVER,
    tasks.kill_parent_apart: OVER,
}
INVARIANTS = ("I2", "I7", "I12", "I13", "I21", "I23")  # those that need no journal


@dataclass(frozen=True)
class Options:
    rounds: int
    animals: int | None
    seconds_per_animal: float
    crowd: bool
    load: float
    lease_seconds: float
    bury_after: int
    drain_seconds: float
    on_time_percent: float
    seed: int
    directory: str | None


class Fetches(threading.Thread):
    """Harmless tasks, evenly: so many of what the workers can take."""

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
        except BaseException as error:  # noqa: BLE001 - told at the end
            self.error = error

    def stop(self) -> None:
        self._done.set()
        self.join()


def _in_turn(*functions: Any) -> Any:
    while True:
        yield from functions


class Zoo:
    def __init__(self, options: Options, dsn: str, scratch: Path) -> None:
        self._options = options
        self._dsn = dsn
        self._scratch = scratch
        self._company = scratch / "company"
        self._company.touch()
        self._dice = random.Random(options.seed)
        self._conn: Conn = connect(dsn)
        self._client = tasklib.Client(tasklib.Config(dsn))
        self.problems: list[str] = []

    def close(self) -> None:
        self._client.close()
        self._conn.close()

    def daemon(self, *, waits: bool = True) -> contextlib.AbstractContextManager[Daemon]:
        return daemon(
            self._dsn, waits=waits, environment={tasks.COMPANY: str(self._company)},
            app=["tests.campaigns.daemon_zoo_tasks"],
            workers=WORKERS, concurrency=CONCURRENCY, poll_interval_seconds=1.0, grace_seconds=5.0,
            timeout_delta_seconds=1.0, base_retry_delay_seconds=0.2, lease_seconds=self._options.lease_seconds,
            bury_after=self._options.bury_after, recycle={"max_memory_mb": tasks.HOG_LIMIT_MB},
        )  # fmt: skip

    # --- the zoo ---

    def open(self) -> None:
        with self.daemon() as started:
            fetches = Fetches(self._dsn, self._options.load)
            fetches.start()
            try:
                self._let_in()
            finally:
                fetches.stop()
            if fetches.error is not None:
                self.problems.append(f"the submitter failed: {fetches.error!r}")
            self._drain()
            self._stop(started)
            self._judge_log(started)
        self._judge_fetches()
        self._judge_animals()
        self._judge_company()

    def _let_in(self) -> None:
        time.sleep(1.0)
        for number in range(1, self._options.rounds + 1):
            animals = [*ANIMALS][: self._options.animals]
            self._dice.shuffle(animals)
            for animal in animals:
                self._watch(animal)
            say(f"round {number}/{self._options.rounds}: {len(animals)} animals; {measures.load()}")

    def _watch(self, animal: tasklib.TaskFunction[[], Any]) -> None:
        """Until it is over, and for a while after that: half of three workers cannot serve while two of them die. In a
        crowd nobody waits.
        """
        came = self._submit(animal)
        if not self._options.crowd:
            self._expect(lambda: self._is_final(came), ANIMAL_SECONDS, f"{animal.name} to be over")
        time.sleep(self._options.seconds_per_animal * self._dice.uniform(0.5, 1.5))

    def _submit(self, animal: tasklib.TaskFunction[[], Any]) -> tasklib.TaskId:
        seconds = HOG_SECONDS if animal in (tasks.hog, tasks.hog_apart) else TIMEOUT_SECONDS
        return self._client.submit(animal.options(timeout_seconds=seconds, max_retries=1).new())

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
        self._judge_innocence()

    def _judge_innocence(self) -> None:
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

    def _judge_animals(self) -> None:
        rows = self._conn.execute(
            """
            select name, state, error_code, attempt, extract(epoch from completed_at - created_at)::float8
            from tasklib.tasks where name not like 'fetch%' order by name
            """
        ).fetchall()
        ends: dict[str, list[str]] = collections.defaultdict(list)
        for name, state, code, attempts, seconds in rows:
            ends[name].append(f"{state} {code} after {attempts} attempts, {seconds or 0:.1f} s")
            wanted = next(end for animal, end in ANIMALS.items() if animal.name == name)
            if any(want is not None and want != is_ for want, is_ in zip(wanted, (state, code), strict=True)):
                self.problems.append(f"{name} is {state} {code}, and not {wanted}")
        for name, each in ends.items():
            say(f"{name}: {'; '.join(each)}")

    def _judge_company(self) -> None:
        """Everybody whom the bombs have started is gone."""
        pids = [int(line) for line in self._company.read_text("ascii").split()]
        seconds, left = wait_until_gone(pids, GONE_SECONDS)
        say(f"started by bombs: {len(pids)}, all gone {seconds:.1f} s after the daemon")
        if left:
            self.problems.append(f"{len(left)} that the bombs had started are left")

    def _judge_log(self, started: Daemon) -> None:
        (self._scratch / "log").write_text(started.output(), "utf-8")
        lines = started.lines()
        how = collections.Counter(line.get("how") for line in lines if line.get("event") == "worker.died")
        loud = collections.Counter(str(line.get("event")) for line in lines if line.get("level") != "info")
        say(f"workers died: {dict(how)}")
        say(f"the daemon said: {dict(sorted(loud.items()))}")
        is_hog_here = tasks.hog in [*ANIMALS][: self._options.animals]
        if is_hog_here and not any(str(line.get("why")).startswith("it uses") for line in lines):
            self.problems.append("no worker was replaced for its memory")
        bad = ("keeper.died", "web.died", "daemon.failed", "recovery.failed", "task.unrecoverable", "child.failed")
        self.problems += [f"it said {event}, {loud[event]} times" for event in bad if loud[event]]

    def judge_invariants(self) -> None:
        make_journal_tables(self._conn)
        self.problems += [str(each) for each in violations(self._conn, INVARIANTS)]

    # --- the one that kills its supervisor ---

    def lose_supervisors(self) -> None:
        """As often as it takes until it is buried; whoever starts daemons starts the next one."""
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
        say(f"the one that kills its supervisor: (state, strikes, crashes) = {row}, after {deaths} deaths")
        if row is None or row[0] != "buried":
            self.problems.append(f"the one that kills its supervisor is not buried: {row}")
        self._judge_innocence()

    def _outlives(self, started: Daemon, killer: tasklib.TaskId) -> bool:
        """Whether this daemon lives to see it buried. If not, nobody is left of it."""
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

    # --- looking ---

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


def visit(options: Options, scratch: Path) -> Sequence[str]:
    server = Server(scratch / "postgres")
    server.start()
    try:
        migrate.migrate(tasklib.Config(server.dsn))
        with contextlib.closing(Zoo(options, server.dsn, scratch)) as zoo:
            zoo.open()
            zoo.lose_supervisors()
            zoo.judge_invariants()
            return zoo.problems
    finally:
        server.stop("fast")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="in each, every animal comes once")
    parser.add_argument("--animals", type=int, help="only the first so many")
    parser.add_argument("--seconds-per-animal", type=float, default=1.0, help="between them, on average")
    parser.add_argument("--crowd", action="store_true", help="the next one does not wait until the last one is over")
    parser.add_argument(
        "--load", type=float, default=0.5, help="harmless tasks: the share of what the workers can take"
    )
    parser.add_argument("--lease-seconds", type=float, default=15.0)
    parser.add_argument("--bury-after", type=int, default=3)
    parser.add_argument("--drain-seconds", type=float, default=60.0)
    parser.add_argument("--on-time-percent", type=float, default=100 * ON_TIME_SHARE)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--directory", help="keep the database and the log there")
    options = Options(**vars(parser.parse_args(arguments)))
    logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)
    end_in_good_order()
    say(f"zoo: {options}; {measures.load()}")
    with scratch_directory(options.directory) as scratch:
        problems = visit(options, scratch)
    for problem in problems:
        say(f"VIOLATION {problem}")
    say(f"{'FAILED' if problems else 'all bounds hold'}; {measures.load()}; seed {options.seed}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
