"""The control socket: how an operator on the host asks a running daemon for its status, or to change.

One question per connection: a line of JSON there, a line of JSON back. Only root and the daemon's own user are
answered; the file's mode says so, and the kernel tells who is at the other end. The server is a part of the
supervisor's loop: nothing here ever waits. Imports nothing but the standard library: the commands are to be quick.
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

from tasklib_daemon.exits import Exit, ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

COMMANDS = ("status", "pause", "resume", "drain", "scale")
MOST_WORKERS = 1000
MAX_REQUEST_BYTES = 4096
MAX_CONNECTIONS = 32
CONNECTION_SECONDS = 5.0  # then it is closed, however far it is
BACKLOG = 16
FULL_PAUSE_SECONDS = 0.01  # before a client of a full one tries again
SHARED_PLACES = (Path("/run"), Path(tempfile.gettempdir()))  # beside $RUNTIME_DIRECTORY and $XDG_RUNTIME_DIR


class Request:
    """What somebody asks. It is answered once; a second answer is dropped."""

    def __init__(self, connection: _Connection, command: str, workers: int | None = None) -> None:
        self.command = command
        self.workers = workers  # of `scale`
        self._connection = connection

    def answer(self, reply: Mapping[str, Any]) -> None:
        """`{"ok": True, ...}`, or `{"ok": False, "error": "why not"}`. Never waits."""
        self._connection.answer(reply)


class ControlServer:
    """Watch `fileno()` for reading; when it is readable, and once a second, take `requests()`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = _bind(path)
        self._identity = _identity(path)
        self._owner = os.getpid()
        self._connections: list[_Connection] = []
        # Its descriptor is readable when one of those within is: the supervisor watches one for all connections.
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    def fileno(self) -> int:
        return int(self._selector.fileno())

    def requests(self) -> list[Request]:
        """What was asked since the last time. Each is to be answered."""
        for each in self._connections:
            each.write()
        self._let_go(time.monotonic())
        self._accept()
        return [request for each in self._connections if (request := each.read()) is not None]

    def _let_go(self, now: float) -> None:
        """Before others are accepted: one that was answered, or whose time is over, takes nobody's place."""
        for each in self._connections:
            each.close_if_done(now)
        self._connections = [each for each in self._connections if not each.is_closed]

    def _accept(self) -> None:
        """Beyond the bound the oldest goes: silent ones keep no question out."""
        try:
            while True:
                accepted, _ = self._socket.accept()
                if len(self._connections) >= MAX_CONNECTIONS:
                    self._connections.pop(0).close()
                self._connections.append(_Connection(accepted, self._selector))
        except BlockingIOError:
            self._watch_for_more()
        except OSError:  # no descriptor is free: to be woken for who waits would be to spin
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._socket)

    def _watch_for_more(self) -> None:
        if self._socket not in self._selector.get_map():
            self._selector.register(self._socket, selectors.EVENT_READ)

    def close(self) -> None:
        """In a child that inherited it, only the descriptors are closed; the selector first, which it shares with its
        parent: nothing must be taken out of that.
        """
        self._selector.close()
        for each in self._connections:
            each.close()
        self._connections = []
        self._socket.close()
        if os.getpid() == self._owner and _identity(self._path) == self._identity:  # not that of who came after us
            self._path.unlink(missing_ok=True)


