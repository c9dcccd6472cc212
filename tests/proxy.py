"""A proxy before PostgreSQL's socket that loses an answer and cuts the connection, when told to."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo

if TYPE_CHECKING:
    from types import TracebackType


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
        self._sockets: list[socket.socket] = []

    def cut(self) -> None:
        self._cut_next.set()

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
            threading.Thread(target=self._forward, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, True), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):  # the other direction has ended this connection
            while data := source.recv(65536):
                if is_answer and self._cut_next.is_set():
                    self._cut_next.clear()
                    self.cuts += 1
                    break
                target.sendall(data)
        self._end(source)
        self._end(target)

    @staticmethod
    def _end(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it was never connected, or is gone already
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
