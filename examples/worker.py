"""Runs the tasks that examples/simple.py submits, until Ctrl-C: python examples/worker.py, with DATABASE_URL set."""

from __future__ import annotations

import asyncio

import simple  # type: ignore[import-not-found] # the module beside this one, which defines the tasks

import tasklib
from tasklib import TaskWorker


async def main() -> None:
    worker = TaskWorker(simple.config, concurrency=4, poll_interval_seconds=1.0)
    print(f"serving: {', '.join(tasklib.get_registered_tasks())}", flush=True)
    await worker.run()


if __name__ == "__main__":
    asyncio.run(main())
