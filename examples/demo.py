"""A minute with tasklib: a PostgreSQL of its own, tasks that go in, and a look at them.

python3 dev.py demo
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg

import tasklib
from tasklib import embedded


@tasklib.task(queue="mail", max_retries=5, timeout_seconds=30)
def send_email(to: str, subject: str) -> bool:
    print(f"to {to}: {subject}")
    return True


@tasklib.task
def resize_image(path: str, *, sizes: list[int]) -> int:
    print(f"{path}: {sizes}")
    return len(sizes)


@tasklib.task(queue="reports")
async def daily_report(day: datetime) -> None:
    print(f"report of {day:%Y-%m-%d}")


async def submit_some() -> None:
    say("submit one, and get its id back once it is committed")
    task_id = await send_email.submit(to="alice@example.com", subject="Welcome!")
    print(f"   {task_id}")

    say("later, more urgent, tagged")
    await tasklib.submit_task(
        send_email,
        to="bob@example.com",
        subject="A reminder",
        delay_seconds=3600,
        priority=10,
        tags={"batch": "reminders"},
    )
    await daily_report.options(scheduled_at=datetime.now(UTC) + timedelta(hours=8)).submit(datetime.now(UTC))

    say("the same idempotency key twice is one task")
    order = resize_image.options(idempotency_key="upload-17")
    first, second = await order.submit("cat.png", sizes=[64, 256]), await order.submit("cat.png", sizes=[64, 256])
    print(f"   {first == second=}, {second.existed=}")

    say("a thousand in one statement")
    many = [resize_image.new(f"photo-{n}.png", sizes=[64]) for n in range(1_000)]
    print(f"   {len(await tasklib.submit_many(many))} ids")

    say("wrong arguments are refused before anything is sent")
    try:
        await tasklib.submit_task(resize_image, path="cat.png", sizes="64")
    except tasklib.InvalidArguments as error:
        print(f"   {error}")


def submit_in_a_transaction(dsn: str) -> None:
    say("inside your own transaction: rolled back means never existed")
    before = len(tasklib.list_tasks(name="send_email"))
    with psycopg.connect(dsn) as conn:
        send_email.options(connection=conn).submit_sync(to="nobody@example.com", subject="never sent")
        conn.rollback()
    print(f"   {before} before, {len(tasklib.list_tasks(name='send_email'))} after")


def look(dsn: str) -> None:
    say("look at them: tasklib list --queue mail, tasklib list --limit 3")
    command = Path(sys.executable).with_name("tasklib")
    for options in (["--queue", "mail"], ["--limit", "3"]):
        subprocess.run([command, "list", *options], env=os.environ | {"DATABASE_URL": dsn}, check=True)  # noqa: S603 - the command beside this Python
    say("or with SQL: select state, queue, count(*) from tasklib.tasks group by 1, 2")
    with psycopg.connect(dsn) as conn:
        for state, queue, count in conn.execute(
            "select state, queue, count(*) from tasklib.tasks group by 1, 2 order by 2"
        ):
            print(f"   {state:10} {queue:10} {count:6}")


def say(text: str) -> None:
    print(f"\n-- {text}", flush=True)


def main() -> None:
    say("start a PostgreSQL of our own")
    with embedded.postgres() as server:
        print(f"   PostgreSQL {server.version}, {server.dsn}")
        tasklib.init(tasklib.Config(server.dsn))
        asyncio.run(submit_some())
        submit_in_a_transaction(server.dsn)
        look(server.dsn)
    print("\nThe server is stopped and its directory removed.")


if __name__ == "__main__":
    main()
