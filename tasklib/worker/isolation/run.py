"""The run of an isolated task, inside its own process: read the request, call the function in the main thread, send the
outcome, exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import signal
import socket
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic_core import from_json
from structlog.contextvars import bind_contextvars

from tasklib.clock import time, with_real_time
from tasklib.current import CurrentTask, enter_task
from tasklib.errors import TaskNotRegistered
from tasklib.outcomes import CancelInterrupt, Failed, Outcome, Rules, TaskInterrupt, decide
from tasklib.registry import default_registry
from tasklib.runtime.database_clock import DatabaseClock
from tasklib.runtime.observer import WorkerObserver
from tasklib.statements import WorkerStatements
from tasklib.worker.exactly_once import Transactions
from tasklib.worker.execution import Execution
from tasklib.worker.forks import Original
from tasklib.worker.hooks import await_inside_hooks, call_inside_hooks, run_start_hooks, run_stop_hooks
from tasklib.worker.isolation.protocol import (
    CHUNK_BYTES,
    DRAINING,
    STOPS,
    Message,
    Request,
    encoded_outcome,
    import_place,
    line_of,
)
from tasklib.worker.problems import problem_of
from tasklib.worker.served import is_async
from tasklib.worker.task_call import completed, outcome_of, prepared_call, refuse_unfinished
from tasklib.worker.task_context import WorkerTaskContext, describe

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from types import FrameType

    from tasklib.config import Config

EXIT_SECONDS = 1.0  # for the process to end, once everything is sent
BEAT_SECONDS = 0.3  # between two signs of life of a suspect
NOT_FOUND = (
    "the task function {!r} is not there when its module is imported: an isolated task has to be defined by an import "
    "alone, at the top level of a module"
)


class Channel:
    """To the worker. Each message begins a new line, since the last one may have been interrupted."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()  # the task may have threads
        self._identity = self._inode()

    def send(self, message: Message) -> None:
        data = b"\n" + line_of(message)
        with self._lock:
            if self._inode() != self._identity:
                raise OSError(
                    "the task has closed the channel to its worker, and opened something else under its number"
                )
            self._sock.sendall(data)

    def read_request(self) -> bytes:
        return self._read(int.from_bytes(self._read(8)))

    def received(self) -> bytes:
        """What the worker has sent since. Never waits."""
        try:
            return self._sock.recv(64, socket.MSG_DONTWAIT)
        except OSError:
            return b""

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._sock.recv(min(size - len(data), CHUNK_BYTES))
            if not part:
                os._exit(0)  # the worker has ended, or needs it no more
            data += part
        return bytes(data)

    def _inode(self) -> tuple[int, int]:
        found = os.fstat(self._sock.fileno())
        return found.st_dev, found.st_ino


