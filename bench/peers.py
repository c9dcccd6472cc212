"""tasklib beside other queues on PostgreSQL for Python, each in the fastest mode that it documents.

Every workload is run by every system in every round, in an order that turns from round to round, on one PostgreSQL with
fsync and synchronous_commit on, each time in a database of its own. What counts is the median of the ratios of the
rounds: absolute figures vary with the machine by a factor of two from one hour to the next. All ratios are written so
that more than 1 means that tasklib is ahead.

The others are installed from PyPI, in these versions, into environments of their own under .venv/peers. Each system
runs in processes of its own, which take commands as lines of JSON (bench/drivers/driver.py). All of them run on uvloop,
if it is installed here. CPU times are read from /proc: for Linux.

python3 dev.py bench peers --rounds 5 --tasks 20000
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psycopg

from tasklib import embedded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / ".venv" / "peers"
SETTINGS = {
    "shared_buffers": "1GB",
    "max_wal_size": "4GB",
    "max_connections": "400",
    "fsync": "on",
    "synchronous_commit": "on",
}
ANSWER_SECONDS = 300.0
PACE_SECONDS = 0.02
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class System:
    """One queue: what to install, and how to see that it has nothing left to do."""

    name: str
    packages: tuple[str, ...]  # none: this environment
    left: str  # SQL: is a task waiting or held?
    mode: str
    kinds: tuple[str, ...] = ("async",)
    share: float = 1.0  # of the tasks: a slow one gets fewer, which does not hurt its rate

    @property
    def script(self) -> Path:
        return HERE / "drivers" / f"run_{self.name}.py"


TASKLIB = System(
    name="tasklib",
    packages=(),
    left="select exists (select from tasklib.tasks where completed_at is null)",
    mode="defaults; worker with concurrency 100 (sync tasks: 4)",
    kinds=("async", "sync"),
)
PEERS = [
    System(
        name="procrastinate",
        packages=("procrastinate==3.10.0", "psycopg[binary]==3.3.8", "psycopg-pool==3.3.3", "uvloop==0.23.0"),
        left="select exists (select from procrastinate_jobs where status in ('todo', 'doing'))",
        mode="async tasks, psycopg, concurrency 50, pool of 20, jobs kept (its default)",
        share=0.1,
    ),
    System(
        name="pgqueuer",
        packages=("pgqueuer==1.6.0", "asyncpg==0.32.0", "uvloop==0.23.0"),
        left="select exists (select from pgqueuer)",
        mode="asyncpg, uvloop, batch_size 500, its autovacuum settings; finished jobs go to its log",
    ),
]


@dataclass(frozen=True)
class Size:
    tasks: int
    submits: int
    latencies: int


@dataclass(frozen=True)
class Measured:
    """`value` is tasks a second, or milliseconds; `also` what else was seen."""

    value: float
    also: dict[str, float] = field(default_factory=dict)


# --- Environments ----------------------------------------------------------------------------------------------------


class Missing(Exception):
    """A peer that cannot be installed here."""


def environment(system: System) -> Path:
    """The Python that runs it; made and filled if need be. An environment that is there and whole is not touched."""
    if not system.packages:
        return Path(sys.executable)
    directory = ENVIRONMENTS / system.name
    stamp, wanted = directory / "installed", "\n".join([sys.version, *system.packages])
    python = directory / "bin" / "python"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {' '.join(system.packages)} into {directory}", flush=True)
    make = [sys.executable, "-m", "venv", "--without-pip", "--clear", str(directory)]
    subprocess.run(make, check=True)  # noqa: S603 - our own Python
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    tried = subprocess.run([*pip, *system.packages], check=False, capture_output=True, text=True)  # noqa: S603 - as above
    if tried.returncode != 0:
        raise Missing((tried.stderr.strip().splitlines() or ["pip failed"])[-1])
    stamp.write_text(wanted)
    return python


# --- Processes -------------------------------------------------------------------------------------------------------


class Process:
    """A driver in the environment of its system."""

    def __init__(self, system: System, python: Path) -> None:
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HERE.parent)]))
        self._process = subprocess.Popen(  # noqa: S603 - a script of ours
            [str(python), str(system.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._script = system.script.name
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.begun = 0  # tasks, as far as it has told
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The end of its input tells it to go; one that does not is killed."""
        self._input.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()
        self._output.close()

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        self._input.write(json.dumps({"do": do, **arguments}) + "\n")
        self._input.flush()
        answer = self._answers.get(timeout=ANSWER_SECONDS)
        if answer is None:
            raise RuntimeError(f"{self._script} has ended")
        return answer

    def _listen(self) -> None:
        for line in self._output:
            answer = json.loads(line)
            if "begun" in answer:
                self.begun = answer["begun"]
            else:
                self._answers.put(answer)
        self._answers.put(None)


