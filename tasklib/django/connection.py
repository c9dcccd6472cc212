"""Django's connections and tasklib's: submits join the thread's transaction, tasks start with live connections, and the
default client follows a test run to its own database.
"""

from __future__ import annotations

from typing import Any

from asgiref.sync import sync_to_async
from django.db import close_old_connections, connections
from django.db.backends.base.base import NO_DB_ALIAS, BaseDatabaseWrapper
from django.db.backends.signals import connection_created

import tasklib
from tasklib.application import default_client
from tasklib.django.settings import config, database_alias
from tasklib.worker.hooks import around_task

_database_name: str | None = None  # of the default client


def set_up() -> None:
    """Once in a process."""
    initialise()
    connection_created.connect(_on_connection, dispatch_uid="tasklib")
    around_task(LiveConnections)


def initialise() -> None:
    global _database_name  # noqa: PLW0603 - as the default client itself
    _database_name = connections[database_alias()].settings_dict["NAME"]
    tasklib.init(config(), connection=_joined)


def ensure_schema() -> None:
    """The first call in a process checks, on a connection of tasklib's own, and creates a missing schema."""
    _follow(connections[database_alias()])
    default_client().database.check_schema()


class LiveConnections:
    """Around each task, as Django does around each request: close connections that broke or are too old; the next query
    opens new ones. A worker may have been idle for hours, so before a task the connections are checked.
    """

    def __enter__(self) -> None:
        _close_dead_connections()

    def __exit__(self, *_: object) -> None:
        close_old_connections()

    async def __aenter__(self) -> None:
        """Async code uses the ORM in one thread: the connections of that thread are checked."""
        await sync_to_async(_close_dead_connections)()

    async def __aexit__(self, *_: object) -> None:
        await sync_to_async(close_old_connections)()


def _close_dead_connections() -> None:
    close_old_connections()
    for each in connections.all(initialized_only=True):
        if each.connection is not None and not each.in_atomic_block and not each.is_usable():
            each.close()


def _joined() -> BaseDatabaseWrapper:
    """The connection of this thread: inside atomic(), a submit is part of the transaction."""
    ensure_schema()
    return connections[database_alias()]


def _on_connection(connection: BaseDatabaseWrapper, **_: Any) -> None:
    """A test run drops and copies its databases over another connection; until then all others have to be closed."""
    if connection.alias == NO_DB_ALIAS:
        default_client().close()
    elif connection.alias == database_alias():
        _follow(connection)


def _follow(connection: BaseDatabaseWrapper) -> None:
    """After the start, a test run replaces the configured database by its own."""
    if connection.settings_dict["NAME"] != _database_name:
        initialise()
