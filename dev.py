#!/usr/bin/env python3
"""The developer's command: python3 dev.py COMMAND. It needs only Python 3.11 and pip.

Every day
  test [WORDS]      run all that CI runs: linters, types, the suite on PostgreSQL 18 and 15 (if installed), and a few
                    mutants; with WORDS, run pytest with them
  lint              run ruff, mypy, pyright, import contracts and the spelling check
  demo [--fast]     start a PostgreSQL and a daemon, and show what happens to sample tasks
  setup             make .venv and install everything into it

More tests
  acceptance        run the acceptance tests, including the long ones that `test` leaves out
  coverage          run the suite on PostgreSQL 18 and list the lines and branches that no test reaches
  mutants           remove guards one by one and see the named test fail (--quick: a few of them)
  pooler            run the suite through PgBouncer in transaction mode
  pythons [VERSION] run the unit tests and the core integration tests on Python 3.12, 3.13 and 3.14

Long campaigns (--help lists the options of each)
  soak              kill 200 workers and restart PostgreSQL 50 times, under load
  soak daemon NAME  run one campaign against daemons; `soak daemon` lists the names
  soak daemon all   run all of them one after another, and print a table of the results
  exactly-once      cut connections around COMMIT while workers are killed and frozen
  hostile-role      let a database role that may create objects in public attack the others
  migrators         run 20 migrations at once, then kill 50 of them half way
  big-table         migrate ten million tasks while the version before works, and see who waits how long

Measurements
  bench             measure throughput and latency beside other queues and plain SQL (--quick: one minute)
  footprint         measure the disk space of a task, and the memory and connections of a daemon

Generated files
  states            write the diagram in docs/states.md from tasklib/states.py
  metrics           write the table in docs/metrics.md from the daemon's metrics.py
  schema            write tasklib/sql/schema.sql from a migrated database
  dashboards        write grafana/dashboards from the descriptions beside them
  manifests         write the manifests that are made from the files in grafana/
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
DEMO_VENV = ROOT / ".venv-demo"
DEMO_EXTRAS = "binary,daemon,embedded"
POSTGRES_15 = Path("/usr/lib/postgresql/15/bin")
# Tests of one file share fixtures that take long to make, so a file stays in one process. Acceptance tests share
# nothing unless they name a group: each goes to the process that is free.
BY_FILE = ("-m", "pytest", "-n", "2", "--dist", "loadfile")
BY_TEST = ("-m", "pytest", "-n", "2", "--dist", "loadgroup")
DAEMON_CAMPAIGNS = (
    "kills", "suspects", "supervisors", "freeze", "hostile-tasks", "rolling", "outage", "failover", "connections",
    "locks", "bad-rows", "torn-reads", "many-queues", "idle", "counters", "scrapes", "punctual",
    "policies",
)  # fmt: skip
CODE = ("tasklib", "tasklib_pytest.py", "daemon", "grafana", "tests", "tools", "bench", "examples", "dev.py")
PROSE = (
    "tasklib", "daemon", "grafana", "tests", "tools", "bench", "docs", "systemd", "kubernetes", "dev.py", "README.md",
    "CHANGELOG.md", "CONTRIBUTING.md",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A program to run, with the words that follow its name."""

    name: str
    program: str  # of the environment
    words: tuple[str | Path, ...] = ()
    variables: Mapping[str, str] | None = None
    is_live: bool = False  # its output is shown as it comes; other output is shown when the program has ended

    @property
    def command(self) -> list[str]:
        return [str(python_in(VENV).with_name(self.program)), *map(str, self.words)]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | (self.variables or {})


