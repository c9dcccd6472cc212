"""How the keeper, which alone listens for notifications, wakes the workers: each worker has a datagram socket in the
runtime directory, which only the daemon's user may enter.

A ring wakes one worker, in turn: if all looked for each new task, most would find nothing. A worker that is full passes
the ring on, at most once to each of the others. A cancel goes to all workers.

A ring is only a hint to look. If one is lost, the poll finds the task a little later. So nothing here waits, and
nothing is sent twice.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from tasklib.log import log

if TYPE_CHECKING:
    from pathlib import Path

SOCKET_PREFIX = "wake-"
LIST_AGAIN_SECONDS = 1.0  # two changes of a directory may have the same modification time
_RING = b"ring "
_CANCEL = b"cancel "
_END = b"end"
_MAX_BYTES = 64


class Wakeable(Protocol):
    """What a receiver calls in its worker."""

    def ring(self) -> object: ...

    def look_for_cancel(self, task_id: UUID, /) -> object: ...


class WakeSender:
    """Sends to the sockets in the directory. Used by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(0)  # a send that would block is dropped
        self._receivers: list[str] = []  # paths of sockets
        self._last_rung = ""
        self._listed_mtime: int | None = None
        self._list_at = 0.0

    def ring(self) -> None:
        """Wake the next worker in turn. The ring may be passed on until all others have had it."""
        receivers = self._find_receivers()
        self._last_rung = self._ring_one(after=self._last_rung, receivers=receivers, hops=len(receivers) - 1)

    def pass_on(self, own: str, hops: int) -> None:
        """Wake the worker after `own`."""
        self._ring_one(after=own, receivers=[each for each in self._find_receivers() if each != own], hops=hops)

    def cancel(self, task_id: UUID) -> None:
        message = _CANCEL + str(task_id).encode()
        for path in self._find_receivers():
            self._send(message, path)

    def close(self) -> None:
        self._socket.close()

    def _ring_one(self, *, after: str, receivers: list[str], hops: int) -> str:
        """The path that took the ring. Sockets that refuse it are skipped."""
        message = _RING + str(max(hops, 0)).encode()
        for path in [*(each for each in receivers if each > after), *(each for each in receivers if each <= after)]:
            if self._send(message, path):
                return path
        return after

    def _send(self, message: bytes, path: str) -> bool:
        try:
            self._socket.sendto(message, path)
        except (ConnectionRefusedError, FileNotFoundError):
            self._forget(path)
        except OSError:  # its buffer is full of rings, so it will look anyway
            pass
        else:
            return True
        return False

    def _find_receivers(self) -> list[str]:
        try:
            changed = self._directory.stat().st_mtime_ns
            if changed != self._listed_mtime or time.monotonic() >= self._list_at:
                self._receivers = sorted(
                    str(each) for each in self._directory.iterdir() if each.name.startswith(SOCKET_PREFIX)
                )
                self._listed_mtime = changed
                self._list_at = time.monotonic() + LIST_AGAIN_SECONDS
        except OSError:
            self._receivers = []
        return self._receivers

    def _forget(self, path: str) -> None:
        """Its worker is dead, and no other worker uses this path."""
        self._receivers = [each for each in self._receivers if each != path]
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108 - paths are kept as text, as sockets take them


class WakeReceiver:
    """A thread in a worker that receives rings and cancels. If it cannot be started, the poll finds new tasks. The
    worker calls `pass_on` when it got a ring and is full.
    """

    def __init__(self, directory: Path, slot: int, worker: Wakeable) -> None:
        self._path = str(directory / f"{SOCKET_PREFIX}{slot}-{os.getpid()}")
        self._worker = worker
        self._directory = directory
        self._sender: WakeSender | None = None
        self._hops = 0  # how often the last ring may still be passed on
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._receive_all, name="tasklib-wake", daemon=True)

    def start(self) -> bool:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # noqa: PTH108 - as above; left by an earlier process with our pid
            made.bind(self._path)
        except OSError as error:  # no such directory, or its name is too long for a socket
            made.close()
            log.warning("wake.failed", error=str(error), consequence="new tasks are found by the poll alone")
            return False
        self._socket = made
        self._sender = WakeSender(self._directory)
        self._thread.start()
        return True

    def pass_on(self) -> None:
        with self._lock:
            hops, self._hops = self._hops, 0
            if hops > 0 and self._sender is not None:
                self._sender.pass_on(self._path, hops - 1)

    def stop(self) -> None:
        if self._socket is None:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.settimeout(1.0)
            own.sendto(_END, self._path)
        self._thread.join(1.0)
        with contextlib.suppress(OSError):
            os.unlink(self._path)  # noqa: PTH108 - as above
        self._socket.close()
        with self._lock:
            if self._sender is not None:
                self._sender.close()
            self._sender = None

    def _receive_all(self) -> None:
        """Several rings that have piled up count as one."""
        while True:
            messages = self._receive()
            if hops := [_number(message.removeprefix(_RING)) for message in messages if message.startswith(_RING)]:
                with self._lock:
                    self._hops = max(self._hops, *hops)
                self._worker.ring()
            for message in messages:
                if message.startswith(_CANCEL):
                    self._receive_cancel(message.removeprefix(_CANCEL))
            if _END in messages:
                return

    def _receive(self) -> set[bytes]:
        """Wait for a message, and take all that have come."""
        assert self._socket is not None  # noqa: S101 - started
        messages: set[bytes] = set()
        try:
            messages.add(self._socket.recv(_MAX_BYTES))
            while True:
                messages.add(self._socket.recv(_MAX_BYTES, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return messages
        except OSError:  # closed
            return {_END}

    def _receive_cancel(self, text: bytes) -> None:
        with contextlib.suppress(ValueError):  # not an id
            self._worker.look_for_cancel(UUID(text.decode(errors="replace")))


def _number(text: bytes) -> int:
    return int(text) if text.isdigit() else 0
