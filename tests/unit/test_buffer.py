"""What a worker holds, without a database: what may start, what goes back, and which claims have ended."""

from __future__ import annotations

import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tasklib.outcomes import HeldTask
from tasklib.sql import queries
from tasklib.statements import ClaimedTask
from tasklib.worker import buffer as buffer_module
from tasklib.worker import unprepared as unprepared_module
from tasklib.worker.buffer import LARGEST_BUFFER, STUCK_SECONDS, Buffer, wanted
from tasklib.worker.claimer import CLAIM_LIMIT
from tasklib.worker.execution import Execution
from tasklib.worker.unprepared import DRAIN_SECONDS, PREPARE_FIRST_SECONDS, SUSPECT_PATIENCE_SECONDS
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = datetime(2030, 1, 1, tzinfo=UTC)
numbers = itertools.count(1)


def execution(
    *,
    is_coroutine: bool = False,
    suspect: bool = False,
    on_crash: str = "retry",
    claim_id: int = 1,
    id_: int | None = None,
) -> Execution:
    number = next(numbers) if id_ is None else id_
    held = HeldTask(
        UUID(int=number), "resize", "default", "claimed", "worker-1", 1, 0, 0, 3, 0, 0, suspect, on_crash, None, NOW,
        None, None, None,
    )  # fmt: skip
    return Execution(
        ClaimedTask(held, "{}", "{}", "{}", None, True, str(held.id), 0.0, claim_id), None, is_coroutine=is_coroutine
    )


def executions(count: int, **given: Any) -> list[Execution]:
    return [execution(**given) for _ in range(count)]


def open_buffer(concurrency: int = 2, size: int | None = None) -> Buffer:
    return Buffer(concurrency, lambda: True, size)


