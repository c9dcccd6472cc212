"""Ends the copy of a worker that a task makes when it forks and returns in both processes.

The copy has everything that the worker has: its claimed tasks, its lease, its connections. It must use none of them, so
it ends where the task's function would return to the worker: at once, without the worker's exit handlers, and without
sending anything on a shared connection. It leaves its pid in shared memory, for the worker to log. A process that a
task forks, and that does not return, is the task's own business.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from uuid import UUID

from tasklib.log import log

if TYPE_CHECKING:
    from collections.abc import Callable

COPY = 114  # the exit code of a copy
_PID = 2  # the third word, after the two of an id

T = TypeVar("T")


class Copy(NamedTuple):
    """A forked process that has ended here, and the task that forked it."""

    pid: int
    task_id: UUID


class Original:
    """The process that made this object, as opposed to copies that a task has forked."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)  # shared with what is forked off
        self._words = memoryview(self._memory).cast("Q")

    def end_if_copy(self, task_id: UUID) -> None:
        """Call it wherever user code returns to ours."""
        if os.getpid() != self._pid:
            self._memory[:16] = task_id.bytes
            self._words[_PID] = os.getpid()
            os._exit(COPY)

    def take_copy(self) -> Copy | None:
        """The last copy, once."""
        pid = self._words[_PID]
        if not pid:
            return None
        self._words[_PID] = 0
        return Copy(pid, UUID(bytes=self._memory[:16]))


def tell_of_copy(copy: Copy) -> None:
    log.error(
        "task.forked", task_id=copy.task_id, pid=copy.pid,
        consequence="its function returned in the forked process, too, which was ended: a process that a task forks "
        "has to end itself, with os._exit()",
    )  # fmt: skip


def call_in_one_process(call: Callable[[], T]) -> T:
    """For user code that is not a task: a copy that returns from it ends here."""
    pid = os.getpid()
    try:
        return call()
    finally:
        if os.getpid() != pid:
            os._exit(COPY)
