"""Tasks with a process of their own, as their worker sees them: `@task(isolation="process")`.

A fork server, an interpreter with the tasks' modules in it and no threads, forks one child for each execution. The
thread that took the execution hands it over as it is stored, waits, and gets an outcome back, or learns how the child
died: nothing else of the worker waits, or is hit. A child leads its own process group, which is killed when the child
has ended, whatever it has left behind there.

It is not a fork of the running worker: that has threads, locks and database connections, none of which a fork
survives. launching.py has where it comes from instead.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from tasklib import application
from tasklib.clock import time
from tasklib.errors import InvalidTaskDefinition, TasklibError
from tasklib.log import log
from tasklib.outcomes import (
    OWN_PROCESS,
    SERVER_DIED,
    CancelInterrupt,
    Cancelled,
    Completed,
    Crashed,
    Failed,
    HeldTask,
    Interrupted,
    Snoozed,
    StopInterrupt,
    TimedOut,
    TimeoutInterrupt,
)
from tasklib.statements import ClaimedTask
from tasklib.states import State
from tasklib.worker.forks import Copy, tell_of_copy
from tasklib.worker.hooks import all_hooks
from tasklib.worker.launching import is_forked_ahead, launch
from tasklib.worker.problems import problem_of
from tasklib.worker.runners import outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    from tasklib.config import Config
    from tasklib.outcomes import Outcome, TaskInterrupt
    from tasklib.task import TaskFunction
    from tasklib.worker.clock import DatabaseClock
    from tasklib.worker.execution import Execution
    from tasklib.worker.witness import Witness

    Word: TypeAlias = dict[str, Any]

BOOT_SECONDS = 60.0  # for a fork server to import the tasks' modules
UNUSED_SECONDS = 60.0  # then one that was started for suspects is stopped: it takes as much memory as a worker
AFTER_FAILURE_SECONDS = 1.0  # what could not be forked keeps its slot for so long: the next one would fare no better
STOP_SECONDS = 3.0  # between StopInterrupt and the kill: less than the worker's own patience
SEND_SECONDS = 1.0  # a fork server that does not read is broken
SERVER_SECONDS = 15.0  # one that has not done for so long what it has to do is hung
LOOK_SECONDS = 1.0  # whether it is
ABORT_SECONDS = 2.0  # for a child that is killed to write down its stacks
CHUNK_BYTES = 65_536
FLOOD_PAUSE_SECONDS = 0.02  # for a child that says more than anybody reads
LARGEST_WORD_BYTES = 8 * 1024 * 1024  # results and errors are two or three at most
NO_ANSWER = 113  # the exit code of a child that could not say how it ended
IMPORTED_MAIN = "__tasklib_main__"  # what the worker's main program is called where isolated tasks run

# What a worker says to a child, one byte each, after the order.
STOPS: dict[bytes, type[TaskInterrupt]] = {b"t": TimeoutInterrupt, b"c": CancelInterrupt, b"s": StopInterrupt}
_STOP_WORDS = {kind: word for word, kind in STOPS.items()}
DRAINING = b"d"


class SuspectLimits(NamedTuple):
    """Of a suspect in a process of its own, which nobody else watches: what its worker's supervisor allows a worker."""

    megabytes: int | None = None  # of memory
    grace_seconds: float = 0.0  # that it may use more
    stall_seconds: float | None = None  # without a sign of life: it holds the interpreter, or was stopped


