"""A pure model of the queue and the real database take the same random steps, and never disagree.

The model is a handful of Python values and no SQL; the database is driven by the very statements that clients, workers
and duties send. After every step all of the model is compared with all of the tables. Time never passes by waiting:
every moment in the tables and in the model is moved into the past by an hour.

TASKLIB_MODEL_EXAMPLES says how many histories are tried.
"""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, LiteralString, TypeVar

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import tasklib
from tasklib import outcomes
from tasklib.duties.reaper import Reaper
from tasklib.outcomes import (
    Cancelled,
    Completed,
    Crashed,
    Expired,
    Failed,
    HeldTask,
    Interrupted,
    Outcome,
    Problem,
    Rules,
    Snoozed,
    TimedOut,
    decide,
)
from tasklib.retry import Fixed
from tasklib.runtime.database_clock import DatabaseClock
from tasklib.runtime.outcome_writer import Decided, RecoveryWriter
from tasklib.runtime.session import Session
from tasklib.statements import Started, Statements, WorkerDescription, WorkerStatements, settlement_json
from tasklib.submission import new_task, terms_of
from tasklib.worker.reconciliation import lost_end
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from uuid import UUID

    from tests.support.raw_sql import Conn

pytestmark = pytest.mark.postgres_versions

T = TypeVar("T")
EXAMPLES = int(os.environ.get("TASKLIB_MODEL_EXAMPLES", "80"))
STEPS = 50
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]

# No moment that the test makes comes nearer than five minutes to a whole number of hours from now: an example that
# takes a few minutes cannot see one become due by itself.
HOUR = timedelta(hours=1)
RETRY_SECONDS = 1800.0
SNOOZE_SECONDS = 5400.0
FREE_RUN_SECONDS = 2700.0  # instead of 1 to 30 s, which may pass while the test runs
TIMEOUT_SECONDS = 1200.0
BURY_AFTER = 2
TIMEOUT_DELTA_SECONDS = 10.0

NAMES = ("alpha", "beta")
PROBLEM = Problem("BROKEN", "it broke", "ValueError: it broke")
TIMEOUT = Problem("TIMEOUT", "too late", "TimeoutError: too late")
CANCEL = Problem("CANCELLED", "not needed", "Cancel: not needed")
RULES = Rules(Fixed(RETRY_SECONDS), BURY_AFTER, TIMEOUT_DELTA_SECONDS)

# Those after which a task goes on come first: histories get longer that way.
OUTCOMES: tuple[Outcome, ...] = (
    Failed(PROBLEM, delay_seconds=0.0),
    Interrupted(began=False),
    Snoozed(0.0),
    Failed(PROBLEM),
    Interrupted(began=True),
    TimedOut(TIMEOUT),
    Snoozed(SNOOZE_SECONDS),
    Completed('{"value": 1}'),
    Cancelled(CANCEL),
    Failed(PROBLEM, may_retry=False),
    Expired(),
)

NOT_BEGUN = (Interrupted(began=False), Expired())

MOST_TASKS = 8
MOST_WORKERS = 3
TERMS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["alpha", "alpha", "beta"]),
        "queue": st.sampled_from(["default", "default", "other"]),
        "priority": st.integers(0, 1),
        "delay_minutes": st.sampled_from([0, 0, 0, 30, 90]),
        "expires_minutes": st.sampled_from([None, None, None, None, 45, 105, -15]),
        "max_retries": st.integers(0, 2),
        "on_crash": st.sampled_from(["retry", "retry", "fail"]),
        "timeout_seconds": st.sampled_from([None, TIMEOUT_SECONDS]),
    }
)


# --- The model -------------------------------------------------------------------------------------------------------


