"""Suspects: tasks that executed when their worker died. They start soon, beside any load, and harm no other task."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

import tasklib
from tasklib.worker import hooks
from tasklib.worker.isolation.suspect_limits import SuspectLimits
from tests.support.working import ManualWorker, get, grown_up_reaper, running, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType
    from uuid import UUID

    from tasklib import TaskWorker
    from tests.support.raw_sql import Conn


@pytest.fixture
def tasks() -> Iterator[ModuleType]:
    """Imported for one test alone: its hooks would run in the workers of others."""
    start, stop = list(hooks._on_start), list(hooks._on_stop)
    yield importlib.import_module("tests.support.suspect_tasks")
    hooks._on_start[:], hooks._on_stop[:] = start, stop
    del sys.modules["tests.support.suspect_tasks"]


@contextlib.contextmanager
def containing(
    config: tasklib.Config, tasks: ModuleType, *others: tasklib.TaskFunction[..., Any], **options: Any
) -> Iterator[TaskWorker]:
    """A worker that gives suspects processes of their own, and knows these functions alone: others are left behind by
    other tests, where no fork server can find them.
    """
    functions = [each for each in vars(tasks).values() if isinstance(each, tasklib.TaskFunction)]
    with running(config, suspects_in_processes=True, tasks=[*functions, *others], **options) as worker:
        yield worker


def make_suspects(conn: Conn, *task_ids: UUID) -> None:
    """As after the first death of their worker."""
    conn.execute("update tasklib.tasks set suspect = true, crash_count = 1 where id = any(%s)", [list(task_ids)])


def submit_suspects(client: tasklib.Client, conn: Conn, *new: Any) -> list[UUID]:
    with conn.transaction():
        ids = client.submit_many(list(new), connection=conn)
        make_suspects(conn, *ids)
    return list(ids)


def test_a_suspect_starts_beside_a_backlog(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """An embedded worker that is never idle, and whose claims begin above the suspect: it starts no other tasks for the
    moment that its short ones take to end, and runs the suspect alone.
    """
    executing: set[str] = set()
    company: list[set[str]] = []
    done: list[str] = []

    @tasklib.task
    async def note(what: str) -> None:
        executing.add(what)
        if what == "suspect":
            company.append(set(executing))
        else:
            await asyncio.sleep(0.01)
        executing.discard(what)
        done.append(what)

    client.submit_many([note.new(what=str(number)) for number in range(3_000)])
    with running(config, concurrency=10):
        wait_until(lambda: len(done) > 100, "the worker is under way")
        (suspect,) = submit_suspects(client, conn, note.options(priority=-5).new(what="suspect"))
        wait_until(lambda: "suspect" in done, "the suspect")
        assert done.index("suspect") < 2_500, "it waited for the backlog"
        wait_final(client, suspect)
    assert company == [{"suspect"}]


def test_suspects_have_processes_of_their_own_where_a_worker_is_not_empty(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, tasks: ModuleType, tmp_path: Path
) -> None:
    """As under the daemon. All of them at once, sync and async ones, beside a long task that is not disturbed; other
    tasks go on meanwhile.
    """
    meeting, door = tmp_path / "meeting", tmp_path / "door"
    meeting.mkdir()
    with containing(config, tasks, concurrency=5):
        long = client.submit_task(tasks.wait_for, str(door))
        wait_until(lambda: get(client, long).state == "running", "the long one runs")
        functions = [tasks.attend, tasks.attend_async, tasks.attend]
        suspects = submit_suspects(client, conn, *(each.new(str(meeting), 3) for each in functions))
        found = [wait_final(client, each, seconds=60) for each in suspects]
        assert [task.state for task in found] == ["completed"] * 3, [task.error for task in found]
        pids = {pid for task in found for pid in (task.result or {})["value"]}
        assert len(pids) == 3
        assert os.getpid() not in pids
        assert get(client, long).state == "running"
        assert wait_final(client, client.submit_task(tasks.task_context)).state == "completed"
        door.touch()
        assert (wait_final(client, long).result or {})["value"] == os.getpid()
    assert {(task.suspect, task.crash_count, task.strikes) for task in found} == {(False, 1, 0)}


@pytest.mark.parametrize("name", ["task_context", "surroundings_async"])
def test_a_suspect_in_a_process_finds_what_it_finds_in_its_worker(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, tasks: ModuleType, tmp_path: Path, name: str
) -> None:
    """What the hooks of a worker's start have opened."""
    door = tmp_path / "door"
    with containing(config, tasks, concurrency=2):
        long = client.submit_task(tasks.wait_for, str(door))
        wait_until(lambda: get(client, long).state == "running", "the long one runs")
        (suspect,) = submit_suspects(client, conn, getattr(tasks, name).new())
        found = wait_final(client, suspect, seconds=60)
        door.touch()
        wait_final(client, long)
    pid, opened = (found.result or {})["value"]
    assert pid != os.getpid()
    assert opened == ["sync", "async"]


def test_a_suspect_that_dies_in_its_process_takes_nobody_with_it(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, tasks: ModuleType, tmp_path: Path
) -> None:
    """Each death is a strike; it stays a suspect, since it would die in a worker the next time; it is buried."""
    door = tmp_path / "door"
    with containing(config, tasks, concurrency=2):
        long = client.submit_task(tasks.wait_for, str(door))
        wait_until(lambda: get(client, long).state == "running", "the long one runs")
        with conn.transaction():
            guilty = client.submit_task(tasks.die, connection=conn)
            # Two deaths short of a burial: after one more it would have to be alone in the worker, which is this one.
            conn.execute(
                "update tasklib.tasks set suspect = true, crash_count = 1, strikes = 1 where id = %s", [guilty]
            )
        buried = wait_final(client, guilty, seconds=60)
        door.touch()
        innocent = wait_final(client, long)
    assert (buried.state, buried.strikes, buried.crash_count) == ("buried", 3, 3)
    assert "SIGKILL" in str(buried.error)
    assert (innocent.state, innocent.attempt, innocent.crash_count) == ("completed", 1, 0)


