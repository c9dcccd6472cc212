"""The command `tasklibd`, run as an operator runs it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tasklib_daemon import control
from tasklib_daemon.control import ControlServer
from tasklib_daemon.exit_codes import ExitCode
from tests.support.working import wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import tasklib

SECRET = "S3CR3T-canary-43"
TASKS = """
import tasklib

@tasklib.task
def greet(name: str) -> str:
    return "hello " + name
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """With an application in it. Short enough for the address of a socket."""
    with tempfile.TemporaryDirectory(prefix="cli-") as made:
        (Path(made) / "shop_tasks.py").write_text(TASKS)
        yield Path(made)


def tasklibd(directory: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        [sys.executable, "-m", "tasklib_daemon", *words], cwd=directory, env=variables(directory, **environment),
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert SECRET not in ended.stdout + ended.stderr
    return ended


def variables(directory: Path, **environment: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name.startswith(("COV", "COVERAGE"))}
    url = f"postgresql://app:{SECRET}@192.0.2.1/nowhere"
    own = {"PATH": os.environ["PATH"], "HOME": str(directory), "XDG_RUNTIME_DIR": str(directory), "DATABASE_URL": url}
    return {**kept, **own, **environment}


def refused(ended: subprocess.CompletedProcess[str], code: ExitCode) -> str:
    """The one line that it said."""
    assert ended.returncode == code, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("tasklibd: ")
    return line.removeprefix("tasklibd: ")


def test_check_needs_no_database(directory: Path) -> None:
    """It reads the settings, imports the application, says what it found, and changes nothing."""
    ended = tasklibd(directory, "check", "--app", "shop_tasks", "--queues", "a,b", "--workers", "3")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "ok: 3 workers, 10 tasks each, queues a, b\ntasks: greet\n"
    assert {each.name for each in directory.iterdir()} <= {"shop_tasks.py", "__pycache__"}


def test_check_says_what_is_wrong_with_the_settings(directory: Path) -> None:
    """In one line, with the code for settings; wrong options have the usual code for usage."""
    file = directory / "tasklibd.toml"
    file.write_text("app = ['shop_tasks']\nworkerz = 3\n")
    said = refused(tasklibd(directory, "check", "--config", str(file)), ExitCode.CONFIG)
    assert said == f"unknown setting workerz ({file}): did you mean workers?"
    assert "app names no module" in refused(tasklibd(directory, "run"), ExitCode.CONFIG)
    assert tasklibd(directory, "check", "--workerz", "3").returncode == ExitCode.USAGE


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nothing_like_it", "cannot import broken: ModuleNotFoundError: No module named 'nothing_like_it'"),
        (f"raise OSError('{SECRET}')", "cannot import broken: OSError: ***"),
        ("import os; os.kill(os.getpid(), 11)", "the import of broken ended its process: killed by SIGSEGV"),
        ("import time; time.sleep(60)", "the import of broken takes longer than 1 s"),
        ("x = 1", "broken can be imported, but defines no tasks"),
    ],
)
def test_check_survives_a_broken_application(directory: Path, source: str, said: str) -> None:
    """In a process of its own: whatever it does is one clear line, with the code for imports."""
    (directory / "broken.py").write_text(source)
    ended = tasklibd(directory, "check", "--app", "broken", TASKLIB_BOOT_SECONDS="1" if "sleep" in source else "60")
    assert refused(ended, ExitCode.IMPORT).startswith(said)


def test_without_the_extra_it_says_what_to_install(directory: Path) -> None:
    """The library alone has no command line."""
    source = "import sys; sys.modules['typer'] = None; from tasklib_daemon.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, cwd=directory)
    assert refused(ended, ExitCode.FAILED) == "the command line needs typer: pip install 'tasklib-pg[daemon]'"


@pytest.fixture
def asked(directory: Path) -> Iterator[list[tuple[str, int | None]]]:
    """A daemon, as far as its control socket goes; what it was asked."""
    (directory / "tasklibd-1").mkdir(mode=0o700)
    server = ControlServer(directory / "tasklibd-1" / "control.sock")
    found: list[tuple[str, int | None]] = []
    is_over = threading.Event()

    def loop() -> None:
        while not is_over.is_set():
            select.select([server], [], [], 0.05)
            for request in server.requests():
                found.append((request.command, request.workers))
                request.answer({"ok": True, "name": "host", "pid": 7, "state": "running", "workers": []})

    thread = threading.Thread(target=loop)
    thread.start()
    yield found
    is_over.set()
    thread.join()
    server.close()


def test_a_running_daemon_is_asked(directory: Path, asked: list[tuple[str, int | None]]) -> None:
    """Found by itself, or by its socket, or by the settings' file."""
    socket = str(directory / "tasklibd-1" / "control.sock")
    elsewhere = {"XDG_RUNTIME_DIR": "/proc"}
    file = directory / "tasklibd.toml"
    file.write_text(f"runtime_directory = '{directory}/tasklibd-1'")
    shown = tasklibd(directory, "status")
    assert (shown.returncode, shown.stdout.splitlines()[0]) == (0, "host (pid 7): running, healthy")
    status = json.loads(tasklibd(directory, "status", "--json", "--socket", socket, **elsewhere).stdout)
    assert status == {"name": "host", "pid": 7, "state": "running", "workers": []}
    assert tasklibd(directory, "pause", "--config", str(file), **elsewhere).stdout == "paused\n"
    assert tasklibd(directory, "resume", TASKLIB_CONTROL_SOCKET=socket, **elsewhere).stdout == "resumed\n"
    assert tasklibd(directory, "scale", "4").stdout == "scaling to 4\n"
    assert tasklibd(directory, "drain").stdout == "draining\n"
    assert tasklibd(directory, "scale", "0").returncode == ExitCode.USAGE
    assert [command for command, _ in asked] == ["status", "status", "pause", "resume", "scale", "drain"]
    assert asked[4] == ("scale", 4)


