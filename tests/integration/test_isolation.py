"""`isolation="process"`: a task with a process of its own, whose limits and deaths hit nothing else."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import tasklib
from tasklib import migrate
from tasklib.registry import default_registry
from tasklib.worker import hooks
from tasklib.worker.isolation import process, suspect_limits
from tests.support.working import get, running, time_out, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType
    from uuid import UUID

    from tests.support.raw_sql import Conn, NewDatabase

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def tasks() -> Iterator[ModuleType]:
    """Imported for this module alone: other tests' workers would start a fork server for them."""
    functions, around = dict(default_registry._functions), list(hooks._around)
    yield importlib.import_module("tests.support.isolated_tasks")
    default_registry._functions = functions
    hooks._around[:] = around
    del sys.modules["tests.support.isolated_tasks"]


@dataclass(frozen=True)
class Place:
    """A worker of isolated and other tasks, shared by the tests."""

    client: tasklib.Client
    conn: Conn
    config: tasklib.Config
    worker: tasklib.TaskWorker

    def submit(self, function: Any, *args: Any) -> UUID:
        return self.client.submit_task(function, *args)

    def run(self, function: Any, *args: Any) -> tasklib.Task:
        return wait_final(self.client, self.submit(function, *args))

    def result(self, function: Any, *args: Any) -> Any:
        task = self.run(function, *args)
        assert task.state == "completed", task.error
        return (task.result or {})["value"]

    def attempts(self, task_id: UUID) -> list[tuple[str, str | None]]:
        return self.conn.execute(
            "select outcome, failed_reason from tasklib.task_attempts where task_id = %s order by attempt", [task_id]
        ).fetchall()

    @property
    def server(self) -> int:
        run = self.worker._run
        assert run is not None
        assert run.processes._server is not None
        return run.processes._server._process.pid


@pytest.fixture(scope="module")
def config_of_all(new_database: NewDatabase) -> tasklib.Config:
    config = tasklib.Config(new_database(), timeout_delta_seconds=2.0, bury_after=2, base_retry_delay_seconds=0.01)
    migrate.migrate(config)
    with psycopg.connect(config.database_url, autocommit=True) as conn:
        conn.execute("create table words (word text)")
    return config


@pytest.fixture(scope="module")
def place(tasks: ModuleType, config_of_all: tasklib.Config, direct: Callable[[str], str]) -> Iterator[Place]:
    config = config_of_all
    tasklib.init(config)
    with (
        tasklib.Client(config) as client,
        psycopg.connect(direct(config.database_url), autocommit=True) as conn,
        running(config, concurrency=8, queues=["default"]) as worker,
    ):
        yield Place(client, conn, config, worker)
    tasklib.close()


def is_gone(pid: int) -> bool:
    """No such process, or nobody has buried it yet."""
    return state_of(pid) in "ZX"


def state_of(pid: int) -> str:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return "X"
    return status.rpartition(")")[2].split()[0]


def pids_in(path: Path) -> list[int]:
    return [int(word) for word in path.read_text(encoding="ascii").split()] if path.exists() else []


# --- What it is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["where", "where_async"])
def test_a_task_runs_in_a_process_of_its_own(place: Place, tasks: ModuleType, name: str) -> None:
    """In its main thread, the only one, at the head of its own process group; arguments and result are as ever."""
    first, second = (place.result(getattr(tasks, name), NOON) for _ in range(2))
    assert len({first["pid"], second["pid"], os.getpid(), place.server}) == 4
    assert first["parent"] == place.server
    assert first["group"] == first["pid"]
    assert first["threads"] == ["MainThread"]
    assert first["is_main"]
    assert datetime.fromisoformat(first["moment"]) == NOON
    assert place.result(tasks.where_worker) == os.getpid()


