"""The control socket: who may ask, what is answered, and that nothing there makes the supervisor wait."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tasklib_daemon import control
from tasklib_daemon.control import ControlServer, ask, find
from tasklib_daemon.exit_codes import Exit, ExitCode
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ANSWER = {"ok": True, "name": "host", "workers": [{"slot": number, "text": "x" * 1000} for number in range(500)]}


@pytest.fixture
def path(open_directory: Path) -> Path:
    return open_directory / "control.sock"


@pytest.fixture
def server(path: Path) -> Iterator[ControlServer]:
    made = ControlServer(path)
    yield made
    made.close()
    assert not path.exists()


@contextlib.contextmanager
def served(server: ControlServer, every_seconds: float = 30.0) -> Iterator[list[Any]]:
    """A loop as the supervisor's: woken by the one descriptor, and by time. What it was asked."""
    asked: list[Any] = []
    is_over = threading.Event()

    def loop() -> None:
        while not is_over.is_set():
            select.select([server], [], [], every_seconds)
            for request in server.requests():
                asked.append((request.command, request.workers))
                request.answer(ANSWER if request.command == "status" else {"ok": True})
                request.answer({"ok": False, "error": "a second answer is dropped"})

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield asked
    finally:
        is_over.set()
        with socket.socket(socket.AF_UNIX) as waker:
            waker.connect(str(server._path))
        thread.join()


def raw(path: Path, sent: bytes) -> dict[str, Any] | None:
    """What is answered to these bytes, if anything."""
    with socket.socket(socket.AF_UNIX) as conn:
        conn.settimeout(10)
        conn.connect(str(path))
        with contextlib.suppress(BrokenPipeError):
            conn.sendall(sent)
        with contextlib.suppress(ConnectionResetError), conn.makefile("rb") as lines:
            line = lines.readline()
            return dict(json.loads(line)) if line else None
    return None


def test_questions_are_answered(server: ControlServer, path: Path) -> None:
    """Each command arrives with its argument; an answer larger than a socket's buffer arrives whole."""
    with served(server) as asked:
        assert ask(path, "status") == ANSWER
        assert ask(path, "scale", workers=3) == {"ok": True}
        for command in ("pause", "resume", "drain"):
            assert ask(path, command) == {"ok": True}
    assert asked == [("status", None), ("scale", 3), ("pause", None), ("resume", None), ("drain", None)]


def test_nonsense_is_refused_by_itself(server: ControlServer, path: Path) -> None:
    """It never reaches the supervisor, and says what would have been right."""
    with served(server) as asked:
        for sent in (b"hello\n", b"[]\n", b'{"command": ["x"]}\n', b"{}\n", b"\xff\xfe\n", b"[" * 4000 + b"\n"):
            answer = raw(path, sent)
            assert answer is not None, sent
            assert answer["ok"] is False
        for workers in (0, 1001, "3", True, None, 2.5):
            with pytest.raises(Exit, match="from 1 to 1000"):
                ask(path, "scale", workers=workers)  # type: ignore[arg-type]
        assert raw(path, b"x" * 10000) is None  # too long
        assert ask(path, "status")["ok"]
    assert asked == [("status", None)]


class Clock:
    """The server's clock, which a test can put forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    sleep = staticmethod(time.sleep)


def test_who_asks_nothing_keeps_nobody_waiting(
    server: ControlServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent, half and departed ones are let go after a while; others are answered meanwhile."""
    clock = Clock()
    monkeypatch.setattr(control, "time", clock)
    monkeypatch.setattr(control, "CONNECTION_SECONDS", 3600.0)
    with served(server, every_seconds=0.05), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(control.MAX_CONNECTIONS - 1)]
        for each in silent:
            each.connect(str(path))
            each.send(b'{"comm')
        assert ask(path, "status")["ok"]
        with socket.socket(socket.AF_UNIX) as gone:
            gone.connect(str(path))
            gone.send(b'{"command": "status"}\n')
        clock.ahead = 3601.0
        for each in silent:
            each.settimeout(10)
            assert each.recv(1) == b""  # let go
        assert ask(path, "status")["ok"]
        wait_until(lambda: not server._connections, "all connections to be let go")


def test_who_was_answered_takes_nobodys_place(server: ControlServer, path: Path) -> None:
    """One after the other is answered in the one place that silent ones leave, however soon the next one comes."""
    with contextlib.ExitStack() as stack:
        for _ in range(control.MAX_CONNECTIONS - 1):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
            assert server.requests() == []
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as asker:
                asker.connect(str(path))
                asker.sendall(b'{"command": "pause"}\n')
                (request,) = server.requests()
                request.answer({"ok": True})
                assert asker.recv(100) == b'{"ok": true}\n'


def test_silent_connections_keep_no_question_out(server: ControlServer, path: Path) -> None:
    """However many there are: the oldest makes room. A task can open them, and an operator has to get through."""
    with served(server), contextlib.ExitStack() as stack:
        for _ in range(2 * control.MAX_CONNECTIONS):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            control._connect(silent, path, time.monotonic() + 10)
        assert ask(path, "status")["ok"]


