"""A PostgreSQL of its own that can be made to fail in the ways in which servers and networks do."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tasklib import embedded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tasklib.embedded import EmbeddedPostgres

KINDS = ("stopped", "frozen", "unreachable", "refusing")
_CLIENTS = "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'tasklib%'"


class FailingServer:
    """`url` leads to it through a relay on loopback, as over a network; `dsn` past the relay. `outage(kind)` lasts for
    a `with` block, and begins when its block does.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._now: EmbeddedPostgres
        self._start()
        self._relay = self._stack.enter_context(Relay(self.dsn))
        self.url = make_conninfo(self.dsn, host="127.0.0.1", port=self._relay.port)

    @property
    def dsn(self) -> str:
        return self._now.dsn

    def close(self) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def outage(self, kind: str) -> Iterator[None]:
        begin: dict[str, Callable[[], Callable[[], None]]] = {
            "stopped": self._stop,
            "frozen": self._freeze,
            "unreachable": self._cut_off,
            "refusing": self._refuse,
        }
        end = begin[kind]()
        try:
            yield
        finally:
            end()

    def _start(self) -> None:
        self._now = self._stack.enter_context(embedded.postgres(self._directory / "data"))

    def _stop(self) -> Callable[[], None]:
        self._now.stop("immediate")
        return self._start

    def _freeze(self) -> Callable[[], None]:
        """The postmaster first: it could start others meanwhile."""
        with psycopg.connect(self.dsn) as conn:
            row = conn.execute("select pg_read_file('postmaster.pid')").fetchone()
        assert row is not None
        postmaster = int(row[0].split()[0])
        os.kill(postmaster, signal.SIGSTOP)
        frozen = [postmaster, *_children(postmaster)]
        _send(signal.SIGSTOP, frozen)
        return lambda: _send(signal.SIGCONT, frozen)

    def _cut_off(self) -> Callable[[], None]:
        self._relay.is_open.clear()
        return self._relay.is_open.set

    def _refuse(self) -> Callable[[], None]:
        """The server is up, and lets nobody in."""
        _execute(self._now.dsn_for("template1"), "alter database postgres allow_connections false", _CLIENTS)
        return lambda: _execute(self._now.dsn_for("template1"), "alter database postgres allow_connections true")


def _execute(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        for each in statements:
            conn.execute(each.encode())


def _send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # a session that had just ended
            os.kill(pid, number)


def _children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


class Relay:
    """Carries bytes between 127.0.0.1 and the server's socket while it `is_open`. While it is not, it takes no
    connection and carries nothing; nobody is told.
    """

    def __init__(self, dsn: str) -> None:
        given = conninfo_to_dict(dsn)
        self._server = str(Path(str(given["host"])) / f".s.PGSQL.{given.get('port') or 5432}")
        self.is_open = threading.Event()
        self.is_open.set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=50)
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):  # its other end has closed it
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self.is_open.set()

    def _accept(self) -> None:
        while True:
            self.is_open.wait()
            try:
                client, _ = self._listener.accept()
            except OSError:  # the block has ended
                return
            self.is_open.wait()
            server = socket.socket(socket.AF_UNIX)
            self._sockets += [client, server]
            try:
                server.connect(self._server)
            except OSError:  # it is down
                client.close()
                continue
            for one, other in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it was closed on either side
            while data := source.recv(65536):
                self.is_open.wait()
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
