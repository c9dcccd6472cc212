"""One connection for one loop of a worker or keeper. It is opened when needed, and closed when it fails.

There is no pool: each loop has a connection of its own, so that no loop waits for another, and the connections of a
process can be counted.
"""

from __future__ import annotations

import contextlib
import math
import re
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from tasklib.clock import time
from tasklib.connection import WORKER_SETTINGS, BoundedConnection, meet, set_local, with_looks
from tasklib.connection_string import worker_connection_string
from tasklib.database_errors import is_connection_lost, is_passing_conflict, may_be_the_session
from tasklib.log import log
from tasklib.runtime.observer import WorkerObserver
from tasklib.sending import send_alone, send_as_transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from tasklib.config import Config
    from tasklib.statements import Statement

T = TypeVar("T")
RV = TypeVar("RV")
CONFLICT_TRIES = 5
REFUSED_SECONDS = 300.0

# 26000, 42P05: a pooler gave us another server connection, which has not prepared this statement, or has prepared
# another one under its name. 25006: the connection is read-only; a new one may be writable.
_LOST = frozenset({"26000", "42P05", "25006"})


class Session:
    """`run` sends one statement and reads its answer. It raises psycopg's errors, which the loops handle."""

    def __init__(
        self,
        config: Config,
        role: str,
        *,
        timeout_seconds: float | None = None,
        settings: str = "",
        observer: WorkerObserver | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._role = role
        self._observer = observer or WorkerObserver()
        self._on_wait = on_wait
        self._dsn = worker_connection_string(config, role)
        self._settings = WORKER_SETTINGS | dict(re.findall(r"-c (\w+)=(\S+)", settings))
        self._local_settings = {
            name: value for name, value in self._settings.items() if name != "default_transaction_isolation"
        }
        self._settings_for_once = set_local(self._local_settings)
        self._timeout_seconds = timeout_seconds or config.database_timeout_seconds
        self._conn: BoundedConnection | None = None
        self._connected_at = math.inf
        self._has_told_of_pooler = False
        self.has_own_address = role == "listen" and config.listen_database_url is not None
        self.connections = 0  # how often it has connected; the number tells a new connection from the last one
        self.answers = 0  # grows with each statement that is answered, and each connection

    def run(self, statement: Statement[T], lock_seconds: float | None = None) -> T:
        """`lock_seconds` is another lock_timeout, for this statement only."""
        conn = self.connection()
        for _ in range(CONFLICT_TRIES - 1):
            try:
                return self._send(conn, statement, lock_seconds)
            except psycopg.Error as error:
                if not is_passing_conflict(error):
                    raise
        return self._send(conn, statement, lock_seconds)

    def run_by_main_address(self, statement: Statement[T]) -> bool:
        """On another connection, used once. True: there is a pooler in between."""
        with contextlib.closing(Session(self._config, "check")) as other:
            other.run(statement)
            return other.is_pooled

    def connection(self) -> BoundedConnection:
        if self._conn is None or self._conn.closed:
            self._conn = self._connect()
            self._connected_at = time.monotonic()
            self.connections += 1
            self.answers += 1
        return self._conn

    @property
    def is_connected(self) -> bool:
        return self._conn is not None and not self._conn.closed

    @property
    def is_pooled(self) -> bool:
        return self.connection().is_pooled

    @property
    def age_seconds(self) -> float:
        """How long the present connection has lasted."""
        return time.monotonic() - self._connected_at if self._conn is not None and not self._conn.closed else 0.0

    def close(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()
            self._observer.disconnected(self._role)

    def _send(self, conn: BoundedConnection, statement: Statement[T], lock_seconds: float | None) -> T:
        """Behind a pooler, a server connection is ours for one transaction only. So are its settings, which are sent
        with each statement, all in one round trip.
        """
        conn.deadline = time.monotonic() + self._timeout_seconds
        try:
            if lock_seconds is not None:
                settings = set_local(self._local_settings | {"lock_timeout": f"{lock_seconds:g}s"})
                answer = send_as_transaction(conn, settings, statement)
            elif conn.is_pooled:
                answer = send_as_transaction(conn, self._settings_for_once, statement)
            else:
                answer = send_alone(conn, statement)
            self.answers += 1
            return answer  # noqa: TRY300 - an error of the count is none of the statement's
        except psycopg.Error as error:
            self._close_if_lost(conn, error)
            raise
        finally:
            conn.deadline = math.inf

    def _close_if_lost(self, conn: BoundedConnection, error: psycopg.Error) -> None:
        if conn.closed or is_connection_lost(error) or error.sqlstate in _LOST or self._may_be_stale(error):
            self.close()

    def _may_be_stale(self, error: psycopg.Error) -> bool:
        """Only after a while. A statement that is always refused would otherwise close every session, and the reaper
        needs one that lasts for a lease.
        """
        return may_be_the_session(error) and self.age_seconds > REFUSED_SECONDS

    def _made(self) -> BoundedConnection:
        if self._on_wait is None:
            return BoundedConnection.connect(self._dsn, autocommit=True)
        conn = _AudibleConnection.connect(self._dsn, autocommit=True)
        conn.on_wait = self._on_wait
        return conn

    def _connect(self) -> BoundedConnection:
        conn = self._made()
        try:
            meet(conn, self._settings)
        except BaseException:
            conn.close()
            raise
        self._observer.connected(self._role, 0 if conn.is_pooled else conn.info.backend_pid)
        if conn.is_pooled and not self._has_told_of_pooler:
            self._has_told_of_pooler = True
            log.info("pooler.found", consequence="nothing is prepared, settings go with each statement")
        return conn


class _AudibleConnection(BoundedConnection):
    """Calls `on_wait` ten times a second while it waits for the server, so that a watchdog does not see a hang."""

    on_wait: Callable[[], None] = staticmethod(lambda: None)

    def wait(self, gen: Generator[Any, Any, RV], *args: Any, **kwargs: Any) -> RV:
        return super().wait(with_looks(gen, self.on_wait), *args, **kwargs)
