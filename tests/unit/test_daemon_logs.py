"""The daemon's logs, in processes of their own: what is set up there is for the whole process."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import socket
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from tools.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "S3CR3T-canary-42"
BEGIN = f"""
    import logging, os, structlog, sys, uuid, warnings
    from pathlib import Path
    from tasklib.log import log as library
    from tasklib_daemon import logs
    from tasklib_daemon.logs import log
    from tasklib_daemon.settings import load

    def configure(**log):
        environment = {{"DATABASE_URL": "postgresql://app:{SECRET}@db/shop"}}
        logs.configure(load(None, environment, {{"log": log}}), "worker 1")
"""


def program(source: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(BEGIN) + textwrap.dedent(source)]


def run(source: str, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """What it logged, as events and as it stands."""
    ended = subprocess.run([*program(source), *arguments], capture_output=True, text=True, check=True, timeout=30)
    assert ended.stdout == ""
    return [json.loads(line) for line in ended.stderr.splitlines()], ended.stderr


def test_everything_that_is_logged_is_json_and_holds_no_secret() -> None:
    """The library's events, the daemon's, the application's structlog, plain logging, warnings, tracebacks. What a task
    logs tells which task it was, whether it logs by structlog or by logging.
    """
    events, text = run(
        f"""
        configure()
        library.warning("lease.lost", task="send", token=4)
        log.error("worker.killed", pid=4711, how="killed by SIGKILL", nothing=None)
        structlog.get_logger("shop").info("paid 5%", amount=3, url="postgresql://u:pw@h/d", bad=object)
        logging.getLogger("shop.mail").info("to %s\\nand others, password=%s", "a@b.c", "pw")
        logging.getLogger("shop").debug("unseen")
        warnings.warn("careful")
        log.info("odd", raw=b"\\xff", half="\\ud800", number=float("nan"), itself=(loop := []).append(loop) or loop)
        log.info("long", text="begin" + "x" * 100_000 + "end")
        try:
            raise ValueError("cannot reach {SECRET}")
        except ValueError:
            logging.getLogger("shop").exception("failed")
        structlog.contextvars.bind_contextvars(task_id="7", task="send")  # as the worker does for each task
        structlog.get_logger().info("by structlog")
        logging.info("by logging")
        """
    )
    assert [event["event"] for event in events[:4]] == [
        "lease.lost",
        "worker.killed",
        "paid 5%",
        "to a@b.c\nand others, password=***",
    ]
    first, second, third = events[:3]
    assert list(first) == ["timestamp", "level", "event", "task", "token", "process", "process_id"]
    assert first["timestamp"].endswith("Z")
    assert (first["level"], first["process"], first["token"]) == ("warning", "worker 1", 4)
    assert (second["pid"], "nothing" in second) == (4711, False)
    assert (third["amount"], third["url"], third["logger"]) == (3, "postgresql://u:***@h/d", "shop")
    assert "careful" in events[4]["event"]
    assert (events[5]["event"], events[5]["raw"]) == ("odd", "b'\\xff'")
    assert len(events[6]["text"]) < 20_000
    assert (events[6]["text"][:5], events[6]["text"][-3:]) == ("begin", "end")
    assert "in <module>\nValueError: cannot reach ***" in events[7]["exception"]
    assert [(event["task_id"], event["task"]) for event in events[8:]] == [("7", "send")] * 2
    assert SECRET not in text


def test_an_attempt_ends_with_one_canonical_line() -> None:
    """Task, id, queue, attempt, outcome, seconds and worker, whatever the outcome; what never ran has no outcome."""
    events, _ = run(
        """
        configure(tasks="all")
        from datetime import UTC, datetime
        from tasklib.outcomes import Completed, Failed, HeldTask, Interrupted, Problem, decide, Rules
        from tasklib.attempt_log import log_attempt
        from tasklib.log import task_log
        import inspect
        about = dict(id=uuid.uuid4(), name="send", queue="mail", worker_id="host-1", attempt=1, fencing_token=3)
        known = {name: None for name in inspect.signature(HeldTask).parameters}
        held = HeldTask(**{**known, "max_retries": 3, "retry_count": 0, "crash_count": 0, "state": "claimed", **about})
        problem = Problem("E", "m", "E: m\\nTraceback:\\n  File pay.py, line 3\\n")
        for outcome in (Completed("{}"), Failed(problem), Failed(problem, may_retry=False), Interrupted(began=False)):
            settlement = decide(held, outcome, datetime.now(UTC), Rules())
            log_attempt(task_log, held, settlement, attempt=2, seconds=0.25)
        """
    )
    done, retried, failed, released = events
    for event in (done, retried, failed):
        assert {
            "task": "send",
            "queue": "mail",
            "attempt": 2,
            "seconds": 0.25,
            "worker_id": "host-1",
        }.items() <= event.items()
        assert len(event["task_id"]) == 36
    assert (done["event"], done["outcome"], done["level"]) == ("task.completed", "completed", "info")
    assert (retried["outcome"], retried["will_retry"], retried["level"]) == ("failed", True, "warning")
    assert (failed["outcome"], failed["will_retry"], failed["level"]) == ("failed", False, "error")
    assert (failed["error_code"], failed["error"], failed["exception"]) == ("E", "E: m", "  File pay.py, line 3\n")
    assert (released["event"], "outcome" in released) == ("task.released", False)


@pytest.mark.parametrize(
    ("log", "seen"),
    [
        ({}, ["failed"]),
        ({"tasks": "failures"}, ["failed"]),
        ({"tasks": "all"}, ["completed", "failed"]),
        ({"tasks": "none"}, []),
        ({"tasks": "all", "level": "warning"}, ["failed"]),
        ({"tasks": "failures", "level": "error"}, []),
    ],
)
def test_attempts_have_lines_as_asked_for(log: dict[str, str], seen: list[str]) -> None:
    """By default only those that failed: a busy daemon would fill the disk with successes. Other events come all the
    same.
    """
    events, _ = run(
        f"""
        configure(**{log!r})
        from tasklib.log import task_log
        task_log.info("task.completed", outcome="completed")
        task_log.warning("task.failed", outcome="failed")
        log.error("worker.killed")
        """
    )
    assert [event["outcome"] for event in events[:-1]] == seen
    assert events[-1]["event"] == "worker.killed"


def test_an_application_that_sets_up_logging_leaves_ours_alone() -> None:
    """Django does, at its start: it closes all handlers, takes the root and disables what it does not know."""
    events, _ = run(
        """
        import logging.config
        configure()
        logging.config.dictConfig({"version": 1, "handlers": {"x": {"class": "logging.NullHandler"}},
                                   "root": {"handlers": ["x"], "level": "ERROR"}})
        logs.revive()
        library.info("worker.started")
        log.info("worker.ready")
        logging.getLogger("shop").error("goes where the application wants it")
        """
    )
    assert [event["event"] for event in events] == ["worker.started", "worker.ready"]


def test_what_nobody_catches_is_logged() -> None:
    """In the main thread and in others, as an event like any other."""
    ended = subprocess.run(
        program(
            """
            import threading
            configure()
            thread = threading.Thread(target=lambda: 1 / 0)
            thread.start(); thread.join()
            raise KeyError("main")
            """
        ),
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    events = [json.loads(line) for line in ended.stderr.splitlines()]
    assert [event["event"] for event in events] == ["process.failed"] * 2
    assert "ZeroDivisionError" in events[0]["exception"]
    assert "KeyError" in events[1]["exception"]
    assert ended.returncode == 1


def test_reopen_goes_on_in_a_new_file(tmp_path: Path) -> None:
    """For log rotation: what was renamed keeps its lines, the new file gets the next ones; nothing is lost. If it
    cannot be opened, the old one is kept and says so.
    """
    file = tmp_path / "log"
    run(
        """
        file = Path(sys.argv[1])
        configure(file=file)
        log.info("one")
        file.rename(file.with_name("log.1"))
        log.info("two")
        logs.reopen()
        log.info("three")
        file.rename(file.with_name("log.2"))
        file.mkdir()
        logs.reopen()
        log.info("four")
        """,
        str(file),
    )
    first, second = ((tmp_path / each).read_text().splitlines() for each in ("log.1", "log.2"))
    assert [json.loads(line)["event"] for line in first] == ["one", "two"]
    assert [json.loads(line)["event"] for line in second] == ["three", "log.not_reopened", "four"]
    assert (tmp_path / "log.1").stat().st_mode & 0o007 == 0


def test_a_task_that_closes_descriptors_does_not_send_the_log_elsewhere(tmp_path: Path) -> None:
    """What is opened next gets the log's number: it may be a connection to PostgreSQL, and must get none of it."""
    other = tmp_path / "other"
    run(
        """
        configure(file=Path(sys.argv[1]))
        number = logs.fileno()
        log.info("one")
        os.closerange(3, 100)
        others = [os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT) for _ in range(10)]
        assert number in others
        log.info("two")
        os.closerange(3, 100)
        others = [os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT) for _ in range(20)]
        logs.reopen()
        log.info("three")
        """,
        str(tmp_path / "log"),
        str(other),
    )
    lines = (tmp_path / "log").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["one", "two", "three"]
    assert other.read_text() == ""


