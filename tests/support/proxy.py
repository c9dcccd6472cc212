"""A proxy before PostgreSQL's socket that cuts connections when told to: at the next answer, or at a statement.

It reads the protocol's messages, so it knows a COMMIT from a text with that word in it: a simple query (Q), or one that
was parsed (P), bound (B) and is executed (E).
"""

from __future__ import annotations

import collections
import contextlib
import re
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

# What becomes of a statement. "before": cut, and the server never hears it. "during": cut as soon as it is sent.
# "after": cut when the server has answered. "late": the client is cut off, and the server hears the statement only when
# `deliver` is called, if ever: what a network does that goes silent in the middle.
Fate = Literal["pass", "before", "during", "after", "late"]

_COMMIT = re.compile(r"\s*(commit|end)\b(?!\s+prepared)", re.IGNORECASE)
_ENCRYPTION_REQUESTS = (80877103, 80877104)  # TLS, GSSAPI: they come before the first message
_REFUSED = b"N"
_ENDS_OF_ANSWER = (b"C", b"E", b"Z")  # CommandComplete, ErrorResponse, ReadyForQuery


class CuttingProxy:
    """`with CuttingProxy(url, directory) as proxy:` connect to `proxy.url`; `proxy.cut()` loses the next answer.
    `decide` is asked what becomes of each statement; until it answers, the statement waits.
    """

    def __init__(self, url: str, directory: Path, decide: Callable[[Said], Fate] = lambda _: "pass") -> None:
        given = conninfo_to_dict(url)
        port = given.get("port") or 5432
        self.url = make_conninfo(url, host=str(directory), port=port)
        self.cuts = 0
        self.commits: collections.Counter[Fate] = collections.Counter()
        self.lost_answers: collections.Counter[str] = collections.Counter()
        self._decide = decide
        self._server = str(Path(str(given["host"])) / f".s.PGSQL.{port}")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / f".s.PGSQL.{port}"))
        self._cut_next = threading.Event()
        self._cut_commit: Fate | None = None
        self._delivery = threading.Event()
        self._links: set[_Link] = set()
        self._lock = threading.Lock()

    def cut(self) -> None:
        self._cut_next.set()

    def cut_at_commit(self, when: Fate) -> None:
        """The next COMMIT, whoever sends it."""
        self._cut_commit = when

    def deliver(self) -> None:
        """The server hears what was held back as "late"."""
        self._delivery.set()

    def __enter__(self) -> Self:
        self._listener.listen(100)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _end(self._listener)
        for link in list(self._links):
            link.end()
        self._delivery.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._server)
            except OSError:  # it is down
                _end(client)
                _end(server)
                continue
            link = _Link(client, server)
            self._links.add(link)
            threading.Thread(target=self._carry, args=(self._to_server, link), daemon=True).start()
            threading.Thread(target=self._carry, args=(self._to_client, link), daemon=True).start()

    def _carry(self, direction: Callable[[_Link], None], link: _Link) -> None:
        with contextlib.suppress(OSError, EOFError):  # one side has ended it, or the other direction has
            direction(link)
        link.end()
        self._links.discard(link)

    def _to_server(self, link: _Link) -> None:
        messages = _Messages(link.client)
        while int.from_bytes((hello := messages.first())[4:8]) in _ENCRYPTION_REQUESTS:
            link.client.sendall(_REFUSED)
        link.server.sendall(hello)
        spotter = _Spotter()
        while True:
            kind, message = messages.next()
            sql = spotter.executed(kind, message)
            if sql is None:
                link.server.sendall(message)
            elif not self._execute(link, message, Said(sql, link.client_pid, is_in_transaction=link.is_in_transaction)):
                return

    def _execute(self, link: _Link, message: bytes, said: Said) -> bool:
        """False: the connection is to be cut."""
        fate = self._fate(said)
        if fate == "before":
            return False
        if fate == "late":
            _end(link.client)
            self._delivery.wait()
        link.loses_answer = fate == "after"
        link.server.sendall(message)
        return fate in {"pass", "after"}

    def _fate(self, said: Said) -> Fate:
        if said.is_commit and self._cut_commit is not None:
            fate, self._cut_commit = self._cut_commit, None
        else:
            fate = self._decide(said)
        with self._lock:
            self.commits[fate] += said.is_commit
            self.cuts += fate != "pass"
        return fate

    def _to_client(self, link: _Link) -> None:
        messages = _Messages(link.server)
        while True:
            kind, message = messages.next()
            if kind == b"Z":
                link.is_in_transaction = message[5:6] != b"I"
            if link.loses_answer:
                if kind in _ENDS_OF_ANSWER:
                    self._note_lost(kind, message)
                    return
            elif self._cut_next.is_set():
                self._cut_next.clear()
                self.cuts += 1
                return
            else:
                link.client.sendall(message)

    def _note_lost(self, kind: bytes, message: bytes) -> None:
        with self._lock:
            self.lost_answers[message[5:-1].decode() if kind == b"C" else "refused"] += 1


@dataclass(frozen=True, slots=True)
class Said:
    """A statement on its way to the server, and who sends it."""

    sql: str
    pid: int
    is_in_transaction: bool

    @property
    def is_commit(self) -> bool:
        return _COMMIT.match(self.sql) is not None


class _Link:
    """A client's connection, and ours to the server in its name."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.loses_answer = False
        self.is_in_transaction = False

    @property
    def client_pid(self) -> int:
        """As Linux knows it."""
        credentials = self.client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", credentials)[0]
        return pid

    def end(self) -> None:
        _end(self.client)
        _end(self.server)


class _Messages:
    """Cuts a stream into messages. A kind is one byte, a length four, and counts itself; the first has no kind."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._read = bytearray()

    def first(self) -> bytes:
        return self._take(0)

    def next(self) -> tuple[bytes, bytes]:
        message = self._take(1)
        return message[:1], message

    def _take(self, kind_size: int) -> bytes:
        head_size = kind_size + 4
        self._fill(head_size)
        size = kind_size + int.from_bytes(self._read[kind_size:head_size])
        self._fill(size)
        message = bytes(self._read[:size])
        del self._read[:size]
        return message

    def _fill(self, size: int) -> None:
        while len(self._read) < size:
            data = self._sock.recv(65536)
            if not data:
                raise EOFError
            self._read += data


class _Spotter:
    """Tells which of a client's messages make the server execute something, and what."""

    def __init__(self) -> None:
        self._statements: dict[bytes, bytes] = {}
        self._portals: dict[bytes, bytes] = {}

    def executed(self, kind: bytes, message: bytes) -> str | None:
        if kind not in (b"Q", b"P", b"B", b"E"):
            return None
        first, _, rest = message[5:].partition(b"\0")
        second = rest.partition(b"\0")[0]
        if kind == b"P":
            self._statements[first] = second
        elif kind == b"B":
            self._portals[first] = self._statements.get(second, b"")
        elif kind == b"E":
            return self._portals.get(first, b"").decode()
        return first.decode() if kind == b"Q" else None


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was never connected, or is gone already
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
