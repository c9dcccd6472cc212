"""A row that somebody has locked holds up nothing but itself: marks, lock extensions and progress pass it over."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import psycopg
import pytest

import tasklib
from tasklib.worker.finish_loop import FinishLoop
from tests.support.working import ManualWorker, get, running, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from uuid import UUID

    from tasklib.runtime.session import Session
    from tasklib.worker.execution import Execution
    from tests.support.raw_sql import Conn

pytestmark = pytest.mark.postgres_versions


@contextlib.contextmanager
def locked(database_url: str, *task_ids: UUID) -> Iterator[None]:
    with psycopg.connect(database_url) as other:
        other.execute("select from tasklib.tasks where id = any(%s) for update", [list(task_ids)])
        yield


@pytest.fixture
def worker(config: tasklib.Config) -> Iterator[ManualWorker]:
    """Its statements fail where they would wait: see the bound of its session."""
    made = ManualWorker(config, "manual")
    made.session.connection().execute("set lock_timeout = '100ms'")
    yield made
    made.close()


def test_a_mark_passes_over_a_locked_row(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, worker: ManualWorker
) -> None:
    """And says which one was not marked. What is somebody else's is not in the answer at all."""
    job = tasklib.task(name="job")(lambda: None)
    client.submit_many([job.new() for _ in range(3)])
    first, second, third = worker.claim("job")
    conn.execute("update tasklib.tasks set fencing_token = fencing_token + 1 where id = %s", [third.held.id])
    with locked(config.database_url, first.held.id):
        assert worker.start(first, second, third) == [second.held.id]
        assert get(client, first.held.id).state == "claimed"
    assert worker.start(first, second, third) == [first.held.id]


def test_a_lock_is_extended_beside_a_locked_row(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, worker: ManualWorker
) -> None:
    """And so is that of its claim."""
    job = tasklib.task(name="job")(lambda: None)
    client.submit_many([job.new() for _ in range(2)])
    (first,), (second,) = worker.claim("job", limit=1), worker.claim("job", limit=1)
    ids = [first.held.id, second.held.id]
    conn.execute("update tasklib.claims set locked_until = now()")
    with locked(config.database_url, ids[0]):
        assert worker.session.run(worker.statements.extend(worker.id, ids)) == [ids[1]]
    extended = conn.execute("select id from tasklib.claims where locked_until > now()").fetchall()
    assert (second.claim_id,) in extended


def test_progress_passes_over_a_locked_row(
    client: tasklib.Client, config: tasklib.Config, worker: ManualWorker
) -> None:
    """It is told again later."""
    job = tasklib.task(name="job")(lambda: None)
    client.submit_many([job.new() for _ in range(2)])
    tasks = worker.claim("job")
    said = [(each.held.id, each.held.fencing_token, '{"percent": 5}') for each in tasks]
    with locked(config.database_url, tasks[0].held.id):
        assert worker.session.run(worker.statements.note_progress(worker.id, said)) == [tasks[1].held.id]
    assert len(worker.session.run(worker.statements.note_progress(worker.id, said))) == 2
    assert get(client, tasks[0].held.id).progress == {"percent": 5}


def test_finishes_go_on_beside_a_long_task_whose_row_is_locked(
    client: tasklib.Client, config: tasklib.Config, database_url: str
) -> None:
    """By the task itself, on its own connection, before it was marked as running; what it says of its progress waits,
    too. The others end while the row is locked.
    """
    began, release = threading.Event(), threading.Event()

    @tasklib.task
    def holds_itself() -> None:
        current = tasklib.current_task()
        current.connection.execute("select from tasklib.tasks where id = %s for update", [current.id])
        current.progress(50, 100)
        began.set()
        release.wait(30)

    quick = tasklib.task(name="quick")(lambda: None)
    with running(config, concurrency=4):
        holder = client.submit_task(holds_itself)
        assert began.wait(20)
        for _ in range(5):
            wait_final(client, client.submit_task(quick))
        assert get(client, holder).completed_at is None
        release.set()
        found = wait_final(client, holder)
    assert (found.state, found.attempt) == ("completed", 1)


def test_one_that_must_be_marked_first_waits_for_its_row_alone(
    client: tasklib.Client, config: tasklib.Config, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts when the row is free; others start meanwhile, though there is one slot."""
    ran: list[str] = []
    once = tasklib.task(name="once", on_crash="fail")(lambda: ran.append("once"))
    other = tasklib.task(name="other")(lambda: ran.append("other"))
    really = FinishLoop.mark
    with psycopg.connect(database_url) as holder:

        def lock_and_mark(self: FinishLoop, executions: Sequence[Execution], session: Session) -> dict[UUID, bool]:
            """Between the claim, which would pass over a locked row, and the mark."""
            holder.execute(
                "select from tasklib.tasks where id = any(%s) for update", [[each.id for each in executions]]
            )
            monkeypatch.setattr(FinishLoop, "mark", really)
            return really(self, executions, session)

        monkeypatch.setattr(FinishLoop, "mark", lock_and_mark)
        with running(config):
            task_id = client.submit_task(once)
            wait_until(lambda: FinishLoop.mark is really, "its row is locked, and it could not be marked")
            wait_final(client, client.submit_task(other))
            assert ran == ["other"]
            assert get(client, task_id).state == "claimed"
            holder.rollback()
            assert wait_final(client, task_id).state == "completed"
    assert ran == ["other", "once"]
