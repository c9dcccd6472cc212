"""One connection of a worker, for one of its loops: opened when needed, given up when it fails.

Not from a pool: each loop has its own, so that none waits for another, and the connections of a worker can be counted.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, TypeVar

import psycopg

from tasklib.connection import (
    BoundedConnection,
    is_connection_lost,
    is_passing_conflict,
    prepare_connection,
    send,
    without_planner_settings,
    worker_connection_string,
)
from tasklib.log import log

if TYPE_CHECKING:
    from tasklib.config import Config
    from tasklib.statements import Statement

T = TypeVar("T")
CONFLICT_TRIES = 5
_LOST_PREPARED = frozenset({"26000", "42P05"})  # a pooler gave us another server connection


class Session:
    """`run` sends one statement and reads its answer. Raises psycopg's errors: the loops know what to do."""

    def __init__(self, config: Config, role: str, *, timeout_seconds: float | None = None, settings: str = "") -> None:
        self._dsn = worker_connection_string(config, role, settings=settings)
        self._timeout_seconds = timeout_seconds or config.database_timeout_seconds
        self._conn: BoundedConnection | None = None
        self._connected_at = math.inf
        self._is_pooled = False
        self.connections = 0  # how often it has connected: who remembers the number can tell a new connection

    def run(self, statement: Statement[T]) -> T:
        conn = self.connection()
        for _ in range(CONFLICT_TRIES - 1):
            try:
                return self._send(conn, statement)
            except psycopg.Error as error:
                if not is_passing_conflict(error):
                    raise
        return self._send(conn, statement)

    def connection(self) -> BoundedConnection:
        if self._conn is None or self._conn.closed:
            self._conn = self._connect()
            self._connected_at = time.monotonic()
            self.connections += 1
        return self._conn

    @property
    def age_seconds(self) -> float:
        """How long the present connection has lasted."""
        return time.monotonic() - self._connected_at if self._conn is not None and not self._conn.closed else 0.0

    def close(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()

    def _send(self, conn: BoundedConnection, statement: Statement[T]) -> T:
        conn.deadline = time.monotonic() + self._timeout_seconds
        try:
            return send(conn, [statement])[0]
        except psycopg.Error as error:
            if conn.closed or is_connection_lost(error) or error.sqlstate in _LOST_PREPARED:
                self.close()
            raise
        finally:
            conn.deadline = math.inf

    def _connect(self) -> BoundedConnection:
        try:
            conn = BoundedConnection.connect(self._dsn, autocommit=True)
        except psycopg.OperationalError as error:
            if "unsupported startup parameter" not in str(error):
                raise
            log.info("pooler.found", consequence="planner settings cannot be sent")
            self._dsn = without_planner_settings(self._dsn)
            self._is_pooled = True
            conn = BoundedConnection.connect(self._dsn, autocommit=True)
        if self._is_pooled:
            conn.prepare_threshold = None  # the next transaction may be another server connection's
        prepare_connection(conn)
        return conn
