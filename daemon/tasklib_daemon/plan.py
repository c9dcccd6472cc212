"""Decides what the supervisor does next: a pure function of what it sees. It uses no process, clock or random number.

A slot is a role and a number, such as worker 1. Every wanted slot has one serving child. A second child is in a slot
only to replace the first, which serves until the second is ready. A reload starts a whole new generation of children
in this way, beside the old one. If the new generation does not become ready, the old one stays.
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

INTERRUPT_SECONDS = 10.0  # an interrupted worker tells its tasks to stop, and gives them back
ABORT_SECONDS = 5.0  # an aborted child writes its traceback
SETTLE_SECONDS = 3.0  # the keeper recovers the tasks of killed workers, before it stops too
EXIT_SECONDS = 5.0  # keeper and web stop
WAKE_UP_SECONDS = 5.0  # after a suspended daemon has resumed, its workers first end overdue tasks themselves
NEVER = math.inf


class Slot(NamedTuple):
    """Where a child serves. Its number is the `slot` in the status, in logs and in metrics."""

    role: Role
    number: int


class Stage(IntEnum):
    """How far a child is on its way out."""

    SERVING = 0
    DRAINING = 1  # it claims nothing more, and finishes its tasks
    INTERRUPTED = 2  # it tells its tasks to stop
    ABORTED = 3  # it hangs, and is to leave a traceback
    KILLED = 4


@dataclass(frozen=True, slots=True)
class Overdue:
    """A task that executes, though it had to end by now."""

    task_id: UUID
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildView:
    """What the plan needs to know of a living child. A `child_id` is never used again; a pid may be."""

    child_id: int
    slot: Slot
    generation: int
    started: float
    is_booted: bool = False  # its import is over; from here on it may wait for the database without a limit
    is_ready: bool = False
    is_unreachable: bool = False  # its channel is closed: a task has closed its file descriptors
    stage: Stage = Stage.SERVING
    stage_since: float = 0.0
    stop_by: float = NEVER  # while it drains
    stop_cause: Cause | None = None
    beacon: float = 0.0  # a worker's last round of the claim loop, or a keeper's last message
    is_connected: bool = True
    executing: int = 0
    unwritten: int = 0  # outcomes that are not committed yet
    ended: int = 0
    memory_bytes: int = 0
    overdue: Overdue | None = None

    @property
    def is_worker(self) -> bool:
        return self.slot.role == "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLimits:
    grace_seconds: float = 30.0
    boot_seconds: float = 60.0
    hang_seconds: float = 15.0
    stall_seconds: float = 60.0
    connect_seconds: float = 30.0  # a claim loop that connects to its database may be silent for so long
    max_tasks: int | None = None
    max_age_seconds: float | None = None
    max_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """The children that one version of the settings asks for."""

    number: int
    workers: int
    has_web: bool = True
    has_failed: bool = False  # one of its children died before all were ready

    def slots(self) -> tuple[Slot, ...]:
        workers = [Slot("worker", number) for number in range(1, self.workers + 1)]
        return (*workers, Slot("keeper", 1), *([Slot("web", 1)] if self.has_web else []))


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The daemon stops. Tasks may finish until `interrupt_at`."""

    interrupt_at: float
    is_immediate: bool = False
    workers_gone_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonView:
    """Everything that the plan decides from."""

    serving: Generation
    limits: ChildLimits = ChildLimits()
    coming: Generation | None = None  # while a reload is under way
    children: Sequence[ChildView] = ()
    resting_until: Mapping[Slot, float] = field(default_factory=dict)  # after a death
    shutdown: Shutdown | None = None
    awake_since: float = -math.inf  # the supervisor was suspended before, and perhaps its children too
    has_reports: bool = False  # the keeper has not recovered all tasks of dead workers yet
    by_slot: dict[Slot, list[ChildView]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for child in self.children:
            self.by_slot.setdefault(child.slot, []).append(child)

    def in_slot(self, slot: Slot) -> list[ChildView]:
        return self.by_slot.get(slot, [])


# --- actions ---


@dataclass(frozen=True, slots=True)
class Spawn:
    slot: Slot
    generation: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Let the child finish its tasks and exit."""

    child_id: int
    why: str
    stop_by: float
    cause: Cause


@dataclass(frozen=True, slots=True)
class Interrupt:
    """The grace is over: the worker tells its tasks to stop, and gives them back."""

    child_id: int


@dataclass(frozen=True, slots=True)
class Abort:
    child_id: int
    why: str


@dataclass(frozen=True, slots=True)
class Kill:
    child_id: int
    cause: Cause | None = None  # None: the cause for which it was stopped
    guilty: UUID | None = None  # the task that made it necessary


@dataclass(frozen=True, slots=True)
class FinishReload:
    """The coming generation is ready, and becomes the serving one."""


@dataclass(frozen=True, slots=True)
class AbandonReload:
    """The coming generation does not become ready: the old one stays."""

    why: str | None = None  # None: one of its children died, which is logged already


@dataclass(frozen=True, slots=True)
class ExitDaemon:
    """No child is left."""


Action = Spawn | Stop | Interrupt | Abort | Kill | FinishReload | AbandonReload | ExitDaemon


def plan(view: DaemonView, now: float) -> list[Action]:
    urgent = {child.child_id: action for child in view.children if (action := _enforce_limits(view, child, now))}
    rest = _shut_down(view, view.shutdown, now) if view.shutdown is not None else _serve(view, now)
    return [*urgent.values(), *(action for action in rest if not _is_superseded(action, urgent))]


def _is_superseded(action: Action, urgent: Mapping[int, Action]) -> bool:
    """A child gets one action at a time, except that a kill comes on top of any other."""
    match action:
        case Stop(child_id):
            return child_id in urgent
        case Kill(child_id):
            return isinstance(urgent.get(child_id), Kill)
        case _:
            return False


# --- one child ---


def _enforce_limits(view: DaemonView, child: ChildView, now: float) -> Action | None:
    """These limits hold at any time, also during a reload or a shutdown."""
    if child.stage == Stage.KILLED:
        return None
    if child.overdue is not None and now >= view.awake_since + WAKE_UP_SECONDS:
        return Kill(child.child_id, child.overdue.cause, child.overdue.task_id)
    if child.stage == Stage.ABORTED:
        return Kill(child.child_id) if now >= child.stage_since + ABORT_SECONDS else None
    if child.stage == Stage.INTERRUPTED:
        return Kill(child.child_id) if now >= child.stage_since + INTERRUPT_SECONDS else None
    if child.stage == Stage.DRAINING:
        return _end_drain(view, child, now)
    why = why_hung(view.limits, child, now, awake_since=view.awake_since)
    return Abort(child.child_id, why) if why is not None else None


def _end_drain(view: DaemonView, child: ChildView, now: float) -> Action | None:
    """The drain takes too long; or nothing is left to drain, and the child still does not exit."""
    if not child.is_worker:
        return Kill(child.child_id) if now >= child.stop_by else None
    interrupt_at = child.stop_by if view.shutdown is None else min(child.stop_by, view.shutdown.interrupt_at)
    if not child.executing and not child.unwritten:
        interrupt_at = min(interrupt_at, child.stage_since + view.limits.grace_seconds)
    if now < interrupt_at:
        return None
    # An interrupted task is given back without a charge. One that fills the memory would then fill the next worker's,
    # and so on for ever. A kill counts against it. If several tasks execute, they run alone next time.
    is_filled = child.stop_cause == "memory" and child.executing and view.shutdown is None
    return Kill(child.child_id) if is_filled else Interrupt(child.child_id)


def why_hung(limits: ChildLimits, child: ChildView, now: float, *, awake_since: float = -math.inf) -> str | None:
    """A child that does not boot, a worker whose claim loop makes no progress, or a keeper that sends no messages. A
    long task alone is no hang.
    """
    if not child.is_booted:
        seconds = now - max(child.started, awake_since)
        return f"it has not started within {limits.boot_seconds:g} s" if seconds >= limits.boot_seconds else None
    if child.slot.role == "web" or not child.is_ready:
        return None
    allowed = limits.stall_seconds if child.executing else limits.hang_seconds
    allowed += 0.0 if child.is_connected else limits.connect_seconds
    silent = now - max(child.beacon, child.started, awake_since)
    what = "its claim loop has stood still" if child.is_worker else "it has sent no message"
    return f"{what} for {silent:.1f} s" if silent >= allowed else None


# --- the daemon stops ---


def _shut_down(view: DaemonView, shutdown: Shutdown, now: float) -> Iterator[Action]:
    """Workers stop first. The keeper and the web child stay until all workers are gone and their tasks recovered."""
    workers = [child for child in view.children if child.is_worker]
    if shutdown.is_immediate:
        yield from (Kill(child.child_id, "shutdown") for child in workers if child.stage < Stage.KILLED)
    else:
        yield from _stop_all(workers, shutdown.interrupt_at)
    if workers or _is_settling(view, shutdown, now):
        keeper = Slot("keeper", 1)
        if not view.in_slot(keeper) and now >= view.resting_until.get(keeper, 0.0):
            yield Spawn(keeper, view.serving.number)
    elif not view.children:
        yield ExitDaemon()
    else:
        yield from _stop_all(view.children, now if shutdown.is_immediate else now + EXIT_SECONDS)


def _stop_all(children: Sequence[ChildView], stop_by: float) -> Iterator[Action]:
    serving = (child for child in children if child.stage == Stage.SERVING)
    return (Stop(child.child_id, "the daemon stops", stop_by, "shutdown") for child in serving)


def _is_settling(view: DaemonView, shutdown: Shutdown, now: float) -> bool:
    since = shutdown.workers_gone_at if shutdown.workers_gone_at is not None else now
    return view.has_reports and now < since + SETTLE_SECONDS


# --- the daemon serves ---


def _serve(view: DaemonView, now: float) -> Iterator[Action]:
    if view.coming is not None:
        yield from _reload(view, view.coming, now)
    yield from _fill_slots(view, now)
    yield from _recycle(view, now)


def _reload(view: DaemonView, coming: Generation, now: float) -> list[Action]:
    """All new children are ready before the first old one stops. The web child is an exception, because two processes
    cannot listen on one port.
    """
    new = [child for child in view.children if child.generation == coming.number]
    why = _why_late(view.limits, new, now)
    if coming.has_failed or why is not None:
        kills = (Kill(child.child_id, "recycled") for child in new if child.stage < Stage.KILLED)
        return [*kills, AbandonReload(why)]
    slots = [slot for slot in coming.slots() if slot.role != "web"]
    missing = [slot for slot in slots if not any(child.slot == slot for child in new)]
    is_ready = not missing and all(child.is_ready for child in new)
    return [FinishReload()] if is_ready else [Spawn(slot, coming.number) for slot in missing]


def _why_late(limits: ChildLimits, new: Sequence[ChildView], now: float) -> str | None:
    """A new child has started but is not ready, because a hook does not end or the database is away. A reload must not
    wait for that for ever.
    """
    for child in new:
        seconds = now - child.started
        if not child.is_ready and seconds >= 2 * limits.boot_seconds:
            return f"{child.slot.role} {child.slot.number} is not ready {seconds:.0f} s after its start"
    return None


def _fill_slots(view: DaemonView, now: float) -> Iterator[Action]:
    """Stop children that are not needed, and start one in every slot of the serving generation that has none."""
    wanted = frozenset(view.serving.slots())
    coming = view.coming.number if view.coming is not None else None
    for child in view.children:
        if child.stage == Stage.SERVING and child.generation != coming:
            yield from _stop_if_needless(view, child, now, wanted)
    for slot in view.serving.slots():
        present = [child for child in view.in_slot(slot) if child.generation != coming]
        is_free = not any(child.stage == Stage.SERVING for child in present)
        is_free = is_free and not (slot.role == "web" and present)  # two processes cannot listen on one port
        if is_free and now >= view.resting_until.get(slot, 0.0):
            yield Spawn(slot, view.serving.number)


def _stop_if_needless(view: DaemonView, child: ChildView, now: float, wanted: frozenset[Slot]) -> Iterator[Action]:
    soon = now + view.limits.grace_seconds
    if child.generation != view.serving.number:
        yield Stop(child.child_id, "it is replaced after a reload", soon, "recycled")
    elif child.slot not in wanted:
        yield Stop(child.child_id, "fewer workers are wanted", soon, "recycled")
    elif any(_replaces(other, child) for other in view.in_slot(child.slot)):
        is_large = _is_large(view.limits, child)
        why = why_due(view.limits, child, now) or "it is replaced"
        # Its tasks may take as long as they need. A worker that is too large must free its memory, though; and a task
        # that has closed the channel has closed all other descriptors too, so its worker may never finish.
        stop_by = soon if is_large or child.is_unreachable else NEVER
        yield Stop(child.child_id, why, stop_by, "memory" if is_large else "recycled")


def _replaces(new: ChildView, old: ChildView) -> bool:
    is_later = new.child_id > old.child_id and new.generation == old.generation
    return is_later and new.is_ready and new.stage == Stage.SERVING


# --- recycling ---


def _recycle(view: DaemonView, now: float) -> Iterator[Action]:
    """One worker at a time in the whole daemon. The next one waits until the last replacement serves."""
    due = [child for child in view.children if _may_recycle(view, child, now)]
    if due and view.coming is None and not _is_replacing(view):
        oldest = min(due, key=lambda child: child.child_id)
        yield Spawn(oldest.slot, view.serving.number)


def _is_replacing(view: DaemonView) -> bool:
    return any(
        not child.is_ready and child.stage == Stage.SERVING and len(view.in_slot(child.slot)) > 1
        for child in view.children
    )


def _may_recycle(view: DaemonView, child: ChildView, now: float) -> bool:
    """It is alone in its slot. A draining predecessor goes first, so that a slot never has more than two children."""
    if child.stage != Stage.SERVING or not child.is_ready or why_due(view.limits, child, now) is None:
        return False
    is_alone = len(view.in_slot(child.slot)) == 1 and child.slot in view.serving.slots()
    return is_alone and now >= view.resting_until.get(child.slot, 0.0)


def why_due(limits: ChildLimits, child: ChildView, now: float) -> str | None:
    """Why the worker is to be recycled, if it is."""
    if not child.is_worker:
        return None
    if limits.max_tasks is not None and child.ended >= limits.max_tasks:
        return f"it has run {child.ended} tasks"
    if limits.max_age_seconds is not None and now - child.started >= limits.max_age_seconds:
        return f"it is {now - child.started:.0f} s old"
    if _is_large(limits, child):
        return f"it uses {child.memory_bytes / 1024**2:.0f} MB"
    return "its channel to the supervisor is closed" if child.is_unreachable else None


def _is_large(limits: ChildLimits, child: ChildView) -> bool:
    return limits.max_memory_bytes is not None and child.memory_bytes >= limits.max_memory_bytes


# --- after a death ---


@dataclass(frozen=True, slots=True)
class Pauses:
    """How long a slot rests after deaths: exponential, with a jitter that the caller draws."""

    first_seconds: float = 0.1
    longest_seconds: float = 30.0

    def after(self, failures: int, jitter: float) -> float:
        """`failures` in a row; `jitter` from 0 to 1."""
        pause = min(self.first_seconds * 2.0 ** min(failures - 1, 30), self.longest_seconds)
        return pause * (0.5 + 0.5 * jitter)

    def forgives(self, lived_seconds: float, failures: int) -> bool:
        """A child that lived at least as long as its slot would now rest resets the count. A slot whose children are
        killed every few seconds by chance then rests only briefly. A slot whose children die at once rests twice as
        long each time.
        """
        return lived_seconds >= max(self.after(failures + 1, 1.0), 1.0)


def is_crash_loop(deaths: Sequence[float], now: float, *, most: int, seconds: float) -> bool:
    return len([moment for moment in deaths if moment > now - seconds]) >= most
