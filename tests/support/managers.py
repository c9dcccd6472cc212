"""The socket of a service manager, as a service sees it."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Self

from tools.waiting import wait_until

if TYPE_CHECKING:
    from types import TracebackType


class NotifySocket:
    """`messages` has the lines of each datagram that has come so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = "\0" + name[1:] if name.startswith("@") else name
        self.messages: list[list[str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        self._socket.close()

    def environment(self, **variables: str) -> dict[str, str]:
        """Of a process that it starts."""
        return {"NOTIFY_SOCKET": self.name, **variables}

    def take(self) -> list[list[str]]:
        """Those that are new; they are in `messages` too."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self._socket.recv(65536).decode().split("\n"))
        self.messages += found
        return found

    def lines(self) -> list[str]:
        """All that came."""
        self.take()
        return [line for lines in self.messages for line in lines]

    def wait_for(self, word: str, *, times: int = 1, seconds: float = 20.0) -> str:
        """The last of so many lines that begin so; they may be there already."""

        def found() -> list[str]:
            return [line for line in self.lines() if line.startswith(word)]

        wait_until(lambda: len(found()) >= times, f"{word} in {self.messages[-10:]}", seconds=seconds)
        return found()[times - 1]

    def forget(self) -> None:
        """What came so far."""
        self.take()
        self.messages.clear()

    def is_silent(self, *, seconds: float) -> None:
        """That nothing comes can only be seen by waiting: longer than the longest pause of who still speaks."""
        with contextlib.suppress(TimeoutError):
            self._socket.settimeout(seconds)
            heard = self._socket.recv(65536)
            raise AssertionError(f"it said {heard!r}")
