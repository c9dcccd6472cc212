"""Takes tasks from the queues into the buffer, promotes what has become due, and gives back what it cannot run soon.

Wakes by a ring, by a slot that gets free, when the next task is due, and by the poll. Inserts ring only for who has
said that it sleeps: so it says that, and looks once more, before it does, and takes it back when it is busy. After a
lost connection it first compares what it holds with what the database says it holds: an answer may have been lost, or
the tasks themselves.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import psycopg

from tasklib.clock import time
from tasklib.connection import is_about_rows, is_connection_lost
from tasklib.duties.apart import Aside, first_line
from tasklib.duties.settling import Decided, Settling
from tasklib.log import log
from tasklib.options import DEFAULT_QUEUE
from tasklib.outcomes import Expired, Failed, Interrupted, Rules, StopInterrupt, decide
from tasklib.statements import MixedClaim
from tasklib.states import State
from tasklib.worker.buffer import HOARD_SECONDS
from tasklib.worker.execution import MOST_CONTAINED_RUNS, Execution
from tasklib.worker.problems import problem_of
from tasklib.worker.settler import grouped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from uuid import UUID

    from tasklib.duties.promoter import Promoter
    from tasklib.outcomes import HeldTask, Outcome
    from tasklib.registry import Registry
    from tasklib.statements import Claim, ClaimedTask, Place, Statement, WorkerStatements
    from tasklib.task import TaskFunction
    from tasklib.worker.buffer import Buffer
    from tasklib.worker.clock import DatabaseClock
    from tasklib.worker.doorbell import Doorbell
    from tasklib.worker.finisher import Finisher
    from tasklib.worker.lease import Lease
    from tasklib.worker.processes import Processes
    from tasklib.worker.session import Session
    from tasklib.worker.tally import Found, Tally

PROMOTE_EVERY_SECONDS = 0.5  # at most, while there is other work
SUSPECTS_EVERY_SECONDS = 0.25  # a worker that is never idle looks for suspects
HOPELESS_SUSPECTS_EVERY_SECONDS = 10.0  # also if it is not likely to be empty soon
NO_SUSPECTS_SECONDS = 1.0  # after one that could not be alone as soon as it had seemed
NO_HOPE_SECONDS = 60.0  # after one that could not be alone at all
CLAIM_LIMIT = 1_000  # the most that the statement takes
ELSEWHERE_EVERY_SECONDS = 1.0  # a worker whose queues are never empty looks at others
MOST_LIKELY_QUEUES = 10  # with a claim of their own at each look; others share one
SHARES = 10  # a claim from many queues takes at most a tenth of its limit from each
CAREFUL_PAUSE_SECONDS = 0.05  # until it is looked again whether one that waits for something can start
LOCKED_PAUSE_SECONDS = 0.1  # until one is tried again whose row somebody has locked
BUSY_SECONDS = 0.05  # of work without a break: then nobody needs to ring
BREAK_SECONDS = 0.001  # of sleep
NAP_SECONDS = 0.001  # between two looks while every look finds something, and nobody rings
FLOOR_SECONDS = 1.0  # what was submitted before it may be overlooked for so long
FLOOR_MARGIN_SECONDS = 0.001  # a date is no exact number
MOST_CLAIM_TRIES = 50  # until a row that is refused must have been found
LATE_COMMIT_SECONDS = 10.0  # a claim that was given up may still commit: it is looked for once more


AnyClaim = TypeVar("AnyClaim", "Claim", MixedClaim)


class Reading(NamedTuple):
    """The names and queues of the functions in a registry, read at one revision of it."""

    revision: int
    names: list[str]
    likely_queues: list[str]


class Menu:
    """What this worker serves: queues (None: all) and task functions (None: all that are registered)."""

    def __init__(self, registry: Registry, queues: Sequence[str] | None, names: Iterable[str] | None) -> None:
        self._registry = registry
        self.queues = None if queues is None else list(dict.fromkeys(queues))
        self._names = None if names is None else sorted(set(names))
        self._found: list[str] = []
        self._is_coroutine: dict[TaskFunction[..., Any], bool] = {}
        self._reading: Reading | None = None

    def names(self) -> list[str]:
        return self._read().names if self._names is None else self._names

    def likely_queues(self) -> list[str]:
        """Those that are looked at one by one: the given ones, or those of the functions; and those in which much was
        found. At least one: a worker of no functions promotes all the same, and it is a claim that says what is due.
        Only a few: their number is the users' to choose.
        """
        return self._read().likely_queues

    @property
    def serves_others(self) -> bool:
        """Queues that are not among the likely ones."""
        return self.queues is None or len(self.queues) > len(self.likely_queues())

    def is_busy(self, queue: str) -> None:
        """It is worth a look of its own from now on."""
        if queue not in self.likely_queues():
            self._found = [queue, *self._found][:MOST_LIKELY_QUEUES]
            self._reading = None

    def _read(self) -> Reading:
        """The last reading, while it holds. It is replaced as a whole: several threads ask."""
        reading, revision = self._reading, self._registry.revision
        if reading is None or reading.revision != revision:
            registered = sorted(each.name for each in self._registry)
            names = set(self._names if self._names is not None else registered)
            own = (each.task_options.queue for each in self._registry if each.name in names)
            declared = list(dict.fromkeys(self.queues if self.queues is not None else own)) or [DEFAULT_QUEUE]
            if len(declared) > MOST_LIKELY_QUEUES:
                declared = [DEFAULT_QUEUE] if DEFAULT_QUEUE in declared else declared[:1]
            reading = Reading(revision, registered, list(dict.fromkeys([*declared, *self._found])))
            self._reading = reading
        return reading

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
        if function not in self._is_coroutine:
            # One with a process of its own has a thread that attends to it.
            is_alone = function.task_options.isolation == "process"
            self._is_coroutine[function] = not is_alone and is_async(function.function)
        return function, self._is_coroutine[function]

    def functions(self) -> list[TaskFunction[..., Any]]:
        names = set(self.names())
        return [each for each in self._registry if each.name in names]

    def isolated(self) -> list[TaskFunction[..., Any]]:
        """Those that want a process of their own."""
        return [each for each in self.functions() if each.task_options.isolation == "process"]


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
        processes: Processes,
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
        self._processes = processes
        self._settling = Settling(session, statements)
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
        self._has_elsewhere = False  # tasks were ready in queues that are not among the likely ones
        self._elsewhere_at = 0.0
        self._reached = ""  # the last queue of those that was looked at
        self._floors = Floors()
        self._compare_at = math.inf
        self._compared = 0  # the connection on which that was done
        self._aside: Aside[UUID] = Aside()  # tasks whose rows PostgreSQL refuses to change
        self._has_suspects = False  # as the last look found
        self._suspects_at = 0.0
        self._hopeless_at = time.monotonic() + HOPELESS_SUSPECTS_EVERY_SECONDS
        self._is_last_resort = False  # the suspect that waits was claimed though the worker did not seem empty soon
        self._no_suspects_until = 0.0
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
        """Also suspects, which may wait for a worker that has nothing else to do."""
        return self._may_have_more or self._has_suspects

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
        if not self._is_checked or time.monotonic() >= self._compare_at or self._is_other_connection():
            self._compare_with_database()
            self._compare_at = math.inf
        self._give_back_hoarded()
        self._start_careful()
        self._take_suspects()
        if self._is_due() and self._has_room():
            self._was_due = self._promote()
        pause = self._look()
        if self._has_suspects:
            self._take_suspects()
        return min(pause, CAREFUL_PAUSE_SECONDS) if self._buffer.has_careful() else pause

    def _is_other_connection(self) -> bool:
        """The database may be another one by now, which lacks what the last one had committed."""
        self._session.connection()
        return self._session.connections != self._compared

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
        # Others first, once in a while: queues that are never empty must not keep them waiting.
        looked = time.monotonic() >= self._elsewhere_at and self._menu.serves_others
        is_short = self._claim_elsewhere(room // 2 or room) if looked else True
        left = room - (self.claimed - before)
        is_short = (self._claim_from(self._menu.likely_queues(), left) if left else False) and is_short
        left = room - (self.claimed - before)
        if is_short and self._has_elsewhere and not looked:
            is_short = self._claim_elsewhere(left)
        self.is_drained = is_short and self.claimed == before
        if not is_short:
            self._may_have_more = True
        return is_short

    def _claim_elsewhere(self, room: int) -> bool:
        """From the queues that are not among the likely ones; it goes on where it was left off. True: there was room
        left when they had no more.
        """
        self._elsewhere_at = time.monotonic() + ELSEWHERE_EVERY_SECONDS
        began_after, has_turned = self._reached, not self._reached
        while room:
            claim = self._claim_page(room)
            room -= len(claim.tasks)
            self._reached = claim.reached or ""
            if has_turned and (claim.reached is None or claim.reached >= began_after > ""):
                break
            has_turned = has_turned or claim.reached is None
        return room > 0

    def _claim_page(self, room: int) -> MixedClaim:
        """From the next few queues. One that has much is worth a claim of its own from now on."""
        share = max(room // SHARES, 1)
        statement = self._statements.claim_each(
            self._lease.worker_id, self._reached, self._menu.names(), room, share=share, served=self._menu.queues,
            apart_from=self._menu.likely_queues(), aside=self._aside.current(),
        )  # fmt: skip
        try:
            claim = self._take(statement)
        except psycopg.Error as error:
            if error.sqlstate is None or not is_about_rows(error):
                raise
            claim = self._claim_one_by_one(room, share)
        for queue, count in Counter(task.held.queue for task in claim.tasks).items():
            if count >= share > 1:
                self._menu.is_busy(queue)
        return claim

    def _claim_one_by_one(self, room: int, share: int) -> MixedClaim:
        """PostgreSQL refuses to change a row of one of these queues: which one, is found out for each by itself."""
        ready = self._session.run(self._statements.ready_queues())
        served, likely = self._menu.queues, self._menu.likely_queues()
        others = [each for each in ready if (served is None or each in served) and each not in likely]
        tasks: list[ClaimedTask] = []
        for queue in (each for each in others if each > self._reached):
            if len(tasks) >= room:
                return MixedClaim(tasks, None, queue)
            tasks += self._claim(queue, min(share, room - len(tasks))).tasks
        return MixedClaim(tasks, None, None)

    def _claim_from(self, queues: Sequence[str], room: int) -> bool:
        """True: there was room left when they had no more. Another queue first each time: a full one must not keep the
        others waiting.
        """
        self._turn += 1
        first = self._turn % len(queues)
        is_short, left = True, room
        for queue in [*queues[first:], *queues[:first]]:
            has_floor = self._floors.of(queue) is not None
            claim = self._claim(queue, left)
            left -= len(claim.tasks)
            is_short = is_short and claim.is_short and not has_floor
            if left == 0:
                return False
        return is_short

    def _claim(self, queue: str, limit: int) -> Claim:
        likely = self._menu.likely_queues() if self._menu.serves_others else None

        def statement(limit: int) -> Statement[Claim]:
            return self._statements.claim(
                self._lease.worker_id, queue, self._menu.names(), limit, queues=likely, floor=self._floors.of(queue),
                aside=self._aside.current(),
            )  # fmt: skip

        claim = self._send_claim(statement, limit, queue=queue)
        if claim.is_short:
            self._has_suspects, self._has_elsewhere = claim.has_suspects, claim.has_elsewhere
        self._floors.note(queue, claim)
        self._note_due(claim)
        return claim

    def _send_claim(
        self, statement: Callable[[int], Statement[AnyClaim]], limit: int, *, queue: str | None
    ) -> AnyClaim:
        """From one queue; None: suspects, of all. What comes is in the buffer afterwards. While PostgreSQL refuses to
        change one of the rows: half as many, until it is the first that is refused. That one is set aside.
        """
        accused: UUID | None = None
        tries = 0  # since the last one that was found
        while True:
            try:
                return self._take(statement(limit), queue)
            except psycopg.Error as error:
                tries += 1
                if error.sqlstate is None or not is_about_rows(error) or tries == MOST_CLAIM_TRIES:
                    raise
                self._floors.forget()  # the first is to be the same for the next statement
                if limit == 1:
                    accused = self._accuse(queue, accused, error) or accused
                    tries = 0 if accused in self._aside.current() else tries
                limit = max(limit // 2, 1)

    def _take(self, statement: Statement[AnyClaim], queue: str | None = None) -> AnyClaim:
        asked_at = time.monotonic()
        try:
            claim = self._session.run(statement)
        except psycopg.Error:
            self._is_checked = False  # it may have been done all the same, or may still be
            self._compare_at = time.monotonic() + LATE_COMMIT_SECONDS
            raise
        seconds = time.monotonic() - asked_at
        if claim.tasks and claim.answered_at is not None:
            self._clock.set(claim.answered_at, asked_at)
            self._add(claim.tasks)
            self.claimed += len(claim.tasks)
        by_queue = grouped(claim.tasks, lambda task: task.held.queue) if queue is None else {queue: claim.tasks}
        for each, tasks in by_queue.items():
            self._tally.claimed(each, tasks, self._found, seconds)
        return claim

    def _accuse(self, queue: str | None, accused: UUID | None, error: psycopg.Error) -> UUID | None:
        """The first in the queue, or of the suspects. If it was the first before the claim, too, it was refused. None:
        somebody else has it at the moment, and may be finding out the same.
        """
        queues = self._menu.queues if queue is None else [queue]
        head = self._session.run(
            self._statements.head(queues, self._menu.names(), suspects=queue is None, aside=self._aside.current())
        )
        if head is None:
            return None
        task_id, name = head
        if task_id == accused:
            self._aside.add(task_id)
            log.error("task.not_claimed", task=name, task_id=task_id, error=first_line(error))
            return None
        return task_id

    def _note_due(self, claim: Claim) -> None:
        """A claim that came back full says nothing of it: who always has work asks as often as who polls."""
        if not claim.is_short:
            self._promote_at = min(self._promote_at, time.monotonic() + self._poll_seconds)
        else:
            self._promote_at = time.monotonic() + (math.inf if claim.due_seconds is None else claim.due_seconds)

    def _take_suspects(self) -> None:
        """Before other tasks, and beside any backlog: a suspect had begun once. It needs a worker that is empty, or a
        process of its own. A worker that can offer neither soon leaves it to the others, unless nobody else seems to be
        able to either.
        """
        now = time.monotonic()
        is_due = self._has_suspects or now >= self._suspects_at
        if not self.is_open or not is_due or (now <= self._no_suspects_until and not self._buffer.is_idle()):
            return
        room = self._buffer.room_for_suspects(
            processes_are_ready=self._processes.is_ready(), processes_are_offered=self._processes.is_offered,
            is_last_resort=now >= self._hopeless_at,
        )  # fmt: skip
        if not room:
            return
        self._is_last_resort = not self._buffer.is_empty_soon()
        self._suspects_at = now + SUSPECTS_EVERY_SECONDS
        self._hopeless_at = now + HOPELESS_SUSPECTS_EVERY_SECONDS

        def statement(limit: int) -> Statement[MixedClaim]:
            return self._statements.claim_suspects(
                self._lease.worker_id, self._menu.queues, self._menu.names(), limit, self._aside.current()
            )

        claim = self._send_claim(statement, room, queue=None)
        self._has_suspects = len(claim.tasks) == room
        if self._has_suspects:
            self._processes.prepare()  # there may be more, and one after the other would take long

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
        """What cannot start as it is: its arguments are fetched, it is marked as running, and it is given a process."""
        if not self._buffer.has_careful():
            return
        self._offer_processes()
        while (execution := self._buffer.next_careful()) is not None:
            if execution.is_late(self._clock.now()):
                self._report(execution, Expired())
            elif self._is_loaded(execution) and self._is_marked(execution) and not self._buffer.admit(execution):
                self._report(execution, Interrupted(began=execution.is_marked, ran=False))
        self._buffer.poke()  # what was held back for them may start

    def _offer_processes(self) -> None:
        """To suspects for which the worker is not empty at once."""
        for each in self._buffer.waiting_suspects():
            each.may_have_own_process = each.task.crash_count <= MOST_CONTAINED_RUNS and self._processes.can_contain(
                each.function
            )
            each.is_patient = each.may_have_own_process or self._is_last_resort
            if each.may_have_own_process and self._processes.is_ready():
                each.give_own_process()
            elif each.may_have_own_process and not self._buffer.is_empty_soon():
                self._processes.prepare()

    def _is_loaded(self, execution: Execution) -> bool:
        """False: it was reported or dropped. One that cannot be fetched fails by itself."""
        if execution.is_loaded:
            return True
        try:
            found = self._session.run(self._statements.arguments(execution.task))
        except (psycopg.Error, MemoryError) as error:
            if isinstance(error, psycopg.Error) and is_connection_lost(error):
                self._report(execution, Interrupted(began=False, ran=False))
                raise
            problem = problem_of(error, code="UNREADABLE_ARGUMENTS")
            self._report(execution, Failed(problem, may_retry=False))
            return False
        if found is None:
            self._forget(execution)
            return False
        execution.load(*found)
        return True

    def _is_marked(self, execution: Execution) -> bool:
        """False: it was reported, dropped, or has to wait."""
        if not execution.needs_mark:
            return True
        execution.started_at = self._clock.now()
        try:
            marks = self._finisher.mark([execution], self._session)
        except psycopg.Error:
            self._is_checked = False
            self._report(execution, Interrupted(began=True, ran=False))  # it may be marked
            raise
        if execution.id not in marks:
            self._forget(execution)
        elif not execution.is_marked and not self._buffer.put_back(execution, LOCKED_PAUSE_SECONDS):
            self._report(execution, Interrupted(began=False, ran=False))
        return execution.is_marked

    def _forget(self, execution: Execution) -> None:
        """It is somebody else's by now."""
        self._buffer.dropped(execution)
        self._buffer.settled([execution])
        self._forget_claims([execution])

    def _give_back_hoarded(self) -> None:
        hoarded = self._buffer.hoarded(self._buffer_size)
        if any(each.must_be_alone and not each.may_have_own_process for each in hoarded):
            pause = NO_HOPE_SECONDS if self._is_last_resort else NO_SUSPECTS_SECONDS
            self._no_suspects_until = time.monotonic() + pause
        if hoarded:
            self._floors.forget()  # they lie below
        for each in hoarded:
            self._report(each, Interrupted(began=each.is_marked, ran=False))

    def _compare_with_database(self) -> None:
        """The other way round it would go wrong: what is claimed or settled between two looks is only this thread's, or
        final, if the database is asked first.
        """
        rows = self._session.run(self._statements.held(self._lease.worker_id))
        theirs = {(task.id, task.fencing_token) for task, _ in rows}
        held = {(each.id, each.task.fencing_token): each for each in self._buffer.held()}
        self._drop([each for key, each in held.items() if key not in theirs])
        self._give_back_unknown([row for row in rows if (row[0].id, row[0].fencing_token) not in held])
        self._compared = self._session.connections
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

    def _give_back_unknown(self, unknown: Sequence[tuple[HeldTask, int]]) -> None:
        """Claims whose answer was lost on its way. Tasks whose end was lost by a failover: for this database they are
        still running. Or what the finisher has settled since the database was asked, which the guard leaves alone; so
        a claim goes only if nothing of it is held.
        """
        if not unknown:
            return
        now = self._clock.now()
        decided = [Decided(task, decide(task, lost_end(task), now, Rules()), task.state) for task, _ in unknown]
        released = self._settling.settle(self._lease.worker_id, decided, now)
        for claim_id in {claim_id for _, claim_id in unknown}:
            self._session.run(self._statements.forget_claim(self._lease.worker_id, claim_id))
        if released:
            log.warning("claim.recovered", tasks=released)


def lost_end(task: HeldTask) -> Interrupted:
    """The database says that this worker holds it, and the worker does not know it."""
    has_begun = task.state == State.RUNNING
    return Interrupted(began=has_begun, ran=has_begun, reason="what became of it was lost")
