"""Submits a few tasks and waits for them: python examples/simple.py, with DATABASE_URL set.

examples/worker.py, in another terminal, runs them.
"""

from __future__ import annotations

import asyncio
import os

import tasklib

config = tasklib.Config(
    database_url=os.environ["DATABASE_URL"],
    max_retries=3,
    base_retry_delay_seconds=0.5,  # so that there is something to see; the default is 5 s
)
tasklib.init(config)


@tasklib.task
def send_email(to: str, subject: str) -> bool:
    print(f"to {to}: {subject}", flush=True)
    return True


calls = 0


@tasklib.task(max_retries=5, timeout_seconds=30)
def flaky() -> str:
    global calls  # noqa: PLW0603 - for show: works at the third call
    calls += 1
    if calls < 3:  # noqa: PLR2004 - see above
        raise ConnectionError("try again")
    return "made it"


@tasklib.task
async def add(a: int, b: int) -> int:
    await asyncio.sleep(0.1)
    return a + b


async def wait_for(task_id: tasklib.TaskId) -> tasklib.Task:
    while not tasklib.is_final(task := await tasklib.get_task_async(task_id)):  # noqa: ASYNC110 - it is the database's
        await asyncio.sleep(0.05)
    return task


async def main() -> None:
    ids = [
        await tasklib.submit_task(send_email, to="user@example.com", subject="Hello"),
        await tasklib.submit_task(add, a=2, b=3, delay_seconds=1, priority=10, tags={"batch": "daily"}),
        await tasklib.submit_task(flaky),
    ]
    for task_id in ids:
        task = await wait_for(task_id)
        print(f"{task.name}: {task.state}, {task.result}, {task.attempt} attempt(s)", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
