"""Handles, and waiting for results: prompt, in any number, over one connection."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import tasklib
from tasklib import sending, waiting
from tests.support.working import ManualWorker, running
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from tests.support.raw_sql import Conn


@pytest.fixture
def add(app: None) -> tasklib.TaskFunction[[int, int], int]:
    @tasklib.task
    def add(a: int, b: int) -> int:
        return a + b

    return add


@pytest.fixture
def worker(config: tasklib.Config) -> Any:
    with running(config, concurrency=10) as worker:
        yield worker


def waiting_connections(conn: Conn) -> int:
    """Those that have nothing to do with workers."""
    row = conn.execute(
        "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'tasklib'"
    ).fetchone()
    assert row is not None
    return int(row[0])


def waits(conn: Conn) -> bool:
    """Somebody has said so by the lock. A worker that sleeps holds others, in the same way."""
    row = conn.execute(
        """select count(*) from pg_locks join pg_database on pg_database.oid = database
            where locktype = 'advisory' and mode = 'ShareLock' and objsubid = 1 and datname = current_database()
              and (classid::bigint << 32 | objid::bigint) = hashtextextended('tasklib.task_done', 0)"""
    ).fetchone()
    return row == (1,)


async def test_a_result_comes_as_soon_as_it_is_there(add: Any, worker: Any) -> None:
    """Async: submit, and await."""
    handle = await add.submit_handle(1, 2)
    assert await handle.result(timeout=20) == 3
    assert handle.status() == await handle.status_async() == tasklib.State.COMPLETED
    assert await handle.result() == 3, "and again, later"


def test_a_result_for_who_is_not_async(add: Any, worker: Any) -> None:
    handle = add.options(priority=5).submit_handle_sync(2, 3)
    assert handle.result_sync(timeout=20) == 5
    assert add.handle(str(handle.id)).result_sync() == tasklib.handle(handle.id).result_sync() == 5


async def test_a_client_of_ones_own(async_client: tasklib.AsyncClient, client: tasklib.Client, worker: Any) -> None:
    """Without `tasklib.init`."""

    @tasklib.task
    async def double(n: int) -> int:
        return 2 * n

    handle = async_client.handle(await async_client.submit(double.new(4)), double)
    assert await handle.result(20) == 8
    assert client.handle(handle.id, double).result_sync() == handle.result_sync() == 8


@dataclass
class Price:
    amount: Decimal
    since: datetime


def test_a_result_has_the_type_that_the_function_returns(app: None, worker: Any) -> None:
    """Not the JSON that it was stored as."""

    @tasklib.task
    def price() -> list[Price]:
        return [Price(Decimal("1.10"), datetime(2026, 1, 1, tzinfo=UTC))]

    assert price.submit_handle_sync().result_sync(20) == [Price(Decimal("1.10"), datetime(2026, 1, 1, tzinfo=UTC))]


def test_a_result_of_another_type_is_told(app: None, worker: Any) -> None:
    """The work is done, and what is stored is in the error."""

    @tasklib.task
    def price() -> int:
        return "a lot"  # type: ignore[return-value]  # the mistake under test

    with pytest.raises(tasklib.InvalidResult, match="does not fit") as raised:
        price.submit_handle_sync().result_sync(20)
    assert raised.value.value == "a lot"
    assert "a lot" not in str(raised.value), "results may be secrets, and errors are logged"


def test_what_sql_has_stored_is_read_as_it_is(app: None, client: tasklib.Client, conn: Conn) -> None:
    """Not every result was written by a worker."""
    task_id = client.submit_task("nobody")
    conn.execute(
        "update tasklib.tasks set state = 'completed', ready = false, completed_at = now(), result = '5' where id = %s",
        [task_id],
    )
    assert tasklib.handle(task_id).result_sync(0) == 5


@pytest.mark.parametrize("wrong", ["5", True, -1, float("nan")])
def test_a_timeout_is_a_number(app: None, wrong: Any) -> None:
    with pytest.raises(tasklib.InvalidOptions, match="timeout must be a number"):
        tasklib.handle(uuid4()).result_sync(wrong)


def test_a_function_that_says_nothing_gives_json(app: None, worker: Any) -> None:
    """Also one whose type means nothing here."""

    @tasklib.task
    def says_nothing():  # type: ignore[no-untyped-def]  # noqa: ANN202 - the point
        return {"a": (1, 2)}

    assert says_nothing.submit_handle_sync().result_sync(20) == {"a": [1, 2]}


def test_a_result_that_is_not_kept_is_none(app: None, worker: Any) -> None:
    @tasklib.task(store_result=False)
    def heavy() -> int:
        return 5

    assert heavy.submit_handle_sync().result_sync(20) is None


def test_a_failure_is_raised_with_all_that_is_known(app: None, worker: Any) -> None:
    """Code, message, and the text of the traceback; and it travels between processes."""

    @tasklib.task(max_retries=0, error_codes={ZeroDivisionError: "NO_ZERO"})
    def divide(a: int, b: int) -> float:
        return a / b

    handle = divide.submit_handle_sync(1, 0)
    with pytest.raises(tasklib.TaskFailed) as raised:
        handle.result_sync(20)
    error = pickle.loads(pickle.dumps(raised.value))
    assert (error.task_id, error.name, error.state, error.code) == (handle.id, "divide", "failed", "NO_ZERO")
    assert error.message == "ZeroDivisionError: division by zero"
    assert "in divide" in error.traceback
    assert "return a / b" in error.traceback
    shown = "".join(traceback.format_exception(error))
    assert "return a / b" in shown, "Python shows where it happened, without being asked"


def test_each_end_has_its_error(app: None, client: tasklib.Client, conn: Conn) -> None:
    """All of them are TaskFailed."""
    ids = [client.submit_task("nobody", delay_seconds=3600) for _ in range(3)]
    client.cancel_task(ids[0], "ordered twice")
    end = "update tasklib.tasks set state = %s, completed_at = now(), due_at = null, error_code = 'X' where id = %s"
    conn.execute(end, ["expired", ids[1]])
    conn.execute(end, ["buried", ids[2]])
    for task_id, kind in zip(ids, (tasklib.TaskCancelled, tasklib.TaskExpired, tasklib.TaskBuried), strict=True):
        with pytest.raises(kind) as raised:
            tasklib.handle(task_id).result_sync(20)
        assert isinstance(raised.value, tasklib.TaskFailed)


async def test_a_timeout_leaves_the_task_alone(add: Any, config: tasklib.Config) -> None:
    """It goes on, and can be asked for again."""
    handle = await add.submit_handle(1, 1)
    with pytest.raises(tasklib.ResultTimeout, match=str(handle.id)):
        await handle.result(timeout=0.05)
    with pytest.raises(TimeoutError):
        handle.result_sync(timeout=0)
    with running(config):
        assert await handle.result(20) == 2
    assert await handle.result(timeout=0) == handle.result_sync(timeout=0) == 2, "what is there is found"


async def test_a_timeout_without_end_is_none(add: Any, worker: Any) -> None:
    """However it is written."""
    for seconds in (float("inf"), 1e300, 10**400):
        assert await (await add.submit_handle(1, 1)).result(seconds) == 2
        assert add.submit_handle_sync(1, 1).result_sync(seconds) == 2
        assert worker.wait_until_ready(seconds)


async def test_what_is_final_comes_before_the_timeout(add: Any, client: tasklib.Client) -> None:
    """Also with no time at all."""
    done, late = add.submit_sync(1, 1), add.submit_sync(2, 2)
    client.cancel_task(done)
    sync, awaited = tasklib.as_completed_sync([done, late], timeout=0), tasklib.as_completed([done, late], timeout=0)
    assert (next(sync).id, (await anext(awaited)).id) == (done, done)
    with pytest.raises(tasklib.ResultTimeout, match=f"the task was not final.*{late}"):
        next(sync)
    with pytest.raises(tasklib.ResultTimeout, match=f"the task was not final.*{late}"):
        await anext(awaited)


async def test_a_timeout_says_how_the_task_stands(add: Any, config: tasklib.Config) -> None:
    """Its state, when it is due, and if nobody serves it: most often it is a worker that was forgotten."""

    @tasklib.task(queue="slow")
    def hold() -> None:
        is_held.set()
        release.wait(20)

    is_held, release = threading.Event(), threading.Event()
    unserved = await add.submit_handle(1, 1)
    due = await hold.options(delay_seconds=3600).submit_handle()
    held = await hold.submit_handle()
    nobody = r"no live worker serves task 'add' in queue 'default'"
    with running(config, queues=["slow"]):
        assert is_held.wait(20)
        wait_until(lambda: held.status() == "running", "marked")
        unserved_now = rf"add \({unserved.id}\) is pending, and {nobody}"
        with pytest.raises(tasklib.ResultTimeout, match=unserved_now):
            unserved.result_sync(0)
        with pytest.raises(tasklib.ResultTimeout, match=unserved_now):
            await unserved.result(0)
        with pytest.raises(tasklib.ResultTimeout, match=r"is pending, due at \d{4}-\d\d-\d\d [\d:]+ \w+$"):
            due.result_sync(0)
        with pytest.raises(tasklib.ResultTimeout, match=r"is running$"):
            held.result_sync(0)
        with pytest.raises(tasklib.ResultTimeout, match=r"^4 tasks were not final after 0 s: .*; and 1 more$"):
            tasklib.wait_for_sync([unserved, due, held, uuid4()], timeout=0)
        release.set()
    with pytest.raises(tasklib.ResultTimeout, match="not in the database"):
        tasklib.wait_for_sync([uuid4()], timeout=0)


async def test_who_gives_up_leaves_nothing_behind(add: Any) -> None:
    """Cancelled, or timed out: nobody is waiting any more."""
    handle = await add.submit_handle(1, 1)
    room = tasklib.application.default_client().database.waiting_room
    task = asyncio.ensure_future(handle.result())
    await asyncio.to_thread(wait_until, lambda: bool(room._tickets), "somebody waits")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not room._tickets
    assert not room._seen_at


def test_no_such_task(app: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not waited for without end: but a submit may take a while to commit."""
    monkeypatch.setattr(waiting, "MISSING_SECONDS", 0.2)
    with pytest.raises(tasklib.TaskNotFound, match="not committed"):
        tasklib.handle(uuid4()).result_sync(20)
    with pytest.raises(tasklib.TaskNotFound):
        tasklib.handle(uuid4()).status()


