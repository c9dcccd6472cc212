"""A proxy before PostgreSQL's socket that loses an answer and cuts the connection, when told to.

It knows as much of the protocol as it takes to see a COMMIT: psycopg sends one as a simple query (Q) or in an extended
one (P, Parse).
"""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo

if TYPE_CHECKING:
    from types import TracebackType


_COMMIT = b"COMMIT"


class CuttingProxy:
    """`with CuttingProxy(url, directory) as proxy:` connect to `proxy.url`; `proxy.cut()` loses the next answer."""

    def __init__(self, url: str, directory: Path) -> None:
        given = conninfo_to_dict(url)
        port = given.get("port") or 5432
        self.url = make_conninfo(url, host=str(directory), port=port)
        self.cuts = 0
        self._server = str(Path(str(given["host"])) / f".s.PGSQL.{port}")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / f".s.PGSQL.{port}"))
        self._cut_next = threading.Event()
        self._cut_commit: str | None = None
        self._sockets: list[socket.socket] = []

    def cut(self) -> None:
        self._cut_next.set()

    def cut_at_commit(self, when: str) -> None:
        """Cut the connection that next says COMMIT: "before" the server hears it, or "after", when it has answered."""
        self._cut_commit = when

    def __enter__(self) -> Self:
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in [self._listener, *self._sockets]:
            self._end(each)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server)
            self._sockets += [client, server]
            loses_answer = threading.Event()
            threading.Thread(target=self._to_server, args=(client, server, loses_answer), daemon=True).start()
            threading.Thread(target=self._to_client, args=(server, client, loses_answer), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket, loses_answer: threading.Event) -> None:
        with contextlib.suppress(OSError):  # the other direction has ended this connection
            while data := client.recv(65536):
                if self._cut_commit is not None and _COMMIT in data:
                    when, self._cut_commit = self._cut_commit, None
                    self.cuts += 1
                    if when == "before":
                        break
                    loses_answer.set()
                server.sendall(data)
        self._end(client)
        self._end(server)

    def _to_client(self, server: socket.socket, client: socket.socket, loses_answer: threading.Event) -> None:
        with contextlib.suppress(OSError):  # as above
            while data := server.recv(65536):
                if loses_answer.is_set():
                    break
                if self._cut_next.is_set():
                    self._cut_next.clear()
                    self.cuts += 1
                    break
                client.sendall(data)
        self._end(server)
        self._end(client)

    @staticmethod
    def _end(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it was never connected, or is gone already
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
