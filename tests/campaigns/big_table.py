"""A table of ten million tasks is migrated while workers and submitters of the version before are at work.

One migrator is killed in its transaction, another one with its server process while it builds an index. A transaction
of a user stays open for some seconds, so that a migration that waited for it would hold up everybody. Nothing is lost,
and no statement of a user or a worker waits for more than a second.

    python3 dev.py big-table                      ten million tasks, in about ten minutes
    python3 dev.py big-table --rows 100000 --seconds 3

The waits are those that the processes saw, from a statement to its answer, and those that the server shows in pg_locks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

import tasklib
from tasklib import embedded, migrate
from tests.campaigns.migrators import finish, send_off, start_racer
from tests.support import previous_version

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST_SECONDS = 1.0
WORKERS, SUBMITTERS, SUBMITS_PER_SECOND = 2, 2, 50.0
SAMPLE_SECONDS = 0.01
MANY = 1_000_000  # a build of so many rows takes long enough to be killed while it reads the table
DRAIN_SECONDS = 120.0
LOAD = Path(__file__).with_name("big_table_load.py")
INDEX = "create index concurrently tasks_campaign on tasklib.tasks (name, created_at);"
SETTINGS = {"max_wal_size": "8GB", "shared_buffers": "512MB", "maintenance_work_mem": "256MB"}

# Every hundredth failed, every thousandth waits for a time that is far away, all others are completed. The ids are in
# the order of time, as real ones are. Without triggers, which would take most of the time.
FILL = """
insert into tasklib.tasks (id, name, queue, priority, max_retries, store_result, ready, state, attempt, fencing_token,
                           created_at, scheduled_at, due_at, started_at, completed_at, error_code, error, kwargs)
