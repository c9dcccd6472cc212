"""A task that calls os.fork() and returns in both processes: the copy ends, and does nothing of the worker's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psycopg
import pytest

import tasklib
from tasklib import migrate
from tools.daemons import PYTHONPATH, ROOT, daemon, is_alive
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.raw_sql import NewDatabase

JOURNAL = "FORKING_TASKS_JOURNAL"
PROGRAM = (
    "from tests.support import forking_tasks; forking_tasks.main()"  # not imported here: other tests have workers, too
)
OTHERS = 20
KINDS = (
    "in_thread", "in_thread_and_raise", "in_c", "on_loop",
    "on_loop_and_wait", "in_transaction", "in_async_transaction",
    "isolated", "isolated_in_transaction", "in_backoff",
)  # fmt: skip
IN_TRANSACTION = (
    "in_transaction", "in_async_transaction", "isolated_in_transaction",
)  # fmt: skip
NOT_COMPLETED = ("in_thread_and_raise", "in_backoff")  # not within the test
UNFINISHED = "select count(*) from tasklib.tasks where completed_at is null"


class Scene:
    """A database with a task that forks, and others behind it; and a journal of who ran where."""

    def __init__(self, dsn: str, directory: Path) -> None:
        self.dsn = dsn
        self.directory = directory
        self._journal = directory / "journal"
        self.environment = {JOURNAL: str(self._journal)}
        migrate.migrate(tasklib.Config(dsn))
        self.conn = psycopg.connect(dsn, autocommit=True)
        self.conn.execute("create table public.forked (pid int)")

    def submit(self, kind: str) -> None:
        with tasklib.Client(tasklib.Config(self.dsn)) as client:
            client.submit_task(kind, queue="forks", priority=9)
            for _ in range(OTHERS):
                client.submit_task("whereabouts", queue="forks")
                client.submit_task("whereabouts_async", queue="forks")

    def pids(self, word: str) -> list[int]:
        lines = self._journal.read_text("ascii").splitlines() if self._journal.exists() else []
        return [int(line.split()[1]) for line in lines if line.split()[0] == word]

    def wait_for_end_of_copies(self) -> None:
        wait_until(lambda: bool(self.pids("copy")), "the copy to be there")
        wait_until(lambda: not any(map(is_alive, self.pids("copy"))), "the copy to be gone")

    def check(self, kind: str) -> None:
        """Every task was run once, by a process that is no copy; and so was every effect."""
        assert not set(self.pids("other")) & set(self.pids("copy"))
        assert len(self.pids("other")) == 3 * OTHERS  # the async ones say it twice
        attempts = self.conn.execute(
            "select count(*), count(distinct task_id) from tasklib.task_attempts where outcome = 'COMPLETED'"
        ).fetchone()
        completed = 2 * OTHERS + (kind not in NOT_COMPLETED)
        assert attempts == (completed, completed)
        effects = self.conn.execute("select count(*) from public.forked").fetchone()
        assert effects == (1 if kind in IN_TRANSACTION else 0,)


@pytest.fixture
def scene(new_database: NewDatabase, direct: Callable[[str], str], tmp_path: Path) -> Iterator[Scene]:
    made = Scene(direct(new_database()), tmp_path)
    yield made
    made.conn.close()


def run_program(scene: Scene, **environment: str) -> None:
    """A worker by itself, until its queue is empty. Nobody of its session is left at the end."""
    with (scene.directory / "log").open("wb") as log:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, scene.dsn], cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, **scene.environment, **environment},
        )  # fmt: skip
    try:
        assert program.wait(60) == 0, (scene.directory / "log").read_text("utf-8")
        scene.wait_for_end_of_copies()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_an_embedded_worker_ends(scene: Scene, kind: str) -> None:
    """In a thread, on the loop, in a process of its own; whether it returns, raises or waits. What the worker holds is
    the worker's: the copy runs none of it, writes nothing, and does not end the worker's program a second time.
    """
    scene.submit(kind)
    run_program(scene)
    scene.check(kind)
    assert len(scene.pids("end")) == 1


def test_a_copy_from_a_hook_ends(scene: Scene) -> None:
    """Otherwise there would be two workers of one name."""
    scene.submit("whereabouts")
    run_program(scene, FORKING_TASKS_HOOK="yes")
    assert len(scene.pids("copy")) == 2
    assert len(scene.pids("end")) == 1
    assert not set(scene.pids("other")) & set(scene.pids("copy"))


@pytest.mark.direct
@pytest.mark.parametrize("kind", ["in_thread", "on_loop", "isolated"])
def test_a_copy_under_the_daemon_ends_and_is_told(scene: Scene, kind: str) -> None:
    """The same worker goes on, and says what has happened, and in which task."""
    with daemon(scene.dsn, app=["tests.support.forking_tasks"], environment=scene.environment) as started:
        worker = started.child("worker")
        scene.submit(kind)
        wait_until(lambda: scene.conn.execute(UNFINISHED).fetchone() == (0,), "all to end")
        scene.wait_for_end_of_copies()
        scene.check(kind)
        if kind != "isolated":  # its end may come before the copy's
            told = started.wait_for("task.forked")
            assert told["pid"] in scene.pids("copy")
            names = scene.conn.execute("select name from tasklib.tasks where id = %s", [told["task_id"]]).fetchall()
            assert names == [(kind,)]
        assert started.child("worker") == worker
        assert started.lines("worker.died") == []
