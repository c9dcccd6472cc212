"""Two minutes with tasklib: a PostgreSQL of its own, a daemon with two workers, and what happens, live, to tasks that
succeed, fail, retry, time out and crash their worker. On a terminal it waits for Enter before each step.

python3 dev.py demo            (--fast: without pauses)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from uuid import UUID

import psycopg

import tasklib
from examples.demo_tasks import (
    call_api,
    charge_card,
    crash_always,
    crash_once,
    fetch,
    never,
    resize_image,
    send_email,
    too_slow,
    wait_for_stock,
)
from tasklib import embedded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STEPS = 7
COLOURS = {"completed": "32", "failed": "31", "buried": "31", "cancelled": "33", "expired": "33", "running": "36"}
DAEMON = [sys.executable, "-m", "tasklib_daemon"]


class Screen:
    """What is said: in colours on a terminal, unless NO_COLOR is set, and with a pause before each step."""

    def __init__(self, out: TextIO, keyboard: TextIO, *, is_fast: bool) -> None:
        self._out = out
        self._keyboard = keyboard
        self._is_coloured = out.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._waits = not is_fast and out.isatty() and keyboard.isatty()
        self._step = 0

    def begin(self) -> None:
        self.say(self._in("1", "tasklib, a task queue in PostgreSQL"))
        if self._waits:
            self.say(f"{STEPS} steps. Enter goes on, Ctrl-C ends it.")

    def step(self, title: str, *about: str) -> None:
        """A heading, what is to be seen, and time to read the step before."""
        self._step += 1
        self.pause()
        self.say("", self._in("1;34", f"{self._step}/{STEPS}  {title}"), *(f"     {line}".rstrip() for line in about))

    def pause(self) -> None:
        if not self._waits:
            return
        self._out.write(self._in("2", "\n[Enter] "))
        self._out.flush()
        self._keyboard.readline()

    def code(self, *lines: str) -> None:
        """What one would write, or type."""
        self.say("", *(self._in("36", f"     {line}") for line in lines), "")

    def change(self, seconds: float, task: tasklib.Task) -> None:
        state, _, details = describe(task).partition(" ")
        coloured = self._in(COLOURS.get(state, ""), f"{state:<10}")
        self.say(f"     {seconds:5.2f} s  {label(task):16} {task.queue:8} {coloured} {details.strip()}")

    def say(self, *lines: str) -> None:
        print(*lines, sep="\n", file=self._out, flush=True)

    def note(self, *lines: str) -> None:
        self.say(*(f"     {line}" for line in lines))

    def _in(self, colour: str, text: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if colour and self._is_coloured else text


# --- the steps ---


def submit_and_wait(screen: Screen) -> None:
    screen.step(
        "Submit tasks, and wait for results",
        "Now, in a second, and before all others. (In async code: await submit, await submit_handle, await result.)",
    )
    screen.code(
        'handle = send_email.submit_handle_sync(to="alice@example.com", subject="Welcome!")',
        'fetch.options(delay_seconds=1).submit_sync(url="https://example.com")',
        'send_email.options(priority=10).submit_sync(to="bob@example.com", subject="Urgent")',
    )
    handle = send_email.submit_handle_sync(to="alice@example.com", subject="Welcome!")
    later = fetch.options(delay_seconds=1).submit_sync(url="https://example.com")
    urgent = send_email.options(priority=10).submit_sync(to="bob@example.com", subject="Urgent")
    watch(screen, [handle.id, later, urgent])
    screen.code("handle.result_sync(timeout=10)")
    screen.note(f"{handle.result_sync(timeout=10)}")


def submit_safely(screen: Screen, dsn: str) -> None:
    screen.step("Nothing wrong, nothing twice, nothing from nowhere")
    screen.code(
        'order = resize_image.options(idempotency_key="upload-17")',
        'first, second = order.submit_sync("cat.png", sizes=[64]), order.submit_sync("cat.png", sizes=[64])',
    )
    order = resize_image.options(idempotency_key="upload-17")
    first, second = order.submit_sync("cat.png", sizes=[64]), order.submit_sync("cat.png", sizes=[64])
    screen.note(f"the same key twice is one task: {first == second}")
    screen.code('tasklib.submit_task_sync(resize_image, path="cat.png", sizes="64")')
    try:
        tasklib.submit_task_sync(resize_image, path="cat.png", sizes="64")
    except tasklib.InvalidArguments as error:
        screen.note(f"wrong arguments never get in: {error}")
    screen.code("send_email.options(connection=conn).submit_sync(...)  # in your own transaction", "conn.rollback()")
    with psycopg.connect(dsn) as conn:
        send_email.options(connection=conn).submit_sync(to="nobody@example.com", subject="never sent")
        conn.rollback()
    screen.note("rolled back with the rest of the transaction: it never existed")


def fail(screen: Screen, log: Path) -> None:
    screen.step(
        "Tasks that do not go well",
        "call_api works at the second retry, too_slow has a timeout of 0.3 s, charge_card says that it will never",
        "work, wait_for_stock asks to be run in an hour. One is cancelled, and one expires before it could start.",
        "",
    )
    failing = charge_card.submit_sync("4111-1111-1111-1142")
    tasks = [function.submit_sync() for function in (call_api, too_slow, wait_for_stock)]
    expiring = never.options(expires_at=datetime.now(UTC) + timedelta(seconds=1), delay_seconds=2).submit_sync()
    cancelled = never.options(delay_seconds=3600).submit_sync()
    tasklib.cancel_task(cancelled, "changed my mind")
    watch(screen, [failing, *tasks, expiring, cancelled])
    screen.say("", "     What the daemon has logged of charge_card, here without its traceback:", "")
    screen.note(json.dumps(logged(log, failing)))


def crash(screen: Screen) -> None:
    screen.step(
        "Workers that die",
        "crash_once kills its worker the first time, crash_always each time. What runs beside them runs again,",
        "within a second. The one that keeps killing its workers is found out, and buried.",
        "",
    )
    tasks = [function.submit_sync() for function in (crash_once, crash_always)]
    tasks.append(send_email.submit_sync(to="carol@example.com", subject="Innocent"))
    watch(screen, tasks)


def show_throughput(screen: Screen) -> None:
    count = 5_000
    screen.step(f"{count:,} at once")
    screen.code(f'tasklib.submit_many_sync([resize_image.new(f"photo-{{n}}.png", sizes=[64]) for n in range({count})])')
    began = time.monotonic()
    ids = tasklib.submit_many_sync([resize_image.new(f"photo-{n}.png", sizes=[64]) for n in range(count)])
    tasklib.wait_for_sync(ids, timeout=60)
    screen.note(f"{count} tasks in {time.monotonic() - began:.1f} s, each with its result and its attempt on record")


def look(screen: Screen, dsn: str, environment: dict[str, str]) -> None:
    screen.step("Look")
    screen.code("tasklibd status")
    status = subprocess.run([*DAEMON, "status"], env=environment, capture_output=True, text=True, check=True)  # noqa: S603 - our own
    screen.note(*status.stdout.splitlines())
    screen.code("select state, error_code, count(*) from tasklib.tasks group by 1, 2")
    with psycopg.connect(dsn) as conn:
        query = "select state, coalesce(error_code, ''), count(*) from tasklib.tasks group by 1, 2 order by 1, 2"
        for state, code, count in conn.execute(query):
            screen.note(f"{state:10} {code:15} {count:6}")


# --- what happens to tasks ---


def watch(screen: Screen, ids: Sequence[UUID], seconds: float = 60.0) -> None:
    """Print every change, until nothing more will happen within the hour."""
    began, seen = time.monotonic(), dict[UUID, str]()
    while time.monotonic() < began + seconds:
        tasks = [task for task in map(tasklib.get_task, ids) if task is not None]
        for task in tasks:
            if task.state != tasklib.State.CLAIMED and seen.get(task.id) != describe(task):
                seen[task.id] = describe(task)
                screen.change(time.monotonic() - began, task)
        if not any(is_moving(task) for task in tasks):
            return
        time.sleep(0.02)


def label(task: tasklib.Task) -> str:
    """Mails are told apart by whom they are for."""
    return f"{task.name} {task.kwargs.get('to', '').partition('@')[0]}".rstrip()


def is_moving(task: tasklib.Task) -> bool:
    is_far = task.due_at is not None and task.due_at > datetime.now(UTC) + timedelta(minutes=30)
    return not tasklib.is_final(task) and not is_far


def describe(task: tasklib.Task) -> str:
    attempt = f"attempt {task.attempt}" if task.attempt else ""
    error = (task.error or "").partition("\n")[0]
    match task.state:
        case tasklib.State.PENDING:
            return f"pending {why_it_waits(task)}"
        case tasklib.State.COMPLETED:
            return f"completed {attempt}, result {task.result and task.result['value']!r}"
        case tasklib.State.FAILED if task.next_retry_at is not None:
            return f"failed {attempt}, again at {task.next_retry_at:%H:%M:%S}: {error}"
        case _:
            return f"{task.state} {attempt or 'never started'}{': ' + error if error else ''}"


def why_it_waits(task: tasklib.Task) -> str:
    if task.ready:
        return "to run again: its worker died" if task.attempt else "ready"
    return f"snoozed until {task.scheduled_at:%H:%M}" if task.attempt else f"due at {task.scheduled_at:%H:%M:%S}"


def logged(log: Path, task_id: UUID, seconds: float = 20.0) -> dict[str, Any]:
    """The line at the end of the task's attempt, as soon as it is there."""
    wanted = ("level", "event", "task", "attempt", "error_code", "error", "will_retry")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for line in log.read_text("utf-8").splitlines():
            if '"event":"task.failed"' in line and str(task_id) in line:
                event = json.loads(line)
                return {key: event[key] for key in wanted}
        time.sleep(0.02)
    raise SystemExit(f"the daemon has logged nothing about task {task_id}: see {log}")


