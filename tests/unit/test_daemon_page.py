"""The page and the channel: what a worker shows its supervisor, also after its death, and how they talk."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import threading
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tasklib_daemon import page as page_module
from tasklib_daemon.channel import Channel
from tasklib_daemon.page import BACKENDS, BOOTED, DRAIN, EXECUTING, READY, WORKER_ID_BYTES, Page
from tests.unit.test_buffer import execution, executions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tasklib.worker.execution import Execution
    from tasklib_daemon.channel import Message

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page(8)
    yield made
    made.close()


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    pair = Channel.pair()
    yield pair
    for end in pair:
        end.close()


def begun(timeout: float | None = None) -> Execution:
    made = execution()
    made.task = made.task._replace(timeout_seconds=timeout)
    made.begin(10.0)
    return made


def fork() -> int:
    """Another test may have left a thread behind, which newer Pythons warn about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


# --- the page ---


def test_a_new_page_is_empty(page: Page) -> None:
    seen = page.read()
    assert (seen.worker_id, seen.phase, seen.executing, seen.done, seen.backends) == ("", 0, (), (), ())
    assert not seen.is_ready


def test_what_executes_is_seen_until_its_outcome_is_committed(page: Page) -> None:
    """Not until its function returns: done, but not flushed, is a state of its own."""
    witness, task = page.witness(), begun(timeout=5.0)
    witness.began(task)
    (slot,) = page.read().executing
    assert (slot.task_id, slot.token, slot.started) == (task.id, task.task.fencing_token, task.started)
    assert slot.must_end_by == task.started + 5.0 + 10.0
    witness.ended(task)
    seen = page.read()
    assert (seen.executing, [each.task_id for each in seen.done], seen.ended) == ((), [task.id], 1)
    witness.settled([task])
    assert (page.read().executing, page.read().done) == ((), ())


def test_a_cancel_is_told_apart_from_a_timeout(page: Page) -> None:
    witness, late, cancelled, free = page.witness(), begun(timeout=0.0), begun(), begun()
    for each in (late, cancelled, free):
        witness.began(each)
    witness.must_end_by(late, late.must_end_by)
    cancelled.ask_to_cancel(NOW, 3.0)
    witness.must_end_by(cancelled, cancelled.must_end_by)
    seen = {slot.task_id: (slot.must_end_by, slot.is_cancelled) for slot in page.read().executing}
    assert seen == {
        late.id: (late.must_end_by, False),
        cancelled.id: (cancelled.must_end_by, True),
        free.id: (math.inf, False),
    }


def test_what_never_began_is_ignored(page: Page) -> None:
    """It was given back, or came too late."""
    witness, task = page.witness(), execution()
    witness.must_end_by(task, 1.0)
    witness.ended(task)
    witness.settled([task])
    assert (page.read().executing, page.read().done, page.read().ended) == ((), (), 0)


def test_when_all_slots_are_taken_what_is_done_gives_way(page: Page) -> None:
    """The oldest first. What executes never does: its fate after a crash hangs on it."""
    witness, tasks = page.witness(), [begun() for _ in range(8)]
    for each in tasks:
        witness.began(each)
    witness.ended(tasks[3])
    witness.ended(tasks[5])
    late, later, too_late = begun(), begun(), begun()
    witness.began(late)
    assert [each.task_id for each in page.read().done] == [tasks[5].id]
    witness.began(later)
    witness.began(too_late)
    executing = {each.task_id for each in page.read().executing}
    assert executing == {each.id for each in tasks} - {tasks[3].id, tasks[5].id} | {late.id, later.id}
    for each in (too_late, *tasks):
        witness.ended(each)
        witness.settled([each])
    assert {each.task_id for each in page.read().executing} == {late.id, later.id}


class Dying:
    """Stands in for a struct: the worker dies when it writes."""

    size, unpack = page_module._SLOT.size, page_module._SLOT.unpack

    def pack_into(self, *_: object) -> None:
        raise KeyboardInterrupt


def test_fields_come_before_the_state(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies in between leaves no slot that says "executing" with another task's fields."""
    witness, first, second = page.witness(), begun(), begun()
    witness.began(first)
    witness.ended(first)
    witness.settled([first])
    monkeypatch.setattr(page_module, "_SLOT", Dying())
    with pytest.raises(KeyboardInterrupt):
        witness.began(second)
    assert page.read().executing == ()


def test_the_page_outlives_its_worker(page: Page) -> None:
    """`kill -9` in the middle: the parent reads what the child was doing."""
    task, read_end, write_end = begun(), *os.pipe()
    child = fork()
    if child == 0:
        witness = page.witness()
        witness.named("worker-1")
        witness.connected("claim", 4711)
        witness.began(task)
        os.write(write_end, b"!")
        signal.pause()
    assert os.read(read_end, 1) == b"!"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read_end)
    os.close(write_end)
    seen = page.read()
    assert (seen.worker_id, seen.backends, [each.task_id for each in seen.executing]) == (
        "worker-1", (4711,), [task.id],
    )  # fmt: skip


