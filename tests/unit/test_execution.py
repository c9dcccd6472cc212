"""How a thread is interrupted: only while it is inside a task, and never afterwards."""

from __future__ import annotations

import threading
import unittest.mock
from typing import TYPE_CHECKING, Any

from tasklib.outcomes import TimeoutInterrupt
from tasklib.worker.execution import InterruptibleThread, _raise_in_thread
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable


class Thread(threading.Thread):
    """Runs a function and keeps what it returned or raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self.outcome: Any = None

    def run(self) -> None:
        try:
            self.outcome = self._function()
        except BaseException as error:  # noqa: BLE001 - this is what is looked at
            self.outcome = error


def test_an_exception_lands_in_the_function() -> None:
    """Where it stands, also in a loop that catches every Exception."""
    places: list[InterruptibleThread] = []

    def work() -> str:
        place = InterruptibleThread()
        place.enter(1)
        places.append(place)
        while True:
            threading.Event().wait(0.001)

    thread = Thread(work)
    thread.start()
    wait_until(lambda: bool(places), "inside")
    places[0].interrupt(TimeoutInterrupt, 1)
    thread.join(20)
    assert isinstance(thread.outcome, TimeoutInterrupt)


class LateException:
    """A lock in whose taking the exception lands that was sent while the task was inside."""

    def __init__(self) -> None:
        self.taken = 0

    def __enter__(self) -> None:
        self.taken += 1
        if self.taken == 1:
            _raise_in_thread(threading.get_ident(), TimeoutInterrupt)

    def __exit__(self, *_: object) -> None: ...


def test_an_exception_that_lands_after_the_function_is_swallowed() -> None:
    """It arrives when the function has returned: its result stands, and the thread goes on."""
    lock = LateException()

    def work() -> str:
        place = InterruptibleThread()
        place.enter(1)
        place._lock = lock  # type: ignore[assignment]
        place.leave()
        return "fine"

    thread = Thread(work)
    thread.start()
    thread.join(20)
    assert (thread.outcome, lock.taken) == ("fine", 2)


def test_a_thread_that_executes_another_task_is_not_interrupted() -> None:
    """The thread has gone on to something else."""
    places: list[InterruptibleThread] = []
    go_on = threading.Event()

    def work() -> str:
        place = InterruptibleThread()
        place.enter(1)
        place.leave()
        places.append(place)
        while not go_on.is_set():
            threading.Event().wait(0.001)
        return "fine"

    thread = Thread(work)
    thread.start()
    wait_until(lambda: bool(places), "done")
    places[0].interrupt(TimeoutInterrupt, 1)
    go_on.set()
    thread.join(20)
    assert thread.outcome == "fine"


def test_nothing_is_left_on_its_way() -> None:
    """Sent, and swallowed by the function: what comes next in the same thread is not disturbed, nor slowed down."""
    places: list[InterruptibleThread] = []

    def work() -> str:
        place = InterruptibleThread()
        for _ in range(20):
            place.enter(1)
            places.append(place)
            try:
                while places:
                    threading.Event().wait(0.0001)
            except TimeoutInterrupt:
                places.clear()  # swallowed
            place.leave()
            assert not place._was_sent
        return "fine"

    thread = Thread(work)
    thread.start()
    while thread.is_alive():
        for place in places[:]:
            place.interrupt(TimeoutInterrupt, 1)
    assert thread.outcome == "fine"


def test_ordinary_tasks_do_not_touch_the_interpreter() -> None:
    """Only an interrupt does: to clear one that was never sent would slow down every thread from then on."""
    with unittest.mock.patch("tasklib.worker.execution._raise_in_thread") as touched:
        place = InterruptibleThread()
        place.enter(1)
        place.leave()
    touched.assert_not_called()
