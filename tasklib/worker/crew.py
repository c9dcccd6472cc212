"""The parts of one run of a worker: who wakes whom, what they tell each other, and in which order they come and go."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasklib.attempt_log import log_attempt
from tasklib.budget import BudgetCheck, connection_budget
from tasklib.clock import time
from tasklib.database import Database
from tasklib.duties.census import Census
from tasklib.duties.expirer import Expirer
from tasklib.duties.promoter import Promoter
from tasklib.duties.reaper import Reaper
from tasklib.duties.rollups import Rollups
from tasklib.duties.rota import Rota
from tasklib.duties.standstill import Standstill
from tasklib.errors import DatabaseUnavailable
from tasklib.log import log, task_log, task_logger
from tasklib.outcomes import (
    CancelInterrupt,
    Completed,
    Interrupted,
    Rules,
    Settlement,
    StopInterrupt,
    decide,
    succeeded,
)
from tasklib.retry import Exponential
from tasklib.statements import WorkerStatements
from tasklib.worker.buffer import Buffer
from tasklib.worker.claimer import Claimer, Menu
from tasklib.worker.clock import DatabaseClock
from tasklib.worker.declaration import Declaration
from tasklib.worker.doorbell import Doorbell
from tasklib.worker.finisher import Finisher
from tasklib.worker.forks import Original, call_in_one_process, tell_of_copy
from tasklib.worker.hooks import run_start_hooks, run_stop_hooks
from tasklib.worker.lease import Lease
from tasklib.worker.listener import Listener
from tasklib.worker.loop import Loop
from tasklib.worker.processes import Processes
from tasklib.worker.runners import CoroutineRunner, ThreadRunner
from tasklib.worker.session import Session
from tasklib.worker.surroundings import WorkerSurroundings, describe
from tasklib.worker.tally import Counts, Tally
from tasklib.worker.transactions import Transactions
from tasklib.worker.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime
    from uuid import UUID

    from tasklib.config import Config
    from tasklib.current import CurrentTask
    from tasklib.outcomes import Outcome
    from tasklib.worker.execution import Execution
    from tasklib.worker.processes import SuspectLimits
    from tasklib.worker.runners import NewLoop, Report
    from tasklib.worker.witness import Witness

ABANDON_AFTER_SECONDS = 5.0  # for what ignores being told to stop
LEASE_TIMEOUT_SHARE = 3  # a renewal that takes longer than a third of the lease is tried again


@dataclass(frozen=True, slots=True)
class Options:
    concurrency: int
    poll_seconds: float
    buffer_size: int | None
    grace_seconds: float
    listen: bool
    duties: bool = True  # False: somebody else reaps and expires
    suspects_in_processes: bool = False  # the tasks' modules may be imported by another interpreter
    suspect_limits: SuspectLimits | None = None  # of such a process
    new_loop: NewLoop = asyncio.new_event_loop
    is_rung: Callable[[], bool] = lambda: False  # by somebody else, who listens for it


class Crew:
    """The parts of one run, and their order of coming and going."""

    def __init__(
        self,
        config: Config,
        menu: Menu,
        options: Options,
        stop_asked: threading.Event,
        *,
        witness: Witness,
        tally: Tally | None = None,
    ) -> None:
        self.stop_asked = stop_asked
        self._witness = witness
        counts = Counts()
        self._tally = tally = tally or (counts if options.duties else Tally())
        self.hurry = threading.Event()
        self._config = config
        self._menu = menu
        self._settled = threading.Event()
        self._database = Database(config)
        statements = WorkerStatements(config)
        self._clock = DatabaseClock()
        session = functools.partial(Session, config, witness=witness)
        self._sessions = {
            "claim": session("claim", on_wait=witness.beat),
            "listen": session("listen"),
            "lease": session("lease", timeout_seconds=config.lease_seconds / LEASE_TIMEOUT_SHARE),
            "finish": session("finish", settings="-c lock_timeout=100ms"),
            "duties": session("duties", settings="-c lock_timeout=2s"),
        }
        self.buffer = Buffer(options.concurrency, lambda: self.claimer.may_start())  # noqa: PLW0108 - it comes later
        self.finisher = Finisher(self._sessions["finish"], statements, self.buffer, self._clock, tally=tally)
        self.lease = Lease(
            config, self._sessions["lease"], statements, buffer=self.buffer, clock=self._clock,
            describe=lambda: (menu.queues, menu.names()), witness=witness, tally=tally,
        )  # fmt: skip
        declaration = Declaration(config, self._sessions["lease"], statements, menu.functions)
        self.lease.before_renewal = declaration.run_once
        listener = Listener(self._sessions["listen"], statements, menu.queues, self.ring, self.hear_cancel)
        self.processes = Processes(
            config, self._clock, self._note_progress, stop_asked, witness,
            for_suspects=options.suspects_in_processes, limits=options.suspect_limits,
        )  # fmt: skip
        self.claimer = Claimer(
            self._sessions["claim"], statements, buffer=self.buffer, lease=self.lease, clock=self._clock,
            finisher=self.finisher, processes=self.processes,
            promoter=Promoter(self._sessions["claim"], statements), menu=menu,
            doorbell=Doorbell(self._sessions["claim"], statements, menu.queues, longest_doubt=options.poll_seconds),
            is_rung=(lambda: listener.is_heard) if options.listen else options.is_rung,
            poll_seconds=options.poll_seconds, buffer_size=options.buffer_size, report=self.report, tally=tally,
        )  # fmt: skip
        self.watch = Watch(self.buffer, self.lease, witness)
        self.buffer.is_behind = self.finisher.settler.is_behind
        self.transactions = Transactions(
            config, statements, self._clock, self._decide, self.finisher.take_progress, witness=witness
        )
        self._original = Original()
        runs = (self.buffer, self.begin, self.report_all, self._describe, self.transactions)
        self.threads = ThreadRunner(*runs, original=self._original, processes=self.processes)
        self.coroutines = CoroutineRunner(*runs, original=self._original, new_loop=options.new_loop)
        budget = connection_budget(config, concurrency=options.concurrency, listen=options.listen)
        self._rollups = Rollups(config, self._sessions["duties"], counts.take)
        duties = (
            BudgetCheck(self._sessions["duties"], budget),
            Reaper(config, self._sessions["duties"], statements, tally=tally),
            Expirer(self._sessions["duties"], statements, tally),
            Census(self._sessions["duties"], statements, menu),
            Standstill(config, self._sessions["duties"], statements, menu.queues),
            self._rollups,
        )
        self.loops = {
            "lease": Loop("lease", self.lease),
            "claim": Loop("claim", self.claimer, self._beat),
            "finish": Loop("finish", self.finisher),
            "watch": Loop("watch", self.watch),
        }
        if options.duties:
            refused = functools.partial(tally.failed, "duties", "refused")
            self.loops["duties"] = Loop("duties", Rota(duties, on_refusal=refused))
        if options.listen:
            self.loops["listen"] = Loop("listen", listener)
        for role, loop in self.loops.items():
            loop.on_failure = tally.failed
            if role in self._sessions:
                loop.answers = functools.partial(getattr, self._sessions[role], "answers")
        self._default_backoff = Exponential(
            config.base_retry_delay_seconds, config.retry_backoff_multiplier, config.max_retry_delay_seconds,
            config.retry_jitter,
        )  # fmt: skip
        self._rules: dict[Any, Rules] = {}
        self._connect()

    def _connect(self) -> None:
        """Who wakes whom."""
        self.buffer.on_work = {False: self.threads.provide, True: self.coroutines.provide}
        self.buffer.on_free = self._slot_free
        self.buffer.on_settled = self._witness.settled
        self.lease.on_regained = self._regained
        self.lease.on_cancel = self._cancel_held
        self.finisher.settler.on_settled = self._after_settlement

    # --- what the parts tell each other ---

    def begin(self, execution: Execution) -> bool:
        """False: it is too late to start it."""
        if execution.task.expires_at is not None and not execution.is_marked and execution.is_late(self._clock.now()):
            return False
        execution.begin(self._config.timeout_delta_seconds)
        self._witness.began(execution)
        if self.finisher.is_resting and not execution.is_marked:
            self.loops["finish"].wake()
        next_at = self.watch.next_at
        if execution.deadline < next_at or self.lease.valid_until < next_at:
            self.loops["watch"].wake()
        return True

    def _describe(self, execution: Execution) -> CurrentTask:
        surroundings = WorkerSurroundings(execution, self.stop_asked, self.transactions, self._note_progress)
        return describe(execution, surroundings)

    def _note_progress(self, execution: Execution, progress: str) -> None:
        if self.finisher.note_progress(execution, progress):
            self.loops["finish"].wake()

    def report(self, execution: Execution, outcome: Outcome) -> None:
        """An execution has ended, or will not begin."""
        self.report_all([(execution, outcome, time.monotonic())])

    def report_all(self, reports: Sequence[Report]) -> None:
        """Those of one turn of the tasks' event loop: what is done for all of them together costs each one little."""
        done: list[tuple[Execution, float]] = []
        reading = self._clock.reading
        is_told = task_logger.isEnabledFor(logging.INFO)
        for execution, outcome, moment in reports:
            self._witness.ended(execution)  # before somebody else can settle it
            if execution.loaded_bytes:
                execution.unload()
            seconds = moment - execution.started if execution.has_begun else 0.0
            if isinstance(outcome, Completed):  # needs neither rules nor the date
                self.finisher.add_success(execution, outcome, moment, reading)
                done.append((execution, seconds))
                if is_told:
                    _tell(execution, succeeded(outcome), seconds)
                continue
            settlement = self._decide(execution, outcome, reading.at(moment))
            self.finisher.add(execution, settlement, moment, reading)
            if settlement.began:
                done.append((execution, seconds))
            else:
                self.buffer.dropped(execution)
            if is_told or settlement.problem is not None:
                _tell(execution, settlement, seconds)
        self.buffer.done(done)
        if self.finisher.is_to_be_woken:
            self.loops["finish"].wake()

    def _decide(self, execution: Execution, outcome: Outcome, now: datetime) -> Settlement:
        function = execution.function
        backoff = (function.task_options.backoff if function is not None else None) or self._default_backoff
        rules = self._rules.get(backoff)
        if rules is None:
            rules = Rules(backoff, self._config.bury_after, self._config.timeout_delta_seconds)
            self._rules[backoff] = rules
        try:
            return call_in_one_process(functools.partial(decide, execution.task, outcome, now, rules))
        except BaseException:  # noqa: BLE001 - the backoff is the user's function
            log.exception("backoff.failed", task=execution.task.name, consequence="the default policy was used")
            return decide(execution.task, outcome, now, Rules(self._default_backoff))

    def _after_settlement(self) -> None:
        self._settled.set()
        if self.claimer.expects_more_when_idle() and self.buffer.is_idle():
            self.loops["claim"].wake()  # it may have waited for the settlements

    def _slot_free(self) -> None:
        if self.claimer.expects_more() or self.buffer.has_careful():
            self.loops["claim"].wake()

    def _beat(self) -> None:
        self._witness.beat()
        self._witness.counts(*self.buffer.counts())
        self._tally.rounds({name: loop.beats for name, loop in self.loops.items()})
        self.processes.stop_if_unused()
        copy = self._original.take_copy()
        if copy is not None:
            tell_of_copy(copy)

    def ring(self) -> None:
        """There may be work."""
        self.claimer.ring()
        self.loops["claim"].wake()

    def _regained(self) -> None:
        self.claimer.distrust()
        self.loops["claim"].wake()

    def hear_cancel(self, task_id: UUID) -> None:
        for each in self.buffer.held():
            if each.id == task_id:
                self.loops["lease"].wake()  # a notification is a hint: the row will tell

    def _cancel_held(self, execution: Execution) -> None:
        if execution.task.cancel_asked_at is not None:
            return
        execution.ask_to_cancel(self._clock.now(), self._config.timeout_delta_seconds)
        self._witness.must_end_by(execution, execution.must_end_by)
        execution.interrupt(CancelInterrupt)
        self.loops["watch"].wake()
        for waiting in self.buffer.remove_waiting([execution]):
            self.report(waiting, Interrupted(began=waiting.is_marked, ran=False))

    def pause(self) -> None:
        """Claim nothing, and give back what has not started."""
        for each in self.buffer.pause():
            self.report(each, Interrupted(began=each.is_marked, ran=False))
        self.loops["claim"].wake()  # nobody needs to ring for it

    def resume(self) -> None:
        self.buffer.resume()
        self.ring()

    # --- coming and going ---

    def start(self) -> bool:
        """False: it was told to stop before there was a database."""
        self.processes.start(self._menu.isolated(), self._menu.functions())
        self.coroutines.start()
        try:
            if not self._wait_for_schema():
                self.coroutines.stop(ABANDON_AFTER_SECONDS)
                self.processes.stop()
                return False
            run_start_hooks(self.coroutines, self.stop_asked.is_set)
            self.processes.wait_until_ready()
        except BaseException:
            run_stop_hooks(self.coroutines, ABANDON_AFTER_SECONDS)
            self.coroutines.stop(ABANDON_AFTER_SECONDS)
            self.processes.stop()
            raise
        for loop in self.loops.values():
            loop.start()
        log.info("worker.started", worker_id=self.lease.worker_id, concurrency=self.buffer.concurrency)
        return True

    def _wait_for_schema(self) -> bool:
        """A database that is not there yet is waited for; a schema that does not fit is an error."""
        pause = 0.1
        while not self.stop_asked.is_set():
            try:
                self._database.check_schema()
            except DatabaseUnavailable as error:
                log.warning("database.unavailable", error=str(error).partition("\n")[0])
                self.stop_asked.wait(pause)
                pause = min(pause * 2, 2.0)
            else:
                return True
        return False

    def wait_until_empty(self) -> None:
        """Nothing held, and a look that began afterwards found nothing."""
        while not self.stop_asked.is_set():
            self._settled.clear()
            claimed = self.claimer.claimed
            if self.buffer.is_idle():
                self.claimer.is_drained = False
                self._look_again()
                # What was claimed meanwhile may be ready again: it was not when we looked.
                if self.claimer.is_drained and self.claimer.claimed == claimed:
                    return
            self._settled.wait(0.02)

    def _look_again(self) -> None:
        loop = self.loops["claim"]
        for _ in range(2):  # the round under way may have looked before
            seen = loop.beats
            self.claimer.ring()
            loop.wake()
            while loop.beats == seen and not self.stop_asked.is_set():
                time.sleep(0.001)

    def drain(self, grace_seconds: float) -> None:
        log.info("worker.stopping", executing=len(self.buffer.executing()))
        self.lease.is_stopping = True
        self.claimer.is_open = False
        for each in self.buffer.close():
            self.report(each, Interrupted(began=each.is_marked, ran=False))
        self.loops["claim"].stop()
        self.loops["lease"].wake()
        self.processes.tell_of_stop()
        self._wait_for(lambda: not self.buffer.executing(), grace_seconds, unless=self.hurry)
        for each in self.buffer.executing():
            each.interrupt(StopInterrupt)
        self._wait_for(lambda: not self.buffer.executing(), ABANDON_AFTER_SECONDS)
        self.loops["claim"].join(self._config.database_timeout_seconds)
        self._wait_for(lambda: self.finisher.settler.is_empty, max(grace_seconds, ABANDON_AFTER_SECONDS))
        self._leave(grace_seconds)

    def _leave(self, grace_seconds: float) -> None:
        if not self.finisher.settler.is_empty:
            log.error("outcomes.lost", consequence="they could not be written in time: these tasks will run again")
        if self.buffer.executing():
            self._abandon(grace_seconds)
            return
        run_stop_hooks(self.coroutines, max(grace_seconds, ABANDON_AFTER_SECONDS))
        self.coroutines.stop(ABANDON_AFTER_SECONDS)
        self.processes.stop()
        for loop in self.loops.values():
            loop.stop()
        for loop in self.loops.values():
            loop.join(self._config.database_timeout_seconds)
        self._write_down()
        self._deregister()
        for session in self._sessions.values():
            session.close()
        log.info("worker.stopped", worker_id=self.lease.worker_id)

    def _write_down(self) -> None:
        """Not if that takes a new connection: the database may be away."""
        try:
            if self._sessions["duties"].is_connected:
                self._rollups.run_once()
        except Exception as error:  # noqa: BLE001 - then the last seconds are missing in the statistics
            log.warning("statistics.lost", error=str(error).partition("\n")[0])

    def _deregister(self) -> None:
        try:
            self.lease.give_up()
        except Exception as error:  # noqa: BLE001 - then the lease runs out by itself
            log.warning("worker.not_deregistered", worker_id=self.lease.worker_id, error=str(error))

    def _abandon(self, grace_seconds: float) -> None:
        """What does not stop keeps its lease, in the background, until it does or the process ends: a retry must never
        overlap the old run.
        """
        stuck = self.buffer.executing()
        log.error("worker.abandoned", tasks=[each.task.name for each in stuck], worker_id=self.lease.worker_id)
        threading.Thread(
            target=self._leave_when_idle, args=[grace_seconds], name="tasklib-abandoned", daemon=True
        ).start()

    def _leave_when_idle(self, grace_seconds: float) -> None:
        while not self.buffer.is_idle():
            time.sleep(0.1)
        self._leave(grace_seconds)

    def _wait_for(self, is_so: Callable[[], bool], seconds: float, unless: threading.Event | None = None) -> None:
        deadline = time.monotonic() + seconds
        while not is_so() and time.monotonic() < deadline and not (unless is not None and unless.is_set()):
            self._settled.clear()
            self._settled.wait(0.01)


def _tell(execution: Execution, settlement: Settlement, seconds: float) -> None:
    task = execution.task
    log_attempt(task_log, task, settlement, attempt=task.attempt + 1, seconds=seconds)
