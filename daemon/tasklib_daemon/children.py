"""All child processes of the daemon: they are forked, reaped and talked to here.

The guardian is started here too, because a fork of either kind must close the same things in the new process.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import select
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tasklib_daemon import child_main, scoreboard, signals
from tasklib_daemon.channel import Channel, Message
from tasklib_daemon.child_process import ChildProcess, how_it_ended, reap
from tasklib_daemon.guardian import Guardian, kill_group
from tasklib_daemon.logs import log
from tasklib_daemon.plan import Pauses, Role, Slot, is_crash_loop
from tasklib_daemon.scoreboard import Scoreboard
from tasklib_daemon.stacks import Stacks

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable, Iterator

    from tasklib_daemon.control import ControlServer
    from tasklib_daemon.settings import Restart, Settings
    from tasklib_daemon.signals import Signals

GUARD_SECONDS = 1.0  # before a dead guardian is replaced
SPAWN_AGAIN_SECONDS = 1.0  # after a fork that failed


@dataclass(slots=True)
class SlotHistory:
    """The deaths in a slot, and how long it rests after the last one."""

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
        """Many deaths within `crash_loop_seconds`; or many in a row, however long the slot rests in between, until the
        present child has lived long enough.
        """
        most, pauses = restart.crash_loop_deaths, Pauses(restart.first_seconds, restart.longest_seconds)
        is_dying = self.failures >= most and not pauses.forgives(lived_seconds, self.failures)
        return is_dying or is_crash_loop(self.deaths, now, most=most, seconds=restart.crash_loop_seconds)


class Children:
    def __init__(self) -> None:
        self._mark = f"tasklibd-{uuid.uuid4().hex}"  # the guardian recognises our processes by it
        self._by_id: dict[int, ChildProcess] = {}
        self._last_id = 0
        self._histories: dict[Slot, SlotHistory] = {}
        self._guardian = Guardian(self._mark)
        self._guard_at = math.inf
        self.inputs: list[ControlServer | Signals] = []  # the supervisor polls them, and no child may keep them open

    def __iter__(self) -> Iterator[ChildProcess]:
        return iter([*self._by_id.values()])

    def __getitem__(self, child_id: int) -> ChildProcess:
        return self._by_id[child_id]

    def in_role(self, role: Role) -> list[ChildProcess]:
        return [child for child in self if child.slot.role == role]

    def ready_keepers(self) -> list[ChildProcess]:
        return [child for child in self.in_role("keeper") if child.is_ready]

    @property
    def has_workers(self) -> bool:
        return bool(self.in_role("worker"))

    @property
    def is_executing(self) -> bool:
        return any(child.view is not None and child.view.executing for child in self)

    def is_served(self, slot: Slot) -> bool:
        return self.lived_seconds(slot) > 0

    def lived_seconds(self, slot: Slot) -> float:
        """How long the slot's ready child has lived. Zero: it has none."""
        return max((child.age_seconds for child in self if child.slot == slot and child.is_ready), default=0.0)

    # --- births ---

    def spawn(self, slot: Slot, generation: int, settings: Settings) -> ChildProcess | None:
        """None: there is no memory or no process left, and the slot rests for a moment."""
        try:
            child = self._fork(slot, generation, settings)
        except OSError as error:
            log.error("spawn.failed", role=slot.role, slot=slot.number, error=str(error))
            self.history(slot).resting_until = time.monotonic() + SPAWN_AGAIN_SECONDS
            return None
        log.info(child.event("spawned"), slot=slot.number, pid=child.pid, generation=generation)
        return child

    def _fork(self, slot: Slot, generation: int, settings: Settings) -> ChildProcess:
        self._last_id += 1
        entries = settings.concurrency + scoreboard.SPARE_ENTRIES if slot.role == "worker" else 0
        ours, theirs = Channel.pair()
        child = ChildProcess(
            child_id=self._last_id, slot=slot, generation=generation,
            scoreboard=Scoreboard(entries, name=self._mark), channel=ours, stacks=Stacks(),
        )  # fmt: skip
        setup = child_main.ChildSetup(
            slot=slot, settings=settings, scoreboard=child.scoreboard, channel=theirs, stacks=child.stacks,
            counters=child.counters, mark=self._mark, parent=os.getpid(),
        )  # fmt: skip
        try:
            with signals.blocked():
                child.pid = os.fork()
                if child.pid == 0:
                    child_main.live(setup, [ours.close, self._guardian.close, self._close_inherited])
        except OSError:
            child.close()
            raise
        finally:
            theirs.close()
        with contextlib.suppress(OSError):  # the child may have done it already, or be dead
            os.setpgid(child.pid, child.pid)
        self._guardian.groups.add(child.pid)
        self._by_id[child.child_id] = child
        return child

    def _close_inherited(self) -> None:
        """In a new process: close all files of the supervisor and of the other children."""
        for each in (*self.inputs, *self):
            each.close()

    # --- deaths ---

    def reap(self) -> Iterator[tuple[ChildProcess, int]]:
        """Each child that has died, with its status from `waitpid`. Adopted orphans are reaped as well."""
        by_pid = {child.pid: child for child in self}
        for pid, status in reap(is_ours=by_pid.__contains__):
            if pid in by_pid:
                self._guardian.groups.remove(pid)
                del self._by_id[by_pid[pid].child_id]
                yield by_pid[pid], status
            elif pid == self._guardian.pid:
                log.error("guardian.died", how=how_it_ended(status))
                self._guard_at = time.monotonic() + GUARD_SECONDS

    def history(self, slot: Slot) -> SlotHistory:
        return self._histories.setdefault(slot, SlotHistory())

    def resting_until(self) -> dict[Slot, float]:
        return {slot: history.resting_until for slot, history in self._histories.items()}

    def crash_loops(self, slots: Iterable[Slot], restart: Restart) -> list[str]:
        """A sentence about each of these slots whose children die again and again."""
        now = time.monotonic()
        return [
            f"{f'worker {slot.number}' if slot.role == 'worker' else f'the {slot.role}'} died "
            f"{restart.crash_loop_deaths} times or more within {restart.crash_loop_seconds:g} s"
            for slot in slots
            if self.history(slot).is_crash_loop(now, self.lived_seconds(slot), restart)
        ]

    def kill_all(self) -> None:
        for child in self:
            kill_group(child.pid)
        self._guardian.dismiss()

    # --- the guardian ---

    def start_guardian(self) -> None:
        """If no process can be had, it is tried again later."""
        self._guard_at = math.inf
        try:
            self._guardian.start(self._close_inherited)
        except OSError as error:
            log.error("guardian.not_started", error=str(error))
            self._guard_at = time.monotonic() + GUARD_SECONDS

    def replace_guardian(self, now: float) -> None:
        if now >= self._guard_at:
            self.start_guardian()

    # --- messages ---

    def wait(self, timeout_seconds: float) -> None:
        """Until an input can be read, or a channel can be used."""
        poll = select.poll()
        for each in self.inputs:
            poll.register(each.fileno(), select.POLLIN)
        for child in self:
            if not child.channel.is_closed:
                events = select.POLLIN | (select.POLLOUT if child.channel.has_output else 0)
                poll.register(child.channel.fileno(), events)
        poll.poll(max(timeout_seconds, 0.0) * 1000)

    def receive(self) -> Iterator[tuple[ChildProcess, Message]]:
        for child in self:
            child.channel.flush()
            for message in child.channel.receive() if not child.channel.is_closed else ():
                yield child, message

    def send(self, role: Role, message: dict[str, Any], *, is_status: bool = False) -> None:
        for child in self.in_role(role):
            child.channel.send(message, is_status=is_status)

    def signal(self, signum: signal.Signals) -> None:
        for child in self:
            child.signal(signum)

    def read_scoreboards(self) -> None:
        for child in self.in_role("worker"):
            child.view = child.scoreboard.read()

    def log_stacks(self) -> None:
        for child in self:
            log.info(
                child.event("stacks"), slot=child.slot.number, pid=child.pid, stacks=child.stacks.take(),
                running=child.running(),
            )  # fmt: skip
