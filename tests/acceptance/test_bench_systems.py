"""The drivers of the benchmark's systems: each does what the harness takes for granted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from bench import __main__ as command
from bench import systems
from bench.catalogue import WORKLOADS
from bench.harness import Process
from bench.systems import BARE, PEERS, TASKLIB, System
from tests.support.raw_sql import literal
from tools.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.raw_sql import NewDatabase

# The others are tried by hand, with their names in this variable: all of them take a minute to install.
CHOSEN = os.environ.get("TASKLIB_TEST_PEERS", "procrastinate pgqueuer").split()
DRIVERS = Path(systems.__file__).parent / "drivers"
TASKS = 50


@pytest.mark.slow
@pytest.mark.direct
@pytest.mark.parametrize(
    "system", [TASKLIB, *(peer for peer in PEERS if peer.name in CHOSEN)], ids=lambda system: str(system.name)
)
def test_every_task_is_run_once_and_none_before_its_time(system: System, new_database: NewDatabase) -> None:
    """Those that are due later stay, whatever their priority; what is left is seen from outside. Times are told by one
    clock: no task has begun before it was submitted.
    """
    commands, missing = systems.installed([system])
    if missing:
        pytest.skip(f"not installed here: {missing}")
    dsn = new_database()
    with ExitStack() as stack:
        submitter, worker = (stack.enter_context(Process(commands[system])) for _ in range(2))
        conn = stack.enter_context(psycopg.connect(dsn, autocommit=True))

        def is_left() -> bool:
            return conn.execute(literal(system.left)).fetchone() == (True,)

        submitter.ask("setup", dsn=dsn)
        submitter.ask("open", dsn=dsn)
        submitter.ask("bulk", count=TASKS + 1, delay_seconds=86400, priority=10)
        assert not is_left()

        submitted = time.monotonic()
        submitter.ask("bulk", count=TASKS)
        assert is_left()

        worker.ask("work", dsn=dsn, kind="async")
        wait_until(lambda: worker.begun == TASKS and not is_left(), "everything has been run")
        stopped = worker.ask("stop")
        assert sorted(map(int, stopped["began"])) == list(range(TASKS))
        assert stopped["repeated"] == 0
        assert all(submitted < began < time.monotonic() for began in stopped["began"].values())


def test_drivers_for_node_can_be_parsed() -> None:
    """They are run by hand: what they need takes too long to install. Any Node can tell that their syntax is right."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node here")
    scripts = sorted(DRIVERS.glob("*.mjs"))
    assert {system.script for system in PEERS if system.runtime == "node"} < set(scripts)
    for script in scripts:
        checked = subprocess.run([node, "--check", str(script)], check=False, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


def test_every_system_has_a_driver_and_pinned_packages() -> None:
    """A benchmark of whatever is newest today could not be repeated."""
    for system in [TASKLIB, BARE, *PEERS]:
        assert system.script.exists(), system.name
        assert all(("==" in each) != ("@" in each) for each in system.packages), system.name


def test_where_there_is_no_npm_what_needs_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others are measured all the same."""
    monkeypatch.setattr(systems, "ENVIRONMENTS", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    nowhere = System("nowhere", ("tasklib-pg-has-no-such-peer@0.0.0",), left="", mode="", runtime="node")

    commands, missing = systems.installed([nowhere, TASKLIB])

    assert commands == {TASKLIB: [sys.executable, str(TASKLIB.script)]}
    assert missing == {"nowhere": "there is no npm here"}


def test_an_earlier_commit_runs_its_own_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes part in the workloads that only tasklib takes part in. The same commit twice has two names."""
    monkeypatch.setattr(systems, "ENVIRONMENTS", tmp_path)
    before, control = command.versions_before(["HEAD", "HEAD"])

    assert before.name != control.name
    assert before.root == control.root == before.script.parents[2]
    assert (before.root / "tasklib" / "__init__.py").exists()
    assert all(workload.takes(before) == workload.takes(TASKLIB) for workload in WORKLOADS)
    with Process([*systems.environment(before)]) as process:
        assert process.ask("versions")
