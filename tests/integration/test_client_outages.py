"""Every public call has an end while PostgreSQL is away: stopped, frozen, unreachable or refusing; before the first
connection, with connections at hand, and in the middle of a statement.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import tasklib
from tasklib import AsyncClient, Client, Handle, Submitter, TaskFunction, migrate
from tests.support.outages import KINDS, FailingServer
from tests.support.raw_sql import literal
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

CALL_SECONDS = 1.0  # Config.database_timeout_seconds
END_SECONDS = 20.0  # a call that is bounded has ended long before
NOBODY = uuid4()


@tasklib.task(name="outages.job")
def job(n: int) -> int:
    return n


# What sends nothing by itself. A new public name is in one of these three tables, or the test of the tables fails.
QUIET = {
    *("Client.as_sync", "Client.as_async", "Client.handle"),
    *("AsyncClient.as_sync", "AsyncClient.as_async", "AsyncClient.handle"),
    *("TaskFunction.options", "TaskFunction.new", "TaskFunction.handle", "TaskFunction.returns"),
    *("Submitter.options", "Submitter.new"),
    *("tasklib.around_task", "tasklib.current_task", "tasklib.get_registered_tasks", "tasklib.handle", "tasklib.init"),
    *("tasklib.is_buried", "tasklib.is_cancelled", "tasklib.is_completed", "tasklib.is_expired", "tasklib.is_failed"),
    *("tasklib.is_final", "tasklib.is_pending", "tasklib.is_retrying", "tasklib.is_running"),
    *("tasklib.is_running_task", "tasklib.on_worker_start", "tasklib.on_worker_stop", "tasklib.task"),
}
CLOSING = {"Client.close", "AsyncClient.close", "tasklib.close", "tasklib.close_async"}


def sync_calls(client: Client) -> dict[str, Callable[[], Any]]:
    handle = client.handle(NOBODY)
    return {
        "Client.submit": lambda: client.submit(job.new(1)),
        "Client.submit_task": lambda: client.submit_task(job, 1),
        "Client.submit_many": lambda: client.submit_many([job.new(1), job.new(2)]),
        "Client.get_task": lambda: client.get_task(NOBODY),
        "Client.get_attempts": lambda: client.get_attempts(NOBODY),
        "Client.list_tasks": client.list_tasks,
        "Client.wait_for": lambda: client.wait_for([NOBODY], timeout=CALL_SECONDS),
        "Client.as_completed": lambda: list(client.as_completed([NOBODY], timeout=CALL_SECONDS)),
        "Client.cancel_task": lambda: client.cancel_task(NOBODY),
        "Client.retry_task": lambda: client.retry_task(NOBODY),
        "Client.expire_tasks": client.expire_tasks,
        "Client.queue_statistics": client.queue_statistics,
        "Client.task_statistics": client.task_statistics,
        "Client.backlog": client.backlog,
        "Client.set_queue": lambda: client.set_queue("mail", max_running=1),
        "Client.get_queue": lambda: client.get_queue("mail"),
        "Client.list_queues": client.list_queues,
        "Client.pause_queue": lambda: client.pause_queue("mail"),
        "Client.resume_queue": lambda: client.resume_queue("mail"),
        "Client.set_cluster": lambda: client.set_cluster(cluster_wide_cap=5),
        "Client.get_cluster": client.get_cluster,
        "Client.list_transitions": client.list_transitions,
        "Handle.task": handle.task,
        "Handle.status": handle.status,
        "Handle.result_sync": lambda: handle.result_sync(timeout=CALL_SECONDS),
        "Handle.cancel": handle.cancel,
        "TaskFunction.submit_sync": lambda: job.submit_sync(1),
        "TaskFunction.submit_handle_sync": lambda: job.submit_handle_sync(1),
        "Submitter.submit_sync": lambda: job.options(priority=1).submit_sync(1),
        "Submitter.submit_handle_sync": lambda: job.options(idempotency_key="k").submit_handle_sync(1),
        "tasklib.as_completed_sync": lambda: list(tasklib.as_completed_sync([NOBODY], timeout=CALL_SECONDS)),
        "tasklib.backlog": tasklib.backlog,
        "tasklib.cancel_task": lambda: tasklib.cancel_task(NOBODY),
        "tasklib.expire_tasks": tasklib.expire_tasks,
        "tasklib.get_task": lambda: tasklib.get_task(NOBODY),
        "tasklib.get_attempts": lambda: tasklib.get_attempts(NOBODY),
        "tasklib.list_tasks": tasklib.list_tasks,
        "tasklib.queue_statistics": tasklib.queue_statistics,
        "tasklib.retry_task": lambda: tasklib.retry_task(NOBODY),
        "tasklib.submit_many_sync": lambda: tasklib.submit_many_sync([job.new(1), job.new(2)]),
        "tasklib.submit_task_sync": lambda: tasklib.submit_task_sync(job, 1),
        "tasklib.task_statistics": tasklib.task_statistics,
        "tasklib.set_queue": lambda: tasklib.set_queue("mail", max_running=1),
        "tasklib.get_queue": lambda: tasklib.get_queue("mail"),
        "tasklib.list_queues": tasklib.list_queues,
        "tasklib.pause_queue": lambda: tasklib.pause_queue("mail"),
        "tasklib.resume_queue": lambda: tasklib.resume_queue("mail"),
        "tasklib.set_cluster": lambda: tasklib.set_cluster(cluster_wide_cap=5),
        "tasklib.get_cluster": tasklib.get_cluster,
        "tasklib.list_transitions": tasklib.list_transitions,
        "tasklib.wait_for_sync": lambda: tasklib.wait_for_sync([NOBODY], timeout=CALL_SECONDS),
    }


def async_calls(client: AsyncClient) -> dict[str, Callable[[], Coroutine[Any, Any, Any]]]:
    handle = client.handle(NOBODY)

    async def all_of(tasks: Any) -> list[Any]:
        return [task async for task in tasks]

    return {
        "AsyncClient.submit": lambda: client.submit(job.new(1)),
        "AsyncClient.submit_task": lambda: client.submit_task(job, 1),
        "AsyncClient.submit_many": lambda: client.submit_many([job.new(1), job.new(2)]),
        "AsyncClient.get_task": lambda: client.get_task(NOBODY),
        "AsyncClient.get_attempts": lambda: client.get_attempts(NOBODY),
        "AsyncClient.list_tasks": client.list_tasks,
        "AsyncClient.wait_for": lambda: client.wait_for([NOBODY], timeout=CALL_SECONDS),
        "AsyncClient.as_completed": lambda: all_of(client.as_completed([NOBODY], timeout=CALL_SECONDS)),
        "AsyncClient.cancel_task": lambda: client.cancel_task(NOBODY),
        "AsyncClient.retry_task": lambda: client.retry_task(NOBODY),
        "AsyncClient.expire_tasks": client.expire_tasks,
        "AsyncClient.queue_statistics": client.queue_statistics,
        "AsyncClient.task_statistics": client.task_statistics,
        "AsyncClient.backlog": client.backlog,
        "AsyncClient.set_queue": lambda: client.set_queue("mail", max_running=1),
        "AsyncClient.get_queue": lambda: client.get_queue("mail"),
        "AsyncClient.list_queues": client.list_queues,
        "AsyncClient.pause_queue": lambda: client.pause_queue("mail"),
        "AsyncClient.resume_queue": lambda: client.resume_queue("mail"),
        "AsyncClient.set_cluster": lambda: client.set_cluster(cluster_wide_cap=5),
        "AsyncClient.get_cluster": client.get_cluster,
        "AsyncClient.list_transitions": client.list_transitions,
        "Handle.task_async": handle.task_async,
        "Handle.status_async": handle.status_async,
        "Handle.result": lambda: handle.result(timeout=CALL_SECONDS),
        "Handle.cancel_async": handle.cancel_async,
        "TaskFunction.submit": lambda: job.submit(1),
        "TaskFunction.submit_handle": lambda: job.submit_handle(1),
        "Submitter.submit": lambda: job.options(priority=1).submit(1),
        "Submitter.submit_handle": lambda: job.options(idempotency_key="k").submit_handle(1),
        "tasklib.as_completed": lambda: all_of(tasklib.as_completed([NOBODY], timeout=CALL_SECONDS)),
        "tasklib.backlog_async": tasklib.backlog_async,
        "tasklib.cancel_task_async": lambda: tasklib.cancel_task_async(NOBODY),
        "tasklib.expire_tasks_async": tasklib.expire_tasks_async,
        "tasklib.get_task_async": lambda: tasklib.get_task_async(NOBODY),
        "tasklib.get_attempts_async": lambda: tasklib.get_attempts_async(NOBODY),
        "tasklib.list_tasks_async": tasklib.list_tasks_async,
        "tasklib.queue_statistics_async": tasklib.queue_statistics_async,
        "tasklib.retry_task_async": lambda: tasklib.retry_task_async(NOBODY),
        "tasklib.submit_many": lambda: tasklib.submit_many([job.new(1), job.new(2)]),
        "tasklib.submit_task": lambda: tasklib.submit_task(job, 1),
        "tasklib.task_statistics_async": tasklib.task_statistics_async,
        "tasklib.set_queue_async": lambda: tasklib.set_queue_async("mail", max_running=1),
        "tasklib.get_queue_async": lambda: tasklib.get_queue_async("mail"),
        "tasklib.list_queues_async": tasklib.list_queues_async,
        "tasklib.pause_queue_async": lambda: tasklib.pause_queue_async("mail"),
        "tasklib.resume_queue_async": lambda: tasklib.resume_queue_async("mail"),
        "tasklib.set_cluster_async": lambda: tasklib.set_cluster_async(cluster_wide_cap=5),
        "tasklib.get_cluster_async": tasklib.get_cluster_async,
        "tasklib.list_transitions_async": tasklib.list_transitions_async,
        "tasklib.wait_for": lambda: tasklib.wait_for([NOBODY], timeout=CALL_SECONDS),
    }


def is_change(name: str) -> bool:
    return any(
        verb in name for verb in ("submit", "cancel", "retry", "expire_tasks", "set_", "pause_queue", "resume_queue")
    )


@pytest.fixture(scope="module")
def server() -> Iterator[FailingServer]:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)  # a server that root has started is not root's
        made = FailingServer(Path(directory))
        migrate.migrate(tasklib.Config(made.dsn))
        yield made
        made.close()


@pytest.fixture
def config(server: FailingServer) -> Iterator[tasklib.Config]:
    made = tasklib.Config(server.url, database_timeout_seconds=CALL_SECONDS, pool_size=40)
    tasklib.init(made)
    yield made
    tasklib.close()


def test_every_public_call_is_in_the_tables() -> None:
    """A call that is added later is tried in outages like all others."""
    public = {
        f"{owner.__name__}.{name}"
        for owner in (Client, AsyncClient, Handle, TaskFunction, Submitter)
        for name, value in inspect.getmembers(owner, inspect.isroutine)
        if not name.startswith("_")
    }
    public |= {f"tasklib.{name}" for name in tasklib.__all__ if inspect.isroutine(getattr(tasklib, name))}
    config = tasklib.Config("")
    tables = [sync_calls(Client(config)), async_calls(AsyncClient(config)), QUIET, CLOSING]
    assert sorted(name for table in tables for name in table) == sorted(public)


def is_answered(look: Callable[[], object]) -> bool:
    """Before the outage. A server on a slow machine may need more time than the calls of these tests have."""
    try:
        look()
    except tasklib.DatabaseUnavailable:
        return False
    return True


async def answered(look: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """The same, for a call that is awaited."""
    for _ in range(int(END_SECONDS / CALL_SECONDS)):
        with contextlib.suppress(tasklib.DatabaseUnavailable):
            await look()
            return


class Outage:
    """All calls at once, around the moment at which the server fails."""

    def __init__(self, config: tasklib.Config) -> None:
        self.client, self.async_client = Client(config), AsyncClient(config)
        self.sync_calls, self.async_calls = sync_calls(self.client), async_calls(self.async_client)
        self.may_start, self.may_close = threading.Event(), threading.Event()
        self.is_warm = threading.Event()
        self.ended: dict[str, BaseException | Any] = {}

    def try_sync(self, name: str) -> None:
        try:
            self.ended[name] = self.sync_calls[name]()
        except BaseException as error:  # noqa: BLE001 - it is looked at below
            self.ended[name] = error

    async def try_async(self, name: str) -> None:
        try:
            self.ended[name] = await self.async_calls[name]()
        except BaseException as error:  # noqa: BLE001 - as above
            self.ended[name] = error

    def run_async_calls(self, *, is_first_use: bool) -> None:
        async def run() -> None:
            if not is_first_use:
                await asyncio.gather(answered(self.async_client.list_tasks), answered(tasklib.list_tasks_async))
            self.is_warm.set()
            await asyncio.to_thread(self.may_start.wait)
            await asyncio.gather(*(self.try_async(name) for name in self.async_calls))
            await asyncio.to_thread(self.may_close.wait)
            await self.async_client.close()

        asyncio.run(run())

    def are_all_ended(self) -> bool:
        return self.ended.keys() >= self.sync_calls.keys() | self.async_calls.keys()


@pytest.mark.parametrize("when", ["before the first use", "before the call", "during the call"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_ends_in_an_outage(server: FailingServer, config: tasklib.Config, kind: str, when: str) -> None:
    """With DatabaseUnavailable; with CommitUnknown only where something may have been changed. To close ends, too."""
    outage = Outage(config)
    is_first_use = when == "before the first use"
    with ThreadPoolExecutor(len(outage.sync_calls) + 1) as threads, contextlib.ExitStack() as stack:
        stack.callback(outage.may_close.set)
        stack.callback(outage.may_start.set)
        loop_ended = threads.submit(outage.run_async_calls, is_first_use=is_first_use)
        if not is_first_use:
            wait_until(lambda: is_answered(outage.client.list_tasks), "its first connection")
            wait_until(lambda: is_answered(tasklib.list_tasks), "its first connection")
        assert outage.is_warm.wait(END_SECONDS)
        if when == "during the call":
            begin_calls_that_wait(server, outage, threads)
        with server.outage(kind):
            if when != "during the call":
                begin(outage, threads)
            wait_until(outage.are_all_ended, "all calls to end", seconds=END_SECONDS)
            outage.may_close.set()
            threads.submit(outage.client.close).result(END_SECONDS)
            threads.submit(tasklib.close).result(END_SECONDS)
            loop_ended.result(END_SECONDS)
    wrong = {name: end for name, end in outage.ended.items() if not is_right(name, end)}
    assert wrong == {}


def is_right(name: str, end: Any) -> bool:
    wanted = tasklib.DatabaseUnavailable, tasklib.CommitUnknown
    return type(end) in wanted[: 1 + is_change(name)]


def begin(outage: Outage, threads: ThreadPoolExecutor) -> None:
    outage.may_start.set()
    for name in outage.sync_calls:
        threads.submit(outage.try_sync, name)


def begin_calls_that_wait(server: FailingServer, outage: Outage, threads: ThreadPoolExecutor) -> None:
    """For a lock, so that the outage finds them in the middle of their statements."""
    holder = psycopg.connect(server.dsn)
    tables = "tasklib.tasks, tasklib.task_rollups, tasklib.queues, tasklib.policy, tasklib.task_transitions"
    holder.execute(literal(f"lock table {tables} in access exclusive mode"))
    begin(outage, threads)
    waiting = (
        "select count(*) from pg_stat_activity where application_name like 'tasklib%' and wait_event_type = 'Lock'"
    )
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        wait_until(
            lambda: outage.are_all_ended() or (conn.execute(waiting).fetchone() or (0,))[0] >= 20, "calls that wait"
        )
    threads.submit(let_go_at_the_end, outage, holder)


def let_go_at_the_end(outage: Outage, holder: psycopg.Connection[Any]) -> None:
    outage.may_close.wait()
    holder.pgconn.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_waits_burns_no_cpu(server: FailingServer, config: tasklib.Config, kind: str) -> None:
    """While it waits for a database that is away, sync or async: a core that is burnt would be 1."""
    probe = tasklib.Config(config.database_url, database_timeout_seconds=3)

    async def ask() -> None:
        async with AsyncClient(probe) as client:
            await answered(client.list_tasks)
            warm.wait(END_SECONDS)
            with pytest.raises(tasklib.DatabaseUnavailable):
                await client.submit(job.new(1))

    warm = threading.Barrier(3)
    with Client(probe) as client, ThreadPoolExecutor(2) as threads:
        wait_until(lambda: is_answered(client.list_tasks), "its first connection")
        asked = threads.submit(asyncio.run, ask())
        wait_until(lambda: warm.n_waiting == 1, "the async client's connection")
        with server.outage(kind):
            began, used = time.monotonic(), time.process_time()
            warm_up = threads.submit(warm.wait, END_SECONDS)
            warm.wait(END_SECONDS)
            warm_up.result(END_SECONDS)
            with pytest.raises(tasklib.DatabaseUnavailable):
                client.get_task(NOBODY)
            asked.result(END_SECONDS)
            assert time.process_time() - used < 0.3 * (time.monotonic() - began)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_client_is_back_soon_after_an_outage(
    server: FailingServer, config: tasklib.Config, *, is_async: bool
) -> None:
    """Its pool tries again while somebody waits, and not with pauses as long as the outage was: that would be 7 s."""
    brief = tasklib.Config(config.database_url, database_timeout_seconds=2)
    async with AsyncClient(brief) as client:

        async def can_look() -> bool:
            try:
                await client.list_tasks() if is_async else await asyncio.to_thread(client.as_sync().list_tasks)
            except tasklib.DatabaseUnavailable:
                return False
            return True

        assert await can_look() or await can_look() or await can_look()
        with server.outage("refusing"):
            for _ in range(4):
                assert not await can_look()
        assert await can_look() or await can_look()


def test_who_waits_for_the_schema_check_shares_it(server: FailingServer, config: tasklib.Config) -> None:
    """Many threads of a process that starts in an outage: none waits for the checks of those before it, nor as long as
    the URL allows for connecting.
    """
    url = make_conninfo(server.url, connect_timeout=60)
    slow = tasklib.Config(url, database_timeout_seconds=CALL_SECONDS)
    with Client(slow) as client, server.outage("unreachable"), ThreadPoolExecutor(30) as threads:
        asked = [threads.submit(client.list_tasks) for _ in range(30)]
        for each in asked:
            assert isinstance(each.exception(timeout=END_SECONDS), tasklib.DatabaseUnavailable)