def test_a_full_house_is_not_a_spin(server: ControlServer, path: Path) -> None:
    """For one more than it takes the oldest is let go; the descriptor is not readable for nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(control.MAX_CONNECTIONS + 3):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
            assert server.requests() == []
        assert select.select([server], [], [], 0)[0] == []


def test_only_the_owner_may_use_the_file(server: ControlServer, path: Path) -> None:
    """0600, whatever the umask."""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_refused_by_the_kernel_s_word(server: ControlServer, path: Path) -> None:
    """Also where the file's mode would let him in."""
    path.chmod(0o666)
    source = """
import socket, sys
conn = socket.socket(socket.AF_UNIX)
conn.connect(sys.argv[1])
conn.sendall(b'{"command": "drain"}' + bytes([10]))
print(conn.makefile().readline())
"""
    command = ["python3", "-c", source, str(path)]
    with served(server) as asked:
        other = subprocess.run(command, user=65534, group=65534, capture_output=True, text=True, check=True, cwd="/")
    assert json.loads(other.stdout) == {"ok": False, "error": "only root and the daemon's own user may use this socket"}
    assert asked == []


HOLDER = """
import sys, time
from pathlib import Path
from tasklib_daemon.control import ControlServer
server = ControlServer(Path(sys.argv[1]))
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another daemon, as far as its socket goes."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_live_socket_is_refused_and_a_stale_one_replaced(holder: subprocess.Popen[str], path: Path) -> None:
    """Also of one that is stopped for the moment. After kill -9 the file stays, and must not be in the way."""
    for number in (signal.SIGCONT, signal.SIGSTOP):
        holder.send_signal(number)
        with pytest.raises(Exit, match="another daemon runs") as refused:
            ControlServer(path)
        assert refused.value.code == ExitCode.RUNNING_ALREADY
    holder.kill()
    holder.wait()
    assert path.exists()
    server = ControlServer(path)
    with served(server):
        assert ask(path, "status")["ok"]
    path.unlink()
    ControlServer(path).close()
    other = ControlServer(path)
    server.close()  # it must not take away the file of who came after it
    assert path.exists()
    other.close()
    assert not path.exists()


def test_a_path_that_cannot_be_one_is_a_clear_error(path: Path) -> None:
    """A file in the way is not removed; a directory that is missing is named."""
    path.write_text("precious")
    with pytest.raises(Exit, match="is no socket") as refused:
        ControlServer(path)
    assert (refused.value.code, path.read_text()) == (ExitCode.CONFIG, "precious")
    with pytest.raises(Exit, match="No such file or directory"):
        ControlServer(path.parent / "missing" / "control.sock")


def test_a_child_closes_what_it_inherited_and_no_more(server: ControlServer, path: Path) -> None:
    """The file belongs to who made it."""
    pid = os.fork()
    if pid == 0:
        server.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert path.exists()
    with served(server):
        assert ask(path, "status")["ok"]


def test_nobody_there_is_told(path: Path) -> None:
    """No file, a stale file, one that does not answer: each with a code that says that no daemon answers."""
    with pytest.raises(Exit, match="No such file") as missing:
        ask(path, "status")
    server = ControlServer(path)
    with pytest.raises(Exit, match="did not answer within") as silent:
        ask(path, "status", seconds=0.1)
    server._owner = 0  # as after kill -9: the file stays
    server.close()
    with pytest.raises(Exit, match="Connection refused") as stale:
        ask(path, "status")
    assert {each.value.code for each in (missing, silent, stale)} == {ExitCode.NOT_RUNNING}


def test_the_only_daemon_is_found(open_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being told where; of several, it says which there are; of others' in a shared place, it finds none."""
    monkeypatch.setattr(control, "SHARED_DIRECTORIES", ())  # where daemons of other tests may be
    environment = {"XDG_RUNTIME_DIR": str(open_directory)}
    with pytest.raises(Exit, match="no daemon of yours runs here") as none:
        find(environment)
    assert none.value.code == ExitCode.NOT_RUNNING
    (open_directory / "tasklibd-1").mkdir(mode=0o700)
    (open_directory / "tasklibd-2").mkdir(mode=0o700)
    one = ControlServer(open_directory / "tasklibd-1" / "control.sock")
    assert find(environment) == open_directory / "tasklibd-1" / "control.sock"
    two = ControlServer(open_directory / "tasklibd-2" / "control.sock")
    with pytest.raises(Exit, match=r"several daemons run here: .*tasklibd-1.*tasklibd-2"):
        find(environment)
    two.close()
    if os.geteuid() == 0:
        os.chown(open_directory / "tasklibd-1", 65534, -1)
        assert find(environment).parent.name == "tasklibd-1"
        open_directory.chmod(0o777)
        with pytest.raises(Exit, match="no daemon of yours"):
            find(environment)
    one.close()
    named = ControlServer(open_directory / "control.sock")
    assert find({"RUNTIME_DIRECTORY": f"{open_directory}:/other"}) == open_directory / "control.sock"
    named.close()
