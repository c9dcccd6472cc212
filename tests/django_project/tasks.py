"""Found by autodiscovery: task functions of tasklib's, and tasks of django.tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import django
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction

import tasklib
from tests.django_project.models import Order

if TYPE_CHECKING or django.VERSION >= (6, 0):
    from django.tasks import TaskContext, task
else:
    from django_tasks import TaskContext, task


class Refused(Exception):
    """Raised by the tasks that fail."""


@tasklib.task
def ship(order_id: int) -> str:
    return f"shipped {Order.objects.get(pk=order_id).note}"


@tasklib.task
def order_and_ship(note: str, *, fail: bool = False) -> None:
    """A task that submits in a transaction of its own."""
    with transaction.atomic():
        ship.submit_sync(Order.objects.create(note=note).pk)
        if fail:
            raise Refused


def _backend_pid() -> int:
    with connection.cursor() as cursor:
        cursor.execute("select pg_backend_pid()")
        return int(cursor.fetchone()[0])


@tasklib.task
def backend_pid() -> int:
    return _backend_pid()


@tasklib.task
async def backend_pid_async() -> int:
    return await sync_to_async(_backend_pid)()


@tasklib.task
def wait_for_lock(key: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_lock(%s)", [key])


@tasklib.task
def close_connections() -> None:
    connections.close_all()


@tasklib.task
async def close_connections_async() -> None:
    await sync_to_async(connections.close_all)()


@task
def add(a: int, b: int) -> int:
    return a + b


@task(queue_name="mail", priority=50)
async def add_async(a: int, b: int) -> int:
    return a + b + len([order async for order in Order.objects.all()])


@task(takes_context=True)
def describe(context: TaskContext[Any, Any], word: str) -> dict[str, Any]:
    result = context.task_result
    if context.attempt == 1:
        raise Refused("not at the first attempt")
    return {"word": word, "attempt": context.attempt, "id": result.id, "status": str(result.status)}


@task
def refuse(reason: str) -> None:
    raise Refused(reason)


@task
def return_something_else() -> Any:
    return object()


@task
def options_as_arguments(priority: int, queue: str, *, connection: str, args: list[int]) -> list[Any]:
    """Names that would be options of a submit of tasklib's."""
    return [priority, queue, connection, args]