class _Connection:
    """One question, one answer."""

    def __init__(self, accepted: socket.socket, selector: selectors.BaseSelector) -> None:
        accepted.setblocking(False)  # noqa: FBT003 - its only parameter
        self._socket = accepted
        self._selector = selector
        self._ends = time.monotonic() + CONNECTION_SECONDS
        self._received = b""
        self._unsent: bytes | None = None
        self._was_asked = False
        self.is_closed = False
        selector.register(accepted, selectors.EVENT_READ)

    def read(self) -> Request | None:
        """Once, when the line is whole."""
        if self._was_asked:
            return None
        try:
            received = self._socket.recv(MAX_REQUEST_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            received = b""
        self._received += received
        if b"\n" in self._received:
            return self._understand()
        if not received or len(self._received) >= MAX_REQUEST_BYTES:
            self.close()
        return None

    def _understand(self) -> Request | None:
        self._was_asked = True
        self._selector.unregister(self._socket)
        try:
            return Request(self, *_question(self._received, _peer_uid(self._socket)))
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


def _question(received: bytes, uid: int | None) -> tuple[str, int | None]:
    if uid is None or uid not in {0, os.geteuid()}:
        raise Exit(ExitCode.FAILED, "only root and the daemon's own user may ask it")
    try:
        question = json.loads(received.partition(b"\n")[0])
        command, workers = question["command"], question.get("workers")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Exit(ExitCode.USAGE, 'that is not a question: send one line such as {"command": "status"}') from None
    if command not in COMMANDS:
        raise Exit(ExitCode.USAGE, f"unknown command: there are {', '.join(COMMANDS)}")
    if command == "scale" and not (type(workers) is int and 1 <= workers <= MOST_WORKERS):
        raise Exit(ExitCode.USAGE, f"scale needs a number of workers, from 1 to {MOST_WORKERS}")
    return command, workers


# --- the socket's file ---


def _bind(path: Path) -> socket.socket:
    """The file of a daemon that is gone is replaced; that of one that lives is an error."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.setblocking(False)  # noqa: FBT003 - its only parameter
        with _alone_in(path.parent):
            _remove_if_stale(path)
            before = os.umask(0o177)
            try:
                made.bind(str(path))
            finally:
                os.umask(before)
            made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise Exit(ExitCode.CONFIG, f"control_socket {path}: {error.strerror or error}") from None
    except BaseException:
        made.close()
        raise
    return made


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Two daemons that start at once would each take the other's new socket for a stale one."""
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
        raise Exit(ExitCode.CONFIG, f"control_socket {path} is there already, and is no socket: remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # noqa: FBT003 - its only parameter
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # its backlog is full: it lives
    raise Exit(ExitCode.RUNNING_ALREADY, f"another daemon runs with the control socket {path}: see `tasklibd status`")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        about = path.lstat()
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _peer_uid(connected: socket.socket) -> int | None:
    """By the kernel's word. None: it does not tell."""
    try:
        if sys.platform == "darwin":  # struct xucred: version, uid, ...
            return int(struct.unpack_from("2I", connected.getsockopt(0, socket.LOCAL_PEERCRED, 76))[1])
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[1])
    except (OSError, AttributeError):
        return None


# --- the asking side ---


def ask(path: Path, command: str, *, seconds: float = CONNECTION_SECONDS, workers: int | None = None) -> dict[str, Any]:
    """The daemon's answer. Exit, if there is none or it says no."""
    question = {"command": command} | ({} if workers is None else {"workers": workers})
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as conn:
            conn.settimeout(seconds)
            _connect(conn, path, time.monotonic() + seconds)
            conn.sendall(json.dumps(question).encode() + b"\n")
            with conn.makefile("rb") as lines:
                reply = json.loads(lines.readline() or b"null")
    except TimeoutError:
        raise Exit(ExitCode.NOT_RUNNING, f"the daemon at {path} does not answer within {seconds:g} s") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it broke off"
        raise Exit(ExitCode.NOT_RUNNING, f"no daemon answers at {path}: {why}") from None
    if not isinstance(reply, dict):
        raise Exit(ExitCode.NOT_RUNNING, f"no daemon answers at {path}: it broke off")
    if not reply.get("ok"):
        raise Exit(ExitCode.FAILED, str(reply.get("error", "the daemon refused")))
    return reply


def _connect(conn: socket.socket, path: Path, deadline: float) -> None:
    """Where too many wait to be heard, the kernel says so at once, whatever the timeout."""
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
    """The control socket of this host's one daemon, where nobody says which: as far as we can see, and may ask."""
    own = environment.get("XDG_RUNTIME_DIR")
    places = [*([Path(own)] if own else []), *SHARED_PLACES]
    found = [path for place in places for path in sorted(place.glob("tasklibd*/control.sock")) if _is_mine(path)]
    if environment.get("RUNTIME_DIRECTORY"):
        found.append(Path(environment["RUNTIME_DIRECTORY"].split(":")[0]) / "control.sock")
    living = [path for path in dict.fromkeys(found) if _answers(path)]
    if len(living) == 1:
        return living[0]
    if not living:
        raise Exit(ExitCode.NOT_RUNNING, "no daemon of yours is running here, or its socket is elsewhere: see --socket")
    raise Exit(ExitCode.USAGE, f"several daemons run here: say --socket with one of {', '.join(map(str, living))}")


def _is_mine(path: Path) -> bool:
    """In a directory that all may write to, anybody could lay out a socket."""
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