def test_a_process_that_a_task_forks_off_writes_nothing(page: Page) -> None:
    """It has a copy of the worker's witness, and would free the worker's slots."""
    witness, task = page.witness(), begun()
    witness.began(task)
    child = fork()
    if child == 0:
        witness.ended(task)
        witness.settled([task])
        witness.named("another")
        os._exit(0)
    os.waitpid(child, 0)
    assert [each.task_id for each in page.read().executing] == [task.id]
    assert page.read().worker_id == ""


# --- a writer that never rests: the supervisor reads at any moment, and takes what it sees for the truth ---

READS = 100_000


@contextlib.contextmanager
def writing_without_rest(write: Callable[[], object]) -> Iterator[None]:
    """In a process of its own, as a worker: a thread would take turns with the reader."""
    write()
    child = fork()
    if child == 0:
        while True:
            write()
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_beat_is_never_seen_half_written(page: Page) -> None:
    """A reader that saw zero would take the worker for hung, and kill it."""
    before = time.monotonic()
    with writing_without_rest(page.beat):
        for _ in range(READS):
            assert before <= page.read().beacon <= time.monotonic()


def test_counts_are_never_seen_half_written(page: Page) -> None:
    numbers = itertools.cycle([0x0123_4567_89AB_CDEF, 0x7EDC_BA98_7654_3210])

    def write() -> None:
        number = next(numbers)
        page.count_ended(number)
        page.count_waiting(number)

    with writing_without_rest(write):
        seen = {count for _ in range(READS) for view in [page.read()] for count in (view.ended, view.waiting)}
    assert seen == {0x0123_4567_89AB_CDEF, 0x7EDC_BA98_7654_3210}