@pytest.mark.parametrize("name", ["end_by", "end_by_async"])
@pytest.mark.parametrize(
    ("how", "state", "code"),
    [
        ("fail", "failed", "NO"),
        ("cancel", "cancelled", "CANCELLED"),
        ("snooze", "pending", None),
        ("retry", "failed", "Retry"),
        ("exit", "failed", "SystemExit"),
    ],
)
def test_what_it_raises_means_what_it_always_means(
    place: Place, tasks: ModuleType, name: str, how: str, state: str, code: str | None
) -> None:
    """Outcomes go through the process's boundary as they are."""
    task_id = place.submit(getattr(tasks, name), how)
    wait_until(lambda: place.attempts(task_id) != [], "its first attempt")
    task = get(place.client, task_id)
    assert (task.state, task.error_code) == (state, code)


def test_an_error_comes_with_its_traceback(place: Place, tasks: ModuleType) -> None:
    """As text; and what the decorator says about retries holds."""
    task = place.run(tasks.end_by, "raise")
    assert (task.state, task.error_code, task.retry_count) == ("failed", "ZeroDivisionError", 0)
    assert task.error is not None
    assert "in end_by" in task.error
    assert "fork_server" not in task.error


def test_arguments_that_do_not_fit_fail_it(place: Place, tasks: ModuleType) -> None:
    """They are read in its own process, too."""
    place.conn.execute("""insert into tasklib.tasks (name, kwargs) values ('where', '{"moment": "now and then"}')""")
    (task,) = place.client.list_tasks(name="where", state=None, limit=1)
    assert wait_final(place.client, task.id).error_code == "INVALID_ARGUMENTS"


def test_current_task_and_hooks_work_in_its_process(place: Place, tasks: ModuleType) -> None:
    """What it is, how long it has, what it says of itself, whose parent it is; and what is put around every task."""
    task_id = place.client.submit_task(tasks.describe, tags={"colour": "red"})
    task = wait_final(place.client, task_id)
    assert task.state == "completed", task.error
    said = (task.result or {})["value"]
    assert (said["id"], said["name"], said["attempt"], said["tags"]) == (str(task_id), "describe", 1, {"colour": "red"})
    assert datetime.fromisoformat(said["deadline"]) - task.created_at > timedelta(seconds=60)
    assert 0 < said["remaining"] < 60
    assert (said["should_stop"], said["cancel_asked"]) == (False, False)
    assert said["around"] == ["entered"]
    assert said["logged"]["task_id"] == str(task_id)
    assert task.progress == {"done": 2, "total": 3, "message": "half"}
    assert get(place.client, said["child"]).parent_id == task_id


@pytest.mark.parametrize("name", ["write", "write_async"])
def test_its_writes_and_its_completion_are_one_transaction(place: Place, tasks: ModuleType, name: str) -> None:
    """Exactly once: what fails, or dies before the end, has written nothing."""
    function = getattr(tasks, name)
    done = {end: place.run(function, f"{name} {end}", end) for end in ("return", "raise", "die")}
    assert {end: task.state for end, task in done.items()} == {
        "return": "completed",
        "raise": "failed",
        "die": "buried",
    }
    written = place.conn.execute("select word from words where word like %s", [f"{name} %"]).fetchall()
    assert written == [(f"{name} return",)]


# --- What it does to others: nothing ---------------------------------------------------------------------------------


@contextlib.contextmanager
def neighbours(place: Place, tasks: ModuleType, path: Path) -> Iterator[None]:
    """A thread and a coroutine of the same worker, which must not notice what happens."""
    ids = [place.submit(function, str(path)) for function in (tasks.work_on, tasks.work_on_async)]
    wait_until(lambda: all(get(place.client, id_).state == "running" for id_ in ids), "the neighbours")
    worker_id, server = place.worker.worker_id, place.server
    yield
    path.touch()
    for id_ in ids:
        assert wait_final(place.client, id_).state == "completed"
        assert [outcome for outcome, _ in place.attempts(id_)] == ["COMPLETED"]
    assert (place.worker.worker_id, place.server) == (worker_id, server)


