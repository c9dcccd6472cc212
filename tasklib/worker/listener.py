"""Receives the notifications that wake a worker, on a direct connection. While it is deaf, the worker finds tasks by
polling.

Behind a pooler in transaction mode, LISTEN succeeds and hears nothing, or notifications for other clients. So it is
not tried there. Elsewhere the connection is checked by the round trip of a notification, before the channels that
matter are listened to and every ten seconds after that.

If the claiming connections are behind a pooler, they cannot register as sleeping. Then the listener is registered as
sleeping for them, all the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from tasklib.clock import time
from tasklib.log import log
from tasklib.runtime.listening import Notification, Notifications
from tasklib.statements import Statement, WorkerStatements
from tasklib.worker.doorbell import Doorbell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tasklib.connection import BoundedConnection
    from tasklib.runtime.session import Session

CHECK_EVERY_SECONDS = 10.0
CHECK_WAIT_SECONDS = 3.0
LISTEN_SECONDS = 0.25  # how long a stop may have to wait for the listener
DEAF_PAUSE_SECONDS = 30.0
ANSWER_SECONDS = 30.0


class Listener:
    def __init__(
        self,
        session: Session,
        statements: WorkerStatements,
        queues: Sequence[str] | None,
        on_ring: Callable[[], None],
        on_cancel: Callable[[UUID], None],
        *,
        wait_seconds: float = LISTEN_SECONDS,
    ) -> None:
        self._session = session
        self._doorbell = Doorbell(session, statements, queues, longest_doubt=CHECK_EVERY_SECONDS)
        self._must_arm = False
        self._on_ring = on_ring
        self._on_cancel = on_cancel
        self._wait_seconds = wait_seconds
        self._check_channel = f"tasklib_check_{uuid4().hex}"
        rings = ["task_new"] if queues is None else [f"task_queue_{queue}" for queue in queues]
        self._channels = [*rings, "task_cancel"]
        self._connection = 0
        self._check_at = 0.0
        self._unheard_since: float | None = None
        self._notifications: Notifications | None = None
        self.is_heard = False
        self.is_deaf = False

    def run_once(self) -> float | None:
        try:
            return self._listen()
        except Exception:
            self.is_heard = False
            self._session.close()
            raise

    def _listen(self) -> float:
        conn = self._session.connection()
        if conn.is_pooled and not self._session.has_own_address:
            return self._give_up()
        conn.deadline = time.monotonic() + ANSWER_SECONDS
        if self._notifications is None or self._session.connections != self._connection:
            self._notifications = self._begin(conn)
        if time.monotonic() >= self._check_at and self._unheard_since is None:
            conn.execute("select pg_catalog.pg_notify(%s, '')", [self._check_channel])
            self._unheard_since = time.monotonic()
        for notification in self._notifications.take():
            self._hear(notification)
        if self._unheard_since is None and not self.is_heard:
            self._subscribe(self._notifications)
        if self.is_heard and self._must_arm:
            self._arm()
        return self._judge(self._notifications)

    def _begin(self, conn: BoundedConnection) -> Notifications:
        """The first check comes from the address that submits use: on another database, rings would not be heard."""
        self.is_heard = False
        notifications = Notifications(conn)
        notifications.listen([self._check_channel])
        self._connection = self._session.connections
        self._doorbell.disarm()  # the locks of the last connection went with it
        self._check_at = 0.0
        self._unheard_since = None
        if self._session.has_own_address:
            self._must_arm = self._session.run_by_main_address(ring(self._check_channel))
            self._unheard_since = time.monotonic()
        return notifications

    def _subscribe(self, notifications: Notifications) -> None:
        notifications.listen(self._channels)
        self.is_heard, self.is_deaf = True, False
        log.info("listener.heard", channels=len(self._channels))
        self._on_ring()  # for what was sent while it did not listen

    def _arm(self) -> None:
        if not self._doorbell.is_armed or self._doorbell.is_to_ask:
            self._doorbell.arm()
            self._on_ring()  # for what came while it was not armed

    def _hear(self, notification: Notification) -> None:
        if notification.channel == self._check_channel:
            self._unheard_since = None
            self._check_at = time.monotonic() + CHECK_EVERY_SECONDS
        elif notification.channel == "task_cancel":
            self._on_cancel(notification.task_id)
        else:
            self._on_ring()

    def _judge(self, notifications: Notifications) -> float:
        if self._unheard_since is None or time.monotonic() - self._unheard_since < CHECK_WAIT_SECONDS:
            notifications.wait(min(self._wait_seconds, self._doorbell.until_asked()))
            return 0.0
        return self._give_up()

    def _give_up(self) -> float:
        """For a while, because what is between us and the database may change."""
        if not self.is_deaf:
            log.warning(
                "listener.deaf",
                consequence="new tasks are found by the poll alone",
                hint="is there a pooler before the database? give a direct address as Config.listen_database_url",
            )
        self.is_heard, self.is_deaf = False, True
        self._session.close()
        return DEAF_PAUSE_SECONDS


def ring(channel: str) -> Statement[None]:
    return Statement("select pg_catalog.pg_notify($1, '')", (channel,), lambda _: None)