def test_a_file_that_cannot_be_opened_is_a_clear_error(tmp_path: Path) -> None:
    """A boot error, before anything is logged."""
    ended = subprocess.run(program(f"configure(file='{tmp_path}/no/log')"), capture_output=True, text=True, check=False)
    assert f"InvalidConfig: log.file {tmp_path}/no/log cannot be opened: No such file or directory" in ended.stderr


@pytest.mark.parametrize("form", ["auto", "json"])
def test_on_a_terminal_lines_are_for_people(form: str) -> None:
    """Console on a terminal, unless JSON is asked for; what a user wrote does not steer the terminal."""
    outer, inner = pty.openpty()
    source = f"""
        configure(format="{form}")
        log.warning("worker.killed", pid=4711, error="two words \\x1b[2J")
        try: 1 / 0
        except Exception: log.exception("it.failed")
    """
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    subprocess.run(program(source), stderr=inner, check=True, env=environment, timeout=30)
    os.close(inner)
    shown = os.read(outer, 65536).decode().replace("\r\n", "\n")
    os.close(outer)
    lines = shown.splitlines()
    if form == "json":
        assert [json.loads(line)["event"] for line in lines] == ["worker.killed", "it.failed"]
        return
    assert lines[0].startswith("\x1b[33m")
    assert 'warning  worker.killed pid=4711 error="two words \\\\x1b[2J" process="worker 1"' in lines[0]
    assert lines[1].startswith("\x1b[31m")
    assert lines[-1] == "    ZeroDivisionError: division by zero"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a pipe cannot be opened once more, to be ours alone")
