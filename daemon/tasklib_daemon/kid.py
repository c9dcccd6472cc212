"""A child process, as its parent knows it: how it is, how it is signalled, and how it ended."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tasklib_daemon import kernel
from tasklib_daemon.guardian import kill_group
from tasklib_daemon.ledger import Ledger
from tasklib_daemon.page import BOOTED, SERVE
from tasklib_daemon.plan import Child, Overdue, Pauses, Stage, is_crash_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from uuid import UUID

    from tasklib_daemon.channel import Channel
    from tasklib_daemon.exits import Exit
    from tasklib_daemon.page import Page, PageView
    from tasklib_daemon.plan import Cause, Place
    from tasklib_daemon.settings import Restart
    from tasklib_daemon.stacks import Stacks
    from tasklib_daemon.status import ChildState, ChildStatus

    Cancels = Mapping[tuple[UUID, int], float]  # runs (task, token) asked to stop: by when they must have ended


@dataclass(slots=True, eq=False)
class Kid:
    number: int
    place: Place
    generation: int
    page: Page
    channel: Channel
    stacks: Stacks
    ledger: Ledger = field(default_factory=Ledger)
    pid: int = 0
    born: float = field(default_factory=time.monotonic)
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    heard_at: float = 0.0  # its last message
    is_ready: bool = False
    failure: Exit | None = None  # what it said before it ended
    problem: str | None = None  # why it cannot do all that it should, though it lives
    stage: Stage = Stage.SERVING
    since: float = 0.0
    stop_by: float = math.inf
    why: str | None = None
    cause: Cause | None = None
    guilty: UUID | None = None
    view: PageView | None = None
    memory_bytes: int = 0
    cpu_seconds: float = 0.0
    cpu_percent: float = 0.0
    measured_at: float = field(default_factory=time.monotonic)

    @property
    def is_worker(self) -> bool:
        return self.place.role == "worker"

    def close(self) -> None:
        self.page.close()
        self.channel.close()
        self.stacks.close()
        self.ledger.close()

    # --- telling it ---

    def advance(self, stage: Stage, signum: signal.Signals, wish: int = SERVE) -> None:
        """The signal says "look", the page what is wished."""
        self.stage, self.since = stage, time.monotonic()
        self.page.ask(wish)
        self.signal(signum)

    def signal(self, signum: signal.Signals) -> None:
        """It is ours until we have reaped it: its number is nobody else's."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    # --- looking at it ---

    def look(self) -> None:
        if self.is_worker:
            self.view = self.page.read()

    def measure(self) -> None:
        used, now = kernel.usage(self.pid), time.monotonic()
        if used is not None:
            seconds = max(now - self.measured_at, 0.001)
            self.cpu_percent = round(max(used.cpu_seconds - self.cpu_seconds, 0.0) / seconds * 100, 1)
            self.memory_bytes, self.cpu_seconds, self.measured_at = used.memory_bytes, used.cpu_seconds, now

    def seen(self, cancels: Cancels, now: float) -> Child:
        """For the plan."""
        view = self.view
        is_booted = bool(self.heard_at) or (view is not None and view.phase >= BOOTED)
        child = Child(
            self.number, self.place, self.generation, self.born, is_booted, self.is_ready, self.channel.is_closed,
            self.stage, self.since, self.stop_by, self.cause, self.heard_at, memory_bytes=self.memory_bytes,
        )  # fmt: skip
        if view is None:
            return child
        return replace(
            child, beacon=view.beacon, is_connected=view.is_connected, executing=len(view.executing),
            unwritten=len(view.done), ended=view.ended, overdue=_overdue(view, cancels, now),
        )  # fmt: skip

    def running(self) -> list[dict[str, Any]]:
        """For the log."""
        now, executing = time.monotonic(), self.view.executing if self.view is not None else ()
        return [{"task_id": str(each.task_id), "seconds": round(now - each.started, 2)} for each in executing]

    def status(self, *, restarts: int, is_hung: bool) -> ChildStatus:
        states: dict[bool, ChildState] = {True: "ready", False: "starting"}
        status: ChildStatus = {
            "slot": self.place.slot,
            "pid": self.pid,
            "state": states[self.is_ready] if self.stage == Stage.SERVING else "stopping",
            "started_at": self.started_at.isoformat(),
            "restarts": restarts,
            "memory_bytes": self.memory_bytes,
            "cpu_seconds": self.cpu_seconds,
        }
        return status | self._worker_status(self.view, is_hung=is_hung) if self.view is not None else status

    def _worker_status(self, view: PageView, *, is_hung: bool) -> ChildStatus:
        return {
            "worker_id": view.worker_id or None,
            "running": len(view.executing),
            "claimed": view.waiting,
            "ended": view.ended,
            "unwritten": len(view.done),
            "connections": len(view.backends),
            "beat_age_seconds": round(max(time.monotonic() - view.beacon, 0.0), 2) if view.beacon else None,
            "cpu_percent": self.cpu_percent,
            "is_hung": is_hung,
        }


