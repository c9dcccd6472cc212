"""In which order the parts of a worker's run start and stop."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tasklib.clock import time
from tasklib.database import Database
from tasklib.errors import DatabaseUnavailable
from tasklib.log import log
from tasklib.outcomes import StopInterrupt
from tasklib.runtime.bad_rows import first_line
from tasklib.worker.hooks import run_start_hooks, run_stop_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tasklib.worker.buffer import Buffer
    from tasklib.worker.run import WorkerRun

ABANDON_AFTER_SECONDS = 5.0  # for tasks that ignore an interrupt


class Lifecycle:
    def __init__(self, run: WorkerRun) -> None:
        self._run = run
        self._buffer: Buffer = run.buffer
        self._config = run.basis.config
        self._grace_seconds = run.basis.options.grace_seconds
        self._patience_seconds = max(self._grace_seconds, ABANDON_AFTER_SECONDS)

    def start(self) -> bool:
        """False: it was told to stop before the database could be reached."""
        run = self._run
        run.processes.start(run.basis.served.isolated(), run.basis.served.functions())
        run.coroutines.start()
        try:
            if not self._wait_for_schema():
                self._stop_runners()
                return False
            run_start_hooks(run.coroutines.run, run.stop_asked.is_set)
            run.processes.wait_until_ready()
        except BaseException:
            run_stop_hooks(run.coroutines.run, ABANDON_AFTER_SECONDS)
            self._stop_runners()
            raise
        for loop in run.loops.values():
            loop.start()
        log.info("worker.started", worker_id=run.lease.worker_id, concurrency=self._buffer.concurrency)
        return True

    def _stop_runners(self) -> None:
        self._run.coroutines.stop(ABANDON_AFTER_SECONDS)
        self._run.processes.stop()

    def _wait_for_schema(self) -> bool:
        """Wait for a database that is not there yet. A schema that does not fit is an error."""
        database, pause = Database(self._config), 0.1
        while not self._run.stop_asked.is_set():
            try:
                database.check_schema()
            except DatabaseUnavailable as error:
                log.warning("database.unavailable", error=first_line(error))
                self._run.stop_asked.wait(pause)
                pause = min(pause * 2, 2.0)
            else:
                return True
        return False

    def wait_until_empty(self) -> None:
        """Until nothing is held, and a look that began afterwards has found nothing."""
        claimer = self._run.claimer
        while not self._run.stop_asked.is_set():
            self._run.settled.clear()
            claimed = claimer.claimed
            if self._buffer.is_idle():
                claimer.is_drained = False
                self._look_again()
                # A task that was claimed meanwhile may be ready again since the look.
                if claimer.is_drained and claimer.claimed == claimed:
                    return
            self._run.settled.wait(0.02)

    def _look_again(self) -> None:
        loop = self._run.loops["claim"]
        for _ in range(2):  # the present round may have looked before
            seen = loop.beats
            self._run.ring()
            while loop.beats == seen and not self._run.stop_asked.is_set():
                time.sleep(0.001)

    def drain(self) -> None:
        """Give back what has not started, wait for what executes, write the outcomes, and leave."""
        run = self._run
        log.info("worker.stopping", executing=len(self._buffer.executing()))
        run.lease.is_stopping = True
        run.reports.give_back(self._buffer.close())
        run.loops["claim"].stop()
        run.loops["lease"].wake()
        run.processes.tell_of_stop()
        self._wait_for(lambda: not self._buffer.executing(), self._grace_seconds, unless=run.hurry)
        for each in self._buffer.executing():
            each.interrupt(StopInterrupt)
        self._wait_for(lambda: not self._buffer.executing(), ABANDON_AFTER_SECONDS)
        run.loops["claim"].join(self._config.database_timeout_seconds)
        self._wait_for(lambda: run.finish_loop.outcome_writer.is_empty, self._patience_seconds)
        self._leave()

    def _leave(self) -> None:
        run = self._run
        if not run.finish_loop.outcome_writer.is_empty:
            log.error("outcomes.lost", consequence="they could not be written in time: these tasks will run again")
        if stuck := self._buffer.executing():
            log.error("worker.abandoned", tasks=[each.task.name for each in stuck], worker_id=run.lease.worker_id)
            threading.Thread(target=self._leave_when_idle, name="tasklib-abandoned", daemon=True).start()
            return
        run_stop_hooks(run.coroutines.run, self._patience_seconds)
        self._stop_runners()
        for loop in run.loops.values():
            loop.stop()
        for loop in run.loops.values():
            loop.join(self._config.database_timeout_seconds)
        if run.basis.sessions["duties"].is_connected:  # the database may be away
            run.duties.rollups.write_last()
        self._deregister()
        for session in run.basis.sessions.values():
            session.close()
        log.info("worker.stopped", worker_id=run.lease.worker_id)

    def _deregister(self) -> None:
        lease = self._run.lease
        try:
            lease.give_up()
        except Exception as error:  # noqa: BLE001 - the lease expires by itself then
            log.warning("worker.not_deregistered", worker_id=lease.worker_id, error=str(error))

    def _leave_when_idle(self) -> None:
        """Tasks that do not stop keep their lease until they end or the process does: a retry must never overlap the
        old run.
        """
        while not self._buffer.is_idle():
            time.sleep(0.1)
        self._leave()

    def _wait_for(self, is_so: Callable[[], bool], seconds: float, unless: threading.Event | None = None) -> None:
        deadline = time.monotonic() + seconds
        while not is_so() and time.monotonic() < deadline and not (unless is not None and unless.is_set()):
            self._run.settled.clear()
            self._run.settled.wait(0.01)