@dataclass
class Bench:
    """One PostgreSQL, the systems that can be run, and how large the workloads are."""

    server: embedded.EmbeddedPostgres
    pythons: dict[System, Path]
    size: Size

    @cached_property
    def admin(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.server.dsn, autocommit=True)

    @contextmanager
    def submitter(self, system: System, **options: object) -> Iterator[tuple[str, Process]]:
        """A new database with the system's schema in it, and a process that submits to it."""
        self.admin.execute("create database bench")
        dsn = self.server.dsn_for("bench")
        try:
            with self.process(system) as process:
                process.ask("setup", dsn=dsn)
                process.ask("open", dsn=dsn, **options)
                yield dsn, process
        finally:
            self.admin.execute("drop database bench with (force)")

    def process(self, system: System) -> Process:
        return Process(system, self.pythons[system])

    def count(self, system: System) -> int:
        return max(int(self.size.tasks * system.share), 10)

    def cpu_seconds(self) -> float:
        """Of the postmaster, its children, and those of them that have ended."""
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text().split()
        return process_seconds(self.server.pid, with_ended=True) + sum(process_seconds(int(pid)) for pid in children)


def process_seconds(pid: int, *, with_ended: bool = False) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # it has just ended: the postmaster has its time
    own, ended = fields[11:13], fields[13:15]
    return sum(map(int, own + (ended if with_ended else []))) / TICKS_PER_SECOND


# --- Workloads -------------------------------------------------------------------------------------------------------


def single_submits(bench: Bench, system: System, *, concurrency: int) -> Measured:
    count = bench.size.submits * (3 if concurrency > 1 else 1)
    with bench.submitter(system, connections=concurrency) as (_, process):
        return Measured(count / process.ask("submit", count=count, concurrency=concurrency)["seconds"])


def bulk_submits(bench: Bench, system: System) -> Measured:
    with bench.submitter(system) as (_, process):
        process.ask("bulk", count=100)  # opens the connection
        return Measured(bench.size.tasks / process.ask("bulk", count=bench.size.tasks)["seconds"])


def drain(bench: Bench, system: System, *, kind: str = "async", processes: int = 1) -> Measured:
    """From the first task that begins until the system's own table has nothing left to do."""
    count = bench.count(system)
    with bench.submitter(system, kind=kind) as (dsn, submitter), ExitStack() as stack:
        submitter.ask("bulk", count=count)
        admin = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        admin.execute("vacuum analyze")
        admin.execute("checkpoint")
        workers = [stack.enter_context(bench.process(system)) for _ in range(processes)]
        used = bench.cpu_seconds()
        for worker in workers:
            worker.ask("work", dsn=dsn, kind=kind)
        ended = when_empty(admin, system, workers, count)
        answers = [worker.ask("stop") for worker in workers]
        began = [moment for answer in answers for moment in answer["began"].values()]
        if len(began) < count:
            raise RuntimeError(f"{system.name}: {len(began)} of {count} tasks have begun, and none is left")
        return Measured(
            count / (ended - min(began)),
            {
                "worker_us": sum(answer["cpu_seconds"] for answer in answers) / count * 1e6,
                "postgresql_us": (bench.cpu_seconds() - used) / count * 1e6,
            },
        )


