"""The page: what a worker shows its supervisor, in memory that both see.

It is made anew for each spawn, before the fork, and it outlives the worker: after a death it still tells what was
executing. The worker writes it through a Witness; the supervisor reads it at any time, so no write may ever be seen
half done. Three rules see to that:

- A number is one aligned word, written by one store through a typed memoryview. (`struct.pack_into` fills its place
  with zeros first, then writes byte by byte: a reader on another processor sees that.)
- What is longer than a word, and seldom changes, is kept twice: the copy that nobody reads is written, then a version
  is counted up, which says which of the two holds.
- A slot's fields are written first, then its state; the state is cleared first. The number of the write that filled it
  is zero meanwhile. A reader takes what it has read twice under one number.

They hold for a worker that dies, or is stopped, in the middle of a write, too.
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

from tasklib.worker.witness import Witness

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tasklib.worker.execution import Execution

SPARE_SLOTS = 4096  # for what has ended and is not yet written
BACKENDS = 32
WORKER_ID_BYTES = 255

BOOTING, BOOTED, READY = 0, 1, 2  # booted: the application is imported; ready: registered, and claiming
SERVE, DRAIN, HURRY = 0, 1, 2  # what the supervisor asks for; a signal says only: look
FREE, EXECUTING, DONE = 0, 1, 2  # a slot's state; done, but its outcome is not yet committed

_WORD = 8  # bytes
_PHASE, _WISH, _CONNECTED, _COUNTED = 0, 1, 2, 3  # single bytes, all in the first word
_BEACON, _ENDED, _WAITING, _IDENTITY_VERSION = 1, 2, 3, 4  # words
_IDENTITY = struct.Struct(f"={BACKENDS}iH{WORKER_ID_BYTES}s")  # backends, then the name's length and its bytes
_IDENTITY_AT = (64, 512)  # one place for even versions, one for odd ones
_HEADER_BYTES = 1024
_SLOT = struct.Struct("=16sqddB7x")  # task id, token, started, must end by (negative: for a cancel), own process
_MUST_END_BY, _FILL = 4, 6  # words of a slot; the second comes after the fields
_SLOT_BYTES = _SLOT.size + _WORD
_TAKEN = re.compile(rb"[^\0]")
_MOST_TRIES = 10_000  # a reader's, before it takes a slot for free: a task has written over the page


@dataclass(frozen=True, slots=True)
class PageSlot:
    """One task in the worker's hands. Times are monotonic, which is one clock for all processes of a host."""

    task_id: UUID
    token: int
    started: float
    must_end_by: float  # inf: no limit
    is_cancelled: bool  # the limit is there because of a cancel
    is_isolated: bool  # it has a process of its own: to kill the worker would be to kill the wrong one


@dataclass(frozen=True, slots=True)
class PageView:
    worker_id: str  # "": it has no name yet
    phase: int
    beacon: float  # monotonic: the last round of the claim loop
    is_connected: bool  # the claim loop has its connection
    ended: int  # tasks since its birth
    waiting: int
    backends: tuple[int, ...]
    executing: tuple[PageSlot, ...]
    done: tuple[PageSlot, ...]
    is_counted: bool = False  # those of the done that are written already are in the ledger

    @property
    def is_ready(self) -> bool:
        return self.phase == READY