@dataclass
class ModelTask:
    id: UUID
    number: int  # in the order of the submits
    name: str
    queue: str
    priority: int
    max_retries: int
    on_crash: str
    timeout_seconds: float | None
    ready: bool
    wakes_at: datetime | None  # when it will be promoted
    expires_at: datetime | None
    state: str = "pending"
    next_retry_at: datetime | None = None
    is_final: bool = False
    retry_count: int = 0
    attempt: int = 0
    token: int = 0
    crash_count: int = 0
    strikes: int = 0
    suspect: bool = False
    error_code: str | None = None
    holder: str | None = None
    claim_id: int | None = None
    held_since: datetime | None = None
    lock_passed: bool = False
    is_asked: bool = False
    attempts: list[tuple[int, int, str, bool, str]] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        return self.state == "pending" or (self.state == "failed" and not self.is_final)

    @property
    def is_held(self) -> bool:
        return self.state in {"claimed", "running"}

    @property
    def due_at(self) -> datetime | None:
        times = [each for each in (self.wakes_at, self.expires_at) if each is not None]
        return min(times) if self.waits and times else None

    def has_expired(self, now: datetime) -> bool:
        return self.expires_at is not None and self.expires_at <= now

    def row(self) -> dict[str, Any]:
        return {
            "state": self.state, "ready": self.ready, "retry_count": self.retry_count, "attempt": self.attempt,
            "fencing_token": self.token, "crash_count": self.crash_count, "strikes": self.strikes,
            "suspect": self.suspect, "error_code": self.error_code, "worker_id": self.holder, "due_at": self.due_at,
            "next_retry_at": self.next_retry_at, "expires_at": self.expires_at, "is_final": self.is_final,
            "is_asked": self.is_asked, "lock_passed": self.lock_passed,
        }  # fmt: skip

    # --- what happens to it ---

    def claim(self, worker_id: str, claim_id: int, claimed_at: datetime) -> None:
        self.state, self.ready, self.next_retry_at, self.wakes_at = "claimed", False, None, None
        self.holder, self.claim_id, self.held_since, self.lock_passed = worker_id, claim_id, claimed_at, False
        self.token += 1

    def start(self, started_at: datetime) -> None:
        self.state, self.held_since = "running", started_at
        self.attempt += 1

    def settle(self, outcome: Outcome, now: datetime) -> None:
        if self.is_asked and not isinstance(outcome, Completed):
            began = getattr(outcome, "began", not isinstance(outcome, Expired))
            self._end("cancelled", "CANCELLED", outcome="CANCELLED" if began else None)
            return
        match outcome:
            case Completed():
                self._end("completed", None, outcome="COMPLETED")
            case Failed(problem, may_retry, delay):
                self._fail("FAILED", problem.code, now, RETRY_SECONDS if delay is None else delay, may_retry=may_retry)
            case TimedOut(problem):
                self._fail("TIMED_OUT", problem.code, now, RETRY_SECONDS)
            case Snoozed(delay):
                self._wait(now + timedelta(seconds=delay) if delay else None, outcome="SNOOZED")
            case Cancelled(problem):
                self._end("cancelled", problem.code, outcome="CANCELLED")
            case Interrupted(began=True) if self.on_crash == "fail":
                self._end("failed", "INTERRUPTED", outcome="INTERRUPTED")
            case Interrupted(began):
                until = now + timedelta(seconds=FREE_RUN_SECONDS) if began and self._has_run_free_often() else None
                self._wait(until, outcome="INTERRUPTED" if began else None, suspect=self.suspect)
            case Expired():
                self._end("expired", "EXPIRED", outcome=None)
            case _:
                raise AssertionError(outcome)

    def _has_run_free_often(self) -> bool:
        """Without this run, as it was when it was claimed."""
        attempts = self.attempt - (self.state == "running")
        return attempts - self.retry_count >= outcomes.PROMPT_FREE_RUNS

    def crash(self, now: datetime, *, worker_is_alive: bool) -> None:
        was_running = self.state == "running"
        if self.is_asked:
            self._end("cancelled", "CANCELLED", outcome="CANCELLED" if was_running else None)
            return
        if self.on_crash == "fail" and not was_running:
            self._wait(None, outcome=None, suspect=self.suspect)
            return
        outcome = ("LEASE_LOST" if worker_is_alive else "WORKER_FAILURE") if was_running else None
        is_strike = (was_running and self.suspect) or self._is_held_too_long(now)
        suspect = was_running or self.suspect or self.crash_count > 0
        self.crash_count += 1
        self.strikes += is_strike
        if self.on_crash == "fail":
            self._end("failed", "WORKER_CRASHED", outcome=outcome, suspect=suspect)
        elif is_strike and self.strikes >= BURY_AFTER:
            self._end("buried", "BURIED", outcome=outcome, suspect=suspect)
        else:
            self._wait(None, outcome=outcome, suspect=suspect)

    def cancel(self) -> str | None:
        if self.is_held:
            self.is_asked = True
            self.error_code = "CANCELLED"
            return "asked"
        if self.is_final:
            return None
        self._final("cancelled", "CANCELLED")
        return "cancelled"

    def retry(self, now: datetime) -> bool:
        if not self.is_final and self.state != "failed":
            return False
        self.retry_count = 0 if self.is_final else self.retry_count
        self.strikes, self.suspect, self.error_code = 0, False, None
        self.expires_at = None if self.has_expired(now) else self.expires_at
        self.state, self.is_final, self.next_retry_at = "pending", False, None
        self.ready, self.wakes_at = True, None
        return True

    def promote(self) -> None:
        self.ready, self.wakes_at = True, None

    def expire(self) -> None:
        self._final("expired", "EXPIRED")

    def grow_older(self) -> None:
        for name in ("wakes_at", "next_retry_at", "expires_at", "held_since"):
            moment = getattr(self, name)
            setattr(self, name, moment and moment - HOUR)

    def _fail(self, outcome: str, code: str, now: datetime, delay: float, *, may_retry: bool = True) -> None:
        if not may_retry or self.retry_count == self.max_retries:
            self._end("failed", code, outcome=outcome)
            return
        self._ended_attempt(outcome, will_retry=True)
        self._let_go()
        self.retry_count += 1
        self.state, self.error_code, self.suspect = "failed", code, False
        self.next_retry_at = now + timedelta(seconds=delay)
        self.ready, self.wakes_at = not delay, self.next_retry_at if delay else None

    def _wait(self, until: datetime | None, *, outcome: str | None, suspect: bool = False) -> None:
        self._ended_attempt(outcome, will_retry=True)
        self._let_go()
        self.state, self.suspect = "pending", suspect
        self.ready, self.wakes_at = until is None, until

    def _end(self, state: str, code: str | None, *, outcome: str | None, suspect: bool = False) -> None:
        self._ended_attempt(outcome, will_retry=False)
        self._let_go()
        self.suspect = suspect
        self._final(state, code)

    def _final(self, state: str, code: str | None) -> None:
        self.state, self.error_code, self.is_final = state, code, True
        self.ready, self.wakes_at, self.next_retry_at = False, None, None

    def _ended_attempt(self, outcome: str | None, *, will_retry: bool) -> None:
        if outcome is not None:
            assert self.holder is not None
            self.attempt += self.state == "claimed"
            self.attempts.append((self.attempt, self.token, outcome, will_retry, self.holder))

    def _let_go(self) -> None:
        self.holder = self.claim_id = self.held_since = None
        self.lock_passed = self.is_asked = False

    def _is_held_too_long(self, now: datetime) -> bool:
        assert self.held_since is not None
        allowed = (self.timeout_seconds or 0) + TIMEOUT_DELTA_SECONDS
        return self.timeout_seconds is not None and now > self.held_since + timedelta(seconds=allowed)


