"""Every duty, declared once: what has to be done for all workers, by embedded workers and by the keepers of daemons.

Each duty's own module says how often it runs. A duty that is `once_per_cluster` is run by the elected keeper only.
Embedded workers hold no election, and all of them run it: two at once do no harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasklib.budget import Budget, BudgetCheck
from tasklib.duties.expirer import Expirer
from tasklib.duties.janitor import Janitor, Retention
from tasklib.duties.reaper import KEEP_DEAD_SECONDS, Reaper
from tasklib.duties.rollups import Rollups
from tasklib.duties.standstill import Standstill
from tasklib.duties.statements import KeeperStatements
from tasklib.duties.unserved_names import PAUSE_SECONDS, UnservedNames
from tasklib.statements import WorkerStatements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tasklib.config import Config
    from tasklib.runtime.loop import Service
    from tasklib.runtime.metrics import Amounts, WorkerMetrics
    from tasklib.runtime.session import Session


@dataclass(frozen=True, slots=True)
class Duty:
    service: Service
    once_per_cluster: bool = False
    after_seconds: float = 0.0  # in office; before that, an elected keeper does not run it


@dataclass(frozen=True, slots=True)
class DutyOptions:
    """How the duties of an embedded worker and of a keeper differ."""

    queues: Sequence[str] | None  # that are served; None: all
    budget: Budget  # of connections
    served_names: Callable[[], Sequence[str]] | None = None  # of this process; None: it looks at all queues
    unserved_seconds: float = PAUSE_SECONDS  # between two looks for names that no worker serves
    keep_dead_seconds: float | None = KEEP_DEAD_SECONDS
    retention: Retention | None = None  # None: nothing is pruned here


class DutyList:
    """`current` run on one connection. `history`, on another where there is one, write down and delete the past."""

    def __init__(
        self,
        config: Config,
        options: DutyOptions,
        session: Session,
        history_session: Session,
        *,
        metrics: WorkerMetrics,
        take_counts: Callable[[], Amounts],
    ) -> None:
        statements = WorkerStatements(config)
        self.unserved_names = UnservedNames(
            session,
            statements,
            None if options.served_names is None else options.queues,
            options.served_names,
            pause_seconds=options.unserved_seconds,
        )
        self.standstill = Standstill(config, session, statements, options.queues)
        self.rollups = Rollups(config, history_session, take_counts)
        reaper = Reaper(config, session, statements, keep_dead_seconds=options.keep_dead_seconds, metrics=metrics)
        self.current = [
            Duty(BudgetCheck(session, options.budget)),
            Duty(reaper, once_per_cluster=True),
            Duty(Expirer(session, statements, metrics), once_per_cluster=True),
            Duty(self.unserved_names, once_per_cluster=True, after_seconds=options.unserved_seconds),
            Duty(self.standstill),
        ]
        self.history = [Duty(self.rollups)]
        if options.retention is not None:
            janitor = Janitor(history_session, KeeperStatements(config), options.retention)
            self.history.append(Duty(janitor, once_per_cluster=True))
