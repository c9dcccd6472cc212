"""A ring of the keeper reaches one worker after the other until one has room. Without it, the poll finds new tasks."""

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

from tasklib_daemon import wake
from tasklib_daemon.wake import WakeReceiver, WakeSender
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


class FakeWorker:
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

    def look_for_cancel(self, task_id: UUID) -> None:
        self.cancelled.append(task_id)


@pytest.fixture
def directory() -> Iterator[Path]:
    """Pytest's own names are too long for a socket."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@pytest.fixture
def sender(directory: Path) -> Iterator[WakeSender]:
    made = WakeSender(directory)
    yield made
    made.close()


@pytest.fixture
def started(directory: Path) -> Iterator[Callable[[int], tuple[list[FakeWorker], list[WakeReceiver]]]]:
    made: list[WakeReceiver] = []

    def start(count: int) -> tuple[list[FakeWorker], list[WakeReceiver]]:
        workers = [FakeWorker() for _ in range(count)]
        receivers = [WakeReceiver(directory, len(made) + number, worker) for number, worker in enumerate(workers)]
        made.extend(receivers)
        assert all(receiver.start() for receiver in receivers)
        return workers, receivers

    yield start
    for receiver in made:
        receiver.stop()
    assert list(directory.iterdir()) == []


Start = Callable[[int], tuple[list[FakeWorker], list[WakeReceiver]]]


def test_a_ring_reaches_one_worker_in_turn_and_a_cancel_all(sender: WakeSender, started: Start) -> None:
    """Also a worker that starts later. A cancel brings the id of its task."""
    sender.ring()  # there is no worker yet
    workers, _ = started(2)
    for expected in ([1, 0], [1, 1], [2, 1]):
        sender.ring()
        wait_until(lambda: [each.rings for each in workers] == expected, "one of them to get it")  # noqa: B023 - at once
    workers += started(1)[0]
    for expected in ([2, 2, 0], [2, 2, 1], [3, 2, 1]):
        sender.ring()
        wait_until(lambda: [each.rings for each in workers] == expected, "one of them to get it")  # noqa: B023 - at once
    task_id = uuid4()
    sender.cancel(task_id)
    wait_until(lambda: all(each.cancelled == [task_id] for each in workers), "all of them to get it")


def test_a_ring_that_is_passed_on_goes_round_once(sender: WakeSender, started: Start) -> None:
    """All workers are full. One that gets free looks by itself."""
    workers, receivers = started(4)
    for worker, receiver in zip(workers, receivers, strict=True):
        worker.on_ring = receiver.pass_on
    sender.ring()
    wait_until(lambda: [each.rings for each in workers] == [1, 1, 1, 1], "all of them to get it")
    workers[2].on_ring = lambda: None
    sender.ring()
    wait_until(lambda: [each.rings for each in workers] == [1, 2, 2, 1], "the next, and the one that has room")
    receivers[0].pass_on()  # it got no ring: there is nothing to pass on
    time.sleep(0.05)
    assert [each.rings for each in workers] == [1, 2, 2, 1]


def test_a_ring_waits_for_nobody(sender: WakeSender, started: Start) -> None:
    """A worker that does not receive, because its task holds the interpreter, does not delay the others: thousands of
    rings are sent meanwhile.
    """
    (busy, free), _ = started(2)
    busy.may_go_on.clear()
    try:
        for _ in range(3_000):
            sender.ring()
        last = uuid4()

        def gets_it() -> bool:
            sender.cancel(last)  # again: one that comes when too many rings wait is lost
            return last in free.cancelled

        wait_until(gets_it, "the other to get it")
        assert busy.rings == 1
        before = free.rings
        sender.ring()
        sender.ring()
        wait_until(lambda: free.rings > before, "the other to be rung for")
        busy.may_go_on.set()
        wait_until(lambda: busy.rings > 1, "it to get the rings that came meanwhile")
        sender.cancel(last)
        wait_until(lambda: last in busy.cancelled, "it to get what came behind")
        assert busy.rings == 2, "rings that pile up count as one"
    finally:
        busy.may_go_on.set()


def test_the_socket_of_a_dead_worker_is_cleared_away(directory: Path, sender: WakeSender) -> None:
    """It was killed, and could not do so itself."""
    dead = directory / f"{wake.SOCKET_PREFIX}0-1"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
        left.bind(str(dead))
    other = directory / "control.sock"
    other.touch()
    sender.ring()
    assert [path.name for path in directory.iterdir()] == ["control.sock"]


def test_nonsense_is_ignored(directory: Path, sender: WakeSender) -> None:
    """Whatever is sent, the thread goes on."""
    worker = FakeWorker()
    receiver = WakeReceiver(directory, 0, worker)
    assert receiver.start()
    path = str(next(directory.iterdir()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for nonsense in (b"", b"cancel", b"cancel \xff", b"cancel 42", b"ringing", b"x" * 1000):
            stranger.sendto(nonsense, path)
    sender.ring()
    wait_until(lambda: worker.rings == 1, "the ring behind it")
    assert worker.cancelled == []
    receiver.stop()


def test_a_receiver_that_cannot_be_made_is_done_without(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The poll does the work, and the log says so."""
    receiver = WakeReceiver(directory / "missing", 0, FakeWorker())
    assert not receiver.start()
    receiver.stop()
    assert "wake.failed" in caplog.text
