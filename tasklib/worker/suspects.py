"""When the worker claims suspects, and how they get a process of their own.

A suspect is a task that was executing when its worker died. It is claimed before other tasks, because it had begun
once. It needs an empty worker or a process of its own. A worker that can soon offer neither leaves suspects to the
other workers, and takes one as a last resort every ten seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasklib.clock import time
from tasklib.worker.execution import MOST_CONTAINED_RUNS, Execution

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tasklib.statements import MixedClaim, Statement
    from tasklib.worker.basis import Basis
    from tasklib.worker.buffer import Buffer
    from tasklib.worker.claims import Claims
    from tasklib.worker.isolation.processes import IsolatedProcesses
    from tasklib.worker.lease import Lease

SUSPECTS_EVERY_SECONDS = 0.25  # a worker that is never idle looks for suspects
LAST_RESORT_EVERY_SECONDS = 10.0  # also if it is not likely to be empty soon
PAUSE_SECONDS = 1.0  # after a suspect went back, because the worker was not empty as soon as expected
LAST_RESORT_PAUSE_SECONDS = 60.0  # after a suspect went back that was taken as a last resort


class Suspects:
    def __init__(self, basis: Basis, lease: Lease, buffer: Buffer, processes: IsolatedProcesses) -> None:
        self._statements = basis.statements
        self._served = basis.served
        self._lease = lease
        self._buffer = buffer
        self._processes = processes
        self.may_exist = False  # as the last look found
        self._look_at = 0.0
        self._last_resort_at = time.monotonic() + LAST_RESORT_EVERY_SECONDS
        self._is_last_resort = False  # the waiting suspect was claimed though the worker did not seem empty soon
        self._none_until = 0.0

    def take_suspects(self, claims: Claims) -> None:
        """Claim as many as the worker can run soon."""
        now = time.monotonic()
        is_due = self.may_exist or now >= self._look_at
        if not is_due or (now <= self._none_until and not self._buffer.is_idle()):
            return
        capacity = self._buffer.capacity_for_suspects(
            processes_are_ready=self._processes.is_ready(), processes_are_offered=self._processes.is_offered,
            is_last_resort=now >= self._last_resort_at,
        )  # fmt: skip
        if not capacity:
            return
        self._is_last_resort = not self._buffer.is_empty_soon()
        self._look_at = now + SUSPECTS_EVERY_SECONDS
        self._last_resort_at = now + LAST_RESORT_EVERY_SECONDS

        def statement(limit: int) -> Statement[MixedClaim]:
            return self._statements.claim_suspects(
                self._lease.worker_id, self._served.queues, self._served.names(), limit, claims.refused(),
                apart_from=claims.policies.closed(),
            )  # fmt: skip

        claim = claims.send(statement, capacity, queue=None)
        self.may_exist = len(claim.tasks) == capacity
        if self.may_exist:
            self._processes.prepare()  # there may be more, and to run them one after the other would take long

    def offer_processes(self) -> None:
        """To the waiting suspects, if the worker is not empty at once."""
        for each in self._buffer.waiting_suspects():
            each.may_have_own_process = each.task.crash_count <= MOST_CONTAINED_RUNS and self._processes.can_contain(
                each.function
            )
            each.is_patient = each.may_have_own_process or self._is_last_resort
            if each.may_have_own_process and self._processes.is_ready():
                each.give_own_process()
            elif each.may_have_own_process and not self._buffer.is_empty_soon():
                self._processes.prepare()

    def note_given_back(self, executions: Iterable[Execution]) -> None:
        """One that could not run alone goes to another worker: this one claims none for a while."""
        if any(each.must_be_alone and not each.may_have_own_process for each in executions):
            pause = LAST_RESORT_PAUSE_SECONDS if self._is_last_resort else PAUSE_SECONDS
            self._none_until = time.monotonic() + pause
