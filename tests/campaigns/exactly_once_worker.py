"""One worker process of the campaign, and its tasks: each writes one row through the connection of its task."""

from __future__ import annotations

import asyncio
import logging
import sys

import tasklib
from tests.campaigns import soak_worker
from tests.campaigns.soak_worker import journaled, journaled_async, nap

MAKE_EFFECTS = "create table effects (task_id uuid not null, attempt integer not null)"
_WRITE = "insert into effects values (%s, %s)"


@tasklib.task(max_retries=1000, backoff=tasklib.Fixed(0.2))
@journaled
def write(seconds: float, failures: int, children: int) -> None:
    """Writes, has children in the same transaction, thinks for a while, and fails the first times."""
    current = tasklib.current_task()
    current.connection.execute(_WRITE, [current.id, current.attempt])
    for _ in range(children):
        write.options(connection=current.connection).submit_sync(0.0, 0, 0)
    nap(seconds)
    if current.retry_count < failures:
        raise tasklib.Retry(delay_seconds=0)


@tasklib.task(max_retries=1000, backoff=tasklib.Fixed(0.2))
@journaled_async
async def write_async(seconds: float, failures: int, children: int) -> None:
    current = tasklib.current_task()
    connection = await current.async_connection()
    await connection.execute(_WRITE, [current.id, current.attempt])
    for _ in range(children):
        await write_async.options(connection=connection).submit(0.0, 0, 0)
    await asyncio.sleep(seconds)
    if current.retry_count < failures:
        raise tasklib.Retry(delay_seconds=0)


def main(url: str, journal: str, lease_seconds: str, name: str) -> None:
    # Before the soak's: a commit that was found is told at this level.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    tasklib.init(tasklib.Config(url))  # for children
    soak_worker.main(url, journal, lease_seconds, name)


if __name__ == "__main__":
    main(*sys.argv[1:])
