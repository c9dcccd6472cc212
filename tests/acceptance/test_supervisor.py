"""The supervisor with real processes and real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest

import tasklib
from tasklib import migrate
from tests.support.working import get, wait_final
from tools.daemons import daemon, is_alive
from tools.waiting import START_SECONDS, wait_until

if TYPE_CHECKING:
    from tests.support.raw_sql import Conn, NewDatabase
    from tools.daemons import Daemon

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
NEVER_ENDS = 3600.0


def wait_running(client: tasklib.Client, *ids: UUID) -> None:
    wait_until(lambda: all(get(client, each).state == "running" for each in ids), "all to run")


def attempts(conn: Conn, task_id: UUID) -> list[tuple[Any, ...]]:
    query = "select outcome, error_message from tasklib.task_attempts where task_id = %s order by attempt"
    return conn.execute(query, [task_id]).fetchall()


def assert_given_back(client: tasklib.Client, *ids: UUID) -> None:
    """Runnable again, and no attempt is spent."""
    tasks = [get(client, each) for each in ids]
    assert [(task.state, task.ready, task.retry_count, task.crash_count) for task in tasks] == [
        ("pending", True, 0, 0)
    ] * len(ids)


# --- TERM, INT, QUIT ---


def test_term_drains_everywhere(client: tasklib.Client, conn: Conn, database_url: str, tmp_path: Path) -> None:
    """Stop claiming, finish what executes, give back the rest, exit 0. As a service manager does it that signals every
    process of the daemon: a worker that is told twice does not hurry, and a keeper that left too early comes back.
    Before that: a task submits another, though nobody has called init, snapshots say how the workers are, and what they
    have imported is frozen.
    """
    with daemon(database_url, workers=2, concurrency=1, buffer_size=2, snapshot_seconds=0.2) as made:
        parent = wait_final(client, client.submit_task("submit_another", text="a child"))
        assert parent.result is not None, "what a task submits goes to the daemon's own database"
        assert wait_final(client, UUID(parent.result["value"])).parent_id == parent.id
        frozen = wait_final(client, client.submit_task("frozen_objects")).result
        assert frozen is not None
        assert frozen["value"] > 10_000
        goes_on = tmp_path / "goes on"
        running = [client.submit_task("wait_for_file", path=str(goes_on)) for _ in range(2)]
        wait_running(client, *running)
        busy = "select count(distinct worker_id) from tasklib.worker_states where tasks_running = 1 and pid > 1"
        wait_until(lambda: conn.execute(busy).fetchone() == (2,), "snapshots of both workers")
        waiting = [client.submit_task("nap", seconds=NEVER_ENDS) for _ in range(2)]
        for pid in (*made.processes(), made.pid):
            os.kill(pid, signal.SIGTERM)
        made.wait_for("worker.stopping", process="supervisor", times=2)
        goes_on.touch()
        assert made.wait() == 0
        assert made.processes() == []
        assert not (made.directory / "run").exists()
        assert made.lines("worker.interrupted") == []
    assert [get(client, each).state for each in running] == ["completed", "completed"]
    assert_given_back(client, *waiting)


def test_after_the_grace_tasks_are_told_to_stop(client: tasklib.Client, database_url: str) -> None:
    """They are given back without costing an attempt. INT is like TERM."""
    with daemon(database_url, grace_seconds=0.3) as made:
        task = client.submit_task("nap", seconds=NEVER_ENDS)
        wait_running(client, task)
        made.signal(signal.SIGINT)
        assert made.wait() == 0
        made.wait_for("worker.interrupted")
    assert_given_back(client, task)


def test_a_second_term_hurries_and_a_third_kills(client: tasklib.Client, database_url: str) -> None:
    """What ignores being told to stop is given back, too."""
    with daemon(database_url, workers=2, concurrency=1, grace_seconds=NEVER_ENDS) as made:
        tasks = [client.submit_task("nap", seconds=NEVER_ENDS), client.submit_task("hold_gil", seconds=60)]
        wait_until(lambda: [each["running"] for each in made.workers()] == [1, 1], "both to run")
        made.signal(signal.SIGTERM)
        made.wait_for("worker.stopping", process="supervisor", times=2)
        made.signal(signal.SIGTERM)
        made.wait_for("worker.died", how="exited with code 0")
        made.signal(signal.SIGTERM)
        assert made.wait() == 0
        made.wait_for("worker.died", how="killed by SIGKILL: the daemon stops")
    assert_given_back(client, *tasks)


def test_quit_is_now(client: tasklib.Client, database_url: str) -> None:
    with daemon(database_url, grace_seconds=NEVER_ENDS) as made:
        task = client.submit_task("nap", seconds=NEVER_ENDS)
        wait_running(client, task)
        made.signal(signal.SIGQUIT)
        assert made.wait() == 0
    assert_given_back(client, task)


# --- HUP ---


def test_hup_replaces_everybody_without_a_gap(client: tasklib.Client, database_url: str, tmp_path: Path) -> None:
    """New children are ready before old ones stop; the file is read again. The old set stays if the new one does not
    boot, or if the file is wrong. What the old ones execute goes on.
    """
    word = tmp_path / "word"
    word.write_text("")
    with daemon(database_url, environment={"DAEMON_APP_IMPORT": str(word)}, web={"port": 0}) as made:
        before = {made.child(role) for role in ("worker", "keeper", "web")}
        task = client.submit_task("nap", seconds=1.5)
        wait_running(client, task)
        made.settings_file.write_text(made.settings_file.read_text("utf-8").replace("workers = 1", "workers = 2"))
        made.signal(signal.SIGHUP)
        made.wait_for("reload.done")
        wait_until(lambda: not any(map(is_alive, before)), "the old ones to end")
        events = [(line["event"], line.get("pid")) for line in made.lines(process="supervisor")]
        new = [line["pid"] for line in made.lines("worker.spawned", generation=2)]
        stopped = min(events.index(("worker.stopping", pid)) for pid in before if ("worker.stopping", pid) in events)
        assert all(events.index(("worker.ready", pid)) < stopped for pid in new)
        assert [each["pid"] for each in made.workers()] == new
        assert len(new) == 2
        wait_until(lambda: made.status()["web"]["state"] == "ready", "a new web child")
        assert (get(client, task).state, get(client, task).attempt) == ("completed", 1)

        made.ask("scale", workers=3)
        wait_until(lambda: len(made.workers()) == 3, "three workers")
        made.signal(signal.SIGHUP)
        made.wait_for("reload.done", times=2)
        new = [line["pid"] for line in made.lines("worker.spawned", generation=3)]
        assert len(new) == 3, "what an operator has said holds"
        wait_until(lambda: [each["pid"] for each in made.workers()] == new, "the second set")

        word.write_text("fail")
        made.signal(signal.SIGHUP)
        assert "the import fails on purpose" in made.wait_for("reload.failed")["message"]
        made.settings_file.write_text("workres = 3")
        made.signal(signal.SIGHUP)
        assert "did you mean workers" in made.wait_for("reload.refused")["error"]
        assert [each["pid"] for each in made.workers()] == new
        assert wait_final(client, client.submit_task("echo", text="still here")).state == "completed"
        assert made.stop() == 0


def test_one_that_drains_is_not_called_hung(client: tasklib.Client, database_url: str, tmp_path: Path) -> None:
    """It claims nothing any more, so its claim loop is silent. Called hung, nobody would renew its lease for it."""
    goes_on = tmp_path / "goes on"
    with daemon(database_url, hang_seconds=1.5, stall_seconds=1.5) as made:
        task = client.submit_task("wait_for_file", path=str(goes_on))
        wait_running(client, task)
        made.ask("drain")
        seen: list[bool] = []
        until = time.monotonic() + 3.5  # longer than it may be silent
        while time.monotonic() < until or len(seen) < 5:
            seen += [each["is_hung"] for each in made.status()["workers"] if each["pid"]]
            time.sleep(0.2)
        assert not any(seen)
        goes_on.touch()
        assert made.wait() == 0
        assert get(client, task).state == "completed"


# --- logs of isolated tasks ---


def test_a_task_in_a_process_of_its_own_logs_like_the_others(
    client: tasklib.Client, database_url: str, tmp_path: Path
) -> None:
    """As JSON, with its task, without secrets, and to the file that there is now."""
    file = tmp_path / "log"
    log = {"format": "json", "file": str(file)}
    with daemon(database_url, waits=False, app=["tests.daemon_app.isolated"], log=log) as made:
        wait_final(client, client.submit_task("say", word="first"))
        file.rename(tmp_path / "log.1")
        made.signal(signal.SIGUSR1)
        wait_until(file.exists, "a new log")
        told = wait_final(client, client.submit_task("say", word="postgresql://ann:hush@db/shop"))
    assert told.result is not None
    assert "hush" not in file.read_text("utf-8")
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    said = [line for line in lines if line["event"].startswith("said.")]
    assert [line["event"] for line in said] == ["said.by_structlog", "said.by_logging"]
    for line in said:
        assert (line["process"], line["process_id"]) == ("worker 1 task", told.result["value"])
        assert (line["task"], line["task_id"], line["attempt"]) == ("say", str(told.id), 1)


# --- more, fewer, logs, stacks, operators ---


def test_operators_signals_and_commands(client: tasklib.Client, database_url: str, tmp_path: Path) -> None:
    """TTIN and TTOU: one worker more or less. USR1: logs are reopened, everywhere. USR2: every child's stacks and
    running tasks are in the log. Pause, resume, scale and drain by the control socket. A killed guardian is replaced.
    An orphan is reaped.
    """
    log = {"format": "json", "file": str(tmp_path / "log")}
    with daemon(database_url, waits=False, log=log) as made:
        made.directory, directory = tmp_path, made.directory
        made.wait_for("daemon.ready")
        made.directory = directory
        running = client.submit_task("nap", seconds=NEVER_ENDS)
        wait_running(client, running)

        made.signal(signal.SIGTTIN)
        wait_until(lambda: len(made.workers()) == 2, "two workers")
        made.signal(signal.SIGTTOU)
        wait_until(lambda: len(made.status()["workers"]) == 1, "one worker")

        (tmp_path / "log").rename(tmp_path / "log.1")
        made.signal(signal.SIGUSR1)
        wait_until((tmp_path / "log").exists, "a new log")
        others = {made.child("worker"), made.child("keeper"), *made.fork_servers()}
        (guardian,) = set(made.processes()) - others
        os.kill(guardian, signal.SIGKILL)
        made.signal(signal.SIGUSR2)
        made.directory = tmp_path
        stacks = made.wait_for("worker.stacks")
        assert "in nap" in stacks["stacks"]
        assert [each["task_id"] for each in stacks["running"]] == [str(running)]
        assert "keeper.py" in made.wait_for("keeper.stacks")["stacks"]
        made.wait_for("guardian.died")
        made.directory = directory

        made.ask("pause")
        wait_until(lambda: made.status()["state"] == "paused", "a pause")
        task = client.submit_task("leave_an_orphan", journal=str(tmp_path / "orphan"))
        made.ask("scale", workers=2)
        wait_until(lambda: len(made.workers()) == 2, "another worker, born paused")
        time.sleep(0.5)  # it would have polled twice
        assert get(client, task).state == "pending"
        made.ask("resume")
        wait_final(client, task)
        wait_until((tmp_path / "orphan").exists, "an orphan")
        orphan, parent = (tmp_path / "orphan").read_text().split()
        assert int(parent) == made.pid
        wait_until(lambda: not Path("/proc", orphan).exists(), "the orphan to be reaped")
        wait_until(lambda: len(made.processes()) == 6, "two workers with their servers, the keeper, a new guardian")
        assert _threads(made.pid) == 1

        assert client.cancel_task(running)
        made.ask("drain")
        assert made.wait() == 0
        assert '"process":"worker 1"' in (tmp_path / "log").read_text("utf-8"), "workers have reopened it, too"


def _threads(pid: int) -> int:
    return len([*Path(f"/proc/{pid}/task").iterdir()])


# --- deaths ---


def test_a_dead_worker_is_seen_at_once(client: tasklib.Client, conn: Conn, database_url: str, tmp_path: Path) -> None:
    """Its executing tasks become crashed attempts, with the signal or the code, and run again long before a lease is
    over; what it left in its process group is killed. A segmentation fault leaves a traceback in the log. Reports wait
    for a keeper. (That it takes no more than a second is judged by `dev.py soak daemon kills`.)
    """
    with daemon(database_url, workers=2, concurrency=1, lease_seconds=300) as made:
        journal = tmp_path / "journal"
        task = client.submit_task("nap", seconds=NEVER_ENDS, journal=str(journal))
        wait_running(client, task)
        victim = int(journal.read_text().split()[0])
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(journal.read_text().splitlines()) == 2, "it to run again")
        assert attempts(conn, task)[0] == ("WORKER_FAILURE", "killed by SIGKILL, perhaps out of memory")
        assert client.cancel_task(task)
        wait_final(client, task)

        wait_until(lambda: len(made.workers()) == 2, "two workers")
        crashed = client.submit_task("crash", on_crash="fail")
        assert wait_final(client, crashed).state == "failed"
        assert "in crash" in made.wait_for("worker.died", how="killed by SIGSEGV")["stacks"]
        left = client.submit_task("exit_now", code=3, on_crash="fail")
        wait_final(client, left)
        assert [attempts(conn, each)[0][1] for each in (crashed, left)] == ["killed by SIGSEGV", "exited with code 3"]

        wait_until(lambda: len(made.workers()) == 2, "two workers")
        pids = tmp_path / "pids"
        client.submit_task("start_grandchildren", seconds=NEVER_ENDS, journal=str(pids))
        wait_until(lambda: pids.exists() and len(pids.read_text().splitlines()) == 4, "grandchildren")
        grandchildren = [int(line) for line in pids.read_text().splitlines()]
        journal = tmp_path / "journal of another"
        task = client.submit_task("nap", seconds=NEVER_ENDS, journal=str(journal))
        wait_running(client, task)
        for pid in (made.child("keeper"), int(journal.read_text().split()[0])):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(journal.read_text().splitlines()) == 2, "it to run again, by a new keeper")
        assert len(made.lines("keeper.died")) == 1
        assert client.cancel_task(task)
        wait_final(client, task)
        for each in made.workers():
            os.kill(each["pid"], signal.SIGKILL)
        wait_until(
            lambda: not is_alive(grandchildren[0]) and not is_alive(grandchildren[2]), "their group to be killed"
        )
        assert made.lines("guardian.died") == []
        assert made.stop() == 0
        assert not any(map(is_alive, grandchildren)), "those with a session of their own end with the daemon"


def test_nobody_survives_the_supervisor(client: tasklib.Client, database_url: str, tmp_path: Path) -> None:
    """SIGKILL: no child and no grandchild is left, however it was started, and whatever it ignores. Even if nobody can
    hear of the supervisor's death any more but the guardian. (Five seconds are allowed by `dev.py soak daemon
    supervisors`.)
    """
    with daemon(database_url) as made:
        pids = tmp_path / "pids"
        client.submit_task("start_grandchildren", seconds=NEVER_ENDS, journal=str(pids))
        wait_until(lambda: pids.exists() and len(pids.read_text().splitlines()) == 4, "grandchildren")
        everybody = [*made.processes(), *(int(line) for line in pids.read_text().splitlines())]
        made.signal(signal.SIGKILL)
        made.wait()
        wait_until(lambda: not any(map(is_alive, everybody)), "everybody to die")


# --- restarts and boots ---


def test_places_that_were_scaled_away_are_not_judged(database_url: str, tmp_path: Path) -> None:
    """A crash loop of a worker that nobody wants any more keeps no daemon unready."""
    word = tmp_path / "word"
    word.write_text("die")
    restart = {"longest_seconds": 0.2, "crash_loop_deaths": 2, "crash_loop_seconds": 3600.0}
    with daemon(
        database_url, environment={"DAEMON_APP_IMPORT": str(word)}, waits=False, restart=restart, workers=1
    ) as made:
        made.wait_for("daemon.unhealthy")
        word.write_text("")
        made.wait_for("daemon.ready")
        word.write_text("die")
        made.ask("scale", workers=2)
        wait_until(lambda: any("worker 2" in each for each in made.status()["problems"]), "the second to fail")
        made.ask("scale", workers=1)
        wait_until(lambda: not any("worker 2" in each for each in made.status()["problems"]), "it to be forgotten")
        word.write_text("")


def test_a_web_port_that_is_taken_is_a_problem(database_url: str) -> None:
    """Nobody can probe it, so the status has to say it; it is healthy again when the port is free."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with daemon(database_url, web={"port": port}) as made:
            said = f"the web child cannot listen on 127.0.0.1:{port}: "
            wait_until(lambda: [each.startswith(said) for each in made.status()["problems"]] == [True], "the problem")
            assert not made.status()["is_healthy"]
            taken.close()
            wait_until(lambda: made.status()["is_healthy"], "the port to be had")


def test_an_application_without_tasks_is_refused(database_url: str) -> None:
    """As `tasklibd check` does: a daemon that can never do anything must not look as if all were well."""
    with daemon(database_url, app=["tools.waiting"], waits=False) as made:
        assert made.wait() == 70
        assert "tools.waiting can be imported, but defines no tasks" in made.output()


def test_a_crash_loop_makes_the_daemon_unhealthy_and_it_stays(database_url: str, tmp_path: Path) -> None:
    """Each restart waits twice as long as the last; the supervisor lives, and recovers when the cause is gone."""
    word = tmp_path / "word"
    word.write_text("die")
    restart = {"first_seconds": 0.1, "longest_seconds": 0.4, "crash_loop_deaths": 4, "crash_loop_seconds": 2.0}
    with daemon(database_url, environment={"DAEMON_APP_IMPORT": str(word)}, waits=False, restart=restart) as made:
        made.wait_for("daemon.unhealthy")
        deaths = [_moment(line) for line in made.lines("worker.died", how="exited with code 3")]
        births = [_moment(line) for line in made.lines("worker.spawned")][1:]
        pauses = [born - died for died, born in zip(deaths, births, strict=False)]
        assert pauses[0] >= 0.05
        assert pauses[2] >= 0.2
        assert "worker 1 died" in made.status()["problems"][0]
        word.write_text("")
        made.wait_for("daemon.healthy")
        made.wait_for("daemon.ready")
        assert made.stop() == 0


def _moment(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["timestamp"]).timestamp()


@pytest.mark.parametrize(
    ("word", "preload", "code", "message"),
    [
        ("fail", False, 70, "cannot import tests.daemon_app.tasks: RuntimeError: the import fails on purpose"),
        ("thread", True, 70, "preload: the application's import has left 1 thread(s) running (left-behind)"),
        ("connect", True, 70, "preload: the application's import has left a connection to PostgreSQL open"),
    ],
)
def test_an_application_that_cannot_be_started_ends_the_daemon_at_once(
    database_url: str, word: str, preload: bool, code: int, message: str
) -> None:
    """With a code of its own, and one clear line, which is the last. The end of the other children is not logged."""
    environment = {"DAEMON_APP_IMPORT": word, "DAEMON_APP_URL": database_url}
    with daemon(database_url, environment=environment, waits=False, preload=preload, workers=2) as made:
        assert made.wait(START_SECONDS) == code
        assert made.processes() == []
        assert made.output().count(message) == 1, made.tail()
        if not preload:
            endings = [line["event"] for line in made.lines() if not line["event"].endswith(("spawned", "started"))]
            assert [each for each in endings if each.startswith(("worker.", "daemon."))] == ["daemon.failed"]


def test_a_schema_that_does_not_fit_ends_the_daemon_at_once(new_database: NewDatabase) -> None:
    """It was made by a later version."""
    url = new_database()
    migrate.migrate(tasklib.Config(url))
    with psycopg.connect(url, autocommit=True) as conn:
        insert = "insert into tasklib.schema_migrations (version, name, phase, checksum) values (9999, 'x', 'post', '')"
        conn.execute(insert)
    with daemon(url, waits=False) as made:
        assert made.wait(START_SECONDS) == 76
        assert "Upgrade" in made.wait_for("daemon.failed")["message"]
        assert made.lines()[-1]["event"] == "daemon.failed", "the reason is the last line"


# --- limits ---


def test_a_task_that_ignores_its_limit_is_ended_with_its_process(
    client: tasklib.Client, conn: Conn, database_url: str
) -> None:
    """After its timeout, and after a cancel. Its siblings are given back, uncharged."""
    with daemon(database_url, concurrency=3, timeout_delta_seconds=0.3) as made:
        sibling = client.submit_task("nap", seconds=NEVER_ENDS)
        wait_running(client, sibling)
        late = client.submit_task("sleep_in_c", seconds=NEVER_ENDS, max_retries=0, timeout_seconds=0.3)
        assert wait_final(client, late).state == "failed"
        assert attempts(conn, late)[0][0] == "TIMED_OUT"
        made.wait_for("worker.killed", cause="hard_timeout", task_id=str(late))

        deaf = client.submit_task("sleep_in_c", seconds=NEVER_ENDS)
        wait_running(client, deaf, sibling)
        assert client.cancel_task(deaf)
        assert wait_final(client, deaf).state == "cancelled"
        made.wait_for("worker.killed", cause="cancelled", task_id=str(deaf))
        assert [outcome for outcome, _ in attempts(conn, sibling)] == ["INTERRUPTED", "INTERRUPTED"]
        assert made.status()["is_healthy"]
        made.signal(signal.SIGQUIT)
        made.wait()
    assert_given_back(client, sibling)


def test_a_hang_leaves_a_traceback(client: tasklib.Client, conn: Conn, database_url: str) -> None:
    """A task that holds the GIL, without a timeout, stalls its worker: SIGABRT, stacks in the log. It is a suspect,
    gets a process of its own, stalls that, and is buried. But who was stopped together with the supervisor is not taken
    for hung.
    """
    with daemon(database_url, hang_seconds=3.0, stall_seconds=1.0, bury_after=1, workers=2) as made:
        stopped = [made.pid, *(each["pid"] for each in made.workers())]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(3.5)  # longer than any of them may be silent
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        made.wait_for("daemon.stood_still")
        task = client.submit_task("hold_gil", seconds=60)
        assert wait_final(client, task, seconds=60).state == "buried"
        hung = made.lines("worker.hung")
        assert [[each["task_id"] for each in line["running"]] for line in hung] == [[str(task)]], made.tail()
        assert "in hold_gil" in made.lines("worker.died")[0]["stacks"]
        (_, first), (_, second) = attempts(conn, task)
        assert "its claim loop has stood still" in first
        assert "its process was killed: it has stood still" in second
        frame = "daemon_app/tasks.py"  # once in each stack
        assert made.output().count(frame) == 2, "its own process has left its stacks, too"


def test_workers_are_recycled_one_at_a_time(client: tasklib.Client, database_url: str) -> None:
    """By their number of tasks and by memory: the replacement is ready first, and nothing is lost."""
    recycle = {"max_tasks": 10, "max_memory_mb": 200}
    with daemon(database_url, workers=2, concurrency=1, buffer_size=0, recycle=recycle) as made:
        first = [each["pid"] for each in made.workers()]
        large = client.submit_task("eat_memory", megabytes=250)
        done = wait_final(client, large).result
        assert done is not None
        line = made.wait_for("worker.stopping", process="supervisor", pid=done["value"])
        assert line["why"].endswith("MB")
        (other,) = set(first) - {done["value"]}
        ids = [client.submit_task("echo", text=str(number)) for number in range(60)]
        for each in ids:
            assert wait_final(client, each).attempt == 1
        wait_until(lambda: len(made.lines("worker.stopping", process="supervisor")) >= 3, "three replacements")
        deadline = time.monotonic() + 30
        while is_alive(other):  # a ring wakes one worker: which of them has how many tasks is chance
            assert time.monotonic() < deadline
            assert wait_final(client, client.submit_task("echo", text="more")).attempt == 1
        events = [(line["event"], line["pid"]) for line in made.lines(process="supervisor") if "pid" in line]
        for stopping in made.lines("worker.stopping", process="supervisor"):
            before = events[: events.index(("worker.stopping", stopping["pid"]))]
            ready = len([event for event, _ in before if event == "worker.ready"])
            gone = len([event for event, _ in before if event == "worker.stopping"])
            assert ready - gone == 3, "two that serve, and one that is to leave"
        for number, (event, _) in enumerate(events):
            if event == "worker.spawned" and number > events.index(("worker.ready", first[0])):
                names = [name for name, _ in events[:number]]
                assert names.count("worker.spawned") == names.count("worker.ready"), "one at a time"
        assert made.stop() == 0


def test_a_task_that_fills_the_memory_for_ever_is_buried(client: tasklib.Client, conn: Conn, database_url: str) -> None:
    """Its worker is replaced, and the task goes with it when the grace is over: as a death, which counts. What ran
    beside it is not charged.
    """
    settings: dict[str, Any] = {"grace_seconds": 0.5, "bury_after": 2, "recycle": {"max_memory_mb": 200}}
    with daemon(database_url, **settings) as made:
        beside = client.submit_task("nap", seconds=6.0)
        wait_running(client, beside)
        hog = client.submit_task("eat_memory", megabytes=250, seconds=NEVER_ENDS)
        assert wait_final(client, hog, seconds=40).state == "buried", made.tail()
        assert {outcome for outcome, _ in attempts(conn, hog)} <= {"INTERRUPTED", "WORKER_FAILURE"}
        task = wait_final(client, beside)
        assert (task.state, task.retry_count, task.strikes) == ("completed", 0, 0)


def test_a_worker_whose_descriptors_are_closed_is_replaced(client: tasklib.Client, database_url: str) -> None:
    """It cannot be talked to any more: it drains by itself, and another takes its place."""
    with daemon(database_url) as made:
        closing = client.submit_task("close_descriptors", seconds=0.3)
        made.wait_for("worker.stopping", process="supervisor", why="its channel to the supervisor is closed")
        assert wait_final(client, client.submit_task("echo", text="by the next one")).state == "completed"
        assert wait_final(client, closing).state == "completed"
        assert len(made.lines("worker.ready")) == 2
        made.signal(signal.SIGQUIT)
        assert made.wait() == 0


# --- what a fork hands down, PID 1 ---


def test_a_worker_inherits_nothing_that_it_must_not_have(client: tasklib.Client, database_url: str) -> None:
    """No random state, signal mask, socket or scoreboard of others, also with preload."""
    with daemon(database_url, workers=2, concurrency=1, preload=True) as made:
        made.signal(signal.SIGTTIN)  # one that is born when all others are there
        wait_until(lambda: len(made.workers()) == 3, "three workers")
        seen: dict[int, Any] = {}
        while len(seen) < 3:
            result = wait_final(client, client.submit_task("inherited")).result
            assert result is not None
            seen[result["value"]["pid"]] = result["value"]
        assert len({each["random"] for each in seen.values()}) == 3
        for each in seen.values():
            assert each["group"] == each["pid"]
            assert each["maps"] == 1, "its own scoreboard, and no other"
            assert each["blocked"][0].split()[1] == "0" * 16
            stacks = [name for name in each["descriptors"] if "tasklibd-stacks" in name]
            assert len(stacks) == 1, "its own, and no other"
            sockets = [name for name in each["descriptors"] if name.startswith("socket:")]
            assert not set(sockets) & _sockets(made.pid), "none of the supervisor's"


def _sockets(pid: int) -> set[str]:
    names = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
    return {name for name in names if name.startswith(("socket:", "pipe:"))}


def _can_unshare() -> bool:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not _can_unshare(), reason="may not make a namespace of processes")
def test_it_works_as_pid_1(client: tasklib.Client, database_url: str) -> None:
    """As in a container: strangers are reaped, signals are heard."""
    wrapper = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    with daemon(database_url, wrapper=wrapper) as made:
        assert made.status()["pid"] == 1
        inner = _only_child(made)
        journal = made.directory / "orphan"
        wait_final(client, client.submit_task("leave_an_orphan", journal=str(journal)))
        wait_until(journal.exists, "an orphan")
        orphan, parent = journal.read_text().split()
        assert parent == "1"
        wait_until(lambda: not Path(f"/proc/{inner}/root/proc", orphan).exists(), "the orphan to be reaped")
        assert wait_final(client, client.submit_task("kill_once", flag=str(made.directory / "flag"))).attempt == 2
        os.kill(inner, signal.SIGTERM)
        assert made.wait() == 0


def _only_child(made: Daemon) -> int:
    text = Path(f"/proc/{made.pid}/task/{made.pid}/children").read_text("utf-8")
    return int(text.split()[0])
