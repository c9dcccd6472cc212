"""`django.tasks` on tasklib: what the interface promises, kept by a real worker."""

from __future__ import annotations

import contextlib
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.utils import timezone

import tasklib
from tasklib import TaskWorker
from tests.django_project import fixtures

if TYPE_CHECKING:
    from types import ModuleType

    from tests.support.raw_sql import Conn

set_up_project = fixtures.set_up_project
project = fixtures.project
others = fixtures.others
run = fixtures.run_tasks


class Undo(Exception):
    """Leaves an atomic block, so that it rolls back."""


@pytest.fixture
def tasks(project: tasklib.Config) -> ModuleType:
    """The project's tasks.py."""
    from tests.django_project import tasks  # noqa: PLC0415 - importable only in a project

    return tasks


@pytest.fixture
def contract(project: tasklib.Config) -> ModuleType:
    """The names of django.tasks, or of its backport."""
    from tasklib.django import contract  # noqa: PLC0415 - importable only in a project

    return contract


def count(conn: Conn) -> int:
    row = conn.execute("select count(*) from tasklib.tasks").fetchone()
    assert row is not None
    return int(row[0])


def test_a_task_runs_and_its_result_is_found(project: tasklib.Config, tasks: ModuleType) -> None:
    """READY with what was enqueued; after a worker, SUCCESSFUL with the return value and the times."""
    result = tasks.add.enqueue(1, b=2)
    assert (result.status, result.args, result.kwargs, result.attempts) == ("READY", [1], {"b": 2}, 0)
    with pytest.raises(ValueError, match="not finished"):
        _ = result.return_value
    run(project)
    result.refresh()
    assert (result.status, result.return_value, result.is_finished, result.errors) == ("SUCCESSFUL", 3, True, [])
    assert result.enqueued_at <= result.started_at == result.last_attempted_at <= result.finished_at
    assert (result.attempts, len(result.worker_ids)) == (1, 1)
    again = tasks.add.get_result(result.id)
    assert (again.task, again.return_value, again.backend) == (tasks.add, 3, "default")


def test_async_tasks_queues_and_priorities(project: tasklib.Config, tasks: ModuleType, others: Conn) -> None:
    """A coroutine runs on the worker's loop, and may use the ORM; queue and priority are the row's."""
    result = tasks.add_async.enqueue(1, 2)
    tasks.add.using(priority=-100).enqueue(1, 2)
    rows = others.execute("select name, queue, priority from tasklib.tasks order by id").fetchall()
    module = "tests.django_project.tasks"
    assert rows == [(f"{module}.add_async", "mail", 50), (f"{module}.add", "default", -100)]
    run(project)
    result.refresh()
    assert (result.status, result.return_value) == ("SUCCESSFUL", 3)
    assert (result.task.queue_name, result.task.priority) == ("mail", 50)


async def test_the_async_methods(project: tasklib.Config, tasks: ModuleType) -> None:
    """aenqueue, aget_result, arefresh."""
    result = await tasks.add.aenqueue(2, 3)
    await TaskWorker(project).run_until_empty()
    await result.arefresh()
    assert result.return_value == 5
    assert (await tasks.add.aget_result(result.id)).return_value == 5
    await sync_to_async(connections.close_all)()


def test_an_enqueue_is_part_of_atomic(tasks: ModuleType, others: Conn) -> None:
    """It is found in its own transaction; a rollback leaves nothing of it."""
    with contextlib.suppress(Undo), transaction.atomic():
        result = tasks.add.enqueue(1, 2)
        assert tasks.add.get_result(result.id).status == "READY"
        assert count(others) == 0
        raise Undo
    assert count(others) == 0
    with transaction.atomic():
        tasks.add.enqueue(1, 2)
    assert count(others) == 1


