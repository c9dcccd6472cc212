"""The scoreboard and the channel: what a worker shows its supervisor, also after its death, and how they talk."""

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

from tasklib_daemon import scoreboard as scoreboard_module
from tasklib_daemon.channel import Channel
from tasklib_daemon.scoreboard import BACKENDS, BOOTED, DRAIN, EXECUTING, READY, WORKER_ID_BYTES, Scoreboard
from tests.unit.test_buffer import execution, executions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tasklib.worker.execution import Execution
    from tasklib_daemon.channel import Message

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def scoreboard() -> Iterator[Scoreboard]:
    made = Scoreboard(8)
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


# --- the scoreboard ---


def test_a_new_page_is_empty(scoreboard: Scoreboard) -> None:
    seen = scoreboard.read()
    assert (seen.worker_id, seen.phase, seen.executing, seen.done, seen.backends) == ("", 0, (), (), ())
    assert not seen.is_ready


def test_what_executes_is_seen_until_its_outcome_is_committed(scoreboard: Scoreboard) -> None:
    """Not until its function returns: done, but not flushed, is a state of its own."""
    observer, task = scoreboard.observer(), begun(timeout=5.0)
    observer.began(task)
    (entry,) = scoreboard.read().executing
    assert (entry.task_id, entry.token, entry.started) == (task.id, task.task.fencing_token, task.started)
    assert entry.must_end_by == task.started + 5.0 + 10.0
    observer.ended(task)
    seen = scoreboard.read()
    assert (seen.executing, [each.task_id for each in seen.done], seen.ended) == ((), [task.id], 1)
    observer.settled([task])
    assert (scoreboard.read().executing, scoreboard.read().done) == ((), ())


def test_a_cancel_is_told_apart_from_a_timeout(scoreboard: Scoreboard) -> None:
    observer, late, cancelled, free = scoreboard.observer(), begun(timeout=0.0), begun(), begun()
    for each in (late, cancelled, free):
        observer.began(each)
    observer.must_end_by(late, late.must_end_by)
    cancelled.ask_to_cancel(NOW, 3.0)
    observer.must_end_by(cancelled, cancelled.must_end_by)
    seen = {entry.task_id: (entry.must_end_by, entry.is_cancelled) for entry in scoreboard.read().executing}
    assert seen == {
        late.id: (late.must_end_by, False),
        cancelled.id: (cancelled.must_end_by, True),
        free.id: (math.inf, False),
    }


def test_what_never_began_is_ignored(scoreboard: Scoreboard) -> None:
    """It was given back, or came too late."""
    observer, task = scoreboard.observer(), execution()
    observer.must_end_by(task, 1.0)
    observer.ended(task)
    observer.settled([task])
    assert (scoreboard.read().executing, scoreboard.read().done, scoreboard.read().ended) == ((), (), 0)


def test_when_all_entries_are_taken_what_is_done_gives_way(scoreboard: Scoreboard) -> None:
    """The oldest first. What executes never does: its fate after a crash hangs on it."""
    observer, tasks = scoreboard.observer(), [begun() for _ in range(8)]
    for each in tasks:
        observer.began(each)
    observer.ended(tasks[3])
    observer.ended(tasks[5])
    late, later, too_late = begun(), begun(), begun()
    observer.began(late)
    assert [each.task_id for each in scoreboard.read().done] == [tasks[5].id]
    observer.began(later)
    observer.began(too_late)
    executing = {each.task_id for each in scoreboard.read().executing}
    assert executing == {each.id for each in tasks} - {tasks[3].id, tasks[5].id} | {late.id, later.id}
    for each in (too_late, *tasks):
        observer.ended(each)
        observer.settled([each])
    assert {each.task_id for each in scoreboard.read().executing} == {late.id, later.id}


class Dying:
    """Stands in for a struct: the worker dies when it writes."""

    size, unpack = scoreboard_module._ENTRY.size, scoreboard_module._ENTRY.unpack

    def pack_into(self, *_: object) -> None:
        raise KeyboardInterrupt


