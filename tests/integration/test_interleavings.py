"""Races, each forced with two connections: whoever comes second changes nothing, and nothing is lost between the two.

A writer is stopped in mid-statement by a lock on the row that it needs, and let go when the other has done its work.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import psycopg
import pytest

import tasklib
from tasklib.duties.reaper import Reaper
from tasklib.outcomes import Completed, Crashed, Failed, Interrupted, Problem, Rules, decide
from tasklib.runtime.outcome_writer import Decided, RecoveryWriter
from tasklib.runtime.session import Session
from tasklib.statements import settlement_json
from tasklib.worker import unwritten
from tasklib.worker.preparation import Preparation
from tests.support.raw_sql import Conn, literal
from tests.support.working import ManualWorker, get, grown_up_reaper, running, wait_final
from tools.waiting import wait_until, wait_until_blocked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from tasklib.statements import Claim, ClaimedTask

pytestmark = pytest.mark.postgres_versions

LEASE = 0.3


@pytest.fixture
def quick(config: tasklib.Config) -> tasklib.Config:
    """A lease that runs out while one waits."""
    return tasklib.Config(config.database_url, lease_seconds=LEASE)


@pytest.fixture
def job() -> Any:
    return tasklib.task(name="job")(lambda: None)


@pytest.fixture
def workers(quick: tasklib.Config) -> Iterator[Callable[[str], ManualWorker]]:
    made: list[ManualWorker] = []

    def make(name: str) -> ManualWorker:
        made.append(ManualWorker(quick, name))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def second() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@contextlib.contextmanager
def row_locked(url: str, sql: str) -> Iterator[None]:
    """The rows of the query are locked by another transaction for the length of the block."""
    with psycopg.connect(url) as holder:
        holder.execute(literal(sql))
        yield
        holder.commit()


def kill(conn: Conn, worker: ManualWorker) -> None:
    """What time does to a worker that no longer renews."""
    conn.execute(
        "update tasklib.workers set lease_until = clock_timestamp() - interval '1 s' where worker_id = %s", [worker.id]
    )


def claim_one(worker: ManualWorker) -> ClaimedTask:
    (claimed,) = worker.claim("job", limit=1) or worker.claim_suspects("job", limit=1)
    return claimed


def blocked(conn: Conn, worker: ManualWorker, call: Callable[[], Any], pool: ThreadPoolExecutor) -> Future[Any]:
    """The call, under way in another thread, at the point where it waits for a lock."""
    session = worker.session.connection()
    future = pool.submit(call)
    wait_until_blocked(conn, session)
    return future


# --- two claimers ---


def test_two_claimers_share_without_waiting(
    client: tasklib.Client, database_url: str, workers: Callable[[str], ManualWorker], job: Any
) -> None:
    """What one is claiming, the other passes over: it neither waits for it nor takes it too."""
    ids = client.submit_many([job.new() for _ in range(4)])
    a, b = workers("a"), workers("b")
    with psycopg.connect(database_url) as slow:
        # A claim whose transaction is not over yet.
        slow.execute("select 1 from tasklib.tasks where id = any(%s) for update", [ids[:2]])
        assert {task.held.id for task in b.claim("job")} == set(ids[2:])
    assert {task.held.id for task in a.claim("job")} == set(ids[:2])
    assert b.claim("job") == []


def test_a_claim_takes_what_is_still_ready(
    client: tasklib.Client,
    conn: Conn,
    database_url: str,
    workers: Callable[[str], ManualWorker],
    job: Any,
) -> None:
    """A row that another claimed between the scan and the lock is seen as it is then, and left."""
    (task_id,) = client.submit_many([job.new()])
    a, b = workers("a"), workers("b")
    claimed = claim_one(a)
    assert b.claim("job") == []
    a.finish(claimed)
    assert b.claim("job") == []
    assert get(client, task_id).fencing_token == 1


# --- what a claim says ---


def test_a_suspect_at_the_head_is_claimed_alone(
    client: tasklib.Client, conn: Conn, workers: Callable[[str], ManualWorker], job: Any
) -> None:
    """And other tasks are left to others, unlocked."""
    suspect, *others = client.submit_many([job.new() for _ in range(3)])
    conn.execute("update tasklib.tasks set suspect = true where id = %s", [suspect])
    assert [task.held.id for task in workers("a").claim_suspects("job")] == [suspect]
    assert [task.held.id for task in workers("b").claim("job")] == others


def test_suspects_are_claimed_from_the_queues_that_a_worker_serves(
    client: tasklib.Client, conn: Conn, workers: Callable[[str], ManualWorker], job: Any
) -> None:
    """By the names that it knows, the most urgent first, and as many as it asks for."""
    mail = [client.submit_task(job, queue="mail", priority=priority) for priority in (0, 5)]
    other = client.submit_task(job, queue="video")
    conn.execute("update tasklib.tasks set suspect = true")
    worker = workers("a")
    assert worker.claim_suspects("another") == []
    claimed = worker.claim_suspects("job", queues=["mail"], limit=1)
    assert [(task.held.id, task.held.queue) for task in claimed] == [(mail[1], "mail")]
    assert {task.held.id for task in worker.claim_suspects("job")} == {mail[0], other}


def test_a_short_claim_says_that_suspects_were_left(
    client: tasklib.Client, conn: Conn, workers: Callable[[str], ManualWorker], job: Any
) -> None:
    """Or its worker would sleep beside them."""
    first, suspect, *others = client.submit_many([job.new() for _ in range(4)])
    conn.execute("update tasklib.tasks set suspect = true where id = %s", [suspect])
    worker = workers("a")
    claim = worker.session.run(worker.statements.claim(worker.id, "default", ["job"], 4))
    assert ([task.held.id for task in claim.tasks], claim.is_short) == ([first, *others], True)
    assert claim.has_suspects
    assert worker.claim_suspects("job")
    assert not worker.session.run(worker.statements.claim(worker.id, "default", ["job"], 4)).has_suspects


def test_a_short_claim_says_what_a_sleeper_has_to_know(
    client: tasklib.Client, workers: Callable[[str], ManualWorker], job: Any
) -> None:
    """When the next task is due, and whether other queues have any; one that came back full is followed by another."""
    for delay in (60, 30, 90):
        client.submit_task(job, delay_seconds=delay)
    for queue in ("mail", "known", "video"):
        client.submit_task(job, queue=queue)
    client.submit_task(job)
    worker = workers("a")

    def claim(limit: int, queues: list[str] | None) -> Claim:
        return worker.session.run(worker.statements.claim(worker.id, "default", ["job"], limit, queues=queues))

    full = claim(1, ["default", "known"])
    assert (len(full.tasks), full.is_short, full.due_seconds, full.has_elsewhere) == (1, False, None, False)
    empty = claim(1, ["default", "known"])
    assert (empty.tasks, empty.is_short, empty.has_elsewhere) == ([], True, True)
    assert empty.due_seconds is not None
    assert 20 < empty.due_seconds <= 30
    assert not claim(1, ["default", "known", "mail", "video"]).has_elsewhere
    assert not claim(1, None).has_elsewhere


# --- claimer against reaper ---


def test_a_reaped_task_goes_to_another_and_the_first_cannot_finish_it(
    client: tasklib.Client,
    conn: Conn,
    quick: tasklib.Config,
    workers: Callable[[str], ManualWorker],
    job: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The stale worker's finish changes nothing, neither before nor after the other one's. The attempt that was cut
    short has its line in the log.
    """
    task_id = client.submit(job.new())
    a, b, grave = workers("a"), workers("b"), workers("grave")
    first = claim_one(a)
    assert a.start(first)
    reaper = grown_up_reaper(quick, grave.session)
    kill(conn, a)
    reaper.run_once()
    assert (get(client, task_id).state, get(client, task_id).suspect) == ("pending", True)
    (line,) = [record.getMessage() for record in caplog.records if "task.worker_failure" in record.getMessage()]
    assert f"task_id={task_id}" in line
    second = claim_one(b)
    assert second.held.fencing_token == first.held.fencing_token + 1
    assert a.finish(first) is False
    assert b.finish(second) is True
    assert a.finish(first) is False
    task = get(client, task_id)
    assert (task.state, task.attempt, task.crash_count, task.suspect) == ("completed", 2, 1, False)
    assert conn.execute("select outcome, attempt from tasklib.task_attempts order by attempt").fetchall() == [
        ("WORKER_FAILURE", 1),
        ("COMPLETED", 2),
    ]


