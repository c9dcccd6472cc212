"""What a supervisor sees of a worker, and what it can tell it: the observer, rings, pauses, readiness."""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import tasklib
from tasklib import TaskWorker
from tasklib.database import Database
from tasklib.runtime.observer import WorkerObserver
from tasklib.worker import buffer as buffer_module
from tasklib.worker.finish_loop import FinishLoop
from tests.support.pooler import PROGRAM, WHY_NOT, pgbouncer
from tests.support.working import get, renew_now, running, time_out, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from uuid import UUID

    from tasklib.embedded import EmbeddedPostgres
    from tasklib.worker.execution import Execution
    from tasklib.worker.run import WorkerRun
    from tests.support.raw_sql import Conn


class Notes(WorkerObserver):
    """Writes down what it is told, in that order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.lives: list[tuple[str, UUID]] = []
        self.limits: dict[UUID, float] = {}
        self.told_limits: list[float] = []
        self.backends: dict[str, int] = {}
        self.roles: list[tuple[str, str]] = []
        self.beats = 0
        self.counted = (0, 0)

    def named(self, worker_id: str) -> None:
        self.names.append(worker_id)

    def began(self, execution: Execution) -> None:
        self.lives.append(("began", execution.id))
        self.limits[execution.id] = execution.must_end_by - execution.started

    def ended(self, execution: Execution) -> None:
        self.lives.append(("ended", execution.id))

    def settled(self, executions: Collection[Execution]) -> None:
        self.lives += [("settled", each.id) for each in executions]

    def must_end_by(self, execution: Execution, moment: float) -> None:
        self.limits[execution.id] = moment - time.monotonic()
        self.told_limits.append(self.limits[execution.id])

    def beat(self) -> None:
        self.beats += 1

    def counts(self, waiting: int, executing: int) -> None:
        self.counted = (waiting, executing)

    def connected(self, role: str, backend_pid: int) -> None:
        self.backends[role] = backend_pid
        self.roles.append(("connected", role))

    def disconnected(self, role: str) -> None:
        del self.backends[role]
        self.roles.append(("disconnected", role))

    def life_of(self, task_id: UUID) -> list[str]:
        return [word for word, id_ in self.lives if id_ == task_id]


class Held:
    """A task that executes until the test lets it go."""

    def __init__(self, **options: Any) -> None:
        self.began, self._release = threading.Event(), threading.Event()
        self.function = tasklib.task(name="held", **options)(self._run)

    def _run(self) -> str:
        self.began.set()
        while not self._release.is_set():
            time.sleep(0.002)
        return "undisturbed"

    def let_go(self) -> None:
        self._release.set()


def run_of(worker: TaskWorker) -> WorkerRun:
    assert worker._run is not None
    return worker._run


def look_twice(worker: TaskWorker) -> None:
    """The second round of the claim loop has begun after this call."""
    loop = run_of(worker).loops["claim"]
    before = loop.beats
    worker.ring()
    wait_until(lambda: loop.beats > before, "the claim loop to look")
    worker.ring()
    wait_until(lambda: loop.beats > before + 1, "the claim loop to look again")


def outcomes(conn: Conn) -> list[str]:
    return [word for (word,) in conn.execute("select outcome from tasklib.task_attempts order by finished_at")]


# --- what it sees of a task ---


def test_every_task_begins_ends_and_is_settled_once(client: tasklib.Client, config: tasklib.Config) -> None:
    """In this order, sync and async, completed and failed: a supervisor relies on it after a crash."""

    @tasklib.task(max_retries=0)
    def sync(n: int) -> int:
        return 1 // (n % 3)

    @tasklib.task(name="async", max_retries=0)
    async def asynchronous(n: int) -> int:
        return 1 // (n % 3)

    ids = client.submit_many([each.new(n) for each in (sync, asynchronous) for n in range(30)])
    notes = Notes()
    TaskWorker(config, concurrency=4, observer=notes).run_until_empty_sync()
    assert {state: len(client.list_tasks(state=state)) for state in ("completed", "failed")} == {
        "completed": 40,
        "failed": 20,
    }
    assert all(notes.life_of(task_id) == ["began", "ended", "settled"] for task_id in ids)


def test_settled_is_said_when_it_is_committed(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, database_url: str
) -> None:
    """A worker that dies between the end of a function and the commit has a task that must run again."""
    held, notes = Held(), Notes()
    with psycopg.connect(database_url) as holder, running(config, observer=notes):
        task_id = client.submit_task(held.function)
        wait_until(lambda: get(client, task_id).state == "running", "running")
        holder.execute("select from tasklib.tasks where id = %s for update", [task_id])
        held.let_go()
        wait_until(lambda: "ended" in notes.life_of(task_id), "its end")
        assert get(client, task_id).state == "running"
        assert notes.life_of(task_id) == ["began", "ended"]
        holder.rollback()
        wait_until(lambda: "settled" in notes.life_of(task_id), "its settlement")
        assert get(client, task_id).state == "completed"


@pytest.mark.parametrize("how", ["timeout", "cancel"])
def test_a_task_that_ignores_its_soft_stop_has_a_moment_to_be_killed_at(
    client: tasklib.Client, config: tasklib.Config, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """After its timeout or the cancel, and the delta. Until its process dies it keeps its slot and its lease."""
    lease = 600  # nothing else wakes the loop that looks for stuck tasks
    hard = tasklib.Config(config.database_url, timeout_delta_seconds=0.2, lease_seconds=lease)
    began, release = threading.Event(), threading.Event()
    told: list[str] = []

    @tasklib.task(timeout_seconds=60 if how == "timeout" else None)
    def stubborn() -> str:
        while not release.is_set():
            try:
                while not release.is_set():
                    began.set()
                    time.sleep(0.002)
            except tasklib.TaskInterrupt as interrupt:
                told.append(type(interrupt).__name__)
        return "done after all"

    notes = Notes()
    with caplog.at_level(logging.ERROR, "tasklib"), running(hard, observer=notes) as worker:
        task_id = client.submit_task(stubborn)
        assert began.wait(20)
        assert notes.limits[task_id] == (pytest.approx(60.2) if how == "timeout" else math.inf)
        if how == "cancel":
            client.cancel_task(task_id)
            worker.look_for_cancel(task_id)
            wait_until(lambda: bool(notes.told_limits), "the limit")
            assert notes.told_limits[0] <= 0.2
        else:
            time_out(worker)
        wait_until(lambda: "task.stuck" in caplog.text, "the error")
        assert notes.limits[task_id] <= 0  # once more, now that the moment has come
        assert len(notes.told_limits) == (2 if how == "cancel" else 1)
        if how == "timeout":
            renew_now(worker)
        task = get(client, task_id)
        assert (task.state, task.worker_id, task.fencing_token) == ("running", worker.worker_id, 1)
        assert len(run_of(worker).buffer.executing()) == 1
        release.set()
        assert wait_final(client, task_id).result == {"value": "done after all"}
    assert told == ["TimeoutInterrupt" if how == "timeout" else "CancelInterrupt"]


# --- what it sees of the worker ---


def test_a_worker_that_was_given_up_for_dead_says_its_new_name(
    client: tasklib.Client, conn: Conn, config: tasklib.Config
) -> None:
    """What it holds from then on is found under that name."""
    notes = Notes()
    with running(config, observer=notes) as worker:
        first = worker.worker_id
        assert notes.names == [first]
        conn.execute("update tasklib.workers set died_at = clock_timestamp()")
        renew_now(worker)
        assert worker.worker_id != first
        assert notes.names == [first, worker.worker_id]


def test_the_claim_loop_is_heard_while_it_waits(
    client: tasklib.Client, config: tasklib.Config, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pause of a minute, and for an answer that does not come: neither is a hang."""
    monkeypatch.setattr("tasklib.runtime.loop.LONGEST_SILENCE_SECONDS", 0.02)
    notes = Notes()
    with running(config, observer=notes, listen=False, poll_interval_seconds=60) as worker:
        assert worker.wait_until_ready(20)
        loop = run_of(worker).loops["claim"]
        wait_until(lambda: loop.beats > 1, "the pause")
        rounds, heard = loop.beats, notes.beats
        wait_until(lambda: notes.beats > heard + 3, "beats in the pause")
        assert loop.beats == rounds
        with psycopg.connect(database_url) as holder:
            holder.execute("lock table tasklib.tasks in access exclusive mode")
            worker.ring()
            wait_until(lambda: not loop._woken.is_set(), "the round")
            heard = notes.beats
            wait_until(lambda: notes.beats > heard + 3, "beats while it waits for the answer")
            assert loop.beats == rounds