def test_what_dies_is_guilty_and_buried_and_nobody_else_notices(
    place: Place, tasks: ModuleType, tmp_path: Path
) -> None:
    """A segmentation fault, an exit, a kill, closed descriptors, nonsense instead of an outcome: each death is a crash
    of that task alone, with the signal or the code, counts as a strike, and costs no retry.
    """
    zoo = {
        "its process was killed by SIGSEGV": place.submit(tasks.segfault),
        "its process exited with code 0": place.submit(tasks.leave, 0),
        "its process exited with code 3": place.submit(tasks.leave, 3),
        "its process was killed by SIGKILL, perhaps out of memory": place.submit(tasks.kill_itself),
        "its process could not send its outcome": place.submit(tasks.close_descriptors),
        "its process exited with code 4": place.submit(tasks.babble),
    }
    with neighbours(place, tasks, tmp_path / "end"):
        for reason, id_ in zoo.items():
            task = wait_final(place.client, id_)
            assert (task.state, task.error_code, task.retry_count) == ("buried", "BURIED", 0)
            assert (task.error or "").startswith(f"Buried: {reason}")
            attempts = place.attempts(id_)
            assert [outcome for outcome, _ in attempts] == ["WORKER_FAILURE"] * 2
            assert (attempts[0][1] or "").startswith(reason)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux alone")
def test_a_limit_to_memory_is_its_own(place: Place, tasks: ModuleType, tmp_path: Path) -> None:
    """Over it, the task fails with a code of its own; below it, it runs; its neighbours have no limit."""
    with neighbours(place, tasks, tmp_path / "end"):
        task = place.run(tasks.take_memory, 400)
        assert (task.state, task.error_code) == ("failed", "MEMORY_LIMIT")
        assert "memory_limit_mb=200 was reached" in (task.error or "")
        assert "MB were in use before it began" in (task.error or "")
        assert place.result(tasks.take_memory, 20) == 20
        assert "the limit is 1048576" in str(
            place.run(tasks.return_much, 70).result
        )  # to store it is no work of the task's
        assert place.result(tasks.where, NOON)


HARD = ["deaf", "in C", "bomb"]


@pytest.mark.parametrize("name", ["overrun", "overrun_async"])
def test_a_timeout_ends_it_and_what_ignores_it_is_killed(
    place: Place, tasks: ModuleType, tmp_path: Path, name: str
) -> None:
    """First an interrupt, which lets it clean up; then, for what ignores signals, holds the GIL in C or multiplies, a
    kill of its process group. Either way it has timed out, and nothing of it is left.
    """
    function = getattr(tasks, name)
    files = {how: tmp_path / how for how in ("politely", "blocked", *HARD)}
    with neighbours(place, tasks, tmp_path / "end"):
        ids = {how: place.submit(function, how, str(path)) for how, path in files.items()}
        wait_until(lambda: all(pids_in(path) for path in files.values()), "all of them to run")
        wait_until(lambda: len(set(pids_in(files["bomb"]))) > 1, "the bomb to go off")
        time_out(place.worker)
        for id_ in ids.values():
            task = wait_final(place.client, id_)
            assert (task.state, task.error_code) == ("failed", "TIMEOUT")
            assert "timeout_seconds=60 passed" in (task.error or "")
            assert [outcome for outcome, _ in place.attempts(id_)] == ["TIMED_OUT"]
    assert files["politely"].read_text() == ("TimeoutInterrupt" if name == "overrun" else "cleaned up")
    left = [pid for how in ("blocked", *HARD) for pid in pids_in(files[how])]
    wait_until(lambda: all(is_gone(pid) for pid in left), "the end of all of them")


def test_a_cancel_ends_it_and_what_ignores_it_is_killed(place: Place, tasks: ModuleType, tmp_path: Path) -> None:
    """As a timeout does, and it is cancelled."""
    files = {how: tmp_path / how for how in ("politely", "stop when asked", *HARD)}
    ids = {how: place.submit(tasks.endure, how, str(path)) for how, path in files.items()}
    wait_until(lambda: all(pids_in(path) for path in files.values()), "all of them to run")
    with neighbours(place, tasks, tmp_path / "end"):
        left = [pid for path in files.values() for pid in pids_in(path)]
        for id_ in ids.values():
            assert place.client.cancel_task(id_) == "asked"
        states = {how: wait_final(place.client, id_).state for how, id_ in ids.items()}
    assert states.pop("stop when asked") in {"completed", "cancelled"}  # the interrupt may come first
    assert set(states.values()) == {"cancelled"}
    assert files["politely"].read_text() == "CancelInterrupt"
    wait_until(lambda: all(is_gone(pid) for pid in left), "the end of all of them")


