"""A minute with tasklib: a PostgreSQL of its own, a daemon with two workers, and what happens, live, to tasks that
succeed, fail, retry, time out and crash their worker.

python3 dev.py demo
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

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
    from collections.abc import Iterator


async def submit_some() -> None:
    say("submit: now, later, urgent, once per key, in bulk, and some that will not go well")
    await send_email.submit(to="alice@example.com", subject="Welcome!")
    await tasklib.submit_task(fetch, url="https://example.com", delay_seconds=1)
    await tasklib.submit_task(send_email, to="bob@example.com", subject="Urgent", priority=10)
    order = resize_image.options(idempotency_key="upload-17")
    first, second = await order.submit("cat.png", sizes=[64, 256]), await order.submit("cat.png", sizes=[64, 256])
    print(f"   the same key twice is one task: {first == second}")
    for function in (call_api, too_slow, wait_for_stock, crash_once, crash_always):
        await function.submit()
    await charge_card.submit("4111-1111-1111-1142")
    await never.options(expires_at=datetime.now(UTC) + timedelta(seconds=1), delay_seconds=2).submit()
    cancelled = await never.options(delay_seconds=3600).submit()
    await tasklib.cancel_task_async(cancelled, "changed my mind")
    try:
        await tasklib.submit_task(resize_image, path="cat.png", sizes="64")
    except tasklib.InvalidArguments as error:
        print(f"   wrong arguments never get in: {error}")


def submit_in_a_transaction(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        send_email.options(connection=conn).submit_sync(to="nobody@example.com", subject="never sent")
        conn.rollback()
    print("   one in a transaction that was rolled back: never existed")


def watch(seconds: float = 60.0) -> None:
    """Print every change, until nothing more will happen within the hour."""
    say("every change as it happens")
    began, seen = time.monotonic(), dict[str, str]()
    while time.monotonic() < began + seconds:
        tasks = tasklib.list_tasks()
        for task in reversed(tasks):
            line = f"{task.name:15} {task.queue:8} {describe(task)}"
            if seen.get(str(task.id)) != line:
                seen[str(task.id)] = line
                print(f"   {time.monotonic() - began:5.2f} s  {line}", flush=True)
        if not any(is_moving(task) for task in tasks):
            return
        time.sleep(0.02)


def is_moving(task: tasklib.Task) -> bool:
    is_far = task.due_at is not None and task.due_at > datetime.now(UTC) + timedelta(minutes=30)
    return not tasklib.is_final(task) and not is_far


def describe(task: tasklib.Task) -> str:
    attempt = f"attempt {task.attempt}" if task.attempt else ""
    error = (task.error or "").partition("\n")[0]
    match task.state:
        case tasklib.State.PENDING:
            return f"pending    {why_it_waits(task)}"
        case tasklib.State.CLAIMED:
            return "claimed    by the worker"
        case tasklib.State.COMPLETED:
            return f"completed  {attempt}, result {task.result and task.result['value']!r}"
        case tasklib.State.FAILED if task.next_retry_at is not None:
            return f"failed     {attempt}, again at {task.next_retry_at:%H:%M:%S}: {error}"
        case _:
            return f"{task.state:10} {attempt or 'never started'}{': ' + error if error else ''}"


def why_it_waits(task: tasklib.Task) -> str:
    if task.ready:
        return "to run again: its worker died" if task.attempt else "ready"
    return f"snoozed until {task.scheduled_at:%H:%M}" if task.attempt else f"due at {task.scheduled_at:%H:%M:%S}"


def show_throughput() -> None:
    say("and a few thousand at once")
    count = 5_000
    began = time.monotonic()
    ids = tasklib.submit_many_sync([resize_image.new(f"photo-{n}.png", sizes=[64]) for n in range(count)])
    tasklib.wait_for_sync(ids, timeout=60)
    print(f"   {count} tasks in {time.monotonic() - began:.1f} s, each with its result and its attempt on record")


@contextlib.contextmanager
def daemon(dsn: str) -> Iterator[None]:
    """`tasklibd run`, as an operator would start it. The database's address is a secret: it is not an argument."""
    say("tasklibd run --app examples.demo_tasks --workers 2 --concurrency 4")
    root = str(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | {
            "TASKLIB_DATABASE_URL": dsn,
            "TASKLIB_RUNTIME_DIRECTORY": directory,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        }
        command = [sys.executable, "-m", "tasklib_daemon"]
        run = [*command, "run", "--app", "examples.demo_tasks", "--workers", "2", "--concurrency", "4"]
        log = Path(directory, "log")
        with log.open("wb") as log_file:
            process = subprocess.Popen([*run, "--web-port", "none"], env=environment, stderr=log_file)  # noqa: S603 - our own
        try:
            yield
            say("tasklibd status")
            subprocess.run([*command, "status", "--socket", f"{directory}/control.sock"], env=environment, check=True)  # noqa: S603 - as above
        finally:
            process.terminate()
            code = process.wait(60)
            print(f"   and SIGTERM: it has drained, exit code {code}", flush=True)


def say(text: str) -> None:
    print(f"\n-- {text}", flush=True)


def main() -> None:
    logging.getLogger("tasklib").setLevel(logging.CRITICAL)  # what it would say is shown below
    say("start a PostgreSQL of our own")
    with embedded.postgres() as server:
        print(f"   PostgreSQL {server.version}, {server.dsn}")
        config = tasklib.Config(server.dsn)
        tasklib.init(config)
        asyncio.run(submit_some())
        submit_in_a_transaction(server.dsn)
        with daemon(server.dsn):
            watch()
            show_throughput()
        say("what became of them: select state, error_code, count(*) from tasklib.tasks group by 1, 2")
        with psycopg.connect(server.dsn) as conn:
            query = "select state, coalesce(error_code, ''), count(*) from tasklib.tasks group by 1, 2 order by 1, 2"
            for state, code, count in conn.execute(query):
                print(f"   {state:10} {code:15} {count:6}")
        tasklib.close()
    print("\nThe server is stopped and its directory removed.")


if __name__ == "__main__":
    main()
