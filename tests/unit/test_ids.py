"""Task ids are time-ordered, unique across threads and forks, and remain UUIDs."""

from __future__ import annotations

import copy
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import pytest

from tasklib.clock import time
from tasklib.ids import IdSource, TaskId, new_id


def test_ids_are_version_7_and_carry_the_time() -> None:
    """The primary key grows at one end only if the id begins with the milliseconds."""
    before = time.time_ns() // 1_000_000
    made = new_id()
    assert made.version == 7
    assert made.variant == "specified in RFC 4122"
    assert before <= made.int >> 80 <= time.time_ns() // 1_000_000


def test_ids_grow_strictly_within_a_process() -> None:
    """Thousands fall into one millisecond; their order must still be the order of the submits."""
    made = [new_id() for _ in range(50_000)]
    assert made == sorted(set(made))


def test_a_clock_that_steps_back_does_not_break_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """NTP may set the clock back; ids go on growing."""
    source = IdSource()
    clock = iter([5_000_000_000, 4_000_000_000, 4_500_000_000, 6_000_000_000])
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    made = [source() for _ in range(4)]
    assert made == sorted(set(made))


def test_a_full_counter_borrows_the_next_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter never runs over into the version bits."""
    source = IdSource()
    monkeypatch.setattr(time, "time_ns", lambda: 5_000_000_000)
    first = source()
    source._left = 1
    last, carried = source(), source()
    assert first < last < carried
    assert carried.version == 7
    assert carried.int >> 80 == 5_001


def test_threads_never_share_an_id() -> None:
    """One source serves all threads of a process."""
    with ThreadPoolExecutor(8) as pool:
        made = [id_ for batch in pool.map(lambda _: [new_id() for _ in range(2_000)], range(8)) for id_ in batch]
    assert len(set(made)) == len(made)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_makes_other_ids() -> None:
    """A preforking web server must not hand out the same id from two workers."""
    new_id()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"".join(new_id().bytes for _ in range(200)))
        os._exit(0)
    own = {new_id().bytes for _ in range(200)}
    os.waitpid(child, 0)
    data = os.read(reader, 200 * 16)
    os.close(reader)
    os.close(writer)
    assert not own & {data[at : at + 16] for at in range(0, len(data), 16)}


def test_a_task_id_is_a_uuid_that_knows_whether_it_existed() -> None:
    """It equals, hashes, pickles and copies like the UUID that it is."""
    plain = new_id()
    told = TaskId(plain, existed=True)
    assert isinstance(told, UUID)
    assert told == plain
    assert hash(told) == hash(plain)
    assert str(told) == str(plain)
    for other in (pickle.loads(pickle.dumps(told)), copy.deepcopy(told)):
        assert other == plain
        assert other.existed is True
    assert TaskId(plain).existed is False
