"""The worker's right to hold tasks: its row in `workers`, renewed three times in a lease.

The worker judges its own lease on its monotonic clock, counted from before the renewal was sent: when the database may
think it dead, it has stopped starting tasks. A worker that was given up for dead goes on under a new name.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from typing import TYPE_CHECKING
from uuid import uuid4

from tasklib.clock import time
from tasklib.duties.apart import first_line, send_apart
from tasklib.log import log
from tasklib.statements import WorkerDescription
from tasklib.worker.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    import psycopg

    from tasklib.config import Config
    from tasklib.statements import WorkerStatements
    from tasklib.worker.buffer import Buffer
    from tasklib.worker.clock import DatabaseClock
    from tasklib.worker.execution import Execution
    from tasklib.worker.session import Session
    from tasklib.worker.witness import Witness


class Lease:
    """Service of the lease loop: renew, extend, and see who was asked to stop."""

    def __init__(
        self,
        config: Config,
        session: Session,
        statements: WorkerStatements,
        *,
        buffer: Buffer,
        clock: DatabaseClock,
        describe: Callable[[], tuple[list[str] | None, list[str]]],
        witness: Witness,
        tally: Tally | None = None,
    ) -> None:
        self._session = session
        self._statements = statements
        self._buffer = buffer
        self._clock = clock
        self._describe = describe
        self._witness = witness
        self._tally = tally or Tally()
        self._seconds = config.lease_seconds
        self._lock_seconds = config.lock_timeout_seconds
        self._name = config.worker_id or f"{socket.gethostname()}-{os.getpid()}"
        self.worker_id = self._new_id()
        self._valid_until = -math.inf
        self._is_registered = False
        self._has_failed = False  # the last renewal has
        self._run_out = -math.inf  # the last `valid_until` that was seen to have passed, and when that was seen
        self._run_out_seen = -math.inf
        self.is_stopping = False
        self.on_regained: Callable[[], None] = lambda: None  # claims have to be checked before anything starts
        self.on_cancel: Callable[[Execution], None] = lambda _: None
        self.before_renewal: Callable[[], None] = lambda: None

    @property
    def valid_until(self) -> float:
        return self._valid_until

    def is_valid(self) -> bool:
        return time.monotonic() < self._valid_until

    def is_lost(self) -> bool:
        """It has run out, and could not be renewed. If nobody tried, because code that holds the GIL or a SIGSTOP kept
        this process from it, then that comes first: a supervisor may have kept the lease alive.
        """
        if self.is_valid():
            return False
        if self._run_out != self._valid_until:
            self._run_out, self._run_out_seen = self._valid_until, time.monotonic()
        return self._has_failed or time.monotonic() > self._run_out_seen + self._seconds / 3

    def run_once(self) -> float | None:
        try:
            self.before_renewal()
            self._register() if not self._is_registered else self._renew()
        except Exception:
            self._has_failed = True
            raise
        self._has_failed = False
        self._extend()
        self._look_for_cancels()
        return self._seconds / 3

    def give_up(self) -> None:
        """Deregister: everything is finished or given back."""
        if self._is_registered:
            self._session.run(self._statements.deregister(self.worker_id))
            self._is_registered = False
        self._valid_until = -math.inf

    def _register(self) -> None:
        queues, names = self._describe()
        description = WorkerDescription(
            self.worker_id, self._name, socket.gethostname(), os.getpid(), threading.main_thread().name, queues, names,
            self._buffer.concurrency,
        )  # fmt: skip
        self._witness.named(self.worker_id)
        sent_at = time.monotonic()
        now = self._session.run(self._statements.register(description))
        if now is None:  # an answer was lost, and this comes too late
            self.worker_id = self._new_id()
            self._register()
            return
        self._clock.set(now, sent_at)
        self._is_registered = True
        self._valid_until = sent_at + self._seconds
        self.on_regained()

    def _renew(self) -> None:
        sent_at = time.monotonic()
        now = self._session.run(self._statements.renew(self.worker_id, self._describe()[1], stopping=self.is_stopping))
        if now is None:
            self._start_anew()
            return
        self._clock.set(now, sent_at)
        was_valid = self.is_valid()
        self._valid_until = sent_at + self._seconds
        if not was_valid:
            self._tally.lease_lost("ran_out")
            self.on_regained()

    def _start_anew(self) -> None:
        log.error("worker.fenced", worker_id=self.worker_id, consequence="its tasks were given to others")
        self._tally.lease_lost("fenced")
        self._valid_until = -math.inf
        self._is_registered = False
        self.worker_id = self._new_id()
        self._register()

    def _extend(self) -> None:
        """For what has been held for half of its lock."""
        half = self._lock_seconds / 2
        now = self._clock.now()
        due = [each for each in self._buffer.held() if (now - each.locked_since).total_seconds() > half]
        if due:
            extended = set().union(*send_apart([each.id for each in due], self._extend_given, _tell_not_extended))
            for each in due:
                if each.id in extended:
                    each.locked_since = now

    def _extend_given(self, task_ids: Sequence[UUID]) -> set[UUID]:
        return set(self._session.run(self._statements.extend(self.worker_id, task_ids)))

    def _look_for_cancels(self) -> None:
        """Notifications may be lost; here they are found all the same."""
        held = {each.id: each for each in self._buffer.held()}
        if held:
            for id_ in self._session.run(self._statements.asked_to_stop(self.worker_id, list(held))):
                self.on_cancel(held[id_])

    def _new_id(self) -> str:
        return f"{self._name}-{uuid4()}"


def _tell_not_extended(task_id: UUID, error: psycopg.Error) -> None:
    log.error("lock.not_extended", task_id=task_id, error=first_line(error))
