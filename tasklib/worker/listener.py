"""Hears rings. A direct, autocommit connection, checked by a round trip of its own notification: behind a transaction
pooler LISTEN succeeds and hears nothing. While it is deaf, the poll does the work.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from psycopg import sql

from tasklib.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tasklib.connection import BoundedConnection
    from tasklib.worker.session import Session

CHECK_EVERY_SECONDS = 10.0
CHECK_WAIT_SECONDS = 3.0
LISTEN_SECONDS = 0.25  # how long a stop may have to wait for it
DEAF_PAUSE_SECONDS = 30.0
ANSWER_SECONDS = 30.0


class Listener:
    def __init__(
        self,
        session: Session,
        queues: Sequence[str] | None,
        on_ring: Callable[[], None],
        on_cancel: Callable[[UUID], None],
    ) -> None:
        self._session = session
        self._on_ring = on_ring
        self._on_cancel = on_cancel
        self._check_channel = f"tasklib_check_{uuid4().hex}"
        rings = ["task_new"] if queues is None else [f"task_queue_{queue}" for queue in queues]
        self._channels = [*rings, "task_cancel", self._check_channel]
        self._connection = 0
        self._check_at = 0.0
        self._unheard_since: float | None = None
        self.is_heard = False

    def run_once(self) -> float | None:
        try:
            return self._listen()
        except Exception:
            self.is_heard = False
            self._session.close()
            raise

    def _listen(self) -> float:
        conn = self._session.connection()
        conn.deadline = time.monotonic() + ANSWER_SECONDS
        if self._session.connections != self._connection:
            self._subscribe(conn)
        if time.monotonic() >= self._check_at and self._unheard_since is None:
            conn.execute("select pg_notify(%s, '')", [self._check_channel])
            self._unheard_since = time.monotonic()
        for notification in conn.notifies(timeout=LISTEN_SECONDS):
            self._hear(notification.channel, notification.payload)
        return self._judge()

    def _subscribe(self, conn: BoundedConnection) -> None:
        for channel in self._channels:
            conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
        self._connection = self._session.connections
        self._check_at = 0.0
        self._unheard_since = None
        self._on_ring()  # what was sent while nobody listened

    def _hear(self, channel: str, payload: str) -> None:
        if channel == self._check_channel:
            self._unheard_since = None
            self._check_at = time.monotonic() + CHECK_EVERY_SECONDS
            if not self.is_heard:
                self.is_heard = True
                log.info("listener.heard", channels=len(self._channels) - 1)
        elif channel == "task_cancel":
            self._on_cancel(_as_uuid(payload))
        else:
            self._on_ring()

    def _judge(self) -> float:
        if self._unheard_since is None or time.monotonic() - self._unheard_since < CHECK_WAIT_SECONDS:
            return 0.0
        log.warning(
            "listener.deaf",
            consequence="new tasks are found by the poll alone",
            hint="is there a pooler in transaction mode before the database? give the worker a direct address",
        )
        self.is_heard = False
        self._session.close()
        return DEAF_PAUSE_SECONDS


def _as_uuid(payload: str) -> UUID:
    """Anybody can send a notification: nothing is decided from it, and nonsense is nobody's id."""
    try:
        return UUID(payload)
    except ValueError:
        return UUID(int=0)
