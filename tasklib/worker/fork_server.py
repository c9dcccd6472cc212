"""The fork server and its children: `python -m tasklib.worker.fork_server`, or `serve()` in a process that a worker has
forked off (see launching.py).

It imports the modules that define the isolated tasks, and then only forks, waits, signals and tells. No user code runs
in it after the imports, and it has one thread: a fork copies nothing that is in the middle of something. When its
worker is gone, it kills its children's process groups and ends; on Linux, the children also die with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.util
import math
import os
import random
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic_core import from_json, to_json
from structlog.contextvars import bind_contextvars

from tasklib import application
from tasklib.clock import time, with_real_time
from tasklib.config import Config
from tasklib.current import enter_task
from tasklib.errors import TaskNotRegistered
from tasklib.outcomes import CancelInterrupt, Failed, Rules, decide
from tasklib.registry import default_registry
from tasklib.statements import WorkerStatements
from tasklib.worker.claimer import is_async
from tasklib.worker.clock import DatabaseClock
from tasklib.worker.execution import Execution
from tasklib.worker.forks import Original, call_in_one_process
from tasklib.worker.hooks import await_inside_hooks, call_inside_hooks, run_start_hooks, run_stop_hooks
from tasklib.worker.launching import count_sockets
from tasklib.worker.problems import problem_of
from tasklib.worker.processes import DRAINING, IMPORTED_MAIN, NO_ANSWER, STOPS, decoded_order, encoded_outcome
from tasklib.worker.runners import completed, outcome_of, prepared_call, refuse_unfinished
from tasklib.worker.surroundings import WorkerSurroundings, describe
from tasklib.worker.transactions import Transactions
from tasklib.worker.witness import Witness

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import FrameType

    from tasklib.current import CurrentTask
    from tasklib.outcomes import Outcome, TaskInterrupt
    from tasklib.worker.processes import Order, Word

LEAVE_SECONDS = 1.0  # for a child to end, once all is said
BEAT_SECONDS = 0.3  # a sign of life of a suspect
LOOK_SECONDS = 1.0  # for the worker's death, where no descriptor tells of it
MOST_DESCRIPTORS = 16
FIRST_TO_DIE = "500"  # of the kernel's out-of-memory scores: before the worker
_PR_SET_PDEATHSIG = 1


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    serve(control, os.getppid())


def serve(control: socket.socket, parent: int) -> None:
    """Until the worker is gone, or has shut the socket."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGTERM])  # a child hears it when it can answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker is told, and tells
    with contextlib.suppress(Exception):
        faulthandler.enable()  # a child that dies of SIGSEGV leaves its stack in the log
    hello = from_json(_read_line(control))
    try:
        answer = call_in_one_process(functools.partial(_prepare, hello))
    except BaseException as error:  # noqa: BLE001 - whatever a module raises is for the worker to tell
        traceback.print_exc()
        control.sendall(to_json({"error": f"{type(error).__qualname__}: {error}"}) + b"\n")
        return
    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, every page that parent and child share
    try:
        control.sendall(to_json(answer) + b"\n")
    except OSError:
        return  # the worker has died meanwhile
    Server(control, parent, Config(**hello["config"]), _beginning(hello)).run()