def main(arguments: list[str]) -> int:
    command, *options = arguments or ["--help"]
    commands: dict[str, Callable[[list[str]], int]] = {
        "setup": lambda _: 0,
        "lint": lint,
        "test": test,
        "pooler": pooler,
        "coverage": coverage,
        "demo": demo,
        "pythons": lambda options: run_python("-m", "tools.pythons", *options),
        "mutants": lambda options: run_python("tools/mutants.py", *options),
        "migrators": lambda options: run_python("tests/campaigns/migrators.py", *options),
        "big-table": lambda options: run_python("tests/campaigns/big_table.py", *options),
        "exactly-once": lambda options: run_python("tests/campaigns/exactly_once.py", *options),
        "hostile-role": lambda options: run_python("tests/campaigns/hostile_role.py", *options),
        "soak": soak,
        "bench": lambda options: run_python("-m", "bench", *options),
        "footprint": lambda options: run_python("-m", "bench.footprint", *options),
        "acceptance": lambda options: run_python("-m", "pytest", "tests/acceptance", *options),
        "states": lambda options: run_python("-m", "tools.states_diagram", *options),
        "dashboards": lambda options: run_python("-m", "grafana.build", *options),
        "manifests": lambda options: run_python("-m", "tools.manifests", *options),
        "metrics": lambda options: run_python("-m", "tools.metrics_table", *options),
        "schema": lambda options: run_python("tools/schema_snapshot.py", "--write", *options),
    }
    if command not in commands:
        print(__doc__)
        return 0 if command in {"-h", "--help", "help"} else 2
    os.chdir(ROOT)
    if command != "demo":  # the demo needs a tenth of it
        install(VENV, "dev")
    return commands[command](options)


# --- tests ---


def lint(_options: list[str]) -> int:
    return run_steps(linters(), at_once=len(linters()))


def linters() -> list[Step]:
    return [
        Step("ruff", "ruff", ("check", *CODE)),
        Step("format", "ruff", ("format", "--check", *CODE)),
        Step("imports", "lint-imports"),
        Step("spelling", "codespell", PROSE),
        Step("mypy", "mypy"),
        Step("pyright", "basedpyright", ("--level", "error")),
    ]


def test(options: list[str]) -> int:
    """Two steps at a time: much of a step is waiting, and two cores are busy with two of them."""
    if options:
        return run_python("-m", "pytest", *options)
    suite: tuple[str, ...] = ("--durations=10", "--ignore=tests/acceptance")
    steps = [
        Step("suite on PostgreSQL 18", "python", (*BY_FILE, *suite), is_live=True),
        *linters(),
        Step(
            "acceptance on PostgreSQL 18", "python", (*BY_TEST, "--durations=10", "-m", "not long", "tests/acceptance")
        ),
        *suite_on_15(),
        Step("mutants", "python", ("tools/mutants.py", "--quick")),
    ]
    failed = run_steps(steps, at_once=2)
    announce("failed" if failed else "all is well")
    return failed


def suite_on_15() -> list[Step]:
    """The tests that depend on the version of the server, as their modules say with a marker."""
    if not (POSTGRES_15 / "postgres").exists():
        announce("SKIPPED: THE SUITE ON POSTGRESQL 15. apt-get install postgresql-15 to run it here.")
        return []
    words = (*BY_FILE, "--durations=10", "-m", "postgres_versions", "tests/integration")
    return [Step("suite on PostgreSQL 15", "python", words, {"TASKLIB_PG_BIN": str(POSTGRES_15)})]


def coverage(options: list[str]) -> int:
    """Apart from `test`, because the suite takes a third longer with it."""
    (ROOT / ".coverage").unlink(missing_ok=True)
    return run_steps(
        [
            Step("suite on PostgreSQL 18", "coverage", ("run", "-m", "pytest", *options), is_live=True),
            Step("coverage", "coverage", ("combine", "--quiet")),
            Step("coverage", "coverage", ("report",)),
        ]
    )


def pooler(options: list[str]) -> int:
    """Without the tests of the server's launcher and of the package, which use no pooler."""
    suite = ["tests/integration", "tests/acceptance", "--ignore=tests/integration/test_embedded.py"]
    suite += ["--ignore=tests/acceptance/test_packaging.py", "--ignore=tests/acceptance/test_soak.py"]
    variables = {"TASKLIB_TEST_POOLER": "1"}
    words = (*BY_FILE, *(options or suite))
    return run_steps([Step("suite through PgBouncer", "python", words, variables, is_live=True)])


# --- campaigns ---