def test_what_it_leaves_behind_goes_with_it(place: Place, tasks: ModuleType) -> None:
    """Its process group is killed when it ends, also when it has ended well."""
    pid = place.result(tasks.leave_a_child_behind)
    wait_until(lambda: is_gone(pid), "the end of what it has started")


def test_who_kills_the_fork_server_is_a_suspect_and_the_next_one_takes_over(
    place: Place, tasks: ModuleType, tmp_path: Path
) -> None:
    """With it die those that ran at the time, any of which may have done it: they run again, and none is charged. The
    worker's other tasks notice nothing.
    """
    server, told = place.server, tmp_path / "told"
    bystander = place.submit(tasks.linger_once, str(told))
    wait_until(lambda: len(pids_in(told)) == 2, "the bystander")
    culprit = place.submit(tasks.kill_the_server, server)
    for id_ in (culprit, bystander):
        task = wait_final(place.client, id_)
        assert (task.state, task.crash_count, task.retry_count) == ("completed", 1, 0)
        assert place.attempts(id_) == [("WORKER_FAILURE", "the fork server died under it"), ("COMPLETED", None)]
    assert place.server != server
    wait_until(lambda: all(is_gone(pid) for pid in pids_in(told)), "the end of its first run")


def test_a_fork_server_that_does_nothing_is_replaced(
    place: Place, tasks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has stopped it: it neither forks nor reaps any more, and must not keep its worker's slots for ever."""
    monkeypatch.setattr(process, "SERVER_SECONDS", 1.0)
    monkeypatch.setattr(suspect_limits, "LOOK_SECONDS", 0.05)
    server = place.server
    frozen = place.submit(tasks.freeze_the_server, server)
    wait_until(lambda: state_of(server) in "TZX", "it to be stopped")
    assert place.result(tasks.where, NOON)["parent"] != server
    assert wait_final(place.client, frozen).state == "completed"
    assert is_gone(server)


# --- Coming and going ------------------------------------------------------------------------------------------------


def test_a_worker_that_stops_asks_then_interrupts_then_kills(
    tasks: ModuleType, config_of_all: tasklib.Config, tmp_path: Path
) -> None:
    """What looks at `should_stop` can end in the grace; the others are given back at no cost, and nothing is left."""
    files = {how: tmp_path / how for how in ("stop when asked", "politely", "in C")}
    config = replace(config_of_all, timeout_delta_seconds=1.0)
    with tasklib.Client(config) as client:
        endure = tasks.endure.options(queue="leaving")
        ids = {how: client.submit(endure.new(how, str(path))) for how, path in files.items()}
        with running(config, concurrency=3, grace_seconds=60, queues=["leaving"]) as worker:
            wait_until(lambda: all(pids_in(path) for path in files.values()), "all of them to run")
            left = [pid for path in files.values() for pid in pids_in(path)]
            assert worker._run is not None
            assert worker._run.processes._server is not None
            left.append(worker._run.processes._server._process.pid)
            worker.stop()
            assert wait_final(client, ids["stop when asked"]).state == "completed"
            worker.stop()  # the grace is over
        ended = {how: get(client, id_) for how, id_ in ids.items()}
        assert all(is_gone(pid) for pid in left)
        assert (ended["stop when asked"].result or {}).get("value") == "stopped when asked"
        for how in ("politely", "in C"):
            assert (ended[how].state, ended[how].ready, ended[how].retry_count, ended[how].crash_count) == (
                "pending",
                True,
                0,
                0,
            )
    assert files["politely"].read_text() == "StopInterrupt"


PROGRAM = """
    import os, subprocess, sys, time
    import tasklib

    @tasklib.task(isolation="process", queue="program")
    def linger(path: str) -> None:
        child = subprocess.Popen(["sleep", "1000"])
        with open(path, "w") as file:
            file.write(f"{os.getpid()} {os.getppid()} {child.pid}")
        time.sleep(1000)

    @tasklib.task(queue="program")
    def fork(path: str) -> None:
        if (pid := os.fork()) == 0:
            time.sleep(1000)
        with open(path, "w") as file:
            file.write(str(pid))

    if __name__ == "__main__":
        tasklib.TaskWorker(tasklib.Config(sys.argv[1]), concurrency=2, queues=["program"]).run_sync()
"""


@pytest.mark.parametrize("server_too", [False, True], ids=["worker", "worker and fork server"])
def test_processes_die_with_their_worker(config_of_all: tasklib.Config, tmp_path: Path, *, server_too: bool) -> None:
    """Killed by SIGKILL, a program that defines its tasks in its main file leaves no fork server, no isolated task, and
    nothing that one has started; also when something else has inherited the worker's descriptors. Killed together with
    its fork server, it leaves no isolated task.
    """
    program, told, other = tmp_path / "program.py", tmp_path / "told", tmp_path / "other"
    program.write_text(textwrap.dedent(PROGRAM))
    process = subprocess.Popen([sys.executable, str(program), config_of_all.database_url])
    try:
        with tasklib.Client(config_of_all) as client:
            client.submit_task("linger", str(told), queue="program")
            wait_until(lambda: len(pids_in(told)) == 3, "the task to run")
            client.submit_task("fork", str(other), queue="program")
            wait_until(lambda: bool(pids_in(other)), "the fork")
        isolated, server, child = pids_in(told)
        assert not any(is_gone(pid) for pid in (isolated, server, child))
        if server_too:
            os.kill(server, signal.SIGSTOP)  # so that it does nothing before its end
        process.kill()
        process.wait(30)
        if server_too:
            os.kill(server, signal.SIGKILL)
        gone = (isolated, server) if server_too else (isolated, server, child)
        wait_until(lambda: all(is_gone(pid) for pid in gone), "the end of all of them")
    finally:
        process.kill()
        process.wait(30)
        for pid in (*pids_in(told), *pids_in(other)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with psycopg.connect(config_of_all.database_url, autocommit=True) as conn:
            conn.execute("delete from tasklib.tasks where queue = 'program'")


DJANGO_PROGRAM = """
    import django
    import tasklib

    if __name__ == "__main__":
        django.setup()
        django.core.management.call_command("migrate", run_syncdb=True, verbosity=0)
        import orders

        task_id = orders.count.submit_sync()
        tasklib.TaskWorker(tasklib.django.config(), tasks=[orders.count]).run_until_empty_sync()
        task = tasklib.get_task(task_id)
        print(task.state, task.result, task.error)
"""
DJANGO_TASKS = """
    import tasklib
    from tests.django_project.models import Order

    @tasklib.task(isolation="process")
    def count() -> int:
        return Order.objects.count()
"""


def test_a_django_project_is_set_up_in_the_fork_server(new_database: NewDatabase, tmp_path: Path) -> None:
    """Modules with models cannot be imported before."""
    pytest.importorskip("django")
    (tmp_path / "program.py").write_text(textwrap.dedent(DJANGO_PROGRAM))
    (tmp_path / "orders.py").write_text(textwrap.dedent(DJANGO_TASKS))
    environment = {
        "DATABASE_URL": new_database(),
        "DJANGO_SETTINGS_MODULE": "tests.django_project.settings",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    said = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert said.stdout == "completed {'value': 0} None\n", said.stderr


def test_a_task_that_no_other_interpreter_can_find_keeps_the_worker_from_starting(config: tasklib.Config) -> None:
    """With what to do, and at once: not when the first of them has been claimed."""

    @tasklib.task(isolation="process")
    def hidden() -> None: ...

    worker = tasklib.TaskWorker(config, tasks=[hidden])
    with pytest.raises(tasklib.InvalidTaskDefinition, match=r"'hidden' is not there when its module is imported"):
        worker.run_until_empty_sync()
