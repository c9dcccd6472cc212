"""How far the daemon is between its start and its end, and what it has been asked to do."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tasklib_daemon.exit_codes import Exit, ExitCode
from tasklib_daemon.logs import log
from tasklib_daemon.plan import Shutdown

if TYPE_CHECKING:
    from tasklib_daemon.sdnotify import Phase
    from tasklib_daemon.status import DaemonState


@dataclass(slots=True)
class Lifecycle:
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    has_started: bool = False  # every wanted child was ready at once
    is_paused: bool = False
    wants_reload: bool = False
    shutdown: Shutdown | None = None
    failure: Exit | None = None  # why it could not start
    is_over: bool = False
    awake_since: float = -math.inf  # when the supervisor was last resumed

    @property
    def exit_code(self) -> int:
        return int(self.failure.code if self.failure is not None else ExitCode.OK)

    def finish_start(self) -> None:
        self.has_started = True
        log.info("daemon.ready", seconds=round((datetime.now(UTC) - self.started_at).total_seconds(), 2))

    # --- stopping ---

    def stop(self, grace_seconds: float) -> None:
        """The first time: drain. The second time: the grace is over. The third time: at once."""
        now = time.monotonic()
        if self.shutdown is None or math.isinf(self.shutdown.interrupt_at):
            self.shutdown = Shutdown(now + grace_seconds)
        else:
            self.shutdown = Shutdown(now, is_immediate=now >= self.shutdown.interrupt_at)

    def drain(self) -> None:
        """For as long as the tasks need."""
        self.shutdown = self.shutdown or Shutdown(math.inf)

    def stop_at_once(self) -> None:
        self.shutdown = Shutdown(time.monotonic(), is_immediate=True)

    def give_up(self, failure: Exit) -> None:
        """Only at the first start: a restart cures none of these errors, and the operator is watching."""
        if self.failure is None:
            self.failure = failure
        self.stop_at_once()

    def log_end(self) -> None:
        """The last line of the log. The reason why the daemon could not start comes last, so that it is seen."""
        if self.failure is None:
            log.info("daemon.stopped", code=self.exit_code)
        else:
            log.error("daemon.failed", message=self.failure.message, code=int(self.failure.code))

    def note_workers(self, now: float, *, has_workers: bool) -> None:
        """The time that the keeper has for its recoveries counts from when the last worker is gone."""
        if self.shutdown is not None and self.shutdown.workers_gone_at is None and not has_workers:
            self.shutdown = replace(self.shutdown, workers_gone_at=now)

    # --- describing it ---

    def state(self, *, has_workers: bool) -> DaemonState:
        if self.shutdown is not None:
            is_late = self.shutdown.is_immediate or time.monotonic() >= self.shutdown.interrupt_at
            return "stopping" if is_late or not has_workers else "draining"
        if not self.has_started:
            return "starting"
        return "paused" if self.is_paused else "running"

    def phase(self, *, is_reloading: bool) -> Phase:
        """The state in a service manager's words."""
        if self.shutdown is not None:
            return "stopping"
        if not self.has_started:
            return "starting"
        return "reloading" if is_reloading else "running"