def soak(options: list[str]) -> int:
    """Without `daemon`, the campaign against workers that run without one."""
    if options[:1] != ["daemon"]:
        return run_python("tests/campaigns/soak.py", *options)
    if options[1:] == ["all"]:
        return soak_all()
    if not options[1:] or options[1] not in DAEMON_CAMPAIGNS:
        print(f"soak daemon takes one of: {', '.join(DAEMON_CAMPAIGNS)}; or all")
        return 2
    return run_campaign(options[1], *options[2:])


def soak_all() -> int:
    """All campaigns against daemons at full length, also after one that fails."""
    rows: list[tuple[str, int, float]] = []
    for number, name in enumerate(DAEMON_CAMPAIGNS, 1):
        announce(f"campaign {number} of {len(DAEMON_CAMPAIGNS)}: {name}, started at {time.strftime('%H:%M:%S')}")
        began = time.monotonic()
        rows.append((name, run_campaign(name), time.monotonic() - began))
        print(f"   {name} {verdict(rows[-1][1])}, {rows[-1][2]:.0f} s", flush=True)
    announce("campaigns against daemons")
    for name, code, seconds in rows:
        print(f"   {name:<16}{verdict(code):<8}{seconds:>7.0f} s", flush=True)
    failed = sum(code != 0 for _, code, _ in rows)
    print(f"   {len(rows) - failed} of {len(rows)} passed", flush=True)
    return 1 if failed else 0


def run_campaign(name: str, *options: str) -> int:
    return run_python("-m", f"tests.campaigns.daemon_{name.replace('-', '_')}", *options)


def verdict(code: int) -> str:
    return "FAILED" if code else "passed"


# --- environments ---


def demo(options: list[str]) -> int:
    """In a small environment, unless the developer's is there."""
    venv = VENV if is_installed(VENV) else DEMO_VENV
    install(venv, DEMO_EXTRAS)
    return subprocess.run([str(python_in(venv)), "-m", "examples.demo", *options], check=False).returncode


def install(venv: Path, extras: str) -> None:
    """Make the environment, unless it is there and fits."""
    if is_installed(venv):
        return
    announce(f"installing into {venv.name}, once; this takes a while")
    make_venv(venv)
    pip = [str(python_in(venv)), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "-c", "constraints.txt", "-e", f".[{extras}]"], check=True)
    (venv / "installed").write_text(fingerprint())


def is_installed(venv: Path) -> bool:
    stamp = venv / "installed"
    return stamp.exists() and stamp.read_text() == fingerprint()


def fingerprint() -> str:
    parts = [sys.version.encode(), str(ROOT).encode()]
    parts += [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def make_venv(venv: Path) -> None:
    """Debian packages ensurepip separately. Without it, this Python's own pip installs one into the environment."""
    if importlib.util.find_spec("ensurepip") is not None:
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        return
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python_in(venv)), "install", "--quiet", "pip"]
    subprocess.run(pip, check=True)


def python_in(venv: Path) -> Path:
    return venv / ("Scripts" if os.name == "nt" else "bin") / "python"


# --- running ---


def run_steps(steps: list[Step], *, at_once: int = 1) -> int:
    """Runs the steps in order, so many at a time. After one has failed, no other begins."""
    failed = threading.Event()

    def run_unless_failed(step: Step) -> int:
        code = 0 if failed.is_set() else run_step(step)
        if code:
            failed.set()
        return code

    with concurrent.futures.ThreadPoolExecutor(at_once) as runners:
        return max(abs(code) for code in runners.map(run_unless_failed, steps))


def run_step(step: Step) -> int:
    """Its exit code."""
    announce(f"{step.name} ...")
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        shown = None if step.is_live else output
        code = subprocess.run(
            step.command, check=False, env=step.environment, stdout=shown, stderr=subprocess.STDOUT if shown else None
        ).returncode
        output.seek(0)
        ending = f"{verdict(code)} in {time.monotonic() - began:.1f} s"
        print(f"\n== {step.name}: {ending}\n{output.read()}", end="", flush=True)
    return code


def run_python(*words: str) -> int:
    return subprocess.run([str(python_in(VENV)), *words], check=False).returncode


def announce(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
