"""Task functions that write through their own connection, for tests/integration/test_scarce_connections.py. In a module
of their own: a worker's fork server imports the one with a process of its own by its name.
"""

from __future__ import annotations

import tasklib

_INSERT = "insert into effects values (%s)"


@tasklib.task(name="scarce.sync")
def write() -> None:
    current = tasklib.current_task()
    current.connection.execute(_INSERT, [current.id])


@tasklib.task(name="scarce.async")
async def write_async() -> None:
    current = tasklib.current_task()
    await (await current.async_connection()).execute(_INSERT, [current.id])


@tasklib.task(name="scarce.process", isolation="process")
def write_apart() -> None:
    current = tasklib.current_task()
    current.connection.execute(_INSERT, [current.id])


KINDS = {"sync": write, "async": write_async, "process": write_apart}
