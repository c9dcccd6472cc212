"""What a worker serves, as its threads see it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import tasklib
from tasklib.registry import Registry
from tasklib.worker.claimer import Menu

if TYPE_CHECKING:
    from collections.abc import Iterator


@tasklib.task(name="served_job", queue="mail")
def job() -> None: ...


class SlowRegistry(Registry):
    """Whoever reads it first is held up."""

    def __init__(self) -> None:
        super().__init__()
        self.is_read, self.may_go_on = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[tasklib.TaskFunction[..., Any]]:
        if not self.is_read.is_set():
            self.is_read.set()
            self.may_go_on.wait(20)
        return super().__iter__()


def test_nobody_sees_half_of_a_reading() -> None:
    """The lease describes the worker while the claimer asks for names: with none it would find nothing to do."""
    registry = SlowRegistry()
    registry.add(job)
    menu = Menu(registry, None, None)
    other = threading.Thread(target=menu.names)
    other.start()
    assert registry.is_read.wait(20)
    assert menu.names() == ["served_job"]
    assert menu.likely_queues() == ["mail"]
    registry.may_go_on.set()
    other.join()


def test_what_is_registered_later_is_served() -> None:
    registry = Registry()
    menu = Menu(registry, None, None)
    assert menu.names() == []
    registry.add(job)
    assert menu.names() == ["served_job"]
    registry.clear()
    assert menu.names() == []


def test_a_function_that_was_redefined_runs_as_what_it_is_now() -> None:
    """A reload may make an async function of it."""
    registry = Registry()
    menu = Menu(registry, None, None)

    def plain() -> None: ...

    async def changed() -> None: ...

    for function, is_coroutine in ((plain, False), (changed, True)):
        registry._functions["served_job"] = tasklib.TaskFunction(function, name="served_job")
        assert menu._kind("served_job")[1] is is_coroutine
