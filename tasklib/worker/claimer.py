"""Takes tasks from the queues into the buffer, promotes what has become due, and gives back what it cannot run soon.

Wakes by a ring, by a slot that gets free, when the next task is due, and by the poll. Inserts ring only for who has
said that it sleeps: so it says that, and looks once more, before it does, and takes it back when it is busy. After a
lost connection it first compares what it holds with what the database says it holds: an answer may have been lost, or
the tasks themselves.
"""

from __future__ import annotations

import inspect
import math
import time
from typing import TYPE_CHECKING, Any

import psycopg

from tasklib.log import log
from tasklib.options import DEFAULT_QUEUE
from tasklib.outcomes import Expired, Interrupted, StopInterrupt
from tasklib.worker.buffer import HOARD_SECONDS
from tasklib.worker.execution import Execution

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tasklib.duties.promoter import Promoter
    from tasklib.outcomes import Outcome
    from tasklib.registry import Registry
    from tasklib.statements import Claim, ClaimedTask, Place, Row, WorkerStatements
    from tasklib.task import TaskFunction
    from tasklib.worker.buffer import Buffer
    from tasklib.worker.clock import DatabaseClock
    from tasklib.worker.doorbell import Doorbell
    from tasklib.worker.finisher import Finisher
    from tasklib.worker.lease import Lease
    from tasklib.worker.session import Session
    from tasklib.worker.tally import Found, Tally

PROMOTE_EVERY_SECONDS = 0.5  # at most, while there is other work
SUSPECTS_EVERY_SECONDS = 10.0  # for a worker that is never idle
NO_SUSPECTS_SECONDS = 60.0  # after one that could not be alone
CLAIM_LIMIT = 1_000  # the most that the statement takes
BUSY_SECONDS = 0.05  # of work without a break: then nobody needs to ring
BREAK_SECONDS = 0.001  # of sleep
NAP_SECONDS = 0.001  # between two looks while every look finds something, and nobody rings
FLOOR_SECONDS = 1.0  # what was submitted before it may be overlooked for so long
FLOOR_MARGIN_SECONDS = 0.001  # a date is no exact number
LATE_COMMIT_SECONDS = 10.0  # a claim that was given up may still commit: it is looked for once more


class Menu:
    """What this worker serves: queues (None: all) and task functions (None: all that are registered)."""

    def __init__(self, registry: Registry, queues: Sequence[str] | None, names: Iterable[str] | None) -> None:
        self._registry = registry
        self.queues = None if queues is None else list(dict.fromkeys(queues))
        self._names = None if names is None else sorted(set(names))
        self._found: list[str] = []
        self._is_coroutine: dict[str, bool] = {}

    def names(self) -> list[str]:
        return self._names if self._names is not None else sorted(each.name for each in self._registry)

    def likely_queues(self) -> list[str]:
        """The given ones; else those of the functions, and those in which something was found. At least one: a worker
        of no functions promotes all the same, and it is a claim that says what is due.
        """
        if self.queues is not None:
            return self.queues
        names = set(self.names())
        own = (each.task_options.queue for each in self._registry if each.name in names)
        return list(dict.fromkeys([*own, *self._found])) or [DEFAULT_QUEUE]

    def found(self, queues: Iterable[str]) -> list[str]:
        """Those that were not thought of. Only the last few are kept in mind: their number is the users' to choose."""
        likely = self.likely_queues()
        new = [queue for queue in queues if queue not in likely]
        self._found = (new + self._found)[:10]
        return new

    def executions(self, tasks: Iterable[ClaimedTask]) -> list[Execution]:
        kinds: dict[str, tuple[TaskFunction[..., Any] | None, bool]] = {}
        made = []
        for claimed in tasks:
            name = claimed.held.name
            if name not in kinds:
                kinds[name] = self._kind(name)
            function, is_coroutine = kinds[name]
            made.append(Execution(claimed, function, is_coroutine=is_coroutine))
        return made

    def _kind(self, name: str) -> tuple[TaskFunction[..., Any] | None, bool]:
        """The function, and whether it runs on the tasks' loop."""
        if name not in self._registry:
            return None, False
        function = self._registry.get(name)
        if name not in self._is_coroutine:
            # One with a process of its own has a thread that attends to it.
            is_alone = function.task_options.isolation == "process"
            self._is_coroutine[name] = not is_alone and is_async(function.function)
        return function, self._is_coroutine[name]

    def isolated(self) -> list[TaskFunction[..., Any]]:
        """Those that want a process of their own."""
        names = set(self.names())
        return [each for each in self._registry if each.name in names and each.task_options.isolation == "process"]


