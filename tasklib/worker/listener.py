"""Hears rings, on a direct, autocommit connection. While it is deaf, the poll does the work.

Behind a transaction pooler LISTEN succeeds and hears nothing, or what is meant for somebody else: there, none is sent.
Elsewhere it is checked by the round trip of a notification, before the channels that matter are listened to and every
ten seconds after that.

Where those who claim are behind a pooler, and cannot say that they sleep, the listener says so for them, all the time.
"""

from __future__ import annotations

import selectors
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from psycopg import sql

from tasklib.clock import time
from tasklib.log import log
from tasklib.statements import Statement
from tasklib.worker.doorbell import Doorbell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tasklib.connection import BoundedConnection
    from tasklib.statements import WorkerStatements
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
        self._said: list[tuple[str, str]] = []  # channels and payloads that nobody has looked at yet
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
        if self._session.connections != self._connection:
            self._begin(conn)
        if time.monotonic() >= self._check_at and self._unheard_since is None:
            conn.execute("select pg_catalog.pg_notify(%s, '')", [self._check_channel])
            self._unheard_since = time.monotonic()
        self._hear_all(conn)
        if self._unheard_since is None and not self.is_heard:
            self._subscribe(conn)
        if self.is_heard and self._must_arm:
            self._arm()
        return self._judge(conn)

    def _hear_all(self, conn: BoundedConnection) -> None:
        """What has come, by itself or with an answer. By psycopg's own generator it would be a tenth of a ms later."""
        conn.pgconn.consume_input()
        while (said := conn.pgconn.notifies()) is not None:
            self._said.append((said.relname.decode(), said.extra.decode()))
        said_so_far, self._said = self._said, []
        for channel, payload in said_so_far:
            self._hear(channel, payload)

    def _begin(self, conn: BoundedConnection) -> None:
        """The first notification comes from the address by which tasks come: another database would ring for nobody."""
        self.is_heard = False
        self._said = []
        conn.add_notify_handler(lambda said: self._said.append((said.channel, said.payload)))
        listen(conn, [self._check_channel])
        self._connection = self._session.connections
        self._doorbell.disarm()  # what was held, and doubted, went with the connection before
        self._check_at = 0.0
        self._unheard_since = None
        if self._session.has_own_address:
            self._must_arm = self._session.run_by_main_address(ring(self._check_channel))
            self._unheard_since = time.monotonic()

    def _subscribe(self, conn: BoundedConnection) -> None:
        listen(conn, self._channels)
        self.is_heard, self.is_deaf = True, False
        log.info("listener.heard", channels=len(self._channels))
        self._on_ring()  # what was sent while nobody listened

    def _arm(self) -> None:
        if not self._doorbell.is_armed or self._doorbell.is_to_ask:
            self._doorbell.arm()
            self._on_ring()  # what came while nobody rang

    def _hear(self, channel: str, payload: str) -> None:
        if channel == self._check_channel:
            self._unheard_since = None
            self._check_at = time.monotonic() + CHECK_EVERY_SECONDS
        elif channel == "task_cancel":
            self._on_cancel(_as_uuid(payload))
        else:
            self._on_ring()

    def _judge(self, conn: BoundedConnection) -> float:
        if self._unheard_since is None or time.monotonic() - self._unheard_since < CHECK_WAIT_SECONDS:
            _wait(conn, min(self._wait_seconds, self._doorbell.until_asked()))
            return 0.0
        return self._give_up()

    def _give_up(self) -> float:
        """For a while: what is between us and the database may change."""
        if not self.is_deaf:
            log.warning(
                "listener.deaf",
                consequence="new tasks are found by the poll alone",
                hint="is there a pooler before the database? give a direct address as Config.listen_database_url",
            )
        self.is_heard, self.is_deaf = False, True
        self._session.close()
        return DEAF_PAUSE_SECONDS


def _wait(conn: BoundedConnection, seconds: float) -> None:
    """Until something comes. Psycopg's own waiting would look ten times a second."""
    with selectors.DefaultSelector() as selector:
        selector.register(conn.fileno(), selectors.EVENT_READ)
        selector.select(seconds)


def listen(conn: BoundedConnection, channels: Sequence[str]) -> None:
    for channel in channels:
        conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))


def ring(channel: str) -> Statement[None]:
    return Statement("select pg_catalog.pg_notify($1, '')", (channel,), lambda _: None)


def _as_uuid(payload: str) -> UUID:
    """Anybody can send a notification: nothing is decided from it, and nonsense is nobody's id."""
    try:
        return UUID(payload)
    except ValueError:
        return UUID(int=0)
