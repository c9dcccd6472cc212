"""Preload: the application is imported once, before the fork, and its memory is shared. Threads are refused, because
the children would not have them, and so are connections, because all children would write to them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from tasklib_daemon import linux, logs
from tasklib_daemon.exit_codes import Exit, ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasklib_daemon.settings import Settings

POSTGRESQL_PORTS = frozenset({5432, 6432})  # PgBouncer's too
_SOCKET_FILE = ".s.PGSQL."


def import_app(settings: Settings) -> None:
    settings.import_app()
    logs.revive()
    _refuse_threads()
    _refuse_connections(settings)


def _refuse_threads() -> None:
    threads = max(linux.threads_of_this_process(), threading.active_count())
    if threads > 1:
        names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        told = f" ({', '.join(names)})" if names else ""
        raise Exit(
            ExitCode.IMPORT,
            f"preload: the application's import has left {threads - 1} thread(s) running{told}, which a fork would "
            "lose: start them in a start hook, or set preload = false",
        )


def _refuse_connections(settings: Settings) -> None:
    ports = _ports(settings)
    found = sorted({_where(each) for each in _connections() if _is_postgresql(each, ports)})
    if found:
        raise Exit(
            ExitCode.IMPORT,
            f"preload: the application's import has left a connection to PostgreSQL open ({', '.join(found)}), which "
            "children cannot share: connect later, or set preload = false",
        )


def _connections() -> Iterator[socket.socket]:
    """Duplicates, which can be closed."""
    for name in [*Path("/dev/fd").iterdir()] if Path("/dev/fd").exists() else []:
        with contextlib.suppress(OSError, ValueError):
            if stat.S_ISSOCK(os.fstat(int(name.name)).st_mode):
                with socket.socket(fileno=os.dup(int(name.name))) as copied:
                    copied.getpeername()
                    yield copied


def _is_postgresql(connected: socket.socket, ports: frozenset[int]) -> bool:
    peer = connected.getpeername()
    return _SOCKET_FILE in str(peer) or (isinstance(peer, tuple) and peer[1] in ports)


def _where(connected: socket.socket) -> str:
    peer = connected.getpeername()
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer)


def _ports(settings: Settings) -> frozenset[int]:
    from psycopg.conninfo import conninfo_to_dict  # noqa: PLC0415 - only needed for preload

    port = str(conninfo_to_dict(settings.config().database_url).get("port") or "")
    return POSTGRESQL_PORTS | {int(each) for each in port.split(",") if each.isdigit()}