@pytest.mark.direct("is about process ids of the server")
def test_the_server_processes_of_a_worker_are_known(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """After a kill the supervisor ends them first, tasks' own ones too: a claim in flight could still commit."""
    during: dict[str, int] = {}
    notes = Notes()

    @tasklib.task
    def writes() -> None:
        tasklib.current_task().connection.execute("select 1")
        during.update(notes.backends)

    @tasklib.task
    async def writes_async() -> None:
        await (await tasklib.current_task().async_connection()).execute("select 1")
        during.update(notes.backends)

    with running(config, observer=notes):
        ids = [client.submit_task(each) for each in (writes, writes_async)]
        for task_id in ids:
            assert wait_final(client, task_id).state == "completed"
        wait_until(lambda: {"claim", "lease", "finish", "duties", "listen"} == set(notes.backends), "all connections")
        assert {f"task {task_id}" for task_id in ids} <= set(during)
        assert len(set(during.values())) == len(during)
        first = notes.backends["claim"]
        conn.execute("select pg_terminate_backend(%s)", [first])
        wait_until(lambda: notes.backends.get("claim", first) != first, "another connection")
        assert notes.roles.count(("disconnected", "claim")) == 1
        named = conn.execute(
            "select application_name, pid from pg_stat_activity where application_name like 'tasklib:%'"
            " and datname = current_database()"
        ).fetchall()
        assert {(f"tasklib:{role}", pid) for role, pid in notes.backends.items()} == set(named)
    assert notes.backends == {}


@pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)
def test_behind_a_pooler_no_server_process_is_named(
    config: tasklib.Config, tasklib_postgres: EmbeddedPostgres, direct: Callable[[str], str]
) -> None:
    """The process id that a pooler makes up may belong to another session."""
    notes = Notes()
    with pgbouncer(tasklib_postgres.dsn) as pooler:
        pooled = tasklib.Config(pooler.pooled(direct(config.database_url)))
        with running(pooled, observer=notes, listen=False) as worker:
            assert worker.wait_until_ready(20)
            assert (notes.backends["claim"], notes.backends["lease"]) == (0, 0)


