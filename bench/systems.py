"""The queues that are measured: what each is, how it is installed, and which command runs its driver.

Those that are not ours come from PyPI and npm, in the versions named here, into environments of their own under
.venv/peers: what one of them needs must not meet what another needs. One that cannot be installed is missing, with the
reason; the others are measured all the same.
"""

from __future__ import annotations

import dataclasses
import io
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / ".venv" / "peers"
UVLOOP = "uvloop==0.23.0"
NODE = ("node@24.21.0", "pg@8.23.1")  # they want a Node of 22 or more, which few machines have: npm brings one


@dataclass(frozen=True)
class System:
    """One queue: what to install, and how to see that it has nothing left to do."""

    name: str
    packages: tuple[str, ...]  # none: this environment
    left: str  # SQL: is a task due, or held?
    mode: str
    share: float = 1.0  # of a drain's tasks: a slow one needs fewer to show its rate, one for Node more to be compiled
    runtime: Literal["python", "node"] = "python"
    root: Path = HERE.parent  # the source tree of its driver
    driver: str = ""  # its name, if it is not the system's own

    @property
    def kind(self) -> str:
        """Two versions of one queue are of the same kind: they take part in the same workloads."""
        return self.driver or self.name

    @property
    def script(self) -> Path:
        suffix = {"python": "py", "node": "mjs"}[self.runtime]
        return self.root / "bench" / "drivers" / f"run_{self.kind.replace('-', '_')}.{suffix}"


TASKLIB = System(
    name="tasklib",
    packages=(),
    left="""
        select exists (select from tasklib.tasks where ready) or exists (select from tasklib.claims)
            or exists (select from tasklib.tasks where due_at <= now())
    """,
    mode="defaults; worker with concurrency 100 (sync tasks: 4)",
)
BARE = System(
    name="bare",
    packages=(),
    left="select exists (select from tasklib.tasks where ready or worker_id is not null)",
    mode="the limits: psycopg and SQL by hand on tasklib's own table (drivers/run_bare.py)",
)
PEERS = [
    System(
        name="procrastinate",
        packages=("procrastinate==3.10.0", "psycopg[binary]==3.3.8", "psycopg-pool==3.3.3", UVLOOP),
        left="""
            select exists (select from procrastinate_jobs
                            where status in ('todo', 'doing') and (scheduled_at is null or scheduled_at <= now()))
        """,
        mode="async tasks, psycopg, concurrency 50, pool of 20, jobs and events kept (its default)",
        share=0.1,
    ),
    System(
        name="pgqueuer",
        packages=("pgqueuer==1.6.0", "asyncpg==0.32.0", UVLOOP),
        left="select exists (select from pgqueuer where execute_after <= now())",
        mode="asyncpg, uvloop, batch_size 500, its autovacuum settings; finished jobs go to its log",
    ),
    System(
        name="chancy",
        packages=("chancy==0.26.0", "psycopg[binary]==3.3.8", "psycopg-pool==3.3.3", UVLOOP),
        left="""
            select exists (select from chancy_jobs
                            where state in ('pending', 'running', 'retrying') and scheduled_at <= now())
        """,
        mode="async executor, concurrency 500, eager polling, updates every 0.1 s, without the plugins for metrics and "
        "workflows; finished jobs kept for a minute (its default)",
        share=0.3,
    ),
    System(
        name="awa-pg",
        packages=("awa-pg==0.6.9", UVLOOP),
        left="""
            select (select coalesce(sum(claimed_count), 0) from awa.ready_claim_attempt_batches)
                   > (select coalesce(sum(completed_count), 0) from awa.receipt_completion_batches)
                     + (select count(*) from awa.done_entries)
                or exists (select from awa.queue_enqueue_heads as put
                             join awa.queue_claim_heads as taken using (queue, priority, enqueue_shard)
                            where awa.sequence_next_value(put.seq_name) > awa.sequence_next_value(taken.seq_name))
                or exists (select from awa.deferred_jobs where run_at <= now())
        """,
        mode="Rust core, async Python handlers, queue storage, max_workers 1,000, no deadline; finished jobs are "
        "truncated after seconds",
        share=0.5,
    ),
    System(
        name="graphile-worker",
        packages=("graphile-worker@0.18.0", *NODE),
        left="select exists (select from graphile_worker._private_jobs where run_at <= now())",
        mode="Node, concurrentJobs 24, local queue of 500, completions in batches; finished jobs are deleted",
        share=2.0,
        runtime="node",
    ),
    System(
        name="pg-boss",
        packages=("pg-boss@12.35.0", *NODE),
        left="select exists (select from pgboss.job where state <= 'active' and start_after <= now())",
        mode="Node, batches of 500, burst while they are full, 4 fetchers, notifications; one outcome for a batch, "
        "jobs kept (its default)",
        share=2.0,
        runtime="node",
    ),
]


