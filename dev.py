#!/usr/bin/env python3
"""The developer's one command. Standard library only: it runs on a machine that has Python 3.11 and pip.

python3 dev.py test       lint, types, and the whole suite on PostgreSQL 18 (its own) and 15 (if installed)
python3 dev.py demo       a PostgreSQL of its own, a daemon, sample tasks, and what happens to each, live (--fast)
python3 dev.py pooler     the suite through PgBouncer in transaction mode, save what is about direct connections
python3 dev.py coverage   the suite on PostgreSQL 18, and the lines and branches that it leaves out
python3 dev.py lint       ruff, mypy, pyright, import contracts, spelling
python3 dev.py mutants    remove guards one by one; the named test must go red (--quick: a few of them)
python3 dev.py migrators  20 migrators at once, then 50 killed ones (--kills N): the long campaign
python3 dev.py exactly-once  tasks' own transactions, cut around COMMIT, under kills and freezes: the long campaign
python3 dev.py hostile-role  a role that may create in public attacks while others work: the long campaign
python3 dev.py soak       200 workers killed, 50 restarts of PostgreSQL, under load: the long campaign (--help)
python3 dev.py soak daemon SCENARIO  the daemon's campaigns: kills, suspects, supervisors, freeze, zoo, rolling, outage,
                          failover, connections, locks, poison, beacon, wide, idle, counters, scrapes, punctual
python3 dev.py bench      how fast it is, beside other queues and beside SQL by hand (--quick: a minute; --help)
python3 dev.py footprint  what a task takes on disk, and a daemon in memory and connections
python3 dev.py acceptance the acceptance tests, with the long ones that `test` leaves out: containers, all of the bench
python3 dev.py states     write the diagram in docs/states.md anew from tasklib/states.py
python3 dev.py metrics    write the table in docs/metrics.md anew from the daemon's metrics.py
python3 dev.py schema     write tasklib/sql/schema.sql anew from a migrated database
python3 dev.py dashboards write grafana/dashboards anew from the descriptions beside them
python3 dev.py manifests  write the manifests anew that are made from the files of grafana/
python3 dev.py setup      make .venv and install everything into it
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
DEMO_VENV = ROOT / ".venv-demo"
DEMO_EXTRAS = "binary,daemon,embedded"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / "python"
# Tests of one file share what is made for the file. Acceptance tests share nothing, unless they say so: they are long,
# and each goes to the process that is free.
IN_PARALLEL: list[str | Path] = [PYTHON, "-m", "pytest", "-n", "2", "--dist", "loadfile"]
ONE_BY_ONE: list[str | Path] = [PYTHON, "-m", "pytest", "-n", "2", "--dist", "loadgroup"]
POSTGRES_15 = Path("/usr/lib/postgresql/15/bin")
DAEMON_SCENARIOS = (
    "kills", "suspects", "supervisors", "freeze", "zoo", "rolling", "outage", "failover", "connections", "locks",
    "poison", "beacon", "wide", "idle", "counters", "scrapes", "punctual",
)  # fmt: skip
CODE = ["tasklib", "tasklib_pytest.py", "daemon", "grafana", "tests", "bench", "examples", "dev.py"]


def main(arguments: list[str]) -> int:
    command, *options = arguments or ["--help"]
    commands = {
        "setup": setup,
        "lint": lint,
        "test": test,
        "pooler": pooler,
        "coverage": coverage,
        "demo": demo,
        "mutants": lambda options: run_in_venv("tests/mutants.py", *options),
        "migrators": lambda options: run_in_venv("tests/campaigns/migrators.py", *options),
        "beside": beside,
        "exactly-once": lambda options: run_in_venv("tests/campaigns/exactly_once.py", *options),
        "hostile-role": lambda options: run_in_venv("tests/campaigns/hostile_role.py", *options),
        "soak": soak,
        "bench": lambda options: run_in_venv("-m", "bench", *options),
        "footprint": lambda options: run_in_venv("-m", "bench.footprint", *options),
        "acceptance": lambda options: run_in_venv("-m", "pytest", "tests/acceptance", *options),
        "states": lambda options: run_in_venv("-m", "tests.states_diagram", *options),
        "dashboards": lambda options: run_in_venv("-m", "grafana.build", *options),
        "manifests": lambda options: run_in_venv("-m", "tests.manifests", *options),
        "metrics": lambda options: run_in_venv("-m", "tests.metrics_table", *options),
        "schema": lambda options: run_in_venv("tests/snapshot.py", "--write", *options),
    }
    if command not in commands:
        print(__doc__)
        return 0 if command in {"-h", "--help", "help"} else 2
    os.chdir(ROOT)
    if command != "demo":  # which needs a tenth of it
        setup([])
    return commands[command](options)


def setup(_options: list[str]) -> int:
    """Make the environment, unless it is there and fits."""
    install(VENV, "dev")
    return 0


def demo(options: list[str]) -> int:
    """In an environment of its own, with little in it, unless the developer's is there."""
    venv = VENV if is_installed(VENV) else DEMO_VENV
    install(venv, DEMO_EXTRAS)
    return subprocess.run([str(python_in(venv)), "-m", "examples.demo", *options], check=False).returncode


