"""The guardian: the supervisor's first fork, which kills all other processes when the supervisor has died.

It waits for the end of a pipe that only the supervisor holds open. Then it kills the process groups of all children
and, on Linux, every process that carries the daemon's mark, until it finds none.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from typing import TYPE_CHECKING, NoReturn

from tasklib_daemon import linux, signals

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_GROUPS = 4096
SWEEP_SECONDS = 4.0  # a fork bomb may need more than one sweep
PAUSE_SECONDS = 0.05
_PID_BYTES = 4


class Groups:
    """The process groups of the children, in memory shared with the guardian. Only the supervisor writes, each pid in
    one store: if it dies in between, no half-written pid may be killed.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, MOST_GROUPS * _PID_BYTES)
        self._pids = memoryview(self._memory).cast("i")
        self._indexes: dict[int, int] = {}

    def add(self, pid: int) -> None:
        index = next((each for each in range(MOST_GROUPS) if not self._pids[each]), None)
        if index is not None:
            self._indexes[pid] = index
            self._pids[index] = pid

    def remove(self, pid: int) -> None:
        index = self._indexes.pop(pid, None)
        if index is not None:
            self._pids[index] = 0

    def all(self) -> list[int]:
        return [pid for pid in self._pids if pid > 1]

    def close(self) -> None:
        self._pids.release()
        self._memory.close()


class Guardian:
    """The supervisor's side."""

    def __init__(self, mark: str) -> None:
        self.groups = Groups()
        self.pid = 0
        self._mark = mark
        self._write_end = -1

    def start(self, close_inherited: Callable[[], None]) -> None:
        """Also after the last one was killed. `close_inherited` closes the supervisor's files in the new process."""
        self._close_pipe()
        read_end, self._write_end = os.pipe()
        with signals.blocked():
            self.pid = os.fork()
            if self.pid == 0:
                self._guard(read_end, close_inherited)
        os.close(read_end)

    def close(self) -> None:
        """In a child."""
        self._close_pipe()
        self.groups.close()

    def dismiss(self) -> None:
        """It sweeps once more, and exits."""
        self._close_pipe()
        if self.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def _guard(self, read_end: int, close_inherited: Callable[[], None]) -> NoReturn:
        """Signals stay blocked, so only SIGKILL ends it early. It never returns into the supervisor's code."""
        try:
            self._close_pipe()
            close_inherited()
            os.setpgid(0, 0)
            linux.name_process("tasklibd-guard")
            _detach_terminal()
            os.read(read_end, 1)
            sweep(self.groups.all(), self._mark)
        finally:
            os._exit(0)

    def _close_pipe(self) -> None:
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1


def sweep(groups: list[int], mark: str) -> None:
    """Until two sweeps in a row find no process: one may have been between its fork and its first line."""
    ends, quiet = time.monotonic() + SWEEP_SECONDS, 0
    while quiet < 2 and time.monotonic() < ends:  # noqa: PLR2004 - see above
        for group in groups:
            kill_group(group)
        quiet = 0 if linux.kill_marked(mark.encode()) else quiet + 1
        time.sleep(PAUSE_SECONDS)


def kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _detach_terminal() -> None:
    """A program that reads the daemon's output to its end must not wait for the guardian."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
