"""Waits for tasks to become final: one thread and one connection for all callers in this process.

It listens to `task_done`, which is sent for each task that becomes final while a client waits. It also looks by
itself now and then, because a notification is only a hint. Behind a pooler in transaction mode no notification is
received, so it looks more often.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import psycopg

from tasklib.clock import time
from tasklib.connection import BoundedConnection, meet
from tasklib.database_errors import is_connection_lost, translate
from tasklib.errors import DatabaseUnavailable, TaskNotFound
from tasklib.log import log
from tasklib.runtime.listening import Notifications, wait_readable
from tasklib.sending import send_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from uuid import UUID

    from tasklib.record import Task
    from tasklib.statements import Statements

FIRST_LOOK_SECONDS = 0.02
LOOK_SECONDS = 2.0  # where notifications are heard
POLL_SECONDS = 0.5  # where they are not
MISSING_SECONDS = 5.0  # a submit may still be uncommitted; a row may be deleted at any time
LINGER_SECONDS = 5.0  # how long the connection is kept for the next caller
LONGEST_PAUSE_SECONDS = 2.0
LOOK_SHARE = 10  # looking takes at most a tenth of the time

Deliver: TypeAlias = "Callable[[UUID, Task | Exception], None]"


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """One caller that waits for some tasks."""

    task_ids: frozenset[UUID]
    deliver: Deliver


class WaitingRoom:
    """All waits of one configuration in this process. Its thread does not survive a fork."""

    def __init__(self, conninfo: str, statements: Statements, timeout_seconds: float) -> None:
        self._conninfo = conninfo
        self._statements = statements
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._tickets: dict[UUID, set[Ticket]] = {}
        self._seen_at: dict[UUID, float] = {}  # in the table; or it was first waited for then
        self._look_at_once: set[UUID] = set()
        self._thread: threading.Thread | None = None
        self._wake_ends: tuple[socket.socket, socket.socket] | None = None  # wakes the thread, and lives as long as it
        self._look_at = 0.0
        self._pause = FIRST_LOOK_SECONDS
        self._is_heard = False
        self._is_closing = False

    # --- the callers' side ---

    def enter(self, task_ids: Iterable[UUID], deliver: Deliver) -> Ticket:
        """`deliver` is called once for each id, in another thread, until `leave` is called with the ticket."""
        ticket = Ticket(frozenset(task_ids), deliver)
        with self._lock:
            self._is_closing = False
            now = time.monotonic()
            for task_id in ticket.task_ids:
                self._tickets.setdefault(task_id, set()).add(ticket)
                self._seen_at.setdefault(task_id, now)
            self._look_at_once |= ticket.task_ids
            if self._thread is None and ticket.task_ids:
                self._start()
            self._wake()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        with self._lock:
            for task_id in ticket.task_ids:
                self._remove(task_id, {ticket})

    def close(self) -> None:
        """Callers that still wait get an error."""
        self._deliver_to_all(DatabaseUnavailable("the client was closed while the task was waited for"))
        with self._lock:
            thread = self._thread
            self._is_closing = True
            self._wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._timeout_seconds)

    def _remove(self, task_id: UUID, gone: set[Ticket]) -> None:
        left = self._tickets.get(task_id, set()) - gone
        if left:
            self._tickets[task_id] = left
            return
        self._tickets.pop(task_id, None)
        self._seen_at.pop(task_id, None)
        self._look_at_once.discard(task_id)

    def _deliver(self, task_id: UUID, found: Task | Exception) -> None:
        with self._lock:
            tickets = self._tickets.get(task_id, set())
            self._remove(task_id, tickets)
        for ticket in tickets:
            ticket.deliver(task_id, found)

    def _deliver_to_all(self, error: Exception) -> None:
        with self._lock:
            task_ids = list(self._tickets)
        for task_id in task_ids:
            self._deliver(task_id, error)

    def _start(self) -> None:
        self._wake_ends = woken, _ = socket.socketpair()
        for end in self._wake_ends:
            end.settimeout(0)
        self._thread = threading.Thread(target=self._serve, args=[woken], name="tasklib-waiting", daemon=True)
        self._thread.start()

    def _wake(self) -> None:
        if self._wake_ends is not None:
            with contextlib.suppress(BlockingIOError):  # enough wake-ups are under way
                self._wake_ends[1].send(b"\0")

    # --- the thread ---

    def _serve(self, woken: socket.socket) -> None:
        failures = 0
        while True:
            try:
                self._serve_until_idle(woken)
            except psycopg.Error as error:
                if not is_connection_lost(error):
                    self._deliver_to_all(translate(error))
                log.warning("waiting.interrupted", error=str(error).partition("\n")[0])
            except Exception as error:  # noqa: BLE001 - callers must not wait for ever
                log.exception("waiting.failed")
                self._deliver_to_all(error)
            if self._may_end():
                return
            time.sleep(min(0.05 * 2.0 ** min(failures, 10), LONGEST_PAUSE_SECONDS))
            failures += 1

    def _serve_until_idle(self, woken: socket.socket) -> None:
        with contextlib.closing(self._connect()) as conn:
            notifications = self._listen(conn)
            while self._tickets or self._lingers(woken):
                self._serve_once(conn, notifications, woken)

    def _lingers(self, woken: socket.socket) -> bool:
        """The connection is kept for a while, for the next caller."""
        return not self._is_closing and bool(wait_readable(LINGER_SECONDS, woken.fileno())) and bool(self._tickets)

    def _connect(self) -> BoundedConnection:
        conn = BoundedConnection.connect(self._conninfo, autocommit=True)
        conn.deadline = time.monotonic() + self._timeout_seconds
        meet(conn)
        return conn

    def _listen(self, conn: BoundedConnection) -> Notifications:
        """A lock tells the sessions that finish tasks that a client waits. Behind a pooler the connection is not ours
        alone, and the lock would never be released.
        """
        notifications = Notifications(conn)
        self._is_heard = not conn.is_pooled
        if self._is_heard:
            conn.execute("set enable_seqscan = off")  # a plan that was made for an empty table is kept for long
            notifications.listen(["task_done"])
            send_alone(conn, self._statements.announce_waiting())
        # Commits that began before the lock was held have sent no notification: look again soon.
        self._pause, self._look_at = FIRST_LOOK_SECONDS, 0.0
        return notifications

    def _serve_once(self, conn: BoundedConnection, notifications: Notifications, woken: socket.socket) -> None:
        conn.deadline = time.monotonic() + self._timeout_seconds
        self._look(conn)
        self._hear(notifications)  # those that came with the answer do not make the connection readable any more
        pause = 0.0 if self._look_at_once else max(self._look_at - time.monotonic(), 0.0)
        if woken.fileno() in notifications.wait(pause, woken.fileno()):
            woken.recv(65536)
        self._hear(notifications)

    def _may_end(self) -> bool:
        with self._lock:
            if self._tickets:
                return False
            for end in self._wake_ends or ():
                end.close()
            self._thread = self._wake_ends = None
            return True

    def _hear(self, notifications: Notifications) -> None:
        done = {notification.task_id for notification in notifications.take()}
        with self._lock:
            self._look_at_once |= done & self._tickets.keys()

    def _look(self, conn: BoundedConnection) -> None:
        """Look at new tasks and at those that notifications name, at once; and at all of them now and then."""
        began = time.monotonic()
        is_round = began >= self._look_at
        with self._lock:
            looked_at, self._look_at_once = self._look_at_once, set()
            if is_round:
                looked_at = set(self._tickets)
        if looked_at:
            for task in send_alone(conn, self._statements.final(list(looked_at))):
                self._deliver(task.id, task)
        if is_round:
            self._look_for_missing(conn)
            self._plan_next_round(time.monotonic() - began)
        elif looked_at and not self._is_heard:
            self._look_soon()  # no notification will tell of these

    def _look_soon(self) -> None:
        self._pause = FIRST_LOOK_SECONDS
        self._look_at = min(self._look_at, time.monotonic() + self._pause)

    def _plan_next_round(self, took: float) -> None:
        self._pause = min(self._pause * 2, LOOK_SECONDS if self._is_heard else POLL_SECONDS)
        self._look_at = time.monotonic() + max(self._pause, LOOK_SHARE * took)

    def _look_for_missing(self, conn: BoundedConnection) -> None:
        """Callers that wait for a task that does not exist get an error, after a while."""
        now = time.monotonic()
        with self._lock:
            overdue = [task_id for task_id, seen_at in self._seen_at.items() if seen_at < now - MISSING_SECONDS]
            self._seen_at.update(dict.fromkeys(overdue, now))  # the missing ones are removed below
        for task_id in send_alone(conn, self._statements.missing(overdue)) if overdue else ():
            self._deliver(
                task_id,
                TaskNotFound(
                    f"there is no task {task_id}: was it submitted in a transaction that is not committed, or deleted?"
                ),
            )