def install(venv: Path, extras: str) -> None:
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
    """Debian splits ensurepip off; then this Python's own pip installs one into the environment."""
    if importlib.util.find_spec("ensurepip") is not None:
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        return
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python_in(venv)), "install", "--quiet", "pip"]
    subprocess.run(pip, check=True)


def python_in(venv: Path) -> Path:
    return venv / ("Scripts" if os.name == "nt" else "bin") / "python"


def lint(_options: list[str]) -> int:
    return run_together(
        ("ruff", [BIN / "ruff", "check", *CODE]),
        ("format", [BIN / "ruff", "format", "--check", *CODE]),
        ("mypy", [BIN / "mypy"]),
        ("pyright", [BIN / "basedpyright", "--level", "error"]),
        ("imports", [BIN / "lint-imports"]),
        (
            "spelling",
            [
                BIN / "codespell",
                "tasklib",
                "daemon",
                "grafana",
                "tests",
                "docs",
                "systemd",
                "kubernetes",
                "README.md",
                "CHANGELOG.md",
            ],
        ),
    )


def soak(options: list[str]) -> int:
    """Without a scenario of the daemon's: workers that run by themselves."""
    if options[:1] != ["daemon"]:
        return run_in_venv("tests/campaigns/soak.py", *options)
    if not options[1:] or options[1] not in DAEMON_SCENARIOS:
        print(f"soak daemon takes one of: {', '.join(DAEMON_SCENARIOS)}")
        return 2
    return run_in_venv("-m", f"tests.campaigns.daemon_{options[1]}", *options[2:])


def test(options: list[str]) -> int:
    if options:
        return run_in_venv("-m", "pytest", *options)
    failed = lint([])
    if failed:
        return failed
    with tempfile.TemporaryFile("w+") as said:
        other = subprocess.Popen([sys.executable, __file__, "beside"], stdout=said, stderr=subprocess.STDOUT)
        failed = test_on_18() or test_on_15()
        failed = other.wait() or failed
        said.seek(0)
        print(said.read(), flush=True)
    announce("failed" if failed else "all is well")
    return failed


def test_on_18() -> int:
    suite: list[str | Path] = [*IN_PARALLEL, "--durations=10", "--ignore=tests/acceptance"]
    return run_all(("suite on PostgreSQL 18", suite))


def coverage(options: list[str]) -> int:
    """Apart from the suite: it takes a third longer with it."""
    (ROOT / ".coverage").unlink(missing_ok=True)
    return run_all(
        ("suite on PostgreSQL 18", [PYTHON, "-m", "coverage", "run", "-m", "pytest", *options]),
        ("coverage", [PYTHON, "-m", "coverage", "combine", "--quiet"]),
        ("coverage", [PYTHON, "-m", "coverage", "report"]),
    )