def test_a_claim_that_commits_after_its_worker_was_declared_dead_is_recovered(
    client: tasklib.Client, conn: Conn, quick: tasklib.Config, workers: Callable[[str], ManualWorker], job: Any
) -> None:
    """It was in flight: the first round of the reaper could not see it, the next one does."""
    task_id = client.submit(job.new())
    a, grave = workers("a"), workers("grave")
    reaper = grown_up_reaper(quick, grave.session)
    kill(conn, a)
    reaper.run_once()
    claim_one(a)
    assert get(client, task_id).state == "claimed"
    reaper.run_once()
    assert (get(client, task_id).state, get(client, task_id).ready) == ("pending", True)


def test_a_reaper_that_read_before_a_start_decides_again(
    client: tasklib.Client, conn: Conn, workers: Callable[[str], ManualWorker], job: Any
) -> None:
    """It took the task for one that had not begun; meanwhile it was marked. Settled so, its attempt would be lost."""
    task_id = client.submit(job.new())
    a, grave = workers("a"), workers("grave")
    claimed = claim_one(a)
    assert a.start(claimed)
    row = conn.execute("select clock_timestamp()").fetchone()
    assert row is not None
    settlement = decide(claimed.held, Crashed("died"), row[0], Rules())  # of the state at the claim: `claimed`
    as_seen = settlement_json(claimed.held, settlement, started_at=None, finished_at=row[0], seen="claimed")
    assert grave.session.run(grave.statements.settle(a.id, [as_seen])) == []
    assert get(client, task_id).state == "running"