def test_name_and_backends_are_never_seen_half_written(page: Page) -> None:
    """By the name its lease is kept, and its tasks are recovered; the backends are terminated when it is dead."""
    names = itertools.cycle(["a" * WORKER_ID_BYTES, "b" * 40])
    backends = itertools.cycle([[0x1234_5678] * BACKENDS, [0x7EDC_BA98] * 5])

    def write() -> None:
        page.name(next(names))
        page.show_backends(next(backends), is_connected=True)

    with writing_without_rest(write):
        views = [page.read() for _ in range(READS // 4)]
    assert {view.worker_id for view in views} == {"a" * WORKER_ID_BYTES, "b" * 40}
    assert {view.backends for view in views} == {(0x1234_5678,) * BACKENDS, (0x7EDC_BA98,) * 5}


def test_a_slot_is_never_seen_half_written(page: Page) -> None:
    """Each id comes with its own token, start and limit, though every slot is used again at once."""
    tasks = executions(40)
    for number, each in enumerate(tasks):
        each.task = each.task._replace(fencing_token=number + 1, timeout_seconds=float(number))
        each.begin(1.0)
    expected = {each.id: (each.task.fencing_token, each.started, each.must_end_by) for each in tasks}
    witness = page.witness()

    def write() -> None:
        witness._is_ours = True  # the child that writes is the worker
        for each in tasks:
            witness.began(each)
            witness.ended(each)
            witness.settled([each])

    with writing_without_rest(write):
        views = [page.read() for _ in range(READS // 4)]
    slots = [slot for view in views for slot in (*view.executing, *view.done)]
    assert slots
    assert all(expected[slot.task_id] == (slot.token, slot.started, slot.must_end_by) for slot in slots)


def test_a_limit_is_never_seen_half_written(page: Page) -> None:
    """A reader that saw zero would take the task for overdue, and kill its worker. Limit and cause are one."""
    page.fill(0, begun())
    limits = itertools.cycle([(1e6 / 3, False), (2e9 / 7, True)])

    def write() -> None:
        moment, is_cancelled = next(limits)
        page.limit(0, moment, is_cancelled=is_cancelled)

    with writing_without_rest(write):
        slots = {slot for _ in range(READS // 4) for slot in page.read().executing}
    assert {(slot.must_end_by, slot.is_cancelled) for slot in slots} == {(1e6 / 3, False), (2e9 / 7, True)}


def test_a_worker_stopped_while_it_fills_a_slot_shows_nothing_of_it(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot whose write was not finished has no number, and what it held before is not shown again."""
    page.fill(0, begun())
    monkeypatch.setattr(page_module, "_SLOT", Dying())
    with pytest.raises(KeyboardInterrupt):
        page.fill(0, begun())
    assert page.read().executing == ()


def test_a_new_name_replaces_the_old_one(page: Page) -> None:
    witness = page.witness()
    for name in ("a-long-name-of-a-worker", "short", "ü" * WORKER_ID_BYTES):
        witness.named(name)
        assert page.read().worker_id.rstrip("\ufffd") == name[: WORKER_ID_BYTES // 2] or page.read().worker_id == name


def test_backends_are_those_of_live_connections(page: Page) -> None:
    """No pid is known behind a pooler; more than fit are left out."""
    witness = page.witness()
    for number in range(1, BACKENDS + 10):
        witness.connected(f"task {number}", number)
    witness.connected("claim", 0)
    assert page.read().is_connected
    assert page.read().backends == tuple(range(1, BACKENDS + 1))
    witness.connected("task 1", 100)
    witness.disconnected("task 2")
    witness.disconnected("claim")
    assert not page.read().is_connected
    assert page.read().backends[:2] == (100, 3)


def test_phase_beacon_wish_and_counts(page: Page) -> None:
    witness = page.witness()
    before = time.monotonic()
    witness.beat()
    witness.counts(3, 1)
    page.set_phase(BOOTED)
    assert (page.read().phase, page.read().waiting) == (BOOTED, 3)
    assert before <= page.read().beacon <= time.monotonic()
    page.set_phase(READY)
    assert page.read().is_ready
    page.ask(DRAIN)
    assert page.asked() == DRAIN


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_closed_page_is_unmapped() -> None:
    """And a living one is known by its name: the guardian looks for it."""
    maps = Path("/proc/self/maps")
    made = Page(8, name="tasklibd-test-mark")
    assert "tasklibd-test-mark" in maps.read_text("utf-8")
    made.close()
    assert "tasklibd-test-mark" not in maps.read_text("utf-8")


def test_where_there_are_no_named_files_the_memory_is_shared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """MacOS."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    made = Page(2)
    child = fork()
    if child == 0:
        made.set_phase(READY)
        os._exit(0)
    os.waitpid(child, 0)
    assert made.read().is_ready
    made.close()


def test_a_state_byte_is_all_that_says_executing(page: Page) -> None:
    """What a slot held before is not seen again."""
    page.fill(0, begun())
    page.set_state(0, 0)
    assert page.read().executing == ()
    page.set_state(0, EXECUTING)
    assert len(page.read().executing) == 1


# --- the channel ---


def test_messages_arrive_in_order(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    for number in range(3):
        ours.send({"say": "died", "report": number})
        theirs.send({"say": "recovered", "report": number})
    assert [each["report"] for each in theirs.receive()] == [0, 1, 2]
    assert [each["report"] for each in ours.receive()] == [0, 1, 2]


def test_the_supervisor_never_waits_and_loses_no_report(ends: tuple[Channel, Channel]) -> None:
    """A child that does not read: of a status the newest is kept, of reports all, in order."""
    ours, theirs = ends
    padding = "x" * 10_000
    for number in range(100):
        ours.send({"say": "died", "report": number, "padding": padding})
        ours.send({"say": "status", "number": number}, is_status=True)
    assert ours.has_output, "it fits: nothing had to wait"
    got: list[Message] = []
    while not got or got[-1] != {"say": "status", "number": 99}:
        got += theirs.receive(10.0)
        ours.flush()
    assert [each["report"] for each in got if each["say"] == "died"] == [*range(100)]
    statuses = [each["number"] for each in got if each["say"] == "status"]
    assert statuses[-1] == 99
    assert statuses == sorted(statuses)
    assert len(statuses) < 100


def test_a_closed_end_is_noticed_and_harms_nobody(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    theirs.send({"say": "failed"})
    theirs.close()
    assert [each["say"] for each in ours.receive()] == ["failed"]
    assert ours.is_closed
    ours.send({"say": "died"})
    ours.flush()
    assert not ours.has_output


def test_a_child_that_waits_is_woken(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    assert theirs.receive(0.0) == []
    timer = threading.Timer(0.05, ours.send, [{"say": "pause"}])
    timer.start()
    assert theirs.receive(10.0) == [{"say": "pause"}]
    timer.join()
    ours.close()
    assert theirs.receive(10.0) == []
    assert theirs.is_closed


@pytest.mark.parametrize(
    "nonsense", [b"not json\n", b"[1]\n", b'{"no": "word"}\n', b'{"say": 1}\n', b"\xff\xfe\n", b"\n"]
)
def test_nonsense_is_no_message(ends: tuple[Channel, Channel], nonsense: bytes) -> None:
    """An application has got hold of the socket."""
    ours, theirs = ends
    os.write(theirs.fileno(), nonsense)
    theirs.send({"say": "ready"})
    assert ours.receive() == [{"say": "ready"}]


def test_a_line_without_an_end_is_not_kept(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasklib_daemon.channel.LONGEST_LINE", 1000)
    ours, theirs = ends
    os.write(theirs.fileno(), b"x" * 2000)
    assert ours.receive() == []
    os.write(theirs.fileno(), b'\n{"say": "ready"}\n')
    assert ours.receive() == [{"say": "ready"}]
