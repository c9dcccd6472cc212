"""The bell: a ring of the one listener reaches one worker after the other until one has room; without it, the poll does
the work.
"""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import pytest

from tasklib_daemon import bell
from tasklib_daemon.bell import Bell, Ear
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


class Hearer:
    def __init__(self) -> None:
        self.rings = 0
        self.cancelled: list[UUID] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

        self.on_ring: Callable[[], None] = lambda: None

    def ring(self) -> None:
        self.rings += 1
        self.may_go_on.wait(20)
        self.on_ring()

    def hear_cancel(self, task_id: UUID) -> None:
        self.cancelled.append(task_id)


@pytest.fixture
def directory() -> Iterator[Path]:
    """Pytest's own names are too long for a socket."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@pytest.fixture
def ringer(directory: Path) -> Iterator[Bell]:
    made = Bell(directory)
    yield made
    made.close()


@pytest.fixture
def started(directory: Path) -> Iterator[Callable[[int], tuple[list[Hearer], list[Ear]]]]:
    made: list[Ear] = []

    def start(count: int) -> tuple[list[Hearer], list[Ear]]:
        hearers = [Hearer() for _ in range(count)]
        ears = [Ear(directory, len(made) + number, hearer) for number, hearer in enumerate(hearers)]
        made.extend(ears)
        assert all(ear.start() for ear in ears)
        return hearers, ears

    yield start
    for ear in made:
        ear.stop()
    assert list(directory.iterdir()) == []


Start = Callable[[int], tuple[list[Hearer], list[Ear]]]


def test_a_ring_reaches_one_worker_in_turn_and_a_cancel_all(ringer: Bell, started: Start) -> None:
    """Also one that comes later. And a cancel brings the id of its task."""
    ringer.ring()  # nobody is there yet
    hearers, _ = started(2)
    for expected in ([1, 0], [1, 1], [2, 1]):
        ringer.ring()
        wait_until(lambda: [each.rings for each in hearers] == expected, "one of them to hear it")  # noqa: B023 - at once
    hearers += started(1)[0]
    for expected in ([2, 2, 0], [2, 2, 1], [3, 2, 1]):
        ringer.ring()
        wait_until(lambda: [each.rings for each in hearers] == expected, "one of them to hear it")  # noqa: B023 - at once
    task_id = uuid4()
    ringer.cancel(task_id)
    wait_until(lambda: all(each.cancelled == [task_id] for each in hearers), "all of them to hear it")


def test_a_ring_that_is_passed_on_goes_round_once(ringer: Bell, started: Start) -> None:
    """Everybody is full: then who gets free looks by itself."""
    hearers, ears = started(4)
    for hearer, ear in zip(hearers, ears, strict=True):
        hearer.on_ring = ear.pass_on
    ringer.ring()
    wait_until(lambda: [each.rings for each in hearers] == [1, 1, 1, 1], "all of them to hear it")
    hearers[2].on_ring = lambda: None
    ringer.ring()
    wait_until(lambda: [each.rings for each in hearers] == [1, 2, 2, 1], "the next, and the one that has room")
    ears[0].pass_on()  # not rung for: there is nothing to pass on
    time.sleep(0.05)
    assert [each.rings for each in hearers] == [1, 2, 2, 1]


def test_a_ring_waits_for_nobody(ringer: Bell, started: Start) -> None:
    """A worker that does not listen, because its task holds the interpreter, costs the others nothing: thousands of
    rings end while it is still deaf.
    """
    (busy, free), _ = started(2)
    busy.may_go_on.clear()
    try:
        for _ in range(3_000):
            ringer.ring()
        last = uuid4()

        def hears_it() -> bool:
            ringer.cancel(last)  # again: one that comes when too many rings are unheard is lost
            return last in free.cancelled

        wait_until(hears_it, "the other to hear it")
        assert busy.rings == 1
        before = free.rings
        ringer.ring()
        ringer.ring()
        wait_until(lambda: free.rings > before, "the other to be rung for")
        busy.may_go_on.set()
        wait_until(lambda: busy.rings > 1, "it to hear that it was rung for meanwhile")
        ringer.cancel(last)
        wait_until(lambda: last in busy.cancelled, "it to hear what came behind")
        assert busy.rings == 2, "rings that pile up say one thing"
    finally:
        busy.may_go_on.set()


def test_the_socket_of_a_dead_worker_is_cleared_away(directory: Path, ringer: Bell) -> None:
    """It was killed, and could not do so itself."""
    dead = directory / f"{bell.NAMES}0-1"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
        left.bind(str(dead))
    other = directory / "control.sock"
    other.touch()
    ringer.ring()
    assert [path.name for path in directory.iterdir()] == ["control.sock"]


def test_nonsense_is_not_heard(directory: Path, ringer: Bell) -> None:
    """Whatever is sent, the thread goes on."""
    hearer = Hearer()
    ear = Ear(directory, 0, hearer)
    assert ear.start()
    path = str(next(directory.iterdir()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for nonsense in (b"", b"cancel", b"cancel \xff", b"cancel 42", b"ringing", b"x" * 1000):
            sender.sendto(nonsense, path)
    ringer.ring()
    wait_until(lambda: hearer.rings == 1, "the ring behind it")
    assert hearer.cancelled == []
    ear.stop()


def test_an_ear_that_cannot_be_made_is_done_without(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The poll does the work, and the log says so."""
    ear = Ear(directory / "missing", 0, Hearer())
    assert not ear.start()
    ear.stop()
    assert "bell.unheard" in caplog.text
