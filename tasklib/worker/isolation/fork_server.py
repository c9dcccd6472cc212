"""The fork server: `python -m tasklib.worker.isolation.fork_server`, or `serve()` in a process that a worker has forked
off (see launching.py).

It imports the modules that define the isolated tasks. After that it only forks, waits, signals and reports. No user
code runs in it after the imports, and it has one thread, so that a fork copies nothing half done. When its worker is
gone, it kills the process groups of its processes and ends; on Linux, they also die with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import math
import os
import random
import select
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from pydantic_core import from_json

from tasklib import application
from tasklib.clock import time
from tasklib.config import Config
from tasklib.errors import TaskNotRegistered
from tasklib.registry import default_registry
from tasklib.worker.forks import call_in_one_process
from tasklib.worker.isolation.launching import count_sockets, set_parent_death_signal
from tasklib.worker.isolation.protocol import CHUNK_BYTES, NO_ANSWER, Message, import_place, line_of
from tasklib.worker.isolation.run import NOT_FOUND, Run

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


LOOK_SECONDS = 1.0  # between looks for the worker's death, where no descriptor tells of it
MOST_DESCRIPTORS = 16
FIRST_TO_DIE = "500"  # the kernel's out-of-memory score: before the worker


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    serve(control, os.getppid())


def serve(control: socket.socket, parent: int) -> None:
    """Until the worker is gone, or has shut the socket."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGTERM])  # a new process unblocks it when it can answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the worker handles it
    with contextlib.suppress(Exception):
        faulthandler.enable()  # a process that dies of SIGSEGV leaves its stack in the log
    setup = from_json(_read_line(control))
    try:
        answer = call_in_one_process(functools.partial(_prepare, setup))
    except BaseException as error:  # noqa: BLE001 - whatever a module raises, the worker reports it
        traceback.print_exc()
        control.sendall(line_of({"error": f"{type(error).__qualname__}: {error}"}))
        return
    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, every shared page
    try:
        control.sendall(line_of(answer))
    except OSError:
        return  # the worker has died
    ForkServer(control, parent, Config(**setup["config"]), _beginning(setup)).run()