class Page:
    """Anonymous shared memory. `name` is what /proc tells about it: the guardian knows by it who belongs to us."""

    def __init__(self, slots: int, *, name: str = "tasklibd") -> None:
        self.slots = slots
        self._records = _HEADER_BYTES + (slots + _WORD - 1) // _WORD * _WORD
        self._memory = _shared(self._records + slots * _SLOT_BYTES, name)
        self._counts = memoryview(self._memory).cast("Q")
        self._moments = memoryview(self._memory).cast("d")
        self._fills = 0
        self._worker_id = b""
        self._backends: list[int] = []

    def close(self) -> None:
        """Unmaps it, here; who else has mapped it keeps it."""
        self._counts.release()
        self._moments.release()
        self._memory.close()

    # --- the supervisor's side ---

    def read(self) -> PageView:
        memory = self._memory
        slots = [self._read_slot(found.start()) for found in _TAKEN.finditer(self._states())]
        worker_id, backends = self._read_identity()
        return PageView(
            worker_id=worker_id,
            phase=memory[_PHASE],
            beacon=self._moments[_BEACON],
            is_connected=bool(memory[_CONNECTED]),
            ended=self._counts[_ENDED],
            waiting=self._counts[_WAITING],
            backends=backends,
            executing=tuple(slot for state, slot in slots if slot is not None and state == EXECUTING),
            done=tuple(slot for state, slot in slots if slot is not None and state == DONE),
            is_counted=bool(memory[_COUNTED]),
        )

    def ask(self, wish: int) -> None:
        self._memory[_WISH] = wish

    # --- the worker's side ---

    def asked(self) -> int:
        return self._memory[_WISH]

    def set_phase(self, phase: int) -> None:
        self._memory[_PHASE] = phase

    def beat(self) -> None:
        self._moments[_BEACON] = time.monotonic()

    def witness(self) -> PageWitness:
        return PageWitness(self)

    def name(self, worker_id: str) -> None:
        self._worker_id = worker_id.encode()[:WORKER_ID_BYTES]
        self._write_identity()

    def count_ended(self, ended: int) -> None:
        self._counts[_ENDED] = ended

    def count_waiting(self, waiting: int) -> None:
        self._counts[_WAITING] = waiting

    def mark_counted(self, *, is_counted: bool) -> None:
        """Set when a batch is in the ledger, cleared when its slots are free."""
        self._memory[_COUNTED] = is_counted

    def show_backends(self, pids: Iterable[int], *, is_connected: bool) -> None:
        self._backends = [pid for pid in pids if pid > 0][:BACKENDS]
        self._write_identity()
        self._memory[_CONNECTED] = is_connected

    def fill(self, index: int, execution: Execution) -> None:
        task = execution.task
        start = self._records + index * _SLOT_BYTES
        fill = start // _WORD + _FILL
        self._fills += 1
        self._counts[fill] = 0
        _SLOT.pack_into(
            self._memory, start,
            task.id.bytes, task.fencing_token, execution.started, execution.must_end_by, execution.is_isolated,
        )  # fmt: skip
        self._counts[fill] = self._fills
        self._memory[_HEADER_BYTES + index] = EXECUTING

    def limit(self, index: int, must_end_by: float, *, is_cancelled: bool) -> None:
        """In place, by one store: it goes on executing, whatever happens meanwhile."""
        word = (self._records + index * _SLOT_BYTES) // _WORD + _MUST_END_BY
        self._moments[word] = -must_end_by if is_cancelled else must_end_by

    def set_state(self, index: int, state: int) -> None:
        self._memory[_HEADER_BYTES + index] = state

    # --- inside ---

    def _states(self) -> bytes:
        return self._memory[_HEADER_BYTES : _HEADER_BYTES + self.slots]

    def _write_identity(self) -> None:
        version = self._counts[_IDENTITY_VERSION] + 1
        pids = [*self._backends, *[0] * (BACKENDS - len(self._backends))]
        _IDENTITY.pack_into(self._memory, _IDENTITY_AT[version % 2], *pids, len(self._worker_id), self._worker_id)
        self._counts[_IDENTITY_VERSION] = version

    def _read_identity(self) -> tuple[str, tuple[int, ...]]:
        """Its name and its backends. While the version stays, the copy that it points to is not written."""
        while True:
            version = self._counts[_IDENTITY_VERSION]
            start = _IDENTITY_AT[version % 2]
            copied = self._memory[start : start + _IDENTITY.size]
            if version == self._counts[_IDENTITY_VERSION]:
                *pids, length, name = _IDENTITY.unpack(copied)
                return name[:length].decode(errors="replace"), tuple(pid for pid in pids if pid > 0)

    def _read_slot(self, index: int) -> tuple[int, PageSlot | None]:
        """Read until it stands still: a live worker may be writing it."""
        seen = None
        for _ in range(_MOST_TRIES):
            state, record = self._memory[_HEADER_BYTES + index], self._record(index)
            if state == FREE:
                break
            is_written = any(record[-_WORD:])
            if is_written and (state, record) == seen:
                return state, _slot(record)
            seen = (state, record)
        return FREE, None

    def _record(self, index: int) -> bytes:
        start = self._records + index * _SLOT_BYTES
        return self._memory[start : start + _SLOT_BYTES]