@dataclass
class ModelWorker:
    id: str
    is_registered: bool = True
    lease_ran_out: bool = False
    died_at: datetime | None = None
    # What the process itself believes to hold: (claim, token) to the task as it was claimed. It hears of nothing.
    memory: dict[tuple[int, int, UUID], HeldTask] = field(default_factory=dict)
    history: list[HeldTask] = field(default_factory=list)  # what it has settled, or lost

    @property
    def is_alive(self) -> bool:
        return self.is_registered and self.died_at is None and not self.lease_ran_out


@dataclass
class ModelClaim:
    worker_id: str
    task_ids: list[UUID]
    lock_passed: bool = False


# --- The machine -----------------------------------------------------------------------------------------------------


@dataclass
class Stage:
    """The database and the connections to it, for all examples."""

    conn: Conn
    workers: Session
    reaper: Reaper
    client: Statements
    statements: WorkerStatements

    def look(self) -> list[list[tuple[Any, ...]]]:
        """All that is compared with the model, in one round trip."""
        with self.conn.pipeline():
            cursors = [self.conn.execute(sql) for sql in EVERYTHING]
            return [cursor.fetchall() for cursor in cursors]


# Columns as in ModelTask.row; attempts as the model keeps them; workers; claims; and what is held without a claim.
EVERYTHING: tuple[LiteralString, ...] = (
    """
    select id, state, ready, retry_count, attempt, fencing_token, crash_count, strikes, suspect, error_code, worker_id,
           due_at, next_retry_at, expires_at, completed_at is not null, cancel_asked_at is not null,
           coalesce(locked_until < clock_timestamp(), false)
    from tasklib.tasks
    """,
    "select task_id, attempt, fencing_token, outcome, will_retry, worker_id from tasklib.task_attempts",
    "select worker_id, died_at is not null, lease_until < clock_timestamp() from tasklib.workers",
    "select id, worker_id, task_ids, locked_until < clock_timestamp() from tasklib.claims",
    """
    select id, worker_id from tasklib.tasks as task where worker_id is not null and not exists (
        select from tasklib.claims as claim where claim.worker_id = task.worker_id and task.id = any(task_ids))
    """,
)


