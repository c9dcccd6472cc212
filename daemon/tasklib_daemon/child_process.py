"""A child process as the supervisor knows it: its state, how it is stopped, and how it ended."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from tasklib_daemon import linux
from tasklib_daemon.counters import Counters
from tasklib_daemon.guardian import kill_group
from tasklib_daemon.logs import log
from tasklib_daemon.plan import Cause, ChildView, Overdue, Role, Slot, Stage
from tasklib_daemon.scoreboard import BOOTED, DRAIN, INTERRUPT, Scoreboard, ScoreboardView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from uuid import UUID

    from tasklib_daemon.channel import Channel
    from tasklib_daemon.exit_codes import Exit
    from tasklib_daemon.stacks import Stacks
    from tasklib_daemon.status import ChildState, ChildStatus

    Cancels = Mapping[tuple[UUID, int], float]  # runs (task, token) that were cancelled, and when they must have ended

Happening = Literal["spawned", "ready", "stopping", "hung", "killed", "died", "stacks"]
# Written out, so that a search for the name of an event finds it.
EVENTS: dict[Role, dict[Happening, str]] = {
    "worker": {
        "spawned": "worker.spawned", "ready": "worker.ready", "stopping": "worker.stopping", "hung": "worker.hung",
        "killed": "worker.killed", "died": "worker.died", "stacks": "worker.stacks",
    },
    "keeper": {
        "spawned": "keeper.spawned", "ready": "keeper.ready", "stopping": "keeper.stopping", "hung": "keeper.hung",
        "killed": "keeper.killed", "died": "keeper.died", "stacks": "keeper.stacks",
    },
    "web": {
        "spawned": "web.spawned", "ready": "web.ready", "stopping": "web.stopping", "hung": "web.hung",
        "killed": "web.killed", "died": "web.died", "stacks": "web.stacks",
    },
}  # fmt: skip
# Why a child is killed that was not told to stop before.
_WHY_KILLED: dict[Cause, str] = {
    "hard_timeout": "a task was over its time",
    "cancelled": "a cancelled task did not stop",
    "recycled": "the reload was given up",
    "shutdown": "the daemon stops",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StopProgress:
    """How far a child is on its way out, and why."""

    stage: Stage = Stage.SERVING
    since: float = 0.0
    by: float = math.inf  # when its tasks are interrupted
    why: str | None = None
    cause: Cause | None = None
    guilty: UUID | None = None  # the task for which it was killed


@dataclass(slots=True)
class Usage:
    """What the operating system last said of its memory and CPU time."""

    memory_bytes: int = 0
    cpu_seconds: float = 0.0
    cpu_percent: float = 0.0
    measured_at: float = field(default_factory=time.monotonic)

    def measure(self, pid: int) -> None:
        used, now = linux.usage(pid), time.monotonic()
        if used is not None:
            seconds = max(now - self.measured_at, 0.001)
            self.cpu_percent = round(max(used.cpu_seconds - self.cpu_seconds, 0.0) / seconds * 100, 1)
            self.memory_bytes, self.cpu_seconds, self.measured_at = used.memory_bytes, used.cpu_seconds, now


@dataclass(slots=True, eq=False, kw_only=True)
class ChildProcess:
    child_id: int
    slot: Slot
    generation: int
    scoreboard: Scoreboard
    channel: Channel
    stacks: Stacks
    counters: Counters = field(default_factory=Counters)
    pid: int = 0
    started: float = field(default_factory=time.monotonic)
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    last_message_at: float = 0.0
    is_ready: bool = False
    failure: Exit | None = None  # its own message about its end
    problem: str | None = None  # why it cannot do its whole job, although it lives
    stop: StopProgress = StopProgress()
    usage: Usage = field(default_factory=Usage)
    view: ScoreboardView | None = None  # only of a worker

    @property
    def is_worker(self) -> bool:
        return self.slot.role == "worker"

    @property
    def stage(self) -> Stage:
        return self.stop.stage

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.started

    def event(self, happening: Happening) -> str:
        return EVENTS[self.slot.role][happening]

    def close(self) -> None:
        for each in (self.scoreboard, self.channel, self.stacks, self.counters):
            each.close()

    # --- stopping it ---

    def drain(self, why: str, stop_by: float, cause: Cause) -> None:
        log.info(self.event("stopping"), slot=self.slot.number, pid=self.pid, why=why)
        self.scoreboard.request(DRAIN)
        self._advance(Stage.DRAINING, signal.SIGTERM, why=why, by=stop_by, cause=cause)

    def interrupt(self) -> None:
        log.warning("worker.interrupted", slot=self.slot.number, pid=self.pid)
        self.scoreboard.request(INTERRUPT)
        self._advance(Stage.INTERRUPTED, signal.SIGTERM)

    def abort(self, why: str) -> None:
        log.error(self.event("hung"), slot=self.slot.number, pid=self.pid, why=why, running=self.running())
        self._advance(Stage.ABORTED, signal.SIGABRT, why=why, cause="hang")

    def kill(self, cause: Cause | None, guilty: UUID | None) -> None:
        why = self.stop.why
        if cause is not None and (guilty is not None or why is None):
            why = _WHY_KILLED.get(cause)
        cause = cause or self.stop.cause
        log.warning(self.event("killed"), slot=self.slot.number, pid=self.pid, cause=cause, task_id=guilty)
        self._advance(Stage.KILLED, signal.SIGKILL, why=why, cause=cause, guilty=guilty)

    def _advance(self, stage: Stage, signum: signal.Signals, **changes: Any) -> None:
        self.stop = replace(self.stop, stage=stage, since=time.monotonic(), **changes)
        self.signal(signum)

    def signal(self, signum: signal.Signals) -> None:
        """Its pid cannot belong to another process before we have reaped it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    # --- observing it ---

    def seen(self, now: float, cancels: Cancels | None = None) -> ChildView:
        """What the plan needs to know."""
        board = self.view
        child = ChildView(
            child_id=self.child_id, slot=self.slot, generation=self.generation, started=self.started,
            is_booted=bool(self.last_message_at) or (board is not None and board.phase >= BOOTED),
            is_ready=self.is_ready, is_unreachable=self.channel.is_closed, stage=self.stage,
            stage_since=self.stop.since, stop_by=self.stop.by, stop_cause=self.stop.cause,
            beacon=self.last_message_at, memory_bytes=self.usage.memory_bytes,
        )  # fmt: skip
        if board is None:
            return child
        return replace(
            child, beacon=board.beacon, is_connected=board.is_connected, executing=len(board.executing),
            unwritten=len(board.done), ended=board.ended, overdue=_overdue(board, cancels or {}, now),
        )  # fmt: skip

    def running(self) -> list[dict[str, Any]]:
        """Its tasks, for the log."""
        now, executing = time.monotonic(), self.view.executing if self.view is not None else ()
        return [{"task_id": str(each.task_id), "seconds": round(now - each.started, 2)} for each in executing]

    def status(self, *, restarts: int, is_hung: bool) -> ChildStatus:
        states: dict[bool, ChildState] = {True: "ready", False: "starting"}
        status: ChildStatus = {
            "slot": self.slot.number,
            "pid": self.pid,
            "state": states[self.is_ready] if self.stage == Stage.SERVING else "stopping",
            "started_at": self.started_at.isoformat(),
            "restarts": restarts,
            "memory_bytes": self.usage.memory_bytes,
            "cpu_seconds": self.usage.cpu_seconds,
        }
        return status | self._worker_status(self.view, is_hung=is_hung) if self.view is not None else status

    def _worker_status(self, board: ScoreboardView, *, is_hung: bool) -> ChildStatus:
        return {
            "worker_id": board.worker_id or None,
            "running": len(board.executing),
            "claimed": board.waiting,
            "ended": board.ended,
            "unwritten": len(board.done),
            "connections": len(board.backends),
            "beat_age_seconds": round(max(time.monotonic() - board.beacon, 0.0), 2) if board.beacon else None,
            "cpu_percent": self.usage.cpu_percent,
            "is_hung": is_hung,
        }


def _overdue(board: ScoreboardView, cancels: Cancels, now: float) -> Overdue | None:
    """A task is over its own limit, or over that of a cancel, of which the keeper knows and its worker perhaps not."""
    for task in board.executing:
        if now >= task.must_end_by:
            return Overdue(task.task_id, "cancelled" if task.is_cancelled else "hard_timeout")
        if now >= cancels.get((task.task_id, task.token), math.inf) and not task.is_isolated:
            return Overdue(task.task_id, "cancelled")
    return None


# --- how children end ---


def how_it_ended(status: int, why: str | None = None) -> str:
    """In words, for the record of the attempt. `status` is from `waitpid`; `why` is given if we killed the child."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    if why is not None:
        return f"killed by {name}: {why}"
    return f"killed by {name}" + (", perhaps out of memory" if name == "SIGKILL" else "")


def reap(is_ours: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
    """The pid and status of each process that has ended, adopted orphans included. The whole process group of a child
    of ours is killed.
    """
    with contextlib.suppress(ChildProcessError):
        while (dead := _next_dead(is_ours)) is not None:
            yield dead


def _next_dead(is_ours: Callable[[int], bool]) -> tuple[int, int] | None:
    """The group is killed before the child is reaped: until then its number cannot belong to another group."""
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
