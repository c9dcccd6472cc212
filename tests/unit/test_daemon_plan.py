"""The supervisor's decisions: what follows from what it sees. No processes, no clock, no chance."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasklib_daemon.plan import (
    ABORT_SECONDS,
    EXIT_SECONDS,
    INTERRUPT_SECONDS,
    NEVER,
    SETTLE_SECONDS,
    WAKE_UP_SECONDS,
    AbandonReload,
    Abort,
    ChildLimits,
    ChildView,
    DaemonView,
    ExitDaemon,
    FinishReload,
    Generation,
    Interrupt,
    Kill,
    Overdue,
    Pauses,
    Shutdown,
    Slot,
    Spawn,
    Stage,
    Stop,
    is_crash_loop,
    plan,
)

if TYPE_CHECKING:
    from tasklib_daemon.plan import Action

NOW = 1000.0
LIMITS = ChildLimits()
ONE, TWO = Slot("worker", 1), Slot("worker", 2)
KEEPER, WEB = Slot("keeper", 1), Slot("web", 1)
TASK = uuid4()


def serving(number: int, slot: Slot = ONE, **values: Any) -> ChildView:
    """One that has been ready for a while, and goes on."""
    beacon = NOW if slot.role == "worker" else NOW + 10**7  # the others go on, however long a test looks
    values = {"generation": 1, "started": NOW - 100, "beacon": beacon, **values}
    return ChildView(child_id=number, slot=slot, is_booted=True, is_ready=True, **values)


def booting(number: int, slot: Slot = ONE, **values: Any) -> ChildView:
    return ChildView(child_id=number, slot=slot, **{"generation": 1, "started": NOW - 1, **values})


def state(*children: ChildView, workers: int = 1, **values: Any) -> DaemonView:
    """With a keeper, and no web child."""
    there = children if any(child.slot == KEEPER for child in children) else (*children, serving(99, KEEPER))
    return DaemonView(serving=Generation(1, workers, has_web=False), children=there, **values)


def follows(seen: DaemonView, now: float = NOW) -> list[Action]:
    return plan(seen, now)


# --- keeping up ---


def test_at_the_start_every_slot_gets_a_child() -> None:
    """Keeper and web are children like workers."""
    empty = DaemonView(serving=Generation(1, 2))
    assert follows(empty) == [Spawn(ONE, 1), Spawn(TWO, 1), Spawn(KEEPER, 1), Spawn(WEB, 1)]


def test_who_serves_is_left_alone() -> None:
    assert follows(state(serving(1), serving(2, TWO), workers=2)) == []


@pytest.mark.parametrize("slot", [ONE, KEEPER, WEB])
def test_a_slot_rests_after_a_death(slot: Slot) -> None:
    """Each by itself: the others are not kept waiting."""
    there = {ONE: serving(1), KEEPER: serving(2, KEEPER), WEB: serving(3, WEB)}
    del there[slot]
    seen = DaemonView(serving=Generation(1, 1), children=[*there.values()], resting_until={slot: NOW + 1})
    assert follows(seen) == []
    assert follows(seen, NOW + 1) == [Spawn(slot, 1)]


def test_fewer_workers_are_drained_from_the_top() -> None:
    seen = state(serving(1), serving(2, TWO), workers=1)
    assert follows(seen) == [Stop(2, "fewer workers are wanted", NOW + LIMITS.grace_seconds, "recycled")]


def test_one_that_drains_does_not_count() -> None:
    """Its slot has a new one at once."""
    seen = state(serving(1, stage=Stage.DRAINING, stage_since=NOW))
    assert follows(seen) == [Spawn(ONE, 1)]


def test_a_web_child_is_waited_for() -> None:
    """Two of them cannot have one port."""
    leaving = serving(3, WEB, stage=Stage.DRAINING, stage_since=NOW, stop_by=NOW + 1)
    seen = DaemonView(serving=Generation(1, 1), children=[serving(1), serving(2, KEEPER), leaving])
    assert follows(seen) == []


# --- reload ---


def reloading(*new: ChildView, old: tuple[ChildView, ...] = (serving(1),), **values: Any) -> DaemonView:
    coming = replace(Generation(2, 1, has_web=False), **values)
    return DaemonView(serving=Generation(1, 1, has_web=False), coming=coming, children=[*old, serving(2, KEEPER), *new])


def test_a_reload_starts_all_new_ones_beside_the_old() -> None:
    assert follows(reloading()) == [Spawn(ONE, 2), Spawn(KEEPER, 2)]


def test_nobody_stops_before_all_new_ones_are_ready() -> None:
    new_keeper = serving(4, KEEPER, generation=2)
    assert follows(reloading(booting(3, generation=2), new_keeper)) == []
    ready = reloading(serving(3, generation=2), new_keeper)
    assert follows(ready) == [FinishReload()]
    adopted = replace(ready, serving=Generation(2, 1, has_web=False), coming=None)
    assert [(type(each), each.child_id) for each in follows(adopted) if isinstance(each, Stop)] == [
        (Stop, 1),
        (Stop, 2),
    ]


def test_the_old_ones_stay_if_a_new_one_fails() -> None:
    seen = reloading(serving(3, generation=2), booting(4, KEEPER, generation=2), has_failed=True)
    assert follows(seen) == [Kill(3, "recycled"), Kill(4, "recycled"), AbandonReload()]


def test_the_old_ones_stay_if_a_new_one_is_never_ready() -> None:
    """A hook that does not end: the next reload must be possible, and recycling."""
    late = booting(3, is_booted=True, generation=2, started=NOW)
    seen = reloading(late, serving(4, KEEPER, generation=2))
    told = "worker 1 is not ready 120 s after its start"
    assert not any(isinstance(each, AbandonReload) for each in follows(seen, NOW + 2 * LIMITS.boot_seconds - 1))
    wanted = {Kill(3, "recycled"), Kill(4, "recycled"), AbandonReload(told)}
    assert wanted <= {*follows(seen, NOW + 2 * LIMITS.boot_seconds)}


def test_an_old_one_that_dies_meanwhile_is_replaced() -> None:
    """A reload that takes long, for the database is away, leaves no gap."""
    seen = reloading(booting(3, generation=2), booting(4, KEEPER, generation=2), old=())
    assert follows(seen) == [Spawn(ONE, 1)]


def test_the_web_child_is_replaced_after_the_reload() -> None:
    """Two of them cannot have one port: the old one stops first."""
    old = [serving(1, generation=2), serving(2, KEEPER, generation=2), serving(3, WEB)]
    seen = DaemonView(serving=Generation(2, 1), children=old)
    assert follows(seen) == [Stop(3, "it is replaced after a reload", NOW + LIMITS.grace_seconds, "recycled")]
    assert follows(replace(seen, children=old[:2])) == [Spawn(WEB, 2)]


# --- recycling ---

DUE = [
    (ChildLimits(max_tasks=10), {"ended": 10}, "it has run 10 tasks"),
    (ChildLimits(max_age_seconds=100), {"started": NOW - 100}, "it is 100 s old"),
    (ChildLimits(max_memory_bytes=2**20), {"memory_bytes": 2**21}, "it uses 2 MB"),
    (ChildLimits(), {"is_unreachable": True}, "its channel to the supervisor is closed"),
]


@pytest.mark.parametrize(("limits", "values", "why"), DUE)
def test_a_replacement_comes_first(limits: ChildLimits, values: dict[str, Any], why: str) -> None:
    """Recycling by task count, age and memory; and of one that has lost its channel."""
    old = serving(1, **values)
    assert follows(state(old, limits=limits)) == [Spawn(ONE, 1)]
    assert follows(state(old, booting(2), limits=limits)) == []
    young = serving(2, started=NOW)
    (stop,) = follows(state(old, young, limits=limits))
    assert isinstance(stop, Stop)
    assert (stop.child_id, stop.why) == (1, why)


@pytest.mark.parametrize(("limits", "values", "why"), DUE)
def test_below_the_limit_nothing_happens(limits: ChildLimits, values: dict[str, Any], why: str) -> None:
    assert follows(state(serving(1, ended=9, started=NOW - 99, memory_bytes=2**19), limits=limits)) == []


def test_tasks_of_a_recycled_worker_may_take_their_time() -> None:
    """But not the memory of one that is too large."""
    by_tasks = state(serving(1, ended=10), serving(2, started=NOW), limits=ChildLimits(max_tasks=10))
    large = serving(1, memory_bytes=2**21)
    by_memory = state(large, serving(2, started=NOW), limits=ChildLimits(max_memory_bytes=2**20))
    assert [each.stop_by for each in follows(by_tasks) if isinstance(each, Stop)] == [NEVER]
    assert [(each.stop_by, each.cause) for each in follows(by_memory) if isinstance(each, Stop)] == [
        (NOW + LIMITS.grace_seconds, "memory")
    ]


def test_an_unreachable_worker_has_no_longer_than_the_grace() -> None:
    """Its event loop may be dead with its descriptors: what waits in there would wait for ever."""
    unreachable = state(serving(1, is_unreachable=True, executing=1), serving(2, started=NOW))
    assert [each.stop_by for each in follows(unreachable) if isinstance(each, Stop)] == [NOW + LIMITS.grace_seconds]


def test_recycling_is_staggered() -> None:
    """All are due: one replacement at a time in the whole daemon, the oldest first."""
    limits = ChildLimits(max_tasks=10)
    old = [serving(1, ended=10), serving(2, TWO, ended=10)]
    assert follows(state(*old, workers=2, limits=limits)) == [Spawn(ONE, 1)]
    assert follows(state(*old, booting(3), workers=2, limits=limits)) == []


def test_there_are_never_more_than_two_in_a_slot() -> None:
    """The last one still drains: it is waited for, however due the present one is."""
    limits = ChildLimits(max_tasks=10)
    draining = serving(1, stage=Stage.DRAINING, stage_since=NOW, executing=1)
    assert follows(state(draining, serving(2, ended=10), limits=limits)) == []


def test_a_replacement_that_died_is_not_interrupted() -> None:
    limits = ChildLimits(max_tasks=10)
    seen = state(serving(1, ended=10), limits=limits, resting_until={ONE: NOW + 5})
    assert follows(seen) == []


def test_keeper_and_web_are_not_recycled() -> None:
    assert follows(state(serving(1), serving(2, KEEPER, ended=99), limits=ChildLimits(max_tasks=10))) == []


# --- a child on its way out ---


def test_who_drains_too_long_is_interrupted_and_then_killed() -> None:
    """SIGTERM, a second SIGTERM, SIGKILL."""
    draining = serving(1, stage=Stage.DRAINING, stage_since=NOW, stop_by=NOW + 30, executing=1)
    assert Interrupt(1) not in follows(state(draining), NOW + 29)
    assert Interrupt(1) in follows(state(draining), NOW + 30)
    interrupted = replace(draining, stage=Stage.INTERRUPTED, stage_since=NOW + 30)
    assert Kill(1) not in follows(state(interrupted), NOW + 30 + INTERRUPT_SECONDS - 1)
    assert Kill(1) in follows(state(interrupted), NOW + 30 + INTERRUPT_SECONDS)
    killed = replace(draining, stage=Stage.KILLED, stage_since=NOW + 40)
    assert follows(state(killed), NOW + 100) == [Spawn(ONE, 1)]


def test_what_fills_the_memory_ends_with_its_process() -> None:
    """After the grace. Asked politely it would be given back, uncharged, to fill the next worker, for ever."""
    large = serving(1, stage=Stage.DRAINING, stage_since=NOW, stop_by=NOW + 30, stop_cause="memory", executing=1)
    assert Kill(1) not in follows(state(large), NOW + 29)
    assert Kill(1) in follows(state(large), NOW + 30)
    for other in (replace(large, stop_cause="recycled"), replace(large, executing=0)):
        assert Interrupt(1) in follows(state(other), NOW + 30)
    assert Interrupt(1) in follows(state(large, shutdown=Shutdown(NOW)), NOW + 30)


def test_who_has_nothing_left_to_drain_must_end() -> None:
    """Also when its tasks could have taken as long as they liked. Outcomes that wait for a database are waited for."""
    idle = serving(1, stage=Stage.DRAINING, stage_since=NOW, stop_by=NEVER)
    later = NOW + LIMITS.grace_seconds
    assert Interrupt(1) in follows(state(idle), later)
    for busy in (replace(idle, executing=1), replace(idle, unwritten=1)):
        assert Interrupt(1) not in follows(state(busy), later)


# --- limits ---


@pytest.mark.parametrize("stage", [Stage.SERVING, Stage.DRAINING, Stage.INTERRUPTED, Stage.ABORTED])
@pytest.mark.parametrize("cause", ["hard_timeout", "cancelled"])
def test_a_task_over_its_limit_is_ended_with_its_process(stage: Stage, cause: Any) -> None:
    """At any time; the guilty is named."""
    child = serving(1, stage=stage, stage_since=NOW, executing=2, overdue=Overdue(TASK, cause))
    assert Kill(1, cause, TASK) in follows(state(child))


def test_nobody_is_judged_by_what_happened_while_all_stood_still() -> None:
    """SIGSTOP of the whole daemon, then SIGCONT: its workers first do by themselves what is overdue."""
    child = serving(1, beacon=NOW - 60, executing=1, overdue=Overdue(TASK, "hard_timeout"))
    seen = state(child, booting(2, TWO, started=NOW - 70), workers=2, awake_since=NOW)
    assert follows(seen) == []
    assert follows(seen, NOW + WAKE_UP_SECONDS) == [Kill(1, "hard_timeout", TASK)]


@pytest.mark.parametrize(
    ("values", "silent_seconds"),
    [
        ({}, LIMITS.hang_seconds),
        ({"executing": 1}, LIMITS.stall_seconds),
        ({"is_connected": False}, LIMITS.hang_seconds + LIMITS.connect_seconds),
    ],
)
def test_a_claim_loop_that_stands_still_is_a_hang(values: dict[str, Any], silent_seconds: float) -> None:
    """Later while tasks execute; later still while there is no database. SIGABRT for a traceback, then SIGKILL."""
    child = serving(1, beacon=NOW, **values)
    assert follows(state(child), NOW + silent_seconds - 0.1) == []
    (abort,) = follows(state(child), NOW + silent_seconds)
    assert isinstance(abort, Abort)
    aborted = replace(child, stage=Stage.ABORTED, stage_since=NOW)
    assert Kill(1) not in follows(state(aborted), NOW + ABORT_SECONDS - 0.1)
    assert Kill(1) in follows(state(aborted), NOW + ABORT_SECONDS)


def test_a_keeper_that_says_nothing_is_a_hang() -> None:
    """It says how it is every second, whether or not there is a database. A web child has nothing to say."""
    silent = serving(2, KEEPER, beacon=NOW - LIMITS.hang_seconds)
    assert follows(state(serving(1), silent)) == [Abort(2, "it has sent no message for 15.0 s")]
    assert follows(state(serving(1), replace(silent, beacon=NOW - 14))) == []
    web = serving(3, WEB, beacon=0.0)
    seen = DaemonView(serving=Generation(1, 1), children=[serving(1), serving(2, KEEPER), web])
    assert follows(seen) == []


def test_a_long_task_is_no_hang() -> None:
    """The loop goes on: however long it takes."""
    assert follows(state(serving(1, executing=1, started=NOW - 10**6))) == []


def test_who_does_not_boot_is_a_hang() -> None:
    child = booting(1, started=NOW)
    assert follows(state(child), NOW + LIMITS.boot_seconds - 1) == []
    assert follows(state(child), NOW + LIMITS.boot_seconds) == [Abort(1, "it has not started within 60 s")]


def test_who_hangs_is_not_asked_to_drain() -> None:
    """It would not hear it; a traceback tells more."""
    hung = serving(2, TWO, beacon=NOW - 60)
    for seen in (state(serving(1), hung), ending(hung, serving(3, KEEPER))):
        assert [type(each) for each in follows(seen)] == [Abort]


def test_who_waits_for_the_database_is_no_hang() -> None:
    """However long it is away: the application is imported, there is nothing to complain about."""
    assert follows(state(replace(booting(1), is_booted=True)), NOW + 10**6) == []


# --- the end ---


def ending(*children: ChildView, **values: Any) -> DaemonView:
    given = {"interrupt_at": NOW + 30, **values}
    reports = bool(given.pop("has_reports", False))
    return DaemonView(
        serving=Generation(1, 1), children=[*children], shutdown=Shutdown(**given), has_reports=reports,
        resting_until={KEEPER: NOW + 0.5},
    )  # fmt: skip


def test_the_end_stops_workers_first() -> None:
    """Keeper and web stay: what workers leave behind is settled, and somebody tells that it drains."""
    seen = ending(serving(1), booting(2, TWO), serving(3, KEEPER), serving(4, WEB))
    assert follows(seen) == [
        Stop(number, "the daemon stops", NOW + 30, "shutdown") for number in (1, 2)
    ]  # fmt: skip


def test_the_grace_of_the_daemon_ends_that_of_each_worker() -> None:
    """One may have begun to drain before, with no limit."""
    seen = ending(serving(1, stage=Stage.DRAINING, stage_since=NOW, executing=1), serving(2, KEEPER))
    assert follows(seen, NOW + 29) == []
    assert follows(seen, NOW + 30) == [Interrupt(1)]


def test_a_keeper_that_dies_while_workers_drain_is_replaced() -> None:
    seen = ending(serving(1, stage=Stage.DRAINING, stage_since=NOW, executing=1))
    assert follows(seen) == []
    assert follows(seen, NOW + 0.5) == [Spawn(KEEPER, 1)]


def test_keeper_and_web_stop_last() -> None:
    seen = ending(serving(3, KEEPER), serving(4, WEB), workers_gone_at=NOW)
    assert follows(seen) == [
        Stop(number, "the daemon stops", NOW + EXIT_SECONDS, "shutdown") for number in (3, 4)
    ]  # fmt: skip
    late = ending(serving(3, KEEPER, stage=Stage.DRAINING, stop_by=NOW + EXIT_SECONDS), workers_gone_at=NOW)
    assert follows(late, NOW + EXIT_SECONDS) == [Kill(3)]


def test_the_keeper_settles_what_killed_workers_held() -> None:
    """But not for ever: the database may be away."""
    seen = ending(serving(3, KEEPER), workers_gone_at=NOW, has_reports=True)
    assert follows(seen, NOW + SETTLE_SECONDS - 0.1) == []
    assert [type(each) for each in follows(seen, NOW + SETTLE_SECONDS)] == [Stop]
    dead = ending(workers_gone_at=NOW, has_reports=True)
    assert follows(dead, NOW + 1) == [Spawn(KEEPER, 1)], "the one that was there has died, and nobody else knows"
    assert follows(dead, NOW + SETTLE_SECONDS) == [ExitDaemon()]


def test_quit_is_immediate() -> None:
    seen = ending(serving(1), booting(2, TWO), serving(3, KEEPER), interrupt_at=NOW, is_immediate=True)
    assert follows(seen) == [Kill(1, "shutdown"), Kill(2, "shutdown")]
    alone = ending(serving(3, KEEPER), interrupt_at=NOW, is_immediate=True, workers_gone_at=NOW)
    assert follows(alone) == [Stop(3, "the daemon stops", NOW, "shutdown")]


def test_when_nobody_is_left_it_leaves() -> None:
    assert follows(ending()) == [ExitDaemon()]


def test_a_drain_without_a_limit_waits() -> None:
    seen = ending(
        serving(1, stage=Stage.DRAINING, stage_since=NOW, executing=1), serving(2, KEEPER), interrupt_at=NEVER
    )
    assert follows(seen, NOW + 10**6) == []


# --- after a death ---


def test_pauses_double_up_to_the_longest() -> None:
    pauses = Pauses(first_seconds=0.1, longest_seconds=30)
    assert [round(pauses.after(failures, 1.0), 1) for failures in (1, 2, 3, 4, 9, 10, 10**9)] == [
        0.1, 0.2, 0.4, 0.8, 25.6, 30, 30,
    ]  # fmt: skip


@given(failures=st.integers(1, 10**9), jitter=st.floats(0, 1))
def test_jitter_takes_at_most_half(failures: int, jitter: float) -> None:
    """Many daemons that lost the same thing do not come back at the same moment."""
    pauses = Pauses()
    full = pauses.after(failures, 1.0)
    assert full / 2 <= pauses.after(failures, jitter) <= full


def test_who_lived_long_enough_is_forgiven() -> None:
    """Killed every few seconds by chance: the next one comes at once. Dying at once: each time later."""
    pauses = Pauses(first_seconds=0.1, longest_seconds=30)
    assert pauses.forgives(lived_seconds=2.0, failures=0)
    assert not pauses.forgives(lived_seconds=0.9, failures=0)
    assert not pauses.forgives(lived_seconds=2.0, failures=8)
    assert pauses.forgives(lived_seconds=300.0, failures=100)


def test_a_crash_loop_is_so_many_deaths_in_so_short_a_time() -> None:
    deaths = [NOW - 50, NOW - 40, NOW - 30]
    assert is_crash_loop(deaths, NOW, most=3, seconds=60)
    assert not is_crash_loop(deaths, NOW, most=4, seconds=60)
    assert not is_crash_loop(deaths, NOW + 20, most=3, seconds=60)


# --- in general ---

_slots = st.sampled_from([ONE, TWO, Slot("worker", 3), KEEPER, WEB])
_moments = st.floats(NOW - 200, NOW + 100)
_children = st.builds(
    ChildView,
    child_id=st.just(0), slot=_slots, generation=st.integers(1, 2), started=st.floats(NOW - 200, NOW),
    is_booted=st.booleans(), is_ready=st.booleans(), is_unreachable=st.booleans(), stage=st.sampled_from(Stage),
    stage_since=st.floats(NOW - 100, NOW), stop_by=_moments | st.just(math.inf), beacon=st.floats(NOW - 100, NOW),
    is_connected=st.booleans(), executing=st.integers(0, 2), unwritten=st.integers(0, 2), ended=st.integers(0, 20),
    overdue=st.none() | st.just(Overdue(TASK, "hard_timeout")),
)  # fmt: skip
_generations = st.builds(Generation, st.just(1), st.integers(1, 3), has_web=st.booleans())
_states = st.builds(
    DaemonView,
    serving=_generations, limits=st.builds(ChildLimits, max_tasks=st.none() | st.just(10)),
    coming=st.none() | st.builds(Generation, st.just(2), st.integers(1, 3), has_failed=st.booleans()),
    children=st.lists(_children, max_size=6).map(lambda all_: [replace(c, child_id=n) for n, c in enumerate(all_)]),
    shutdown=st.none() | st.builds(Shutdown, _moments, is_immediate=st.booleans()), has_reports=st.booleans(),
)  # fmt: skip


@given(_states)
def test_a_child_is_told_one_thing_at_a_time(seen: DaemonView) -> None:
    """Whatever is seen: nobody who was killed is told anything, and a slot gets one new child at most for each
    generation.
    """
    actions = plan(seen, NOW)
    told = [each.child_id for each in actions if isinstance(each, Stop | Interrupt | Abort)]
    killed = [each.child_id for each in actions if isinstance(each, Kill)]
    spawned = [each for each in actions if isinstance(each, Spawn)]
    stages = {child.child_id: child.stage for child in seen.children}
    assert all(
        stages[each.child_id] < Stage.KILLED for each in actions if isinstance(each, Stop | Interrupt | Abort | Kill)
    )
    assert len(told) == len(set(told))
    assert len(killed) == len(set(killed))
    assert len(spawned) == len(set(spawned))


@given(_states)
def test_the_daemon_leaves_only_when_it_is_told_to_and_nobody_is_left(seen: DaemonView) -> None:
    if ExitDaemon() in plan(seen, NOW):
        assert seen.shutdown is not None
        assert not seen.children
