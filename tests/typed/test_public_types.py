"""The decorator keeps a function's signature for type checkers.

mypy and pyright both check this file: an `ignore` that is not needed is an error to them, so each marked line is
proof that the mistake in it is seen. Nothing here is run but the last function.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Literal, assert_type
from uuid import UUID

from psycopg import AsyncConnection, Connection

import tasklib


@tasklib.task
def bare(to: str, copies: int = 1) -> bool:
    return bool(to) and copies > 0


@tasklib.task(queue="mail", max_retries=5, retry_on=OSError)
async def with_options(to: str) -> str:
    return to


def calls_are_checked() -> None:
    assert_type(bare("a"), bool)
    assert_type(bare("a", copies=2), bool)
    bare(1)  # type: ignore[arg-type]
    bare()  # type: ignore[call-arg]
    bare("a", kopies=2)  # type: ignore[call-arg]


async def submits_are_checked() -> None:
    assert_type(await bare.submit("a", copies=2), tasklib.TaskId)
    assert_type(bare.submit_sync(to="a"), tasklib.TaskId)
    assert_type(await with_options("a"), str)
    assert_type(await with_options.submit(to="a"), tasklib.TaskId)
    await bare.submit(1)  # type: ignore[arg-type]
    await bare.submit("a", priority=5)  # type: ignore[call-arg]
    bare.submit_sync()  # type: ignore[call-arg]
    await with_options.submit(too="a")  # type: ignore[call-arg]


async def options_keep_the_types() -> None:
    mail = bare.options(queue="mail", priority=5, delay_seconds=1.5, tags={"a": 1}, on_crash="fail")
    assert_type(await mail.submit("a"), tasklib.TaskId)
    assert_type(mail.options(idempotency_key="k").new("a"), tasklib.NewTask)
    await mail.submit(1)  # type: ignore[arg-type]
    mail.submit_sync("a", kopies=1)  # type: ignore[call-arg]
    bare.options(prioritty=5)  # type: ignore[call-arg]
    bare.options(priority="high")  # type: ignore[arg-type]
    bare.options(on_crash="ignore")  # type: ignore[arg-type]


async def verbs_are_typed(client: tasklib.Client, other: tasklib.AsyncClient) -> None:
    assert_type(await tasklib.submit_task(bare, to="a"), tasklib.TaskId)
    assert_type(tasklib.get_task(UUID(int=0)), tasklib.Task | None)
    assert_type(tasklib.list_tasks(state="failed", name="bare", limit=5, queue="mail"), list[tasklib.Task])
    assert_type(tasklib.submit_task_sync(bare, to="a"), tasklib.TaskId)
    assert_type(await tasklib.submit_many([bare.new("a")]), list[tasklib.TaskId])
    assert_type(await tasklib.list_tasks_async(limit=5, queue="mail"), list[tasklib.Task])
    assert_type(await tasklib.cancel_task_async(UUID(int=0), "why"), Literal["cancelled", "asked"] | None)
    assert_type(client.submit_many([bare.new("a")]), list[tasklib.TaskId])
    assert_type(client.get_attempts(UUID(int=0)), list[tasklib.Attempt])
    assert_type(await other.get_attempts(task_id=UUID(int=0)), list[tasklib.Attempt])
    assert_type(await other.backlog(["mail"]), int)
    assert_type(await other.list_tasks(tags={"a": 1}), list[tasklib.Task])
    assert_type(tasklib.set_queue("mail", max_running=5, rate_limit=None, rank=tasklib.UNCHANGED), tasklib.Queue)
    assert_type(await other.get_queue("mail"), tasklib.Queue | None)
    assert_type(await tasklib.list_queues_async(), list[tasklib.Queue])
    assert_type(client.pause_queue("mail", until=timedelta(hours=1)), tasklib.Queue)
    assert_type(client.resume_queue("mail", "why"), bool)
    assert_type(await other.set_cluster(cluster_wide_cap=5), tasklib.ClusterPolicy)
    assert_type(client.list_transitions(queue="mail"), list[tasklib.Transition])
    client.set_queue("mail", max_runing=5)  # type: ignore[call-arg]
    client.set_queue("mail", max_running="5")  # type: ignore[arg-type]
    client.list_tasks(queu="mail")  # type: ignore[call-arg]
    client.submit(bare)  # type: ignore[arg-type]
    client.get_task(1)  # type: ignore[arg-type]
    await other.retry_task()  # type: ignore[call-arg]
    tasklib.backlog(queue="mail")  # type: ignore[call-arg]


async def handles_know_the_result(client: tasklib.Client, other: tasklib.AsyncClient) -> None:
    assert_type(await bare.submit_handle("a"), tasklib.Handle[bool])
    assert_type(bare.submit_handle_sync("a", copies=2), tasklib.Handle[bool])
    assert_type(await (await bare.submit_handle("a")).result(timeout=5), bool)
    assert_type(bare.submit_handle_sync("a").result_sync(), bool)
    await bare.submit_handle(1)  # type: ignore[arg-type]
    bare.submit_handle_sync()  # type: ignore[call-arg]

    # An async function's result is what it returns when it is awaited.
    assert_type(await with_options.submit_handle("a"), tasklib.Handle[str])
    assert_type((await with_options.submit_handle("a")).result_sync(5), str)

    # The options step keeps both.
    urgent, urgent_async = bare.options(priority=5), with_options.options(priority=5)
    assert_type(await urgent.submit_handle("a"), tasklib.Handle[bool])
    assert_type(urgent_async.submit_handle_sync("a"), tasklib.Handle[str])
    await urgent.submit_handle("a", kopies=1)  # type: ignore[call-arg]

    # Of a task that is known by its id.
    assert_type(bare.handle(UUID(int=0)), tasklib.Handle[bool])
    assert_type(with_options.handle("01a1e45e-0472-716f-be6e-cf211a4d24a6"), tasklib.Handle[str])
    assert_type(client.handle(UUID(int=0), bare), tasklib.Handle[bool])
    assert_type(other.handle(UUID(int=0), with_options), tasklib.Handle[str])
    assert_type(tasklib.handle(UUID(int=0)), tasklib.Handle[Any])
    assert_type(tasklib.handle(UUID(int=0)).status(), tasklib.State)


async def waiting_is_typed(client: tasklib.Client) -> None:
    handle = await bare.submit_handle("a")
    assert_type(await tasklib.wait_for([handle, handle.id], timeout=1), list[tasklib.Task])
    assert_type(client.wait_for([handle]), list[tasklib.Task])
    async for task in tasklib.as_completed([handle]):
        assert_type(task, tasklib.Task)
    for task in tasklib.as_completed_sync([handle.id]):
        assert_type(task.progress, Any)
    await tasklib.wait_for([1])  # type: ignore[list-item]


async def the_current_task_is_typed() -> None:
    current = tasklib.current_task()
    assert_type(current, tasklib.CurrentTask)
    assert_type(current.deadline, datetime | None)
    assert_type(current.connection, Connection[Any])
    assert_type(await current.async_connection(), AsyncConnection[Any])
    current.progress(1, 2, "three")
    current.progress("1")  # type: ignore[arg-type]


def test_this_file_can_be_imported() -> None:
    """Both checkers read it as part of `python3 dev.py lint`."""
    assert bare("a")
