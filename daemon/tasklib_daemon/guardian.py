"""The guardian: the supervisor's first fork, and what is left of the daemon when the supervisor is killed.

It waits for the end of a pipe that only the supervisor holds open. Then it kills the process groups of all children,
and, on Linux, every process that bears the daemon's mark, until none is found: nobody survives the supervisor.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from typing import TYPE_CHECKING, NoReturn

from tasklib_daemon import kernel, signals

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_GROUPS = 4096
SWEEP_SECONDS = 4.0  # a fork bomb may need more than one look
PAUSE_SECONDS = 0.05
_PID_BYTES = 4


class Groups:
    """The process groups of the children, in memory that the guardian sees too. Only the supervisor writes, each pid by
    one store: a supervisor that dies in the middle must not leave the half of a pid to be killed.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, MOST_GROUPS * _PID_BYTES)
        self._pids = memoryview(self._memory).cast("i")
        self._places: dict[int, int] = {}

    def add(self, pid: int) -> None:
        place = next((each for each in range(MOST_GROUPS) if not self._pids[each]), None)
        if place is not None:
            self._places[pid] = place
            self._pids[place] = pid

    def remove(self, pid: int) -> None:
        place = self._places.pop(pid, None)
        if place is not None:
            self._pids[place] = 0

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
        self._held_end = -1

    def start(self, leave_behind: Callable[[], None]) -> None:
        """Also when the last one was killed. `leave_behind` closes, in the new process, what is the supervisor's."""
        self._let_go()
        waiting_end, self._held_end = os.pipe()
        with signals.held_back():
            self.pid = os.fork()
            if self.pid == 0:
                self._guard(waiting_end, leave_behind)
        os.close(waiting_end)

    def close(self) -> None:
        """For a child."""
        self._let_go()
        self.groups.close()

    def dismiss(self) -> None:
        """It has a last look, and ends."""
        self._let_go()
        if self.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def _guard(self, waiting_end: int, leave_behind: Callable[[], None]) -> NoReturn:
        """Signals stay held back: nothing but SIGKILL ends it early. It never returns into the supervisor's code."""
        try:
            self._let_go()
            leave_behind()
            os.setpgid(0, 0)
            kernel.name_process("tasklibd-guard")
            _leave_terminal()
            os.read(waiting_end, 1)
            sweep(self.groups.all(), self._mark)
        finally:
            os._exit(0)

    def _let_go(self) -> None:
        if self._held_end >= 0:
            os.close(self._held_end)
            self._held_end = -1


def sweep(groups: list[int], mark: str) -> None:
    """Twice in a row nobody must be found: one may have been between fork and its first line."""
    ends, quiet = time.monotonic() + SWEEP_SECONDS, 0
    while quiet < 2 and time.monotonic() < ends:  # noqa: PLR2004 - see above
        for group in groups:
            kill_group(group)
        quiet = 0 if kernel.kill_marked(mark.encode()) else quiet + 1
        time.sleep(PAUSE_SECONDS)


def kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _leave_terminal() -> None:
    """Who reads the daemon's output to its end must not wait for us."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
