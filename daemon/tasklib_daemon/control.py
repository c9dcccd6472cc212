"""The control socket: an operator on the host asks a running daemon for its status, or to change something.

Each connection carries one request and one answer, each a line of JSON. Only root and the daemon's own user get an
answer: the mode of the file keeps others out, and the kernel names the user at the other end. The server is part of the
supervisor's loop, so nothing here waits. Imports only the standard library, so that the commands start quickly.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import socket
import stat
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasklib_daemon.exit_codes import Exit, ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

COMMANDS = ("status", "pause", "resume", "drain", "scale")
MOST_WORKERS = 1000
MAX_REQUEST_BYTES = 4096
MAX_CONNECTIONS = 32
CONNECTION_SECONDS = 5.0  # then it is closed in any case
BACKLOG = 16
FULL_PAUSE_SECONDS = 0.01  # before a client tries again, when the backlog is full
SHARED_DIRECTORIES = (Path("/run"), Path(tempfile.gettempdir()))  # beside $RUNTIME_DIRECTORY and $XDG_RUNTIME_DIR


class Request:
    """One request of an operator. It is answered once; a second answer is dropped."""

    def __init__(self, connection: _Connection, command: str, workers: int | None = None) -> None:
        self.command = command
        self.workers = workers  # of `scale`
        self._connection = connection

    def answer(self, reply: Mapping[str, Any]) -> None:
        """`{"ok": True, ...}`, or `{"ok": False, "error": "why not"}`. Never waits."""
        self._connection.answer(reply)


class ControlServer:
    """Poll `fileno()` for reading. When it is readable, and once a second, take `requests()`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = _bind(path)
        self._identity = _identity(path)
        self._owner = os.getpid()
        self._connections: list[_Connection] = []
        # Its descriptor is readable when any connection is, so the supervisor polls only this one.
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    def fileno(self) -> int:
        return int(self._selector.fileno())

    def requests(self) -> list[Request]:
        """The requests since the last call. Each must be answered."""
        for each in self._connections:
            each.write()
        self._remove_closed(time.monotonic())
        self._accept()
        return [request for each in self._connections if (request := each.read()) is not None]

    def _remove_closed(self, now: float) -> None:
        """Before others are accepted: connections that were answered, or whose time is over, do not count."""
        for each in self._connections:
            each.close_if_done(now)
        self._connections = [each for each in self._connections if not each.is_closed]

    def _accept(self) -> None:
        """Beyond the bound the oldest is closed, so that silent connections do not keep requests out."""
        try:
            while True:
                accepted, _ = self._socket.accept()
                if len(self._connections) >= MAX_CONNECTIONS:
                    self._connections.pop(0).close()
                self._connections.append(_Connection(accepted, self._selector))
        except BlockingIOError:
            self._watch_for_more()
        except OSError:  # no descriptor is free, and the waiting client would wake the loop again and again
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._socket)

    def _watch_for_more(self) -> None:
        if self._socket not in self._selector.get_map():
            self._selector.register(self._socket, selectors.EVENT_READ)

    def close(self) -> None:
        """In a child that inherited it, only the descriptors are closed. The selector comes first: it is shared with
        the parent, and nothing must be unregistered from it.
        """
        self._selector.close()
        for each in self._connections:
            each.close()
        self._connections = []
        self._socket.close()
        if os.getpid() == self._owner and _identity(self._path) == self._identity:  # not the file of a later daemon
            self._path.unlink(missing_ok=True)


class _Connection:
    """One request, one answer."""

    def __init__(self, accepted: socket.socket, selector: selectors.BaseSelector) -> None:
        accepted.setblocking(False)  # noqa: FBT003 - its only parameter
        self._socket = accepted
        self._selector = selector
        self._ends = time.monotonic() + CONNECTION_SECONDS
        self._received = b""
        self._unsent: bytes | None = None
        self._has_request = False
        self.is_closed = False
        selector.register(accepted, selectors.EVENT_READ)

    def read(self) -> Request | None:
        """The request, once its line is complete."""
        if self._has_request:
            return None
        try:
            received = self._socket.recv(MAX_REQUEST_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            received = b""
        self._received += received
        if b"\n" in self._received:
            return self._parse()
        if not received or len(self._received) >= MAX_REQUEST_BYTES:
            self.close()
        return None

    def _parse(self) -> Request | None:
        self._has_request = True
        self._selector.unregister(self._socket)
        try:
            return Request(self, *_parsed_request(self._received, _peer_uid(self._socket)))
        except Exit as refused:
            self.answer({"ok": False, "error": refused.message})
            return None

    def answer(self, reply: Mapping[str, Any]) -> None:
        if self._unsent is not None or self.is_closed:
            return
        self._unsent = json.dumps(reply, default=str).encode() + b"\n"
        self.write()
        if self._unsent and not self.is_closed:
            self._selector.register(self._socket, selectors.EVENT_WRITE)
        self.close_if_done(time.monotonic())

    def write(self) -> None:
        try:
            while self._unsent and not self.is_closed:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def close_if_done(self, now: float) -> None:
        if self._unsent == b"" or now > self._ends:
            self.close()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._socket)
            self._socket.close()


