"""What a worker serves, as its threads see it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import tasklib
from tasklib.registry import Registry
from tasklib.worker.served import Served

if TYPE_CHECKING:
    from collections.abc import Iterator


@tasklib.task(name="served_job", queue="mail")
def job() -> None: ...


class SlowRegistry(Registry):
    """Its first reader has to wait."""

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
    served = Served(registry, None, None)
    other = threading.Thread(target=served.names)
    other.start()
    assert registry.is_read.wait(20)
    assert served.names() == ["served_job"]
    assert served.likely_queues() == ["mail"]
    registry.may_go_on.set()
    other.join()


def test_what_is_registered_later_is_served() -> None:
    registry = Registry()
    served = Served(registry, None, None)
    assert served.names() == []
    registry.add(job)
    assert served.names() == ["served_job"]
    registry.clear()
    assert served.names() == []


def test_a_function_that_was_redefined_runs_as_what_it_is_now() -> None:
    """A reload may make an async function of it."""
    registry = Registry()
    served = Served(registry, None, None)

    def plain() -> None: ...

    async def changed() -> None: ...

    for function, is_coroutine in ((plain, False), (changed, True)):
        registry._functions["served_job"] = tasklib.TaskFunction(function, name="served_job")
        assert served._kind("served_job")[1] is is_coroutine
