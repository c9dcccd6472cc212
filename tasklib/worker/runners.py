"""Where task functions execute: sync ones in threads, async ones on an event loop, isolated ones in processes, for each
of which a thread waits.

A runner takes an execution from the buffer, calls its function in a copy of the worker's context, turns what happened
into an Outcome, and reports it. The worker has its own threads, so user code that blocks cannot block the worker.
Timeouts are enforced by timeouts.py: it calls `Execution.interrupt`, which comes back to the `interrupt` of the place
where the function runs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

from tasklib.clock import time, with_real_time
from tasklib.current import CurrentTask, enter_task
from tasklib.log import log
from tasklib.outcomes import Expired, Failed, HeldTask, Outcome, TaskInterrupt
from tasklib.worker.execution import Execution, InterruptibleThread
from tasklib.worker.hooks import await_inside_hooks, call_inside_hooks, has_around_hooks
from tasklib.worker.task_call import completed, outcome_of, prepared_call, refuse_unfinished

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from tasklib.worker.buffer import Buffer
    from tasklib.worker.exactly_once import Transactions
    from tasklib.worker.forks import Original
    from tasklib.worker.isolation.processes import IsolatedProcesses

Report: TypeAlias = "tuple[Execution, Outcome, float]"  # how it has ended, and when: monotonic
Begin: TypeAlias = "Callable[[Execution], bool]"
ReportAll: TypeAlias = "Callable[[Sequence[Report]], None]"
Describe: TypeAlias = "Callable[[Execution], CurrentTask]"
NewLoop: TypeAlias = "Callable[[], asyncio.AbstractEventLoop]"
NO_TASK = UUID(int=0)


# What structlog.contextvars.bind_contextvars would set, in a fifth of its time.
_LOGGED_ID: contextvars.ContextVar[str] = contextvars.ContextVar("structlog_task_id")
_LOGGED_NAME: contextvars.ContextVar[str] = contextvars.ContextVar("structlog_task")
_LOGGED_QUEUE: contextvars.ContextVar[str] = contextvars.ContextVar("structlog_queue")
_LOGGED_ATTEMPT: contextvars.ContextVar[int] = contextvars.ContextVar("structlog_attempt")
_LOGGED_WORKER: contextvars.ContextVar[str] = contextvars.ContextVar("structlog_worker_id")


def _set_logged(name: str, queue: str, worker_id: str) -> None:
    _LOGGED_NAME.set(name)
    _LOGGED_QUEUE.set(queue)
    _LOGGED_WORKER.set(worker_id)


class Runner:
    """Takes executions, runs each in its own copy of the worker's context, and reports how they ended."""

    def __init__(
        self,
        buffer: Buffer,
        begin: Begin,
        report_all: ReportAll,
        describe: Describe,
        transactions: Transactions,
        *,
        original: Original,
    ) -> None:
        self._buffer = buffer
        self._original = original
        self._begin = begin
        self._report_all = report_all
        self._describe = describe
        self._transactions = transactions
        self._context = contextvars.copy_context()
        self._contexts: dict[tuple[str, str, str], contextvars.Context] = {}

    def _context_for(self, task: HeldTask) -> contextvars.Context:
        """A copy for this task. It has the task's id, name and so on, for loggers of structlog that read context
        variables. The values that many tasks share are set once.
        """
        common = (task.name, task.queue, task.worker_id)
        context = self._contexts.get(common)
        if context is None:
            context = self._context.copy()
            context.run(_set_logged, *common)
            self._contexts[common] = context
        return context.copy()

    def _enter(self, execution: Execution) -> None:
        """In the context of the task."""
        _LOGGED_ID.set(execution.claimed.id_text)
        _LOGGED_ATTEMPT.set(execution.task.attempt + 1)
        enter_task(functools.partial(self._describe, execution))