# --- stale finishers ---


By = Literal["settle", "complete"]  # the statement that writes a success alone, and the one that writes everything
both = pytest.mark.parametrize("by", ["settle", "complete"])


@both
def test_a_stale_finish_with_the_same_token_is_refused(
    client: tasklib.Client, conn: Conn, workers: Callable[[str], ManualWorker], job: Any, by: By
) -> None:
    """A claim that a crash of the server has undone: the next claim gets the same token, and the worker tells them
    apart.
    """
    task_id = client.submit(job.new())
    a, b = workers("a"), workers("b")
    first = claim_one(a)
    conn.execute(
        """update tasklib.tasks set state = 'pending', ready = true, worker_id = null, claimed_at = null,
                  locked_until = null, fencing_token = 0"""
    )
    second = claim_one(b)
    assert first.held.fencing_token == second.held.fencing_token
    assert a.finish(first, by=by) is False
    assert a.start(first) == []
    assert get(client, task_id).worker_id == b.id
    assert b.finish(second) is True


@both
def test_a_stale_finish_of_the_same_worker_is_refused(
    client: tasklib.Client, workers: Callable[[str], ManualWorker], job: Any, by: By
) -> None:
    """It gave the task back and got it again: its old outcome has the old token."""
    task_id = client.submit(job.new())
    a = workers("a")
    first = claim_one(a)
    assert a.finish(first, Interrupted(began=False))
    second = claim_one(a)
    assert a.finish(first, by=by) is False
    assert get(client, task_id).state == "claimed"
    assert a.finish(second) is True


@both
def test_nothing_is_finished_twice(
    client: tasklib.Client, workers: Callable[[str], ManualWorker], job: Any, by: By
) -> None:
    """An outcome that is sent again after a lost answer finds the task final."""
    task_id = client.submit(job.new())
    a = workers("a")
    claimed = claim_one(a)
    assert a.finish(claimed, Completed('{"value": 1}'), by=by)
    assert not a.finish(claimed, Completed('{"value": 2}'), by=by)
    assert get(client, task_id).result == {"value": 1}


