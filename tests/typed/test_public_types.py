"""The decorator keeps a function's signature for type checkers.

mypy and pyright both check this file: an `ignore` that is not needed is an error to them, so each marked line is
proof that the mistake in it is seen. Nothing here is run but the last function.
"""

from __future__ import annotations

from typing import assert_type
from uuid import UUID

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
    assert_type(client.submit_many([bare.new("a")]), list[tasklib.TaskId])
    assert_type(await other.list_tasks(tags={"a": 1}), list[tasklib.Task])
    client.list_tasks(queu="mail")  # type: ignore[call-arg]
    client.submit(bare)  # type: ignore[arg-type]


def test_this_file_can_be_imported() -> None:
    """Both checkers read it as part of `python3 dev.py lint`."""
    assert bare("a")