class ThreadRunner(Runner):
    """Threads, started on demand, at most one for each slot. They are daemon threads: a stuck one does not keep the
    process alive.
    """

    def __init__(
        self,
        buffer: Buffer,
        begin: Begin,
        report_all: ReportAll,
        describe: Describe,
        transactions: Transactions,
        *,
        original: Original,
        processes: IsolatedProcesses,
    ) -> None:
        super().__init__(buffer, begin, report_all, describe, transactions, original=original)
        self._processes = processes
        self._threads: list[threading.Thread] = []

    def provide(self) -> None:
        """Start enough threads for the tasks that wait."""
        for _ in range(self._buffer.threads_wanted(len(self._threads))):
            thread = threading.Thread(target=self._work, name=f"tasklib-run-{len(self._threads) + 1}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        thread = InterruptibleThread()
        while (execution := self._buffer.wait_and_take()) is not None:
            outcome = self._context_for(execution.task).run(self._execute, execution, thread)
            thread.leave()  # an interrupt may have cut the first one short
            self._report_all([(execution, self._transactions.end(execution, outcome), time.monotonic())])

    def _execute(self, execution: Execution, thread: InterruptibleThread) -> Outcome:
        """Nothing may escape: the thread, its slot and its task would be lost."""
        try:
            return self._begin_and_call(execution, thread)
        except BaseException as error:  # noqa: BLE001 - SystemExit and its like must not end the worker's thread
            return outcome_of(execution, error)

    def _begin_and_call(self, execution: Execution, thread: InterruptibleThread) -> Outcome:
        if not self._begin(execution):
            return Expired()
        if execution.is_isolated:
            return self._processes.run(execution)
        call = prepared_call(execution)
        if isinstance(call, Failed):
            return call
        self._enter(execution)
        execution.inside = thread
        try:
            thread.enter(execution)
            if execution.interrupt_kind is not None:
                raise execution.interrupt_kind
            return completed(execution, refuse_unfinished(call_inside_hooks(call)))
        finally:
            self._original.end_if_copy(execution.id)
            thread.leave()


class CoroutineRunner(Runner):
    """An event loop in a thread of its own. It takes executions from the buffer itself, as slots get free."""

    def __init__(
        self,
        buffer: Buffer,
        begin: Begin,
        report_all: ReportAll,
        describe: Describe,
        transactions: Transactions,
        *,
        original: Original,
        new_loop: NewLoop,
    ) -> None:
        super().__init__(buffer, begin, report_all, describe, transactions, original=original)
        self._loop = with_real_time(new_loop())
        self._running: dict[Execution, asyncio.Task[Outcome]] = {}
        self._reports: list[Report] = []
        self._thread = threading.Thread(target=self._serve, name="tasklib-loop", daemon=True)
        self._is_turn_due = False
        self._is_stopping = False
        self._forked_by = NO_TASK  # in a copy of this process: the task that forked it

    def start(self) -> None:
        self._thread.start()
        _loops.add(self)

    def provide(self) -> None:
        if not self._is_turn_due and not self._loop.is_closed():
            self._is_turn_due = True  # one call serves everything that comes until it runs
            self._loop.call_soon_threadsafe(self._turn)

    def run(self, hook: Callable[[], Coroutine[Any, Any, Any]], gives_up: Callable[[], bool]) -> None:
        """For the worker's async hooks: what they open belongs to the loop of the tasks."""
        future = asyncio.run_coroutine_threadsafe(hook(), self._loop)
        while not future.done():
            if gives_up():
                future.cancel()
                raise TimeoutError("the hook did not end in time")
            concurrent.futures.wait([future], timeout=0.05)
        future.result()

    def stop(self, seconds: float) -> bool:
        """False: a task that does not end blocks the loop."""
        self._is_stopping = True
        if self._thread.is_alive() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._is_stopping:
                self._run_forever()
            for left in asyncio.all_tasks(self._loop):
                left.cancel()
            self._loop.run_until_complete(_gathered(asyncio.all_tasks(self._loop)))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._turn()
        finally:
            self._loop.close()

    def _run_forever(self) -> None:
        """Until it is told to stop. A task may call loop.stop(), or a callback of its own sys.exit()."""
        try:
            self._loop.run_forever()
        except BaseException:  # noqa: BLE001 - see above
            self._original.end_if_copy(self._forked_by)
            log.exception("loop.interrupted")
        self._original.end_if_copy(self._forked_by)

    def leave_if_copied(self) -> None:
        """Called in a process that was just forked. If it was forked on the loop, it has copies of the loop's other
        tasks, too: none of them may go on when the task that forked returns, or waits for something.
        """
        if threading.get_ident() == self._thread.ident:
            current = asyncio.current_task(self._loop)
            self._forked_by = next((each.id for each, task in self._running.items() if task is current), NO_TASK)
            self._loop.stop()
            with contextlib.suppress(AttributeError):  # uvloop hides it; asyncio's loop ends once it is empty
                self._loop._ready.clear()  # type: ignore[attr-defined]  # noqa: SLF001

    def _turn(self) -> None:
        """Once in a turn of the loop: report the tasks that ended in it, and start those that may start."""
        self._original.end_if_copy(self._forked_by)
        self._is_turn_due = False
        reports, self._reports = self._reports, []
        if reports:
            self._report_all(reports)
        for execution in self._buffer.take_all():
            self._start(execution)

    def interrupt(self, _kind: type[TaskInterrupt], occupant: Execution) -> None:
        """Called from any thread. The runner itself is the `inside` of all its executions: an object for each, with its
        asyncio task, would be a cycle for the garbage collector, 20 us a task.
        """
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel, occupant)

    def _cancel(self, occupant: Execution) -> None:
        if occupant in self._running:
            self._running[occupant].cancel()

    def _start(self, execution: Execution) -> None:
        if not self._begin(execution):
            self._note_end(execution, Expired())
            self._take_turn_soon()
            return
        task = self._loop.create_task(self._outcome(execution), context=self._context_for(execution.task))
        execution.inside = self
        self._running[execution] = task
        task.add_done_callback(functools.partial(self._ended, execution))
        if execution.interrupt_kind is not None:
            task.cancel()

    def _ended(self, execution: Execution, task: asyncio.Task[Outcome]) -> None:
        """A callback, since a coroutine that is cancelled before its first line never gets to its end."""
        del self._running[execution]
        outcome = outcome_of(execution, asyncio.CancelledError()) if task.cancelled() else task.result()
        self._note_end(execution, outcome)
        if self._running:
            self._take_turn_soon()
        else:
            self._turn()  # no other task could share a later one

    def _note_end(self, execution: Execution, outcome: Outcome) -> None:
        self._reports.append((execution, outcome, time.monotonic()))

    def _take_turn_soon(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self._loop.call_soon(self._turn)

    async def _outcome(self, execution: Execution) -> Outcome:
        outcome: Outcome
        try:
            call = prepared_call(execution)
            if isinstance(call, Failed):
                outcome = call
            else:
                self._enter(execution)
                outcome = completed(execution, await (await_inside_hooks(call) if has_around_hooks() else call()))
        except BaseException as error:  # noqa: BLE001 - SystemExit and its like must not end the loop
            outcome = outcome_of(execution, error)
        execution.has_ended = True
        if execution.opening is None:
            return outcome
        self._original.end_if_copy(execution.id)
        return await self._transactions.end_async(execution, outcome)


_loops: weakref.WeakSet[CoroutineRunner] = weakref.WeakSet()


def _leave_loops() -> None:
    for runner in list(_loops):
        runner.leave_if_copied()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_loops)


async def _gathered(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
