"""`tasklib.current_task()`: what a running task knows of itself, and says of itself."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import pytest

import tasklib
from tasklib.worker import finish_loop
from tests.support.working import get, running, wait_final
from tools.waiting import wait_until


def test_outside_of_a_task_there_is_none() -> None:
    """A clear error, that says where it works."""
    assert not tasklib.is_running_task()
    with pytest.raises(tasklib.NoCurrentTask, match="outside of a task"):
        tasklib.current_task()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_task_knows_itself(client: tasklib.Client, config: tasklib.Config, kind: str) -> None:
    """Its id, name, queue, attempt, deadline and tags."""
    seen: list[tasklib.CurrentTask] = []

    def note() -> None:
        seen.append(tasklib.current_task())
        assert tasklib.is_running_task()
        remaining = tasklib.current_task().remaining_seconds
        assert remaining is not None
        assert 0 < remaining <= 60
        if len(seen) == 1:
            raise tasklib.Retry(delay_seconds=0)

    async def note_async() -> None:
        await asyncio.to_thread(note)  # the context goes along

    tasklib.task(name="job")(note if kind == "sync" else note_async)
    with running(config):
        task_id = client.submit_task("job", queue="mail", timeout_seconds=60, tags={"a": [1]})
        task = wait_final(client, task_id)
    assert [each.attempt for each in seen] == [1, 2]
    assert [each.retry_count for each in seen] == [0, 1]
    last = seen[-1]
    assert (last.id, last.name, last.queue, last.tags, last.parent_id) == (task_id, "job", "mail", {"a": [1]}, None)
    assert last.deadline == last.started_at + timedelta(seconds=60)
    assert last.started_at == task.started_at
    assert not last.cancel_asked
    assert not tasklib.is_running_task()


def test_without_a_timeout_there_is_no_deadline(client: tasklib.Client, config: tasklib.Config) -> None:
    seen: list[tasklib.CurrentTask] = []
    tasklib.task(name="job")(lambda: seen.append(tasklib.current_task()))
    with running(config):
        wait_final(client, client.submit_task("job"))
    assert seen[0].deadline is None
    assert seen[0].remaining_seconds is None


def test_children_carry_their_parent(app: None, client: tasklib.Client, config: tasklib.Config) -> None:
    """Whatever way they are submitted; and what is submitted elsewhere has none."""
    child = tasklib.task(name="child")(lambda: None)
    ids: list[Any] = []

    @tasklib.task
    async def parent() -> None:
        ids.append(await child.submit())
        ids.append(await child.options(idempotency_key="k").submit())
        ids.append(await tasklib.submit_task("unknown-elsewhere", 1))
        ids.extend(await tasklib.submit_many([child.new(), child.new()]))
        ids.append(child.submit_sync())

    with running(config, concurrency=2):
        parent_id = client.submit_task(parent)
        wait_final(client, parent_id)
    assert [get(client, each).parent_id for each in ids] == [parent_id] * 6
    assert get(client, ids[2]).args == [1]
    assert get(client, client.submit(child.new())).parent_id is None


def test_others_see_the_progress(client: tasklib.Client, config: tasklib.Config) -> None:
    """While it runs, and what it said last when it has ended."""
    go_on = threading.Event()

    @tasklib.task
    def job() -> None:
        tasklib.current_task().progress(3, 10, "three\x00")
        assert go_on.wait(20)
        tasklib.current_task().progress(10, 10)

    with running(config):
        task_id = client.submit_task(job)
        wait_until(lambda: get(client, task_id).progress is not None, "progress")
        assert get(client, task_id).progress == {"done": 3, "total": 10, "message": "three\ufffd"}
        go_on.set()
        assert wait_final(client, task_id).progress == {"done": 10, "total": 10}


def test_progress_is_cheap(client: tasklib.Client, config: tasklib.Config) -> None:
    """Ten thousand words are a handful of writes."""

    @tasklib.task
    def job() -> None:
        for n in range(10_000):
            tasklib.current_task().progress(n)

    with running(config) as worker:
        task_id = client.submit_task(job)
        assert worker._run is not None
        written: list[Any] = []
        note = worker._run.finish_loop._statements.note_progress
        worker._run.finish_loop._statements.note_progress = lambda *given: (written.append(given), note(*given))[1]  # type: ignore[method-assign,func-returns-value]
        task = wait_final(client, task_id)
    assert task.progress == {"done": 9_999}
    assert task.started_at is not None
    assert task.completed_at is not None
    seconds = (task.completed_at - task.started_at).total_seconds()
    assert len(written) <= seconds / finish_loop.PROGRESS_EVERY_SECONDS + 1


@pytest.mark.parametrize("wrong", ["3", None, True, float("nan"), float("inf"), 1e300])
def test_progress_is_a_number(client: tasklib.Client, config: tasklib.Config, wrong: Any) -> None:
    """A clear error in the task; JSON could not hold it."""
    tasklib.task(name="job", max_retries=0)(lambda: tasklib.current_task().progress(wrong))
    with running(config):
        task = wait_final(client, client.submit_task("job"))
    assert task.error is not None
    assert task.error.startswith("InvalidOptions: progress: done must be a number")


def test_a_loop_can_look_whether_to_stop(client: tasklib.Client, config: tasklib.Config) -> None:
    """The worker stops: the task saves what it has, and goes on elsewhere, at no cost."""
    began = threading.Event()

    @tasklib.task
    def long() -> None:
        began.set()
        current = tasklib.current_task()
        wait_until(lambda: current.should_stop, "the stop")
        assert not current.cancel_asked
        raise tasklib.Snooze(3600)

    with running(config, grace_seconds=20) as worker:
        task_id = client.submit_task(long)
        assert began.wait(20)
        worker.stop()
    task = get(client, task_id)
    assert (task.state, task.retry_count, task.attempt) == ("pending", 0, 1)


def test_a_cancel_is_seen_inside(client: tasklib.Client, config: tasklib.Config) -> None:
    """Also where the interrupt is caught."""
    began = threading.Event()
    seen: list[bool] = []

    @tasklib.task
    def long() -> None:
        try:
            for _ in range(100_000):  # for longer than the cancel may take
                began.set()
                threading.Event().wait(0.001)
        finally:
            seen.append(tasklib.current_task().cancel_asked)

    with running(config):
        task_id = client.submit_task(long)
        assert began.wait(20)
        assert client.cancel_task(task_id) == "asked"
        assert wait_final(client, task_id, seconds=60).state == "cancelled"
    assert seen == [True]