def test_a_retry_without_delay_is_ready_at_once(
    client: tasklib.Client, workers: Callable[[str], ManualWorker], job: Any
) -> None:
    """Though the worker's clock is a little ahead of the database's."""
    task_id = client.submit(job.new())
    a = workers("a")
    claimed = claim_one(a)
    ahead = datetime.now(UTC) + timedelta(seconds=5)
    settlement = decide(claimed.held, Failed(Problem("X", "x", "x"), delay_seconds=0), ahead, Rules())
    json = settlement_json(claimed.held, settlement, started_at=ahead, finished_at=ahead)
    a.session.run(a.statements.settle(a.id, [json], [claimed.claim_id]))
    assert get(client, task_id).ready


# --- cancel ---


def test_cancel_before_the_claim_wins(client: tasklib.Client, workers: Callable[[str], ManualWorker], job: Any) -> None:
    """It will not run."""
    task_id = client.submit(job.new())
    assert client.cancel_task(task_id, "not needed") == "cancelled"
    assert workers("a").claim("job") == []
    task = get(client, task_id)
    assert (task.state, task.error_code, task.error) == ("cancelled", "CANCELLED", "Cancelled: not needed")


def test_cancel_that_waited_for_a_finish_changes_nothing(
    client: tasklib.Client,
    conn: Conn,
    database_url: str,
    second: ThreadPoolExecutor,
    workers: Callable[[str], ManualWorker],
    job: Any,
) -> None:
    """The finish commits while the cancel waits for the row: it stays completed."""
    task_id = client.submit(job.new())
    a, c = workers("a"), workers("c")
    claimed = claim_one(a)
    with row_locked(database_url, f"select 1 from tasklib.tasks where id = '{task_id}' for update"):
        finish = blocked(conn, a, lambda: a.finish(claimed), second)
        sql = f"select tasklib.cancel('{task_id}')"
        cancel = blocked(conn, c, lambda: c.session.connection().execute(literal(sql)).fetchone(), second)
    assert finish.result(20) is True
    assert cancel.result(20) == (None,)
    assert get(client, task_id).state == "completed"


def test_a_settlement_that_waited_for_a_cancel_is_decided_again(
    client: tasklib.Client,
    conn: Conn,
    database_url: str,
    second: ThreadPoolExecutor,
    workers: Callable[[str], ManualWorker],
    job: Any,
) -> None:
    """The cancel commits while the settlement, which was decided before, waits for the row: the task must not go on."""
    task_id = client.submit(job.new())
    a = workers("a")
    claimed = claim_one(a)
    now = datetime.now(UTC)
    released = Decided(claimed.held, decide(claimed.held, Interrupted(began=True), now, Rules()), None)
    writer = RecoveryWriter(a.session, a.statements)
    with row_locked(database_url, f"select tasklib.cancel('{task_id}', 'ordered twice')"):
        recovery = blocked(conn, a, lambda: writer.recover(a.id, [released], now), second)
    assert recovery.result(20) == 1
    task = get(client, task_id)
    assert (task.state, task.error) == ("cancelled", "Cancelled: ordered twice")
    assert [each.outcome for each in client.get_attempts(task_id)] == ["CANCELLED"]


def test_finish_after_a_cancel_was_asked_for_decides(
    client: tasklib.Client, workers: Callable[[str], ManualWorker], job: Any
) -> None:
    """What completes all the same is completed; the request is not left behind."""
    task_id = client.submit(job.new())
    a = workers("a")
    claimed = claim_one(a)
    assert client.cancel_task(task_id) == "asked"
    assert get(client, task_id).cancel_asked_at is not None
    assert a.finish(claimed) is True
    assert (get(client, task_id).state, get(client, task_id).cancel_asked_at) == ("completed", None)