def _read_line(sock: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        data = sock.recv(CHUNK_BYTES)
        if not data:
            sys.exit(0)  # the worker is gone
        line += data
    return line


def _prepare(setup: Message) -> Message:
    """Import what the tasks need, as the worker did. Returns what a fork will not survive."""
    sys.path[:] = setup["path"]
    os.environ.pop("PYTHONPATH", None)
    if setup["pythonpath"] is not None:
        os.environ["PYTHONPATH"] = setup["pythonpath"]
    _beginning(setup)()
    sockets = count_sockets()
    if setup["is_django"]:
        importlib.import_module("django").setup()
    for place in setup["places"]:
        import_place(place)
    if setup["is_initialised"] and not application.is_initialised():
        application.init(Config(**setup["config"]))
    for name in setup["names"]:
        if name not in default_registry:
            raise TaskNotRegistered(NOT_FOUND.format(name))
    own = {threading.main_thread()}
    return {
        "threads": [each.name for each in threading.enumerate() if each not in own],
        "sockets": count_sockets() - sockets,
    }


def _beginning(setup: Message) -> Callable[[], None]:
    """The function that the worker wants to be called first, here and in each process."""
    if setup["beginning"] is None:
        return lambda: None
    place, arguments = setup["beginning"]
    module, _, function = place.partition(":")
    return functools.partial(getattr(importlib.import_module(module), function), *arguments)


@dataclass(slots=True)
class Forked:
    """A process that this server has forked."""

    number: int
    pid: int
    reports: int  # the pipe on which its worker learns of it
    kill_at: float = math.inf

    def report(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # the worker is not interested any more
            os.write(self.reports, line_of(message))


class ForkServer:
    """Forks, signals, reaps. A process is signalled by its parent, before it is reaped, so its pid cannot have gone to
    another process.
    """

    def __init__(self, control: socket.socket, parent: int, config: Config, begin: Callable[[], None]) -> None:
        self._control = control
        self._begin = begin
        self._parent = parent
        self._config = config
        self._unread = b""
        self._received: list[int] = []
        self._forked: dict[int, Forked] = {}  # by pid
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        signal.signal(signal.SIGCHLD, _only_wake)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._pid = os.getpid()
        self._life = _pidfd(parent)
        if self._life is not None:
            set_parent_death_signal(0)  # from here on it sees the death itself, and kills the groups of its processes

    def run(self) -> None:
        while self._is_wanted():
            self._reap()
            self._kill_late()
        for each in self._forked.values():
            _kill_group(each.pid)

    def _is_wanted(self) -> bool:
        """Wait until something happens. False: the worker is gone."""
        watched = [self._control.fileno(), self._woken, *([] if self._life is None else [self._life])]
        ready, _, _ = select.select(watched, [], [], self._pause())
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
        if self._life in ready or os.getppid() != self._parent:
            return False
        return self._control.fileno() not in ready or self._read_requests()

    def _pause(self) -> float | None:
        until = min((each.kill_at for each in self._forked.values()), default=math.inf)
        pause = max(until - time.monotonic(), 0.0)
        longest = math.inf if self._life is not None else LOOK_SECONDS
        return None if math.isinf(min(pause, longest)) else min(pause, longest)

    def _read_requests(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, CHUNK_BYTES, MOST_DESCRIPTORS)
        except ConnectionError:
            return False
        for fd in fds:
            os.set_inheritable(fd, False)  # noqa: FBT003 - it takes no keyword
        self._received += fds
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            message = from_json(line)
            if "fork" in message:
                channel, reports, *self._received = self._received
                self._fork(message["fork"], channel, reports)
            else:
                self._stop(message["stop"], message["kill_after"], message["signal"])
        return bool(data)

    def _fork(self, number: int, channel: int, reports: int) -> None:
        forked = Forked(number, 0, reports)
        try:
            forked.pid = os.fork()
        except OSError as error:
            forked.report({"error": f"fork: {error}"})
            os.close(reports)
            os.close(channel)
            return
        if forked.pid == 0:
            self._run_and_exit(forked, channel)
        with contextlib.suppress(OSError):  # both processes do it, so that it leads its group before it can be killed
            os.setpgid(forked.pid, forked.pid)
        os.close(channel)
        self._forked[forked.pid] = forked
        forked.report({"pid": forked.pid})

    def _stop(self, number: int, kill_after: float, signum: int) -> None:
        for each in self._forked.values():
            if each.number == number:
                each.kill_at = min(each.kill_at, time.monotonic() + kill_after)
                os.kill(each.pid, signum)

    def _kill_late(self) -> None:
        for each in self._forked.values():
            if time.monotonic() >= each.kill_at:
                each.kill_at = math.inf
                _kill_group(each.pid)

    def _reap(self) -> None:
        while (dead := _reaped()) is not None:
            pid, status = dead
            ended = self._forked.pop(pid, None)
            if ended is not None:
                ended.report({"exit_code": os.waitstatus_to_exitcode(status)})
                os.close(ended.reports)

    def _run_and_exit(self, own: Forked, channel: int) -> NoReturn:
        """In the new process."""
        code = NO_ANSWER
        try:
            self._leave_server_behind(own)
            self._begin()
            Run(socket.socket(fileno=channel), self._config).run()
            code = 0
        except OSError:
            pass  # there is no way to tell
        except BaseException:  # noqa: BLE001 - it must not go on as a second server
            traceback.print_exc()
        finally:
            os._exit(code)

    def _leave_server_behind(self, own: Forked) -> None:
        """Descriptors, signals, random numbers."""
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != self._pid:  # the server died before the signal was set
            os._exit(NO_ANSWER)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._control.close()
        inherited = [self._woken, self._wake, own.reports, *(each.reports for each in self._forked.values())]
        for fd in (*inherited, *self._received, *([] if self._life is None else [self._life])):
            os.close(fd)
        random.seed()
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            numpy_random.seed()
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:  # noqa: PTH123 - a file of the kernel
            score.write(FIRST_TO_DIE)


def _only_wake(_signum: int, _frame: FrameType | None) -> None:
    """Python writes to the wake-up descriptor."""


def _pidfd(pid: int) -> int | None:
    """A descriptor that is readable when the process is gone. None: this system has no such descriptors."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _reaped() -> tuple[int, int] | None:
    """The pid and the status of a process that has died. Its group is killed first, while no other can have its pid."""
    with contextlib.suppress(ChildProcessError):
        if hasattr(os, "waitid"):  # not on macOS, before Python 3.13
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if dead is None:
                return None
            _kill_group(dead.si_pid)
            return os.waitpid(dead.si_pid, 0)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            _kill_group(pid)
            return pid, status
    return None


if __name__ == "__main__":
    main()
