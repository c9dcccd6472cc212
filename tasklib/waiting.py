"""Waits for tasks to become final: one thread and one connection for all who wait in this process.

It hears `task_done`, which whatever makes a task final sends while somebody waits, and looks by itself now and then: a
notification is a hint. Behind a pooler in transaction mode nothing can be heard; then it only looks, more often.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import socket
import threading
from typing import TYPE_CHECKING, TypeAlias
from uuid import UUID

import psycopg

from tasklib.clock import time
from tasklib.connection import BoundedConnection, is_connection_lost, meet, send_alone, translate
from tasklib.errors import DatabaseUnavailable, TaskNotFound
from tasklib.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tasklib.record import Task
    from tasklib.statements import Statements

FIRST_LOOK_SECONDS = 0.02
LOOK_SECONDS = 2.0  # where notifications are heard
POLL_SECONDS = 0.5  # where they are not
MISSING_SECONDS = 5.0  # a submit may still be uncommitted; a row may be deleted at any time
LINGER_SECONDS = 5.0  # the connection is kept for who comes next
LONGEST_PAUSE_SECONDS = 2.0
LOOK_SHARE = 10  # at most a tenth of the time goes into looking

Deliver: TypeAlias = "Callable[[UUID, Task | Exception], None]"


class WaitingRoom:
    """For one configured database: `enter` says what is waited for and who is told. Safe to keep across a fork."""

    def __init__(self, conninfo: str, statements: Statements, timeout_seconds: float) -> None:
        self._make = functools.partial(_Room, conninfo, statements, timeout_seconds)
        self._processes: dict[int, _Room] = {}

    def enter(self, task_ids: Iterable[UUID], deliver: Deliver) -> _Ticket:
        """`deliver` is called once for each id, in another thread, until `leave` of what this returns."""
        return self._room().enter(task_ids, deliver)

    def close(self) -> None:
        if os.getpid() in self._processes:
            self._room().close()

    def _room(self) -> _Room:
        pid = os.getpid()  # a thread does not survive a fork
        return self._processes.get(pid) or self._processes.setdefault(pid, self._make())


class _Ticket:
    """One who waits, for some tasks."""

    __slots__ = ("_room", "deliver", "task_ids")

    def __init__(self, room: _Room, task_ids: frozenset[UUID], deliver: Deliver) -> None:
        self._room = room
        self.task_ids = task_ids
        self.deliver = deliver

    def leave(self) -> None:
        self._room.leave(self)


class _Room:
    def __init__(self, conninfo: str, statements: Statements, timeout_seconds: float) -> None:
        self._conninfo = conninfo
        self._statements = statements
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._tickets: dict[UUID, set[_Ticket]] = {}
        self._seen_at: dict[UUID, float] = {}  # in the table; or it was first waited for then
        self._look_at_once: set[UUID] = set()
        self._said: list[str] = []  # notifications that nobody has looked at yet
        self._thread: threading.Thread | None = None
        self._bell: socket.socket | None = None  # with the thread they come and go
        self._rope: socket.socket | None = None
        self._look_at = 0.0
        self._pause = FIRST_LOOK_SECONDS
        self._is_heard = False
        self._is_closing = False

    # --- who waits ---

    def enter(self, task_ids: Iterable[UUID], deliver: Deliver) -> _Ticket:
        ticket = _Ticket(self, frozenset(task_ids), deliver)
        with self._lock:
            self._is_closing = False
            now = time.monotonic()
            for task_id in ticket.task_ids:
                self._tickets.setdefault(task_id, set()).add(ticket)
                self._seen_at.setdefault(task_id, now)
            self._look_at_once |= ticket.task_ids
            if self._thread is None and ticket.task_ids:
                self._start()
            self._ring()
        return ticket

    def leave(self, ticket: _Ticket) -> None:
        with self._lock:
            for task_id in ticket.task_ids:
                self._remove(task_id, {ticket})

    def close(self) -> None:
        """Who still waits is told."""
        self._deliver_to_all(DatabaseUnavailable("the client was closed while the task was waited for"))
        with self._lock:
            thread = self._thread
            self._is_closing = True
            self._ring()
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._timeout_seconds)

    def _remove(self, task_id: UUID, gone: set[_Ticket]) -> None:
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
        self._bell, self._rope = socket.socketpair()
        for end in (self._bell, self._rope):
            end.settimeout(0)
        self._thread = threading.Thread(target=self._serve, args=[self._bell], name="tasklib-waiting", daemon=True)
        self._thread.start()

    def _ring(self) -> None:
        if self._rope is not None:
            with contextlib.suppress(BlockingIOError):  # enough rings are under way
                self._rope.send(b"\0")

    # --- the thread ---

    def _serve(self, bell: socket.socket) -> None:
        failures = 0
        while True:
            try:
                self._serve_until_nobody_waits(bell)
            except psycopg.Error as error:
                if not is_connection_lost(error):
                    self._deliver_to_all(translate(error))
                log.warning("waiting.interrupted", error=str(error).partition("\n")[0])
            except Exception as error:  # noqa: BLE001 - who waits must not wait for ever
                log.exception("waiting.failed")
                self._deliver_to_all(error)
            if self._may_end():
                return
            time.sleep(min(0.05 * 2.0 ** min(failures, 10), LONGEST_PAUSE_SECONDS))
            failures += 1

    def _serve_until_nobody_waits(self, bell: socket.socket) -> None:
        with contextlib.closing(self._connect()) as conn:
            self._listen(conn)
            while self._tickets or self._lingers(bell):
                self._serve_once(conn, bell)

    def _lingers(self, bell: socket.socket) -> bool:
        """Somebody may come soon, and finds a connection then."""
        if self._is_closing:
            return False
        with selectors.DefaultSelector() as selector:
            selector.register(bell, selectors.EVENT_READ)
            return bool(selector.select(LINGER_SECONDS)) and bool(self._tickets)

    def _connect(self) -> BoundedConnection:
        conn = BoundedConnection.connect(self._conninfo, autocommit=True)
        conn.deadline = time.monotonic() + self._timeout_seconds
        meet(conn)
        return conn

    def _listen(self, conn: BoundedConnection) -> None:
        """Whoever finishes a task sees by the lock that somebody waits. Behind a pooler, where the connection is not
        ours alone, it would never be given back.
        """
        self._is_heard = not conn.is_pooled
        self._said = []
        if self._is_heard:
            conn.add_notify_handler(lambda said: self._said.append(said.payload))
            conn.execute("set enable_seqscan = off")  # a plan that was made for an empty table is kept for long
            conn.execute("listen task_done")
            send_alone(conn, self._statements.say_that_somebody_waits())
        # What was being committed before the lock was held has told nobody: look again soon.
        self._pause, self._look_at = FIRST_LOOK_SECONDS, 0.0

    def _serve_once(self, conn: BoundedConnection, bell: socket.socket) -> None:
        conn.deadline = time.monotonic() + self._timeout_seconds
        self._look(conn)
        self._hear(conn)  # what came with the answer does not stir the connection any more
        pause = 0.0 if self._look_at_once else max(self._look_at - time.monotonic(), 0.0)
        with selectors.DefaultSelector() as selector:
            selector.register(bell, selectors.EVENT_READ)
            selector.register(conn, selectors.EVENT_READ)
            stirred = {key.fileobj for key, _ in selector.select(pause)}
        if bell in stirred:
            bell.recv(65536)
        self._hear(conn)

    def _may_end(self) -> bool:
        with self._lock:
            if self._tickets:
                return False
            for end in (self._bell, self._rope):
                if end is not None:
                    end.close()
            self._thread = self._bell = self._rope = None
            return True

    def _hear(self, conn: BoundedConnection) -> None:
        conn.pgconn.consume_input()
        while (said := conn.pgconn.notifies()) is not None:
            self._said.append(said.extra.decode())
        done, self._said = {_as_uuid(payload) for payload in self._said}, []
        with self._lock:
            self._look_at_once |= done & self._tickets.keys()

    def _look(self, conn: BoundedConnection) -> None:
        """At those that are new or said to be done, at once; at all of them now and then."""
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
            self._look_soon()  # nobody else will tell of these

    def _look_soon(self) -> None:
        self._pause = FIRST_LOOK_SECONDS
        self._look_at = min(self._look_at, time.monotonic() + self._pause)

    def _plan_next_round(self, took: float) -> None:
        self._pause = min(self._pause * 2, LOOK_SECONDS if self._is_heard else POLL_SECONDS)
        self._look_at = time.monotonic() + max(self._pause, LOOK_SHARE * took)

    def _look_for_missing(self, conn: BoundedConnection) -> None:
        """Rows that nobody has looked for in a while: who waits for one that does not exist is told."""
        now = time.monotonic()
        with self._lock:
            overdue = [task_id for task_id, seen_at in self._seen_at.items() if seen_at < now - MISSING_SECONDS]
            self._seen_at.update(dict.fromkeys(overdue, now))  # those that are missing go below
        for task_id in send_alone(conn, self._statements.missing(overdue)) if overdue else ():
            self._deliver(
                task_id,
                TaskNotFound(
                    f"there is no task {task_id}: was it submitted in a transaction that is not committed, or deleted?"
                ),
            )


def _as_uuid(payload: str) -> UUID:
    """Anybody can send a notification: nonsense is nobody's id."""
    try:
        return UUID(payload)
    except ValueError:
        return UUID(int=0)