class QueueMachine(RuleBasedStateMachine):
    """Rules ask for situations in which they do something, or most steps of a history would change nothing."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.tasks: dict[UUID, ModelTask] = {}
        self.workers: dict[str, ModelWorker] = {}
        self.claims: dict[int, ModelClaim] = {}
        self.clock = DatabaseClock()
        stage.conn.execute("delete from tasklib.tasks; delete from tasklib.claims; delete from tasklib.workers")
        asked_at = time.monotonic()
        row = stage.conn.execute("select clock_timestamp()").fetchone()
        assert row is not None
        self.clock.set(row[0], asked_at)

    @initialize(terms=st.lists(TERMS, min_size=2, max_size=5))
    def begin(self, terms: list[dict[str, Any]]) -> None:
        for _ in range(2):
            self.register()
        for each in terms:
            self.submit(each)

    # --- clients ---

    @precondition(lambda self: sum(not each.is_final for each in self.tasks.values()) < MOST_TASKS)
    @rule(terms=TERMS)
    def submit(self, terms: dict[str, Any]) -> None:
        now = self.now()
        delay, lifetime = terms["delay_minutes"], terms["expires_minutes"]
        scheduled_at = now + timedelta(minutes=delay) if delay else None
        expires_at = None if lifetime is None else now + timedelta(minutes=lifetime)
        own = {key: terms[key] for key in ("queue", "priority", "max_retries", "on_crash", "timeout_seconds")}
        options: Any = {**own, "scheduled_at": scheduled_at, "expires_at": expires_at}
        new = new_task(terms["name"], (), {}, terms_of(terms["name"], options))
        self.run(self.stage.client.submit(new))
        self.tasks[new.id] = ModelTask(
            id=new.id, number=len(self.tasks), name=terms["name"], ready=scheduled_at is None, wakes_at=scheduled_at,
            expires_at=expires_at, **own,
        )  # fmt: skip

    @precondition(lambda self: self.some_tasks(lambda task: task.is_held) or len(self.tasks) > MOST_TASKS)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A task that is held comes first: a cancelled one is of no more use to the rest of the history."""
        held = self.some_tasks(lambda task: task.is_held)
        is_any = not held or data.draw(st.booleans())
        task = draw_one(data, list(self.tasks.values()) if is_any else held)
        assert self.run(self.stage.client.cancel(task.id, None)) == task.cancel()

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        tasks = self.some_tasks(lambda task: task.is_final or task.state == "failed")
        task = draw_one(data, tasks or list(self.tasks.values()))
        assert self.run(self.stage.client.retry(task.id)) == task.retry(self.now())

    # --- workers ---

    @rule(data=st.data(), what=st.sampled_from(["register", "renew", "deregister"]))
    def come_and_go(self, data: st.DataObject, what: str) -> None:
        gone = [each for each in self.workers.values() if not each.is_alive]
        registered = [each for each in self.workers.values() if each.is_registered]
        if what == "renew" and gone:
            self.renew(draw_one(data, gone))
        elif what == "deregister" and len(registered) > 1:
            self.deregister(draw_one(data, registered))
        elif len(self.workers) - len(gone) < MOST_WORKERS:
            self.register()

    def register(self) -> None:
        worker = ModelWorker(f"worker-{len(self.workers)}")
        described = WorkerDescription(worker.id, "worker", "host", 1, "main", None, list(NAMES), 2)
        self.run(self.stage.statements.register(described))
        self.workers[worker.id] = worker

    def renew(self, worker: ModelWorker) -> None:
        """Who was given up for dead stays dead."""
        may_renew = worker.is_registered and worker.died_at is None
        answer = self.run(self.stage.statements.renew(worker.id, NAMES, stopping=False))
        assert (answer is not None) == may_renew
        worker.lease_ran_out &= not may_renew

    def deregister(self, worker: ModelWorker) -> None:
        """Not while it holds something."""
        self.run(self.stage.statements.deregister(worker.id))
        if not any(each.worker_id == worker.id for each in self.claims.values()):
            worker.is_registered = False

    @precondition(lambda self: self.some_tasks(lambda task: task.ready))
    @rule(data=st.data(), limit=st.integers(1, 3), then=st.sampled_from(["start", "finish", "start, finish"]))
    def work(self, data: st.DataObject, limit: int, then: str) -> None:
        """What workers do most of the time, in one step."""
        self.take(data, limit)
        if "start" in then and self.who_remembers():
            self.start(data)
        if "finish" in then and self.who_remembers():
            self.finish(data)

    @precondition(lambda self: self.some_tasks(lambda task: task.ready))
    @rule(data=st.data(), crash=st.sampled_from(["lease", "lock"]))
    def work_and_crash(self, data: st.DataObject, crash: str) -> None:
        self.take(data, 1)
        if self.who_remembers():
            self.start(data)
        if self.claims:
            self.crash(data, crash, then_reap=True)

    @precondition(lambda self: self.some_tasks(lambda task: task.ready))
    @rule(
        data=st.data(),
        limit=st.integers(1, 3),
        names=st.sampled_from([NAMES, NAMES, NAMES[:1]]),
        suspects=st.sampled_from([True, False, False]),
        answer_arrives=st.sampled_from([True, True, False]),
    )
    def claim(
        self, data: st.DataObject, limit: int, names: Sequence[str], *, suspects: bool, answer_arrives: bool
    ) -> None:
        self.take(data, limit, names=names, suspects=suspects, answer_arrives=answer_arrives)

    def take(
        self,
        data: st.DataObject,
        limit: int,
        *,
        names: Sequence[str] = NAMES,
        suspects: bool = False,
        answer_arrives: bool = True,
    ) -> None:
        """Also by a worker that is dead and does not know: what it takes must not be lost."""
        worker = draw_one(data, list(self.workers.values()))
        queue = draw_one(data, sorted({task.queue for task in self.some_tasks(lambda task: task.ready)}))
        now = self.now()
        wanted = [
            each
            for each in sorted(self.tasks.values(), key=lambda each: (-each.priority, each.number))
            if each.ready and each.queue == queue and each.name in names
            and suspects == each.suspect and not each.has_expired(now)
        ][:limit]  # fmt: skip
        statements = self.stage.statements
        claimed = (
            self.run(statements.claim_suspects(worker.id, [queue], names, limit)).tasks
            if suspects
            else self.run(statements.claim(worker.id, queue, names, limit)).tasks
        )
        assert [each.held.id for each in claimed] == [each.id for each in wanted]
        for each in claimed:
            self.tasks[each.held.id].claim(worker.id, each.claim_id, each.held.claimed_at)
            self.claims.setdefault(each.claim_id, ModelClaim(worker.id, [])).task_ids.append(each.held.id)
            assert self.tasks[each.held.id].token == each.held.fencing_token
            if answer_arrives:
                worker.memory[each.claim_id, each.held.fencing_token, each.held.id] = each.held

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def give_back_what_no_answer_told_of(self, data: st.DataObject) -> None:
        """What a worker does after a lost connection."""
        worker = self.workers[draw_one(data, sorted({each.worker_id for each in self.claims.values()}))]
        rows = [(claim, held.id, held.fencing_token) for held, claim in self.run(self.stage.statements.held(worker.id))]
        assert Counter(rows) == Counter(
            (claim_id, id_, self.tasks[id_].token)
            for claim_id, claim in self.claims.items()
            for id_ in claim.task_ids
            if claim.worker_id == worker.id and self.tasks[id_].holder == worker.id
        )
        known = {(id_, token) for _, token, id_ in worker.memory}
        unknown = [(claim, id_, token) for claim, id_, token in rows if (id_, token) not in known]
        tasks = [self.tasks[id_] for id_ in {id_ for _, id_, _ in unknown}]
        if not tasks:
            return
        lost = [self.forge(task, worker.id, task.token) for task in tasks]
        self.settle(worker, [(each, lost_end(each)) for each in lost])
        for claim_id in {claim for claim, _, _ in unknown}:
            self.run(self.stage.statements.forget_claim(worker.id, claim_id))
            self.forget(claim_id)

    @precondition(lambda self: self.who_remembers())
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Also what was taken away from it in the meantime: that changes nothing."""
        worker = draw_one(data, self.who_remembers())
        believed = draw_some(data, list(worker.memory.values()))
        started_at = self.now()
        ours = [each.id for each in believed if self.is_held(worker, each) and self.tasks[each.id].state == "claimed"]
        started = [Started(each.id, each.fencing_token, started_at) for each in believed]
        assert self.run(self.stage.statements.start(worker.id, started)) == dict.fromkeys(ours, True)
        for id_ in ours:
            self.tasks[id_].start(started_at)

    @precondition(lambda self: self.who_remembers())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """In one statement, with the end of its claims; also what was taken away from it in the meantime."""
        worker = draw_one(data, self.who_remembers())
        keys = draw_some(data, list(worker.memory))
        ended = [(worker.memory[key], data.draw(st.sampled_from(OUTCOMES))) for key in keys]
        self.settle(worker, ended, self.claims_ended_by(worker, keys))
        for key in keys:
            worker.history.append(worker.memory.pop(key))

    @precondition(lambda self: any(worker.history for worker in self.workers.values()))
    @rule(data=st.data(), outcome=st.sampled_from(OUTCOMES))
    def finish_again(self, data: st.DataObject, outcome: Outcome) -> None:
        """A worker that sends a second time what it has sent changes nothing, whoever holds the task now."""
        pairs = [(worker, held) for worker in self.workers.values() for held in worker.history]
        held_now = [(worker, held) for worker, held in pairs if self.tasks[held.id].is_held]
        worker, held = draw_one(data, held_now or pairs)
        assert not self.is_held(worker, held)
        self.settle(worker, [(held, outcome)])

    @precondition(lambda self: self.some_tasks(lambda task: task.is_held))
    @rule(data=st.data(), outcome=st.sampled_from(OUTCOMES), how=st.sampled_from(["worker", "past", "future"]))
    def finish_what_is_not_ours(self, data: st.DataObject, outcome: Outcome, how: str) -> None:
        """The token of another's claim, as after a claim that the server forgot in a crash; a token of the past or the
        future.
        """
        task = draw_one(data, self.some_tasks(lambda task: task.is_held))
        assert task.holder is not None
        others = [each for each in self.workers if each != task.holder]
        worker_id = draw_one(data, [*others, "a-stranger"]) if how == "worker" else task.holder
        token = task.token + {"worker": 0, "past": -1, "future": 1}[how]
        self.settle(ModelWorker(worker_id), [(self.forge(task, worker_id, token), outcome)])
        assert self.run(self.stage.statements.start(worker_id, [Started(task.id, token, self.now())])) == {}

    @precondition(lambda self: self.who_remembers())
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        worker = draw_one(data, self.who_remembers())
        ids = [each.id for each in draw_some(data, list(worker.memory.values()))]
        ours = {id_ for id_ in ids if self.tasks[id_].holder == worker.id}
        assert set(self.run(self.stage.statements.extend(worker.id, ids))) == ours
        for id_ in ours:
            self.tasks[id_].lock_passed = False
        for claim in self.claims.values():
            if claim.worker_id == worker.id and set(claim.task_ids) & set(ids):
                claim.lock_passed = False

    # --- time ---

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), what=st.sampled_from(["lease", "lock"]), then_reap=st.booleans())
    def crash(self, data: st.DataObject, what: str, *, then_reap: bool) -> None:
        """Or hang: nobody can tell."""
        claim_id = draw_one(data, sorted(self.claims))
        if what == "lease":
            self.run_out_of_lease(self.workers[self.claims[claim_id].worker_id])
        else:
            self.pass_lock(claim_id, self.claims[claim_id])
        if then_reap:
            self.reap()

    def run_out_of_lease(self, worker: ModelWorker) -> None:
        self.stage.conn.execute(
            "update tasklib.workers set lease_until = clock_timestamp() - interval '1 s' where worker_id = %s",
            [worker.id],
        )
        worker.lease_ran_out = True

    def pass_lock(self, claim_id: int, claim: ModelClaim) -> None:
        """Of what is held by this claim: a task that was finished and claimed again is in an older one too."""
        claim.lock_passed = True
        self.stage.conn.execute(
            "update tasklib.claims set locked_until = clock_timestamp() - interval '1 s' where id = %s", [claim_id]
        )
        held = [each.id for each in self.some_tasks(lambda task: task.claim_id == claim_id)]
        self.stage.conn.execute(
            "update tasklib.tasks set locked_until = clock_timestamp() - interval '1 s' where id = any(%s)", [held]
        )
        for id_ in held:
            self.tasks[id_].lock_passed = True

    @precondition(lambda self: self.some_tasks(lambda task: task.is_held or task.due_at is not None))
    @rule(
        an_hour=st.sampled_from([True, True, False]),
        then=st.sampled_from(["promote", "promote and expire", "expire and promote", "nothing"]),
    )
    def pass_time(self, an_hour: bool, then: str) -> None:
        if an_hour:
            self.pass_an_hour()
        if then == "expire and promote":
            self.expire()
        if "promote" in then:
            self.promote()
        if then == "promote and expire":
            self.expire()

    def pass_an_hour(self) -> None:
        """For everything but leases and locks: their owners look after them."""
        self.stage.conn.execute(
            "update tasklib.tasks set scheduled_at = scheduled_at - %(hour)s, due_at = due_at - %(hour)s,"
            " next_retry_at = next_retry_at - %(hour)s, expires_at = expires_at - %(hour)s,"
            " claimed_at = claimed_at - %(hour)s, started_at = started_at - %(hour)s",
            {"hour": HOUR},
        )
        self.stage.conn.execute("update tasklib.workers set died_at = died_at - interval '1 hour'")
        for task in self.tasks.values():
            task.grow_older()
        for worker in self.workers.values():
            worker.died_at = worker.died_at and worker.died_at - HOUR

    # --- duties ---

    def promote(self) -> None:
        now = self.now()
        due = self.some_tasks(lambda task: task.wakes_at is not None and task.wakes_at <= now)
        due = [each for each in due if not each.has_expired(now)]
        assert self.run(self.stage.statements.promote()).promoted == len(due)
        for task in due:
            task.promote()

    def expire(self) -> None:
        now = self.now()
        expired = self.some_tasks(lambda task: task.waits and task.has_expired(now))
        assert self.run(self.stage.statements.expire()) == len(expired)
        for task in expired:
            task.expire()

    @precondition(
        lambda self: (
            any(each.lock_passed for each in self.claims.values())
            or any(not self.workers[each.worker_id].is_alive for each in self.claims.values())
        )
    )
    @rule()
    def reap(self) -> None:
        self.stage.reaper._forget_at = 0.0  # it forgets the dead once a minute
        self.stage.reaper.run_once()
        now = self.now()
        for worker in self.workers.values():
            if worker.is_registered and worker.died_at is None and worker.lease_ran_out:
                worker.died_at = now
        for claim_id, claim in list(self.claims.items()):
            self.reap_claim(claim_id, claim, now)
        for worker in self.workers.values():
            holds = any(each.worker_id == worker.id for each in self.claims.values())
            if worker.is_registered and worker.died_at is not None and worker.died_at < now - HOUR and not holds:
                worker.is_registered = False

    def reap_claim(self, claim_id: int, claim: ModelClaim, now: datetime) -> None:
        worker = self.workers[claim.worker_id]
        is_dead = worker.is_registered and worker.died_at is not None
        if not (claim.lock_passed or is_dead):
            return
        for id_ in claim.task_ids:
            task = self.tasks[id_]
            if task.holder == worker.id and (task.lock_passed or is_dead):
                task.crash(now, worker_is_alive=worker.is_alive)
        self.forget(claim_id)

    def forget(self, claim_id: int) -> None:
        """Only if nothing of it is held."""
        claim = self.claims[claim_id]
        if all(self.tasks[id_].holder != claim.worker_id for id_ in claim.task_ids):
            del self.claims[claim_id]

    # --- they agree ---

    @invariant()
    def the_tables_agree(self) -> None:
        tasks, attempts, workers, claims, uncovered = self.stage.look()
        found = {row[0]: dict(zip(self.tasks[row[0]].row(), row[1:], strict=True)) for row in tasks}
        assert found == {id_: task.row() for id_, task in self.tasks.items()}
        assert sorted(attempts) == sorted((id_, *each) for id_, task in self.tasks.items() for each in task.attempts)
        assert sorted(workers) == sorted(
            (each.id, each.died_at is not None, each.lease_ran_out)
            for each in self.workers.values()
            if each.is_registered
        )
        assert {id_: (worker, sorted(ids), passed) for id_, worker, ids, passed in claims} == {
            id_: (claim.worker_id, sorted(claim.task_ids), claim.lock_passed) for id_, claim in self.claims.items()
        }
        assert uncovered == [], "nobody would ever recover these"

    # --- steps of the rules ---

    def settle(
        self, worker: ModelWorker, ended: Sequence[tuple[HeldTask, Outcome]], claim_ids: Sequence[int] = ()
    ) -> None:
        now = self.now()
        asked = self.run(self.stage.statements.asked_to_stop(worker.id, [held.id for held, _ in ended]))
        settlements, expected = [], []
        for held, outcome in ended:
            task, is_ours = self.tasks[held.id], self.is_held(worker, held)
            seen = held._replace(cancel_asked_at=now) if held.id in asked else held
            if is_ours and task.state == "running" and outcome in NOT_BEGUN:
                outcome = Interrupted(began=True)  # noqa: PLW2901 - what it has marked has begun
            settlement = decide(seen, outcome, now, RULES)
            settlements.append(settlement_json(seen, settlement, started_at=now, finished_at=now))
            if is_ours:
                expected.append(held.id)
                task.settle(outcome, now)
        answer = self.run(self.stage.statements.settle(worker.id, settlements, claim_ids))
        assert sorted(answer) == sorted(expected)
        for claim_id in claim_ids:
            self.claims.pop(claim_id, None)

    def claims_ended_by(self, worker: ModelWorker, keys: Sequence[tuple[int, int, UUID]]) -> list[int]:
        rest = {claim for claim, _, _ in worker.memory.keys() - set(keys)}
        return sorted({claim for claim, _, _ in keys} - rest)

    def is_held(self, worker: ModelWorker, believed: HeldTask) -> bool:
        task = self.tasks[believed.id]
        return task.holder == worker.id and task.token == believed.fencing_token

    def forge(self, task: ModelTask, worker_id: str, token: int) -> HeldTask:
        assert task.held_since is not None
        return HeldTask(
            task.id, task.name, task.queue, task.state, worker_id, token, task.attempt, task.retry_count,
            task.max_retries, task.crash_count, task.strikes, task.suspect, task.on_crash, task.timeout_seconds,
            task.held_since, None, task.expires_at, None,
        )  # fmt: skip

    def run(self, statement: Any) -> Any:
        return self.stage.workers.run(statement)

    def now(self) -> datetime:
        """Never ahead of the database: it counts from when the database's word arrived."""
        return self.clock.now()

    def some_tasks(self, is_meant: Callable[[ModelTask], bool]) -> list[ModelTask]:
        return [each for each in self.tasks.values() if is_meant(each)]

    def who_remembers(self) -> list[ModelWorker]:
        return [each for each in self.workers.values() if each.memory]