async def test_a_row_that_is_deleted_is_not_waited_for(add: Any, conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also long after it was there: it is looked for again and again."""
    monkeypatch.setattr(waiting, "MISSING_SECONDS", 0.05)
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.05)
    handle = await add.submit_handle(1, 1)
    task = asyncio.ensure_future(handle.result(20))
    room = tasklib.application.default_client().database.waiting_room
    entered = await asyncio.to_thread(first_seen, room, handle.id)
    await asyncio.to_thread(wait_until, lambda: room._seen_at[handle.id] > entered, "the row to be seen")
    conn.execute("delete from tasklib.tasks where id = %s", [handle.id])
    with pytest.raises(tasklib.TaskNotFound, match="deleted"):
        await task


def first_seen(room: Any, task_id: UUID) -> float:
    wait_until(lambda: task_id in room._seen_at, "somebody waits")
    return float(room._seen_at[task_id])


async def test_others_who_come_do_not_prolong_the_wait(app: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a task that does not exist."""
    monkeypatch.setattr(waiting, "MISSING_SECONDS", 0.2)
    handle = tasklib.handle(uuid4())
    first = asyncio.ensure_future(handle.result(20))
    others = []
    while not first.done():
        others.append(asyncio.ensure_future(handle.result(20)))
        await asyncio.sleep(0.01)
    with pytest.raises(tasklib.TaskNotFound):
        await first
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@pytest.mark.direct("sees by its lock that somebody listens")
def test_a_task_that_is_committed_later_is_waited_for(
    add: Any, config: tasklib.Config, conn: Conn, database_url: str
) -> None:
    """Its submit is part of a transaction that is still open."""
    with psycopg.connect(database_url) as other, running(config):
        handle = add.options(connection=other).submit_handle_sync(1, 2)
        results: list[int] = []
        thread = threading.Thread(target=lambda: results.append(handle.result_sync(20)))
        thread.start()
        wait_until(lambda: waits(conn), "somebody waits")
        other.commit()
        thread.join(20)
    assert results == [3]


def test_waiting_for_several_keeps_their_order(add: Any, worker: Any) -> None:
    """Also if one of them failed, or comes twice."""

    @tasklib.task(max_retries=0)
    def bad() -> None:
        raise ValueError

    handles = [add.submit_handle_sync(n, n) for n in range(20)]
    failed = bad.submit_sync()
    tasks = tasklib.wait_for_sync([*handles, failed, handles[0]], timeout=20)
    assert [task.id for task in tasks] == [*(handle.id for handle in handles), failed, handles[0].id]
    assert tasklib.is_failed(tasks[-2])
    assert tasklib.wait_for_sync([]) == []


@pytest.mark.parametrize("wrong", ["01a1e45e-0472-716f-be6e-cf211a4d24a6", 5, None])
def test_several_means_several(app: None, wrong: Any) -> None:
    """One id is a string of characters too."""
    with pytest.raises(tasklib.InvalidOptions, match="give them a list"):
        tasklib.wait_for_sync(wrong)


async def test_each_as_it_completes(app: None, config: tasklib.Config) -> None:
    """Not in the order of their submits."""
    gates = {name: threading.Event() for name in ("first", "second")}

    @tasklib.task
    def pass_gate(name: str) -> str:
        assert gates[name].wait(20)
        return name

    with running(config, concurrency=2):
        ids = [await pass_gate.submit(name) for name in gates]
        gates["second"].set()
        arrived = []
        async for task in tasklib.as_completed(ids, timeout=20):
            arrived.append(task.id)
            gates["first"].set()
    assert arrived == ids[::-1]


def test_a_loop_that_is_left_early_leaves_the_room(add: Any, worker: Any) -> None:
    """`break` in the middle of as_completed."""
    ids = [add.submit_sync(n, n) for n in range(5)]
    completed = tasklib.as_completed_sync(ids, timeout=20)
    assert next(completed).id in ids
    completed.close()  # type: ignore[attr-defined]  # what `break` does, sooner or later
    assert not tasklib.application.default_client().database.waiting_room._tickets


@pytest.mark.direct("sees by its lock that somebody listens")
@pytest.mark.parametrize("how", ["operator's SQL", "cancel", "expire", "finish"])
def test_whatever_makes_a_task_final_tells(
    app: None, client: tasklib.Client, config: tasklib.Config, conn: Conn, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: not at the next look, which is far away here."""
    monkeypatch.setattr(waiting, "FIRST_LOOK_SECONDS", 30.0)
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 60.0)
    tasklib.task(name="job")(lambda: None)
    task_id = client.submit_task("job", expires_at=datetime.now(UTC).replace(year=2099))
    ends: dict[str, Callable[[], object]] = {
        "operator's SQL": lambda: conn.execute(
            "update tasklib.tasks set state = 'cancelled', ready = false, due_at = null, completed_at = now(),"
            " error_code = 'CANCELLED' where id = %s", [task_id]),
        "cancel": lambda: client.cancel_task(task_id),
        "expire": lambda: (
            conn.execute("update tasklib.tasks set expires_at = now(), due_at = now() where id = %s", [task_id]),
            client.expire_tasks()),
        "finish": lambda: finish_by_hand(config, task_id),
    }  # fmt: skip
    room = tasklib.application.default_client().database.waiting_room
    thread = threading.Thread(target=lambda: tasklib.wait_for_sync([task_id], 60))
    thread.start()
    wait_until(lambda: room._look_at > time.monotonic() + 25, "the first look to be over")
    ends[how]()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.direct("sees by its lock that somebody listens")
def test_a_notification_that_comes_with_an_answer_is_heard(
    app: None, client: tasklib.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task becomes final while the waiting thread looks, after its row was read: the next look is far away."""
    monkeypatch.setattr(waiting, "FIRST_LOOK_SECONDS", 30.0)
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 60.0)
    tasklib.task(name="job")(lambda: None)
    first, second = client.submit_task("job"), client.submit_task("job")
    looks: list[Any] = []
    send = sending.send_alone

    def send_slowly(conn: Any, statement: Any) -> Any:
        found = send(conn, statement)
        looks.append(statement)
        if statement.parameters == ([second],) and not found:
            client.cancel_task(second)
            conn.execute("select pg_sleep(0.2)")  # its answer brings the notification along
        return found

    monkeypatch.setattr(waiting, "send_alone", send_slowly)
    threads = []
    for task_id in (first, second):
        threads.append(threading.Thread(target=tasklib.wait_for_sync, args=[[task_id], 60]))
        threads[-1].start()
        wait_until(lambda: len(looks) >= 2 * len(threads), "the first look to be over")
    threads[1].join(20)
    assert not threads[1].is_alive()
    client.cancel_task(first)
    threads[0].join(20)
    assert not threads[0].is_alive()


def finish_by_hand(config: tasklib.Config, task_id: UUID) -> None:
    worker = ManualWorker(config, "manual")
    [task] = worker.claim("job")
    assert task.held.id == task_id
    worker.finish(task)
    worker.session.close()


def test_nobody_waits_nobody_is_told(app: None, client: tasklib.Client, conn: Conn) -> None:
    """A notifying commit holds a lock of the whole server: only who is waited for pays it."""
    conn.execute("listen task_done")
    client.cancel_task(client.submit_task("nobody"))
    assert list(conn.notifies(timeout=0.2)) == []
    conn.execute("select pg_advisory_lock_shared(hashtextextended('tasklib.task_done', 0))")
    task_id = client.submit_task("nobody")
    client.cancel_task(task_id)
    assert [each.payload for each in conn.notifies(timeout=20, stop_after=1)] == [str(task_id)]


@pytest.mark.direct("sees by its lock that somebody listens")
def test_lost_notifications_cost_time_alone(
    app: None, client: tasklib.Client, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trigger is gone; the looks find it all the same."""
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.2)
    task_id = client.submit_task("nobody", delay_seconds=3600)
    conn.execute("alter table tasklib.tasks disable trigger tell_done")
    try:
        thread = threading.Thread(target=lambda: tasklib.wait_for_sync([task_id], 30))
        thread.start()
        wait_until(lambda: waits(conn), "somebody waits")
        client.cancel_task(task_id)
        thread.join(20)
        assert not thread.is_alive()
    finally:
        conn.execute("alter table tasklib.tasks enable trigger tell_done")


@pytest.mark.direct("sees by its lock that somebody listens")
def test_a_broken_connection_is_replaced(app: None, client: tasklib.Client, conn: Conn) -> None:
    """Who waits does not notice."""
    task_id = client.submit_task("nobody", delay_seconds=3600)
    states: list[tasklib.State] = []
    thread = threading.Thread(target=lambda: states.append(tasklib.wait_for_sync([task_id], 30)[0].state))
    thread.start()
    wait_until(lambda: waits(conn), "somebody waits")
    conn.execute("select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and mode = 'ShareLock'")
    wait_until(lambda: waits(conn), "somebody waits again")
    client.cancel_task(task_id)
    thread.join(20)
    assert states == [tasklib.State.CANCELLED]


async def test_five_thousand_wait_on_one_connection(add: Any, config: tasklib.Config, conn: Conn) -> None:
    """And all get their results."""
    ids = await tasklib.submit_many([add.new(n, n) for n in range(5_000)])
    handles = [add.handle(task_id) for task_id in ids]
    tasklib.close()  # what submitted them is not what is counted
    tasklib.init(config)
    results = asyncio.gather(*(handle.result(timeout=120) for handle in handles))
    most = 0
    with running(config, concurrency=50):
        while not results.done():
            most = max(most, waiting_connections(conn))
            await asyncio.sleep(0.05)
    assert await results == [2 * n for n in range(5_000)]
    assert 1 <= most <= 2


def test_a_child_process_waits_by_itself(add: Any, config: tasklib.Config) -> None:
    """After a fork: the parent's thread and connection stay the parent's."""
    with running(config):
        assert add.submit_handle_sync(1, 1).result_sync(20) == 2
        handle = add.options(delay_seconds=1).submit_handle_sync(2, 2)  # so that there is something to wait for
        pid = os.fork()
        if pid == 0:
            began = time.monotonic()
            try:
                result = handle.result_sync(40)
                os._exit(result if time.monotonic() < began + 20 else 98)  # not by the last look at the end
            finally:
                os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
        assert add.submit_handle_sync(3, 3).result_sync(20) == 6


@pytest.mark.direct("sees by its lock that somebody listens")
def test_closing_tells_who_waits(app: None, client: tasklib.Client, conn: Conn) -> None:
    """Nobody waits on a client that is closed."""
    task_id = client.submit_task("nobody", delay_seconds=3600)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            tasklib.wait_for_sync([task_id], 30)
        except Exception as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: waits(conn), "somebody waits")
    tasklib.close()
    thread.join(20)
    assert isinstance(errors[0], tasklib.DatabaseUnavailable)


def test_a_role_that_may_not_look_is_told(app: None, client: tasklib.Client, conn: Conn, database_url: str) -> None:
    """Who may submit and nothing else cannot wait either: an error, not a hang."""
    conn.execute("drop role if exists blind")
    conn.execute("create role blind login")
    conn.execute("grant usage on schema tasklib to blind")
    try:
        blind = tasklib.Client(tasklib.Config(make_conninfo(database_url, user="blind")))
        with pytest.raises(tasklib.DatabaseError, match="may not do this"):
            blind.wait_for([uuid4()], timeout=20)
        blind.close()
    finally:
        conn.execute("drop owned by blind")
        conn.execute("drop role blind")
