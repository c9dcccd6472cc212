"""A database that goes away, comes back as another process, or is cut off in mid-statement: nothing exits, nothing is
lost, and a worker that may be thought dead starts nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
import pytest

import tasklib
from tasklib import embedded
from tasklib.runtime import loop
from tasklib.runtime.session import Session
from tasklib.worker import unwritten
from tests.support.proxy import CuttingProxy
from tests.support.working import get, quick_reaper, renew_now, run_of, running, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from uuid import UUID

    from tasklib.embedded import EmbeddedPostgres
    from tests.support.raw_sql import Conn


class Server:
    """A PostgreSQL that can be stopped and started again on the same data."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self.now: EmbeddedPostgres
        self.start()

    def start(self) -> None:
        self.now = self._stack.enter_context(embedded.postgres(self._directory / "data"))

    def stop(self, mode: Any = "fast") -> None:
        self.now.stop(mode)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def server(open_directory: Path) -> Iterator[Server]:
    made = Server(open_directory)
    yield made
    made.close()


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_an_outcome_reached_during_an_outage_is_kept(server: Server, mode: str) -> None:
    """The task ends while the database is away: it is completed when it is back, without a second run."""
    config = tasklib.Config(server.now.dsn)
    began, release = threading.Event(), threading.Event()
    ran: list[int] = []

    @tasklib.task
    def job(n: int) -> int:
        ran.append(n)
        began.set()
        release.wait(30)
        return n

    with tasklib.Client(config) as client, running(config, concurrency=2, poll_interval_seconds=0.2) as worker:
        worker_id = worker.worker_id
        held = client.submit_many([job.new(n=n) for n in range(2)])
        wait_until(lambda: len(ran) == 2, "both to begin")
        server.stop(mode)
        release.set()
        run = worker._run
        assert run is not None
        wait_until(lambda: not run.buffer.executing() and not run.finish_loop.outcome_writer.is_empty, "both to end")
        server.start()
        later = client.submit(job.new(n=7))
        for task_id in [*held, later]:
            assert wait_final(client, task_id).state == "completed"
        assert worker.worker_id == worker_id
        assert all(loop.is_alive() for loop in run.loops.values())
    assert sorted(ran) == [0, 1, 7]


def test_an_outage_costs_no_cpu_and_ends_soon(server: Server) -> None:
    """While the database is down a worker waits, with short pauses; when it is back, the first task runs. How soon is
    judged by `dev.py soak daemon outage`.
    """
    config = tasklib.Config(server.now.dsn)
    ran = threading.Event()
    tasklib.task(name="job")(ran.set)
    with tasklib.Client(config) as client, running(config):
        server.stop()
        began, used = time.monotonic(), time.process_time()
        time.sleep(2)  # the outage lasts
        used, lasted = time.process_time() - used, time.monotonic() - began
        server.start()
        client.submit_task("job")
        assert ran.wait(20)
    assert used < 0.1 * lasted  # of a core
    assert loop.LONGEST_PAUSE_SECONDS <= 2, "between two tries"


def test_a_worker_waits_for_a_database_that_is_not_there_yet(server: Server) -> None:
    """Started before its database: no exit, no error; and it can be stopped meanwhile."""
    config = tasklib.Config(server.now.dsn)
    ran = threading.Event()
    tasklib.task(name="job")(ran.set)
    with tasklib.Client(config) as client:
        client.submit_task("job")
        server.stop()
        worker = tasklib.TaskWorker(config)
        thread = threading.Thread(target=worker.run_sync)
        thread.start()
        wait_until(lambda: worker._run is not None, "the start")
        server.start()
        assert ran.wait(20)
        worker.stop()
        thread.join(20)
        server.stop()
        again = threading.Thread(target=worker.run_sync)
        again.start()
        wait_until(worker._running.locked, "the second start")
        worker.stop()
        again.join(20)
        assert not thread.is_alive()
        assert not again.is_alive()