def test_promote_that_waited_for_nobody_leaves_a_cancelled_task(
    client: tasklib.Client, conn: Conn, database_url: str, workers: Callable[[str], ManualWorker], job: Any
) -> None:
    """A promotion does not wait for a cancel that is under way, and does not undo one that is done."""
    first, second = (
        client.submit(job.options(delay_seconds=60).new()),
        client.submit(job.options(delay_seconds=60).new()),
    )
    conn.execute("update tasklib.tasks set due_at = now(), scheduled_at = now()")
    a = workers("a")
    with psycopg.connect(database_url) as other:
        other.execute("select tasklib.cancel(%s)", [first])
        assert a.session.run(a.statements.promote()).promoted == 1
        assert (get(client, first).ready, get(client, second).ready) == (False, True)
        other.commit()
    assert a.session.run(a.statements.promote()).promoted == 0
    assert get(client, first).state == "cancelled"
    assert [task.held.id for task in a.claim("job")] == [second]


def test_cancel_after_a_promotion_wins(
    client: tasklib.Client,
    conn: Conn,
    database_url: str,
    second: ThreadPoolExecutor,
    workers: Callable[[str], ManualWorker],
    job: Any,
) -> None:
    """It waits for the promotion, then cancels what has become ready."""
    task_id = client.submit(job.options(delay_seconds=60).new())
    conn.execute("update tasklib.tasks set due_at = now(), scheduled_at = now()")
    c = workers("c")
    with psycopg.connect(database_url) as promoting:
        promoting.execute("select tasklib.promote()")
        sql = f"select tasklib.cancel('{task_id}')"
        cancel = blocked(conn, c, lambda: c.session.connection().execute(literal(sql)).fetchone(), second)
        promoting.commit()
    assert cancel.result(20) == ("cancelled",)
    assert workers("a").claim("job") == []


# --- renew against reap ---


def test_a_renewal_that_waited_for_its_own_death_is_refused(
    conn: Conn,
    database_url: str,
    second: ThreadPoolExecutor,
    workers: Callable[[str], ManualWorker],
) -> None:
    """Declared dead first: it stays dead, however late the renewal was sent."""
    a = workers("a")
    kill(conn, a)
    with psycopg.connect(database_url) as reaping:
        reaping.execute("update tasklib.workers set died_at = clock_timestamp() where lease_until < clock_timestamp()")
        renewal = blocked(conn, a, a.renew, second)
        reaping.commit()
    assert renewal.result(20) is False


def test_a_worker_that_renews_while_the_reaper_waits_lives(
    client: tasklib.Client,
    conn: Conn,
    database_url: str,
    quick: tasklib.Config,
    second: ThreadPoolExecutor,
    workers: Callable[[str], ManualWorker],
    job: Any,
) -> None:
    """The reaper looks at the clock and the lease again when it has the row: its tasks stay its own."""
    task_id = client.submit(job.new())
    a, grave = workers("a"), workers("grave")
    claimed = claim_one(a)
    reaper = grown_up_reaper(quick, grave.session)
    kill(conn, a)
    with psycopg.connect(database_url) as renewing:
        renewing.execute(
            "update tasklib.workers set lease_until = clock_timestamp() + interval '1 min' where worker_id = %s", [a.id]
        )
        reap = blocked(conn, grave, reaper.run_once, second)
        renewing.commit()
    reap.result(20)
    assert get(client, task_id).worker_id == a.id
    assert a.finish(claimed) is True


def test_two_reapers_do_no_harm(
    client: tasklib.Client,
    conn: Conn,
    database_url: str,
    quick: tasklib.Config,
    second: ThreadPoolExecutor,
    workers: Callable[[str], ManualWorker],
    job: Any,
) -> None:
    """The one that waited finds the task settled, and counts no second crash."""
    task_id = client.submit(job.new())
    a, one, two = workers("a"), workers("one"), workers("two")
    assert a.start(claim_one(a))
    reapers = [grown_up_reaper(quick, each.session) for each in (one, two)]
    kill(conn, a)
    with row_locked(database_url, f"select 1 from tasklib.tasks where id = '{task_id}' for update"):
        first = blocked(conn, one, reapers[0].run_once, second)
        other = blocked(conn, two, reapers[1].run_once, second)
    first.result(20)
    other.result(20)
    task = get(client, task_id)
    assert (task.state, task.crash_count, task.attempt) == ("pending", 1, 1)
    assert conn.execute("select count(*) from tasklib.task_attempts").fetchone() == (1,)
    assert conn.execute("select count(*) from tasklib.claims").fetchone() == (0,)