def draw_one(data: st.DataObject, items: list[T]) -> T:
    return items[0] if len(items) == 1 else data.draw(st.sampled_from(items))


def draw_some(data: st.DataObject, items: list[T]) -> list[T]:
    chosen = data.draw(st.sets(st.integers(0, len(items) - 1), min_size=1, max_size=min(3, len(items))))
    return [items[at] for at in sorted(chosen)]


@pytest.fixture
def stage(database_url: str, direct: Callable[[str], str]) -> Iterator[Stage]:
    """Leases of workers last longer than any run. The reaper's own patience, which is counted from its connection and
    from the start of the server, is the shortest that there is.
    """
    config = tasklib.Config(database_url, lease_seconds=3600.0)
    quick = tasklib.Config(
        database_url, lease_seconds=0.3, bury_after=BURY_AFTER, timeout_delta_seconds=TIMEOUT_DELTA_SECONDS
    )
    workers, duties = Session(config, "claim"), Session(quick, "duties")
    with psycopg.connect(direct(database_url), autocommit=True) as conn:
        duties.connection()
        wait_until(lambda: duties.age_seconds > 0.3 and _server_is_older_than(conn, 0.3), "the reaper may act")
        reaper = Reaper(quick, duties, WorkerStatements(quick))
        yield Stage(conn, workers, reaper, Statements(config), WorkerStatements(config))
        conn.execute("delete from tasklib.tasks; delete from tasklib.claims; delete from tasklib.workers")
    workers.close()
    duties.close()


