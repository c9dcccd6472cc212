"""Waiting for an event with a deadline, never for a time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg


def wait_until(is_so: Callable[[], bool], what: str = "the condition", *, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.005)


def wait_until_blocked(conn: psycopg.Connection[Any], pid: int) -> None:
    """Until the backend waits for a lock that another one holds."""

    def is_blocked() -> bool:
        row = conn.execute("select cardinality(pg_blocking_pids(%s)) > 0", [pid]).fetchone()
        return row == (True,)

    wait_until(is_blocked, f"backend {pid} blocked")