def earlier(revision: str, number: int = 1) -> System:
    """An earlier version of tasklib. The same commit with another number is a control: the two should be equal."""
    git = ["git", "-C", str(HERE.parent)]
    found = subprocess.run([*git, "rev-parse", "--short", revision], check=True, capture_output=True, text=True)  # noqa: S603
    commit = found.stdout.strip()
    root = ENVIRONMENTS / f"tasklib-{commit}"
    if not root.exists():
        archive = subprocess.run([*git, "archive", "--format=tar", commit], check=True, capture_output=True)  # noqa: S603
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            if hasattr(tarfile, "data_filter"):  # Python 3.11.4
                tar.extraction_filter = tarfile.data_filter
            tar.extractall(root)  # noqa: S202 - our own archive
    name = commit if number == 1 else f"{commit}-{number}"
    return dataclasses.replace(TASKLIB, name=name, root=root, driver=TASKLIB.name)


class Missing(Exception):
    """A peer that cannot be installed here."""


def installed(systems: Sequence[System]) -> tuple[dict[System, list[str]], dict[str, str]]:
    """The commands of those that can be run, and why the others are missing."""
    commands, missing = {}, {}
    for system in systems:
        try:
            commands[system] = environment(system)
        except Missing as error:
            missing[system.name] = str(error)
            print(f"{system.name} cannot be installed here: {error}", flush=True)
    return commands, missing


def environment(system: System) -> list[str]:
    """The command that runs its driver. What that needs is installed, unless it is there and whole: then it is not
    touched.
    """
    if not system.packages:
        return [sys.executable, str(system.script)]
    directory = ENVIRONMENTS / system.name
    stamp, wanted = directory / "installed", "\n".join([sys.version, *system.packages])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {' '.join(system.packages)} into {directory}", flush=True)
        {"python": install_from_pypi, "node": install_from_npm}[system.runtime](system, directory)
        stamp.write_text(wanted)
    if system.runtime == "python":
        return [str(directory / "bin" / "python"), str(system.script)]
    return [str(directory / "node_modules" / ".bin" / "node"), str(system.script), str(directory)]


def install_from_pypi(system: System, directory: Path) -> None:
    make = [sys.executable, "-m", "venv", "--without-pip", "--clear", str(directory)]
    subprocess.run(make, check=True)  # noqa: S603 - our own Python
    python = str(directory / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet"]
    attempt([*pip, *system.packages])


def install_from_npm(system: System, directory: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise Missing("there is no npm here")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    attempt([npm, "install", "--prefix", str(directory), "--no-audit", "--no-fund", *system.packages])
    attempt([str(directory / "node_modules" / ".bin" / "node"), "--version"])


def attempt(command: list[str]) -> None:
    """What the program complains of is the reason why a peer is missing."""
    try:
        tried = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 - pip, npm, or its node
    except OSError as error:  # npm did not bring a node
        raise Missing(str(error)) from error
    if tried.returncode != 0:
        said = [line for line in tried.stderr.splitlines() if line.lower().startswith(("error", "npm error"))]
        raise Missing(" ".join(said[:2]) or f"{command[0]} failed")
