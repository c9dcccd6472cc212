"""A daemon for the length of a `with` block. It is started as a program and watched by its log. At the end all of its
processes are gone, whatever happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasklib_daemon import control
from tools.waiting import START_SECONDS, WAIT_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parents[1]
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])  # of this tree, whichever is installed

TASKLIBD = ("-m", "tasklib_daemon", "run", "--config")  # as users start it

Line = dict[str, Any]


class Daemon:
    """A daemon that runs, or has run. `lines` reads its log."""

    def __init__(self, popen: subprocess.Popen[bytes], directory: Path) -> None:
        self.popen = popen
        self.directory = directory

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def settings_file(self) -> Path:
        return self.directory / "daemon.toml"

    def configure(self, **settings: Any) -> None:
        """Write its settings file, which it reads at its start and at SIGHUP."""
        self.settings_file.write_text(_toml(settings), "utf-8")

    def signal(self, signum: int) -> None:
        self.popen.send_signal(signum)

    def ask(self, command: str, **values: Any) -> dict[str, Any]:
        """Through its control socket."""
        return control.ask(self.directory / "run" / "control.sock", command, **values)

    def status(self) -> dict[str, Any]:
        return self.ask("status")

    def workers(self) -> list[dict[str, Any]]:
        """The ready ones, ordered by slot."""
        return [each for each in self.status()["workers"] if each["state"] == "ready"]

    def child(self, role: str) -> int:
        """The pid of the keeper, the web child, or the first worker."""
        found = self.workers()[0] if role == "worker" else self.status()[role]
        return int(found["pid"])

    def processes(self) -> list[int]:
        """All processes of its session: children and grandchildren that have no session of their own."""
        return [pid for pid in _pids() if _session(pid) == self.pid and pid != self.pid]

    def fork_servers(self) -> list[int]:
        """One for each worker: suspects and isolated tasks get their processes there."""
        return [pid for pid in self.processes() if _command(pid) == "tasklibd-forks"]

    # --- its log ---

    def output(self) -> str:
        """All of it, the oldest first, also if its log was rotated."""
        files = sorted(self.directory.glob("log*"), key=lambda file: file.name, reverse=True)
        return "".join(file.read_text("utf-8", "replace") for file in files)

    def tail(self) -> str:
        """For an error message."""
        return "\n".join(line[:1000] for line in self.output().splitlines()[-40:])

    def lines(self, event: str | None = None, **values: Any) -> list[Line]:
        """The lines with this event and these values."""
        wanted = values | ({} if event is None else {"event": event})
        return [line for line in self._parsed() if all(line.get(key) == value for key, value in wanted.items())]

    def wait_for(self, event: str, *, times: int = 1, seconds: float = WAIT_SECONDS, **values: Any) -> Line:
        """The last of so many lines; they may be there already."""
        try:
            wait_until(lambda: self._is_over() or len(self.lines(event, **values)) >= times, event, seconds=seconds)
            return self.lines(event, **values)[times - 1]
        except (AssertionError, IndexError):
            raise AssertionError(f"no {event} {values} in the log:\n{self.tail()}") from None

    def _is_over(self) -> bool:
        return self.popen.poll() is not None

    def _parsed(self) -> Iterator[Line]:
        for line in self.output().splitlines():
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found

    # --- its end ---

    def wait(self, seconds: float = WAIT_SECONDS) -> int:
        """Its exit code."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {seconds:g} s:\n{self.tail()}") from None

    def stop(self, seconds: float = WAIT_SECONDS) -> int:
        """As an operator would. Its exit code."""
        if self.popen.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait(seconds)


@contextlib.contextmanager
def daemon(
    dsn: str,
    *,
    environment: Mapping[str, str] | None = None,
    waits: bool = True,
    wrapper: tuple[str, ...] = (),
    program: tuple[str, ...] = TASKLIBD,
    **settings: Any,
) -> Iterator[Daemon]:
    """A daemon that serves tests/daemon_app; ready, unless it need not be waited for. Settings are those of its file,
    sections as dicts. `wrapper` is a command that starts it.
    """
    directory = Path(tempfile.mkdtemp(prefix="tasklibd-test-"))  # short: it holds sockets
    popen = None
    try:
        given = {
            "database_url": dsn, "app": ["tests.daemon_app.tasks"], "workers": 1, "concurrency": 2,
            "poll_interval_seconds": 0.2, "grace_seconds": 10.0, "runtime_directory": str(directory / "run"),
            "web": {"port": "none"}, "log": {"format": "json"},
        }  # fmt: skip
        (directory / "daemon.toml").write_text(_toml(given | settings), "utf-8")
        with (directory / "log").open("wb") as log:
            popen = subprocess.Popen(
                [*wrapper, sys.executable, *program, str(directory / "daemon.toml")],
                env={**os.environ, "PYTHONPATH": PYTHONPATH, **(environment or {})}, cwd=ROOT,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        made = Daemon(popen, directory)
        if waits:
            made.wait_for("daemon.ready", seconds=START_SECONDS)
        yield made
    finally:
        if popen is not None:
            _end(popen)
        shutil.rmtree(directory, ignore_errors=True)


def _end(popen: subprocess.Popen[bytes]) -> None:
    if popen.poll() is None:
        popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(3)
    ends = time.monotonic() + 10
    while left := [pid for pid in _pids() if _session(pid) == popen.pid and pid != popen.pid]:
        if popen.poll() is None:
            popen.kill()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < ends, f"processes that cannot be killed: {left}"
        time.sleep(0.01)
    popen.kill()
    popen.wait()


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    return _stat(pid)[:1] not in {(), ("Z",)}


def _pids() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _session(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[3]) if fields and fields[0] != "Z" else None


def _stat(pid: int) -> tuple[str, ...]:
    """From its state on."""
    try:
        return tuple(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split())
    except OSError:
        return ()


def _toml(values: Mapping[str, Any]) -> str:
    plain = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
    tables = [f"[{key}]\n{_toml(value)}" for key, value in values.items() if isinstance(value, dict)]
    return "\n".join([*plain, *tables, ""])