class Processes:
    """The isolated executions of one worker, and its fork server."""

    def __init__(
        self,
        config: Config,
        clock: DatabaseClock,
        note_progress: Callable[[Execution, str], None],
        stop_asked: threading.Event,
        witness: Witness,
        *,
        for_suspects: bool = False,
        limits: SuspectLimits | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._note_progress = note_progress
        self._stop_asked = stop_asked
        self._witness = witness
        self._isolated: list[TaskFunction[..., Any]] = []
        self._functions: list[TaskFunction[..., Any]] = []
        self._server: ForkServer | None = None
        self._starting = threading.Lock()
        self._children: dict[Child, None] = {}
        self._used_at = time.monotonic()
        self._not_found: set[str] = set()  # names of functions that another interpreter does not find
        self.is_offered = for_suspects and hasattr(os, "fork")  # to suspects, whatever their functions say
        self._limits = limits or SuspectLimits()

    def start(
        self, isolated: Sequence[TaskFunction[..., Any]], functions: Sequence[TaskFunction[..., Any]] = ()
    ) -> None:
        """Begin to start what the isolated ones need. Returns at once; nothing is started where there are none. The
        others may have to run in processes as suspects.
        """
        self._isolated = list(isolated)
        self._functions = list(functions) if self.is_offered else self._isolated
        if self._isolated:
            _refuse_without_fork()
            self._server = self._new_server()
        elif is_forked_ahead():
            self.prepare()

    def can_contain(self, function: TaskFunction[..., Any] | None) -> bool:
        """A suspect of this function may run in a process of its own."""
        if function is None or not self.is_offered:
            return False
        return function.task_options.isolation == "process" or function.name not in self._not_found

    def prepare(self) -> None:
        """Processes for suspects will be needed: begin to start the server, if there is none that lives. Returns at
        once.
        """
        if self.is_offered and self._starting.acquire(blocking=False):
            try:
                server = self._server
                if server is not None and server.is_usable():
                    return
                if server is not None:
                    threading.Thread(target=server.stop, name="tasklib-unused", daemon=True).start()
                self._server = self._new_server()
            except (OSError, TasklibError) as error:
                self._withdraw_offer(error)
            finally:
                self._starting.release()

    def is_ready(self) -> bool:
        """A child can be had at once. Never waits."""
        server = self._server
        if server is None or not self.is_offered or not self._starting.acquire(blocking=False):
            return False
        try:
            return server.is_usable() and server.hear_if_ready()
        except TasklibError as error:
            self._withdraw_offer(error)
            return False
        finally:
            self._starting.release()

    def stop_if_unused(self) -> None:
        """One that was started for suspects, takes memory of its own, and has had no suspects for a while."""
        server = self._server
        if server is None or server.is_shared or self._isolated or not self._starting.acquire(blocking=False):
            return
        try:
            if self._server is not server:
                return
            if self._children or not server.is_ready:
                self._used_at = time.monotonic()  # from here on it is counted
            elif time.monotonic() > self._used_at + UNUSED_SECONDS:
                self._server = None
                threading.Thread(target=server.stop, name="tasklib-unused", daemon=True).start()
        finally:
            self._starting.release()

    def _withdraw_offer(self, error: Exception) -> None:
        """Suspects have to wait for an empty worker instead."""
        self.is_offered = bool(self._isolated)
        log.warning(
            "fork_server.unusable", error=str(error),
            consequence="suspects have no processes of their own: they wait for a worker that is empty",
        )  # fmt: skip

    def _new_server(self) -> ForkServer:
        return ForkServer(self._config, self._functions, [each.name for each in self._isolated])

    def wait_until_ready(self) -> None:
        """Unless the worker is told to stop. An error in the tasks' modules keeps it from starting, if they need it."""
        if self._server is not None and self._isolated:
            self._server.wait_until_ready(self._stop_asked.is_set)

    def run(self, execution: Execution) -> Outcome:
        """In a child. Returns when it is gone."""
        self._used_at = time.monotonic()
        try:
            order = self._order(execution)
        except InvalidTaskDefinition as error:
            if not execution.wants_own_process:
                return self._not_found_elsewhere(execution, str(error))
            return Failed(problem_of(error, code="INVALID_TASK"), may_retry=False)
        try:
            with self._child() as child:
                execution.inside = child
                if execution.interrupt_kind is not None:
                    return outcome_of(execution, execution.interrupt_kind())
                if not execution.wants_own_process:
                    child.limits = self._limits
                child.begin(order)
                return self._attend(execution, child)
        except (OSError, TasklibError) as error:
            log.error("process.not_started", task=execution.task.name, task_id=execution.id, error=str(error))
            self._stop_asked.wait(AFTER_FAILURE_SECONDS)
            return Interrupted(began=execution.is_marked, ran=False)

    def tell_of_stop(self) -> None:
        """The worker drains: `current_task().should_stop` is true from now on."""
        for child in list(self._children):
            child.say(DRAINING)

    def stop(self) -> None:
        with self._starting:
            server, self._server = self._server, None
            if server is not None:
                server.stop()

    @contextlib.contextmanager
    def _child(self) -> Iterator[Child]:
        # Half of the time after which a supervisor would lose patience with the whole worker.
        child = Child(self._living_server(), self._config.timeout_delta_seconds / 2)
        self._children[child] = None
        try:
            yield child
        finally:
            self._children.pop(child, None)
            child.close()

    def _living_server(self) -> ForkServer:
        """One that died, or was not needed until now, is started."""
        _refuse_without_fork()
        with self._starting:
            if self._server is None or not self._server.is_usable():
                if self._server is not None:
                    self._server.stop()
                self._server = self._new_server()
            if not self._server.wait_until_ready(self._stop_asked.is_set):
                raise TasklibError("the worker stops, and its fork server is not ready")
            return self._server

    def _order(self, execution: Execution) -> bytes:
        """What the child has to know: the task as it is stored, where its function is defined, and what time it is."""
        function = execution.function
        assert function is not None  # noqa: S101 - its options say that it is isolated
        order = {
            "claimed": execution.claimed._replace(held=execution.task),
            "place": place_of(function.function),
            "started": execution.started,
            "started_at": execution.started_by(self._clock),
            "clock": (self._clock.now(), time.monotonic()),
            "is_usual": execution.wants_own_process,
        }
        return to_json(order)

    def _not_found_elsewhere(self, execution: Execution, reason: str) -> Outcome:
        """A suspect that cannot run in another process after all: it waits for an empty worker."""
        self._not_found.add(execution.task.name)
        log.warning("suspect.not_contained", task=execution.task.name, task_id=execution.id, reason=reason)
        return Interrupted(began=True, ran=False)

    def _attend(self, execution: Execution, child: Child) -> Outcome:
        outcome: Outcome | None = None
        for word in child.words():
            if isinstance(reason := word.get("not_here"), str):
                outcome = self._not_found_elsewhere(execution, reason)
            if isinstance(progress := word.get("progress"), dict):
                self._note_progress(execution, to_json(progress).decode())
            if isinstance(backend := word.get("backend"), int):
                execution.is_committed = None  # from now on it may be, and nobody may tell
                self._witness.connected(f"task {execution.id}", backend)
            if "outcome" in word:
                outcome, execution.is_committed = decoded_outcome(word["outcome"]), word.get("is_committed")
                child.must_be_gone_in(SERVER_SECONDS)
            if isinstance(copy := word.get("copy"), int):
                tell_of_copy(Copy(copy, execution.id))
        self._witness.disconnected(f"task {execution.id}")
        return outcome if outcome is not None else self._death(execution, child)

    def _death(self, execution: Execution, child: Child) -> Outcome:
        """It was told to stop and did not, or it has died of what it did."""
        if execution.interrupt_kind is not None:
            return outcome_of(execution, execution.interrupt_kind())
        if child.status is not None:
            reason = f"{OWN_PROCESS} {child.killed_because or how_it_died(child.status)}"
            return Crashed(reason, alone=True, is_isolated=execution.wants_own_process)
        if child.pid is None:
            raise OSError(child.error or "the fork server has died")
        child.kill_group()  # nobody else does, now that the server is gone
        execution.task = execution.task._replace(state=State.RUNNING)  # it had begun, and others with it: a suspect
        return Crashed(SERVER_DIED)


class Child:
    """One execution's process: what it says, how it ends, and the way to stop it."""

    def __init__(self, server: ForkServer, patience_seconds: float) -> None:
        self._server = server
        self._patience_seconds = patience_seconds
        self._channel, theirs = socket.socketpair()
        self._notice, notify = os.pipe()  # from the server: the child's pid, then its status
        self._notices = b""
        self._speaking = threading.Lock()
        self._unsaid: deque[bytes] = deque()
        self._has_begun = False
        self._is_told = False
        self.pid: int | None = None
        self.status: int | None = None  # as `waitpid` tells it
        self.error: str | None = None
        self.limits: SuspectLimits | None = None
        self.killed_because: str | None = None
        self._silent_looks = 0  # since its last word
        self._too_large_since = math.inf
        self._has_ended = False
        self._expected_by = time.monotonic() + SERVER_SECONDS  # the server's next word
        try:
            self._number = server.fork(theirs.fileno(), notify)
        except BaseException:
            self._channel.close()
            os.close(self._notice)
            raise
        finally:
            theirs.close()
            os.close(notify)

    def begin(self, order: bytes) -> None:
        with self._speaking, contextlib.suppress(OSError):  # it has died: the notice tells
            self._channel.sendall(len(order).to_bytes(8) + order)
            self._has_begun = True
        self._say_on()

    def say(self, word: bytes) -> None:
        """After the order. Never waits: what a child has no room for, it does not hear."""
        self._unsaid.append(word)
        self._say_on()

    def interrupt(self, kind: type[TaskInterrupt], _occupant: object) -> None:
        """Tell it to stop, and have it killed if it does not."""
        if self._is_told:
            return
        self._is_told = True
        self.say(_STOP_WORDS[kind])
        patience = min(self._patience_seconds, STOP_SECONDS) if kind is StopInterrupt else self._patience_seconds
        self.must_be_gone_in(patience + SERVER_SECONDS)
        with contextlib.suppress(OSError):
            self._server.send({"stop": self._number, "kill_after": patience})

    def must_be_gone_in(self, seconds: float) -> None:
        """Or else it is the server that does nothing."""
        self._expected_by = min(self._expected_by, time.monotonic() + seconds)

    def words(self) -> Iterator[Word]:
        """What it says, until it has ended."""
        said = b""
        watched = select.poll()
        watched.register(self._channel, select.POLLIN)
        watched.register(self._notice, select.POLLIN)
        while not self._has_ended:
            ready = {fd for fd, _ in watched.poll(LOOK_SECONDS * 1000)}
            if self._notice in ready:
                self._read_notice()
            elif time.monotonic() > self._expected_by:
                self._expected_by = math.inf
                self._server.give_up()
            if self._channel.fileno() in ready:
                chunk = self._received()
                if chunk == b"":
                    watched.unregister(self._channel)  # closed, and the child may be alive
                *lines, said = (said + (chunk or b"")).split(b"\n")
                yield from _read_words(lines)
                self._guard(chunk or b"", said)
            self._keep_in_limits(is_silent=not ready)
        while len(said) < LARGEST_WORD_BYTES and (chunk := self._received()):
            said += chunk
        yield from _read_words(said.split(b"\n"))

    def kill_group(self) -> None:
        if self.pid is not None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if not self._has_ended:
            with contextlib.suppress(OSError):
                self._kill()
        with self._speaking:
            self._channel.close()
        os.close(self._notice)

    def _say_on(self) -> None:
        """Whoever finds another one speaking leaves it to that one, who looks again after that."""
        while self._has_begun and self._unsaid and self._speaking.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError, IndexError):
                    self._channel.send(self._unsaid.popleft(), socket.MSG_DONTWAIT)
            finally:
                self._speaking.release()

    def _guard(self, chunk: bytes, unfinished: bytes) -> None:
        """One that says too much waits, and does not keep its worker busy."""
        if len(unfinished) > LARGEST_WORD_BYTES:
            self._kill()
        elif len(chunk) == CHUNK_BYTES and b"\n" in chunk:
            time.sleep(FLOOD_PAUSE_SECONDS)

    def _keep_in_limits(self, *, is_silent: bool) -> None:
        """Looks are counted, and not seconds: whoever was frozen together with it has not looked."""
        if self.limits is None or self.pid is None or self.status is not None or self.killed_because is not None:
            return
        self._silent_looks = self._silent_looks + 1 if is_silent else 0
        used, most = _resident_megabytes(self.pid), self.limits.megabytes
        is_too_large = most is not None and used > most
        self._too_large_since = min(self._too_large_since, time.monotonic()) if is_too_large else math.inf
        if time.monotonic() - self._too_large_since > self.limits.grace_seconds:
            self.killed_because = f"was killed: it used {used:.0f} MB, and {most} are allowed"
            with contextlib.suppress(OSError):  # the server has died, and its children with it
                self._kill()
        elif self.limits.stall_seconds is not None and self._silent_looks * LOOK_SECONDS > self.limits.stall_seconds:
            self.killed_because = f"was killed: it has stood still for {self._silent_looks * LOOK_SECONDS:.0f} s"
            self._abort()

    def _abort(self) -> None:
        """It leaves its stacks in the log."""
        with contextlib.suppress(OSError):
            self._server.send({"stop": self._number, "kill_after": ABORT_SECONDS, "signal": signal.SIGABRT})

    def _kill(self) -> None:
        self._server.send({"stop": self._number, "kill_after": 0})

    def _received(self) -> bytes | None:
        """None: nothing is there now."""
        try:
            return self._channel.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _read_notice(self) -> None:
        """The server closes it when all is said, and by its own death."""
        data = os.read(self._notice, CHUNK_BYTES)
        self._has_ended = not data
        *lines, self._notices = (self._notices + data).split(b"\n")
        for word in _read_words(lines):
            if "pid" in word:
                self.pid = word["pid"]
                self._expected_by = math.inf if not self._is_told else self._expected_by
            self.status = word.get("status", self.status)
            self.error = word.get("error", self.error)