def _slot(record: bytes) -> PageSlot:
    task_id, token, started, must_end_by, is_isolated = _SLOT.unpack(record[: _SLOT.size])
    is_cancelled = math.copysign(1.0, must_end_by) < 0
    return PageSlot(UUID(bytes=task_id), token, started, abs(must_end_by), is_cancelled, bool(is_isolated))


class PageWitness(Witness):
    """Writes the page. Slots are taken from the low end, and given back when the outcome is committed."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._lock = threading.Lock()
        self._free = deque(range(page.slots))
        self._taken: dict[Execution, int] = {}
        self._done: dict[Execution, int] = {}  # those of the taken whose function has ended, the oldest first
        self._ended = 0
        self._backends: dict[str, int] = {}
        self._is_ours = True
        os.register_at_fork(after_in_child=self._disown)

    def _disown(self) -> None:
        """A process that a task forks off goes on with a copy of us, and must write nothing."""
        self._is_ours = False

    def named(self, worker_id: str) -> None:
        if self._is_ours:
            self._page.name(worker_id)

    def beat(self) -> None:
        if self._is_ours:
            self._page.beat()

    def counts(self, waiting: int, executing: int) -> None:  # noqa: ARG002 - the slots tell it
        if self._is_ours:
            self._page.count_waiting(waiting)

    def began(self, execution: Execution) -> None:
        if not self._is_ours:
            return
        with self._lock:
            if not self._free:
                self._make_room()
            if self._free:
                index = self._taken[execution] = self._free.popleft()
                self._page.fill(index, execution)

    def ended(self, execution: Execution) -> None:
        if not self._is_ours:
            return
        with self._lock:
            index = self._taken.get(execution)
            if index is not None:
                self._page.set_state(index, DONE)
                self._done[execution] = index
                self._ended += 1
                self._page.count_ended(self._ended)

    def settled(self, executions: Iterable[Execution]) -> None:
        if not self._is_ours:
            return
        with self._lock:
            for each in executions:
                self._let_go(each)
            self._page.mark_counted(is_counted=False)

    def must_end_by(self, execution: Execution, moment: float) -> None:
        if not self._is_ours:
            return
        with self._lock:
            index = self._taken.get(execution)
            if index is not None and execution not in self._done:
                is_cancelled = execution.task.cancel_asked_at is not None
                self._page.limit(index, moment, is_cancelled=is_cancelled)

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
            self._page.show_backends(self._backends.values(), is_connected="claim" in self._backends)

    def _let_go(self, execution: Execution) -> None:
        index = self._taken.pop(execution, None)
        if index is not None:
            self._done.pop(execution, None)
            self._page.set_state(index, FREE)
            self._free.appendleft(index)

    def _make_room(self) -> None:
        """The oldest that has ended: after a crash it is like one in the buffer, runs again, and nobody is charged."""
        oldest = next(iter(self._done), None)
        if oldest is not None:
            self._let_go(oldest)


def _shared(size: int, name: str) -> mmap.mmap:
    if not hasattr(os, "memfd_create"):
        return mmap.mmap(-1, size)
    fd = os.memfd_create(name)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)  # the memory stays as long as somebody has mapped it
        os.ftruncate(fd, size)
        return mmap.mmap(fd, size)