def test_one_bad_row_does_not_keep_its_neighbours(
    client: tasklib.Client, conn: Conn, quick: tasklib.Config, workers: Callable[[str], ManualWorker], job: Any
) -> None:
    """A trigger of somebody else's refuses one row: the others of the same claim are recovered, then it too."""
    ids = client.submit_many([job.new() for _ in range(5)])
    a, grave = workers("a"), workers("grave")
    assert len(a.claim("job")) == 5
    reaper = grown_up_reaper(quick, grave.session)
    kill(conn, a)
    conn.execute(
        literal(f"""
        create function pg_temp.refuse() returns trigger language plpgsql as $$
        begin raise exception 'not this one'; end $$;
        create trigger refuse before update on tasklib.tasks for each row when (old.id = '{ids[2]}')
            execute function pg_temp.refuse()""")
    )
    try:
        reaper.run_once()
        states = [get(client, each).state for each in ids]
        assert states == ["pending", "pending", "claimed", "pending", "pending"]
    finally:
        conn.execute("drop trigger refuse on tasklib.tasks")
    reaper.run_once()
    assert get(client, ids[2]).state == "pending"


def test_a_young_connection_declares_nobody_dead(
    conn: Conn, config: tasklib.Config, workers: Callable[[str], ManualWorker]
) -> None:
    """It may be that nobody could renew: after an outage everybody's lease looks expired."""
    a, grave = workers("a"), workers("grave")
    kill(conn, a)
    probe = tasklib.Config(config.database_url, lease_seconds=60)
    Reaper(probe, grave.session, grave.statements).run_once()
    assert a.renew() is True


# --- stop in mid-claim ---


