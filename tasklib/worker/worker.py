"""TaskWorker: puts the parts together, starts them, and drains them. It decides nothing itself."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tasklib.config import Config
from tasklib.database import Database
from tasklib.duties.census import Census
from tasklib.duties.expirer import Expirer
from tasklib.duties.promoter import Promoter
from tasklib.duties.reaper import Reaper
from tasklib.errors import DatabaseUnavailable, InvalidConfig, InvalidOptions
from tasklib.log import log, logger
from tasklib.names import check_queue
from tasklib.outcomes import Interrupted, Rules, Settlement, StopInterrupt, decide
from tasklib.registry import default_registry
from tasklib.retry import Exponential
from tasklib.statements import WorkerStatements
from tasklib.task import TaskFunction
from tasklib.worker.buffer import Buffer
from tasklib.worker.claimer import Claimer, Menu
from tasklib.worker.clock import DatabaseClock
from tasklib.worker.finisher import Finisher
from tasklib.worker.hooks import run_start_hooks, run_stop_hooks
from tasklib.worker.lease import Lease, cancel_execution
from tasklib.worker.listener import Listener
from tasklib.worker.loop import Loop
from tasklib.worker.runners import CoroutineRunner, ThreadRunner
from tasklib.worker.session import Session
from tasklib.worker.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from uuid import UUID

    from tasklib.outcomes import HeldTask, Outcome
    from tasklib.worker.execution import Execution

LONGEST_POLL_SECONDS = 60.0  # an insert that is due later than this does not ring
ABANDON_AFTER_SECONDS = 5.0  # for what ignores being told to stop
AFTER_FAILURE_SECONDS = 2.0  # before a duty that failed is tried again
LEASE_TIMEOUT_SHARE = 3  # a renewal that takes longer than a third of the lease is tried again


class TaskWorker:
    """Claims tasks and runs them, `concurrency` at a time, until it is stopped.

    worker = TaskWorker(config, concurrency=4)
    await worker.run()      # or worker.run_sync()
    """

    def __init__(
        self,
        config: Config,
        concurrency: int = 1,
        poll_interval_seconds: float = 1.0,
        queues: Sequence[str] | None = None,
        tasks: Iterable[TaskFunction[..., Any] | str] | None = None,
        *,
        buffer_size: int | None = None,
        grace_seconds: float = 30.0,
        listen: bool = True,
        handle_signals: bool | None = None,
    ) -> None:
        _check(config, concurrency, poll_interval_seconds, buffer_size, grace_seconds)
        self._config = config
        self._menu = Menu(default_registry, _checked_queues(queues), _names(tasks))
        self._options = _Options(concurrency, float(poll_interval_seconds), buffer_size, grace_seconds, listen)
        self._handle_signals = handle_signals
        self._stop_asked = threading.Event()
        self._crew: _Crew | None = None
        self._running = threading.Lock()

    @property
    def worker_id(self) -> str | None:
        """Unique for ever; None before it runs."""
        return self._crew.lease.worker_id if self._crew is not None else None

    async def run(self) -> None:
        """Until `stop()`, cancellation, or, in a process that nobody else looks after, SIGINT or SIGTERM."""
        with self._signals():
            await self._in_thread(self._run_until_stopped)

    def run_sync(self) -> None:
        with self._signals():
            self._run_until_stopped()

    async def run_until_empty(self) -> None:
        """Run what can run now, and what that makes runnable at once; then stop. Tasks due later stay."""
        await self._in_thread(self._run_until_empty)

    def run_until_empty_sync(self) -> None:
        self._run_until_empty()

    def stop(self) -> None:
        """Ask it to stop: claim no more, finish what executes within the grace, give back the rest. Returns at once;
        safe from any thread and from signal handlers. A second call ends the grace.
        """
        if self._stop_asked.is_set() and self._crew is not None:
            self._crew.hurry.set()
        self._stop_asked.set()

    # --- how it runs ---

    def _run_until_stopped(self) -> None:
        with self._started(self._options) as crew:
            crew.stop_asked.wait()

    def _run_until_empty(self) -> None:
        with self._started(replace(self._options, listen=False)) as crew:  # it looks by itself
            crew.wait_until_empty()

    @contextlib.contextmanager
    def _started(self, options: _Options) -> Iterator[_Crew]:
        if not self._running.acquire(blocking=False):
            raise InvalidOptions("this TaskWorker is running already: make another one")
        try:
            crew = self._crew = _Crew(self._config, self._menu, options, self._stop_asked)
            if crew.start():
                try:
                    yield crew
                finally:
                    crew.drain(self._options.grace_seconds)
            else:
                yield crew  # stopped before there was a database
        finally:
            self._stop_asked.clear()
            self._running.release()

    async def _in_thread(self, work: Callable[[], None]) -> None:
        """In a thread of the worker's own, so that an application that blocks its loop does not block the worker. To
        cancel is to stop: the drain is waited for.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def tell(error: BaseException | None) -> None:
            if not ended.done():
                ended.set_exception(error) if error is not None else ended.set_result(None)

        def run() -> None:
            error: BaseException | None = None
            try:
                work()
            except BaseException as raised:  # noqa: BLE001 - handed to who awaits
                error = raised
            loop.call_soon_threadsafe(tell, error)

        threading.Thread(target=run, name="tasklib-worker", daemon=True).start()
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            self.stop()
            await asyncio.shield(ended)
            raise

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Drain at SIGINT and SIGTERM, if the process is ours: nobody else handles SIGTERM, and this is its main
        thread. A second one ends the grace.
        """
        is_main = threading.current_thread() is threading.main_thread()
        owns = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if not is_main or not (owns if self._handle_signals is None else self._handle_signals):
            yield
            return
        previous = {each: signal.signal(each, lambda *_: self.stop()) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in previous.items():
                signal.signal(each, handler)


@dataclass(frozen=True, slots=True)
class _Options:
    concurrency: int
    poll_seconds: float
    buffer_size: int | None
    grace_seconds: float
    listen: bool


class _Crew:
    """The parts of one run, and their order of coming and going."""

    def __init__(self, config: Config, menu: Menu, options: _Options, stop_asked: threading.Event) -> None:
        self.stop_asked = stop_asked
        self.hurry = threading.Event()
        self._config = config
        self._menu = menu
        self._settled = threading.Event()
        self._database = Database(config)
        statements = WorkerStatements(config)
        self._clock = DatabaseClock()
        self._sessions = {role: Session(config, role) for role in ("claim", "finish", "listen")} | {
            "lease": Session(config, "lease", timeout_seconds=config.lease_seconds / LEASE_TIMEOUT_SHARE),
            "duties": Session(config, "duties", settings="-c lock_timeout=2s"),
        }
        self.buffer = Buffer(options.concurrency, lambda: self.claimer.may_start())  # noqa: PLW0108 - it comes later
        self.finisher = Finisher(self._sessions["finish"], statements, self.buffer, self._clock)
        self.lease = Lease(
            config, self._sessions["lease"], statements, buffer=self.buffer, clock=self._clock,
            describe=lambda: (menu.queues, menu.names()),
        )  # fmt: skip
        self.claimer = Claimer(
            self._sessions["claim"], statements, buffer=self.buffer, lease=self.lease, clock=self._clock,
            finisher=self.finisher, promoter=Promoter(self._sessions["claim"], statements), menu=menu,
            poll_seconds=options.poll_seconds, buffer_size=options.buffer_size, report=self.report,
        )  # fmt: skip
        self.watch = Watch(self.buffer, self.lease, config.timeout_delta_seconds)
        self.threads = ThreadRunner(self.buffer, self.begin, self.report)
        self.coroutines = CoroutineRunner(self.buffer, self.begin, self.report)
        listener = Listener(self._sessions["listen"], menu.queues, self._ring, self._cancel)
        duties = (
            Reaper(config, self._sessions["duties"], statements),
            Expirer(self._sessions["duties"], statements),
            Census(self._sessions["duties"], statements, menu),
        )
        self.loops = {
            "lease": Loop("lease", self.lease),
            "claim": Loop("claim", self.claimer),
            "finish": Loop("finish", self.finisher),
            "watch": Loop("watch", self.watch),
            "duties": Loop("duties", _Rota(duties)),
        }
        if options.listen:
            self.loops["listen"] = Loop("listen", listener)
        self._default_backoff = Exponential(
            config.base_retry_delay_seconds, config.retry_backoff_multiplier, config.max_retry_delay_seconds,
            config.retry_jitter,
        )  # fmt: skip
        self._connect()

    def _connect(self) -> None:
        """Who wakes whom."""
        self.buffer.on_work = {False: self.threads.provide, True: self.coroutines.provide}
        self.buffer.on_free = self._slot_free
        self.lease.on_regained = self._regained
        self.lease.on_cancel = self._cancel_held
        self.finisher.on_settled = self._settled.set

    # --- what the parts tell each other ---

    def begin(self, execution: Execution) -> bool:
        """False: it is too late to start it."""
        expires_at = execution.task.expires_at
        if expires_at is not None and not execution.is_marked and self._clock.now() >= expires_at:
            return False
        execution.begin(execution.started_at or self._clock.now())
        if self.finisher.is_resting and not execution.is_marked:
            self.loops["finish"].wake()
        if min(execution.deadline, self.lease.valid_until) < self.watch.next_at:
            self.loops["watch"].wake()
        return True

    def report(self, execution: Execution, outcome: Outcome) -> None:
        """An execution has ended, or will not begin."""
        seconds = max(time.monotonic() - execution.started, 0.0)
        settlement = self._decide(execution, outcome)
        self.finisher.add(execution, settlement)
        self.buffer.done(execution, seconds) if settlement.began else self.buffer.dropped(execution)
        self.loops["finish"].wake()
        if logger.isEnabledFor(20) or settlement.problem is not None:
            _tell(execution.task, settlement, seconds)

    def _decide(self, execution: Execution, outcome: Outcome) -> Settlement:
        function = execution.function
        backoff = (function.task_options.backoff if function is not None else None) or self._default_backoff
        rules = Rules(backoff, self._config.bury_after, self._config.timeout_delta_seconds)
        try:
            return decide(execution.task, outcome, self._clock.now(), rules)
        except Exception:  # noqa: BLE001 - the backoff is the user's function
            log.exception("backoff.failed", task=execution.task.name, consequence="the default policy was used")
            return decide(execution.task, outcome, self._clock.now(), Rules(self._default_backoff))

    def _slot_free(self) -> None:
        if self.claimer.expects_more() or self.buffer.has_careful():
            self.loops["claim"].wake()

    def _ring(self) -> None:
        self.claimer.ring()
        self.loops["claim"].wake()

    def _regained(self) -> None:
        self.claimer.distrust()
        self.loops["claim"].wake()

    def _cancel(self, task_id: UUID) -> None:
        for each in self.buffer.held():
            if each.id == task_id:
                self.loops["lease"].wake()  # a notification is a hint: the row will tell

    def _cancel_held(self, execution: Execution) -> None:
        if execution.task.cancel_asked_at is not None:
            return
        cancel_execution(execution, self._clock)
        for waiting in self.buffer.remove_waiting([execution]):
            self.report(waiting, Interrupted(began=waiting.is_marked))

    # --- coming and going ---

    def start(self) -> bool:
        """False: it was told to stop before there was a database."""
        self._coming()
        if not self._wait_for_schema():
            self.coroutines.stop(1.0)
            return False
        run_start_hooks(self.coroutines)
        for loop in self.loops.values():
            loop.start()
        log.info("worker.started", worker_id=self.lease.worker_id, concurrency=self.buffer.concurrency)
        return True

    def _coming(self) -> None:
        self.coroutines.start()

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
            if self.claimer.is_drained and self.buffer.is_idle():
                self.claimer.is_drained = False
                self._look_again()
                if self.claimer.is_drained and self.buffer.is_idle():
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
            self.report(each, Interrupted(began=each.is_marked))
        self.loops["claim"].stop()
        self.loops["lease"].wake()
        self._wait_for(lambda: not self.buffer.executing(), grace_seconds, unless=self.hurry)
        for each in self.buffer.executing():
            each.interrupt(StopInterrupt)
        self._wait_for(lambda: not self.buffer.executing(), ABANDON_AFTER_SECONDS)
        self.loops["claim"].join(self._config.database_timeout_seconds)
        self._wait_for(lambda: self.finisher.is_empty, grace_seconds)
        self._leave()

    def _leave(self) -> None:
        if not self.finisher.is_empty:
            log.error("outcomes.lost", consequence="the database was not there in time: these tasks will run again")
        if self.buffer.executing():
            self._abandon()
            return
        run_stop_hooks(self.coroutines)
        self.coroutines.stop(ABANDON_AFTER_SECONDS)
        for loop in self.loops.values():
            loop.stop()
        for loop in self.loops.values():
            loop.join(self._config.database_timeout_seconds)
        self._deregister()
        for session in self._sessions.values():
            session.close()
        log.info("worker.stopped", worker_id=self.lease.worker_id)

    def _deregister(self) -> None:
        try:
            self.lease.give_up()
        except Exception as error:  # noqa: BLE001 - then the lease runs out by itself
            log.warning("worker.not_deregistered", worker_id=self.lease.worker_id, error=str(error))

    def _abandon(self) -> None:
        """What does not stop keeps its lease, in the background, until it does or the process ends: a retry must never
        overlap the old run.
        """
        stuck = self.buffer.executing()
        log.error("worker.abandoned", tasks=[each.task.name for each in stuck], worker_id=self.lease.worker_id)
        threading.Thread(target=self._leave_when_idle, name="tasklib-abandoned", daemon=True).start()

    def _leave_when_idle(self) -> None:
        while not self.buffer.is_idle():
            time.sleep(0.1)
        self._leave()

    def _wait_for(self, is_so: Callable[[], bool], seconds: float, unless: threading.Event | None = None) -> None:
        deadline = time.monotonic() + seconds
        while not is_so() and time.monotonic() < deadline and not (unless is not None and unless.is_set()):
            self._settled.clear()
            self._settled.wait(0.01)


class _Rota:
    """Several duties on one connection, each at its own pace."""

    def __init__(self, duties: Sequence[Any]) -> None:
        self._due = dict.fromkeys(duties, 0.0)

    def run_once(self) -> float | None:
        for duty, due in self._due.items():
            if time.monotonic() >= due:
                self._due[duty] = time.monotonic() + AFTER_FAILURE_SECONDS  # one that fails does not keep the others
                pause = duty.run_once()
                self._due[duty] = time.monotonic() + (pause or 0.0)
        return max(min(self._due.values()) - time.monotonic(), 0.0)


def _tell(task: HeldTask, settlement: Settlement, seconds: float) -> None:
    """The one line at the end of an attempt. Arguments and results are never in it."""
    word = (settlement.outcome or "released").lower()
    tell = log.warning if settlement.problem is not None and settlement.state != "cancelled" else log.info
    tell(
        f"task.{word}", task=task.name, task_id=task.id, queue=task.queue, attempt=task.attempt + 1,
        seconds=round(seconds, 4), state=str(settlement.state), worker_id=task.worker_id,
        error_code=settlement.problem and settlement.problem.code, due_at=settlement.due_at,
    )  # fmt: skip


def _check(config: Any, concurrency: Any, poll: Any, buffer_size: Any, grace: Any) -> None:
    if not isinstance(config, Config):
        raise InvalidConfig("TaskWorker takes a tasklib.Config first, e.g. tasklib.Config(database_url=...)")
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise InvalidOptions(f"concurrency must be a whole number from 1 on, got {concurrency!r}")
    if not 0 < poll <= LONGEST_POLL_SECONDS:
        raise InvalidOptions(
            f"poll_interval_seconds must be above 0 and at most {LONGEST_POLL_SECONDS:g}, got {poll!r}"
        )
    if buffer_size is not None and (not isinstance(buffer_size, int) or buffer_size < 0):
        raise InvalidOptions(f"buffer_size must be a whole number, or None for an adaptive one, got {buffer_size!r}")
    if grace < 0:
        raise InvalidOptions(f"grace_seconds must not be negative, got {grace!r}")


def _checked_queues(queues: Any) -> list[str] | None:
    if queues is None:
        return None
    if isinstance(queues, str) or not all(isinstance(queue, str) for queue in queues):
        raise InvalidOptions(f"queues must be a list of names, got {queues!r}")
    if not queues:
        raise InvalidOptions("queues is empty: leave it out for every queue")
    return [check_queue(queue) for queue in queues]


def _names(tasks: Any) -> list[str] | None:
    if tasks is None:
        return None
    if isinstance(tasks, str):
        raise InvalidOptions(f"tasks must be a list of task functions or names, got {tasks!r}")
    return [each.name if isinstance(each, TaskFunction) else default_registry.get(each).name for each in tasks]