def _overdue(view: PageView, cancels: Cancels, now: float) -> Overdue | None:
    """By its own limit; or by a cancel that the keeper heard, and its worker perhaps not."""
    for slot in view.executing:
        if now >= slot.must_end_by:
            return Overdue(slot.task_id, "cancelled" if slot.is_cancelled else "hard_timeout")
        if now >= cancels.get((slot.task_id, slot.token), math.inf) and not slot.is_isolated:
            return Overdue(slot.task_id, "cancelled")
    return None


@dataclass(slots=True)
class History:
    """The deaths in a place, and how long it rests after the last one."""

    failures: int = 0  # in a row
    restarts: int = 0
    deaths: list[float] = field(default_factory=list)
    resting_until: float = 0.0

    def add(self, now: float, lived_seconds: float, restart: Restart) -> None:
        pauses = Pauses(restart.first_seconds, restart.longest_seconds)
        self.failures = 1 if pauses.forgives(lived_seconds, self.failures) else self.failures + 1
        self.resting_until = now + pauses.after(self.failures, random.random())  # noqa: S311 - spreads load
        self.restarts += 1
        self.deaths = [*(each for each in self.deaths if each > now - restart.crash_loop_seconds), now]

    def is_crash_loop(self, now: float, lived_seconds: float, restart: Restart) -> bool:
        """So many deaths in so short a time; or so many in a row, however long it rests in between, until the one that
        is there now has lived long enough.
        """
        most, pauses = restart.crash_loop_deaths, Pauses(restart.first_seconds, restart.longest_seconds)
        is_dying = self.failures >= most and not pauses.forgives(lived_seconds, self.failures)
        return is_dying or is_crash_loop(self.deaths, now, most=most, seconds=restart.crash_loop_seconds)


# --- how children end ---


def how_it_ended(status: int, why: str | None = None) -> str:
    """In words, for the attempt's record: from what `waitpid` tells, and why, if it was we who did it."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    if why is not None:
        return f"killed by {name}: {why}"
    return f"killed by {name}" + (", perhaps out of memory" if name == "SIGKILL" else "")


def reap(is_ours: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
    """Those that have ended, each with its status, strangers included; the group of a child of ours is killed too."""
    with contextlib.suppress(ChildProcessError):
        while (dead := _next_dead(is_ours)) is not None:
            yield dead


def _next_dead(is_ours: Callable[[int], bool]) -> tuple[int, int] | None:
    """Its group is killed while it is a zombie: until it is reaped, the group's number is nobody else's."""
    if not hasattr(os, "waitid"):  # macOS has none that we could use
        pid, status = os.waitpid(-1, os.WNOHANG)
        if is_ours(pid):
            kill_group(pid)
        return (pid, status) if pid else None
    found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    if is_ours(found.si_pid):
        kill_group(found.si_pid)
    return os.waitpid(found.si_pid, 0)
