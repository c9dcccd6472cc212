"""How a fork server comes into being: as a fresh interpreter, or forked off its worker ahead of time.

A fresh interpreter can be started at any time, and has the tasks' modules to import first. One that is forked off has
them already, shares its memory with the worker, and is ready at once; but a process can be forked safely only while it
has one thread, and no connections of the application's. So it is forked when the application has just been imported,
and waits until it is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.spawn
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

from tasklib.clock import time
from tasklib.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MODULE = "tasklib.worker.fork_server"
_LOOK_SECONDS = 0.01
_PR_SET_PDEATHSIG = 1


class ServerProcess(Protocol):
    """What is used of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class Launched(NamedTuple):
    process: ServerProcess
    control: socket.socket
    is_shared: bool  # most of its memory is the worker's


def launch() -> Launched:
    """One that was forked ahead, if there is one; else a fresh interpreter."""
    global _ahead
    with _taking:
        launched, _ahead = _ahead, None
    if launched is not None and launched.process.poll() is None:
        return launched
    return _start_interpreter()


def _start_interpreter() -> Launched:
    control, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter, with arguments of our own
            [os.fsdecode(multiprocessing.spawn.get_executable()), "-m", _MODULE, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,  # what hits the worker's group leaves somebody to clear up
            env=os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
        )
    return Launched(process, control, is_shared=False)


# --- Ahead of time ---------------------------------------------------------------------------------------------------

_ahead: Launched | None = None
_taking = threading.Lock()


def is_forked_ahead() -> bool:
    return _ahead is not None


def can_fork(sockets_before: int) -> bool:
    """One thread, and no sockets but those that were there before the application was imported."""
    return hasattr(os, "fork") and _threads() == 1 and count_sockets() <= sockets_before


def fork_ahead(become_server: Callable[[], None]) -> None:
    """Off this process, which must have one thread. `become_server` is called there: it closes what is the worker's."""
    global _ahead  # noqa: PLW0603 - as above
    from tasklib.worker import fork_server  # noqa: PLC0415 - before the fork, so that it is shared; and it imports us

    control, theirs = socket.socketpair()
    worker = os.getpid()
    with theirs:
        try:
            pid = os.fork()
        except OSError as error:
            control.close()
            log.warning("fork_server.not_forked", error=str(error), consequence="an interpreter is started when needed")
            return
        if pid == 0:
            _be_the_server(fork_server.serve, theirs, worker, [control.close, become_server])
    with contextlib.suppress(OSError):  # both do it
        os.setpgid(pid, pid)
    _ahead = Launched(ForkedProcess(pid), control, is_shared=True)


def _be_the_server(
    serve: Callable[[socket.socket, int], None],
    control: socket.socket,
    worker: int,
    first: Iterable[Callable[[], None]],
) -> NoReturn:
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        if sys.platform == "linux":  # until it watches the worker by itself
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != worker:
            sys.exit(0)  # it died before it could be watched: no signal will come
        for each in first:
            each()
        serve(control, worker)
        code = 0
    except SystemExit:
        code = 0  # its worker is gone
    except BaseException:  # noqa: BLE001 - it must not go on as a second worker
        traceback.print_exc()
    finally:
        os._exit(code)


class ForkedProcess:
    """A child of this process, as `subprocess.Popen` would show it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        with self._reaping:
            if self._code is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # somebody else has reaped it: how it ended is lost
                    self._code = 0
                else:
                    self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(_MODULE, timeout or 0.0)
            time.sleep(_LOOK_SECONDS)
        return code

    def kill(self) -> None:
        """Not a stranger who got its number: unless it is reaped, nobody else has that."""
        if self.poll() is None:
            with self._reaping, contextlib.suppress(ProcessLookupError):
                if self._code is None:
                    os.kill(self.pid, signal.SIGKILL)


def count_sockets() -> int:
    """Without those that a process is started with."""
    count = 0
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            count += stat.S_ISSOCK(os.fstat(fd).st_mode)
    return count


def _threads() -> int:
    """Also those that Python does not know."""
    try:
        return len([*Path("/proc/self/task").iterdir()])
    except OSError:
        return threading.active_count()