def test_what_waits_and_what_executes_is_counted(
    client: tasklib.Client, config: tasklib.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the snapshots of a worker."""
    monkeypatch.setattr(buffer_module, "STUCK_SECONDS", 60.0)
    held, notes = Held(), Notes()
    client.submit_many([held.function.new() for _ in range(4)])
    with running(config, observer=notes, concurrency=1, buffer_size=2):
        wait_until(lambda: notes.counted == (2, 1), "the counts")
        held.let_go()


# --- what it is told ---


def test_who_listens_for_a_worker_rings_it_and_tells_it_of_cancels(
    client: tasklib.Client, config: tasklib.Config
) -> None:
    """With listen=False and a poll of a minute, a new task and a cancel are found at once."""
    slow = tasklib.Config(config.database_url, lease_seconds=600)
    held = Held()
    worker = TaskWorker(slow)
    worker.ring()  # it does not run yet: nothing happens
    worker.look_for_cancel(client.submit(held.function.new()))
    with running(slow, listen=False, poll_interval_seconds=60) as worker:
        assert held.began.wait(20)
        (first,) = client.list_tasks()
        client.cancel_task(first.id)
        worker.look_for_cancel(first.id)
        assert wait_final(client, first.id).state == "cancelled"
        claimer, buffer = run_of(worker).claimer, run_of(worker).buffer
        wait_until(lambda: buffer.is_idle() and not claimer.expects_more, "it to have nothing more to do")
        held.let_go()
        second = client.submit_task(held.function)
        worker.ring()
        assert wait_final(client, second).state == "completed"


def test_a_paused_worker_claims_nothing_and_goes_on_executing(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits in its buffer is given back at no cost; when it is resumed, all of it runs."""
    monkeypatch.setattr(buffer_module, "STUCK_SECONDS", 60.0)
    monkeypatch.setattr("tasklib.worker.claimer.STUCK_SECONDS", 60.0)
    held, notes = Held(), Notes()
    quick = tasklib.task(name="quick")(lambda: None)
    with running(config, concurrency=1, buffer_size=3, observer=notes) as worker:
        first = client.submit_task(held.function)
        assert held.began.wait(20)
        others = client.submit_many([quick.new() for _ in range(3)])
        wait_until(lambda: run_of(worker).buffer.counts() == (3, 1), "a full buffer")
        worker.pause()
        wait_until(lambda: all(get(client, each).state == "pending" for each in others), "them to be given back")
        claimed = run_of(worker).claimer.claimed
        look_twice(worker)
        held.let_go()
        assert wait_final(client, first).state == "completed"
        assert run_of(worker).claimer.claimed == claimed
        assert [notes.life_of(each) for each in others] == [["ended", "settled"]] * 3
        assert [get(client, each).attempt for each in others] == [0, 0, 0]
        worker.resume()
        assert [wait_final(client, each).state for each in others] == ["completed"] * 3
    assert outcomes(conn) == ["COMPLETED"] * 4


def test_a_worker_that_is_paused_before_it_runs_is_ready_and_waits(
    client: tasklib.Client, config: tasklib.Config
) -> None:
    """A supervisor that is paused still replaces its workers."""
    ran = threading.Event()
    tasklib.task(name="job")(ran.set)
    client.submit_task("job")
    worker = TaskWorker(config, poll_interval_seconds=0.05)
    assert not worker.wait_until_ready(0)
    worker.pause()
    thread = threading.Thread(target=worker.run_sync)
    thread.start()
    try:
        assert worker.wait_until_ready(20)
        look_twice(worker)
        assert not ran.is_set()
        worker.resume()
        assert ran.wait(20)
    finally:
        worker.stop()
        thread.join(20)
    assert not worker.wait_until_ready(20)  # its run has ended


def test_what_is_marked_during_a_pause_is_given_back(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that must be `running` before its first line, and the pause comes in between: it has not run."""
    workers: list[TaskWorker] = []
    mark = FinishLoop.mark

    def mark_and_pause(self: FinishLoop, *given: Any) -> dict[UUID, bool]:
        marked = mark(self, *given)
        if workers:
            workers.pop().pause()
        return marked

    monkeypatch.setattr(FinishLoop, "mark", mark_and_pause)
    once = tasklib.task(name="once", on_crash="fail")(lambda: None)
    with running(config) as worker:
        workers.append(worker)
        task_id = client.submit_task(once)
        wait_until(lambda: outcomes(conn) == ["INTERRUPTED"], "it to be given back")
        assert get(client, task_id).state == "pending"
        wait_until(run_of(worker).buffer.is_idle, "the worker to know that it is written")
        worker.resume()
        assert wait_final(client, task_id).state == "completed"


def test_who_waits_for_a_worker_that_cannot_start_is_told(
    config: tasklib.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run has ended with an error, so no caller waits for ever."""

    def refuse(_: Database) -> None:
        raise tasklib.SchemaMissing("not here")

    monkeypatch.setattr(Database, "check_schema", refuse)
    worker = TaskWorker(config)
    seen: list[bool] = []
    waiting = threading.Thread(target=lambda: seen.append(worker.wait_until_ready()), daemon=True)
    waiting.start()
    with pytest.raises(tasklib.SchemaMissing):
        worker.run_sync()
    waiting.join(20)
    assert seen == [False]


# --- a lease that a supervisor keeps ---


def test_a_starved_worker_whose_lease_was_kept_goes_on(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, caplog: pytest.LogCaptureFixture
) -> None:
    """A task holds the GIL until the lease has run out, and its worker cannot renew; its supervisor's keeper does. When
    the GIL is free again nobody is told to stop, and the worker takes more.
    """
    ran = threading.Event()
    tasklib.task(name="next")(ran.set)

    @tasklib.task
    def greedy() -> None:
        run = run_of(worker)
        run.lease.valid_until = time.monotonic()  # for the worker; the row says otherwise, as if it had been kept
        run.loops["watch"].wake()
        ctypes.PyDLL(None).poll(None, 0, 200)  # a C function that does not release the GIL
        run.loops["lease"].wake()

    held = Held()
    with caplog.at_level(logging.WARNING, "tasklib"), running(config, concurrency=3) as worker:
        before = worker.worker_id
        bystander = client.submit_task(held.function)
        assert held.began.wait(20)
        assert wait_final(client, client.submit_task(greedy)).state == "completed"
        client.submit_task("next")
        assert ran.wait(20)
        held.let_go()
        assert wait_final(client, bystander).result == {"value": "undisturbed"}
        assert worker.worker_id == before
    assert outcomes(conn) == ["COMPLETED"] * 3
    assert "lease." not in caplog.text
