"""The supervisor: forks, waits, signals, restarts. It has no threads and no database connection, and runs no user code
(preload aside).

One loop sees what happened (signals, messages, deaths, scoreboards), asks `plan` what follows, and does it. Only its
poll waits. A child's death is known at once. The keeper, which is a child too, recovers the tasks of dead workers: each
crash report is kept until a keeper has done so.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import shutil
import signal
import time
import uuid
from typing import TYPE_CHECKING, Any

from tasklib.version import __version__
from tasklib_daemon import linux, logs, preload, signals
from tasklib_daemon.child_process import ChildProcess, how_it_ended
from tasklib_daemon.children import Children
from tasklib_daemon.control import ControlServer, Request
from tasklib_daemon.exit_codes import BOOT_ERRORS, Exit, ExitCode
from tasklib_daemon.generations import Generations
from tasklib_daemon.lifecycle import Lifecycle
from tasklib_daemon.logs import log
from tasklib_daemon.plan import (
    AbandonReload,
    Abort,
    Action,
    Cause,
    DaemonView,
    ExitDaemon,
    FinishReload,
    Interrupt,
    Kill,
    Slot,
    Spawn,
    Stage,
    Stop,
    plan,
)
from tasklib_daemon.reporting import CrashReports, Reporter
from tasklib_daemon.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from tasklib_daemon.channel import Message
    from tasklib_daemon.settings import Settings

TICK_SECONDS = 0.25  # how late a task's limit may be noticed
IDLE_SECONDS = 1.0  # while no task executes
SUSPENDED_SECONDS = 2.0  # a round that comes so much too late: this process was suspended, or the host was
STACKS_SECONDS = 0.3  # the children have so long to write their stacks
CANCELS_SECONDS = 60.0  # how long a cancel is remembered after its time limit
MOST_ERRORS = 20  # of the loop, in a row
HANDLED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR1,
    signal.SIGUSR2, signal.SIGCHLD,
)  # fmt: skip


class Supervisor:
    """`reload` reads the settings again, for SIGHUP."""

    def __init__(self, settings: Settings, reload: Callable[[], Settings] | None = None) -> None:
        self._generations = Generations(settings, reload or (lambda: settings))
        self._lifecycle = Lifecycle()
        self._children = Children()
        self._reporter = Reporter(self._children, self._generations, self._lifecycle)
        self._crash_reports = CrashReports(self._children)
        self._cancels: dict[tuple[UUID, int], float] = {}  # cancelled runs, and when they must have ended
        self._errors = 0  # of the loop, in a row
        self._last_look = time.monotonic()
        self._stacks_at = math.inf

    @property
    def settings(self) -> Settings:
        return self._generations.settings

    def run(self) -> int:
        """Run until told to stop; return the exit code. Raises Exit if the daemon cannot even begin."""
        logs.configure(self.settings)
        directory = self.settings.runtime_directory
        is_new = not directory.exists()
        self.settings.make_runtime_directory()
        try:
            with contextlib.closing(ControlServer(self.settings.control_socket)) as self._control:
                self._supervise()
        finally:
            if is_new:
                shutil.rmtree(directory, ignore_errors=True)
        return self._lifecycle.exit_code

    def _supervise(self) -> None:
        try:
            self._start()
            self._round(0.0)
            while not self._lifecycle.is_over:
                self._try_round()
            self._lifecycle.log_end()
        finally:
            self._children.kill_all()  # some are left only after an error of ours

    def _start(self) -> None:
        """The guardian is forked first, so that it inherits as little as possible."""
        faulthandler.enable(logs.fileno())  # a watchdog's SIGABRT shows where the loop hangs
        linux.adopt_orphans()
        self._children.inputs.append(self._control)
        self._children.start_guardian()
        if self.settings.preload:
            preload.import_app(self.settings)
        self._signals = Signals(HANDLED)
        self._children.inputs.append(self._signals)
        signals.unblock()  # the parent may have blocked some
        self._last_look = time.monotonic()
        log.info(
            "daemon.started", version=__version__, workers=self.settings.workers, concurrency=self.settings.concurrency,
            queues=self.settings.queues, control_socket=str(self.settings.control_socket),
        )  # fmt: skip

    # --- the loop ---

    def _try_round(self) -> None:
        """An error in one round must not end all tasks, unless it comes again and again."""
        try:
            self._round(TICK_SECONDS if self._children.is_executing else IDLE_SECONDS)
            self._errors = 0
        except Exception:
            self._errors += 1
            if self._errors >= MOST_ERRORS:
                raise
            log.exception("supervisor.failed")
            time.sleep(TICK_SECONDS)

    def _round(self, timeout_seconds: float) -> None:
        now = time.monotonic()
        moments = [self._reporter.next_at, self._stacks_at, *self._children.resting_until().values()]
        self._children.wait(min([timeout_seconds, *(each - now for each in moments if each > now)]))
        self._handle_signals()
        self._receive_messages()
        self._reap_children()
        self._answer_operators()
        self._children.read_scoreboards()
        while self._act():
            pass
        self._do_what_is_due(time.monotonic())
        self._reporter.report(time.monotonic())

    def _act(self) -> bool:
        """`now` is taken after the scoreboards were read, so that no time in them lies in its future."""
        now = self._notice_suspension()
        self._lifecycle.note_workers(now, has_workers=self._children.has_workers)
        actions = plan(self._view(now), now)
        for action in actions:
            self._perform(action)
        return bool(actions) and not self._lifecycle.is_over

    def _notice_suspension(self) -> float:
        """If this process was suspended, its children may have been too: they are not judged by that time."""
        now = time.monotonic()
        if now - self._last_look > IDLE_SECONDS + SUSPENDED_SECONDS:
            log.warning("daemon.stood_still", seconds=round(now - self._last_look, 1))
            self._lifecycle.awake_since = now
        self._last_look = now
        return now

    def _view(self, now: float) -> DaemonView:
        return DaemonView(
            serving=self._generations.serving,
            limits=self._generations.limits,
            coming=self._generations.coming,
            children=[child.seen(now, self._cancels) for child in self._children],
            resting_until=self._children.resting_until(),
            shutdown=self._lifecycle.shutdown,
            awake_since=self._lifecycle.awake_since,
            has_reports=bool(self._crash_reports),
        )

    def _do_what_is_due(self, now: float) -> None:
        if self._lifecycle.wants_reload and self._generations.coming is None and self._lifecycle.shutdown is None:
            self._lifecycle.wants_reload = False
            self._reporter.manager.note_reload()
            self._generations.start_reload()
        if now >= self._stacks_at:
            self._stacks_at = math.inf
            self._children.log_stacks()
        self._children.replace_guardian(now)
        self._cancels = {run: moment for run, moment in self._cancels.items() if moment > now - CANCELS_SECONDS}

    # --- signals and operators ---

    def _handle_signals(self) -> None:
        for signum in self._signals.take():
            if signum != signal.SIGCHLD:
                log.info("signal.received", signal=signum.name)
                self._handle_signal(signum)

    def _handle_signal(self, signum: signal.Signals) -> None:
        match signum:
            case signal.SIGTERM | signal.SIGINT:
                self._lifecycle.stop(self.settings.grace_seconds)
            case signal.SIGQUIT:
                self._lifecycle.stop_at_once()
            case signal.SIGHUP:
                self._lifecycle.wants_reload = True
            case signal.SIGTTIN:
                self._generations.scale(self._generations.serving.workers + 1)
            case signal.SIGTTOU:
                self._generations.scale(self._generations.serving.workers - 1)
            case signal.SIGUSR1:
                logs.reopen()
                self._children.signal(signal.SIGUSR1)
            case signal.SIGUSR2:
                self._children.signal(signal.SIGUSR2)
                self._stacks_at = time.monotonic() + STACKS_SECONDS

    def _answer_operators(self) -> None:
        for request in self._control.requests():
            request.answer({"ok": True} | self._answer(request))

    def _answer(self, request: Request) -> dict[str, Any]:
        match request.command:
            case "status":
                return {**self._reporter.status()}
            case "pause" | "resume":
                self._lifecycle.is_paused = request.command == "pause"
                self._children.send("worker", {"say": request.command})
            case "drain":
                self._lifecycle.drain()
            case "scale":
                self._generations.scale(request.workers or 1)
        return {}

    # --- messages ---

    def _receive_messages(self) -> None:
        for child, message in self._children.receive():
            self._receive(child, message)

    def _receive(self, child: ChildProcess, message: Message) -> None:
        child.last_message_at = time.monotonic()
        try:
            self._handle_message(child, message)
        except (ValueError, KeyError, TypeError, AttributeError):
            log.exception("message.rejected", role=child.slot.role, pid=child.pid)

    def _handle_message(self, child: ChildProcess, message: Message) -> None:
        """A worker runs code of the application. So messages that belong to the keeper are taken only from it."""
        match child.slot.role, message["say"]:
            case _, "ready":
                child.problem = message.get("problem")
                self._handle_ready(child)
            case "web", "listening":
                child.problem = None
            case _, "failed":
                child.failure = Exit(_known_code(message.get("code")), str(message.get("message")))
            case "keeper", "cancel":
                must_end_by = time.monotonic() + self.settings.library.timeout_delta_seconds
                self._cancels.setdefault((uuid.UUID(message["task_id"]), int(message["token"])), must_end_by)
            case "keeper", "recovered":
                self._crash_reports.remove(str(message.get("worker_id")))
            case "keeper", "state":
                self._reporter.keeper_state = message
            case "keeper", "gauges":
                self._reporter.take_gauges(message)

    def _handle_ready(self, child: ChildProcess) -> None:
        child.is_ready = True
        log.info(child.event("ready"), slot=child.slot.number, pid=child.pid, seconds=round(child.age_seconds, 2))
        if child.slot.role == "keeper":
            self._crash_reports.send_all(child)
        elif child.slot.role == "web":
            self._reporter.greet_web(child)
        serving = self._generations.serving.slots()
        if not self._lifecycle.has_started and all(self._children.is_served(slot) for slot in serving):
            self._lifecycle.finish_start()

    # --- deaths ---

    def _reap_children(self) -> None:
        for child, status in self._children.reap():
            for message in child.channel.receive():  # those that it sent just before its death
                self._receive(child, message)
            self._handle_death(child, status)
            child.close()

    def _handle_death(self, child: ChildProcess, status: int) -> None:
        board = child.scoreboard.read()
        is_expected = child.stage not in {Stage.SERVING, Stage.ABORTED}
        if not is_expected:
            self._give_up_at_start(child)
        how = how_it_ended(status, child.stop.why if child.stage >= Stage.ABORTED else None)
        self._log_death(child, how, is_expected=is_expected or status == 0)
        cause = _cause(child, status)
        self._reporter.note_death(child, board, cause)
        # A worker without an id held nothing, and neither did one that stopped in good order when it was asked to.
        is_in_order = status == 0 and child.stage != Stage.SERVING and not board.executing and not board.done
        if board.worker_id and not is_in_order:
            name = self._generations.settings_of(child.generation).name
            self._crash_reports.add(child, board, name=name, how=how, cause=cause)
        if not is_expected:
            self._handle_failure(child)

    def _give_up_at_start(self, child: ChildProcess) -> None:
        """Then only the reason is logged: the end of the other children tells the operator nothing."""
        is_first_start = not self._lifecycle.has_started and not self._generations.is_coming(child.generation)
        if is_first_start and child.failure is not None and child.failure.code in BOOT_ERRORS:
            self._lifecycle.give_up(child.failure)
            logs.only_errors()

    def _log_death(self, child: ChildProcess, how: str, *, is_expected: bool) -> None:
        (log.info if is_expected else log.warning)(
            child.event("died"), slot=child.slot.number, pid=child.pid, how=how, why=child.stop.why,
            seconds=round(child.age_seconds, 2),
            # Before the daemon has started, the failure is logged once for all children.
            message=child.failure.message if child.failure is not None and self._lifecycle.has_started else None,
            stacks=child.stacks.take() or None,
        )  # fmt: skip

    def _handle_failure(self, child: ChildProcess) -> None:
        if self._generations.is_coming(child.generation):  # the slot has an old child, and need not rest
            self._generations.fail_reload()
            message = child.failure and child.failure.message
            log.error("reload.failed", message=message, consequence="the old workers stay")
            return
        lived = child.age_seconds if child.is_ready else 0.0  # a long import does not count
        self._children.history(child.slot).add(time.monotonic(), lived, self.settings.restart)

    # --- actions ---

    def _perform(self, action: Action) -> None:
        match action:
            case Spawn(slot, generation):
                self._spawn(slot, generation)
            case Stop(child_id, why, stop_by, cause):
                self._children[child_id].drain(why, stop_by, cause)
            case Interrupt(child_id):
                self._children[child_id].interrupt()
            case Abort(child_id, why):
                self._children[child_id].abort(why)
            case Kill(child_id, cause, guilty):
                self._children[child_id].kill(cause, guilty)
            case FinishReload():
                self._generations.finish_reload()
            case AbandonReload(why):
                self._generations.abandon_reload(why)
            case ExitDaemon():
                self._lifecycle.is_over = True

    def _spawn(self, slot: Slot, generation: int) -> None:
        child = self._children.spawn(slot, generation, self._generations.settings_of(generation))
        if child is None:
            if self._generations.is_coming(generation):
                self._generations.fail_reload()
        elif self._lifecycle.is_paused and child.is_worker:
            child.channel.send({"say": "pause"})


def _cause(child: ChildProcess, status: int) -> Cause:
    """The cause for which we stopped it, if we killed it or it stopped in good order; otherwise a crash."""
    is_ours = child.stage >= Stage.ABORTED or (child.stage != Stage.SERVING and status == 0)
    return child.stop.cause or "shutdown" if is_ours else "crash"


def _known_code(code: Any) -> ExitCode:
    return ExitCode(code) if isinstance(code, int) and code in set(ExitCode) else ExitCode.FAILED
