"""What every workload stands on: one durable PostgreSQL, databases in it, drivers in processes of their own, and the
counters of what they cost.

CPU times are read from /proc: for Linux. They are counted between two moments of a run, so that no program's start is
in them.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg import sql

from tools import measures

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.sizes import Size
    from bench.systems import System
    from tasklib import embedded

SETTINGS = {
    "shared_buffers": "1GB",
    "max_wal_size": "4GB",
    "max_connections": "800",
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.track": "none",  # but for who counts statements
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
}
ANSWER_SECONDS = 1800.0  # to fill a table takes a slow peer minutes
END_SECONDS = 30.0


class NotRun(Exception):
    """A workload that has no place here, or that a system cannot do: said in the report, with the reason."""


@dataclass(frozen=True)
class Measured:
    """`value` is what the workload is about: tasks a second, milliseconds, or a share. `also` is what else was seen,
    `series` what was seen over time.
    """

    value: float
    also: dict[str, float] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)


class Process:
    """A driver of a system (bench/drivers/driver.py): takes commands and gives answers as lines of JSON."""

    def __init__(self, command: Sequence[str]) -> None:
        root = Path(command[1]).parents[2]  # an earlier version brings its own library
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(  # noqa: S603 - a script of ours
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._name = Path(command[1]).name
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.begun = 0  # tasks, as far as it has told
        self._stopped: dict[str, Any] | None = None
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The end of its input tells it to go; one that does not is killed."""
        self._input.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()
        self._output.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        self.tell(do, **arguments)
        return self.answer()

    def stop(self) -> dict[str, float]:
        """The worker ends in good order, if it has not yet; when each task began, by its number."""
        if self._stopped is None:
            self._stopped = self.ask("stop")
        began: dict[str, float] = self._stopped["began"]
        return began

    @property
    def repeated(self) -> int:
        """Tasks that it ran twice, when it has stopped."""
        return int(self._stopped["repeated"]) if self._stopped is not None else 0

    def tell(self, do: str, **arguments: object) -> None:
        """Without waiting for the answer: something else is measured meanwhile."""
        self._input.write(json.dumps({"do": do, **arguments}) + "\n")
        self._input.flush()

    def answer(self) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            raise RuntimeError(f"{self._name} has not answered within {ANSWER_SECONDS:.0f} s") from None
        if answer is None:
            raise RuntimeError(f"{self._name} has ended")
        return answer

    def _listen(self) -> None:
        for line in self._output:
            answer = json.loads(line)
            if "begun" in answer:
                self.begun = answer["begun"]
            else:
                self._answers.put(answer)
        self._answers.put(None)


@dataclass(frozen=True)
class Spent:
    """What has been used up so far; the difference of two is what a run has cost."""

    postgresql_seconds: float
    worker_seconds: float
    wal_bytes: int
    transactions: int  # that wrote: each is a commit, with its wait for the disk

    def per_task(self, later: Spent, tasks: int) -> dict[str, float]:
        if tasks == 0:
            return {}
        return {
            "postgresql_us": (later.postgresql_seconds - self.postgresql_seconds) / tasks * 1e6,
            "worker_us": (later.worker_seconds - self.worker_seconds) / tasks * 1e6,
            "wal_bytes": (later.wal_bytes - self.wal_bytes) / tasks,
            "commits": (later.transactions - self.transactions) / tasks,
        }


@dataclass
class Kept:
    """A database that stays, and how many of the rows that it is for are in it."""

    dsn: str
    filled: int = 0


class Bench:
    """One PostgreSQL, the systems that can be run, and how large the workloads are."""

    def __init__(
        self,
        server: embedded.EmbeddedPostgres,
        commands: dict[System, list[str]],
        size: Size,
        *,
        is_quick: bool = False,
    ) -> None:
        self.server = server
        self._is_quick = is_quick
        self._spares: dict[System, Process] = {}
        self.commands = commands
        self.size = size
        self._kept: dict[str, Kept] = {}
        self._templates: set[str] = set()

    @cached_property
    def admin(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.server.dsn, autocommit=True)

    # --- databases ---

    @contextmanager
    def database(self, system: System) -> Iterator[str]:
        """A new one with the system's schema in it, for one run."""
        dsn = self._create("bench", system)
        try:
            yield dsn
        finally:
            self.admin.execute("drop database bench with (force)")

    def kept_database(self, system: System, what: str) -> Kept:
        """One that stays for all rounds, because it takes minutes to fill."""
        name = f"{what}_{system.name}"
        if name not in self._kept:
            self._kept[name] = Kept(self._create(name, system))
        return self._kept[name]

    def _create(self, name: str, system: System) -> str:
        """A copy of what the system has made of an empty one, once."""
        template = f"empty_{system.name}"
        if template not in self._templates:
            self.admin.execute(sql.SQL("create database {}").format(sql.Identifier(template)))
            self._templates.add(template)
            with self.process(system) as process:
                process.ask("setup", dsn=self.server.dsn_for(template))
        names = sql.Identifier(name), sql.Identifier(template)
        self.admin.execute(sql.SQL("create database {} template {}").format(*names))
        return self.server.dsn_for(name)

    def need_room(self, rows: int, bytes_per_row: int) -> None:
        """Half of what is free stays free: WAL and other databases need some of it too."""
        free = shutil.disk_usage(self.server.directory).free
        if rows * bytes_per_row > free / 2:
            raise NotRun(f"{rows:,} rows need {rows * bytes_per_row / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")

    # --- processes ---

    def process(self, system: System) -> Process:
        """In a quick run the next one starts while this one is used: half of its time would be spent on starts, and its
        figures do not count.
        """
        if not self._is_quick:
            return Process(self.commands[system])
        ready = self._spares.pop(system, None) or Process(self.commands[system])
        self._spares[system] = Process(self.commands[system])
        return ready

    def close(self) -> None:
        for spare in self._spares.values():
            spare.__exit__()
        self.admin.close()

    @contextmanager
    def submitter(self, system: System, dsn: str, **options: object) -> Iterator[Process]:
        with self.process(system) as process:
            process.ask("open", dsn=dsn, **options)
            yield process

    @contextmanager
    def workers(self, system: System, dsn: str, *, kind: str = "async", processes: int = 1) -> Iterator[list[Process]]:
        """Started first, and only then told to work: none of them has a lead."""
        with ExitStack() as stack:
            started = [stack.enter_context(self.process(system)) for _ in range(processes)]
            for worker in started:
                worker.ask("versions")
            for worker in started:
                worker.ask("work", dsn=dsn, kind=kind)
            yield started
            for worker in started:
                worker.stop()

    # --- counters ---

    def spent(self, workers: Sequence[Process] = ()) -> Spent:
        row = self.admin.execute(
            "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint,"
            " pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        ).fetchone()
        assert row is not None
        return Spent(
            postgresql_seconds=measures.cpu_seconds(self.server.pid),
            worker_seconds=sum(measures.cpu_seconds(worker.pid) for worker in workers),
            wal_bytes=row[0],
            transactions=row[1],
        )


def checked_settings(dsn: str) -> dict[str, str]:
    """As the server says: a benchmark without durability would be of another thing."""
    with psycopg.connect(dsn) as conn:
        names = [*SETTINGS, "server_version"]
        settings = {name: conn.execute("select current_setting(%s)", [name]).fetchone() for name in names}
    found = {name: str(row[0]) for name, row in settings.items() if row is not None}
    if not found["fsync"] == found["synchronous_commit"] == found["full_page_writes"] == "on":
        raise RuntimeError(f"this server is not durable: {found}")
    return found
