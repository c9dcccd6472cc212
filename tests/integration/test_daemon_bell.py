"""The bell: rings of the one listener reach every worker of its daemon; without it, the poll does the work."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
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

    def ring(self) -> None:
        self.rings += 1
        self.may_go_on.wait(20)

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


def test_a_ring_reaches_every_worker_also_one_that_comes_later(directory: Path, ringer: Bell) -> None:
    """And a cancel brings the id of its task."""
    hearers = [Hearer(), Hearer(), Hearer()]
    ears = [Ear(directory, slot, hearer) for slot, hearer in enumerate(hearers)]
    task_id = uuid4()
    ringer.ring()  # nobody is there yet
    try:
        assert all(ear.start() for ear in ears[:2])
        ringer.ring()
        wait_until(lambda: [each.rings for each in hearers] == [1, 1, 0], "two of them to hear it")
        assert ears[2].start()
        ringer.cancel(task_id)
        wait_until(lambda: all(each.cancelled == [task_id] for each in hearers), "all of them to hear it")
    finally:
        for ear in ears:
            ear.stop()
    assert list(directory.iterdir()) == []


def test_a_ring_waits_for_nobody(directory: Path, ringer: Bell) -> None:
    """A worker that does not listen, because its task holds the interpreter, costs the others nothing."""
    busy, free = Hearer(), Hearer()
    ears = [Ear(directory, 0, busy), Ear(directory, 1, free)]
    for ear in ears:
        assert ear.start()
    busy.may_go_on.clear()
    try:
        began = time.monotonic()
        for _ in range(3_000):
            ringer.ring()
            assert time.monotonic() - began < 2
        last = uuid4()

        def hears_it() -> bool:
            ringer.cancel(last)  # again: one that comes when too many rings are unheard is lost
            return last in free.cancelled

        wait_until(hears_it, "the other to hear it")
        assert busy.rings == 1
        busy.may_go_on.set()
        wait_until(lambda: busy.rings > 1, "it to hear that it was rung for meanwhile")
        ringer.cancel(last)
        wait_until(lambda: last in busy.cancelled, "it to hear what came behind")
        assert busy.rings == 2, "rings that pile up say one thing"
    finally:
        busy.may_go_on.set()
        for ear in ears:
            ear.stop()


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
        for nonsense in (b"", b"cancel", b"cancel \xff", b"cancel 42", b"x" * 1000):
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