class Clock:
    """Stands in for the module `time`: tests move it."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (buffer_module, unprepared_module):
        monkeypatch.setattr(module, "time", made)
    return made


# --- How much to hold ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("average_seconds", "fixed", "expected"),
    [
        (None, None, 4),  # nothing is known yet
        (0.2, None, 4),  # long tasks: another worker could run them
        (0.1, None, 8),
        (0.01, None, 44),
        (0.0, None, 4 + LARGEST_BUFFER),
        (None, 0, 4),
        (60.0, 10, 14),
    ],
)
def test_a_worker_holds_a_tenth_of_a_second_of_work_ahead(
    average_seconds: float | None, fixed: int | None, expected: int
) -> None:
    """Enough for several round trips, and nothing of long tasks; a fixed size is as it is given."""
    assert wanted(4, average_seconds, fixed) == expected


@given(
    concurrency=st.integers(1, 1000),
    average_seconds=st.none() | st.floats(0, 1e6),
    fixed=st.none() | st.integers(0, 10_000),
)
def test_what_is_wanted_is_never_less_than_the_slots(
    concurrency: int, average_seconds: float | None, fixed: int | None
) -> None:
    """Nor without bound."""
    count = wanted(concurrency, average_seconds, fixed)
    assert concurrency <= count <= concurrency + (LARGEST_BUFFER if fixed is None else fixed)


def test_capacity_counts_what_executes_and_what_waits() -> None:
    """What has ended and is not committed yet takes no slot."""
    buffer = open_buffer(3)
    assert buffer.capacity() == 3
    buffer.add(executions(2))
    assert buffer.capacity() == 1
    first = buffer.take(is_coroutine=False)
    assert buffer.capacity() == 1
    assert first is not None
    buffer.done([(first, 1.0)])
    assert buffer.capacity() == 2


def capacities_as_tasks_end(buffer: Buffer, count: int) -> list[int]:
    """How many more would be claimed after each."""
    capacities = []
    for _ in range(count):
        taken = buffer.take(is_coroutine=False)
        assert taken is not None
        buffer.done([(taken, 0.001)])
        capacities.append(buffer.capacity())
    return capacities


def test_there_is_capacity_again_when_half_of_what_is_ahead_is_used_up() -> None:
    """Claims are cheaper in batches."""
    buffer = open_buffer(2, size=10)
    buffer.add(executions(buffer.capacity()))
    assert capacities_as_tasks_end(buffer, 8) == [0, 0, 0, 0, 0, 0, 7, 8]


def test_of_much_that_is_ahead_a_worthwhile_claim_is_enough() -> None:
    """A worker that holds two thousand tasks does not wait until a thousand are gone."""
    buffer = open_buffer(1, size=2_000)
    buffer.add(executions(buffer.capacity()))
    assert capacities_as_tasks_end(buffer, 501) == [0] * 500 + [501]


def test_a_full_claim_is_told_from_a_short_one() -> None:
    """The statement has a limit of its own. Beyond that one every claim would seem to be the last."""
    limits = [int(each) for each in re.findall(r"limit (\d{3,})", queries("claims", "tasklib")["claim"])]
    assert limits
    assert min(limits) >= CLAIM_LIMIT


def test_a_slot_with_nothing_to_run_is_capacity() -> None:
    """However little is wanted ahead."""
    buffer = open_buffer(4, size=0)
    buffer.add(executions(3))
    assert buffer.capacity() == 1


# --- Slots -----------------------------------------------------------------------------------------------------------


def test_no_more_execute_than_there_are_slots() -> None:
    """Threads and coroutines share them."""
    buffer = open_buffer(2)
    buffer.add([*executions(2), *executions(2, is_coroutine=True)])
    assert buffer.take(is_coroutine=False) is not None
    last = buffer.take(is_coroutine=True)
    assert last is not None
    assert buffer.take(is_coroutine=False) is None
    assert buffer.take(is_coroutine=True) is None
    buffer.done([(last, 0.01)])
    assert buffer.take(is_coroutine=False) is not None
    assert buffer.take(is_coroutine=True) is None


def test_tasks_are_taken_in_the_order_in_which_they_came() -> None:
    """That is the order of priority within a claim."""
    buffer = open_buffer(3)
    added = executions(3)
    buffer.add(added)
    assert [buffer.take(is_coroutine=False) for _ in range(3)] == added


def test_each_lane_takes_its_own() -> None:
    """A thread cannot run a coroutine."""
    buffer = open_buffer()
    buffer.add(executions(1, is_coroutine=True))
    assert buffer.take(is_coroutine=False) is None
    assert buffer.take(is_coroutine=True) is not None


def test_nothing_starts_while_it_may_not() -> None:
    """Without a lease, or before claims were checked."""
    may_start = False
    buffer = Buffer(2, lambda: may_start)
    buffer.add([execution(), execution(is_coroutine=True), execution(suspect=True)])
    assert [buffer.take(is_coroutine=False), buffer.take(is_coroutine=True), buffer.next_to_prepare()] == [None] * 3


def test_what_is_dropped_leaves_its_slot_and_says_nothing_of_durations() -> None:
    """It did not begin: to call it quick would make the worker greedy."""
    buffer = open_buffer(1)
    buffer.add(executions(2))
    first = buffer.take(is_coroutine=False)
    assert first is not None
    buffer.dropped(first)
    assert buffer.take(is_coroutine=False) is not None
    assert buffer.capacity() == 0


def test_many_threads_never_execute_more_than_the_slots() -> None:
    """Under one lock."""
    buffer = open_buffer(3)
    lock, inside, most, total = threading.Lock(), 0, 0, 200
    done = threading.Event()

    def run() -> None:
        nonlocal inside, most, total
        while (taken := buffer.wait_and_take()) is not None:
            with lock:
                inside += 1
                most = max(most, inside, len(buffer.executing()))
            with lock:
                inside -= 1
                total -= 1
            buffer.done([(taken, 0.0)])
            buffer.settled([taken])
            if total == 0:
                done.set()

    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(run)
        buffer.add(executions(200))
        assert done.wait(20)
        buffer.close()
    assert 1 <= most <= 3
    assert buffer.is_idle()


# --- Alone -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other_is_coroutine", [True, False])
@pytest.mark.parametrize("suspect_is_coroutine", [True, False])
def test_a_suspect_waits_until_the_worker_is_empty(suspect_is_coroutine: bool, other_is_coroutine: bool) -> None:
    """Of threads and of coroutines."""
    buffer = open_buffer(4)
    buffer.add([execution(is_coroutine=other_is_coroutine)])
    other = buffer.take(is_coroutine=other_is_coroutine)
    assert other is not None
    buffer.add([execution(suspect=True, is_coroutine=suspect_is_coroutine)])
    assert buffer.next_to_prepare() is None
    buffer.done([(other, 0.01)])
    assert buffer.next_to_prepare() is not None


@pytest.mark.parametrize("other_is_coroutine", [True, False])
@pytest.mark.parametrize("suspect_is_coroutine", [True, False])
def test_nothing_starts_beside_a_suspect(suspect_is_coroutine: bool, other_is_coroutine: bool) -> None:
    """From the moment at which its slot is taken, while it is marked, and until it has ended."""
    buffer = open_buffer(4)
    alone = execution(suspect=True, is_coroutine=suspect_is_coroutine)
    buffer.add([alone, execution(on_crash="fail"), execution(is_coroutine=other_is_coroutine)])
    assert buffer.next_to_prepare() is alone

    def starts_nothing() -> bool:
        return buffer.next_to_prepare() is None and buffer.take(is_coroutine=other_is_coroutine) is None

    assert starts_nothing()
    alone.is_marked = True
    buffer.admit(alone)
    assert buffer.take(is_coroutine=suspect_is_coroutine) is alone
    assert starts_nothing()
    buffer.done([(alone, 0.01)])
    assert buffer.take(is_coroutine=other_is_coroutine) is not None


def test_a_suspect_that_waits_keeps_others_from_starting() -> None:
    """Or the worker would never be empty; nor is more claimed."""
    buffer = open_buffer(4)
    buffer.add([execution(), execution(suspect=True), execution()])
    assert buffer.take(is_coroutine=False) is None
    assert buffer.capacity() == 0


def contained(**given: Any) -> Execution:
    """A suspect with a process of its own."""
    made = execution(suspect=True, **given)
    made.may_have_own_process = True
    made.give_own_process()
    return made


def test_the_slots_of_contained_suspects_are_kept_for_them() -> None:
    """Suspects are claimed for free slots. Another task must not fill one while the suspect is being marked."""
    buffer = open_buffer(concurrency=2)
    suspects = [contained(), contained()]
    buffer.add([*suspects, execution()])
    assert buffer.take(is_coroutine=False) is None
    assert [buffer.next_to_prepare(), buffer.next_to_prepare()] == suspects


def test_a_contained_suspect_without_a_slot_goes_back_soon(clock: Clock) -> None:
    """Another worker may have a slot, or get one before this worker does."""
    buffer = open_buffer(concurrency=1)
    buffer.add([execution()])
    buffer.take(is_coroutine=False)
    suspect = contained()
    buffer.add([suspect])
    clock.seconds += DRAIN_SECONDS
    assert buffer.pop_overdue() == []
    clock.seconds += 0.01
    assert buffer.pop_overdue() == [suspect]


def test_a_contained_suspect_with_a_free_slot_waits_for_its_process(clock: Clock) -> None:
    """The process may take a moment to start; going back would not start it sooner."""
    buffer = open_buffer(concurrency=2)
    buffer.add([execution()])
    buffer.take(is_coroutine=False)
    buffer.add([contained()])
    clock.seconds += SUSPECT_PATIENCE_SECONDS
    assert buffer.pop_overdue() == []


def test_an_empty_worker_runs_the_suspect_that_must_be_alone(clock: Clock) -> None:
    """The others can run beside other tasks, in any worker: they go back at once."""
    buffer = open_buffer(concurrency=2)
    other, alone = contained(), execution(suspect=True)
    buffer.add([other, alone])
    assert buffer.next_to_prepare() is alone
    assert buffer.pop_overdue() == [other]


def test_two_suspects_run_one_after_the_other() -> None:
    """Or it could not be told which of them kills."""
    buffer = open_buffer(4)
    first, second = executions(2, suspect=True)
    buffer.add([first, second])
    assert buffer.next_to_prepare() is first
    assert buffer.next_to_prepare() is None
    buffer.done([(first, 0.01)])
    assert buffer.next_to_prepare() is second


def test_what_must_not_run_twice_is_marked_first_but_not_alone() -> None:
    """on_crash="fail" is no suspicion."""
    buffer = open_buffer(2)
    buffer.add([execution(), *executions(2, on_crash="fail")])
    assert buffer.take(is_coroutine=False) is not None
    assert buffer.take(is_coroutine=False) is None
    marked = buffer.next_to_prepare()
    assert marked is not None
    assert buffer.next_to_prepare() is None, "both slots are taken"
    marked.is_marked = True
    buffer.admit(marked)
    assert buffer.take(is_coroutine=False) is marked


def test_an_execution_that_waits_to_be_prepared_gets_the_next_slot(clock: Clock) -> None:
    """Tasks that could start at once would otherwise take every slot before it."""
    buffer = open_buffer(1)
    running, unprepared = execution(), execution(on_crash="fail")
    buffer.add([running])
    assert buffer.take(is_coroutine=False) is running
    buffer.add([unprepared, execution()])
    clock.seconds += PREPARE_FIRST_SECONDS + 0.01
    buffer.done([(running, 0.01)])
    assert buffer.take(is_coroutine=False) is None
    assert buffer.next_to_prepare() is unprepared


# --- Closing ---------------------------------------------------------------------------------------------------------


def test_a_closed_buffer_hands_back_what_has_not_started() -> None:
    """From every lane, also what was marked and had its slot. What executes goes on."""
    buffer = open_buffer(3)
    running, waiting, coroutine = execution(), execution(), execution(is_coroutine=True)
    buffer.add([running])
    assert buffer.take(is_coroutine=False) is running
    marked, suspect = execution(on_crash="fail"), execution(suspect=True)
    buffer.add([waiting, coroutine, marked, suspect])
    assert buffer.next_to_prepare() is marked
    marked.is_marked = True
    buffer.admit(marked)
    assert set(buffer.close()) == {waiting, coroutine, marked, suspect}
    assert buffer.executing() == [running]
    assert set(buffer.held()) == {running, waiting, coroutine, marked, suspect}, "held until that is committed"


def test_a_closed_buffer_starts_nothing_and_takes_nothing_in() -> None:
    """What comes too late is handed back at once, and held until it is given back."""
    buffer = open_buffer()
    assert buffer.close() == []
    late = [execution(), execution(is_coroutine=True), execution(suspect=True)]
    assert set(buffer.add(late)) == set(late)
    assert [buffer.take(is_coroutine=False), buffer.take(is_coroutine=True), buffer.next_to_prepare()] == [None] * 3
    assert buffer.wait_and_take() is None
    assert buffer.capacity() == 0
    assert not buffer.is_idle()


def test_threads_that_wait_leave_when_the_buffer_is_closed() -> None:
    """A stop wakes all of them."""
    buffer = open_buffer()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(buffer.wait_and_take) for _ in range(4)]
        wait_until(lambda: buffer._idle_threads == 4, "all threads wait")
        buffer.close()
        assert [each.result(20) for each in waiting] == [None] * 4
    assert buffer._idle_threads == 0


def test_what_waits_can_be_taken_out() -> None:
    """A cancelled task that has not started; one that executes is told otherwise."""
    buffer = open_buffer(1)
    running, waiting, other = executions(3)
    buffer.add([running, waiting, other])
    assert buffer.take(is_coroutine=False) is running
    assert buffer.remove_waiting({running, waiting}) == [waiting]
    assert buffer.executing() == [running]
    buffer.done([(running, 0.1)])
    assert buffer.take(is_coroutine=False) is other


# --- Giving back -----------------------------------------------------------------------------------------------------


def test_what_waits_long_behind_busy_slots_goes_back(clock: Clock) -> None:
    """Another worker could run it. Half a second without a take is long."""
    buffer = open_buffer(1)
    running, *waiting = executions(3)
    buffer.add([running, *waiting])
    assert buffer.take(is_coroutine=False) is running
    clock.seconds += STUCK_SECONDS * 0.9
    assert buffer.pop_overdue() == []
    clock.seconds += STUCK_SECONDS * 0.2
    assert buffer.pop_overdue() == waiting
    assert buffer.executing() == [running]
    assert buffer.capacity() == 0, "a worker of such long tasks holds none ahead"


def test_what_does_not_start_though_a_slot_is_free_goes_back(clock: Clock) -> None:
    """Its loop is blocked, or its thread did not start: another worker may run it. One more is tried, not all."""
    buffer = open_buffer(3)
    waiting = executions(2)
    buffer.add(waiting)
    first = buffer.take(is_coroutine=False)
    assert first is not None
    assert buffer.pop_overdue() == []
    clock.seconds += 100
    assert buffer.pop_overdue() == [each for each in waiting if each is not first]
    assert buffer.capacity() == 1
    buffer.done([(first, 1.0)])
    assert buffer.capacity() == 3


def test_each_take_proves_that_slots_get_free(clock: Clock) -> None:
    """A buffer of a fixed size keeps its tasks while they move."""
    buffer = open_buffer(1, size=20)
    buffer.add(executions(20))
    for _ in range(10):
        taken = buffer.take(is_coroutine=False)
        assert taken is not None
        clock.seconds += STUCK_SECONDS * 0.9
        assert buffer.pop_overdue() == []
        buffer.done([(taken, STUCK_SECONDS * 0.9)])


@pytest.mark.parametrize(("seconds", "kept"), [(0.02, 98), (0.03, 6), (0.1, 2), (0.9, 0)])
def test_what_would_wait_for_longer_than_planned_goes_back(clock: Clock, seconds: float, kept: int) -> None:
    """Short tasks made it hold many, and they turn out to be long: another worker could run them. The last ones go, and
    only when that has been so for a while.
    """
    buffer = open_buffer(2)
    first, *others = executions(101)
    buffer.add([first, *others])
    assert buffer.take(is_coroutine=False) is first
    buffer.done([(first, seconds)])
    taken = [buffer.take(is_coroutine=False) for _ in range(2)]
    waiting = others[2:]
    assert taken == others[:2]
    assert buffer.pop_overdue() == []
    clock.seconds += STUCK_SECONDS
    buffer.add([])  # something moves
    assert set(buffer.pop_overdue()) == set(waiting[kept:])
    assert buffer.pop_overdue() == []
    assert buffer.held() == [first, *others], "until that is committed"


def test_one_long_task_among_short_ones_sends_nothing_back(clock: Clock) -> None:
    """The average has come down again before that could be taken for a rule."""
    buffer = open_buffer(2)
    first, second, *waiting = executions(100)
    buffer.add([first, second, *waiting])
    assert [buffer.take(is_coroutine=False) for _ in range(2)] == [first, second]
    buffer.done([(first, 10.0)])
    assert buffer.pop_overdue() == []
    clock.seconds += STUCK_SECONDS / 2
    for _ in range(90):
        taken = buffer.take(is_coroutine=False)
        assert taken is not None
        buffer.done([(taken, 0.0)])
    assert buffer.pop_overdue() == []
    clock.seconds += STUCK_SECONDS
    buffer.add([])
    assert buffer.pop_overdue() == []


def test_what_has_a_free_slot_does_not_go_back(clock: Clock) -> None:
    """However long tasks are: it is about to start."""
    buffer = open_buffer(3)
    running, *waiting = executions(3)
    buffer.add([running])
    assert buffer.take(is_coroutine=False) is running
    buffer.done([(running, 100.0)])
    buffer.add(waiting)
    for _ in range(3):
        assert buffer.pop_overdue() == []
        clock.seconds += STUCK_SECONDS * 0.9
        buffer.add([])


def test_a_suspect_that_cannot_be_alone_goes_back_after_ten_seconds(clock: Clock) -> None:
    """All that waits behind it goes back much sooner: others can run that."""
    buffer = open_buffer(2)
    running = execution()
    buffer.add([running])
    assert buffer.take(is_coroutine=False) is running
    suspect, behind = execution(suspect=True), execution()
    buffer.add([suspect, behind])
    clock.seconds += STUCK_SECONDS
    assert buffer.pop_overdue() == [behind]
    clock.seconds += SUSPECT_PATIENCE_SECONDS - STUCK_SECONDS
    assert buffer.pop_overdue() == []
    assert buffer.capacity() == 0
    clock.seconds += 0.1
    assert buffer.pop_overdue() == [suspect]
    assert buffer.capacity() == 1


# --- Claims ----------------------------------------------------------------------------------------------------------


def test_a_claim_ends_with_the_last_of_its_tasks() -> None:
    """In whatever batches they are settled."""
    buffer = open_buffer()
    first, second, third = executions(3, claim_id=7)
    other = execution(claim_id=8)
    buffer.add([first, second, third, other])
    assert buffer.claims_ended_by({first}) == []
    buffer.settled([first])
    assert buffer.claims_ended_by({second, other}) == [8]
    buffer.settled([second, other])
    assert buffer.claims_ended_by({third}) == [7]
    assert not buffer.is_idle()
    buffer.settled([third])
    assert buffer.is_idle()


def test_asking_which_claims_end_changes_nothing() -> None:
    """The statement that ends them may fail."""
    buffer = open_buffer()
    only = execution(claim_id=7)
    buffer.add([only])
    assert [buffer.claims_ended_by({only}) for _ in range(2)] == [[7], [7]]
    assert buffer.held() == [only]


def test_what_is_unknown_or_settled_before_ends_no_claim() -> None:
    """Twice is once."""
    buffer = open_buffer()
    only = execution(claim_id=7)
    buffer.add([only])
    stranger = execution(claim_id=7)
    buffer.settled([only, stranger])
    buffer.settled([only])
    assert buffer.claims_ended_by({only, stranger}) == []


def test_the_end_of_a_lost_execution_leaves_a_later_claim_of_its_task_alone() -> None:
    """A worker may claim again what it has lost, while the first execution has not ended yet."""
    buffer = open_buffer(1)
    lost, again = execution(claim_id=1, id_=5), execution(claim_id=2, id_=5, suspect=True)
    buffer.add([lost])
    assert buffer.take(is_coroutine=False) is lost
    buffer.add([again])
    buffer.done([(lost, 1.0)])
    assert buffer.claims_ended_by({lost}) == [1], "the later claim must stay, or nothing recovers the task"
    buffer.settled([lost])
    assert buffer.held() == [again]


# --- Threads and callbacks -------------------------------------------------------------------------------------------


def test_threads_are_wanted_for_what_can_run_and_no_more() -> None:
    """None for coroutines, and never more than slots."""
    buffer = open_buffer(3)
    assert buffer.threads_wanted(0) == 0
    buffer.add(executions(2, is_coroutine=True))
    assert buffer.threads_wanted(0) == 0
    buffer.add(executions(2))
    assert [buffer.threads_wanted(threads) for threads in (0, 2, 3)] == [2, 1, 0]
    buffer.add(executions(20))
    assert [buffer.threads_wanted(threads) for threads in (0, 1, 3)] == [3, 2, 0]


def test_callbacks_run_outside_the_lock_and_only_for_runners_with_work() -> None:
    """A callback may call the buffer."""
    buffer = open_buffer(2)
    called: list[str] = []

    def callback(name: str) -> Callable[[], None]:
        def call() -> None:
            called.append(name)
            buffer.held()  # would deadlock

        return call

    buffer.on_work = {False: callback("threads"), True: callback("loop")}
    buffer.on_free = callback("free")
    buffer.add(executions(1))
    buffer.add(executions(1, is_coroutine=True))
    buffer.add(executions(1, suspect=True))
    assert called == ["threads", "loop"]


def test_a_thread_that_ends_wakes_coroutines_that_wait() -> None:
    """The slot may have been the last one, and nothing else would wake the event loop."""
    buffer = open_buffer(1)
    called: list[str] = []
    buffer.on_work[True] = lambda: called.append("loop")
    buffer.add([execution()])
    running = buffer.take(is_coroutine=False)
    assert running is not None
    buffer.add(executions(1, is_coroutine=True))
    called.clear()
    buffer.done([(running, 0.1)])
    assert called == ["loop"]


@pytest.mark.parametrize("is_coroutine", [True, False])
def test_every_end_wakes_a_suspect_that_waits(is_coroutine: bool) -> None:
    """The worker may be empty now."""
    buffer = open_buffer(2)
    called: list[str] = []
    buffer.on_free = lambda: called.append("free")
    buffer.add([execution(is_coroutine=is_coroutine)])
    running = buffer.take(is_coroutine=is_coroutine)
    assert running is not None
    buffer.add([execution(suspect=True)])
    buffer.done([(running, 0.1)])
    assert called == ["free"]
    assert buffer.has_unprepared()


# --- Any order of all that -------------------------------------------------------------------------------------------


class BufferMachine(RuleBasedStateMachine):
    """Claimer, runners and finish_loop in any order: the invariants of the module's first lines."""

    @initialize(concurrency=st.integers(1, 3))
    def begin(self, concurrency: int) -> None:
        self.may_start = True
        self.is_open = True
        self.buffer = Buffer(concurrency, lambda: self.may_start, 4)
        self.known: list[Execution] = []  # in order: a set's would differ from run to run
        self.marking: list[Execution] = []
        self.started: list[Execution] = []
        self.ended: list[Execution] = []
        self.claim_id = 0

    @rule(
        kinds=st.lists(
            st.tuples(
                st.booleans(), st.sampled_from([False, False, True]), st.sampled_from(["retry", "retry", "fail"])
            ),
            min_size=1,
            max_size=4,
        )
    )
    def add(self, kinds: list[tuple[bool, bool, str]]) -> None:
        self.claim_id += 1
        added = [
            execution(is_coroutine=is_coroutine, suspect=suspect, on_crash=on_crash, claim_id=self.claim_id, id_=number)
            for number, (is_coroutine, suspect, on_crash) in enumerate(kinds)  # what was lost may be claimed again
        ]
        self.known += added
        late = self.buffer.add(added)
        assert set(late) == (set() if self.is_open else set(added))
        self.ended += late

    @rule(is_coroutine=st.booleans())
    def take(self, is_coroutine: bool) -> None:
        taken = self.buffer.take(is_coroutine=is_coroutine)
        if taken is not None:
            assert self.may_start
            assert self.is_open
            assert taken.is_coroutine == is_coroutine
            assert taken.is_marked or not taken.needs_mark
            assert taken not in self.started
            assert taken not in self.ended
            self.started.append(taken)

    @rule()
    def mark(self) -> None:
        unprepared = self.buffer.next_to_prepare()
        if unprepared is not None:
            assert self.may_start
            assert self.is_open
            self.marking.append(unprepared)

    @precondition(lambda self: self.marking)
    @rule(is_ours=st.booleans())
    def admit(self, is_ours: bool) -> None:
        marked = self.marking.pop(0)
        if is_ours and self.is_open:
            marked.is_marked = True
            self.buffer.admit(marked)
        else:
            self.buffer.done([(marked, 0.0)])
            self.ended.append(marked)

    @precondition(lambda self: self.started)
    @rule(at=st.integers(0, 10), began=st.booleans())
    def end(self, at: int, began: bool) -> None:
        execution = self.started.pop(at % len(self.started))
        self.buffer.done([(execution, 0.01)]) if began else self.buffer.dropped(execution)
        self.ended.append(execution)

    @precondition(lambda self: self.ended)
    @rule(count=st.integers(1, 5))
    def commit(self, count: int) -> None:
        batch, self.ended = set(self.ended[:count]), self.ended[count:]
        left = {each.claimed.claim_id for each in self.known if each not in batch}
        touched = {each.claimed.claim_id for each in batch}
        assert sorted(self.buffer.claims_ended_by(batch)) == sorted(touched - left)
        self.buffer.settled(batch)
        self.known = [each for each in self.known if each not in batch]

    @rule(at=st.integers(0, 10))
    def cancel(self, at: int) -> None:
        chosen = self.known[at : at + 2]
        removed = self.buffer.remove_waiting(chosen)
        busy = {*self.started, *self.marking, *self.ended}
        assert not busy & set(removed)
        self.ended += removed

    @rule(may_start=st.booleans())
    def lose_or_regain_the_lease(self, may_start: bool) -> None:
        self.may_start = may_start
        self.buffer.wake_runners()

    @precondition(lambda self: self.claim_id > 3)
    @rule()
    def close(self) -> None:
        self.is_open = False
        self.ended += self.buffer.close()

    @invariant()
    def no_more_execute_than_there_are_slots(self) -> None:
        assert len(self.buffer.executing()) <= self.buffer.concurrency
        assert {*self.started, *self.marking} <= set(self.buffer.executing())

    @invariant()
    def a_suspect_executes_alone(self) -> None:
        executing = self.buffer.executing()
        assert len(executing) <= 1 or not any(each.task.suspect for each in executing)

    @invariant()
    def everything_is_held_until_it_is_committed(self) -> None:
        assert self.buffer.held() == self.known
        assert self.buffer.is_idle() == (not self.known)

    @invariant()
    def capacity_is_within_bounds(self) -> None:
        assert 0 <= self.buffer.capacity() <= (self.buffer.concurrency + 4 if self.is_open else 0)


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