def is_async(function: Callable[..., object]) -> bool:
    """Also an object whose `__call__` is."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class Floors:
    """Where the next claim of a queue may begin: a hint, for as long as claims come back full. A task that is given
    back, committed late, or of a lower priority may lie below it: after one that came back short, a look without it.
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


class Claimer:
    def __init__(
        self,
        session: Session,
        statements: WorkerStatements,
        *,
        buffer: Buffer,
        lease: Lease,
        clock: DatabaseClock,
        finisher: Finisher,
        promoter: Promoter,
        doorbell: Doorbell,
        is_rung: Callable[[], bool],
        menu: Menu,
        poll_seconds: float,
        buffer_size: int | None,
        report: Callable[[Execution, Outcome], None],
        tally: Tally,
    ) -> None:
        self._session = session
        self._statements = statements
        self._buffer = buffer
        self._lease = lease
        self._clock = clock
        self._finisher = finisher
        self._promoter = promoter
        self._doorbell = doorbell
        self._is_rung = is_rung
        self._menu = menu
        self._poll_seconds = poll_seconds
        self._buffer_size = buffer_size
        self._report = report
        self._tally = tally
        self._found: Found = "poll"
        self._was_rung = self._was_due = False  # since the last round
        self._is_checked = False
        self._may_have_more = True
        self._busy_since = math.inf
        self._asleep_since = math.inf
        self._turn = 0
        self._promote_at = 0.0
        self._other_queues: Sequence[str] = ()
        self._floors = Floors()
        self._compare_at = math.inf
        self._no_suspects_until = 0.0
        self._suspects_at = 0.0
        self._left_suspects = False  # if there were any: the last look was not open to them
        self.is_open = True
        self.is_drained = False  # the last look found nothing to claim and nothing due
        self.claimed = 0  # in all; grows when they are in the buffer
        self.on_full: Callable[[], None] = lambda: None  # it was rung for, and can take no more
        self.on_ready: Callable[[], None] = lambda: None  # what is held was compared: tasks may start

    def ring(self) -> None:
        """Somebody says that there is work. A hint, never the truth."""
        self._may_have_more = self._was_rung = True

    def expects_more(self) -> bool:
        return self._may_have_more

    def expects_more_when_idle(self) -> bool:
        """Also suspects, which wait for a worker that has nothing else to do."""
        return self._may_have_more or self._left_suspects

    def distrust(self) -> None:
        """What is held has to be compared with the database before anything starts."""
        self._is_checked = False

    def may_start(self) -> bool:
        return self._is_checked and self._lease.is_valid()

    def run_once(self) -> float | None:
        if time.monotonic() - self._asleep_since > BREAK_SECONDS:
            self._busy_since = math.inf
        self._asleep_since = math.inf
        if not self._lease.is_valid():
            self._disarm()
            if self._was_rung:
                self._was_rung = False
                self.on_full()
            return self._poll_seconds  # whoever regains it wakes us
        if not self._is_checked or time.monotonic() >= self._compare_at:
            self._compare_with_database()
            self._compare_at = math.inf
        self._give_back_hoarded()
        self._start_careful()
        if self._is_due() and self._has_room():
            self._was_due = self._promote()
        return self._look()

    def _look(self) -> float:
        """Answers when to look again. Nobody sleeps without a look that began after he could be rung for."""
        was_rung, self._was_rung = self._was_rung, False
        self._found = self._why_we_look(was_rung=was_rung)
        if self._doorbell.is_to_ask:
            self._doorbell.arm()
        before = self.claimed
        is_short = self._fill()
        if is_short and self._may_arm() and not self._doorbell.is_armed:
            if self.claimed > before:
                self._may_have_more = True
                return NAP_SECONDS
            self._doorbell.arm()
            self._busy_since = math.inf
            is_short = self._fill()
        if is_short and self._is_due() and self._promote():
            self._was_due = True
            self.is_drained = False
            return 0.0
        if was_rung and not is_short:
            self.on_full()
        if is_short and self.claimed == before:
            self._busy_since = math.inf
        # From the end of the first look that found something: a look may take longer than the time that makes it busy.
        self._busy_since = min(self._busy_since, time.monotonic())
        return self._pause(is_short=is_short)

    def _may_arm(self) -> bool:
        """Somebody hears rings for us. Behind a pooler the locks would not be ours alone, and never be given back."""
        return self._is_rung() and not self._session.is_pooled

    def _why_we_look(self, *, was_rung: bool) -> Found:
        was_due, self._was_due = self._was_due, False
        return "notification" if was_rung else "due" if was_due else "backlog" if self._may_have_more else "poll"

    def _pause(self, *, is_short: bool) -> float:
        if not is_short:
            return self._until_room()
        if not self._may_arm():
            self._disarm()
        if self._doorbell.is_armed and self._busy_left() <= 0:
            self._disarm()
            return NAP_SECONDS
        self._asleep_since = time.monotonic()
        return min(self._until_due(), self._doorbell.until_asked())

    def _until_room(self) -> float:
        """A free slot wakes us; a slot that does not get free shows by then."""
        if self._may_have_more and self._has_room():
            return 0.0
        if self._doorbell.is_armed:
            if (left := self._busy_left()) > 0:
                return left
            self._disarm()
            if self._has_room():  # since before a free slot would wake us
                return 0.0
        return HOARD_SECONDS

    def _is_due(self) -> bool:
        return time.monotonic() >= self._promote_at

    def _until_due(self) -> float:
        return max(min(self._poll_seconds, self._promote_at - time.monotonic()), 0.0)

    def _busy_left(self) -> float:
        return self._busy_since + BUSY_SECONDS - time.monotonic()

    def _disarm(self) -> None:
        if self._doorbell.is_armed:
            self._may_have_more = True  # nobody rings from here on: a free slot has to look
        self._doorbell.disarm()

    def _fill(self) -> bool:
        """True: there was room left when the queues had no more. One claim from each: a worker that always finds
        something has other duties too.
        """
        room = min(self._buffer.room(self._buffer_size), CLAIM_LIMIT) if self.is_open else 0
        if room <= 0:
            return False
        self._may_have_more = False  # from before the look: a ring that comes meanwhile says otherwise
        before = self.claimed
        is_short = self._claim_from(self._menu.likely_queues(), room)
        # Not from none: it would count as a look that was not open to suspects, and be repeated.
        if is_short and (found := self._menu.found(self._other_queues)):
            is_short = self._claim_from(found, room - (self.claimed - before))
        self.is_drained = is_short and self.claimed == before
        if not is_short:
            self._may_have_more = True
        return is_short

    def _claim_from(self, queues: Sequence[str], room: int) -> bool:
        """True: there was room left when they had no more. Another queue first each time: a full one must not keep the
        others waiting.
        """
        self._turn += 1
        first = self._turn % len(queues)
        is_open_to_suspects = self._is_open_to_suspects()
        is_short, left = True, room
        for queue in [*queues[first:], *queues[:first]]:
            has_floor = self._floors.of(queue) is not None
            claim = self._claim(queue, left, suspects=is_open_to_suspects and left == room, is_only=len(queues) == 1)
            left -= len(claim.tasks)
            is_short = is_short and claim.is_short and not has_floor
            if left == 0 or any(task.held.suspect for task in claim.tasks):
                return False  # no more beside a suspect
        return is_short

    def _claim(self, queue: str, limit: int, *, suspects: bool, is_only: bool) -> Claim:
        likely = self._menu.likely_queues() if self._menu.queues is None else None
        statement = self._statements.claim(
            self._lease.worker_id, queue, self._menu.names(), limit, suspects=suspects, queues=likely,
            floor=self._floors.of(queue),
        )  # fmt: skip
        asked_at = time.monotonic()
        try:
            claim = self._session.run(statement)
        except psycopg.Error:
            self._is_checked = False  # it may have been done all the same, or may still be
            self._compare_at = time.monotonic() + LATE_COMMIT_SECONDS
            raise
        seconds = time.monotonic() - asked_at
        if claim.tasks:
            self._clock.set(claim.answered_at, asked_at)
            # Before they can end: whoever is idle then looks for those that were left.
            self._left_suspects = self._left_suspects or claim.left_suspects or not is_only
            self._add(claim.tasks)
            self.claimed += len(claim.tasks)
        self._tally.claimed(queue, claim.tasks, self._found, seconds)
        self._other_queues = claim.other_queues
        self._floors.note(queue, claim)
        self._note_due(claim)
        return claim

    def _note_due(self, claim: Claim) -> None:
        """A claim that came back full says nothing of it: who always has work asks as often as who polls."""
        if not claim.is_short:
            self._promote_at = min(self._promote_at, time.monotonic() + self._poll_seconds)
        else:
            self._promote_at = time.monotonic() + (math.inf if claim.due_seconds is None else claim.due_seconds)

    def _is_open_to_suspects(self) -> bool:
        """One at a time, by who has nothing else to do; now and then also by who has, or under a steady load nobody
        would. What waits for company to end holds up everything behind it.
        """
        now = time.monotonic()
        self._left_suspects = True  # before it is asked who is idle: whoever becomes so meanwhile looks again
        if now <= self._no_suspects_until or (now < self._suspects_at and not self._buffer.is_idle()):
            return False
        self._left_suspects = False
        self._suspects_at = now + SUSPECTS_EVERY_SECONDS
        return True

    def _add(self, tasks: Sequence[ClaimedTask]) -> None:
        for late in self._buffer.add(self._menu.executions(tasks)):
            self._report(late, Interrupted(began=late.is_marked, ran=False))
        self._start_careful()

    def _has_room(self) -> bool:
        return self.is_open and self._buffer.room(self._buffer_size) > 0

    def _promote(self) -> bool:
        promotion = self._promoter.promote()
        if promotion.promoted:
            self._floors.forget()  # they were submitted long ago
        next_due = promotion.next_due_seconds
        wait = PROMOTE_EVERY_SECONDS if promotion.promoted else self._poll_seconds
        self._promote_at = time.monotonic() + (wait if next_due is None else min(max(next_due, 0.0), wait))
        return promotion.promoted > 0

    def _start_careful(self) -> None:
        while (execution := self._buffer.next_careful()) is not None:
            execution.started_at = self._clock.now()
            if execution.is_late(execution.started_at):
                self._report(execution, Expired())
                continue
            try:
                is_ours = bool(self._finisher.mark([execution], self._session))
            except psycopg.Error:
                self._is_checked = False
                self._report(execution, Interrupted(began=True, ran=False))  # it may be marked
                raise
            if is_ours:
                if not self._buffer.admit(execution):
                    self._report(execution, Interrupted(began=True, ran=False))
            else:
                self._buffer.dropped(execution)
                self._buffer.settled([execution])
                self._forget_claims([execution])

    def _give_back_hoarded(self) -> None:
        hoarded = self._buffer.hoarded(self._buffer_size)
        if any(each.task.suspect for each in hoarded):
            self._no_suspects_until = time.monotonic() + NO_SUSPECTS_SECONDS
        if hoarded:
            self._floors.forget()  # they lie below
        for each in hoarded:
            self._report(each, Interrupted(began=each.is_marked, ran=False))

    def _compare_with_database(self) -> None:
        """The other way round it would go wrong: what is claimed or settled between two looks is only this thread's, or
        final, if the database is asked first.
        """
        rows = self._session.run(self._statements.held(self._lease.worker_id))
        theirs = {(task_id, token) for _, task_id, token, _ in rows}
        held = {(each.id, each.task.fencing_token): each for each in self._buffer.held()}
        self._drop([each for key, each in held.items() if key not in theirs])
        self._give_back_unknown([row for row in rows if (row[1], row[2]) not in held])
        self._is_checked = True
        self.on_ready()
        self._buffer.poke()

    def _drop(self, lost: Sequence[Execution]) -> None:
        self._buffer.settled(self._buffer.remove_waiting(lost))
        self._forget_claims(lost)
        executing = set(self._buffer.executing())
        for each in lost:
            if each in executing:
                each.interrupt(StopInterrupt)
                log.warning("lease.lost", task=each.task.name, task_id=each.id, token=each.task.fencing_token)

    def _forget_claims(self, executions: Sequence[Execution]) -> None:
        """Those of which nothing is held any more."""
        for worker_id, claim_id in {(each.task.worker_id, each.claimed.claim_id) for each in executions}:
            self._session.run(self._statements.forget_claim(worker_id, claim_id))

    def _give_back_unknown(self, unknown: Sequence[Row]) -> None:
        """Claims whose answer was lost on its way; or what the finisher has settled since the database was asked, which
        the guard of the release leaves alone. So a claim goes only if nothing of it is held.
        """
        if not unknown:
            return
        held = [(task_id, token) for _, task_id, token, _ in unknown]
        released = self._session.run(self._statements.release(self._lease.worker_id, held, self._clock.now()))
        for claim_id in {row[0] for row in unknown}:
            self._session.run(self._statements.forget_claim(self._lease.worker_id, claim_id))
        if released:
            log.warning("claim.recovered", tasks=len(released))