def test_a_claim_that_is_answered_after_the_stop_is_given_back(
    client: tasklib.Client, config: tasklib.Config, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claimed, not started, at no cost: ready for the next worker at once, and no claim is left behind."""
    claimed, go_on = threading.Event(), threading.Event()
    really = Preparation.add

    def hold(self: Preparation, executions: Any) -> None:
        claimed.set()
        assert go_on.wait(20)
        really(self, executions)

    monkeypatch.setattr(Preparation, "add", hold)
    with running(config) as worker:
        task_id = client.submit(job.new())
        assert claimed.wait(20)
        assert get(client, task_id).state == "claimed"
        worker.stop()
        run = worker._run
        assert run is not None
        wait_until(lambda: not run.buffer.is_open, "the stop")
        go_on.set()
    task = get(client, task_id)
    assert (task.state, task.ready, task.attempt, task.retry_count, task.worker_id) == ("pending", True, 0, 0, None)


def test_a_claim_whose_answer_was_lost_is_given_back(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection broke after the commit: the worker finds in the database what it holds without knowing."""
    lost = threading.Event()
    really = Session._send

    def lose(self: Session, conn: Any, statement: Any, lock_seconds: float | None) -> Any:
        answer = really(self, conn, statement, lock_seconds)
        if "insert into tasklib.claims" in statement.sql and answer.tasks and not lost.is_set():
            lost.set()
            raise psycopg.OperationalError("the answer was lost")
        return answer

    monkeypatch.setattr(Session, "_send", lose)
    ran = threading.Event()
    tasklib.task(name="echo")(ran.set)
    with running(config):
        task_id = client.submit_task("echo")
        assert lost.wait(20)
        wait_until(ran.is_set, "the task to run")
        wait_until(lambda: get(client, task_id).state == "completed", "completed")
    assert (get(client, task_id).fencing_token, get(client, task_id).attempt) == (2, 1)
    assert conn.execute("select count(*) from tasklib.claims").fetchone() == (0,)


def test_a_finish_whose_answer_was_lost_is_known_to_be_written(
    client: tasklib.Client, config: tasklib.Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection broke after the commit: sent once more it changes nothing, which is no sign of a lost lease."""
    echo = tasklib.task(name="echo")(lambda n: n)
    ids = client.submit_many([echo.new(n=n) for n in range(20)])
    lost = threading.Event()
    really = Session._send

    def lose(self: Session, conn: Any, statement: Any, lock_seconds: float | None) -> Any:
        answer = really(self, conn, statement, lock_seconds)
        if "set state = 'completed'" in statement.sql and not lost.is_set():
            lost.set()
            raise psycopg.OperationalError("the answer was lost")
        return answer

    monkeypatch.setattr(Session, "_send", lose)
    with caplog.at_level(logging.WARNING, "tasklib"):
        tasklib.TaskWorker(config, concurrency=4).run_until_empty_sync()
    assert lost.is_set()
    assert {(get(client, each).state, get(client, each).attempt) for each in ids} == {("completed", 1)}
    assert "lease.lost" not in caplog.text


def test_large_results_are_written_apart(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement has its limit: beyond it, the results of a batch go by several."""
    monkeypatch.setattr(unwritten, "LARGEST_BATCH_CHARACTERS", 300)
    echo = tasklib.task(name="echo")(lambda n: str(n) * 100)
    ids = client.submit_many([echo.new(n=n % 10) for n in range(20)])
    tasklib.TaskWorker(config, concurrency=20).run_until_empty_sync()
    assert [get(client, each).result for each in ids] == [{"value": str(n % 10) * 100} for n in range(20)]
    assert conn.execute("select count(*) from tasklib.claims").fetchone() == (0,)


def test_a_bad_outcome_does_not_hold_up_the_others(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """A row that PostgreSQL refuses to finish is failed alone; its neighbours complete."""
    echo = tasklib.task(name="echo")(lambda n: n)
    ids = client.submit_many([echo.new(n=n) for n in range(20)])
    conn.execute(
        literal(f"""
        create function pg_temp.refuse() returns trigger language plpgsql as $$
        begin raise exception 'not this one'; end $$;
        create trigger refuse before update on tasklib.tasks for each row
            when (old.id = '{ids[7]}' and new.state = 'completed') execute function pg_temp.refuse()""")
    )
    try:
        with running(config, concurrency=4):
            states = {each: wait_final(client, each).state for each in ids}
    finally:
        conn.execute("drop trigger refuse on tasklib.tasks")
    assert states.pop(ids[7]) == "failed"
    assert set(states.values()) == {"completed"}
    assert get(client, ids[7]).error_code == "UNSTORABLE"


def test_an_error_in_a_failure_is_kept(
    client: tasklib.Client, workers: Callable[[str], ManualWorker], job: Any
) -> None:
    """Give-backs keep what an earlier attempt left: the error of the last failure, and the count of its retries."""
    task_id = client.submit(job.new())
    a = workers("a")
    problem = Problem("E", "m", "E: m")
    a.finish(claim_one(a), Failed(problem, delay_seconds=0.0))
    again = claim_one(a)
    assert a.finish(again, Interrupted(began=False))
    task = get(client, task_id)
    assert (task.state, task.retry_count, task.error, task.error_code, task.attempt) == ("pending", 1, "E: m", "E", 1)


def test_a_young_server_declares_nobody_dead(conn: Conn, config: tasklib.Config) -> None:
    """It may just have come back, and nobody could renew while it was away."""
    probe = ManualWorker(tasklib.Config(config.database_url, lease_seconds=3600, lock_timeout_seconds=86400), "probe")
    kill(conn, probe)
    assert probe.session.run(probe.statements.declare_dead()) == []
    assert probe.renew() is True
    probe.close()
