"""What the supervisor should do now: a pure function of what it sees. It touches no process, clock or chance.

A place is a role and a number, such as worker 1. Each wanted place has one child that serves. A second one is there
only to replace the first: it has to be ready before the first is told to stop. A reload makes a whole new generation
that way, beside the old one, and the old one stays if the new one does not get ready.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from uuid import UUID

Role = Literal["worker", "keeper", "web"]
Cause = Literal["crash", "hard_timeout", "cancelled", "hang", "memory", "recycled", "shutdown"]

CANCEL_SECONDS = 10.0  # for a worker that hurries to tell its tasks to stop, and to give them back
ABORT_SECONDS = 5.0  # for a traceback to be written
SETTLE_SECONDS = 3.0  # for the keeper to settle what killed workers held, before it stops too
LEAVE_SECONDS = 5.0  # for keeper and web to stop
WAKE_UP_SECONDS = 5.0  # after the whole daemon stood still: its workers first do by themselves what is overdue
NEVER = math.inf


class Place(NamedTuple):
    role: Role
    slot: int


class Stage(IntEnum):
    """How far a child is on its way out."""

    SERVING = 0
    ASKED = 1  # to drain
    HURRIED = 2  # to tell its tasks to stop
    ABORTED = 3  # it hangs: to leave a traceback
    KILLED = 4


@dataclass(frozen=True, slots=True)
class Overdue:
    """A task that had to end by now, and executes."""

    task_id: UUID
    cause: Cause


@dataclass(frozen=True, slots=True)
class Child:
    """What matters of a child that lives. `number` is its own for ever: a pid may come again."""

    number: int
    place: Place
    generation: int
    born: float
    is_booted: bool = False  # from here on it may wait for the database as long as it takes
    is_ready: bool = False
    is_deaf: bool = False  # its channel is closed: a task has got at its file descriptors
    stage: Stage = Stage.SERVING
    since: float = 0.0  # of the stage
    stop_by: float = NEVER  # while it drains
    stopped_for: Cause | None = None
    beacon: float = 0.0  # the last round of its claim loop; of a keeper, its last message
    is_connected: bool = True
    executing: int = 0
    unwritten: int = 0  # outcomes that are not committed yet
    ended: int = 0
    memory_bytes: int = 0
    overdue: Overdue | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    grace_seconds: float = 30.0
    boot_seconds: float = 60.0
    hang_seconds: float = 15.0
    stall_seconds: float = 60.0
    connect_seconds: float = 30.0  # a claim loop that looks for its database may be silent for so long
    max_tasks: int | None = None
    max_age_seconds: float | None = None
    max_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    number: int
    workers: int
    has_web: bool = True
    has_failed: bool = False  # a child of it died before all were ready

    def places(self) -> tuple[Place, ...]:
        workers = [Place("worker", slot) for slot in range(1, self.workers + 1)]
        return (*workers, Place("keeper", 1), *([Place("web", 1)] if self.has_web else []))


@dataclass(frozen=True, slots=True)
class Ending:
    """The daemon stops. `hurry_at`: until then tasks may finish."""

    hurry_at: float
    is_now: bool = False
    workers_gone_at: float | None = None


@dataclass(frozen=True, slots=True)
class State:
    serving: Generation
    limits: Limits = Limits()
    coming: Generation | None = None  # a reload is under way
    children: Sequence[Child] = ()
    resting_until: Mapping[Place, float] = field(default_factory=dict)  # after a death
    ending: Ending | None = None
    awake_since: float = -math.inf  # the supervisor itself stood still before that, perhaps everybody did
    has_reports: bool = False  # the keeper has not settled yet what dead workers held
    by_place: dict[Place, list[Child]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for child in self.children:
            self.by_place.setdefault(child.place, []).append(child)


# --- what may follow ---


@dataclass(frozen=True, slots=True)
class Spawn:
    place: Place
    generation: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Drain, and end."""

    number: int
    why: str
    stop_by: float
    cause: Cause


@dataclass(frozen=True, slots=True)
class Hurry:
    number: int


@dataclass(frozen=True, slots=True)
class Abort:
    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Kill:
    number: int
    cause: Cause | None = None  # None: as it was stopped for
    guilty: UUID | None = None