@pytest.mark.parametrize(
    ("name", "limits", "reason"),
    [
        ("fill_memory", SuspectLimits(megabytes=300), "MB, and 300 are allowed"),
        ("hold_interpreter", SuspectLimits(stall_seconds=2.0), "it has stood still for 3 s"),
    ],
)
def test_a_suspect_in_a_process_is_kept_in_limits(
    client: tasklib.Client,
    conn: Conn,
    config: tasklib.Config,
    tasks: ModuleType,
    tmp_path: Path,
    name: str,
    limits: SuspectLimits,
    reason: str,
) -> None:
    """Nobody else would stop it: it fills the memory, or stands still, and has no timeout. One that is long and quiet
    is left alone.
    """
    door = tmp_path / "door"
    with containing(config, tasks, concurrency=3, suspect_limits=limits):
        long = client.submit_task(tasks.wait_for, str(door))
        wait_until(lambda: get(client, long).state == "running", "the long one runs")
        quiet, guilty = submit_suspects(client, conn, tasks.wait_for.new(str(door)), getattr(tasks, name).new())
        conn.execute("update tasklib.tasks set strikes = 2 where id = %s", [guilty])
        buried = wait_final(client, guilty, seconds=60)
        assert get(client, quiet).state == "running"
        door.touch()
        assert {wait_final(client, each).state for each in (quiet, long)} == {"completed"}
    assert buried.state == "buried"
    assert reason in str(buried.error)


def test_a_suspect_that_no_other_process_can_run_waits_for_an_empty_worker(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, tasks: ModuleType, tmp_path: Path
) -> None:
    """Its function is defined where no import finds it. It costs nothing to have tried."""
    door = tmp_path / "door"
    nested = tasklib.task(name="nested")(lambda: os.getpid())  # noqa: PLW0108 - a function of this place
    with containing(config, tasks, nested, concurrency=2) as worker:
        long = client.submit_task(tasks.wait_for, str(door))
        wait_until(lambda: get(client, long).state == "running", "the long one runs")
        (suspect,) = submit_suspects(client, conn, nested.new())
        run = worker._run
        assert run is not None
        wait_until(lambda: "nested" in run.processes._not_found, "it was tried in a process", seconds=60)
        door.touch()
        found = wait_final(client, suspect)
        wait_final(client, long)
    assert (found.result or {})["value"] == os.getpid()
    assert (found.retry_count, found.crash_count, found.strikes) == (0, 1, 0)


def test_the_death_of_a_worker_is_no_strike_for_a_suspect_in_a_process(
    client: tasklib.Client, conn: Conn, config: tasklib.Config
) -> None:
    """It was not alone there, and a death beside others is no strike. The next time it is a suspect again."""
    quick = tasklib.Config(config.database_url, lease_seconds=0.3)
    job = tasklib.task(name="job")(lambda: None)
    (suspect,) = submit_suspects(client, conn, job.new())
    victim, grave = ManualWorker(quick, "victim"), ManualWorker(quick, "grave")
    (claimed,) = victim.claim_suspects("job")
    assert victim.start(claimed, is_contained=True) == [suspect]
    assert get(client, suspect).suspect is False
    reaper = grown_up_reaper(quick, grave.session)
    conn.execute("update tasklib.workers set lease_until = '-infinity' where worker_id = %s", [victim.id])
    reaper.run_once()
    found = get(client, suspect)
    assert (found.state, found.suspect, found.crash_count, found.strikes) == ("pending", True, 2, 0)
    victim.close()
    grave.close()


def test_what_must_be_marked_first_is_not_starved_by_others(client: tasklib.Client, config: tasklib.Config) -> None:
    """A worker whose buffer is never empty leaves the next free slot to one that needs it."""
    done: list[str] = []

    @tasklib.task
    async def note(what: str) -> None:
        await asyncio.sleep(0.002)
        done.append(what)

    once = tasklib.task(name="once", on_crash="fail")(lambda: done.append("once"))
    client.submit_many([note.new(what="other") for _ in range(3_000)])
    with running(config, concurrency=2):
        wait_until(lambda: len(done) > 100, "the worker is under way")
        client.submit_task(once, priority=5)
        wait_until(lambda: "once" in done, "the one that is marked first")
        assert done.index("once") < 2_500


def test_a_server_for_suspects_is_stopped_when_it_is_no_longer_needed(
    client: tasklib.Client,
    conn: Conn,
    config: tasklib.Config,
    tasks: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes as much memory as a worker. Where no function asks for a process, none is started before a suspect."""
    monkeypatch.setattr("tasklib.worker.isolation.processes.UNUSED_SECONDS", 0.3)
    door = tmp_path / "door"
    with containing(config, tasks, concurrency=2) as worker:
        run = worker._run
        assert run is not None
        assert run.processes._server is None
        long = client.submit_task(tasks.wait_for, str(door))
        wait_until(lambda: get(client, long).state == "running", "the long one runs")
        (suspect,) = submit_suspects(client, conn, tasks.task_context.new())
        wait_final(client, suspect, seconds=60)
        wait_until(lambda: run.processes._server is None, "the server is gone")
        door.touch()
        wait_final(client, long)
    wait_until(lambda: not any(each.name == "tasklib-unused" for each in threading.enumerate()), "it has ended")