@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_reader_who_does_not_read_costs_lines_but_no_time(kind: str, tmp_path: Path) -> None:
    """A full pipe, or a journal that hangs, must not stop a supervisor. How many lines it cost is told afterwards."""
    if kind == "pipe":
        read, write = os.pipe()
    else:
        ends = socket.socketpair()
        read, write = (end.detach() for end in ends)
    source = """
        configure()
        for number in range(5000):
            log.info("line", number=number, text="x" * 5000)
        Path(sys.argv[1]).touch()
        sys.stdin.readline()
        log.info("last")
    """
    done = tmp_path / "done"
    writer = subprocess.Popen([*program(source), str(done)], stderr=write, stdin=subprocess.PIPE)
    try:
        os.close(write)
        wait_until(done.exists, "5,000 lines to be written or dropped", seconds=60)
        text = read_all(read)
        writer.communicate(b"\n", timeout=30)
        text += read_all(read)
    finally:
        writer.kill()
        writer.wait()
        os.close(read)
    lines = text.splitlines()
    events = [json.loads(line) for line in lines if line.endswith(b"}")]
    assert len(lines) - len(events) <= 1  # one line may be torn; it does not tear the next one
    seen = [event["number"] for event in events if event["event"] == "line"]
    (told,) = [event for event in events if event["event"] == "log.dropped"]
    assert seen == list(range(len(seen)))
    assert told["lines"] >= 5000 - len(seen) - 1
    assert events[-1]["event"] == "last"


def read_all(descriptor: int) -> bytes:
    """What is there now."""
    os.set_blocking(descriptor, False)
    text = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(descriptor, 1 << 20):
            text += chunk
    return text


def test_nobody_reads_any_more() -> None:
    """A reader who is gone must not end who logs."""
    read, write = os.pipe()
    os.close(read)
    source = 'configure(); log.info("into the void"); sys.stdout.write("alive")'
    ended = subprocess.run(program(source), stderr=write, stdout=subprocess.PIPE, check=True, timeout=30)
    os.close(write)
    assert ended.stdout == b"alive"
