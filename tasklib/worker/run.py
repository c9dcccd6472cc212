"""One run of a worker: its parts, and how they wake each other. `lifecycle` starts it and lets it drain."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

from tasklib.budget import connection_budget
from tasklib.duties.duty_list import DutyList, DutyOptions
from tasklib.duties.runner import DutyRunner
from tasklib.runtime.loop import Loop
from tasklib.worker.basis import Basis, Options
from tasklib.worker.buffer import Buffer
from tasklib.worker.claimer import Claimer
from tasklib.worker.claims import Claims
from tasklib.worker.declaration import Declaration
from tasklib.worker.doorbell import Doorbell
from tasklib.worker.exactly_once import Transactions
from tasklib.worker.finish_loop import FinishLoop
from tasklib.worker.forks import Original, tell_of_copy
from tasklib.worker.isolation.processes import IsolatedProcesses
from tasklib.worker.lease import Lease
from tasklib.worker.listener import Listener
from tasklib.worker.policy_watch import PolicyWatch
from tasklib.worker.preparation import Preparation
from tasklib.worker.reconciliation import Reconciliation
from tasklib.worker.reports import Reports
from tasklib.worker.runners import CoroutineRunner, ThreadRunner
from tasklib.worker.sleep import Sleep
from tasklib.worker.suspects import Suspects
from tasklib.worker.task_context import WorkerTaskContext, describe
from tasklib.worker.timeouts import TimeoutWatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from tasklib.config import Config
    from tasklib.current import CurrentTask
    from tasklib.runtime.metrics import WorkerMetrics
    from tasklib.runtime.observer import WorkerObserver
    from tasklib.worker.execution import Execution
    from tasklib.worker.served import Served


class WorkerRun:
    def __init__(
        self,
        config: Config,
        served: Served,
        options: Options,
        stop_asked: threading.Event,
        *,
        observer: WorkerObserver,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        self.stop_asked = stop_asked
        self.hurry = threading.Event()  # the grace is over
        self.settled = threading.Event()  # outcomes were written
        self.basis = basis = Basis(config, served, options, observer, metrics)
        self.loops: dict[str, Loop] = {}
        self.buffer = Buffer(options.concurrency, self._may_start, options.buffer_size)
        self.finish_loop = FinishLoop(
            basis.sessions["finish"], basis.statements, self.buffer, basis.clock, metrics=basis.metrics
        )
        self.lease = Lease(basis, self.buffer)
        timeouts = TimeoutWatch(self.buffer, self.lease, observer)
        self.reports = Reports(
            basis, buffer=self.buffer, finish_loop=self.finish_loop, lease=self.lease, timeouts=timeouts,
            loops=self.loops,
        )  # fmt: skip
        self.processes = IsolatedProcesses(
            config, basis.clock, self.reports.note_progress, stop_asked, observer,
            for_suspects=options.suspects_in_processes, limits=options.suspect_limits,
        )  # fmt: skip
        listener = Listener(basis.sessions["listen"], basis.statements, served.queues, self.ring, self.look_for_cancel)
        self.reconciliation = Reconciliation(basis, self.buffer, self.lease)
        self.claimer = self._new_claimer((lambda: listener.is_heard) if options.listen else options.has_listener)
        self.duties = self._duties()
        self._original = Original()
        self._new_runners()
        self._new_loops(timeouts, listener)
        self._connect()

    def _may_start(self) -> bool:
        return self.reconciliation.may_start()

    def _new_claimer(self, has_listener: Callable[[], bool]) -> Claimer:
        basis, session = self.basis, self.basis.sessions["claim"]
        suspects = Suspects(basis, self.lease, self.buffer, self.processes)
        preparation = Preparation(basis, self.reports, self.finish_loop, self.reconciliation, suspects)
        doorbell = Doorbell(session, basis.statements, basis.served.queues, longest_doubt=basis.options.poll_seconds)
        self.policies = PolicyWatch(basis, self.lease, self.buffer)
        claims = Claims(basis, self.lease, self.reconciliation, preparation, self.policies)
        return Claimer(
            self.reports, self.lease, claims=claims,
            reconciliation=self.reconciliation, preparation=preparation, sleep=Sleep(session, doorbell, has_listener),
        )  # fmt: skip

    def _new_runners(self) -> None:
        basis = self.basis
        self.transactions = Transactions(
            basis.config, basis.statements, basis.clock, self.reports.decide, self.finish_loop.take_progress,
            observer=basis.observer,
        )  # fmt: skip
        common = (self.buffer, self.reports.begin, self.reports.report_all, self._describe, self.transactions)
        self.threads = ThreadRunner(*common, original=self._original, processes=self.processes)
        self.coroutines = CoroutineRunner(*common, original=self._original, new_loop=basis.options.new_loop)

    def _new_loops(self, timeouts: TimeoutWatch, listener: Listener) -> None:
        options = self.basis.options
        self.loops |= {
            "lease": Loop("lease", self.lease),
            "claim": Loop("claim", self.claimer, self._beat),
            "finish": Loop("finish", self.finish_loop),
            "watch": Loop("watch", timeouts),
        }
        if options.duties:
            self.loops["duties"] = Loop("duties", self._duty_runner())
        if options.listen:
            self.loops["listen"] = Loop("listen", listener)
        for role, loop in self.loops.items():
            loop.on_failure = self.basis.metrics.failed
            if role in self.basis.sessions:
                loop.answers = functools.partial(getattr, self.basis.sessions[role], "answers")

    def _duties(self) -> DutyList:
        basis, session = self.basis, self.basis.sessions["duties"]
        budget = connection_budget(basis.config, concurrency=basis.options.concurrency, listen=basis.options.listen)
        options = DutyOptions(basis.served.queues, budget, basis.served.names)
        return DutyList(basis.config, options, session, session, metrics=basis.metrics, take_counts=basis.counts.take)

    def _duty_runner(self) -> DutyRunner:
        services = [each.service for each in (*self.duties.current, *self.duties.history)]
        return DutyRunner(services, on_refusal=functools.partial(self.basis.metrics.failed, "duties", "refused"))

    def _connect(self) -> None:
        """Which part calls which."""
        basis = self.basis
        self.lease.before_renewal = Declaration(basis).run_once
        self.lease.on_regained = self._lease_regained
        self.lease.on_cancel = self.reports.cancel
        self.buffer.on_work = {False: self.threads.provide, True: self.coroutines.provide}
        self.buffer.on_free = self._slot_free
        self.buffer.on_settled = basis.observer.settled
        self.buffer.is_behind = self.finish_loop.outcome_writer.is_behind
        self.finish_loop.outcome_writer.on_settled = self._outcomes_written

    # --- for the owner of the worker ---

    def ring(self) -> None:
        """There may be work."""
        self.claimer.ring()
        self.loops["claim"].wake()

    def look_for_cancel(self, task_id: UUID) -> None:
        """A notification says that this task was cancelled. It is a hint: the lease loop looks at the row."""
        if any(each.id == task_id for each in self.buffer.held()):
            self.loops["lease"].wake()

    def pause(self) -> None:
        """Claim nothing, and give back what has not started."""
        self.reports.give_back(self.buffer.pause())
        self.loops["claim"].wake()  # to disarm the doorbell

    def resume(self) -> None:
        self.buffer.resume()
        self.ring()

    # --- what the parts tell each other ---

    def _describe(self, execution: Execution) -> CurrentTask:
        task_context = WorkerTaskContext(
            execution, self.stop_asked.is_set, self.transactions, self.reports.note_progress
        )
        return describe(execution, task_context)

    def _outcomes_written(self) -> None:
        self.settled.set()
        if self.claimer.expects_more_when_idle() and self.buffer.is_idle():
            self.loops["claim"].wake()  # it may have waited for an idle worker

    def _slot_free(self) -> None:
        if self.claimer.expects_more or self.buffer.has_unprepared():
            self.loops["claim"].wake()

    def _lease_regained(self) -> None:
        self.policies.note_worker_id()
        self.reconciliation.require()
        self.loops["claim"].wake()

    def _beat(self) -> None:
        """After each round of the claim loop."""
        self.basis.observer.beat()
        self.basis.observer.counts(*self.buffer.counts())
        self.basis.metrics.rounds({name: loop.beats for name, loop in self.loops.items()})
        self.processes.stop_if_unused()
        copy = self._original.take_copy()
        if copy is not None:
            tell_of_copy(copy)
