"""Compares what the worker holds with what the database says it holds.

It happens before the first task starts, after the lease was lost, after each new connection, and when the answer to a
claim was lost. Until it is done nothing starts. Tasks that the database has given to another worker are dropped. Tasks
that the worker does not know are given back.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tasklib.clock import time
from tasklib.log import log
from tasklib.outcomes import HeldTask, Interrupted, Rules, StopInterrupt, decide
from tasklib.runtime.outcome_writer import Decided, RecoveryWriter
from tasklib.states import State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tasklib.worker.basis import Basis
    from tasklib.worker.buffer import Buffer
    from tasklib.worker.execution import Execution
    from tasklib.worker.lease import Lease

LATE_COMMIT_SECONDS = 10.0  # a claim without an answer may commit this much later: then compare once more


class Reconciliation:
    """Used by the claim loop's thread, except for `require` and `may_start`."""

    def __init__(self, basis: Basis, buffer: Buffer, lease: Lease) -> None:
        self._session = basis.sessions["claim"]
        self._statements = basis.statements
        self._clock = basis.clock
        self._buffer = buffer
        self._lease = lease
        self._writer = RecoveryWriter(self._session, basis.statements)
        self._is_done = False
        self._again_at = math.inf  # monotonic
        self._connection = 0  # the number of the connection on which it was last done
        self.on_done: Callable[[], None] = lambda: None

    def require(self) -> None:
        """Nothing starts until the comparison is made anew."""
        self._is_done = False

    def require_twice(self) -> None:
        """A claim has no answer: it may be committed already, or still be on its way."""
        self._is_done = False
        self._again_at = time.monotonic() + LATE_COMMIT_SECONDS

    def may_start(self) -> bool:
        """Whether tasks may start."""
        return self._is_done and self._lease.is_valid()

    def run_if_needed(self) -> None:
        """A new connection may lead to another database, after a failover, which lacks the last commits."""
        self._session.connection()
        is_new = self._session.connections != self._connection
        if is_new or not self._is_done or time.monotonic() >= self._again_at:
            self._compare()
            self._again_at = math.inf

    def _compare(self) -> None:
        """The database is asked first. What changes between the two looks is then only a claim of this thread, of which
        there is none now, or a task that was settled, which is final.
        """
        rows = self._session.run(self._statements.held(self._lease.worker_id))
        theirs = {(task.id, task.fencing_token) for task, _ in rows}
        held = {(each.id, each.task.fencing_token): each for each in self._buffer.held()}
        self._drop([each for key, each in held.items() if key not in theirs])
        self._give_back_unknown([row for row in rows if (row[0].id, row[0].fencing_token) not in held])
        self._connection = self._session.connections
        self._is_done = True
        self.on_done()
        self._buffer.wake_runners()

    def _drop(self, lost: Sequence[Execution]) -> None:
        """The database has given these tasks to another worker."""
        self._buffer.settled(self._buffer.remove_waiting(lost))
        self.forget_claims(lost)
        executing = set(self._buffer.executing())
        for each in lost:
            if each in executing:
                each.interrupt(StopInterrupt)
                log.warning("lease.lost", task=each.task.name, task_id=each.id, token=each.task.fencing_token)

    def forget_claims(self, executions: Sequence[Execution]) -> None:
        """Delete the rows of those claims of which this worker holds no task any more."""
        for worker_id, claim_id in {(each.task.worker_id, each.claimed.claim_id) for each in executions}:
            self._session.run(self._statements.forget_claim(worker_id, claim_id))

    def _give_back_unknown(self, unknown: Sequence[tuple[HeldTask, int]]) -> None:
        """The answer to their claim was lost; or a failover has lost the commit of their end, so that they are still
        running for this database; or the finish loop has settled them since the database was asked. The guard of the
        statement passes over the last kind, and a claim is deleted only if nothing of it is held.
        """
        if not unknown:
            return
        now = self._clock.now()
        decided = [Decided(task, decide(task, lost_end(task), now, Rules()), task.state) for task, _ in unknown]
        released = self._writer.recover(self._lease.worker_id, decided, now)
        for claim_id in {claim_id for _, claim_id in unknown}:
            self._session.run(self._statements.forget_claim(self._lease.worker_id, claim_id))
        if released:
            log.warning("claim.recovered", tasks=released)


def lost_end(task: HeldTask) -> Interrupted:
    """The outcome of a task that the database says this worker holds, and that the worker does not know."""
    has_begun = task.state == State.RUNNING
    return Interrupted(began=has_begun, ran=has_begun, reason="what became of it was lost")