def _parsed_request(received: bytes, uid: int | None) -> tuple[str, int | None]:
    if uid is None or uid not in {0, os.geteuid()}:
        raise Exit(ExitCode.FAILED, "only root and the daemon's own user may use this socket")
    try:
        question = json.loads(received.partition(b"\n")[0])
        command, workers = question["command"], question.get("workers")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Exit(ExitCode.USAGE, 'this is no request: send one line such as {"command": "status"}') from None
    if command not in COMMANDS:
        raise Exit(ExitCode.USAGE, f"unknown command: there are {', '.join(COMMANDS)}")
    if command == "scale" and not (type(workers) is int and 1 <= workers <= MOST_WORKERS):
        raise Exit(ExitCode.USAGE, f"scale needs a number of workers, from 1 to {MOST_WORKERS}")
    return command, workers


# --- the socket's file ---


def _bind(path: Path) -> socket.socket:
    """The file of a dead daemon is replaced; that of a living one is an error."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.setblocking(False)  # noqa: FBT003 - its only parameter
        with _alone_in(path.parent):
            _remove_if_stale(path)
            before = os.umask(0o177)
            try:
                bound.bind(str(path))
            finally:
                os.umask(before)
            bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise Exit(ExitCode.CONFIG, f"control_socket {path}: {error.strerror or error}") from None
    except BaseException:
        bound.close()
        raise
    return bound


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Without this lock, two daemons that start at once could each take the other's new socket for a stale one."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_if_stale(path: Path) -> None:
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise Exit(ExitCode.CONFIG, f"control_socket {path} exists already, and is no socket: remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # noqa: FBT003 - its only parameter
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # its backlog is full, so it lives
    raise Exit(ExitCode.RUNNING_ALREADY, f"another daemon runs with the control socket {path}: see `tasklibd status`")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        about = path.lstat()
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _peer_uid(connected: socket.socket) -> int | None:
    """The user at the other end, from the kernel. None: unknown."""
    try:
        if sys.platform == "darwin":  # struct xucred: version, uid, ...
            return int(struct.unpack_from("2I", connected.getsockopt(0, socket.LOCAL_PEERCRED, 76))[1])
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[1])
    except (OSError, AttributeError):
        return None


# --- the client's side ---


def ask(path: Path, command: str, *, seconds: float = CONNECTION_SECONDS, workers: int | None = None) -> dict[str, Any]:
    """Return the daemon's answer. Raises Exit if there is none, or if the daemon refuses."""
    question = {"command": command} | ({} if workers is None else {"workers": workers})
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as conn:
            conn.settimeout(seconds)
            _connect(conn, path, time.monotonic() + seconds)
            conn.sendall(json.dumps(question).encode() + b"\n")
            with conn.makefile("rb") as lines:
                reply = json.loads(lines.readline() or b"null")
    except TimeoutError:
        raise Exit(ExitCode.NOT_RUNNING, f"the daemon at {path} did not answer within {seconds:g} s") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it broke off"
        raise Exit(ExitCode.NOT_RUNNING, f"no daemon answers at {path}: {why}") from None
    if not isinstance(reply, dict):
        raise Exit(ExitCode.NOT_RUNNING, f"no daemon answers at {path}: it broke off")
    if not reply.get("ok"):
        raise Exit(ExitCode.FAILED, str(reply.get("error", "the daemon refused")))
    return reply


def _connect(conn: socket.socket, path: Path, deadline: float) -> None:
    """When the backlog is full, the kernel refuses at once, whatever the timeout. So try again."""
    while True:
        try:
            conn.connect(str(path))
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError from None
            time.sleep(FULL_PAUSE_SECONDS)
        else:
            return


def find(environment: Mapping[str, str] = os.environ) -> Path:
    """The control socket of the only daemon on this host that this user may ask."""
    own = environment.get("XDG_RUNTIME_DIR")
    directories = [*([Path(own)] if own else []), *SHARED_DIRECTORIES]
    paths = (path for directory in directories for path in sorted(directory.glob("tasklibd*/control.sock")))
    found = [path for path in paths if _is_mine(path)]
    if environment.get("RUNTIME_DIRECTORY"):
        found.append(Path(environment["RUNTIME_DIRECTORY"].split(":")[0]) / "control.sock")
    living = [path for path in dict.fromkeys(found) if _answers(path)]
    if len(living) == 1:
        return living[0]
    if not living:
        raise Exit(ExitCode.NOT_RUNNING, "no daemon of yours runs here, or its socket is elsewhere: see --socket")
    raise Exit(ExitCode.USAGE, f"several daemons run here: name one with --socket, of {', '.join(map(str, living))}")


def _is_mine(path: Path) -> bool:
    """In a directory that all users may write to, any of them could have put the socket."""
    try:
        about, is_shared = path.parent.lstat(), bool(path.parent.parent.stat().st_mode & 0o002)
    except OSError:
        return False
    is_own = about.st_uid in {os.geteuid(), 0}
    return stat.S_ISDIR(about.st_mode) and (is_own or (os.geteuid() == 0 and not is_shared))


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
