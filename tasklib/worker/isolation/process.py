"""The process of one execution, as its worker sees it: what it says, how it ends, and how it is stopped."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING

from tasklib.clock import time
from tasklib.outcomes import StopInterrupt, TaskInterrupt
from tasklib.worker.isolation import suspect_limits
from tasklib.worker.isolation.protocol import CHUNK_BYTES, LARGEST_MESSAGE_BYTES, STOPS, Message, read_messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasklib.worker.isolation.fork_server_link import ForkServerLink
    from tasklib.worker.isolation.suspect_limits import LimitCheck

STOP_SECONDS = 3.0  # between StopInterrupt and the kill: less than the worker itself waits
SERVER_SECONDS = 15.0  # a fork server that has not done its next step after this time is hung
FLOOD_PAUSE_SECONDS = 0.02  # for a process that sends faster than the worker reads

_STOP_BYTES = {kind: byte for byte, kind in STOPS.items()}


class IsolatedProcess:
    def __init__(self, server: ForkServerLink, patience_seconds: float) -> None:
        self._server = server
        self._patience_seconds = patience_seconds  # between an interrupt and the kill
        self._channel, theirs = socket.socketpair()
        self._reports, report = os.pipe()  # from the fork server
        self._unread_report = b""
        self._sending = threading.Lock()
        self._unsent: deque[bytes] = deque()
        self._has_begun = False
        self._is_interrupted = False
        self._has_ended = False
        self._server_deadline = time.monotonic() + SERVER_SECONDS  # of the fork server's next report
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.error: str | None = None
        self.limit_check: LimitCheck | None = None
        self.killed_because: str | None = None
        try:
            self._number = server.fork(theirs.fileno(), report)
        except BaseException:
            self._channel.close()
            os.close(self._reports)
            raise
        finally:
            theirs.close()
            os.close(report)

    def begin(self, request: bytes) -> None:
        with self._sending, contextlib.suppress(OSError):  # it has died, and the fork server reports that
            self._channel.sendall(len(request).to_bytes(8) + request)
            self._has_begun = True
        self._send_waiting()

    def send(self, byte: bytes) -> None:
        """After the request. Never waits: if the process does not read, the byte is lost."""
        self._unsent.append(byte)
        self._send_waiting()

    def interrupt(self, kind: type[TaskInterrupt], _occupant: object) -> None:
        """Tell it to stop, and have it killed if it does not. A timeout, a cancel and the worker's stop come here."""
        if self._is_interrupted:
            return
        self._is_interrupted = True
        self.send(_STOP_BYTES[kind])
        patience = min(self._patience_seconds, STOP_SECONDS) if kind is StopInterrupt else self._patience_seconds
        self.must_be_gone_in(patience + SERVER_SECONDS)
        self._stop(patience)

    def must_be_gone_in(self, seconds: float) -> None:
        """After that, the fork server is to blame."""
        self._server_deadline = min(self._server_deadline, time.monotonic() + seconds)

    def messages(self) -> Iterator[Message]:
        """What it sends, until it has ended."""
        unread = b""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._reports, select.POLLIN)
        while not self._has_ended:
            ready = {fd for fd, _ in poll.poll(suspect_limits.LOOK_SECONDS * 1000)}
            if self._reports in ready:
                self._read_reports()
            elif time.monotonic() > self._server_deadline:
                self._server_deadline = math.inf
                self._server.give_up()
            if self._channel.fileno() in ready:
                chunk = self._received()
                if chunk == b"":
                    poll.unregister(self._channel)  # closed, but the process may be alive
                *lines, unread = (unread + (chunk or b"")).split(b"\n")
                yield from read_messages(lines)
                self._slow_down(chunk or b"", unread)
            self._check_limits(is_silent=not ready)
        while len(unread) < LARGEST_MESSAGE_BYTES and (chunk := self._received()):
            unread += chunk
        yield from read_messages(unread.split(b"\n"))

    def kill_group(self) -> None:
        if self.pid is not None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if not self._has_ended:
            self._stop(0.0)
        with self._sending:
            self._channel.close()
        os.close(self._reports)

    def _send_waiting(self) -> None:
        """A thread that finds another one sending leaves its byte to that thread, which looks again afterwards."""
        while self._has_begun and self._unsent and self._sending.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError, IndexError):
                    self._channel.send(self._unsent.popleft(), socket.MSG_DONTWAIT)
            finally:
                self._sending.release()

    def _stop(self, kill_after: float, signum: int = signal.SIGTERM) -> None:
        with contextlib.suppress(OSError):  # the fork server has died, and its processes with it
            self._server.send({"stop": self._number, "kill_after": kill_after, "signal": signum})

    def _slow_down(self, chunk: bytes, unread: bytes) -> None:
        """A process that sends too much has to wait. It must not keep its worker busy."""
        if len(unread) > LARGEST_MESSAGE_BYTES:
            self._stop(0.0)
        elif len(chunk) == CHUNK_BYTES and b"\n" in chunk:
            time.sleep(FLOOD_PAUSE_SECONDS)

    def _check_limits(self, *, is_silent: bool) -> None:
        if self.limit_check is None or self.pid is None or self.exit_code is not None or self.killed_because:
            return
        if excess := self.limit_check.look(self.pid, is_silent=is_silent):
            self.killed_because = excess.reason
            self._stop(excess.kill_after_seconds, excess.signal)

    def _received(self) -> bytes | None:
        """None: nothing is there now."""
        try:
            return self._channel.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _read_reports(self) -> None:
        """The fork server closes the pipe after its last report, and by its own death."""
        data = os.read(self._reports, CHUNK_BYTES)
        self._has_ended = not data
        *lines, self._unread_report = (self._unread_report + data).split(b"\n")
        for message in read_messages(lines):
            if "pid" in message:
                self.pid = message["pid"]
                self._server_deadline = math.inf if not self._is_interrupted else self._server_deadline
            self.exit_code = message.get("exit_code", self.exit_code)
            self.error = message.get("error", self.error)