def beside(_options: list[str]) -> int:
    """What runs at the same time as the rest of the suite: much of either is waiting."""
    acceptance: list[str | Path] = [*ONE_BY_ONE, "--durations=10", "-m", "not long", "tests/acceptance"]
    mutants: list[str | Path] = [PYTHON, "tests/mutants.py", "--quick"]
    return run_all(("acceptance on PostgreSQL 18", acceptance), ("mutants", mutants))


def test_on_15() -> int:
    if not (POSTGRES_15 / "postgres").exists():
        announce("SKIPPED: THE SUITE ON POSTGRESQL 15. apt-get install postgresql-15 to run it here.")
        return 0
    environment = os.environ | {"TASKLIB_PG_BIN": str(POSTGRES_15)}
    # The launcher's own tests try both versions already; frameworks, processes and users' functions are no matter of
    # versions.
    elsewhere = (
        "test_embedded.py", "test_pooler.py", "test_borrowed_*.py", "test_django*.py", "test_fastapi.py",
        "test_testing.py", "test_hostile_code.py", "test_cli.py", "test_exactly_once_races.py", "test_isolation.py",
        "test_witness.py", "test_daemon_cli.py", "test_daemon_control.py", "test_daemon_web.py", "test_daemon_bell.py",
        "test_daemon_sdnotify.py", "test_daemon_keeper.py", "test_doctor.py", "test_outages.py", "test_results.py",
        "test_current_task.py", "test_arguments_roundtrip.py", "test_budget.py", "test_kubernetes_*.py",
        "test_worker.py", "test_exactly_once.py", "test_daemon_election.py", "test_client_outages.py",
        "test_scarce_connections.py", "test_sticky_sessions.py", "test_suspects.py", "test_forks.py",
        "test_launching.py", "test_database.py", "test_standstill.py", "test_daemon_counts.py", "test_daemon_gauges.py",
    )  # fmt: skip
    suite: list[str | Path] = [*IN_PARALLEL, "tests/integration"]
    suite += [f"--ignore-glob=tests/integration/{name}" for name in elsewhere]
    return run_all(("suite on PostgreSQL 15", suite), environment=environment)


def pooler(options: list[str]) -> int:
    """The launcher's own tests, and those of the package, know nothing of a pooler."""
    suite = ["tests/integration", "tests/acceptance", "--ignore=tests/integration/test_embedded.py"]
    suite += ["--ignore=tests/acceptance/test_packaging.py", "--ignore=tests/acceptance/test_soak.py"]
    environment = os.environ | {"TASKLIB_TEST_POOLER": "1"}
    return run_all(("suite through PgBouncer", [*IN_PARALLEL, *(options or suite)]), environment=environment)


def run_all(*steps: tuple[str, list[str | Path]], environment: dict[str, str] | None = None) -> int:
    for name, command in steps:
        announce(name)
        began = time.monotonic()
        code = subprocess.run([str(word) for word in command], check=False, env=environment).returncode
        if code:
            announce(f"{name} failed")
            return code
        print(f"   {time.monotonic() - began:.1f} s", flush=True)
    return 0


def run_together(*steps: tuple[str, list[str | Path]]) -> int:
    """All at the same time, since each uses one core. What each says is shown when it has ended, and all are heard."""
    began, failed = time.monotonic(), 0
    with contextlib.ExitStack() as files:
        running = []
        for name, command in steps:
            said = files.enter_context(tempfile.TemporaryFile("w+"))
            words = [str(word) for word in command]
            running.append((name, said, subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT)))
        for name, said, process in running:
            announce(name)
            code = process.wait()
            said.seek(0)
            print(said.read(), end="", flush=True)
            if code:
                announce(f"{name} failed")
            failed = failed or code
    print(f"   {time.monotonic() - began:.1f} s", flush=True)
    return failed


def run_in_venv(*words: str) -> int:
    return subprocess.run([str(PYTHON), *words], check=False).returncode


def announce(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