select (substr(head, 1, 8) || '-' || substr(head, 9, 4) || '-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid,
       'count', 'default', 0, 3, true, false,
       case when is_waiting then 'pending' when is_failed then 'failed' else 'completed' end,
       case when is_waiting then 0 else 1 end, case when is_waiting then 0 else 1 end,
       at, case when is_waiting then at + interval '1000 days' else at end,
       case when is_waiting then at + interval '1000 days' end,
       case when not is_waiting then at end, case when not is_waiting then at end,
       case when is_failed then 'FAILED' end, case when is_failed then 'by the campaign' end,
       jsonb_build_object('number', n)
  from (select n, n %% 1000 = 7 as is_waiting, n %% 100 = 3 as is_failed,
               clock_timestamp() - (%(rows)s - n) * interval '1 millisecond' as at,
               lpad(to_hex((extract(epoch from clock_timestamp()) * 1000)::bigint - %(rows)s + n), 12, '0') as head
          from generate_series(1, %(rows)s::bigint) as n) as made
"""
LOCK_WAITS = """
select activity.application_name, extract(epoch from clock_timestamp() - lock.waitstart)::double precision
  from pg_locks as lock join pg_stat_activity as activity using (pid)
 where not lock.granted and lock.waitstart is not null and lock.locktype not in ('virtualxid', 'advisory')
"""
WAITS_FOR_TABLE = """
select from pg_locks
 where not granted and mode = 'AccessExclusiveLock' and relation = 'tasklib.tasks'::regclass
"""
BUILDING = "select pid, phase, blocks_done from pg_stat_progress_create_index where datname = current_database()"
VALID = "select indisvalid from pg_index where indexrelid = to_regclass('tasklib.tasks_campaign')"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


@dataclass
class Load:
    """Processes of the version before."""

    url: str
    directory: Path
    environment: dict[str, str]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self) -> None:
        for _ in range(WORKERS):
            self._start("worker", self.url)
        for number in range(SUBMITTERS):
            self._start("submitter", self.url, str(self.directory / f"ids_{number}"), str(SUBMITS_PER_SECOND))

    def _start(self, *words: str) -> None:
        command = [sys.executable, str(LOAD), *words]
        log = (self.directory / "log").open("a")
        process = subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, stderr=log, text=True)
        self.processes.append(process)
        assert process.stdout is not None
        assert self.environment["PYTHONPATH"] in process.stdout.readline(), "not the code of the version before"

    def stop(self, role: str) -> list[dict[str, Any]]:
        """What those of one role have seen."""
        ending = [each for each in self.processes if isinstance(each.args, list) and each.args[2] == role]
        for process in ending:
            process.send_signal(signal.SIGTERM)
        answers = [process.communicate(timeout=DRAIN_SECONDS)[0] for process in ending]
        self.processes = [each for each in self.processes if each not in ending]
        return [json.loads(answer.splitlines()[-1]) for answer in answers]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def ids(self) -> list[str]:
        return [line for file in self.directory.glob("ids_*") for line in file.read_text().split()]


class LockWaits(threading.Thread):
    """The longest time that anybody was seen to wait for a lock, but for an index that waits for transactions."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._is_over = threading.Event()
        self.longest: dict[str, float] = {}

    def run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as conn:
            while not self._is_over.wait(SAMPLE_SECONDS):
                for name, seconds in conn.execute(LOCK_WAITS):
                    self.longest[name] = max(self.longest.get(name, 0.0), seconds)

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def fill(url: str, rows: int) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("set session_replication_role = replica")
        conn.execute(FILL, {"rows": rows})
        say("  vacuum, analyze")
        conn.execute("vacuum analyze tasklib.tasks")


@contextlib.contextmanager
def open_transaction(url: str) -> Iterator[psycopg.Connection]:
    """A user's, who has submitted in it and has not committed yet."""
    with psycopg.connect(url) as conn:
        conn.execute("""insert into tasklib.tasks (name, kwargs) values ('count', '{"number": 0}')""")
        yield conn


def kill_in_the_transaction(url: str) -> None:
    """While it waits for the table, which a user's transaction holds: between two tries it has no transaction."""
    with open_transaction(url) as conn, psycopg.connect(url, autocommit=True) as looking:
        racer = start_racer(url, INDEX)
        send_off(racer)
        while looking.execute(WAITS_FOR_TABLE).fetchone() is None:
            assert racer.poll() is None, "the migrator did not wait for the user's transaction"
            time.sleep(0.002)
        racer.kill()
        finish(racer)
        conn.commit()


def migrate_behind_a_transaction(url: str, seconds: float) -> float:
    """How long the migration took, of which a user's transaction was open for so many seconds."""
    began = time.monotonic()
    with open_transaction(url) as conn:
        migrator = threading.Thread(target=migrate.migrate, args=[tasklib.Config(url)])
        migrator.start()
        time.sleep(seconds)
        conn.commit()
    migrator.join()
    return time.monotonic() - began


def kill_in_the_build(url: str, *, while_it_reads: bool) -> str:
    """The migrator, and then its server process, which would go on. In which phase they were."""
    racer = start_racer(url, INDEX)
    send_off(racer)
    with psycopg.connect(url, autocommit=True) as conn:
        while racer.poll() is None:
            row = conn.execute(BUILDING).fetchone()
            if row is not None and (row[2] > 0 or not while_it_reads):
                racer.kill()
                finish(racer)
                conn.execute("select pg_terminate_backend(%s)", [row[0]])
                return str(row[1])
            time.sleep(0.002)
    finish(racer)
    return "none: it ended before"


def build(url: str) -> float:
    began = time.monotonic()
    racer = start_racer(url, INDEX)
    send_off(racer)
    racer.communicate(timeout=3600)
    assert racer.returncode == 0, "the migrator failed"
    return time.monotonic() - began


def judge(conn: psycopg.Connection, load: Load, rows: int) -> list[str]:
    """What is wrong."""
    wrong = []
    ids = load.ids()
    deadline = time.monotonic() + DRAIN_SECONDS
    left = "select count(*) from tasklib.tasks where id = any(%s::uuid[]) and state <> 'completed'"
    while conn.execute(left, [ids]).fetchone() != (0,) and time.monotonic() < deadline:
        time.sleep(0.1)
    query = """select count(*), count(*) filter (where state = 'completed'), max(attempt) from tasklib.tasks
                where id = any(%s::uuid[])"""
    if conn.execute(query, [ids]).fetchone() != (len(ids), len(ids), 1):
        wrong.append(f"of {len(ids)} tasks: present, completed, attempts {conn.execute(query, [ids]).fetchone()}")
    there = conn.execute("select count(*) from tasklib.tasks where error = 'by the campaign'").fetchone()
    if there != (rows // 100 + (rows % 100 >= 3),):
        wrong.append(f"old rows are gone: {there}")
    if conn.execute(VALID).fetchone() != (True,):
        wrong.append("the index is not valid")
    if migrate.find_difference(conn, "tasklib").is_incomplete:
        wrong.append("the schema is not complete")
    return wrong


def merged(answers: list[dict[str, Any]], key: str) -> dict[str, Any]:
    kinds = sorted({kind for answer in answers for kind in answer[key]})
    most = max if key == "longest" else sum
    return {kind: most([answer[key].get(kind, 0) for answer in answers]) for kind in kinds}


def run(url: str, directory: Path, *, rows: int, seconds: float) -> tuple[list[str], dict[str, float]]:
    code = previous_version.unpack(directory / "previous")
    environment = previous_version.environment(code)
    old_migrate = [sys.executable, "-m", "tasklib.migrate"]  # -m looks in the present directory first
    subprocess.run(old_migrate, env={**environment, "DATABASE_URL": url}, cwd=code, check=True)
    assert "0012_policies" in str(migrate.check(tasklib.Config(url))), "not the schema of the version before"
    say(f"schema of the version before; {rows:,} tasks")
    fill(url, rows)
    load, locks = Load(url, directory, environment), LockWaits(url)
    try:
        load.start()
        locks.start()
        say("workers and submitters of the version before are at work")
        time.sleep(seconds)
        kill_in_the_transaction(url)
        say("a migrator was killed in its transaction")
        taken = migrate_behind_a_transaction(url, seconds)
        say(f"migrated in {taken:.1f} s, of which a user's transaction was open for {seconds:g} s")
        time.sleep(seconds)
        phase = kill_in_the_build(url, while_it_reads=rows > MANY)
        say(f"a migrator and its server process were killed in mid build, in phase: {phase}")
        say(f"the next one had built the index after {build(url):.1f} s")
        time.sleep(seconds)
        answers = load.stop("submitter")
        with psycopg.connect(url, autocommit=True) as conn:
            wrong = judge(conn, load, rows)
        answers += load.stop("worker")
    finally:
        load.kill()
        if locks.is_alive():
            locks.stop()
    for kind, number in merged(answers, "count").items():
        failed = merged(answers, "failed").get(kind, 0)
        say(
            f"  {kind:<8} {number:>8} statements, {failed} sent again; longest {merged(answers, 'longest')[kind]:.3f} s"
        )
    for name, each in sorted(locks.longest.items()):
        say(f"  {name:<24} seen to wait for a lock for up to {each:.3f} s")
    return wrong, merged(answers, "longest") | {f"lock of {name}": each for name, each in locks.longest.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, default=5.0, help="of load before, between and after")
    parser.add_argument("--any-wait", action="store_true", help="judge what is lost, and not how long anybody waited")
    options = parser.parse_args()
    with embedded.postgres(settings=SETTINGS) as server, tempfile.TemporaryDirectory() as directory:
        wrong, waits = run(server.dsn, Path(directory), rows=options.rows, seconds=options.seconds)
        if not options.any_wait:
            wrong += [f"{kind} waited {each:.2f} s" for kind, each in waits.items() if each > LONGEST_SECONDS]
    for each in wrong:
        say(f"WRONG: {each}")
    say("FAILED" if wrong else "nothing was lost, and nobody waited long")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