def _read_line(sock: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        data = sock.recv(65_536)
        if not data:
            sys.exit(0)  # the worker is gone
        line += data
    return line


def _prepare(hello: Word) -> Word:
    """Import what the tasks need, as the worker did."""
    sys.path[:] = hello["path"]
    os.environ.pop("PYTHONPATH", None)
    if hello["pythonpath"] is not None:
        os.environ["PYTHONPATH"] = hello["pythonpath"]
    _beginning(hello)()
    sockets = count_sockets()
    if hello["is_django"]:
        importlib.import_module("django").setup()
    for place in hello["places"]:
        _import(place)
    if hello["is_initialised"] and not application.is_initialised():
        application.init(Config(**hello["config"]))
    for name in hello["names"]:
        if name not in default_registry:
            raise TaskNotRegistered(_not_found(name))
    own = {threading.main_thread()}
    return {
        "threads": [each.name for each in threading.enumerate() if each not in own],
        "sockets": count_sockets() - sockets,
    }


def _beginning(hello: Word) -> Callable[[], None]:
    """What the worker wants to be called first, here and in each child."""
    if hello["beginning"] is None:
        return lambda: None
    place, arguments = hello["beginning"]
    module, _, function = place.partition(":")
    return functools.partial(getattr(importlib.import_module(module), function), *arguments)


def _import(place: str) -> None:
    """A module by its name; the worker's main program by its file, under a name that keeps it from running."""
    if not os.path.isabs(place):  # noqa: PTH117 - it is a module, mostly
        importlib.import_module(place)
        return
    name = IMPORTED_MAIN
    spec = importlib.util.spec_from_file_location(name, place)
    if name not in sys.modules and spec is not None and spec.loader is not None:
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


def _not_found(name: str) -> str:
    return (
        f"the task function {name!r} is not there when its module is imported: an isolated task has to be defined by "
        f"an import alone, at the top level of a module"
    )


# --- The server ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    number: int
    pid: int
    notice: int
    kill_at: float = math.inf

    def tell(self, word: Word) -> None:
        with contextlib.suppress(OSError):  # nobody is interested any more
            os.write(self.notice, to_json(word) + b"\n")


class Server:
    """Forks, signals, reaps. Children are signalled by their parent and before they are reaped: never a stranger who
    got the number.
    """

    def __init__(self, control: socket.socket, parent: int, config: Config, begin: Callable[[], None]) -> None:
        self._control = control
        self._begin = begin
        self._parent = parent
        self._config = config
        self._heard = b""
        self._received: list[int] = []
        self._runs: dict[int, Run] = {}  # by pid
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        signal.signal(signal.SIGCHLD, _only_wake)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._pid = os.getpid()
        self._life = _pidfd(parent)
        if self._libc is not None and self._life is not None:
            self._libc.prctl(_PR_SET_PDEATHSIG, 0)  # from here on it sees the death, and ends its children's groups

    def run(self) -> None:
        while self._is_wanted():
            self._reap()
            self._kill_late()
        for run in self._runs.values():
            _kill_group(run.pid)

    def _is_wanted(self) -> bool:
        """Wait for whatever comes first. False: the worker is gone."""
        watched = [self._control.fileno(), self._woken, *([] if self._life is None else [self._life])]
        ready, _, _ = select.select(watched, [], [], self._pause())
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
        if self._life in ready or os.getppid() != self._parent:
            return False
        return self._control.fileno() not in ready or self._obey()

    def _pause(self) -> float | None:
        until = min((run.kill_at for run in self._runs.values()), default=math.inf)
        pause = max(until - time.monotonic(), 0.0)
        longest = math.inf if self._life is not None else LOOK_SECONDS
        return None if math.isinf(min(pause, longest)) else min(pause, longest)

    def _obey(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 65_536, MOST_DESCRIPTORS)
        except ConnectionError:
            return False
        for fd in fds:
            os.set_inheritable(fd, False)  # noqa: FBT003 - it takes no keyword
        self._received += fds
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            word = from_json(line)
            if "fork" in word:
                channel, notice, *self._received = self._received
                self._fork(word["fork"], channel, notice)
            else:
                self._stop(word["stop"], word["kill_after"], word.get("signal", signal.SIGTERM))
        return bool(data)

    def _fork(self, number: int, channel: int, notice: int) -> None:
        run = Run(number, 0, notice)
        try:
            run.pid = os.fork()
        except OSError as error:
            run.tell({"error": f"fork: {error}"})
            os.close(notice)
            os.close(channel)
            return
        if run.pid == 0:
            self._be_the_child(run, channel)
        with contextlib.suppress(OSError):  # both do it: whoever comes first, it leads before anybody kills it
            os.setpgid(run.pid, run.pid)
        os.close(channel)
        self._runs[run.pid] = run
        run.tell({"pid": run.pid})

    def _stop(self, number: int, kill_after: float, signum: int) -> None:
        for run in self._runs.values():
            if run.number == number:
                run.kill_at = min(run.kill_at, time.monotonic() + kill_after)
                os.kill(run.pid, signum)

    def _kill_late(self) -> None:
        for run in self._runs.values():
            if time.monotonic() >= run.kill_at:
                run.kill_at = math.inf
                _kill_group(run.pid)

    def _reap(self) -> None:
        while (dead := _reaped()) is not None:
            pid, status = dead
            run = self._runs.pop(pid, None)
            if run is not None:
                run.tell({"status": status})
                os.close(run.notice)

    def _be_the_child(self, own: Run, channel: int) -> NoReturn:
        code = NO_ANSWER
        try:
            self._settle_in(own)
            self._begin()
            Errand(socket.socket(fileno=channel), self._config).run()
            code = 0
        except OSError:
            pass  # there is no way to tell
        except BaseException:  # noqa: BLE001 - it must not go on as a second server
            traceback.print_exc()
        finally:
            os._exit(code)

    def _settle_in(self, own: Run) -> None:
        """Nothing of the server's is left: descriptors, signals, random numbers."""
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        if self._libc is not None:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._pid:  # it has died in between
                os._exit(NO_ANSWER)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._control.close()
        inherited = [self._woken, self._wake, own.notice, *(run.notice for run in self._runs.values())]
        for fd in (*inherited, *self._received, *([] if self._life is None else [self._life])):
            os.close(fd)
        random.seed()
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            numpy_random.seed()
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:  # noqa: PTH123 - a file of the kernel's
            score.write(FIRST_TO_DIE)


def _only_wake(_signum: int, _frame: FrameType | None) -> None:
    """The wake-up descriptor does it."""


def _pidfd(pid: int) -> int | None:
    """Readable when that process is gone. None: this system has no such thing."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _reaped() -> tuple[int, int] | None:
    """A child that has died, and its status. Its group goes first: until it is reaped, nobody else has its number."""
    with contextlib.suppress(ChildProcessError):
        if hasattr(os, "waitid"):  # not on macOS, before Python 3.13
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if dead is None:
                return None
            _kill_group(dead.si_pid)
            return os.waitpid(dead.si_pid, 0)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            _kill_group(pid)
            return pid, status
    return None


# --- A child ---------------------------------------------------------------------------------------------------------


class Channel:
    """To the worker. Words are lines of JSON; each begins a new one, since the last may have been interrupted."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()  # the task may have threads
        self._identity = self._look()

    def say(self, word: Word) -> None:
        data = b"\n" + to_json(word) + b"\n"
        with self._lock:
            if self._look() != self._identity:
                raise OSError("somebody has closed the way to the worker, and opened something else in its place")
            self._sock.sendall(data)

    def read_order(self) -> bytes:
        return self._read(int.from_bytes(self._read(8)))

    def hear(self) -> bytes:
        """What the worker has said since. Never waits."""
        try:
            return self._sock.recv(64, socket.MSG_DONTWAIT)
        except OSError:
            return b""

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._sock.recv(min(size - len(data), 65_536))
            if not part:
                os._exit(0)  # the worker has thought better of it
            data += part
        return bytes(data)

    def _look(self) -> tuple[int, int]:
        found = os.fstat(self._sock.fileno())
        return found.st_dev, found.st_ino


class Errand:
    """One task in this process: read it, run it in the main thread, tell how it ended."""

    def __init__(self, sock: socket.socket, config: Config) -> None:
        self._channel = Channel(sock)
        self._config = config
        self._asked: type[TaskInterrupt] | None = None
        self._is_draining = False
        self._progress: str | None = None
        self._interrupt: Callable[[type[TaskInterrupt]], None] | None = None  # while the function is inside
        self._execution: Execution | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_like_a_worker = False  # its function is one that usually shares a worker with others
        self._original = Original()

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._on_term)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        order = decoded_order(self._channel.read_order())
        execution = self._execution = _execution_of(order)
        try:
            outcome = self._outcome(execution, order)
        except NotHere as error:
            self._channel.say({"not_here": str(error)})
            _leave()
        copy = self._original.take_copy()
        self._channel.say({
            "outcome": encoded_outcome(outcome), "is_committed": execution.is_committed, "copy": copy and copy.pid,
        })  # fmt: skip
        if self._is_like_a_worker:
            run_stop_hooks(_TasksLoop(self._own_loop), LEAVE_SECONDS)
        _leave()

    # --- what the task sees ---

    def should_stop(self) -> bool:
        self._listen()
        return self._is_draining or self._asked is not None

    def _describe(self, execution: Execution, transactions: Transactions) -> CurrentTask:
        stop_asked = _StopAsked(self.should_stop)
        return describe(execution, WorkerSurroundings(execution, stop_asked, transactions, self._note_progress))

    def _note_progress(self, _execution: Execution, progress: str) -> None:
        self._progress = progress
        self._channel.say({"progress": from_json(progress)})

    def _transactions(self, order: Order) -> Transactions:
        clock = DatabaseClock()
        clock.set(*order.clock)
        return Transactions(
            self._config,
            WorkerStatements(self._config),
            clock,
            lambda execution, outcome, now: decide(execution.task, outcome, now, Rules()),
            lambda _: self._progress,
            witness=_Witness(self._channel),
        )

    # --- being told to stop ---

    def _on_term(self, _signum: int, _frame: FrameType | None) -> None:
        """From the worker, with a word on the channel; from anybody else it means what it always means."""
        self._listen()
        if self._asked is None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        interrupt, self._interrupt = self._interrupt, None  # once
        if interrupt is not None:
            interrupt(self._asked)

    def _listen(self) -> None:
        for number in self._channel.hear():
            word = bytes([number])
            self._is_draining |= word == DRAINING
            self._asked = self._asked or STOPS.get(word)
        execution = self._execution
        if execution is None or self._asked is None:
            return
        execution.interrupt_kind = self._asked
        if self._asked is CancelInterrupt and execution.task.cancel_asked_at is None:
            execution.task = execution.task._replace(cancel_asked_at=execution.started_at)

    # --- running it ---

    def _outcome(self, execution: Execution, order: Order) -> Outcome:
        try:
            _find_function(execution, order.place)
            if not order.is_usual:
                self._become_like_a_worker()
        except Exception as error:
            if not order.is_usual:
                raise NotHere(f"{type(error).__qualname__}: {error}") from error
            return Failed(problem_of(error, code="UNKNOWN_TASK"), may_retry=False)
        call = prepared_call(execution)
        if isinstance(call, Failed):
            return call
        transactions, task = self._transactions(order), execution.task
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
        limit = _MemoryLimit(execution)
        try:
            with limit:
                value = self._await(call) if execution.is_coroutine else self._call(call)
            return completed(execution, value)
        except BaseException as error:  # noqa: BLE001 - SystemExit and its kind are outcomes, too
            return limit.explained(outcome_of(execution, error), error)

    def _call(self, call: Callable[[], Any]) -> object:
        def interrupt(kind: type[TaskInterrupt]) -> None:
            raise kind

        try:
            self._interrupt = interrupt
            self._listen()  # a signal that came before had nobody to interrupt
            if self._asked is not None:
                raise self._asked
            return refuse_unfinished(call_inside_hooks(call))
        finally:
            self._interrupt = None

    def _become_like_a_worker(self) -> None:
        """A function that usually shares a worker with others finds here what it finds there: also somebody who sees
        whether it stands still.
        """
        threading.Thread(target=self._beat, name="tasklib-beat", daemon=True).start()
        run_start_hooks(_TasksLoop(self._own_loop), lambda: False)
        self._is_like_a_worker = True

    def _beat(self) -> None:
        """While others can run in this process."""
        with contextlib.suppress(OSError):  # it ends
            while True:
                self._channel.say({"beat": True})
                time.sleep(BEAT_SECONDS)

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
        self._listen()
        if self._asked is not None:
            task.cancel()
        try:
            return loop.run_until_complete(task)
        finally:
            self._interrupt = None


