"""Keeps the buffer's limits as the database's policies say: reads them when they have changed, and asks for permits and
grants. Used by the claim loop's thread alone.

Before every claim and every start, the worker knows a version of the policies that is at most a second old. A worker
without policies pays for one small read a second while it works.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tasklib.clock import time
from tasklib.policies.queue_policy import Policies

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tasklib.policies.queue_limit import PermitQuestion
    from tasklib.worker.basis import Basis
    from tasklib.worker.buffer import Buffer
    from tasklib.worker.lease import Lease
    from tasklib.worker.limited_queues import LimitedQueue

READ_EVERY_SECONDS = 1.0
REPORT_EVERY_SECONDS = 1.0  # to a breaker; at once while it is half open
MOST_SEEN = 1_000


class PolicyWatch:
    def __init__(self, basis: Basis, lease: Lease, buffer: Buffer) -> None:
        self._session = basis.sessions["claim"]
        self._statements = basis.statements.policies
        self._served = basis.served
        self._clock = basis.clock
        self._lease = lease
        self._buffer = buffer
        self._limits = buffer.limits
        self.policies = Policies(version=-1)
        self._read_at = -math.inf  # when the version was last known
        self._report_at = -math.inf
        self._known_as = lease.worker_id
        self._uncapped: set[str] = set()  # queues whose cap has gone while this worker had permits

    # --- the policies ---

    def run(self) -> None:
        """In each round of the claim loop."""
        if time.monotonic() >= self._read_at + READ_EVERY_SECONDS and self._is_to_be_known():
            self.note_version(self._session.run(self._statements.version()))
        if self._uncapped:
            self._session.run(self._statements.give_back(self._lease.worker_id, sorted(self._uncapped)))
            self._uncapped.clear()
        if self._limits:
            self._note_pauses()
            self._ask_for_all()
            self._report_breakers()

    def _is_to_be_known(self) -> bool:
        """Something could start because of an old policy; or none was read yet."""
        waiting, executing = self._buffer.counts()
        return bool(waiting or executing or self._limits) or self.policies.version < 0

    def note_version(self, version: int | None, *, since: float | None = None) -> None:
        """A claim that was sent at `since` has told the version; None: it has not, and it is asked for if it is old."""
        now = time.monotonic()
        if version is None:
            if now < self._read_at + READ_EVERY_SECONDS:
                return
            version = self._session.run(self._statements.version())
        if version != self.policies.version:
            self._read()
        self._read_at = now if since is None else since

    def _read(self) -> None:
        self.policies = self._session.run(self._statements.policies())
        self._served.set_policies(self.policies)
        with self._buffer.lock:
            self._uncapped.update(limit.policy.queue for limit in self._limits.all() if limit.held or limit.asked)
        self._buffer.set_policies(self.policies.limited())
        with self._buffer.lock:
            self._uncapped.difference_update(
                limit.policy.queue for limit in self._limits.all() if limit.held or limit.asked
            )
        self._note_pauses()
        self._buffer.wake_runners()

    def note_worker_id(self) -> None:
        """Called by the lease loop. A worker that was taken for dead goes on under another id. Its permits are others'
        by now, so nothing starts before it has got new ones.
        """
        if self._lease.worker_id == self._known_as:
            return
        self._known_as = self._lease.worker_id
        with self._buffer.lock:
            for limit in self._limits.all():
                limit.lose_permits()

    def _note_pauses(self) -> None:
        """A pause may end by itself."""
        now = self._clock.now().timestamp()
        with self._buffer.lock:
            for limit in self._limits.all():
                limit.is_paused = limit.policy.is_paused_at(now)

    # --- before a claim ---

    def may_claim(self) -> bool:
        """Whether the cap over all queues leaves this worker anything to claim for."""
        with self._buffer.lock:
            cluster = self._limits.cluster
            if cluster is None or cluster.own:
                return True
            if cluster.is_closed(time.monotonic()):
                return False
        if self._session.run(self._statements.seen_any()):
            self._ask(cluster, cluster.slots)
        return cluster.own > 0

    def open(self, queues: Sequence[str]) -> list[str]:
        """Those from which tasks may be claimed. For queues without a permit or a grant, it first looks whether there
        are tasks, and asks for permits and grants for as many.
        """
        if not self._limits:
            return list(queues)
        now = time.monotonic()
        with self._buffer.lock:
            of = self._limits.by_queue
            possible = [queue for queue in queues if queue not in of or not of[queue].is_closed(now)]
            poor = {queue: of[queue] for queue in possible if queue in of and not of[queue].has_budget(now)}
            most = min(max(self._buffer.free_slots(), 0), MOST_SEEN)
        if poor:
            self._open_poor(poor, most)
        return [queue for queue in possible if queue not in poor or poor[queue].has_budget(time.monotonic())]

    def closed(self) -> list[str]:
        """The queues of which nothing can start now."""
        now = time.monotonic()
        with self._buffer.lock:
            limits = self._limits.by_queue.items()
            return [queue for queue, limit in limits if limit.is_closed(now) or not limit.most_executing()]

    def _open_poor(self, poor: Mapping[str, LimitedQueue], most: int) -> None:
        seen = self._session.run(self._statements.seen([*poor], self._served.names(), most)) if most else {}
        for queue, limit in poor.items():
            limit.seen = seen.get(queue, 0)
            limit.may_have_more = limit.seen >= max(most, 1)
            if queue in seen:
                self._ask(limit, seen[queue])

    def claim_room(self, queue: str, capacity: int) -> int:
        """How many tasks of this queue to claim at most."""
        with self._buffer.lock:
            limit = self._limits.by_queue.get(queue)
            return capacity if limit is None else min(capacity, limit.claim_room(self._buffer.average_seconds))

    def note_claim(self, queue: str, *, is_short: bool) -> None:
        with self._buffer.lock:
            limit = self._limits.by_queue.get(queue)
            if limit is not None:
                limit.may_have_more, limit.seen = not is_short, 0
        if limit is not None:
            self._ask(limit)

    def hear_ring(self) -> None:
        with self._buffer.lock:
            for limit in self._limits.all():
                limit.hear_ring()

    def seconds_left(self) -> float:
        """Until the next question, or the next read of the policies: tasks that wait start without the claim loop."""
        now = time.monotonic()
        is_waiting = self._buffer.counts()[0] > 0
        next_read = max(self._read_at + READ_EVERY_SECONDS - now, 0.0) if is_waiting else math.inf
        if not self._limits:
            return next_read
        epoch = self._clock.now().timestamp()
        with self._buffer.lock:
            waits = [next_read, *(limit.seconds_left(now) for limit in self._limits.all())]
            ends = (limit.policy.paused_until for limit in self._limits.all() if limit.is_paused)
            waits += [max(until - epoch, 0.001) for until in ends if until is not None]
        return min(waits)

    # --- permits and grants ---

    def _ask_for_all(self) -> None:
        with self._buffer.lock:
            all_limits = list(self._limits.all())
        for limit in all_limits:
            self._ask(limit)

    def _ask(self, limit: LimitedQueue, seen: int = 0) -> None:
        with self._buffer.lock:
            question = limit.permit_question(time.monotonic(), self._buffer.free_slots(limit), seen)
        if question is not None:
            self._ask_for_permits(limit, question)
        with self._buffer.lock:
            wanted = limit.grants_wanted(
                time.monotonic(), self._buffer.free_slots(limit), self._buffer.average_seconds, seen
            )
        if wanted:
            self._ask_for_grants(limit, wanted)

    def _ask_for_permits(self, limit: LimitedQueue, question: PermitQuestion) -> None:
        self._uncapped.discard(limit.policy.queue)  # the answer says how many it has from now on
        worker_id = self._lease.worker_id
        answer = self._session.run(
            self._statements.permit(limit.policy.queue, worker_id, question.wants, question.keeps)
        )
        now = time.monotonic()
        with self._buffer.lock:
            if worker_id != self._lease.worker_id:
                return
            if answer.permits is None or answer.target is None:  # the cap is gone: the policies will say so, too
                limit.lose_permits()
                limit.ask_at = now + READ_EVERY_SECONDS
                self._read_at = -math.inf
                return
            limit.note_permits(question, answer.permits, answer.target, now)
            if answer.breaker_epoch is not None and answer.breaker_epoch != limit.epoch:
                limit.epoch, limit.succeeded, limit.failed = answer.breaker_epoch, 0, 0
            limit.is_half_open = answer.breaker == "half_open"
            if answer.again_seconds is not None:
                limit.blocked_until = limit.ask_at = now + max(answer.again_seconds, 0.01)
            has_room = limit.waiting and limit.room(now)
        if has_room:
            self._buffer.wake_runners()

    def _ask_for_grants(self, limit: LimitedQueue, wanted: int) -> None:
        sent_at = time.monotonic()
        answer = self._session.run(self._statements.grant(limit.policy.queue, wanted))
        with self._buffer.lock:
            limit.note_grants(sent_at, wanted, answer.granted, answer.next_seconds, time.monotonic())
            has_room = limit.waiting and answer.granted
        if has_room:
            self._buffer.wake_runners()

    # --- breakers ---

    def _report_breakers(self) -> None:
        now = time.monotonic()
        is_due = now >= self._report_at + REPORT_EVERY_SECONDS
        reports = []
        with self._buffer.lock:
            for limit in self._limits.all():
                if (limit.succeeded or limit.failed) and (is_due or limit.is_half_open):
                    reports.append((limit.policy.queue, limit.epoch, limit.succeeded, limit.failed))
                    limit.succeeded = limit.failed = 0
                    limit.ask_at = -math.inf  # the breaker may have turned
        if is_due:
            self._report_at = now
        for report in reports:
            self._session.run(self._statements.report(*report))