def test_fields_come_before_the_state(scoreboard: Scoreboard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies in between leaves no entry that says "executing" with another task's fields."""
    observer, first, second = scoreboard.observer(), begun(), begun()
    observer.began(first)
    observer.ended(first)
    observer.settled([first])
    monkeypatch.setattr(scoreboard_module, "_ENTRY", Dying())
    with pytest.raises(KeyboardInterrupt):
        observer.began(second)
    assert scoreboard.read().executing == ()


def test_the_page_outlives_its_worker(scoreboard: Scoreboard) -> None:
    """`kill -9` in the middle: the parent reads what the child was doing."""
    task, read_end, write_end = begun(), *os.pipe()
    child = fork()
    if child == 0:
        observer = scoreboard.observer()
        observer.named("worker-1")
        observer.connected("claim", 4711)
        observer.began(task)
        os.write(write_end, b"!")
        signal.pause()
    assert os.read(read_end, 1) == b"!"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read_end)
    os.close(write_end)
    seen = scoreboard.read()
    assert (seen.worker_id, seen.backends, [each.task_id for each in seen.executing]) == (
        "worker-1", (4711,), [task.id],
    )  # fmt: skip


def test_a_process_that_a_task_forks_off_writes_nothing(scoreboard: Scoreboard) -> None:
    """It has a copy of the worker's observer, and would free the worker's entries."""
    observer, task = scoreboard.observer(), begun()
    observer.began(task)
    child = fork()
    if child == 0:
        observer.ended(task)
        observer.settled([task])
        observer.named("another")
        os._exit(0)
    os.waitpid(child, 0)
    assert [each.task_id for each in scoreboard.read().executing] == [task.id]
    assert scoreboard.read().worker_id == ""


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


def test_a_beat_is_never_seen_half_written(scoreboard: Scoreboard) -> None:
    """A reader that saw zero would take the worker for hung, and kill it."""
    before = time.monotonic()
    with writing_without_rest(scoreboard.beat):
        for _ in range(READS):
            assert before <= scoreboard.read().beacon <= time.monotonic()


def test_counts_are_never_seen_half_written(scoreboard: Scoreboard) -> None:
    numbers = itertools.cycle([0x0123_4567_89AB_CDEF, 0x7EDC_BA98_7654_3210])

    def write() -> None:
        number = next(numbers)
        scoreboard.count_ended(number)
        scoreboard.count_waiting(number)

    with writing_without_rest(write):
        seen = {count for _ in range(READS) for view in [scoreboard.read()] for count in (view.ended, view.waiting)}
    assert seen == {0x0123_4567_89AB_CDEF, 0x7EDC_BA98_7654_3210}


