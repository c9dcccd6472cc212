"""Waiting for an event with a deadline, never for a time."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg


# For a program to start, which on a busy machine takes many times as long. Nothing else would come to pass meanwhile.
START_SECONDS = 90.0
# For anything else. It only bounds a hang: even a busy machine gets there by then. Mutants hang on purpose.
WAIT_SECONDS = float(os.environ.get("TASKLIB_TEST_WAIT_SECONDS", "60"))


def wait_until(is_so: Callable[[], bool], what: str = "the condition", *, seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.005)


def wait_until_blocked(conn: psycopg.Connection[Any], waiting: psycopg.Connection[Any]) -> None:
    """Until it waits for a lock that another holds. It is known by its name: behind a pooler, its pid is made up."""
    name = waiting.info.parameter_status("application_name")

    def is_blocked() -> bool:
        return conn.execute(_BLOCKED, [name]).fetchone() is not None

    wait_until(is_blocked, f"{name} blocked")


_BLOCKED = """
select from pg_stat_activity
 where datname = current_database() and application_name = %s and cardinality(pg_blocking_pids(pid)) > 0
"""