def test_a_worker_that_cannot_renew_starts_nothing_and_stops_what_runs(
    config: tasklib.Config, database_url: str, client: tasklib.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Only its lease connection hangs. When its lease is over it has told its tasks to stop and takes no more, and
    another worker has them.
    """
    stopped: list[str] = []
    began = threading.Event()

    @tasklib.task
    def forever() -> None:
        began.set()
        try:
            while True:
                time.sleep(0.005)
        except BaseException as error:
            stopped.append(type(error).__name__)
            raise

    with caplog.at_level(logging.WARNING, "tasklib"), running(config) as worker:
        task_id = client.submit_task(forever)
        assert began.wait(20)
        wait_until(lambda: get(client, task_id).state == "running", "running")
        first_id = worker.worker_id
        with psycopg.connect(database_url) as blocker:
            # A lock that renewals wait for, and nothing else does.
            blocker.execute("select 1 from tasklib.workers where worker_id = %s for update", [first_id])
            run = run_of(worker)
            session = run.basis.sessions["lease"]
            patient, session._timeout_seconds = session._timeout_seconds, 0.3  # it gives up a renewal soon

            def is_told_when_time_is_up() -> bool:
                """The lease runs out now. A renewal that was answered meanwhile was sent before the lock."""
                run.lease.valid_until = min(run.lease.valid_until, time.monotonic())
                run.loops["lease"].wake()
                run.loops["watch"].wake()
                return bool(stopped)

            assert stopped == []
            wait_until(is_told_when_time_is_up, "the task to be told to stop")
            assert not run.reconciliation.may_start()
            assert get(client, task_id).worker_id in {first_id, None}
            session._timeout_seconds = patient
        assert stopped == ["StopInterrupt"]
        wait_until(lambda: "lease.expired" in caplog.text, "the error")
        client.cancel_task(task_id)


def test_a_worker_that_was_given_up_for_dead_starts_anew(
    config: tasklib.Config, client: tasklib.Client, conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    """Under a new id; its late outcome changes nothing, and it goes on working."""
    began, release = threading.Event(), threading.Event()
    ran: list[int] = []

    @tasklib.task
    def job(n: int) -> int:
        ran.append(n)
        began.set()
        while not release.is_set():
            with contextlib.suppress(tasklib.StopInterrupt):  # it will not stop
                release.wait(0.01)
        return n

    with (
        caplog.at_level(logging.WARNING, "tasklib"),
        quick_reaper(config) as reaper,
        running(config, duties=False) as worker,
    ):
        task_id = client.submit_task(job, n=1)
        assert began.wait(20)
        wait_until(lambda: get(client, task_id).state == "running", "running")
        first_id = worker.worker_id
        conn.execute("update tasklib.workers set died_at = clock_timestamp() where worker_id = %s", [first_id])
        renew_now(worker)
        assert worker.worker_id != first_id
        reaper.run_once()
        assert get(client, task_id).state == "pending"
        release.set()
        wait_until(lambda: "lease.lost" in caplog.text, "the stale outcome to be dropped")
        task = wait_final(client, task_id)
    assert ran == [1, 1]
    assert (task.state, task.attempt, task.crash_count) == ("completed", 2, 1)


def test_connections_cut_in_mid_statement(
    database_url: str, client: tasklib.Client, conn: Conn, open_directory: Path
) -> None:
    """Answers are lost again and again, of claims, finishes, renewals and rings alike: each task completes once."""
    ran: list[int] = []
    job = tasklib.task(name="job")(lambda n: ran.append(n))  # noqa: PLW0108 - its parameter has a name
    with CuttingProxy(database_url, open_directory) as proxy:
        config = tasklib.Config(proxy.url)
        with running(config, concurrency=2):
            for round_ in range(10):
                ids = client.submit_many([job.new(n=10 * round_ + n) for n in range(10)])
                proxy.cut()
                for task_id in ids:
                    assert wait_final(client, task_id, seconds=40).state == "completed"
        assert proxy.cuts >= 5
    assert sorted(set(ran)) == list(range(100))
    rows = conn.execute(
        "select task_id from tasklib.task_attempts where outcome = 'COMPLETED' group by 1 having count(*) <> 1"
    ).fetchall()
    assert rows == []
    assert conn.execute("select count(*) from tasklib.claims").fetchone() == (0,)


def test_locks_are_extended_while_a_task_runs(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """A healthy long task is never reaped, though it runs for longer than its lock."""
    release = threading.Event()
    ran: list[int] = []

    @tasklib.task
    def long() -> None:
        ran.append(1)
        release.wait(30)

    task_id = client.submit_task(long)
    with quick_reaper(config) as reaper, running(config, duties=False) as worker:
        wait_until(lambda: get(client, task_id).state == "running", "running")
        (execution,) = run_of(worker).buffer.held()
        execution.locked_since -= timedelta(seconds=config.lock_timeout_seconds)  # all of the lock's time has passed
        conn.execute("update tasklib.tasks set locked_until = clock_timestamp()")
        conn.execute("update tasklib.claims set locked_until = clock_timestamp()")
        renew_now(worker)
        reaper.run_once()
        task = get(client, task_id)
        assert (task.state, task.fencing_token) == ("running", 1)
        release.set()
        wait_final(client, task_id)
    assert ran == [1]


class Held(NamedTuple):
    """A task that runs until it is released, and then finds its row held by somebody else."""

    id: UUID
    released: threading.Event
    holder: psycopg.Connection[Any]

    def give_free(self) -> None:
        self.holder.rollback()


@pytest.fixture
def hold(client: tasklib.Client, database_url: str) -> Iterator[Callable[[int], list[Held]]]:
    released: list[threading.Event] = []

    @tasklib.task(name="held")
    def wait(number: int) -> None:
        released[number].wait(20)

    with contextlib.ExitStack() as stack:

        def make(count: int) -> list[Held]:
            released.extend(threading.Event() for _ in range(count))
            ids = [client.submit(wait.new(number)) for number in range(count)]
            wait_until(lambda: all(get(client, each).state == "running" for each in ids), "all of them to run")
            made = []
            for task_id, event in zip(ids, released, strict=True):
                holder = stack.enter_context(psycopg.connect(database_url))
                holder.execute("select from tasklib.tasks where id = %s for update", [task_id])
                made.append(Held(task_id, event, holder))
            return made

        yield make
        for event in released:
            event.set()


def is_set_aside(caplog: pytest.LogCaptureFixture, held: Held) -> bool:
    return any("finish.blocked" in line and str(held.id) in line for line in caplog.text.splitlines())


def test_someone_who_holds_a_row_does_not_stop_the_rest(
    client: tasklib.Client,
    config: tasklib.Config,
    caplog: pytest.LogCaptureFixture,
    hold: Callable[[int], list[Held]],
) -> None:
    """A forgotten `select for update` on one task: others are finished meanwhile, and it is as soon as it can be."""
    job = tasklib.task(name="job")(lambda: None)
    with running(config):
        (held,) = hold(1)
        held.released.set()
        wait_until(lambda: "finish.blocked" in caplog.text, "its end to be set aside")
        for task_id in client.submit_many([job.new() for _ in range(10)]):
            wait_final(client, task_id)
        assert get(client, held.id).state == "running"
        held.give_free()
        assert wait_final(client, held.id).attempt == 1


def test_an_end_that_waits_for_a_row_keeps_nobody_waiting(
    client: tasklib.Client,
    config: tasklib.Config,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    hold: Callable[[int], list[Held]],
) -> None:
    """It is tried again and again, and never waited for: each time that would be a second in which nothing else is
    written.
    """
    monkeypatch.setattr(unwritten, "BLOCKED_PAUSE_SECONDS", 0.1)
    refused: list[str] = []
    run = Session.run

    def noting(self: Session, statement: Any, lock_seconds: float | None = None) -> Any:
        try:
            return run(self, statement, lock_seconds)
        except psycopg.errors.LockNotAvailable:
            refused.append(self._role)
            raise

    monkeypatch.setattr(Session, "run", noting)
    job = tasklib.task(name="job")(lambda: None)
    with running(config):
        (held,) = hold(1)
        held.released.set()
        wait_until(lambda: "finish.blocked" in caplog.text, "its end to be set aside")
        before = refused.count("finish")
        while caplog.text.count("finish.blocked") < 7:
            wait_final(client, client.submit(job.new()))
        assert refused.count("finish") == before, "a try has waited for the row"
        held.give_free()
        wait_final(client, held.id)


def test_ends_that_are_blocked_later_do_not_keep_back_the_first(
    client: tasklib.Client,
    config: tasklib.Config,
    caplog: pytest.LogCaptureFixture,
    hold: Callable[[int], list[Held]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody who locks row after row. Each is waited for a tenth of a second: all of them for longer than the first
    is set aside.
    """
    monkeypatch.setattr(unwritten, "BLOCKED_PAUSE_SECONDS", 0.2)
    with running(config, concurrency=12):
        held = hold(10)
        for each in held:
            each.released.set()
            wait_until(functools.partial(is_set_aside, caplog, each), "its end to be set aside")
            if each is held[0]:
                each.give_free()
        assert get(client, held[0].id).state == "completed"
        for each in held[1:]:
            each.give_free()
        for each in held[1:]:
            wait_final(client, each.id)


@pytest.mark.direct("is about locks of a session")
def test_a_held_claim_is_waited_for_too(
    client: tasklib.Client, config: tasklib.Config, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No row of a task is held, and still the end cannot be written: it is set aside like the others."""
    released = threading.Event()
    wait = tasklib.task(name="wait")(lambda: released.wait(20) and None)
    task_id = client.submit(wait.new())
    with running(config), psycopg.connect(database_url) as holder:
        wait_until(lambda: get(client, task_id).state == "running", "it to run")
        holder.execute("select from tasklib.claims for update")
        released.set()
        wait_until(lambda: "finish.blocked" in caplog.text, "its end to be set aside")
        holder.rollback()
        assert wait_final(client, task_id).attempt == 1


@pytest.mark.direct("is about LISTEN")
def test_the_listener_comes_back(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """Its backend is ended: it listens again, and hears what was sent meanwhile, with a poll of a minute."""
    ran: list[int] = []
    tasklib.task(name="job")(lambda: ran.append(1))
    with running(config, poll_interval_seconds=60):
        for round_ in range(3):
            conn.execute(
                """select pg_terminate_backend(pid) from pg_stat_activity
                    where datname = current_database() and application_name like '%:listen'"""
            )
            client.submit_task("job")
            wait_until(lambda wanted=round_ + 1: len(ran) >= wanted, "the task to run")  # type: ignore[misc]


def test_a_deaf_listener_is_told_of_and_polled_around(
    client: tasklib.Client, config: tasklib.Config, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LISTEN succeeds and hears nothing, as behind a transaction pooler: one warning, and the poll does the work."""
    from tasklib.worker import listener  # noqa: PLC0415

    monkeypatch.setattr(listener, "CHECK_WAIT_SECONDS", 0.3)
    monkeypatch.setattr(listener.Listener, "_hear", lambda *_: None)
    ran = threading.Event()
    tasklib.task(name="job")(ran.set)
    worker = tasklib.TaskWorker(config, poll_interval_seconds=0.1)
    thread = threading.Thread(target=worker.run_sync)
    with caplog.at_level(logging.WARNING, "tasklib"):
        thread.start()
        wait_until(lambda: "listener.deaf" in caplog.text, "the warning")
        client.submit_task("job")
        assert ran.wait(20)
    worker.stop()
    thread.join(20)
    assert not thread.is_alive()