def test_run_after_waits(project: tasklib.Config, tasks: ModuleType, others: Conn) -> None:
    """Not before its time; the result says when that is."""
    later = timezone.now() + timedelta(hours=1)
    result = tasks.add.using(run_after=later).enqueue(1, 2)
    run(project)
    result.refresh()
    assert (result.status, tasks.add.get_result(result.id).task.run_after) == ("READY", later)
    others.execute("update tasklib.tasks set due_at = now(), scheduled_at = now()")
    run(project)
    result.refresh()
    assert result.status == "SUCCESSFUL"


def test_a_failure_tells_its_class_and_its_traceback(project: tasklib.Config, tasks: ModuleType) -> None:
    """FAILED once its retries are used up; each attempt has its error, the last one its traceback."""
    result = tasks.refuse.enqueue(reason="because")
    run(project)
    result.refresh()
    assert (result.status, result.attempts) == ("FAILED", 3)
    with pytest.raises(ValueError, match="failed"):
        _ = result.return_value
    assert [error.exception_class for error in result.errors] == [tasks.Refused] * 3
    assert "because" in result.errors[0].traceback
    assert "in refuse\n    raise Refused(reason)" in result.errors[-1].traceback


def test_a_task_that_waits_for_its_next_attempt_is_ready(tasks: ModuleType, others: Conn) -> None:
    """In Django's words: "ready to be executed again"."""
    result = tasks.add.enqueue(1, 2)
    others.execute(
        "update tasklib.tasks set state = 'failed', ready = false, next_retry_at = now() + interval '1 hour', "
        "due_at = now() + interval '1 hour', error_code = 'X'"
    )
    result.refresh()
    assert result.status == "READY"


def test_what_ended_it_from_outside_is_an_error_too(project: tasklib.Config, tasks: ModuleType, others: Conn) -> None:
    """Cancelled, expired, buried: FAILED, each with a class that can be imported."""
    result = tasks.add.enqueue(1, 2)
    tasklib.cancel_task(result.id, "not wanted")
    for state, code, expected in [
        ("cancelled", "CANCELLED", tasklib.TaskCancelled),
        ("expired", "EXPIRED", tasklib.TaskExpired),
        ("buried", "BURIED", tasklib.TaskBuried),
        ("failed", "TIMEOUT", TimeoutError),
        ("failed", "WORKER_CRASHED", tasklib.TaskFailed),
    ]:
        others.execute("update tasklib.tasks set state = %s, error_code = %s", [state, code])
        result.refresh()
        assert result.status == "FAILED"
        assert [error.exception_class for error in result.errors] == [expected]
    assert "not wanted" in result.errors[0].traceback


def test_the_context_knows_the_attempt(project: tasklib.Config, tasks: ModuleType) -> None:
    """And the result so far: this one fails the first time."""
    result = tasks.describe.enqueue("hello")
    run(project)
    result.refresh()
    assert result.return_value == {"word": "hello", "attempt": 2, "id": result.id, "status": "RUNNING"}
    assert [error.exception_class for error in result.errors] == [tasks.Refused]


def test_arguments_may_be_called_like_options(project: tasklib.Config, tasks: ModuleType) -> None:
    """Django's tasks know nothing of tasklib's options."""
    result = tasks.options_as_arguments.enqueue(1, "q", connection="c", args=[1])
    run(project)
    result.refresh()
    assert result.return_value == [1, "q", "c", [1]]


def test_only_json_goes_in_and_out(project: tasklib.Config, tasks: ModuleType, others: Conn) -> None:
    """Another argument is refused before anything is stored; another return value fails the task."""
    with pytest.raises(TypeError, match="Unsupported type"):
        tasks.add.enqueue(object(), 1)
    assert count(others) == 0
    result = tasks.return_something_else.enqueue()
    run(project)
    result.refresh()
    assert (result.status, result.errors[-1].exception_class) == ("FAILED", TypeError)


