"""Django's connections and tasklib's: submits join the thread's transaction, tasks start on connections that live, and
the default client follows a test run to its own database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.db import close_old_connections, connections
from django.db.backends.base.base import NO_DB_ALIAS
from django.db.backends.signals import connection_created

import tasklib
from tasklib.application import default_client
from tasklib.django.settings import config, database_alias
from tasklib.worker.hooks import around_task

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_database_name: str | None = None  # which the default client was made for


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
    """The first use in a process looks, on a connection of tasklib's own; a missing schema is made."""
    _follow(connections[database_alias()])
    default_client().database.check_schema()


class LiveConnections:
    """Around each task, what Django does around each request: connections that broke, or are too old, are closed, and
    the next query makes others. A worker may have been idle for hours: before a task they are asked whether they live.
    """

    def __enter__(self) -> None:
        _close_dead_connections()

    def __exit__(self, *_: object) -> None:
        close_old_connections()

    async def __aenter__(self) -> None:
        """Async code reaches the ORM through one thread: its connections are meant."""
        await sync_to_async(_close_dead_connections)()

    async def __aexit__(self, *_: object) -> None:
        await sync_to_async(close_old_connections)()


def _close_dead_connections() -> None:
    close_old_connections()
    for each in connections.all(initialized_only=True):
        if each.connection is not None and not each.in_atomic_block and not each.is_usable():
            each.close()


def _joined() -> BaseDatabaseWrapper:
    """The connection of this thread: where atomic() is open, a submit is part of it."""
    ensure_schema()
    return connections[database_alias()]


def _on_connection(connection: BaseDatabaseWrapper, **_: Any) -> None:
    """A test run drops and copies its databases from a connection to none of them, and nobody may be connected then."""
    if connection.alias == NO_DB_ALIAS:
        default_client().close()
    elif connection.alias == database_alias():
        _follow(connection)


def _follow(connection: BaseDatabaseWrapper) -> None:
    """A test run puts databases of its own in the place of the configured one, after the start."""
    if connection.settings_dict["NAME"] != _database_name:
        initialise()