# --- the daemon ---


@contextlib.contextmanager
def daemon(screen: Screen, directory: Path, environment: dict[str, str]) -> Iterator[Path]:
    """`tasklibd run`, as an operator would start it. The database's address is a secret: it is not an argument."""
    screen.step(
        "Start the daemon", "A supervisor, two workers with four slots each, and a keeper, which recovers tasks."
    )
    options = ["run", "--app", "examples.demo_tasks", "--workers", "2", "--concurrency", "4"]
    screen.code(" ".join(["tasklibd", *options]))
    log = directory / "log"
    with log.open("wb") as file:
        process = subprocess.Popen([*DAEMON, *options, "--web-port", "none"], env=environment, stderr=file)  # noqa: S603 - our own
    try:
        screen.note("it is starting; what is submitted meanwhile waits in the database")
        yield log
    finally:
        process.terminate()
        screen.say("", f"     and SIGTERM: the daemon has drained, exit code {process.wait(60)}")


def environment_of(dsn: str, directory: Path) -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    return os.environ | {
        "TASKLIB_DATABASE_URL": dsn,
        "TASKLIB_RUNTIME_DIRECTORY": str(directory),
        "TASKLIB_CONTROL_SOCKET": str(directory / "control.sock"),
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }


def run(screen: Screen) -> None:
    screen.begin()
    screen.say("", "     starting a PostgreSQL of our own, in a temporary directory ...")
    with embedded.postgres() as server, tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        screen.note(f"PostgreSQL {server.version}, {server.dsn}")
        tasklib.init(tasklib.Config(server.dsn))
        environment = environment_of(server.dsn, directory)
        with daemon(screen, directory, environment) as log:
            submit_and_wait(screen)
            submit_safely(screen, server.dsn)
            fail(screen, log)
            crash(screen)
            show_throughput(screen)
            look(screen, server.dsn, environment)
        tasklib.close()
    screen.note("the server is stopped and its directory removed")
    screen.say("", "Next: docs/quickstart.md, from nothing to a task of your own. These tasks: examples/demo_tasks.py.")


def main() -> int:
    parser = argparse.ArgumentParser(prog="dev.py demo", description="What tasklib does, in seven steps.")
    parser.add_argument("--fast", action="store_true", help="without a pause before each step")
    logging.getLogger("tasklib").setLevel(logging.CRITICAL)  # what it would say is shown below
    try:
        run(Screen(sys.stdout, sys.stdin, is_fast=parser.parse_args().fast))
    except KeyboardInterrupt:
        print("\nended; everything is stopped and removed")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
