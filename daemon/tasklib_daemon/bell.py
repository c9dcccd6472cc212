"""How the keeper, the daemon's one listener, wakes its siblings: a datagram socket for each worker, in a directory that
nobody else may enter.

A ring wakes one worker, in turn: if all of them looked for each task, most would look in vain. A worker that cannot
take all there may be passes the ring on, and it goes round once at most. Cancels are for everybody.

A ring is a hint to look, never the truth: one that is lost costs latency, and the poll does the work. So nothing here
waits for anybody, and nothing is sent twice.
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

NAMES = "wake-"
LOOK_AGAIN_SECONDS = 1.0  # a directory's clock is coarse: two changes may have one time
_RING = b"ring "
_CANCEL = b"cancel "
_END = b"end"
_LONGEST = 64


class Hears(Protocol):
    """What a worker does when it hears the bell."""

    def ring(self) -> object: ...

    def hear_cancel(self, task_id: UUID, /) -> object: ...


class Bell:
    """Rings at the sockets that are there. Used by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(0)  # a send that would wait is left out
        self._ears: list[str] = []
        self._last = ""
        self._seen: int | None = None
        self._look_at = 0.0

    def ring(self) -> None:
        """For the next in turn. It may be passed on until all others have been asked."""
        ears = self._find_ears()
        self._last = self._ring_one(after=self._last, ears=ears, hops=len(ears) - 1)

    def pass_on(self, own: str, hops: int) -> None:
        """For the one after this one."""
        self._ring_one(after=own, ears=[each for each in self._find_ears() if each != own], hops=hops)

    def cancel(self, task_id: UUID) -> None:
        message = _CANCEL + str(task_id).encode()
        for path in self._find_ears():
            self._send(message, path)

    def close(self) -> None:
        self._socket.close()

    def _ring_one(self, *, after: str, ears: list[str], hops: int) -> str:
        """Who was rung for. One that does not listen is left out."""
        message = _RING + str(max(hops, 0)).encode()
        for path in [*(each for each in ears if each > after), *(each for each in ears if each <= after)]:
            if self._send(message, path):
                return path
        return after

    def _send(self, message: bytes, path: str) -> bool:
        try:
            self._socket.sendto(message, path)
        except (ConnectionRefusedError, FileNotFoundError):
            self._forget(path)
        except OSError:  # it has not listened for a while, and will look when it does
            pass
        else:
            return True
        return False

    def _find_ears(self) -> list[str]:
        try:
            changed = self._directory.stat().st_mtime_ns
            if changed != self._seen or time.monotonic() >= self._look_at:
                self._ears = sorted(str(each) for each in self._directory.iterdir() if each.name.startswith(NAMES))
                self._seen = changed
                self._look_at = time.monotonic() + LOOK_AGAIN_SECONDS
        except OSError:
            self._ears = []
        return self._ears

    def _forget(self, path: str) -> None:
        """Its worker is dead: nobody else binds to this name."""
        self._ears = [each for each in self._ears if each != path]
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108 - paths are kept as text, as sockets take them


class Ear:
    """A thread in a worker that hears the bell. If it cannot be, the poll does the work. `pass_on` is for a worker that
    was rung for and has no room for more.
    """

    def __init__(self, directory: Path, slot: int, worker: Hears) -> None:
        self._path = str(directory / f"{NAMES}{slot}-{os.getpid()}")
        self._worker = worker
        self._directory = directory
        self._bell: Bell | None = None
        self._hops = 0  # how often the last ring may still be passed on
        self._passing = threading.Lock()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._listen, name="tasklib-ear", daemon=True)

    def start(self) -> bool:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # noqa: PTH108 - as above; left by a process that had our pid
            made.bind(self._path)
        except OSError as error:  # no such directory, or its name is too long for a socket
            made.close()
            log.warning("bell.unheard", error=str(error), consequence="new tasks are found by the poll alone")
            return False
        self._socket = made
        self._bell = Bell(self._directory)
        self._thread.start()
        return True

    def pass_on(self) -> None:
        with self._passing:
            hops, self._hops = self._hops, 0
            if hops > 0 and self._bell is not None:
                self._bell.pass_on(self._path, hops - 1)

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
        with self._passing:
            if self._bell is not None:
                self._bell.close()
            self._bell = None

    def _listen(self) -> None:
        """However many rings have piled up, they say one thing."""
        while True:
            messages = self._receive()
            if hops := [_number(message.removeprefix(_RING)) for message in messages if message.startswith(_RING)]:
                with self._passing:
                    self._hops = max(self._hops, *hops)
                self._worker.ring()
            for message in messages:
                if message.startswith(_CANCEL):
                    self._hear_cancel(message.removeprefix(_CANCEL))
            if _END in messages:
                return

    def _receive(self) -> set[bytes]:
        """What has come, and at least one."""
        assert self._socket is not None  # noqa: S101 - started
        messages: set[bytes] = set()
        try:
            messages.add(self._socket.recv(_LONGEST))
            while True:
                messages.add(self._socket.recv(_LONGEST, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return messages
        except OSError:  # closed
            return {_END}

    def _hear_cancel(self, text: bytes) -> None:
        with contextlib.suppress(ValueError):  # nonsense is nobody's id
            self._worker.hear_cancel(UUID(text.decode(errors="replace")))


def _number(text: bytes) -> int:
    return int(text) if text.isdigit() else 0
