"""What the parts of one run of a worker share: configuration, options, sessions, clock and metrics."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasklib.runtime.database_clock import DatabaseClock
from tasklib.runtime.metrics import Counts, WorkerMetrics
from tasklib.runtime.session import Session
from tasklib.statements import WorkerStatements

if TYPE_CHECKING:
    from collections.abc import Callable

    from tasklib.config import Config
    from tasklib.runtime.observer import WorkerObserver
    from tasklib.worker.isolation.suspect_limits import SuspectLimits
    from tasklib.worker.runners import NewLoop
    from tasklib.worker.served import Served

LEASE_TIMEOUT_SHARE = 3  # a renewal that takes longer than a third of the lease is tried again


@dataclass(frozen=True, slots=True)
class Options:
    concurrency: int
    poll_seconds: float
    buffer_size: int | None
    grace_seconds: float
    listen: bool
    duties: bool = True  # False: another process reaps and expires
    suspects_in_processes: bool = False  # the tasks' modules may be imported by another interpreter
    suspect_limits: SuspectLimits | None = None  # of such a process
    new_loop: NewLoop = asyncio.new_event_loop
    has_listener: Callable[[], bool] = lambda: False  # without `listen`: another process listens, and calls `ring`


class Basis:
    """Each loop has a session of its own."""

    def __init__(
        self, config: Config, served: Served, options: Options, observer: WorkerObserver, metrics: WorkerMetrics | None
    ) -> None:
        self.config = config
        self.served = served
        self.options = options
        self.observer = observer
        self.counts = Counts()
        self.metrics = metrics or (self.counts if options.duties else WorkerMetrics())
        self.statements = WorkerStatements(config)
        self.clock = DatabaseClock()
        session = functools.partial(Session, config, observer=observer)
        self.sessions = {
            "claim": session("claim", on_wait=observer.beat),
            "listen": session("listen"),
            "lease": session("lease", timeout_seconds=config.lease_seconds / LEASE_TIMEOUT_SHARE),
            "finish": session("finish", settings="-c lock_timeout=100ms"),
            "duties": session("duties", settings="-c lock_timeout=2s"),
        }
