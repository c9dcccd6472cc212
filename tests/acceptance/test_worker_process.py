"""Workers as processes of their own: the examples, real signals, `kill -9`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tasklib
from tests.support.working import wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.raw_sql import Conn, NewDatabase

ROOT = Path(__file__).resolve().parents[2]

APPLICATION = """
    import asyncio, os, pathlib, sys, time
    import tasklib
    from tasklib import TaskWorker

    config = tasklib.Config(os.environ["DATABASE_URL"], lease_seconds=float(sys.argv[3]))
    began = pathlib.Path(sys.argv[1])

    @tasklib.task
    def nap(seconds: float) -> str:
        with began.open("a") as file:
            file.write(f"{os.getpid()}\\n")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.01)
        return "slept"

    def main():
        worker = TaskWorker(config, concurrency=2, grace_seconds=20)
        print("ready", flush=True)
        if sys.argv[2] == "async":
            asyncio.run(worker.run())
        else:
            worker.run_sync()
        print("drained", flush=True)

    main()
"""


class Process:
    """A worker process, with what it printed."""

    def __init__(self, directory: Path, url: str, how: str = "sync", *, lease_seconds: float = 15.0) -> None:
        program = directory / "application.py"
        program.write_text(textwrap.dedent(APPLICATION))
        self.began = directory / "began"
        self.began.touch()
        command = [sys.executable, str(program), str(self.began), how, str(lease_seconds)]
        environment = os.environ | {"DATABASE_URL": url}
        self.popen = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == "ready\n"

    def has_begun(self, times: int = 1) -> bool:
        return len(self.began.read_text().splitlines()) >= times

    def end(self) -> tuple[int, str]:
        out, _ = self.popen.communicate(timeout=40)
        return self.popen.returncode, out


@pytest.fixture
def nap() -> None:
    tasklib.task(name="nap")(_nap)


def _nap(seconds: float) -> None: ...


@pytest.mark.usefixtures("nap")
@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(
    client: tasklib.Client, conn: Conn, database_url: str, tmp_path: Path, signum: int, how: str
) -> None:
    """A process that is the worker's own: what runs is finished, the rest given back, and it ends in good order."""
    ids = [client.submit_task("nap", seconds=0.5) for _ in range(2)]
    process = Process(tmp_path, database_url, how)
    wait_until(lambda: process.has_begun(2), "both to begin")
    process.popen.send_signal(signum)
    assert process.end() == (0, "drained\n")
    tasks = [client.get_task(each) for each in ids]
    assert [task and task.state for task in tasks] == ["completed", "completed"]
    assert conn.execute("select count(*) from tasklib.workers").fetchone() == (0,)


@pytest.mark.usefixtures("nap")
def test_a_second_signal_ends_the_grace(client: tasklib.Client, conn: Conn, database_url: str, tmp_path: Path) -> None:
    """What runs is interrupted and given back at no cost."""
    task_id = client.submit_task("nap", seconds=60)
    process = Process(tmp_path, database_url)
    wait_until(process.has_begun, "it to begin")
    process.popen.send_signal(signal.SIGTERM)
    stopping = "select stopping from tasklib.workers"
    wait_until(lambda: conn.execute(stopping).fetchone() == (True,), "the first signal to be heard")
    process.popen.send_signal(signal.SIGTERM)
    assert process.end()[0] == 0
    task = client.get_task(task_id)
    assert task is not None
    assert (task.state, task.ready, task.retry_count) == ("pending", True, 0)


@pytest.mark.usefixtures("nap")
def test_a_killed_worker_is_recovered(client: tasklib.Client, conn: Conn, database_url: str, tmp_path: Path) -> None:
    """`kill -9`: its lease runs out, and another worker runs its task again, alone, once."""
    task_id = client.submit_task("nap", seconds=0.3)
    first_directory, second_directory = tmp_path / "first", tmp_path / "second"
    first_directory.mkdir()
    second_directory.mkdir()
    first = Process(first_directory, database_url)
    wait_until(first.has_begun, "it to begin")
    wait_until(lambda: conn.execute("select state from tasklib.tasks").fetchone() == ("running",), "running")
    first.popen.kill()
    first.end()
    conn.execute("update tasklib.workers set lease_until = clock_timestamp()")
    second = Process(second_directory, database_url, lease_seconds=2)
    task = wait_final(client, task_id, seconds=30)
    second.popen.send_signal(signal.SIGTERM)
    assert second.end()[0] == 0
    assert (task.state, task.result) == ("completed", {"value": "slept"})
    attempts = conn.execute("select outcome, worker_pid from tasklib.task_attempts order by attempt").fetchall()
    assert attempts[0] == ("WORKER_FAILURE", first.popen.pid)
    # On a machine that stands still, the second one may lose its short lease, too, and run the task once more.
    assert [each for each in attempts if each[0] == "COMPLETED"] == [("COMPLETED", second.popen.pid)]
    assert attempts[-1][0] == "COMPLETED"


def test_the_examples_run(new_database: NewDatabase) -> None:
    """examples/worker.py serves what examples/simple.py submits, and ends at Ctrl-C."""
    environment = os.environ | {"DATABASE_URL": new_database()}
    worker = subprocess.Popen(
        [sys.executable, ROOT / "examples" / "worker.py"], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        simple = subprocess.run(
            [sys.executable, ROOT / "examples" / "simple.py"],
            env=environment, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    finally:
        worker.send_signal(signal.SIGINT)
        served, _ = worker.communicate(timeout=60)
    assert simple.returncode == 0, simple.stderr
    lines = simple.stdout.splitlines()
    assert lines[:2] == [
        "send_email: completed, {'value': True}, 1 attempt(s)",
        "add: completed, {'value': 5}, 1 attempt(s)",
    ]
    assert lines[2] == "flaky: completed, {'value': 'made it'}, 3 attempt(s)"
    assert served.startswith("serving: send_email, flaky, add\n")
    assert "to user@example.com: Hello" in served
    assert worker.returncode == 0
