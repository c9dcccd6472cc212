"""How a fork server is started: as a fresh interpreter, or forked off its worker ahead of time.

A fresh interpreter can be started at any time, but has to import the tasks' modules first. A forked one has them
already, shares its memory with the worker, and is ready at once; but a process can be forked safely only while it has
one thread and no connection of the application's. So the worker forks it right after it has imported the application,
and it waits until it is needed.
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
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from tasklib.clock import time
from tasklib.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MODULE = "tasklib.worker.isolation.fork_server"
_LOOK_SECONDS = 0.01
_PR_SET_PDEATHSIG = 1


class Launched(NamedTuple):
    process: subprocess.Popen[bytes] | ForkedProcess
    control: socket.socket
    is_shared: bool  # it shares most of its memory with the worker


def launch() -> Launched:
    """The one that was forked ahead, if it lives; else a fresh interpreter."""
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
            process_group=0,  # a signal to the worker's group must leave it alive, to clear up
            env=os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
        )
    return Launched(process, control, is_shared=False)


# --- Ahead of time ---------------------------------------------------------------------------------------------------

_ahead: Launched | None = None
_taking = threading.Lock()


def is_forked_ahead() -> bool:
    return _ahead is not None


def can_fork(sockets_before: int) -> bool:
    """One thread, and no sockets but those that were open before the application was imported."""
    return hasattr(os, "fork") and _threads() == 1 and count_sockets() <= sockets_before


def fork_ahead(become_server: Callable[[], None]) -> None:
    """Fork off this process, which must have one thread. There, `become_server` closes what belongs to the worker."""
    global _ahead  # noqa: PLW0603 - as above
    from tasklib.worker.isolation import fork_server  # noqa: PLC0415 - shared by the fork; and it imports us

    control, theirs = socket.socketpair()
    worker = os.getpid()
    with theirs:
        try:
            pid = os.fork()
        except OSError as error:
            control.close()
            log.warning(
                "fork_server.not_forked",
                error=str(error),
                consequence="a fresh interpreter will be started when needed",
            )
            return
        if pid == 0:
            _be_the_server(fork_server.serve, theirs, worker, [control.close, become_server])
    with contextlib.suppress(OSError):  # both processes do it
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
        set_parent_death_signal(signal.SIGKILL)  # until it watches the worker by itself
        if os.getppid() != worker:
            sys.exit(0)  # the worker died before the signal was set, so none will come
        for each in first:
            each()
        serve(control, worker)
        code = 0
    except SystemExit:
        code = 0  # the worker is gone
    except BaseException:  # noqa: BLE001 - it must not go on as a second worker
        traceback.print_exc()
    finally:
        os._exit(code)


def set_parent_death_signal(signum: int) -> None:
    """Linux sends it to this process when its parent dies. 0: none."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)


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
                except ChildProcessError:  # other code has reaped it: how it ended is lost
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
        """Not after it was reaped: another process may have its pid then."""
        if self.poll() is None:
            with self._reaping, contextlib.suppress(ProcessLookupError):
                if self._code is None:
                    os.kill(self.pid, signal.SIGKILL)


def count_sockets() -> int:
    """Not counting those that a process is started with."""
    count = 0
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            count += stat.S_ISSOCK(os.fstat(fd).st_mode)
    return count


def _threads() -> int:
    """Counting those that Python does not know."""
    try:
        return len([*Path("/proc/self/task").iterdir()])
    except OSError:
        return threading.active_count()