def when_empty(admin: psycopg.Connection[Any], system: System, workers: Sequence[Process], count: int) -> float:
    """The table is looked at only when everything has begun: until then a look would cost more than it tells."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        looked = time.monotonic()
        has_begun = sum(worker.begun for worker in workers) >= count
        if has_begun and admin.execute(system.left).fetchone() == (False,):
            return looked
        time.sleep(0.005)
    raise RuntimeError(f"{system.name} has not run {count} tasks within {ANSWER_SECONDS:.0f} s")


def latency(bench: Bench, system: System) -> Measured:
    """From before the submit, in another process, to the first line of the function in an idle worker."""
    count = bench.size.latencies
    with bench.submitter(system) as (dsn, submitter), bench.process(system) as worker:
        worker.ask("work", dsn=dsn, kind="async")
        submitter.ask("submit", count=1, concurrency=1)
        time.sleep(2)  # it starts, and falls idle
        submitted = submitter.ask("pace", count=count, pause=PACE_SECONDS)["submitted"]
        time.sleep(1)
        began = worker.ask("stop")["began"]
    late = sorted((began[str(number)] - moment) * 1_000 for number, moment in enumerate(submitted))
    return Measured(statistics.median(late), {"p95_ms": late[len(late) * 95 // 100]})


@dataclass(frozen=True)
class Workload:
    key: str
    title: str
    run: Callable[[Bench, System], Measured]
    kind: str = "async"
    is_time: bool = False  # less is better

    def ratio(self, ours: float, theirs: float) -> float:
        """More than 1: we are ahead."""
        return theirs / ours if self.is_time else ours / theirs

    def show(self, measured: Sequence[Measured]) -> str:
        median = statistics.median(each.value for each in measured)
        if not self.is_time:
            return f"{median:,.0f}/s"
        return f"{median:.1f} / {statistics.median(each.also['p95_ms'] for each in measured):.1f} ms"


def workloads(processes: int) -> list[Workload]:
    several = Workload(
        f"drain_{processes}p",
        f"drain, async, {processes} processes",
        lambda bench, system: drain(bench, system, processes=processes),
    )
    return [
        Workload("submit_1", "submit, 1 submitter", lambda bench, system: single_submits(bench, system, concurrency=1)),
        Workload(
            "submit_10", "submit, 10 submitters", lambda bench, system: single_submits(bench, system, concurrency=10)
        ),
        Workload("bulk", "submit, 1,000 a call", bulk_submits),
        Workload("drain", "drain, async tasks", drain),
        Workload(
            "drain_sync", "drain, sync tasks", lambda bench, system: drain(bench, system, kind="sync"), kind="sync"
        ),
        *([several] if processes > 1 else []),
        Workload("latency", "submit to start, idle: p50 / p95", latency, is_time=True),
    ]


# --- Rounds and report -----------------------------------------------------------------------------------------------

Found = dict[str, dict[str, list[Measured]]]  # by workload and system, one for each round


def run_rounds(bench: Bench, chosen: Sequence[Workload], rounds: int) -> Found:
    found: Found = {workload.key: {} for workload in chosen}
    for number in range(rounds):
        for workload in chosen:
            for system in turned(list(bench.pythons), number):
                if workload.kind in system.kinds:
                    measured = workload.run(bench, system)
                    found[workload.key].setdefault(system.name, []).append(measured)
                    said = f"round {number + 1}/{rounds}  {workload.title:34} {system.name:14}"
                    print(f"{said} {workload.show([measured])}", flush=True)
    return found


def turned(systems: list[System], number: int) -> list[System]:
    """Another one first in each round: none is always the one that comes after a busy disk."""
    first = number % len(systems)
    return systems[first:] + systems[:first]


def ratios(workload: Workload, found: Found, peer: str) -> list[float]:
    """Round by round: the machine is the same for both only within one."""
    ours, theirs = found[workload.key].get(TASKLIB.name, []), found[workload.key].get(peer, [])
    return [workload.ratio(our.value, their.value) for our, their in zip(ours, theirs, strict=False)]


def report(chosen: Sequence[Workload], found: Found, systems: Sequence[System], missing: dict[str, str]) -> str:
    peers = [system.name for system in systems if system is not TASKLIB]
    lines = [
        f"| | tasklib | {' | '.join(f'{peer} | ratio' for peer in peers)} |",
        f"|---|---:|{'---:|---:|' * len(peers)}",
    ]
    for workload in chosen:
        cells = [workload.title, shown(workload, found, TASKLIB.name)]
        for peer in peers:
            each = ratios(workload, found, peer)
            cells += [shown(workload, found, peer), f"**{statistics.median(each):.2f}**" if each else ""]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| CPU per task, us: worker + PostgreSQL | " + " | ".join(["tasklib", *peers]) + " |"]
    lines.append(f"|---|{'---:|' * (1 + len(peers))}")
    for workload in chosen:
        if workload.key.startswith("drain"):
            cells = [cpu(found[workload.key].get(name, [])) for name in [TASKLIB.name, *peers]]
            lines.append(f"| {workload.title} | {' | '.join(cells)} |")
    lines += ["", *(f"{name} is missing: {reason}" for name, reason in missing.items())]
    return "\n".join(lines)


def shown(workload: Workload, found: Found, name: str) -> str:
    measured = found[workload.key].get(name, [])
    return workload.show(measured) if measured else ""


def cpu(measured: Sequence[Measured]) -> str:
    if not measured:
        return ""
    worker, postgresql = (
        statistics.median(each.also[key] for each in measured) for key in ("worker_us", "postgresql_us")
    )
    return f"{worker:.0f} + {postgresql:.0f}"


def installed(systems: Sequence[System]) -> tuple[dict[System, Path], dict[str, str]]:
    pythons, missing = {}, {}
    for system in systems:
        try:
            pythons[system] = environment(system)
        except Missing as error:
            missing[system.name] = str(error)
            print(f"{system.name} cannot be installed here: {error}", flush=True)
    return pythons, missing


def versions(bench: Bench) -> dict[str, dict[str, str]]:
    found = {}
    for system in bench.pythons:
        with bench.process(system) as process:
            found[system.name] = process.ask("versions")
    return found


def checked_settings(dsn: str) -> dict[str, str]:
    """As the server says: a benchmark without durability would be of another thing."""
    with psycopg.connect(dsn) as conn:
        names = [*SETTINGS, "full_page_writes", "server_version"]
        settings = {name: conn.execute("select current_setting(%s)", [name]).fetchone() for name in names}
    found = {name: str(row[0]) for name, row in settings.items() if row is not None}
    if not found["fsync"] == found["synchronous_commit"] == found["full_page_writes"] == "on":
        raise RuntimeError(f"this server is not durable: {found}")
    return found


def as_json(found: Found) -> dict[str, Any]:
    return {
        workload: {
            name: [{"value": each.value, **each.also} for each in measured] for name, measured in by_system.items()
        }
        for workload, by_system in found.items()
    }


def main(arguments: Sequence[str] | None = None, peers: Sequence[System] = tuple(PEERS)) -> int:
    options = parse(arguments, [peer.name for peer in peers])
    systems = [TASKLIB, *(peer for peer in peers if peer.name in options.peers)]
    chosen = [each for each in workloads(options.processes) if not options.only or each.key in options.only]
    pythons, missing = installed(systems)
    with embedded.postgres(settings=SETTINGS) as server:
        about: dict[str, Any] = {
            "settings": checked_settings(server.dsn),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "modes": {system.name: system.mode for system in systems},
        }
        bench = Bench(server, pythons, Size(options.tasks, options.submits, options.latencies))
        about["versions"] = versions(bench)
        print(json.dumps(about, indent=2), flush=True)
        found = run_rounds(bench, chosen, options.rounds)
        bench.admin.close()
    print(f"\n{report(chosen, found, list(pythons), missing)}")
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"peers-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps({"about": about, "missing": missing, "rounds": as_json(found)}, indent=2))
    print(f"\n{path}")
    return 0


def parse(arguments: Sequence[str] | None, peers: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=20_000, help="in bulk submits and in a drain")
    parser.add_argument("--submits", type=int, default=1_000, help="by one submitter; ten make three times as many")
    parser.add_argument("--latencies", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1, help="also drain with so many worker processes")
    parser.add_argument("--only", action="append", choices=[each.key for each in workloads(2)], help="may be repeated")
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