_beginning: tuple[str, Sequence[Any]] | None = None


def begin_with(function: str, arguments: Sequence[Any]) -> None:
    """What is called first in every fork server of this process, and in each of its children: `module:function`, with
    plain values. For who has set up this process, its logs for example, and wants them to be like it.
    """
    global _beginning  # noqa: PLW0603 - for the process, as what it is about
    _beginning = (function, arguments)


class ForkServer:
    """The interpreter that forks the children. It ends with its worker, and its children with it."""

    def __init__(
        self, config: Config, functions: Sequence[TaskFunction[..., Any]], required: Sequence[str] | None = None
    ) -> None:
        hello = to_json(_hello(config, functions, required)) + b"\n"
        self._process, self._control, self.is_shared = launch()
        self._control.settimeout(SEND_SECONDS)
        self._sending = threading.Lock()
        self._forks = 0
        self.is_ready = False
        self._answer = b""
        self._deadline = time.monotonic() + BOOT_SECONDS
        with contextlib.suppress(OSError):  # it has died already: there will be no answer
            self._control.sendall(hello)

    def is_usable(self) -> bool:
        """It lives, and is ready or may become so."""
        return self._process.poll() is None and (self.is_ready or time.monotonic() < self._deadline)

    def wait_until_ready(self, gives_up: Callable[[], bool]) -> bool:
        while not self.is_ready:
            if gives_up():
                return False
            if time.monotonic() > self._deadline:
                raise TasklibError(f"the fork server for isolated tasks was not ready within {BOOT_SECONDS:g} s")
            self._hear()
        return True

    def hear_if_ready(self) -> bool:
        """Whether it is ready. Never waits."""
        if not self.is_ready and select.select([self._control], [], [], 0)[0]:
            self._hear()
        return self.is_ready

    def fork(self, channel: int, notice: int) -> int:
        """The number of the child."""
        with self._sending:
            self._forks += 1
            with self._ended_by_errors():
                socket.send_fds(self._control, [_line({"fork": self._forks})], [channel, notice])
            return self._forks

    def send(self, word: Word) -> None:
        with self._sending, self._ended_by_errors():
            self._control.sendall(_line(word))

    def give_up(self) -> None:
        """It is hung, or was stopped: its children die with it, and another one takes its place."""
        log.error("fork_server.hung", pid=self._process.pid, consequence="it was killed, with all that it had forked")
        self._process.kill()

    def stop(self) -> None:
        """It ends when its socket is shut: a copy of our end, in what a task has started, does not keep it."""
        with contextlib.suppress(OSError):  # it is gone already
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(SEND_SECONDS * 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @contextlib.contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """One that does not listen, or has heard half of a word, is of no more use: another one takes its place."""
        try:
            yield
        except OSError:
            self._process.kill()
            raise

    def _hear(self) -> None:
        try:
            heard = self._control.recv(CHUNK_BYTES)
        except TimeoutError:
            return
        except ConnectionError:
            heard = b""
        if not heard:
            raise TasklibError(f"the fork server for isolated tasks {how_it_ended(self._process.wait())} at its start")
        self._answer += heard
        if b"\n" in self._answer:
            self._understand(from_json(self._answer))
            self.is_ready = True

    def _understand(self, answer: Word) -> None:
        if "error" in answer:
            raise InvalidTaskDefinition(f'isolation="process": {answer["error"]}')
        if answer["threads"] or answer["sockets"]:
            log.warning(
                "fork_server.shared", threads=answer["threads"], sockets=answer["sockets"],
                consequence="the tasks' modules have started these at their import: a forked process has no threads "
                "but its own, and shares connections with all the others",
            )  # fmt: skip


def place_of(function: Callable[..., Any]) -> str:
    """Where another interpreter finds it: the name of its module, or the file that this one was started with."""
    name = str(function.__module__)
    if name == IMPORTED_MAIN:
        raise InvalidTaskDefinition(
            "the script starts a worker, or runs its tasks, when it is imported, and processes for isolated tasks "
            'import it: put that under `if __name__ == "__main__":`'
        )
    if name != "__main__":
        return name
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name)
    if file is None:
        raise InvalidTaskDefinition(
            f'isolation="process": {function.__qualname__} is defined where no other interpreter can import it. '
            f"Put it into a module."
        )
    return os.path.abspath(str(file))  # noqa: PTH100 - a link stays what it is: its directory is on sys.path


