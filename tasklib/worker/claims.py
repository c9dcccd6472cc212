"""Claims tasks: from which queues, in which order, and what happens to rows that PostgreSQL refuses to change.

Each likely queue has a claim of its own. All others share one, which takes a few tasks from every queue. A queue that
is never empty does not keep the others waiting: the likely ones take turns at being first, and once a second the others
come first.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

import psycopg

from tasklib.clock import time
from tasklib.database_errors import is_about_rows
from tasklib.duties.promoter import Promoter
from tasklib.log import log
from tasklib.policies.turns import Turns
from tasklib.runtime.bad_rows import Aside, first_line
from tasklib.statements import Claim, ClaimedTask, MixedClaim, Place, Statement
from tasklib.worker.unwritten import grouped

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from tasklib.runtime.metrics import Found
    from tasklib.worker.basis import Basis
    from tasklib.worker.lease import Lease
    from tasklib.worker.policy_watch import PolicyWatch
    from tasklib.worker.preparation import Preparation
    from tasklib.worker.reconciliation import Reconciliation

    AnyClaim = TypeVar("AnyClaim", Claim, MixedClaim)

MOST_CLAIM_TRIES = 50  # by then the refused row must have been found
OTHERS_EVERY_SECONDS = 1.0  # a worker whose likely queues are never empty looks at the other queues
SHARES = 10  # a claim from many queues takes at most a tenth of its limit from each
FLOOR_SECONDS = 1.0  # tasks below a floor may be overlooked for this long
FLOOR_MARGIN_SECONDS = 0.001  # dates are not exact numbers
PROMOTE_EVERY_SECONDS = 0.5  # at most, while there is other work


class Floors:
    """Where the next claim of a queue may begin: a hint that is used while claims come back full. A task may lie below
    it, because it was given back, was committed late or has a lower priority. So a claim that came back short is
    followed by one without a floor.
    """

    def __init__(self) -> None:
        self._floors: dict[str, Place] = {}
        self._forget_at = 0.0

    def of(self, queue: str) -> Place | None:
        if time.monotonic() >= self._forget_at:
            self._floors.clear()
        return self._floors.get(queue)

    def forget(self) -> None:
        self._floors.clear()

    def note(self, queue: str, claim: Claim) -> None:
        if claim.is_short or claim.reached is None:
            self._floors.pop(queue, None)
            return
        if not self._floors:
            self._forget_at = time.monotonic() + FLOOR_SECONDS
        self._floors[queue] = claim.reached._replace(submitted=claim.reached.submitted - FLOOR_MARGIN_SECONDS)


class DueTasks:
    """When to promote tasks that have become due, so that they can be claimed."""

    def __init__(self, basis: Basis, floors: Floors) -> None:
        self._promoter = Promoter(basis.sessions["claim"], basis.statements)
        self._floors = floors
        self.poll_seconds = basis.options.poll_seconds
        self.promote_at = 0.0  # monotonic

    def is_due(self) -> bool:
        return time.monotonic() >= self.promote_at

    def seconds_left(self) -> float:
        """Until the next promotion, but never more than the poll interval."""
        return max(min(self.poll_seconds, self.promote_at - time.monotonic()), 0.0)

    def note_claim(self, claim: Claim) -> None:
        """Only a claim that emptied its queue tells when the next task is due. A worker whose claims all come back full
        promotes as often as it would poll.
        """
        if not claim.is_short:
            self.promote_at = min(self.promote_at, time.monotonic() + self.poll_seconds)
        else:
            self.promote_at = time.monotonic() + (math.inf if claim.due_seconds is None else claim.due_seconds)

    def note_no_claim(self) -> None:
        """Every queue has a limit that leaves nothing to claim, so no claim tells when the next task is due."""
        self.promote_at = min(self.promote_at, time.monotonic() + self.poll_seconds)

    def promote(self) -> bool:
        """Whether tasks became claimable."""
        promotion = self._promoter.promote()
        if promotion.promoted:
            self._floors.forget()  # promoted tasks were submitted long ago
        next_due = promotion.next_due_seconds
        wait = PROMOTE_EVERY_SECONDS if promotion.promoted else self.poll_seconds
        self.promote_at = time.monotonic() + (wait if next_due is None else min(max(next_due, 0.0), wait))
        return promotion.promoted > 0


class Claims:
    """Claims tasks, and puts them into the buffer."""

    def __init__(
        self,
        basis: Basis,
        lease: Lease,
        reconciliation: Reconciliation,
        preparation: Preparation,
        policies: PolicyWatch,
    ) -> None:
        self._basis = basis
        self.policies = policies
        self._session = basis.sessions["claim"]
        self._statements = basis.statements
        self._served = basis.served
        self._lease = lease
        self._reconciliation = reconciliation
        self._preparation = preparation
        self.floors = Floors()
        self.due = DueTasks(basis, self.floors)
        self._refused: Aside[UUID] = Aside()  # tasks whose rows PostgreSQL refuses to change
        self._turns = Turns()
        self._others_have_tasks = False  # as the last claim that emptied its queue saw
        self._others_at = 0.0
        self._reached = ""  # the last of the other queues that was looked at
        self.found_by: Found = "poll"  # why the claimer looks, for the metrics
        self.claimed = 0  # tasks in all; grows when they are in the buffer

    def fill(self, capacity: int) -> bool:
        """Claim once from every queue, while there is capacity. True: some was left when the queues were empty."""
        before = self.claimed
        others_first = time.monotonic() >= self._others_at and self._served.serves_others
        is_short = self._claim_others(capacity // 2 or capacity) if others_first else True
        left = capacity - (self.claimed - before)
        is_short = (self._claim_likely(left) if left else False) and is_short
        if is_short and self._others_have_tasks and not others_first:
            is_short = self._claim_others(capacity - (self.claimed - before))
        return is_short

    def _claim_others(self, capacity: int) -> bool:
        """From the queues that are not among the likely ones, beginning where the last look ended. True: some capacity
        was left when they were empty.
        """
        self._others_at = time.monotonic() + OTHERS_EVERY_SECONDS
        began_after, has_turned = self._reached, not self._reached
        while capacity:
            claim = self._claim_next_others(capacity)
            capacity -= len(claim.tasks)
            self._reached = claim.reached or ""
            if has_turned and (claim.reached is None or claim.reached >= began_after > ""):
                break
            has_turned = has_turned or claim.reached is None
        return capacity > 0

    def _claim_next_others(self, capacity: int) -> MixedClaim:
        """From the next few queues. A queue that fills its share becomes a likely one."""
        share = max(capacity // SHARES, 1)
        statement = self._statements.claim_each(
            self._lease.worker_id, self._reached, self._served.names(), capacity, share=share,
            served=self._served.queues, apart_from=self._served.likely_queues(), aside=self.refused(),
        )  # fmt: skip
        try:
            claim = self._send_once(statement)
        except psycopg.Error as error:
            if error.sqlstate is None or not is_about_rows(error):
                raise
            claim = self._claim_others_one_by_one(capacity, share)
        for queue, count in Counter(task.held.queue for task in claim.tasks).items():
            if count >= share > 1:
                self._served.add_likely(queue)
        return claim

    def _claim_others_one_by_one(self, capacity: int, share: int) -> MixedClaim:
        """PostgreSQL refuses a row in one of these queues: a claim from each queue alone finds that row."""
        ready = self._session.run(self._statements.ready_queues())
        served, likely = self._served.queues, self._served.likely_queues()
        others = [each for each in ready if (served is None or each in served) and each not in likely]
        tasks: list[ClaimedTask] = []
        for queue in (each for each in others if each > self._reached):
            if len(tasks) >= capacity:
                return MixedClaim(tasks, None, queue)
            tasks += self._claim(queue, min(share, capacity - len(tasks))).tasks
        return MixedClaim(tasks, None, None)

    def _claim_likely(self, capacity: int) -> bool:
        """True: some capacity was left when the likely queues were empty. Each time another queue is the first."""
        queues = self.policies.open(self._served.likely_queues())
        is_short, exhausted, sent = True, set[str](), False
        for queue, share in self._turns.next_round(queues, self._served.policies.queues, capacity):
            limit = self.policies.claim_room(queue, capacity if share is None else min(share, capacity))
            if not limit or queue in exhausted:
                continue
            has_floor = self.floors.of(queue) is not None
            claim, sent = self._claim(queue, limit), True
            capacity -= len(claim.tasks)
            self._turns.note(queue, len(claim.tasks), is_short=claim.is_short)
            if claim.is_short:
                exhausted.add(queue)
            elif limit < capacity + len(claim.tasks):
                continue  # it has more, which its limit or its share keeps back
            is_short = is_short and claim.is_short and not has_floor
            if capacity == 0:
                return False
        if not sent:
            self.due.note_no_claim()
        return is_short

    def _claim(self, queue: str, limit: int) -> Claim:
        likely = self._served.likely_queues() if self._served.serves_others else None

        policy = self._served.policies.queues.get(queue)
        ageing = None if policy is None else policy.ageing_seconds

        def statement(limit: int) -> Statement[Claim]:
            if ageing is not None:
                return self._statements.claim_aged(
                    self._lease.worker_id, queue, self._served.names(), limit, ageing_seconds=ageing, queues=likely,
                    aside=self.refused(),
                )  # fmt: skip
            return self._statements.claim(
                self._lease.worker_id, queue, self._served.names(), limit, queues=likely,
                floor=self.floors.of(queue), aside=self.refused(),
            )  # fmt: skip

        claim = self.send(statement, limit, queue=queue)
        self.policies.note_claim(queue, is_short=claim.is_short)
        if claim.is_short:
            self._preparation.suspects.may_exist, self._others_have_tasks = claim.has_suspects, claim.has_elsewhere
        self.floors.note(queue, claim)
        self.due.note_claim(claim)
        return claim

    def refused(self) -> set[UUID]:
        """Tasks that claims have to leave out for now."""
        return self._refused.current()

    def send(self, statement: Callable[[int], Statement[AnyClaim]], limit: int, *, queue: str | None) -> AnyClaim:
        """Claim from one queue; None: claim suspects from all. While PostgreSQL refuses a row, the limit is halved
        until the first row alone is refused. That task is left out from then on.
        """
        accused: UUID | None = None
        tries = 0  # since the last refused row was found
        while True:
            try:
                return self._send_once(statement(limit), queue)
            except psycopg.Error as error:
                tries += 1
                if error.sqlstate is None or not is_about_rows(error) or tries == MOST_CLAIM_TRIES:
                    raise
                self.floors.forget()  # the next statement has to begin with the same row
                if limit == 1:
                    accused = self._accuse(queue, accused, error) or accused
                    tries = 0 if accused in self.refused() else tries
                limit = max(limit // 2, 1)

    def _send_once(self, statement: Statement[AnyClaim], queue: str | None = None) -> AnyClaim:
        """The claimed tasks are in the buffer afterwards. Without a queue, each task names its own."""
        sent_at = time.monotonic()
        try:
            claim = self._session.run(statement)
            seconds = time.monotonic() - sent_at
            self.policies.note_version(claim.policy_version, since=sent_at)  # before anything of it can start
        except psycopg.Error:
            self._reconciliation.require_twice()
            raise
        if claim.tasks and claim.answered_at is not None:
            self._basis.clock.set(claim.answered_at, sent_at)
            self._preparation.add(self._served.executions(claim.tasks))
            self.claimed += len(claim.tasks)
        by_queue = grouped(claim.tasks, lambda task: task.held.queue) if queue is None else {queue: claim.tasks}
        for each, tasks in by_queue.items():
            self._basis.metrics.claimed(each, tasks, self.found_by, seconds)
        return claim

    def _accuse(self, queue: str | None, accused: UUID | None, error: psycopg.Error) -> UUID | None:
        """The task that is first in the queue, or first of the suspects. If the same task was first before the claim
        that was refused, it is the refused one. None: another worker has it locked now, and may be testing it too.
        """
        queues = self._served.queues if queue is None else [queue]
        head = self._session.run(
            self._statements.head(queues, self._served.names(), suspects=queue is None, aside=self.refused())
        )
        if head is None:
            return None
        task_id, name = head
        if task_id == accused:
            self._refused.add(task_id)
            log.error("task.not_claimed", task=name, task_id=task_id, error=first_line(error))
            return None
        return task_id