class NotHere(Exception):
    """This process cannot run the task, and its worker can."""


class _TasksLoop:
    """The event loop of the task, for async hooks."""

    def __init__(self, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self._loop = loop

    def run(self, work: Callable[[], Awaitable[Any]], gives_up: Callable[[], bool]) -> None:
        async def awaited() -> None:
            await work()

        loop = self._loop()
        future = loop.create_task(awaited())
        while not future.done():
            if gives_up():
                future.cancel()
            loop.run_until_complete(asyncio.wait([future], timeout=0.05))
        future.result()


class _StopAsked(threading.Event):
    """The worker's event, from afar."""

    def __init__(self, asks: Callable[[], bool]) -> None:
        super().__init__()
        self._asks = asks

    def is_set(self) -> bool:
        return self._asks()


class _Witness(Witness):
    """Tells the worker of the task's own connection: if nothing more is heard, it may have been committed."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def connected(self, role: str, backend_pid: int) -> None:  # noqa: ARG002 - there is one
        with contextlib.suppress(OSError):
            self._channel.say({"backend": backend_pid})


class _MemoryLimit:
    """While the function runs. What is there already counts, as it does for everybody who looks at the process."""

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
            resource.setrlimit(resource.RLIMIT_DATA, self._usual)  # to tell how it ended takes memory, too

    def explained(self, outcome: Outcome, error: BaseException) -> Outcome:
        if self._megabytes is None or not isinstance(error, MemoryError) or not isinstance(outcome, Failed):
            return outcome
        message = f"memory_limit_mb={self._megabytes} was reached; {self._before} MB were in use before it began"
        text = f"MemoryError: {message}\n{outcome.problem.text.partition(chr(10))[2]}"
        return replace(outcome, problem=replace(outcome.problem, code="MEMORY_LIMIT", message=message, text=text))


def _data_megabytes() -> int:
    """As the kernel counts for the limit; 0 where it does not tell."""
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as sizes:  # noqa: PTH123 - a file of the kernel's
        return int(sizes.read().split()[5]) * os.sysconf("SC_PAGE_SIZE") // 2**20
    return 0


def _execution_of(order: Order) -> Execution:
    execution = Execution(order.claimed, None, is_coroutine=False)
    execution.started = order.started
    execution.started_at = order.started_at
    return execution


def _find_function(execution: Execution, place: str) -> None:
    name = execution.task.name
    if name not in default_registry:  # it was registered after the server had been started
        _import(place)
    if name not in default_registry:
        raise TaskNotRegistered(_not_found(name))
    execution.function = default_registry.get(name)
    execution.is_coroutine = is_async(execution.function.function)


def _leave() -> NoReturn:
    """All is said. What does not let it go, such as a full pipe behind stdout, has a second."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, LEAVE_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
