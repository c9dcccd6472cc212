"""The worker's right to hold tasks: its row in `workers`, renewed three times in a lease.

The worker judges its own lease by its monotonic clock, from the moment at which it sent the renewal. So it has stopped
starting tasks before the database can take it for dead. A worker that was taken for dead goes on under a new id.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from tasklib.clock import time
from tasklib.log import log
from tasklib.runtime.bad_rows import first_line, send_apart
from tasklib.statements import WorkerDescription

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import psycopg

    from tasklib.worker.basis import Basis
    from tasklib.worker.buffer import Buffer
    from tasklib.worker.execution import Execution


class Lease:
    """The service of the lease loop: renew the lease, extend the locks of held tasks, and look for cancelled ones."""

    def __init__(self, basis: Basis, buffer: Buffer) -> None:
        config = basis.config
        self._basis = basis
        self._session = basis.sessions["lease"]
        self._statements = basis.statements
        self._buffer = buffer
        self._clock = basis.clock
        self._seconds = config.lease_seconds
        self._name = config.worker_id or f"{socket.gethostname()}-{os.getpid()}"
        self.worker_id = self._new_id()
        self.valid_until = -math.inf  # monotonic
        self._is_registered = False
        self._has_failed = False  # the last renewal
        self._run_out = -math.inf  # the last `valid_until` that was seen to have passed
        self._run_out_seen = -math.inf  # when that was seen
        self.is_stopping = False
        self.on_regained: Callable[[], None] = lambda: None  # the held tasks have to be compared before any task starts
        self.on_cancel: Callable[[Execution], None] = lambda _: None
        self.before_renewal: Callable[[], None] = lambda: None

    def is_valid(self) -> bool:
        return time.monotonic() < self.valid_until

    def is_lost(self) -> bool:
        """It has run out, and could not be renewed. If this process could not even try, because code held the GIL or it
        was stopped, a renewal is tried first: a supervisor may have kept the lease alive.
        """
        if self.is_valid():
            return False
        if self._run_out != self.valid_until:
            self._run_out, self._run_out_seen = self.valid_until, time.monotonic()
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
        """Deregister. Every task is finished or given back."""
        if self._is_registered:
            self._session.run(self._statements.policies.give_up(self.worker_id))
            self._session.run(self._statements.deregister(self.worker_id))
            self._is_registered = False
        self.valid_until = -math.inf

    def _register(self) -> None:
        served = self._basis.served
        description = WorkerDescription(
            self.worker_id, self._name, socket.gethostname(), os.getpid(), threading.main_thread().name,
            served.queues, served.names(), self._buffer.concurrency,
        )  # fmt: skip
        self._basis.observer.named(self.worker_id)
        sent_at = time.monotonic()
        now = self._session.run(self._statements.register(description))
        if now is None:  # the answer to an earlier registration was lost, and that one is dead by now
            self._register_anew()
            return
        self._clock.set(now, sent_at)
        self._is_registered = True
        self.valid_until = sent_at + self._seconds
        self.on_regained()

    def _renew(self) -> None:
        sent_at = time.monotonic()
        now = self._session.run(
            self._statements.renew(self.worker_id, self._basis.served.names(), stopping=self.is_stopping)
        )
        if now is None:
            log.error("worker.fenced", worker_id=self.worker_id, consequence="its tasks were given to others")
            self._basis.metrics.lease_lost("fenced")
            self.valid_until = -math.inf
            self._is_registered = False
            self._register_anew()
            return
        self._clock.set(now, sent_at)
        was_valid = self.is_valid()
        self.valid_until = sent_at + self._seconds
        if not was_valid:
            self._basis.metrics.lease_lost("ran_out")
            self.on_regained()

    def _register_anew(self) -> None:
        self.worker_id = self._new_id()
        self._register()

    def _extend(self) -> None:
        """Extend the lock of every task that has been held for half of it."""
        half, now = self._basis.config.lock_timeout_seconds / 2, self._clock.now()
        due = [each for each in self._buffer.held() if (now - each.locked_since).total_seconds() > half]
        if due:
            extended = set().union(*send_apart([each.id for each in due], self._send_extension, _log_not_extended))
            for each in due:
                if each.id in extended:
                    each.locked_since = now

    def _send_extension(self, task_ids: Sequence[UUID]) -> list[UUID]:
        return self._session.run(self._statements.extend(self.worker_id, task_ids))

    def _look_for_cancels(self) -> None:
        """A notification may have been lost."""
        held = {each.id: each for each in self._buffer.held()}
        if held:
            for id_ in self._session.run(self._statements.asked_to_stop(self.worker_id, list(held))):
                self.on_cancel(held[id_])

    def _new_id(self) -> str:
        return f"{self._name}-{uuid4()}"


def _log_not_extended(task_id: UUID, error: psycopg.Error) -> None:
    log.error("lock.not_extended", task_id=task_id, error=first_line(error))