def test_name_and_backends_are_never_seen_half_written(scoreboard: Scoreboard) -> None:
    """By the name its lease is kept, and its tasks are recovered; the backends are terminated when it is dead."""
    names = itertools.cycle(["a" * WORKER_ID_BYTES, "b" * 40])
    backends = itertools.cycle([[0x1234_5678] * BACKENDS, [0x7EDC_BA98] * 5])

    def write() -> None:
        scoreboard.name(next(names))
        scoreboard.show_backends(next(backends), is_connected=True)

    with writing_without_rest(write):
        views = [scoreboard.read() for _ in range(READS // 4)]
    assert {view.worker_id for view in views} == {"a" * WORKER_ID_BYTES, "b" * 40}
    assert {view.backends for view in views} == {(0x1234_5678,) * BACKENDS, (0x7EDC_BA98,) * 5}


def test_an_entry_is_never_seen_half_written(scoreboard: Scoreboard) -> None:
    """Each id comes with its own token, start and limit, though every entry is used again at once."""
    tasks = executions(40)
    for number, each in enumerate(tasks):
        each.task = each.task._replace(fencing_token=number + 1, timeout_seconds=float(number))
        each.begin(1.0)
    expected = {each.id: (each.task.fencing_token, each.started, each.must_end_by) for each in tasks}
    observer = scoreboard.observer()

    def write() -> None:
        observer._is_ours = True  # the child that writes is the worker
        for each in tasks:
            observer.began(each)
            observer.ended(each)
            observer.settled([each])

    with writing_without_rest(write):
        views = [scoreboard.read() for _ in range(READS // 4)]
    entries = [entry for view in views for entry in (*view.executing, *view.done)]
    assert entries
    assert all(expected[entry.task_id] == (entry.token, entry.started, entry.must_end_by) for entry in entries)


def test_a_limit_is_never_seen_half_written(scoreboard: Scoreboard) -> None:
    """A reader that saw zero would take the task for overdue, and kill its worker. Limit and cause are one."""
    scoreboard.fill(0, begun())
    limits = itertools.cycle([(1e6 / 3, False), (2e9 / 7, True)])

    def write() -> None:
        moment, is_cancelled = next(limits)
        scoreboard.limit(0, moment, is_cancelled=is_cancelled)

    with writing_without_rest(write):
        entries = {entry for _ in range(READS // 4) for entry in scoreboard.read().executing}
    assert {(entry.must_end_by, entry.is_cancelled) for entry in entries} == {(1e6 / 3, False), (2e9 / 7, True)}


def test_a_worker_stopped_while_it_fills_an_entry_shows_nothing_of_it(
    scoreboard: Scoreboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry whose write was not finished has no number, and what it held before is not shown again."""
    scoreboard.fill(0, begun())
    monkeypatch.setattr(scoreboard_module, "_ENTRY", Dying())
    with pytest.raises(KeyboardInterrupt):
        scoreboard.fill(0, begun())
    assert scoreboard.read().executing == ()


def test_a_new_name_replaces_the_old_one(scoreboard: Scoreboard) -> None:
    observer = scoreboard.observer()
    for name in ("a-long-name-of-a-worker", "short", "ü" * WORKER_ID_BYTES):
        observer.named(name)
        assert (
            scoreboard.read().worker_id.rstrip("\ufffd") == name[: WORKER_ID_BYTES // 2]
            or scoreboard.read().worker_id == name
        )


def test_backends_are_those_of_live_connections(scoreboard: Scoreboard) -> None:
    """No pid is known behind a pooler; more than fit are left out."""
    observer = scoreboard.observer()
    for number in range(1, BACKENDS + 10):
        observer.connected(f"task {number}", number)
    observer.connected("claim", 0)
    assert scoreboard.read().is_connected
    assert scoreboard.read().backends == tuple(range(1, BACKENDS + 1))
    observer.connected("task 1", 100)
    observer.disconnected("task 2")
    observer.disconnected("claim")
    assert not scoreboard.read().is_connected
    assert scoreboard.read().backends[:2] == (100, 3)


def test_phase_beacon_wish_and_counts(scoreboard: Scoreboard) -> None:
    observer = scoreboard.observer()
    before = time.monotonic()
    observer.beat()
    observer.counts(3, 1)
    scoreboard.set_phase(BOOTED)
    assert (scoreboard.read().phase, scoreboard.read().waiting) == (BOOTED, 3)
    assert before <= scoreboard.read().beacon <= time.monotonic()
    scoreboard.set_phase(READY)
    assert scoreboard.read().is_ready
    scoreboard.request(DRAIN)
    assert scoreboard.requested() == DRAIN


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_closed_page_is_unmapped() -> None:
    """And a living one is known by its name: the guardian looks for it."""
    maps = Path("/proc/self/maps")
    made = Scoreboard(8, name="tasklibd-test-mark")
    assert "tasklibd-test-mark" in maps.read_text("utf-8")
    made.close()
    assert "tasklibd-test-mark" not in maps.read_text("utf-8")


def test_where_there_are_no_named_files_the_memory_is_shared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """MacOS."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    made = Scoreboard(2)
    child = fork()
    if child == 0:
        made.set_phase(READY)
        os._exit(0)
    os.waitpid(child, 0)
    assert made.read().is_ready
    made.close()


def test_a_state_byte_is_all_that_says_executing(scoreboard: Scoreboard) -> None:
    """What an entry held before is not seen again."""
    scoreboard.fill(0, begun())
    scoreboard.set_state(0, 0)
    assert scoreboard.read().executing == ()
    scoreboard.set_state(0, EXECUTING)
    assert len(scoreboard.read().executing) == 1


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