def test_a_result_that_is_not_there(tasks: ModuleType, contract: ModuleType) -> None:
    """No such id, no id at all, or a task of tasklib's own, of which Django's interface knows nothing."""
    plain = tasklib.submit_task_sync("ship", 1)
    for result_id in ("00000000-0000-0000-0000-000000000000", "none", str(plain)):
        with pytest.raises(contract.TaskResultDoesNotExist):
            tasks.add.get_result(result_id)


def test_what_cannot_be_enqueued_is_refused(tasks: ModuleType, contract: ModuleType) -> None:
    """Queues that the settings do not name, and priorities out of Django's range."""
    with pytest.raises(contract.InvalidTask, match="other"):
        tasks.add.using(queue_name="other")
    with pytest.raises(contract.InvalidTask, match="between -100 and 100"):
        tasks.add.using(priority=101)


def test_the_flags_say_what_it_does(tasks: ModuleType) -> None:
    """All four."""
    backend = tasks.add.get_backend()
    flags = ["supports_defer", "supports_async_task", "supports_get_result", "supports_priority"]
    assert [getattr(backend, flag) for flag in flags] == [True] * 4


def test_the_checks_name_a_queue_that_cannot_be(tasks: ModuleType) -> None:
    """`manage.py check` tells before the first enqueue does."""
    from tasklib.django import TasklibBackend  # noqa: PLC0415 - importable only in a project

    assert list(tasks.add.get_backend().check()) == []
    found = list(TasklibBackend("default", {"QUEUES": ["Mail"]}).check())
    assert [(each.id, "'Mail' cannot be a queue's name" in each.msg) for each in found] == [("tasklib.E002", True)]


def test_options_are_those_of_a_task(project: tasklib.Config, tasks: ModuleType, others: Conn) -> None:
    """OPTIONS of the backend: here, no retries and a timeout."""
    from tasklib.django import TasklibBackend  # noqa: PLC0415 - importable only in a project
    from tasklib.registry import default_registry  # noqa: PLC0415 - beside its use

    default_registry._functions.pop(tasks.refuse.module_path)
    backend = TasklibBackend("default", {"OPTIONS": {"max_retries": 0, "timeout_seconds": 60.0}})
    result: Any = backend.enqueue(tasks.refuse, ["because"], {})
    assert others.execute("select max_retries, timeout_seconds from tasklib.tasks").fetchone() == (0, 60.0)
    run(project)
    result.refresh()
    assert (result.status, result.attempts) == ("FAILED", 1)


def test_signals_are_sent(
    project: tasklib.Config, tasks: ModuleType, contract: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """Enqueued, started and finished; a receiver that raises changes nothing, and is logged."""
    seen: list[tuple[str, str, int]] = []

    def receiver(word: str) -> Any:
        def receive(task_result: Any, **_: Any) -> None:
            seen.append((word, str(task_result.status), task_result.attempts))
            raise RuntimeError("a receiver's own problem")

        return receive

    receivers = {word: receiver(word) for word in ("task_enqueued", "task_started", "task_finished")}
    for word, receive in receivers.items():
        getattr(contract, word).connect(receive)
    try:
        with caplog.at_level(logging.CRITICAL):
            results = [tasks.add.enqueue(1, 2), tasks.add_async.enqueue(1, 2), tasks.describe.enqueue("x")]
            run(project)
    finally:
        for word, receive in receivers.items():
            getattr(contract, word).disconnect(receive)
    for result in results:
        result.refresh()
    assert [result.status for result in results] == ["SUCCESSFUL"] * 3
    assert seen.count(("task_enqueued", "READY", 0)) == 3
    assert seen.count(("task_started", "RUNNING", 1)) == 3
    assert seen.count(("task_finished", "FAILED", 1)) == 1
    assert seen.count(("task_started", "RUNNING", 2)) == 1
    assert seen.count(("task_finished", "SUCCESSFUL", 1)) == 2
    assert seen.count(("task_finished", "SUCCESSFUL", 2)) == 1
    assert len(seen) == 11
