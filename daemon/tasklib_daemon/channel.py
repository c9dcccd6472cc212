"""The channel between the supervisor and one child: JSON messages, one per line, over a pair of sockets.

The supervisor's end never blocks. It keeps what it cannot send yet, in order: the newest status of each kind, and all
other messages. The child's end blocks, and may be used from a thread.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from collections import deque
from typing import Any, Self

Message = dict[str, Any]

LONGEST_LINE = 16 * 1024 * 1024  # more cannot be a message: the application has got hold of the socket
_AT_A_TIME = 65536


class Channel:
    """One end. With `blocks`, for the child, it sends at once and waits in `receive`."""

    def __init__(self, end: socket.socket, *, blocks: bool = False) -> None:
        self._socket = end
        self._blocks = blocks
        self._lock = threading.Lock()
        self._waiting: deque[tuple[str | None, bytes]] = deque()  # a status has its kind
        self._begun = b""  # the rest of a line that is partly sent
        self._received = bytearray()
        self.is_closed = False
        end.setblocking(blocks)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """The supervisor's end, and the child's."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs, blocks=True)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self.is_closed = True
        self._socket.close()

    # --- sending ---

    def send(self, message: Message, *, is_status: bool = False) -> None:
        """A status replaces an unsent one of its kind. If the other end is closed, the message is dropped."""
        line = json.dumps(message, separators=(",", ":"), default=str).encode() + b"\n"
        with self._lock:
            if self.is_closed:
                return
            if self._blocks:
                self._send_now(line)
                return
            self._enqueue(str(message["say"]) if is_status else None, line)
        self.flush()

    @property
    def has_output(self) -> bool:
        """Then the poll should also wait until it can be written."""
        return not self.is_closed and bool(self._begun or self._waiting)

    def flush(self) -> None:
        """Send as much as is possible without waiting."""
        while self.has_output:
            if not self._begun:
                self._begun = self._waiting.popleft()[1]
            try:
                self._begun = self._begun[self._socket.send(self._begun) :]
            except BlockingIOError:
                return
            except OSError:
                self.is_closed = True

    def _enqueue(self, kind: str | None, line: bytes) -> None:
        if kind is not None:
            self._waiting = deque(each for each in self._waiting if each[0] != kind)
        self._waiting.append((kind, line))

    def _send_now(self, line: bytes) -> None:
        try:
            self._socket.sendall(line)
        except OSError:
            self.is_closed = True

    # --- receiving ---

    def receive(self, timeout_seconds: float | None = None) -> list[Message]:
        """The messages that have come. The child's end waits for one, at most `timeout_seconds`. If the other end is
        closed, `is_closed` is set.
        """
        if self._blocks and not self._is_readable(timeout_seconds):
            return []
        self._read()
        return self._messages()

    def _is_readable(self, timeout_seconds: float | None) -> bool:
        with contextlib.suppress(OSError, ValueError):
            ready, _, _ = select.select([self._socket], [], [], timeout_seconds)
            return bool(ready)
        self.is_closed = True
        return False

    def _read(self) -> None:
        try:
            while chunk := self._socket.recv(_AT_A_TIME, socket.MSG_DONTWAIT):
                self._received += chunk
                if len(self._received) > LONGEST_LINE:
                    break
            else:
                self.is_closed = True
        except BlockingIOError:
            return
        except OSError:
            self.is_closed = True

    def _messages(self) -> list[Message]:
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray() if len(rest) > LONGEST_LINE else rest
        return [message for line in lines if (message := _parsed(bytes(line))) is not None]


def _parsed(line: bytes) -> Message | None:
    """None: it is not a message. The application has got hold of the socket."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and isinstance(message.get("say"), str) else None
