"""The scoreboard: shared memory in which a worker shows its supervisor what it does.

Each worker gets a new one, before the fork. It outlives the worker, and after a death still shows which tasks executed.
The worker writes it through a WorkerObserver. The supervisor reads it at any time, and must never see a half-written
value. Three rules ensure that:

- A number is one aligned word, written in one store through a typed memoryview. (`struct.pack_into` first writes zeros,
  then byte by byte, and a reader on another processor sees that.)
- A longer value, which seldom changes, has two copies. The unused copy is written, then a version is increased that
  says which copy is valid.
- An entry's fields are written before its state is set, and its state is cleared before they change. Its write number
  is zero meanwhile. A reader accepts an entry that it has read twice with the same write number.

The rules also hold for a worker that dies, or is stopped, in the middle of a write.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from tasklib.runtime.observer import WorkerObserver

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tasklib.worker.execution import Execution

SPARE_ENTRIES = 4096  # for tasks that have ended, with an outcome that is not yet written
BACKENDS = 32
WORKER_ID_BYTES = 255

BOOTING, BOOTED, READY = 0, 1, 2  # booted: the application is imported; ready: registered, and claiming
SERVE, DRAIN, INTERRUPT = 0, 1, 2  # the supervisor's request; a signal only says: look
FREE, EXECUTING, DONE = 0, 1, 2  # an entry's state; done: its outcome is not yet committed

_WORD = 8  # bytes
_PHASE, _REQUEST, _CONNECTED, _COUNTED = 0, 1, 2, 3  # single bytes, all in the first word
_BEACON, _ENDED, _WAITING, _IDENTITY_VERSION = 1, 2, 3, 4  # words
_IDENTITY = struct.Struct(f"={BACKENDS}iH{WORKER_ID_BYTES}s")  # backends, then the name's length and its bytes
_IDENTITY_AT = (64, 512)  # one copy for even versions, one for odd ones
_HEADER_BYTES = 1024
_ENTRY = struct.Struct("=16sqddB7x")  # task id, token, started, must end by (negative: for a cancel), own process
_MUST_END_BY, _FILL = 4, 6  # words of an entry; the second comes after the fields
_ENTRY_BYTES = _ENTRY.size + _WORD
_TAKEN = re.compile(rb"[^\0]")
_MOST_TRIES = 10_000  # then a reader takes an entry for free: a task has overwritten the scoreboard


@dataclass(frozen=True, slots=True)
class ScoreboardEntry:
    """One task of the worker. Times are by the monotonic clock, which all processes of a host share."""

    task_id: UUID
    token: int
    started: float
    must_end_by: float  # inf: no limit
    is_cancelled: bool  # the limit was set by a cancel
    is_isolated: bool  # it has a process of its own, so the worker must not be killed for it


@dataclass(frozen=True, slots=True)
class ScoreboardView:
    worker_id: str  # "": not registered yet
    phase: int
    beacon: float  # monotonic: the last round of the claim loop
    is_connected: bool  # the claim loop has its connection
    ended: int  # tasks since its start
    waiting: int
    backends: tuple[int, ...]
    executing: tuple[ScoreboardEntry, ...]
    done: tuple[ScoreboardEntry, ...]
    is_counted: bool = False  # the done tasks that are written are in the counters too

    @property
    def is_ready(self) -> bool:
        return self.phase == READY


class Scoreboard:
    """Anonymous shared memory. `name` appears in /proc/PID/maps, by which the guardian finds our processes."""

    def __init__(self, entries: int, *, name: str = "tasklibd") -> None:
        self.entries = entries
        self._records = _HEADER_BYTES + (entries + _WORD - 1) // _WORD * _WORD
        self._memory = _shared(self._records + entries * _ENTRY_BYTES, name)
        self._counts = memoryview(self._memory).cast("Q")
        self._moments = memoryview(self._memory).cast("d")
        self._fills = 0
        self._worker_id = b""
        self._backends: list[int] = []

    def close(self) -> None:
        """Unmap it in this process only."""
        self._counts.release()
        self._moments.release()
        self._memory.close()

    # --- the supervisor's side ---

    def read(self) -> ScoreboardView:
        memory = self._memory
        entries = [self._read_entry(found.start()) for found in _TAKEN.finditer(self._states())]
        worker_id, backends = self._read_identity()
        return ScoreboardView(
            worker_id=worker_id,
            phase=memory[_PHASE],
            beacon=self._moments[_BEACON],
            is_connected=bool(memory[_CONNECTED]),
            ended=self._counts[_ENDED],
            waiting=self._counts[_WAITING],
            backends=backends,
            executing=tuple(entry for state, entry in entries if entry is not None and state == EXECUTING),
            done=tuple(entry for state, entry in entries if entry is not None and state == DONE),
            is_counted=bool(memory[_COUNTED]),
        )

    def request(self, request: int) -> None:
        self._memory[_REQUEST] = request

    # --- the worker's side ---

    def requested(self) -> int:
        return self._memory[_REQUEST]

    def set_phase(self, phase: int) -> None:
        self._memory[_PHASE] = phase

    def beat(self) -> None:
        self._moments[_BEACON] = time.monotonic()

    def observer(self) -> ScoreboardObserver:
        return ScoreboardObserver(self)

    def name(self, worker_id: str) -> None:
        self._worker_id = worker_id.encode()[:WORKER_ID_BYTES]
        self._write_identity()

    def count_ended(self, ended: int) -> None:
        self._counts[_ENDED] = ended

    def count_waiting(self, waiting: int) -> None:
        self._counts[_WAITING] = waiting

    def mark_counted(self, *, is_counted: bool) -> None:
        """Set when a batch is in the counters, and cleared when its entries are free."""
        self._memory[_COUNTED] = is_counted

    def show_backends(self, pids: Iterable[int], *, is_connected: bool) -> None:
        self._backends = [pid for pid in pids if pid > 0][:BACKENDS]
        self._write_identity()
        self._memory[_CONNECTED] = is_connected

    def fill(self, index: int, execution: Execution) -> None:
        task = execution.task
        start = self._records + index * _ENTRY_BYTES
        fill = start // _WORD + _FILL
        self._fills += 1
        self._counts[fill] = 0
        _ENTRY.pack_into(
            self._memory, start,
            task.id.bytes, task.fencing_token, execution.started, execution.must_end_by, execution.is_isolated,
        )  # fmt: skip
        self._counts[fill] = self._fills
        self._memory[_HEADER_BYTES + index] = EXECUTING

    def limit(self, index: int, must_end_by: float, *, is_cancelled: bool) -> None:
        """One store in place, so that the entry is valid all the time."""
        word = (self._records + index * _ENTRY_BYTES) // _WORD + _MUST_END_BY
        self._moments[word] = -must_end_by if is_cancelled else must_end_by

    def set_state(self, index: int, state: int) -> None:
        self._memory[_HEADER_BYTES + index] = state

    # --- inside ---

    def _states(self) -> bytes:
        return self._memory[_HEADER_BYTES : _HEADER_BYTES + self.entries]

    def _write_identity(self) -> None:
        version = self._counts[_IDENTITY_VERSION] + 1
        pids = [*self._backends, *[0] * (BACKENDS - len(self._backends))]
        _IDENTITY.pack_into(self._memory, _IDENTITY_AT[version % 2], *pids, len(self._worker_id), self._worker_id)
        self._counts[_IDENTITY_VERSION] = version

    def _read_identity(self) -> tuple[str, tuple[int, ...]]:
        """The worker id and the backends. While the version is the same, its copy is not written."""
        while True:
            version = self._counts[_IDENTITY_VERSION]
            start = _IDENTITY_AT[version % 2]
            copied = self._memory[start : start + _IDENTITY.size]
            if version == self._counts[_IDENTITY_VERSION]:
                *pids, length, name = _IDENTITY.unpack(copied)
                return name[:length].decode(errors="replace"), tuple(pid for pid in pids if pid > 0)

    def _read_entry(self, index: int) -> tuple[int, ScoreboardEntry | None]:
        """Read until two readings agree, because a live worker may be writing it."""
        seen = None
        for _ in range(_MOST_TRIES):
            state, record = self._memory[_HEADER_BYTES + index], self._record(index)
            if state == FREE:
                break
            is_written = any(record[-_WORD:])
            if is_written and (state, record) == seen:
                return state, _entry(record)
            seen = (state, record)
        return FREE, None

    def _record(self, index: int) -> bytes:
        start = self._records + index * _ENTRY_BYTES
        return self._memory[start : start + _ENTRY_BYTES]


def _entry(record: bytes) -> ScoreboardEntry:
    task_id, token, started, must_end_by, is_isolated = _ENTRY.unpack(record[: _ENTRY.size])
    is_cancelled = math.copysign(1.0, must_end_by) < 0
    return ScoreboardEntry(UUID(bytes=task_id), token, started, abs(must_end_by), is_cancelled, bool(is_isolated))


class ScoreboardObserver(WorkerObserver):
    """Writes the scoreboard. Entries are taken from the low end, and given back when the outcome is committed."""

    def __init__(self, scoreboard: Scoreboard) -> None:
        self._scoreboard = scoreboard
        self._lock = threading.Lock()
        self._free = deque(range(scoreboard.entries))
        self._taken: dict[Execution, int] = {}
        self._done: dict[Execution, int] = {}  # taken entries whose function has ended, the oldest first
        self._ended = 0
        self._backends: dict[str, int] = {}
        self._is_ours = True
        os.register_at_fork(after_in_child=self._disown)

    def _disown(self) -> None:
        """A process that a task forks has a copy of this observer, and must not write."""
        self._is_ours = False

    def named(self, worker_id: str) -> None:
        if self._is_ours:
            self._scoreboard.name(worker_id)

    def beat(self) -> None:
        if self._is_ours:
            self._scoreboard.beat()

    def counts(self, waiting: int, executing: int) -> None:  # noqa: ARG002 - the entries show it
        if self._is_ours:
            self._scoreboard.count_waiting(waiting)

    def began(self, execution: Execution) -> None:
        if not self._is_ours:
            return
        with self._lock:
            if not self._free:
                self._make_room()
            if self._free:
                index = self._taken[execution] = self._free.popleft()
                self._scoreboard.fill(index, execution)

    def ended(self, execution: Execution) -> None:
        if not self._is_ours:
            return
        with self._lock:
            index = self._taken.get(execution)
            if index is not None:
                self._scoreboard.set_state(index, DONE)
                self._done[execution] = index
                self._ended += 1
                self._scoreboard.count_ended(self._ended)

    def settled(self, executions: Iterable[Execution]) -> None:
        if not self._is_ours:
            return
        with self._lock:
            for each in executions:
                self._free_entry(each)
            self._scoreboard.mark_counted(is_counted=False)

    def must_end_by(self, execution: Execution, moment: float) -> None:
        if not self._is_ours:
            return
        with self._lock:
            index = self._taken.get(execution)
            if index is not None and execution not in self._done:
                is_cancelled = execution.task.cancel_asked_at is not None
                self._scoreboard.limit(index, moment, is_cancelled=is_cancelled)

    def connected(self, role: str, backend_pid: int) -> None:
        with self._lock:
            self._backends[role] = backend_pid
            self._show_backends()

    def disconnected(self, role: str) -> None:
        with self._lock:
            self._backends.pop(role, None)
            self._show_backends()

    def _show_backends(self) -> None:
        if self._is_ours:
            self._scoreboard.show_backends(self._backends.values(), is_connected="claim" in self._backends)

    def _free_entry(self, execution: Execution) -> None:
        index = self._taken.pop(execution, None)
        if index is not None:
            self._done.pop(execution, None)
            self._scoreboard.set_state(index, FREE)
            self._free.appendleft(index)

    def _make_room(self) -> None:
        """Free the oldest done entry. After a crash its task is treated like one in the buffer: it runs again,
        uncharged.
        """
        oldest = next(iter(self._done), None)
        if oldest is not None:
            self._free_entry(oldest)


def _shared(size: int, name: str) -> mmap.mmap:
    if not hasattr(os, "memfd_create"):
        return mmap.mmap(-1, size)
    fd = os.memfd_create(name)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)  # the memory lives as long as a process has mapped it
        os.ftruncate(fd, size)
        return mmap.mmap(fd, size)
