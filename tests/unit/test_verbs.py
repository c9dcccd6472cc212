"""Every verb is declared once, and has all of its forms."""

from __future__ import annotations

import asyncio
import inspect
from unittest import mock

import pytest

import tasklib
from tasklib import application
from tasklib.verbs import Verbs, verb

VERBS = sorted(name for name, each in vars(Verbs).items() if isinstance(each, verb) and not name.startswith("_"))
ASYNC_FIRST = ["submit_task", "submit_many", "wait_for", "as_completed"]


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_has_four_forms(name: str) -> None:
    """A method of each client, and two functions of the module: `x` is sync, `x_async` is async."""
    for form in (getattr(tasklib.Client, name), getattr(tasklib, name)):
        assert not asyncio.iscoroutinefunction(form)
    for form in (getattr(tasklib.AsyncClient, name), getattr(tasklib, f"{name}_async")):
        assert asyncio.iscoroutinefunction(form)


@pytest.mark.parametrize("name", ASYNC_FIRST)
def test_what_submits_or_waits_is_async_by_its_plain_name(name: str) -> None:
    """Its sync form ends in `_sync`."""
    plain, sync = getattr(tasklib, name), getattr(tasklib, f"{name}_sync")
    is_iterator = inspect.isasyncgenfunction(getattr(tasklib.AsyncClient, name))
    assert asyncio.iscoroutinefunction(plain) or is_iterator
    assert not asyncio.iscoroutinefunction(sync)


def test_forms_look_like_written_functions() -> None:
    """For `help`, for pickle, and for tracebacks."""
    assert str(inspect.signature(tasklib.get_task_async)) == "(task_id: 'UUID | str') -> 'Task | None'"
    assert str(inspect.signature(tasklib.Client.get_task)) == "(self, task_id: 'UUID | str') -> 'Task | None'"
    assert (tasklib.get_task_async.__name__, tasklib.get_task_async.__module__) == (
        "get_task_async",
        "tasklib.application",
    )
    assert tasklib.AsyncClient.get_task.__qualname__ == "AsyncClient.get_task"
    assert all(getattr(getattr(tasklib, name), "__doc__", None) for name in VERBS)


def test_a_client_can_be_mocked_by_its_signature() -> None:
    """Applications test their own code with such mocks."""
    client = mock.create_autospec(tasklib.AsyncClient, instance=True)
    assert isinstance(client.get_task, mock.AsyncMock)
    with pytest.raises(TypeError):
        client.get_task()


async def test_the_default_clients_are_forgotten_after_close_async() -> None:
    """As after `close`, and without a connection being opened for it."""
    tasklib.init(tasklib.Config("postgresql://nowhere.invalid"))
    await tasklib.close_async()
    assert not application.is_initialised()
    await tasklib.close_async()
