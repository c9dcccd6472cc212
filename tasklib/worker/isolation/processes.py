"""The isolated executions of one worker, and its fork server.

The thread that took an execution sends it to a process as it is stored, waits, and gets an outcome back, or learns how
the process died. No other part of the worker waits, or is affected. The process leads a process group of its own. When
the process has ended, that group is killed, with all processes that it has left behind there.

A timeout, a cancel or the worker's stop reaches the process through `IsolatedProcess.interrupt`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from tasklib.clock import time
from tasklib.errors import InvalidTaskDefinition, TasklibError
from tasklib.log import log
from tasklib.outcomes import OWN_PROCESS, SERVER_DIED, Crashed, Failed, Interrupted, Outcome
from tasklib.states import State
from tasklib.worker.forks import Copy, tell_of_copy
from tasklib.worker.isolation.fork_server_link import ForkServerLink
from tasklib.worker.isolation.launching import is_forked_ahead
from tasklib.worker.isolation.process import SERVER_SECONDS, IsolatedProcess
from tasklib.worker.isolation.protocol import DRAINING, Request, decoded_outcome, how_it_ended, place_of
from tasklib.worker.isolation.suspect_limits import LimitCheck, SuspectLimits
from tasklib.worker.problems import problem_of
from tasklib.worker.task_call import outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tasklib.config import Config
    from tasklib.runtime.database_clock import DatabaseClock
    from tasklib.runtime.observer import WorkerObserver
    from tasklib.task import TaskFunction
    from tasklib.worker.execution import Execution

UNUSED_SECONDS = 60.0  # then a fork server for suspects is stopped: it takes as much memory as a worker
AFTER_FAILURE_SECONDS = 1.0  # an execution that could not be forked keeps its slot: the next one would fail, too


class IsolatedProcesses:
    def __init__(
        self,
        config: Config,
        clock: DatabaseClock,
        note_progress: Callable[[Execution, str], None],
        stop_asked: threading.Event,
        observer: WorkerObserver,
        *,
        for_suspects: bool = False,
        limits: SuspectLimits | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._note_progress = note_progress
        self._stop_asked = stop_asked
        self._observer = observer
        self._isolated: list[TaskFunction[..., Any]] = []
        self._functions: list[TaskFunction[..., Any]] = []
        self._server: ForkServerLink | None = None
        self._starting = threading.Lock()  # held by the thread that starts, asks or replaces the fork server
        self._processes: dict[IsolatedProcess, None] = {}
        self._used_at = time.monotonic()
        self._not_found: set[str] = set()  # names of functions that another interpreter does not find
        self.is_offered = for_suspects and hasattr(os, "fork")  # to suspects, whatever their functions say
        self._limits = limits or SuspectLimits()

    # --- the fork server ---

    def start(
        self, isolated: Sequence[TaskFunction[..., Any]], functions: Sequence[TaskFunction[..., Any]] = ()
    ) -> None:
        """Begin to start the fork server, if a function is isolated, and return at once. The other functions may have
        to run in processes as suspects.
        """
        self._isolated = list(isolated)
        self._functions = list(functions) if self.is_offered else self._isolated
        if self._isolated:
            _refuse_without_fork()
            self._server = self._new_server()
        elif is_forked_ahead():
            self.prepare()

    def wait_until_ready(self) -> None:
        """Unless the worker is told to stop. An error in the modules of isolated tasks keeps it from starting."""
        if self._server is not None and self._isolated:
            self._server.wait_until_ready(self._stop_asked.is_set)

    def can_contain(self, function: TaskFunction[..., Any] | None) -> bool:
        """A suspect of this function may run in a process of its own."""
        if function is None or not self.is_offered:
            return False
        return function.task_options.isolation == "process" or function.name not in self._not_found

    def prepare(self) -> None:
        """Suspects will need processes: begin to start the fork server, if none lives. Returns at once."""
        if self.is_offered and self._starting.acquire(blocking=False):
            try:
                server = self._server
                if server is None or not server.is_usable():
                    self._stop_in_background(server)
                    self._server = self._new_server()
            except (OSError, TasklibError) as error:
                self._withdraw_offer(error)
            finally:
                self._starting.release()

    def is_ready(self) -> bool:
        """A process can be had at once. Never waits."""
        server = self._server
        if server is None or not self.is_offered or not self._starting.acquire(blocking=False):
            return False
        try:
            return server.is_usable() and server.receive_if_ready()
        except TasklibError as error:
            self._withdraw_offer(error)
            return False
        finally:
            self._starting.release()

    def stop_if_unused(self) -> None:
        """A fork server that was started for suspects, takes memory of its own, and has had no suspect for a while."""
        server = self._server
        if server is None or server.is_shared or self._isolated or not self._starting.acquire(blocking=False):
            return
        try:
            if self._server is not server:
                return
            if self._processes or not server.is_ready:
                self._used_at = time.monotonic()
            elif time.monotonic() > self._used_at + UNUSED_SECONDS:
                self._server = None
                self._stop_in_background(server)
        finally:
            self._starting.release()

    def stop(self) -> None:
        with self._starting:
            server, self._server = self._server, None
            if server is not None:
                server.stop()

    def _usable_server(self) -> ForkServerLink:
        """Starts one if there is none, or it has died."""
        _refuse_without_fork()
        with self._starting:
            if self._server is None or not self._server.is_usable():
                if self._server is not None:
                    self._server.stop()
                self._server = self._new_server()
            if not self._server.wait_until_ready(self._stop_asked.is_set):
                raise TasklibError("the worker stops, and its fork server is not ready")
            return self._server

    def _new_server(self) -> ForkServerLink:
        return ForkServerLink(self._config, self._functions, [each.name for each in self._isolated])

    def _stop_in_background(self, server: ForkServerLink | None) -> None:
        if server is not None:
            threading.Thread(target=server.stop, name="tasklib-unused", daemon=True).start()

    def _withdraw_offer(self, error: Exception) -> None:
        self.is_offered = bool(self._isolated)
        log.warning(
            "fork_server.unusable", error=str(error),
            consequence="suspects get no processes of their own: each waits for an empty worker",
        )  # fmt: skip

    # --- executions ---

    def run(self, execution: Execution) -> Outcome:
        """In a process. Returns when that has ended."""
        self._used_at = time.monotonic()
        try:
            request = self._request(execution).encode()
        except InvalidTaskDefinition as error:
            if not execution.wants_own_process:
                return self._not_found_elsewhere(execution, str(error))
            return Failed(problem_of(error, code="INVALID_TASK"), may_retry=False)
        try:
            with self._process() as process:
                execution.inside = process
                if execution.interrupt_kind is not None:
                    return outcome_of(execution, execution.interrupt_kind())
                if not execution.wants_own_process:
                    process.limit_check = LimitCheck(self._limits)
                process.begin(request)
                return self._follow(execution, process)
        except (OSError, TasklibError) as error:
            log.error("process.not_started", task=execution.task.name, task_id=execution.id, error=str(error))
            self._stop_asked.wait(AFTER_FAILURE_SECONDS)
            return Interrupted(began=execution.is_marked, ran=False)

    def tell_of_stop(self) -> None:
        """The worker drains: `current_task().should_stop` is true from now on."""
        for process in list(self._processes):
            process.send(DRAINING)

    @contextlib.contextmanager
    def _process(self) -> Iterator[IsolatedProcess]:
        # Half of the time after which a supervisor would kill the whole worker.
        process = IsolatedProcess(self._usable_server(), self._config.timeout_delta_seconds / 2)
        self._processes[process] = None
        try:
            yield process
        finally:
            self._processes.pop(process, None)
            process.close()

    def _request(self, execution: Execution) -> Request:
        function = execution.function
        assert function is not None  # noqa: S101 - its options say that it is isolated
        return Request(
            claimed=execution.claimed._replace(held=execution.task),
            place=place_of(function.function),
            started=execution.started,
            started_at=execution.started_by(self._clock),
            clock=(self._clock.now(), time.monotonic()),
            is_always_isolated=execution.wants_own_process,
        )

    def _follow(self, execution: Execution, process: IsolatedProcess) -> Outcome:
        outcome: Outcome | None = None
        for message in process.messages():
            if isinstance(reason := message.get("not_here"), str):
                outcome = self._not_found_elsewhere(execution, reason)
            if isinstance(progress := message.get("progress"), dict):
                self._note_progress(execution, to_json(progress).decode())
            if isinstance(backend := message.get("backend"), int):
                execution.is_committed = None  # from now on it may be, and the process may die before it tells
                self._observer.connected(f"task {execution.id}", backend)
            if "outcome" in message:
                outcome, execution.is_committed = decoded_outcome(message["outcome"]), message.get("is_committed")
                process.must_be_gone_in(SERVER_SECONDS)
            if isinstance(copy := message.get("copy"), int):
                tell_of_copy(Copy(copy, execution.id))
        self._observer.disconnected(f"task {execution.id}")
        return outcome if outcome is not None else self._death(execution, process)

    def _death(self, execution: Execution, process: IsolatedProcess) -> Outcome:
        """It was told to stop and did not, or it died of what it did."""
        if execution.interrupt_kind is not None:
            return outcome_of(execution, execution.interrupt_kind())
        if process.exit_code is not None:
            reason = f"{OWN_PROCESS} {process.killed_because or how_it_ended(process.exit_code)}"
            return Crashed(reason, alone=True, is_isolated=execution.wants_own_process)
        if process.pid is None:
            raise OSError(process.error or "the fork server has died")
        process.kill_group()  # the fork server would have done it, and is gone
        execution.task = execution.task._replace(state=State.RUNNING)  # it had begun, and others with it: a suspect
        return Crashed(SERVER_DIED)

    def _not_found_elsewhere(self, execution: Execution, reason: str) -> Outcome:
        """A suspect whose function no other process can import: it waits for an empty worker."""
        self._not_found.add(execution.task.name)
        log.warning("suspect.not_contained", task=execution.task.name, task_id=execution.id, reason=reason)
        return Interrupted(began=True, ran=False)


def _refuse_without_fork() -> None:
    if not hasattr(os, "fork"):
        raise InvalidTaskDefinition('isolation="process" needs os.fork, which this system does not have')
