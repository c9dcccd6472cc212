"""The shop's own tables, in the database that the plugin has made; and the world outside, replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from .. import orders, outside

if TYPE_CHECKING:
    from collections.abc import Iterator

    import tasklib
    from tasklib.testing import Queue


@pytest.fixture(scope="session")
def database(tasklib_config: tasklib.Config) -> str:
    with psycopg.connect(tasklib_config.database_url) as conn:
        orders.create_tables(conn)
    return tasklib_config.database_url


@pytest.fixture
def conn(database: str, tasklib_queue: Queue) -> Iterator[psycopg.Connection[Any]]:
    """For the application, with an empty shop; the queue is empty too."""
    with psycopg.connect(database) as conn:
        conn.execute("delete from shop.orders")
        conn.commit()
        yield conn


@pytest.fixture(autouse=True)
def mailbox(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """What would have been sent."""
    sent: list[tuple[str, str, str]] = []
    monkeypatch.setattr(outside, "send_mail", lambda *mail: sent.append(mail))
    return sent