def _server_is_older_than(conn: Conn, seconds: float) -> bool:
    row = conn.execute(
        "select pg_postmaster_start_time() < clock_timestamp() - %s * interval '1 s'", [seconds]
    ).fetchone()
    return row == (True,)


@pytest.mark.slow
def test_the_database_does_what_the_model_says(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever clients, workers, crashes and the clock do, in any order, the tables and the model agree after each
    step, and every task that a worker holds is in a claim.
    """

    def delay_of_free_run(task: HeldTask, prompt_runs: int) -> float:
        return FREE_RUN_SECONDS if outcomes.free_runs(task) >= prompt_runs else 0.0

    monkeypatch.setattr(outcomes, "delay_of_free_run", delay_of_free_run)
    machine: Any = functools.partial(QueueMachine, stage)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            phases=PHASES,
            suppress_health_check=list(HealthCheck),
        ),
    )


# --- What the machine has found, and leaves out until it is mended ----------------------------------------------------


@pytest.fixture
def task(stage: Stage) -> HeldTask:
    stage.workers.run(stage.client.submit(new_task("alpha", (), {}, terms_of("alpha", {}))))
    (claimed,) = stage.workers.run(stage.statements.claim("worker-1", "default", NAMES, 1)).tasks
    return claimed.held


def _row(stage: Stage, task: HeldTask) -> Any:
    found = stage.workers.run(stage.client.get(task.id))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "outcome", [Failed(PROBLEM), Snoozed(60.0), Interrupted(began=True)], ids=["fails", "snoozes", "stops"]
)
def test_a_cancel_that_the_worker_has_not_heard_of_is_not_forgotten(
    stage: Stage, task: HeldTask, outcome: Outcome
) -> None:
    """It was answered with "asked": the task must not run again, though its worker settled it before it heard."""
    now = datetime.now(UTC)
    assert stage.workers.run(stage.client.cancel(task.id, "ordered twice")) == "asked"
    decided = Decided(task, decide(task, outcome, now, RULES), None)
    assert RecoveryWriter(stage.workers, stage.statements).recover("worker-1", [decided], now) == 1
    row = _row(stage, task)
    assert (row.state, row.error_code, row.error) == ("cancelled", "CANCELLED", "Cancelled: ordered twice")


def test_a_cancel_after_the_decision_keeps_the_claim(stage: Stage, task: HeldTask) -> None:
    """The statement leaves the task as it is. If its worker dies before it has decided again, the claim is needed."""
    now = datetime.now(UTC)
    ((_, claim_id),) = stage.workers.run(stage.statements.held("worker-1"))
    assert stage.workers.run(stage.client.cancel(task.id, None)) == "asked"
    snoozed = settlement_json(task, decide(task, Snoozed(60.0), now, RULES), started_at=now, finished_at=now)
    assert stage.workers.run(stage.statements.settle("worker-1", [snoozed], [claim_id])) == []
    assert [claim for _, claim in stage.workers.run(stage.statements.held("worker-1"))] == [claim_id]


@pytest.mark.parametrize(
    ("reasons", "kept"),
    [
        ([None], "on request"),
        (["ordered twice"], "ordered twice"),
        (["ordered twice", None], "ordered twice"),
        (["ordered twice", ""], "ordered twice"),
        (["ordered twice", "by mistake"], "by mistake"),
    ],
)
def test_the_reason_of_a_cancel_is_kept_for_a_task_that_is_held(
    stage: Stage, task: HeldTask, reasons: list[str | None], kept: str
) -> None:
    """In the row from the request on, and in the attempt; the last reason that was given. A crash does not lose it."""
    earlier = "update tasklib.tasks set error = 'ValueError: before', error_code = 'X'"
    stage.conn.execute(earlier)
    for reason in reasons:
        assert stage.workers.run(stage.client.cancel(task.id, reason)) == "asked"
    assert _row(stage, task).error == f"Cancelled: {kept}"
    now = datetime.now(UTC)
    asked = task._replace(cancel_asked_at=now)
    crashed = decide(asked, Crashed("its worker died", alone=True), now, RULES)
    settlement = settlement_json(asked, crashed, started_at=now, finished_at=now)
    assert stage.workers.run(stage.statements.settle("worker-1", [settlement])) == [task.id]
    assert _row(stage, task).error == f"Cancelled: {kept}"
    attempts = stage.conn.execute("select outcome, error_message from tasklib.attempts where task_id = %s", [task.id])
    assert attempts.fetchall() == [("CANCELLED", kept)]


def test_a_cancel_outlives_a_claim_whose_answer_was_lost(stage: Stage, task: HeldTask) -> None:
    """As above: `held` says that it was asked, and who gives it back must not forget it."""
    assert stage.workers.run(stage.client.cancel(task.id, None)) == "asked"
    give_back(stage, task)
    assert _row(stage, task).state == "cancelled"


def test_a_suspect_stays_one_when_the_answer_to_its_claim_was_lost(stage: Stage, task: HeldTask) -> None:
    """It has not proved its innocence: it must run alone."""
    stage.conn.execute("update tasklib.tasks set suspect = true where id = %s", [task.id])
    give_back(stage, task)
    assert _row(stage, task).suspect


def give_back(stage: Stage, task: HeldTask) -> None:
    now = datetime.now(UTC)
    (held, _), *_ = stage.workers.run(stage.statements.held("worker-1"))
    assert held.id == task.id
    settlement = settlement_json(held, decide(held, lost_end(held), now, RULES), started_at=None, finished_at=now)
    stage.workers.run(stage.statements.settle("worker-1", [settlement]))