@dataclass(frozen=True, slots=True)
class Adopt:
    """The coming generation is ready: it is the serving one."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """The coming generation does not get ready: the old one stays."""

    why: str | None = None  # None: one of it has died


@dataclass(frozen=True, slots=True)
class Leave:
    """Nobody is left."""


Action = Spawn | Stop | Hurry | Abort | Kill | Adopt | Abandon | Leave


def plan(state: State, now: float) -> list[Action]:
    urgent = {child.number: action for child in state.children if (action := _watch(state, child, now)) is not None}
    rest = _end(state, state.ending, now) if state.ending is not None else _serve(state, now)
    return [*urgent.values(), *(each for each in rest if not _is_said(each, urgent))]


def _is_said(action: Action, urgent: Mapping[int, Action]) -> bool:
    """A child is told one thing at a time; but who is to be killed now is, whatever else it was told."""
    match action:
        case Stop(number):
            return number in urgent
        case Kill(number):
            return isinstance(urgent.get(number), Kill)
        case _:
            return False


# --- one child ---


def _watch(state: State, child: Child, now: float) -> Action | None:
    """Limits that hold at any time, whatever else is going on."""
    if child.stage == Stage.KILLED:
        return None
    if child.overdue is not None and now >= state.awake_since + WAKE_UP_SECONDS:
        return Kill(child.number, child.overdue.cause, child.overdue.task_id)
    if child.stage == Stage.ABORTED:
        return Kill(child.number) if now >= child.since + ABORT_SECONDS else None
    if child.stage == Stage.HURRIED:
        return Kill(child.number) if now >= child.since + CANCEL_SECONDS else None
    if child.stage == Stage.ASKED:
        return _hurry(state, child, now)
    why = why_hung(state.limits, child, now, awake_since=state.awake_since)
    return Abort(child.number, why) if why is not None else None


def _hurry(state: State, child: Child, now: float) -> Action | None:
    """The drain takes too long; or there is nothing left to drain, and it still does not end."""
    if child.place.role != "worker":
        return Kill(child.number) if now >= child.stop_by else None
    hurry_at = child.stop_by if state.ending is None else min(child.stop_by, state.ending.hurry_at)
    if not child.executing and not child.unwritten:
        hurry_at = min(hurry_at, child.since + state.limits.grace_seconds)
    if now < hurry_at:
        return None
    # Given back, what fills the memory would fill the next worker's, and so on for ever: it has to be a death to be
    # counted. If nobody knows which of several it was, they run alone next time.
    is_filled = child.stopped_for == "memory" and child.executing and state.ending is None
    return Kill(child.number) if is_filled else Hurry(child.number)


def why_hung(limits: Limits, child: Child, now: float, *, awake_since: float = -math.inf) -> str | None:
    """A child that does not boot, a worker whose claim loop stands still, a keeper that says nothing. A long task alone
    is no hang.
    """
    if not child.is_booted:
        seconds = now - max(child.born, awake_since)
        return f"it has not started within {limits.boot_seconds:g} s" if seconds >= limits.boot_seconds else None
    if child.place.role == "web" or not child.is_ready:
        return None
    allowed = limits.stall_seconds if child.executing else limits.hang_seconds
    allowed += 0.0 if child.is_connected else limits.connect_seconds
    silent = now - max(child.beacon, child.born, awake_since)
    what = "its claim loop has stood still" if child.place.role == "worker" else "it has said nothing"
    return f"{what} for {silent:.1f} s" if silent >= allowed else None


# --- the daemon stops ---


def _end(state: State, ending: Ending, now: float) -> Iterator[Action]:
    """Workers first; keeper and web stay as long as there is somebody to keep, or something to settle."""
    workers = [child for child in state.children if child.place.role == "worker"]
    if ending.is_now:
        yield from (Kill(child.number, "shutdown") for child in workers if child.stage < Stage.KILLED)
    else:
        serving = (child for child in workers if child.stage == Stage.SERVING)
        yield from (Stop(child.number, "the daemon stops", ending.hurry_at, "shutdown") for child in serving)
    is_settling = _is_settling(state, ending, now)
    if workers or is_settling:
        yield from _keep_keeper(state, now)
    elif not state.children:
        yield Leave()
    else:
        stop_by = now if ending.is_now else now + LEAVE_SECONDS
        others = (child for child in state.children if child.stage == Stage.SERVING)
        yield from (Stop(child.number, "the daemon stops", stop_by, "shutdown") for child in others)


def _is_settling(state: State, ending: Ending, now: float) -> bool:
    began = ending.workers_gone_at if ending.workers_gone_at is not None else now
    return state.has_reports and now < began + SETTLE_SECONDS


def _keep_keeper(state: State, now: float) -> Iterator[Action]:
    place = Place("keeper", 1)
    if not _in(state, place) and now >= state.resting_until.get(place, 0.0):
        yield Spawn(place, state.serving.number)


# --- the daemon serves ---


def _serve(state: State, now: float) -> Iterator[Action]:
    if state.coming is not None:
        yield from _reload(state, state.coming, now)
    yield from _keep_up(state, now)
    yield from _recycle(state, now)


def _reload(state: State, coming: Generation, now: float) -> list[Action]:
    """All of the new ones are ready before the first of the old ones stops. The web child is not among them: two of
    them cannot have one port.
    """
    new = [child for child in state.children if child.generation == coming.number]
    why = _why_late(state.limits, new, now)
    if coming.has_failed or why is not None:
        return [*(Kill(child.number, "recycled") for child in new if child.stage < Stage.KILLED), Abandon(why)]
    places = [place for place in coming.places() if place.role != "web"]
    missing = [place for place in places if not any(child.place == place for child in new)]
    is_ready = not missing and all(child.is_ready for child in new)
    return [Adopt()] if is_ready else [Spawn(place, coming.number) for place in missing]


def _why_late(limits: Limits, new: Sequence[Child], now: float) -> str | None:
    """Started, and not ready: a hook that does not end, or a database that is away. Nobody waits for ever for it."""
    late = [child for child in new if not child.is_ready and now >= child.born + 2 * limits.boot_seconds]
    return (
        f"{late[0].place.role} {late[0].place.slot} is not ready {now - late[0].born:.0f} s after its start"
        if late
        else None
    )


def _keep_up(state: State, now: float) -> Iterator[Action]:
    """One that serves in each place, of the serving generation."""
    wanted = frozenset(state.serving.places())
    coming = state.coming.number if state.coming is not None else None
    for child in state.children:
        if child.stage == Stage.SERVING and child.generation != coming:
            yield from _stop_if_useless(state, child, now, wanted)
    for place in state.serving.places():
        there = [child for child in _in(state, place) if child.generation != coming]
        is_free = not [child for child in there if child.stage == Stage.SERVING]
        is_free = is_free and not (place.role == "web" and there)  # two of them cannot have one port
        if is_free and now >= state.resting_until.get(place, 0.0):
            yield Spawn(place, state.serving.number)


def _stop_if_useless(state: State, child: Child, now: float, wanted: frozenset[Place]) -> Iterator[Action]:
    soon = now + state.limits.grace_seconds
    if child.generation != state.serving.number:
        yield Stop(child.number, "it is replaced after a reload", soon, "recycled")
    elif child.place not in wanted:
        yield Stop(child.number, "fewer workers are wanted", soon, "recycled")
    elif any(_replaces(other, child) for other in _in(state, child.place)):
        is_memory = _is_large(state.limits, child)
        why = why_due(state.limits, child, now) or "it is replaced"
        # What it executes may take as long as it takes; but not its memory, nor what may never end: a task that has
        # closed the channel has closed everything else, too.
        stop_by = soon if is_memory or child.is_deaf else NEVER
        yield Stop(child.number, why, stop_by, "memory" if is_memory else "recycled")


def _replaces(new: Child, old: Child) -> bool:
    is_later = new.number > old.number and new.generation == old.generation
    return is_later and new.is_ready and new.stage == Stage.SERVING


# --- recycling ---


def _recycle(state: State, now: float) -> Iterator[Action]:
    """One at a time in the whole daemon: the next one when the last replacement serves."""
    if state.coming is not None or _is_replacing(state):
        return
    due = [child for child in state.children if _may_replace(state, child, now)]
    if due:
        oldest = min(due, key=lambda child: child.number)
        yield Spawn(oldest.place, state.serving.number)


def _is_replacing(state: State) -> bool:
    return any(
        not child.is_ready and child.stage == Stage.SERVING and len(_in(state, child.place)) > 1
        for child in state.children
    )


def _may_replace(state: State, child: Child, now: float) -> bool:
    """Alone in its place: one that still drains there is waited for, so that there are never more than two."""
    if child.stage != Stage.SERVING or not child.is_ready or why_due(state.limits, child, now) is None:
        return False
    is_alone = len(_in(state, child.place)) == 1 and child.place in state.serving.places()
    return is_alone and now >= state.resting_until.get(child.place, 0.0)


def why_due(limits: Limits, child: Child, now: float) -> str | None:
    if child.place.role != "worker":
        return None
    if limits.max_tasks is not None and child.ended >= limits.max_tasks:
        return f"it has run {child.ended} tasks"
    if limits.max_age_seconds is not None and now - child.born >= limits.max_age_seconds:
        return f"it is {now - child.born:.0f} s old"
    if _is_large(limits, child):
        return f"it uses {child.memory_bytes / 1024**2:.0f} MB"
    return "it cannot be talked to" if child.is_deaf else None


def _is_large(limits: Limits, child: Child) -> bool:
    return limits.max_memory_bytes is not None and child.memory_bytes >= limits.max_memory_bytes


def _in(state: State, place: Place) -> list[Child]:
    return state.by_place.get(place, [])


# --- after a death ---


@dataclass(frozen=True, slots=True)
class Pauses:
    """Exponential, with jitter that is given in."""

    first_seconds: float = 0.1
    longest_seconds: float = 30.0

    def after(self, failures: int, jitter: float) -> float:
        """`failures` in a row; `jitter` from 0 to 1."""
        pause = min(self.first_seconds * 2.0 ** min(failures - 1, 30), self.longest_seconds)
        return pause * (0.5 + 0.5 * jitter)

    def forgives(self, lived_seconds: float, failures: int) -> bool:
        """A child that lived as long as its place would wait has done more good than harm: the count begins anew. Who
        is killed every few seconds by chance is not kept waiting, also if two or three of them died young; who dies at
        once waits twice as long each time.
        """
        return lived_seconds >= max(self.after(failures + 1, 1.0), 1.0)


def is_crash_loop(deaths: Sequence[float], now: float, *, most: int, seconds: float) -> bool:
    return len([moment for moment in deaths if moment > now - seconds]) >= most