def how_it_died(status: int) -> str:
    """A wait status in words."""
    return how_it_ended(os.waitstatus_to_exitcode(status))


def how_it_ended(code: int) -> str:
    if code == NO_ANSWER:
        return "could not tell how it ended: has it closed file descriptors that are not its own?"
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time one
        name = f"signal {-code}"
    return f"was killed by {name}{', perhaps out of memory' if -code == signal.SIGKILL else ''}"


def _resident_megabytes(pid: int) -> float:
    """0: it is gone, or this is not Linux."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024**2


# --- How tasks and outcomes are written between the two --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Order:
    claimed: ClaimedTask
    is_usual: bool  # its function always runs so; else it is one that shares a worker with others
    place: str
    started: float
    started_at: datetime
    clock: tuple[datetime, float]


def decoded_order(data: bytes) -> Order:
    order = from_json(data)
    held, *rest = order["claimed"]
    said, asked_at = order["clock"]
    return Order(
        ClaimedTask(_typed(HeldTask._make(held)), *_typed(ClaimedTask(held, *rest))[1:]),
        order["is_usual"],
        order["place"],
        order["started"],
        datetime.fromisoformat(order["started_at"]),
        (datetime.fromisoformat(said), asked_at),
    )


def _typed(row: Any) -> Any:
    """JSON has no ids and no times."""
    values = {name: getattr(row, name) for name in row._fields if name in _READ}
    return row._replace(**{name: _READ[name](value) for name, value in values.items() if value is not None})


_READ: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("id", "parent_id"), UUID),
    **dict.fromkeys(("claimed_at", "started_at", "expires_at", "cancel_asked_at"), datetime.fromisoformat),
}
_KINDS = {kind.__name__: kind for kind in (Completed, Failed, TimedOut, Snoozed, Cancelled, Interrupted)}


def encoded_outcome(outcome: Outcome) -> Word:
    values = outcome._asdict() if isinstance(outcome, Completed) else asdict(outcome)
    return {"kind": type(outcome).__name__, **values}


def decoded_outcome(word: Any) -> Outcome | None:
    """None: it was not we who wrote that."""
    try:
        kind, values = word["kind"], {name: value for name, value in word.items() if name != "kind"}
        return _reader(kind).validate_python(values)
    except (KeyError, TypeError, AttributeError, ValueError):
        return None


@functools.cache
def _reader(kind: str) -> TypeAdapter[Outcome]:
    return TypeAdapter(_KINDS[kind])


def _read_words(lines: Sequence[bytes]) -> Iterator[Word]:
    """What cannot be read was interrupted, or written by somebody else. Of several reports of progress, the last."""
    words = [word for line in lines if line and isinstance(word := _read_word(line), dict)]
    last = next((word for word in reversed(words) if "progress" in word), None)
    yield from (word for word in words if word is last or "progress" not in word)


def _read_word(line: bytes) -> Any:
    try:
        return from_json(line, allow_inf_nan=False)
    except ValueError:
        return None


def _line(word: Word) -> bytes:
    return json.dumps(word).encode() + b"\n"


def _hello(config: Config, functions: Sequence[TaskFunction[..., Any]], required: Sequence[str] | None) -> Word:
    """Through the socket: nothing of it is seen in `ps` or in the environment."""
    places = [place_of(each) for each in (*(function.function for function in functions), *all_hooks())]
    apps = sys.modules.get("django.apps")
    return {
        "path": sys.path,
        "beginning": _beginning,
        "pythonpath": os.environ.get("PYTHONPATH"),
        "places": list(dict.fromkeys(places)),
        "names": [each.name for each in functions] if required is None else list(required),
        "config": asdict(config),
        "is_initialised": application.is_initialised(),  # then the child has the same default client
        "is_django": apps is not None and apps.apps.ready and "DJANGO_SETTINGS_MODULE" in os.environ,
    }


def _refuse_without_fork() -> None:
    if not hasattr(os, "fork"):
        raise InvalidTaskDefinition('isolation="process" needs os.fork, which this system does not have')
