"""Uses up a server's connections, as an application with a pool that is too large does."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import psycopg

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def all_connections(dsn: str) -> Iterator[list[psycopg.Connection[Any]]]:
    """Takes all connections that are left, for the length of the block. Empty if other clients have taken them."""
    taken: list[psycopg.Connection[Any]] = []
    try:
        with contextlib.suppress(psycopg.OperationalError):  # there are no more
            while True:
                taken.append(psycopg.connect(dsn, autocommit=True, application_name="other application"))
        yield taken
    finally:
        for each in taken:
            each.close()