class Run:
    """One task in this process: read it, run it in the main thread, send its outcome."""

    def __init__(self, sock: socket.socket, config: Config) -> None:
        self._channel = Channel(sock)
        self._config = config
        self._interrupt_kind: type[TaskInterrupt] | None = None
        self._is_draining = False
        self._progress: str | None = None
        self._interrupt: Callable[[type[TaskInterrupt]], None] | None = None  # while the function is inside
        self._execution: Execution | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_like_worker = False  # its function is one that usually shares a worker with others
        self._original = Original()

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._on_term)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        request = Request.decode(self._channel.read_request())
        execution = self._execution = Execution(request.claimed, None, is_coroutine=False)
        execution.started, execution.started_at = request.started, request.started_at
        try:
            outcome = self._outcome(execution, request)
        except NotHere as error:
            self._channel.send({"not_here": str(error)})
            _exit()
        copy = self._original.take_copy()
        self._channel.send({
            "outcome": encoded_outcome(outcome), "is_committed": execution.is_committed, "copy": copy and copy.pid,
        })  # fmt: skip
        if self._is_like_worker:
            run_stop_hooks(self._run_async_hook, EXIT_SECONDS)
        _exit()

    # --- what the task sees ---

    def should_stop(self) -> bool:
        self._receive()
        return self._is_draining or self._interrupt_kind is not None

    def _describe(self, execution: Execution, transactions: Transactions) -> CurrentTask:
        return describe(execution, WorkerTaskContext(execution, self.should_stop, transactions, self._note_progress))

    def _note_progress(self, _execution: Execution, progress: str) -> None:
        self._progress = progress
        self._channel.send({"progress": from_json(progress)})

    def _transactions(self, request: Request) -> Transactions:
        clock = DatabaseClock()
        clock.set(*request.clock)
        return Transactions(
            self._config,
            WorkerStatements(self._config),
            clock,
            lambda execution, outcome, now: decide(execution.task, outcome, now, Rules()),
            lambda _: self._progress,
            observer=_RunObserver(self._channel),
        )

    # --- being told to stop ---

    def _on_term(self, _signum: int, _frame: FrameType | None) -> None:
        """If the worker sent it, the channel says why. From any other sender, SIGTERM has its default effect."""
        self._receive()
        if self._interrupt_kind is None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        interrupt, self._interrupt = self._interrupt, None  # once
        if interrupt is not None:
            interrupt(self._interrupt_kind)

    def _receive(self) -> None:
        for number in self._channel.received():
            byte = bytes([number])
            self._is_draining |= byte == DRAINING
            self._interrupt_kind = self._interrupt_kind or STOPS.get(byte)
        execution = self._execution
        if execution is None or self._interrupt_kind is None:
            return
        execution.interrupt_kind = self._interrupt_kind
        if self._interrupt_kind is CancelInterrupt and execution.task.cancel_asked_at is None:
            execution.task = execution.task._replace(cancel_asked_at=execution.started_at)

    # --- running it ---

    def _outcome(self, execution: Execution, request: Request) -> Outcome:
        try:
            _find_function(execution, request.place)
            if not request.is_always_isolated:
                self._become_like_worker()
        except Exception as error:
            if not request.is_always_isolated:
                raise NotHere(f"{type(error).__qualname__}: {error}") from error
            return Failed(problem_of(error, code="UNKNOWN_TASK"), may_retry=False)
        call = prepared_call(execution)
        if isinstance(call, Failed):
            return call
        transactions, task = self._transactions(request), execution.task
        bind_contextvars(
            task_id=str(task.id), task=task.name, queue=task.queue, attempt=task.attempt + 1, worker_id=task.worker_id
        )
        enter_task(functools.partial(self._describe, execution, transactions))
        outcome = self._called(execution, call)
        self._original.end_if_copy(execution.id)
        if execution.is_coroutine:
            return self._own_loop().run_until_complete(transactions.end_async(execution, outcome))
        return transactions.end(execution, outcome)

    def _called(self, execution: Execution, call: Callable[[], Any]) -> Outcome:
        limit = MemoryLimit(execution)
        try:
            with limit:
                value = self._await(call) if execution.is_coroutine else self._call(call)
            return completed(execution, value)
        except BaseException as error:  # noqa: BLE001 - SystemExit and its like are outcomes, too
            return limit.explained(outcome_of(execution, error), error)

    def _call(self, call: Callable[[], Any]) -> object:
        def interrupt(kind: type[TaskInterrupt]) -> None:
            raise kind

        try:
            self._interrupt = interrupt
            self._receive()  # a signal may have come before there was a function to interrupt
            if self._interrupt_kind is not None:
                raise self._interrupt_kind
            return refuse_unfinished(call_inside_hooks(call))
        finally:
            self._interrupt = None

    def _become_like_worker(self) -> None:
        """A function that usually shares a worker with others finds the same conditions here: the worker's hooks have
        run, and a hang is noticed.
        """
        threading.Thread(target=self._beat, name="tasklib-beat", daemon=True).start()
        run_start_hooks(self._run_async_hook, lambda: False)
        self._is_like_worker = True

    def _beat(self) -> None:
        """As long as the interpreter lets other threads run."""
        with contextlib.suppress(OSError):  # the process ends
            while True:
                self._channel.send({"beat": True})
                time.sleep(BEAT_SECONDS)

    def _run_async_hook(self, hook: Callable[[], Coroutine[Any, Any, Any]], gives_up: Callable[[], bool]) -> None:
        loop = self._own_loop()
        future = loop.create_task(hook())
        while not future.done():
            if gives_up():
                future.cancel()
            loop.run_until_complete(asyncio.wait([future], timeout=0.05))
        future.result()

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = with_real_time(asyncio.new_event_loop())
            asyncio.set_event_loop(self._loop)
        return self._loop

    def _await(self, call: Callable[[], Awaitable[Any]]) -> object:
        loop = self._own_loop()
        task = loop.create_task(await_inside_hooks(call))

        def interrupt(_kind: type[TaskInterrupt]) -> None:
            loop.call_soon_threadsafe(task.cancel)

        self._interrupt = interrupt
        self._receive()
        if self._interrupt_kind is not None:
            task.cancel()
        try:
            return loop.run_until_complete(task)
        finally:
            self._interrupt = None


class NotHere(Exception):
    """This process cannot run the task, but its worker can."""


class _RunObserver(WorkerObserver):
    """Tells the worker of the task's own connection. If nothing more is heard, the task may have been committed."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def connected(self, role: str, backend_pid: int) -> None:  # noqa: ARG002 - there is only one
        with contextlib.suppress(OSError):
            self._channel.send({"backend": backend_pid})


class MemoryLimit:
    """`memory_limit_mb`, while the function runs. Memory that was in use before counts, too."""

    def __init__(self, execution: Execution) -> None:
        function = execution.function
        self._megabytes = None if function is None else function.task_options.memory_limit_mb
        self._before = 0
        self._usual: tuple[int, int] | None = None

    def __enter__(self) -> None:
        if self._megabytes is None:
            return
        self._before = _data_megabytes()
        self._usual = resource.getrlimit(resource.RLIMIT_DATA)
        limit, hard = self._megabytes * 2**20, self._usual[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))

    def __exit__(self, *_: object) -> None:
        if self._usual is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._usual)  # to send the outcome takes memory, too

    def explained(self, outcome: Outcome, error: BaseException) -> Outcome:
        if self._megabytes is None or not isinstance(error, MemoryError) or not isinstance(outcome, Failed):
            return outcome
        message = f"memory_limit_mb={self._megabytes} was reached; {self._before} MB were in use before it began"
        text = f"MemoryError: {message}\n{outcome.problem.text.partition(chr(10))[2]}"
        return replace(outcome, problem=replace(outcome.problem, code="MEMORY_LIMIT", message=message, text=text))


def _data_megabytes() -> int:
    """As the kernel counts for the limit; 0 where it does not say."""
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as sizes:  # noqa: PTH123 - a file of the kernel
        return int(sizes.read().split()[5]) * os.sysconf("SC_PAGE_SIZE") // 2**20
    return 0


def _find_function(execution: Execution, place: str) -> None:
    name = execution.task.name
    if name not in default_registry:  # it was registered after the fork server had started
        import_place(place)
    if name not in default_registry:
        raise TaskNotRegistered(NOT_FOUND.format(name))
    execution.function = default_registry.get(name)
    execution.is_coroutine = is_async(execution.function.function)


def _exit() -> NoReturn:
    """Everything is sent. The process ends within a second, even if a full pipe behind stdout would keep it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, EXIT_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)
