"""A minute with tasklib: a PostgreSQL of its own, sample tasks, a worker, and what happens to each, live.

python3 dev.py demo
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from datetime import UTC, datetime, timedelta

import psycopg

import tasklib
from tasklib import TaskWorker, embedded


@tasklib.task(queue="mail", max_retries=5, timeout_seconds=30)
def send_email(to: str, subject: str) -> bool:
    time.sleep(0.2)
    return subject != "" and "@" in to


@tasklib.task
def resize_image(path: str, *, sizes: list[int]) -> int:
    return len(path) * len(sizes)


@tasklib.task
async def fetch(url: str) -> str:
    await asyncio.sleep(0.3)
    return f"{url}: 200"


failures = 0


@tasklib.task(backoff=tasklib.Fixed(0.4))
def call_api() -> str:
    """Works at the third attempt."""
    global failures  # noqa: PLW0603 - for show
    failures += 1
    if failures <= 2:  # noqa: PLR2004 - see above
        raise ConnectionError("503 from the other side")
    return "done"


@tasklib.task(timeout_seconds=0.3, max_retries=0)
def too_slow() -> None:
    while True:
        time.sleep(0.01)


@tasklib.task
def wait_for_stock() -> None:
    raise tasklib.Snooze(3600, "not in stock")


@tasklib.task
def charge_card(card: str) -> None:
    raise tasklib.Fail(f"declined: ends in {card[-2:]}", error_code="CARD_DECLINED")


@tasklib.task
def never() -> None:
    """Cancelled, or expired, before it starts."""


async def submit_some() -> None:
    say("submit: now, later, urgent, once per key, in bulk, and some that will not go well")
    await send_email.submit(to="alice@example.com", subject="Welcome!")
    await tasklib.submit_task(fetch, url="https://example.com", delay_seconds=1)
    await tasklib.submit_task(send_email, to="bob@example.com", subject="Urgent", priority=10)
    order = resize_image.options(idempotency_key="upload-17")
    first, second = await order.submit("cat.png", sizes=[64, 256]), await order.submit("cat.png", sizes=[64, 256])
    print(f"   the same key twice is one task: {first == second}")
    for function in (call_api, too_slow, wait_for_stock):
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


def watch(seconds: float = 20.0) -> None:
    """Print every change, until nothing more will happen within the hour."""
    say("a worker with four slots; every change as it happens")
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
        case tasklib.State.PENDING if task.attempt:
            return f"pending    snoozed until {task.scheduled_at:%H:%M}"
        case tasklib.State.PENDING:
            return "pending    " + ("ready" if task.ready else f"due at {task.scheduled_at:%H:%M:%S}")
        case tasklib.State.CLAIMED:
            return "claimed    by the worker"
        case tasklib.State.COMPLETED:
            return f"completed  {attempt}, result {task.result and task.result['value']!r}"
        case tasklib.State.FAILED if task.next_retry_at is not None:
            return f"failed     {attempt}, again at {task.next_retry_at:%H:%M:%S}: {error}"
        case _:
            return f"{task.state:10} {attempt or 'never started'}{': ' + error if error else ''}"


def show_throughput(config: tasklib.Config) -> None:
    say("and a few thousand at once")
    count = 5_000
    tasklib.submit_many_sync([resize_image.new(f"photo-{n}.png", sizes=[64]) for n in range(count)])
    began = time.monotonic()
    TaskWorker(config, concurrency=4).run_until_empty_sync()
    print(f"   {count} tasks in {time.monotonic() - began:.1f} s, each with its result and its attempt on record")


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
        worker = TaskWorker(config, concurrency=4)
        thread = threading.Thread(target=worker.run_sync)
        thread.start()
        watch()
        worker.stop()
        thread.join()
        show_throughput(config)
        say("what became of them: select state, error_code, count(*) from tasklib.tasks group by 1, 2")
        with psycopg.connect(server.dsn) as conn:
            query = "select state, coalesce(error_code, ''), count(*) from tasklib.tasks group by 1, 2 order by 1, 2"
            for state, code, count in conn.execute(query):
                print(f"   {state:10} {code:15} {count:6}")
        tasklib.close()
    print("\nThe server is stopped and its directory removed.")


if __name__ == "__main__":
    main()
