"""A worker for the length of a `with` block, and the parts of one for tests that force an interleaving."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import psycopg

import tasklib
from tasklib import TaskWorker
from tasklib.duties.reaper import Reaper
from tasklib.outcomes import Completed, Rules, decide
from tasklib.runtime.session import Session
from tasklib.sql import queries
from tasklib.statements import Completions, Started, WorkerDescription, WorkerStatements, settlement_json
from tools.waiting import START_SECONDS, WAIT_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from tasklib.outcomes import Outcome
    from tasklib.runtime.metrics import WorkerMetrics
    from tasklib.statements import ClaimedTask
    from tasklib.worker.run import WorkerRun


@contextlib.contextmanager
def running(config: tasklib.Config, **options: Any) -> Iterator[TaskWorker]:
    """In a thread of its own; stopped and waited for at the end, whose errors are raised here."""
    worker = TaskWorker(config, **{"poll_interval_seconds": 0.1, "grace_seconds": 10, **options})
    raised: list[BaseException] = []

    def run() -> None:
        try:
            worker.run_sync()
        except BaseException as error:  # noqa: BLE001 - raised again below
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: bool(raised) or is_listening(worker), "the worker to start", seconds=START_SECONDS)
        yield worker
    finally:
        if not worker._stop_asked.is_set():  # a second time would end the grace
            worker.stop()
        thread.join(60)
        assert not thread.is_alive(), "the worker did not stop"
        if raised:
            raise raised[0]


def is_listening(worker: TaskWorker) -> bool:
    """Registered, and, where it listens, heard, or deaf behind a pooler."""
    run = worker._run
    if run is None or not run.lease.is_valid():
        return False
    listener: Any = run.loops["listen"].service if "listen" in run.loops else None
    return listener is None or listener.is_heard or listener.is_deaf


def get(client: tasklib.Client, task_id: UUID) -> tasklib.Task:
    task = client.get_task(task_id)
    assert task is not None
    return task


def wait_final(client: tasklib.Client, task_id: UUID, *, seconds: float = WAIT_SECONDS) -> tasklib.Task:
    """The task, once nothing more will happen to it."""
    wait_until(lambda: tasklib.is_final(get(client, task_id)), f"task {task_id} to be final", seconds=seconds)
    return get(client, task_id)


def grown_up_reaper(config: tasklib.Config, session: Session) -> Reaper:
    """Its connection has lasted for a lease: before that it would not act."""
    session.connection()
    wait_until(lambda: session.age_seconds > config.lease_seconds, "one lease")
    return Reaper(config, session, WorkerStatements(config))


@contextlib.contextmanager
def quick_reaper(config: tasklib.Config, metrics: WorkerMetrics | None = None) -> Iterator[Reaper]:
    """A reaper whose rounds the test makes. Its own lease is the shortest, so that it acts soon. The workers may have
    longer ones: whether theirs have run out is in their rows, where a test can change it.
    """
    quick = replace(config, lease_seconds=0.3)
    with contextlib.closing(Session(quick, "reaper")) as session:
        session.connection()
        wait_until(lambda: session.age_seconds > quick.lease_seconds, "one lease")
        yield Reaper(quick, session, WorkerStatements(quick), metrics=metrics)


def run_of(worker: TaskWorker) -> WorkerRun:
    assert worker._run is not None
    return worker._run


def renew_now(worker: TaskWorker) -> None:
    """A whole round of its lease loop, which would be due a third of a lease after the last one."""
    loop = run_of(worker).loops["lease"]
    rounds = loop.beats + 2  # one may be under way

    def is_over() -> bool:
        loop.wake()
        return loop.beats >= rounds

    wait_until(is_over, "two rounds of the lease loop")


def time_out(worker: TaskWorker) -> None:
    """The timeouts of what executes pass now. So a test can give tasks timeouts that no slow machine exceeds."""
    run = run_of(worker)
    for each in [each for each in run.buffer.executing() if each.deadline < math.inf]:
        each.timeout_limit -= each.deadline - time.monotonic()
        each.deadline = time.monotonic()
    run.loops["watch"].wake()


def sleep_on(conn: psycopg.Connection[Any], *queues: str) -> bool:
    """What a worker does before it sleeps, `*` being all queues. True: nobody is about to commit."""
    row = psycopg.RawCursor(conn).execute(queries("doorbell", "tasklib")["arm"], [list(queues)]).fetchone()
    assert row is not None
    held, is_nobody_about_to_commit = row
    assert held == list(queues)
    return bool(is_nobody_about_to_commit)


class ManualWorker:
    """A worker whose every step the test takes: register, claim, start, finish. Its lease is a row like any other."""

    def __init__(self, config: tasklib.Config, name: str, *, lives: bool = True) -> None:
        self.statements = WorkerStatements(config)
        self.session = Session(config, name)
        self.id = f"{name}-{time.monotonic_ns()}"
        if lives:
            self.session.run(
                self.statements.register(WorkerDescription(self.id, name, "host", 1, "MainProcess", None, [], 1))
            )

    def claim(self, *names: str, queue: str = "default", limit: int = 10) -> list[ClaimedTask]:
        """No suspects."""
        return self.session.run(self.statements.claim(self.id, queue, list(names), limit)).tasks

    def claim_suspects(self, *names: str, queues: list[str] | None = None, limit: int = 10) -> list[ClaimedTask]:
        return self.session.run(self.statements.claim_suspects(self.id, queues, list(names), limit)).tasks

    def start(self, *claimed: ClaimedTask, is_contained: bool = False) -> list[UUID]:
        """Those that are marked as running now."""
        now = datetime.now(UTC)
        started = [Started(each.held.id, each.held.fencing_token, now, is_contained) for each in claimed]
        marks = self.session.run(self.statements.start(self.id, started))
        return [task_id for task_id, is_marked in marks.items() if is_marked]

    def finish(
        self,
        claimed: ClaimedTask,
        outcome: Outcome | None = None,
        rules: Rules | None = None,
        *,
        by: Literal["settle", "complete"] = "settle",
    ) -> bool:
        """False: the task was not this worker's any more. A success has a statement of its own, `complete`."""
        now = datetime.now(UTC)
        outcome = Completed('{"value": 1}') if outcome is None else outcome
        if by == "complete":
            assert isinstance(outcome, Completed)
            moment = [now.timestamp()]
            row = Completions([claimed.held.id], [claimed.held.fencing_token], moment, moment, [outcome.result])
            return bool(self.session.run(self.statements.complete(self.id, row, [claimed.claim_id])))
        settlement = decide(claimed.held, outcome, now, rules or Rules())
        json = settlement_json(claimed.held, settlement, started_at=now - timedelta(milliseconds=1), finished_at=now)
        return bool(self.session.run(self.statements.settle(self.id, [json], [claimed.claim_id])))

    def renew(self) -> bool:
        return self.session.run(self.statements.renew(self.id, [], stopping=False)) is not None

    def close(self) -> None:
        self.session.close()
