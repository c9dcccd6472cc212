"""TaskWorker: what an application sees of a worker. It starts a run, waits, and lets it drain."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tasklib.config import Config
from tasklib.errors import InvalidConfig, InvalidOptions
from tasklib.names import check_queue
from tasklib.registry import default_registry
from tasklib.runtime.observer import WorkerObserver
from tasklib.task import TaskFunction
from tasklib.worker.basis import Options
from tasklib.worker.lifecycle import Lifecycle
from tasklib.worker.run import WorkerRun
from tasklib.worker.served import Served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from uuid import UUID

    from tasklib.runtime.metrics import WorkerMetrics
    from tasklib.worker.isolation.suspect_limits import SuspectLimits
    from tasklib.worker.runners import NewLoop

SHORTEST_POLL_SECONDS = 0.001
LONGEST_POLL_SECONDS = 60.0  # the insert of a task that is due later than this does not ring


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
        duties: bool = True,
        suspects_in_processes: bool = False,
        suspect_limits: SuspectLimits | None = None,
        handle_signals: bool | None = None,
        observer: WorkerObserver | None = None,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        _check(config, concurrency, poll_interval_seconds, buffer_size, grace_seconds)
        self._config = config
        self._served = Served(default_registry, _checked_queues(queues), _names(tasks))
        self._options = Options(
            concurrency, float(poll_interval_seconds), buffer_size, grace_seconds, listen, duties,
            suspects_in_processes, suspect_limits,
        )  # fmt: skip
        self._handle_signals = handle_signals
        self._stop_asked = threading.Event()
        self._run: WorkerRun | None = None
        self._running = threading.Lock()
        self._observer = observer or WorkerObserver()
        self.has_listener = False  # with listen=False: another process listens for it, and calls `ring`
        self.on_full: Callable[[], None] = lambda: None  # called by a `ring` for which it has no capacity: pass it on
        self._metrics = metrics
        self._is_paused = False
        self._pausing = threading.Lock()
        self._is_ready = False
        self._is_ready_or_ended = threading.Event()

    @property
    def worker_id(self) -> str | None:
        """Never used again by another run; None before the first run."""
        return self._run.lease.worker_id if self._run is not None else None

    async def run(self) -> None:
        """Run until `stop()` or cancellation, or until SIGINT or SIGTERM in a process that does not handle SIGTERM."""
        with self._signals():
            await self._in_thread(functools.partial(self._run_until_stopped, new_loop=_loop_like_ours()))

    def run_sync(self) -> None:
        with self._signals():
            self._run_until_stopped()

    async def run_until_empty(self) -> None:
        """Run what can run now, and what that makes runnable at once; then stop. Tasks due later stay."""
        await self._in_thread(functools.partial(self._run_until_empty, new_loop=_loop_like_ours()))

    def run_until_empty_sync(self) -> None:
        self._run_until_empty()

    def stop(self) -> None:
        """Ask it to stop: claim no more, finish what executes within the grace, give back the rest. Returns at once;
        safe from any thread and from signal handlers. A second call ends the grace.
        """
        if self._stop_asked.is_set() and self._run is not None:
            self._run.hurry.set()
        self._stop_asked.set()

    def wait_until_ready(self, timeout: float | None = None) -> bool:
        """True when it can run tasks: connected, registered, and what it holds compared with the database. False: not
        in time, or its run has ended.
        """
        self._is_ready_or_ended.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        return self._is_ready

    # --- for the supervisor of a worker ---

    def ring(self) -> None:
        """There may be work. Called by the process that listens for a worker with listen=False."""
        if self._run is not None and self._run.buffer.is_open:
            self._run.ring()
        else:
            self.on_full()

    def look_for_cancel(self, task_id: UUID) -> None:
        """This task was cancelled: if it is here, look at its row."""
        if self._run is not None:
            self._run.look_for_cancel(task_id)

    def pause(self) -> None:
        """Claim nothing until `resume()`. What has not started is given back at no cost; what executes goes on."""
        with self._pausing:
            self._is_paused = True
            if self._run is not None:
                self._run.pause()

    def resume(self) -> None:
        with self._pausing:
            self._is_paused = False
            if self._run is not None:
                self._run.resume()

    # --- how it runs ---

    def _run_until_stopped(self, new_loop: NewLoop = asyncio.new_event_loop) -> None:
        options = replace(self._options, new_loop=new_loop, has_listener=lambda: self.has_listener)
        with self._started(options):
            self._stop_asked.wait()

    def _run_until_empty(self, new_loop: NewLoop = asyncio.new_event_loop) -> None:
        with self._started(replace(self._options, listen=False, new_loop=new_loop)) as lifecycle:  # it looks by itself
            lifecycle.wait_until_empty()

    @contextlib.contextmanager
    def _started(self, options: Options) -> Iterator[Lifecycle]:
        if not self._running.acquire(blocking=False):
            raise InvalidOptions("this TaskWorker is running already: make another one")
        try:
            lifecycle = Lifecycle(self._new_run(options))
            if lifecycle.start():
                try:
                    yield lifecycle
                finally:
                    lifecycle.drain()
            else:
                yield lifecycle  # it was stopped before the database could be reached
        finally:
            self._is_ready = False
            self._is_ready_or_ended.set()
            self._stop_asked.clear()
            self._running.release()

    def _new_run(self, options: Options) -> WorkerRun:
        self._is_ready_or_ended.clear()
        run = WorkerRun(
            self._config, self._served, options, self._stop_asked, observer=self._observer, metrics=self._metrics
        )
        run.reconciliation.on_done = self._ready
        run.claimer.on_full = lambda: self.on_full()  # noqa: PLW0108 - it may be set later
        with self._pausing:
            self._run = run
            if self._is_paused:
                run.pause()
        return run

    def _ready(self) -> None:
        self._is_ready = True
        self._is_ready_or_ended.set()

    async def _in_thread(self, work: Callable[[], None]) -> None:
        """In a thread of the worker's own, so that an application that blocks its loop does not block the worker. A
        cancellation stops the worker, and waits for the drain.
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
            except BaseException as raised:  # noqa: BLE001 - raised again where `run` is awaited
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(tell, error)

        context = contextvars.copy_context()  # a new thread starts without one
        threading.Thread(target=context.run, args=[run], name="tasklib-worker", daemon=True).start()
        cancelled: asyncio.CancelledError | None = None
        while not ended.done():
            try:
                await asyncio.shield(ended)
            except asyncio.CancelledError as error:  # a second one ends the grace
                cancelled = error
                self.stop()
        if cancelled is not None:
            raise cancelled

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Drain at SIGINT and SIGTERM if this is the main thread and nothing else handles SIGTERM. A second signal ends
        the grace.
        """
        is_main = threading.current_thread() is threading.main_thread()
        owns = is_main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _on_signal)
        if not is_main or not (owns if self._handle_signals is None else self._handle_signals):
            yield
            return
        previous = {} if _signalled else {each: signal.signal(each, _on_signal) for each in _SIGNALS}
        _previous.update(previous)
        _signalled[self] = os.getpid()
        try:
            yield
        finally:
            del _signalled[self]
            if not _signalled:
                for each, handler in _previous.items():
                    signal.signal(each, handler)


def _loop_like_ours() -> NewLoop:
    """Tasks run on a loop of the worker's own, on uvloop if the application does. Another kind of loop may not allow a
    second one.
    """
    own = type(asyncio.get_running_loop())
    return own if own.__module__.partition(".")[0] == "uvloop" else asyncio.new_event_loop


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_previous: dict[signal.Signals, Any] = {}
_signalled: dict[TaskWorker, int] = {}  # the workers of this process that drain at a signal


def _on_signal(signum: int, _frame: object) -> None:
    own = [worker for worker, pid in _signalled.items() if pid == os.getpid()]
    for worker in own:
        worker.stop()
    if not own:  # a process that a task forked has to die of the signal
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def _check(config: Any, concurrency: Any, poll: Any, buffer_size: Any, grace: Any) -> None:
    if not isinstance(config, Config):
        raise InvalidConfig("TaskWorker takes a tasklib.Config first, e.g. tasklib.Config(database_url=...)")
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise InvalidOptions(f"concurrency must be a whole number from 1 on, got {concurrency!r}")
    if isinstance(poll, bool) or not SHORTEST_POLL_SECONDS <= poll <= LONGEST_POLL_SECONDS:
        raise InvalidOptions(
            f"poll_interval_seconds must be a number from {SHORTEST_POLL_SECONDS:g} to {LONGEST_POLL_SECONDS:g}, "
            f"got {poll!r}"
        )
    is_count = isinstance(buffer_size, int) and not isinstance(buffer_size, bool) and buffer_size >= 0
    if buffer_size is not None and not is_count:
        raise InvalidOptions(f"buffer_size must be a whole number, or None for an adaptive one, got {buffer_size!r}")
    if not grace >= 0:  # NaN is not
        raise InvalidOptions(f"grace_seconds must not be negative, got {grace!r}")


def _checked_queues(queues: Any) -> list[str] | None:
    if queues is None:
        return None
    queues = queues if isinstance(queues, str) else list(queues)
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
    names = [each.name if isinstance(each, TaskFunction) else default_registry.get(each).name for each in tasks]
    if not names:
        raise InvalidOptions("tasks is empty: leave it out for every registered one")
    return names
