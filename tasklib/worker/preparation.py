"""Prepares executions that cannot start as they were claimed: fetches large arguments, marks tasks as `running` that
must not run twice, and gives processes to suspects. All other executions start without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from tasklib.database_errors import is_connection_lost
from tasklib.outcomes import Expired, Failed, Interrupted
from tasklib.worker.problems import problem_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tasklib.worker.basis import Basis
    from tasklib.worker.execution import Execution
    from tasklib.worker.finish_loop import FinishLoop
    from tasklib.worker.reconciliation import Reconciliation
    from tasklib.worker.reports import Reports
    from tasklib.worker.suspects import Suspects

LOCKED_PAUSE_SECONDS = 0.1  # until a task is tried again whose row another session has locked


class Preparation:
    def __init__(
        self,
        basis: Basis,
        reports: Reports,
        finish_loop: FinishLoop,
        reconciliation: Reconciliation,
        suspects: Suspects,
    ) -> None:
        self._session = basis.sessions["claim"]
        self._statements = basis.statements
        self._clock = basis.clock
        self._finish_loop = finish_loop
        self._reports = reports
        self._buffer = reports.buffer
        self._reconciliation = reconciliation
        self.suspects = suspects

    def add(self, executions: Iterable[Execution]) -> None:
        """Put executions into the buffer, and prepare those that have a slot."""
        self._reports.give_back(self._buffer.add(executions))
        self.run()

    def run(self) -> None:
        """Prepare the executions for which there is a slot."""
        if not self._buffer.has_unprepared():
            return
        self.suspects.offer_processes()
        while (execution := self._buffer.next_to_prepare()) is not None:
            if execution.is_late(self._clock.now()):
                self._reports.report(execution, Expired())
            elif self._load(execution) and self._mark(execution) and not self._buffer.admit(execution):
                self._reports.give_back([execution])
        self._buffer.wake_runners()  # other executions were held back meanwhile

    def _load(self, execution: Execution) -> bool:
        """False: it was reported or dropped. Arguments that cannot be fetched fail their own task."""
        if execution.is_loaded:
            return True
        try:
            found = self._session.run(self._statements.arguments(execution.task))
        except (psycopg.Error, MemoryError) as error:
            if isinstance(error, psycopg.Error) and is_connection_lost(error):
                self._reports.give_back([execution])
                raise
            problem = problem_of(error, code="UNREADABLE_ARGUMENTS")
            self._reports.report(execution, Failed(problem, may_retry=False))
            return False
        if found is None:
            self._drop(execution)
            return False
        execution.load(*found)
        return True

    def _mark(self, execution: Execution) -> bool:
        """False: it was reported or dropped, or has to wait."""
        if not execution.needs_mark:
            return True
        execution.started_at = self._clock.now()
        try:
            marks = self._finish_loop.mark([execution], self._session)
        except psycopg.Error:
            self._reconciliation.require()
            self._reports.report(execution, Interrupted(began=True, ran=False))  # it may be marked
            raise
        if execution.id not in marks:
            self._drop(execution)
        elif not execution.is_marked and not self._buffer.postpone(execution, LOCKED_PAUSE_SECONDS):
            self._reports.give_back([execution])
        return execution.is_marked

    def _drop(self, execution: Execution) -> None:
        """The database has given it to another worker."""
        self._buffer.dropped(execution)
        self._buffer.settled([execution])
        self._reconciliation.forget_claims([execution])