def test_nobody_to_ask(directory: Path) -> None:
    """Has a code of its own."""
    said = refused(tasklibd(directory, "status", "--socket", str(directory / "none")), ExitCode.NOT_RUNNING)
    assert said == f"no daemon answers at {directory}/none: No such file or directory"
    (directory / "bad.toml").write_text("x =")
    assert "see `tasklibd check`" in refused(tasklibd(directory, "pause", "-c", "bad.toml"), ExitCode.CONFIG)


def test_asking_is_quick(directory: Path, asked: list[tuple[str, int | None]]) -> None:
    """The commands that ask load neither the library nor a driver: 0.1 s instead of 0.5."""
    source = """
import atexit, sys
atexit.register(lambda: print(sorted({"tasklib", "psycopg", "structlog", "asyncio"} & sys.modules.keys())))
sys.argv = ["tasklibd", "status", "--json"]
from tasklib_daemon.cli import main
main()
"""
    command = [sys.executable, "-c", source]
    ended = subprocess.run(command, env=variables(directory), capture_output=True, text=True, check=True, cwd=directory)
    assert ended.stdout.splitlines()[-1] == "[]"


# --- a daemon, from its start to its end ---


class Daemon:
    """A real one, with what it logged."""

    def __init__(self, directory: Path, url: str, *words: str, **environment: str) -> None:
        self.directory = directory
        self.log = directory / "log"
        credentials = directory / "credentials"
        credentials.mkdir()
        (credentials / "database_url").write_text(url)
        command = [sys.executable, "-m", "tasklib_daemon", "run", "--log-file", str(self.log), *words]
        given = variables(directory, CREDENTIALS_DIRECTORY=str(credentials), **environment)
        self.popen = subprocess.Popen(command, cwd=directory, env=given)

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [event for event in map(json.loads, lines) if name is None or event["event"] == name]

    def ask(self, *words: str) -> str:
        ended = tasklibd(self.directory, *words)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def end(self) -> None:
        """Its guardian kills what it leaves behind."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGQUIT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(20)
        self.popen.kill()
        self.popen.wait()


@pytest.mark.slow
def test_a_daemon_from_start_to_end(directory: Path, database_url: str, client: tasklib.Client) -> None:
    """It runs tasks, logs one canonical line for each attempt, tells how it is, obeys, and ends with 0 when drained.
    The secret in its database's URL, given as a credential, is in no log, no argument and no answer.
    """
    join = "&" if "?" in database_url else "?"
    url = f"{database_url}{join}password={SECRET}" if "password" not in database_url else database_url
    words = ["--app", "shop_tasks", "--workers", "1", "--concurrency", "2", "--web-port", "0", "--queues", "default"]
    daemon = Daemon(directory, url, *words, TASKLIB_LOG_TASKS="all")
    try:
        wait_until(lambda: bool(daemon.events("web.listening")), "the web child", seconds=30)
        port = daemon.events("web.listening")[0]["port"]
        wait_until(lambda: _code(port, "/readyz") == 200, "the daemon to be ready", seconds=30)
        assert _code(port, "/livez") == 200
        task_id = client.submit_task("greet", name="world")
        assert wait_final(client, task_id).result == {"value": "hello world"}
        wait_until(lambda: bool(daemon.events("task.completed")), "the canonical line")
        (line,) = daemon.events("task.completed")
        expected = {"task": "greet", "task_id": str(task_id), "queue": "default", "attempt": 1, "outcome": "completed"}
        assert expected.items() <= line.items()
        assert {"seconds", "worker_id", "process", "process_id", "timestamp"} <= line.keys()
        status = json.loads(daemon.ask("status", "--json"))
        assert (status["state"], status["pid"], len(status["workers"])) == ("running", daemon.popen.pid, 1)
        assert re.search(r"worker 1 +ready", daemon.ask("status"))
        daemon.ask("pause")
        wait_until(lambda: _code(port, "/readyz") == 503, "readiness to end with the pause")
        waiting = client.submit_task("greet", name="later")
        daemon.ask("scale", "2")
        wait_until(lambda: _ready_workers(daemon) == 2, "the second worker", seconds=30)
        assert client.get_task(waiting).state == "pending"  # type: ignore[union-attr]
        daemon.ask("resume")
        assert wait_final(client, waiting).result == {"value": "hello later"}
        shown = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, check=True).stdout
        assert "tasklib_daemon run" in shown
        assert SECRET not in shown
        daemon.ask("drain")
        assert daemon.popen.wait(30) == 0
        assert SECRET not in daemon.log.read_text()
        assert {each.name for each in directory.iterdir()} <= {"shop_tasks.py", "__pycache__", "log", "credentials"}
    finally:
        daemon.end()


def _ready_workers(daemon: Daemon) -> int:
    workers = control.ask(next(daemon.directory.glob("tasklibd-*/control.sock")), "status")["workers"]
    return sum(worker["state"] == "ready" for worker in workers)


def _code(port: int, path: str) -> int | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None
