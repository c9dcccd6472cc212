"""The supervisor: forks, waits, signals, restarts. No threads, no database connection, no user code (preload aside).

One loop sees what happened (signals, messages, deaths, pages), asks `plan` what follows, and does it. Nothing in it
waits but the poll. A child's death is known at once; what it was executing is told to the keeper, which is a child too:
reports wait until a keeper has settled them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import select
import shutil
import signal
import socket
import time
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from tasklib.version import __version__
from tasklib_daemon import child, kernel, logs, page, preload, signals
from tasklib_daemon.channel import Channel
from tasklib_daemon.control import ControlServer
from tasklib_daemon.crashes import CrashReport, Done, Executing
from tasklib_daemon.exits import BOOT_ERRORS, Exit, ExitCode
from tasklib_daemon.guardian import Guardian, kill_group
from tasklib_daemon.kid import History, Kid, how_it_ended, reap
from tasklib_daemon.ledger import Book, to_json
from tasklib_daemon.logs import log
from tasklib_daemon.page import Page
from tasklib_daemon.plan import (
    Abandon,
    Abort,
    Adopt,
    Ending,
    Generation,
    Hurry,
    Kill,
    Leave,
    Limits,
    Place,
    Spawn,
    Stage,
    State,
    Stop,
    plan,
    why_hung,
)
from tasklib_daemon.redaction import redactor
from tasklib_daemon.sdnotify import ServiceManager
from tasklib_daemon.signals import Signals
from tasklib_daemon.stacks import Stacks
from tasklib_daemon.status import headline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from uuid import UUID

    from tasklib_daemon.channel import Message
    from tasklib_daemon.control import Request
    from tasklib_daemon.page import PageView
    from tasklib_daemon.plan import Action, Cause
    from tasklib_daemon.sdnotify import Phase
    from tasklib_daemon.settings import Settings
    from tasklib_daemon.status import ChildStatus, Status

TICK_SECONDS = 0.25  # how late a task's limit may be noticed
IDLE_SECONDS = 1.0  # while nothing executes
TELL_SECONDS = 1.0
WRITE_DOWN_SECONDS = 10.0  # between two messages about what has become of tasks, for the statistics by the minute
STOOD_STILL_SECONDS = 2.0  # a round that comes so late: we were stopped, or the host was
GUARD_SECONDS = 1.0  # before there is a new guardian
STACKS_SECONDS = 0.3  # for the children to write them
MOST_WORKERS = 1000
MOST_FAILURES = 20
HANDLED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR1,
    signal.SIGUSR2, signal.SIGCHLD,
)  # fmt: skip


def run(settings: Settings, reload: Callable[[], Settings] | None = None) -> int:
    """Until it is told to end. `reload` reads the settings again, for SIGHUP. Exit, if it cannot even begin."""
    return Supervisor(settings, reload).run()


class Supervisor:
    def __init__(self, settings: Settings, reload: Callable[[], Settings] | None = None) -> None:
        self._mark = f"tasklibd-{uuid.uuid4().hex}"
        self._pid = os.getpid()
        self._started_at = datetime.now(UTC)
        self._reload_settings = reload or (lambda: settings)
        self._settings = {1: settings}  # by generation
        self._limits = _limits(settings)
        self._serving = Generation(1, settings.workers, has_web=settings.web.port is not None)
        self._coming: Generation | None = None
        self._generations = 1
        self._kids: dict[int, Kid] = {}
        self._born = 0
        self._histories: dict[Place, History] = {}
        self._reports: dict[str, CrashReport] = {}  # until they are settled
        self._cancels: dict[tuple[UUID, int], float] = {}  # runs that were asked to stop: when they must have ended
        self._keeper_says: Message = {}
        self._gauges: Message = {}  # of the cluster, as the elected keeper last told them
        self._book = Book()
        self._write_down_at = 0.0
        self._ending: Ending | None = None
        self._exit_code: int | None = None
        self._has_left = False
        self._failures = 0  # of the loop, in a row
        self._has_started = False
        self._is_paused = False
        self._wants_reload = False
        self._problems: list[str] = []
        self._awake_since = -math.inf
        self._last_look = time.monotonic()
        self._tell_at = 0.0
        self._stacks_at = math.inf
        self._guard_at = math.inf
        self._signals: Signals | None = None
        self._control: ControlServer | None = None
        self._guardian = Guardian(self._mark)
        self._manager = ServiceManager(os.environ)
        self._headline = ""
        self._last_words: str | None = None

    @property
    def settings(self) -> Settings:
        return self._settings[self._serving.number]

    def run(self) -> int:
        logs.configure(self.settings)
        made = not self.settings.runtime_directory.exists()
        self.settings.make_runtime_directory()
        try:
            self._begin()
            self._round(0.0)
            while not self._has_left:
                self._try_round()
            log.info("daemon.stopped", code=self._exit_code or 0)
            return self._exit_code or int(ExitCode.OK)
        finally:
            self._end()
            if made:
                shutil.rmtree(self.settings.runtime_directory, ignore_errors=True)

    def _begin(self) -> None:
        """The guardian first: it has nothing of what comes later."""
        faulthandler.enable(logs.fileno())  # a watchdog's SIGABRT shows where the loop hangs
        kernel.adopt_orphans()
        self._control = ControlServer(self.settings.control_socket)
        self._guard()
        if self.settings.preload:
            preload.import_app(self.settings)
        self._signals = Signals(HANDLED)
        signals.release()  # whoever started us may have held some back
        self._last_look = time.monotonic()
        log.info(
            "daemon.started", version=__version__, workers=self.settings.workers, concurrency=self.settings.concurrency,
            queues=self.settings.queues, control_socket=str(self.settings.control_socket),
        )  # fmt: skip

    def _end(self) -> None:
        for kid in self._kids.values():  # only after an error of ours
            kill_group(kid.pid)
        self._guardian.dismiss()
        if self._control is not None:
            self._control.close()

    # --- the loop ---

    def _try_round(self) -> None:
        """An error of ours must not end everybody's work, unless it comes again and again."""
        try:
            is_busy = any(kid.view is not None and kid.view.executing for kid in self._kids.values())
            self._round(TICK_SECONDS if is_busy else IDLE_SECONDS)
            self._failures = 0
        except Exception:
            self._failures += 1
            if self._failures >= MOST_FAILURES:
                raise
            log.exception("supervisor.failed")
            time.sleep(TICK_SECONDS)

    def _round(self, timeout_seconds: float) -> None:
        self._wait(timeout_seconds)
        self._hear_signals()
        self._hear_children()
        self._bury_the_dead()
        self._hear_operators()
        for kid in self._kids.values():
            kid.look()
        while self._act():
            pass
        self._tell()

    def _wait(self, timeout_seconds: float) -> None:
        poll = select.poll()
        for each in (self._signals, self._control):
            if each is not None:
                poll.register(each.fileno(), select.POLLIN)
        for kid in self._kids.values():
            if not kid.channel.is_closed:
                poll.register(kid.channel.fileno(), select.POLLIN | (select.POLLOUT if kid.channel.has_output else 0))
        now = time.monotonic()
        moments = [self._tell_at, self._stacks_at, *(history.resting_until for history in self._histories.values())]
        poll.poll(min([timeout_seconds, *(each - now for each in moments if each > now)]) * 1000)

    def _act(self) -> bool:
        """The moment is taken after the pages were read, and nothing later is looked at."""
        now = self._notice_time()
        actions = plan(self._state(now), now)
        for action in actions:
            self._perform(action)
        return bool(actions) and not self._has_left

    def _notice_time(self) -> float:
        """If we stood still, perhaps everybody did: nobody is judged by what happened meanwhile."""
        now = time.monotonic()
        if now - self._last_look > IDLE_SECONDS + STOOD_STILL_SECONDS:
            log.warning("daemon.stood_still", seconds=round(now - self._last_look, 1))
            self._awake_since = now
        self._last_look = now
        return now

    # --- what it sees ---

    def _state(self, now: float) -> State:
        return State(
            self._serving, self._limits, self._coming, [kid.seen(self._cancels, now) for kid in self._kids.values()],
            {place: history.resting_until for place, history in self._histories.items()},
            self._ending, self._awake_since, bool(self._reports),
        )  # fmt: skip

    # --- what it hears ---

    def _hear_signals(self) -> None:
        for each in self._signals.take() if self._signals is not None else []:
            if each != signal.SIGCHLD:
                log.info("signal.received", signal=each.name)
                self._obey(each)

    def _obey(self, signum: signal.Signals) -> None:
        match signum:
            case signal.SIGTERM | signal.SIGINT:
                self._stop_or_hurry()
            case signal.SIGQUIT:
                self._ending = Ending(time.monotonic(), is_now=True)
            case signal.SIGHUP:
                self._wants_reload = True
            case signal.SIGTTIN:
                self._scale(self._serving.workers + 1)
            case signal.SIGTTOU:
                self._scale(self._serving.workers - 1)
            case signal.SIGUSR1:
                logs.reopen()
                self._signal_all(signal.SIGUSR1)
            case signal.SIGUSR2:
                self._signal_all(signal.SIGUSR2)
                self._stacks_at = time.monotonic() + STACKS_SECONDS

    def _stop_or_hurry(self) -> None:
        """Once: drain. Twice: the grace is over. Thrice: now."""
        now = time.monotonic()
        if self._ending is None or math.isinf(self._ending.hurry_at):
            self._ending = Ending(now + self.settings.grace_seconds)
        else:
            self._ending = Ending(now, is_now=now >= self._ending.hurry_at)

    def _scale(self, workers: int) -> None:
        workers = min(max(workers, 1), MOST_WORKERS)
        self._serving = replace(self._serving, workers=workers)
        if self._coming is not None:
            self._coming = replace(self._coming, workers=workers)
        log.info("daemon.scaled", workers=workers)

    def _signal_all(self, signum: signal.Signals) -> None:
        for kid in self._kids.values():
            kid.signal(signum)

    def _hear_children(self) -> None:
        for kid in [*self._kids.values()]:
            kid.channel.flush()
            if not kid.channel.is_closed:
                for message in kid.channel.receive():
                    self._hear(kid, message)

    def _hear(self, kid: Kid, message: Message) -> None:
        kid.heard_at = time.monotonic()
        try:
            self._understand(kid, message)
        except (ValueError, KeyError, TypeError, AttributeError):
            log.exception("message.refused", role=kid.place.role, pid=kid.pid)

    def _understand(self, kid: Kid, message: Message) -> None:
        """A worker runs other people's code: what only a keeper says is not taken from it."""
        match kid.place.role, message["say"]:
            case _, "ready":
                kid.problem = message.get("problem")
                self._welcome(kid)
            case "web", "listening":
                kid.problem = None
            case _, "failed":
                kid.failure = Exit(_known_code(message.get("code")), str(message.get("message")))
            case "keeper", "cancel":
                must_end_by = time.monotonic() + self.settings.library.timeout_delta_seconds
                self._cancels.setdefault((uuid.UUID(message["task_id"]), int(message["token"])), must_end_by)
            case "keeper", "recovered":
                self._reports.pop(str(message.get("worker_id")), None)
            case "keeper", "state":
                self._hear_state(message)
            case "keeper", "gauges":
                self._gauges = message
                self._tell_web(message)

    def _welcome(self, kid: Kid) -> None:
        kid.is_ready = True
        log.info(f"{kid.place.role}.ready", slot=kid.place.slot, pid=kid.pid, seconds=_since(kid.born))
        if kid.place.role == "keeper":  # the last one may have left some unsettled: they are settled once
            for report in self._reports.values():
                kid.channel.send({"say": "died", "report": report.to_json()})
        if kid.place.role == "web" and self._gauges:
            kid.channel.send(self._gauges, is_status=True)
        if not self._has_started and all(self._serves(place) for place in self._serving.places()):
            self._has_started = True
            log.info("daemon.ready", seconds=round((datetime.now(UTC) - self._started_at).total_seconds(), 2))

    def _hear_state(self, message: Message) -> None:
        self._keeper_says = message

    def _hear_operators(self) -> None:
        for request in self._control.requests() if self._control is not None else []:
            request.answer({"ok": True} | self._answer(request))

    def _answer(self, request: Request) -> dict[str, Any]:
        match request.command:
            case "status":
                return {**self._status()}
            case "pause" | "resume":
                self._is_paused = request.command == "pause"
                for kid in self._workers():
                    kid.channel.send({"say": request.command})
            case "drain":
                self._ending = self._ending or Ending(math.inf)
            case "scale":
                self._scale(request.workers or 1)
        return {}

    # --- deaths ---

    def _bury_the_dead(self) -> None:
        """Also strangers, who became ours when their parents died."""
        kids = {kid.pid: kid for kid in self._kids.values()}
        for pid, status in reap(is_ours=kids.__contains__):
            if pid in kids:
                self._guardian.groups.remove(pid)
                self._died(kids[pid], status)
            elif pid == self._guardian.pid:
                log.error("guardian.died", how=how_it_ended(status))
                self._guard_at = time.monotonic() + GUARD_SECONDS

    def _died(self, kid: Kid, status: int) -> None:
        for message in kid.channel.receive():  # its last words
            self._hear(kid, message)
        view = kid.page.read()
        del self._kids[kid.number]
        is_expected = kid.stage not in {Stage.SERVING, Stage.ABORTED}
        how = how_it_ended(status, kid.why if kid.stage >= Stage.ABORTED else None)
        self._log_death(kid, how, is_expected=is_expected or status == 0)
        self._book.close(kid.number, kid.ledger, view)
        if kid.is_worker:
            self._book.count("deaths", self._cause(kid, status))
            self._report(kid, view, status, how)
            if self._ending is not None and not self._workers():
                self._write_down()  # the keeper is told to go next
        if not is_expected:
            self._count_failure(kid)
        kid.close()

    def _log_death(self, kid: Kid, how: str, *, is_expected: bool) -> None:
        tell = log.info if is_expected else log.warning
        tell(
            f"{kid.place.role}.died", slot=kid.place.slot, pid=kid.pid, how=how, why=kid.why, seconds=_since(kid.born),
            message=kid.failure.message if kid.failure is not None and self._has_started else None,  # else told once
            stacks=kid.stacks.take() or None,
        )  # fmt: skip

    def _report(self, kid: Kid, view: PageView, status: int, how: str) -> None:
        """Nothing is told of one that never had a name, nor of one that has left in good order, as it was asked to."""
        is_in_order = status == 0 and kid.stage != Stage.SERVING and not view.executing and not view.done
        if not view.worker_id or is_in_order:
            return
        now, settings = time.monotonic(), self._settings[kid.generation]
        executing = [Executing(each.task_id, each.token, now - each.started) for each in view.executing]
        report = CrashReport(
            view.worker_id, settings.name, socket.gethostname(), kid.pid, kid.place.slot, how,
            self._cause(kid, status),
            kid.guilty if kid.guilty in {each.task_id for each in executing} else None,  # it may have ended just so
            tuple(executing),
            tuple(Done(each.task_id, each.token) for each in view.done), view.backends,
            is_counted=view.is_counted,
        )  # fmt: skip
        self._reports[report.worker_id] = report
        for keeper in self._keepers():
            if keeper.is_ready:  # the others are told when they are
                keeper.channel.send({"say": "died", "report": report.to_json()})

    def _cause(self, kid: Kid, status: int) -> Cause:
        """Ours, if we have ended it, or it ended in good order as we asked it to."""
        is_ours = kid.stage >= Stage.ABORTED or (kid.stage != Stage.SERVING and status == 0)
        return kid.cause or "shutdown" if is_ours else "crash"

    def _count_failure(self, kid: Kid) -> None:
        if self._coming is not None and kid.generation == self._coming.number:
            self._coming = replace(self._coming, has_failed=True)
            log.error("reload.failed", message=kid.failure and kid.failure.message, consequence="the old workers stay")
            return  # its place is served, and has nothing to rest from
        now = time.monotonic()
        lived = now - kid.born if kid.is_ready else 0.0  # a long import is no life
        self._histories.setdefault(kid.place, History()).add(now, lived, self.settings.restart)
        if not self._has_started and kid.failure is not None and kid.failure.code in BOOT_ERRORS:
            self._give_up(kid.failure)

    def _give_up(self, failure: Exit) -> None:
        """At the first start only: a restart cures none of these, and somebody is watching."""
        if self._exit_code is None:
            log.error("daemon.failed", message=failure.message, code=int(failure.code))
            self._exit_code = int(failure.code)
            self._last_words = redactor(self.settings.secrets())(failure.message)
        self._ending = Ending(time.monotonic(), is_now=True)

    # --- what it does ---

    def _perform(self, action: Action) -> None:
        match action:
            case Spawn(place, generation):
                self._spawn(place, generation)
            case Stop(number, why, stop_by, cause):
                self._stop(self._kids[number], why, stop_by, cause)
            case Hurry(number):
                self._hurry(self._kids[number])
            case Abort(number, why):
                self._abort(self._kids[number], why)
            case Kill(number, cause, guilty):
                self._kill(self._kids[number], cause, guilty)
            case Adopt():
                self._adopt()
            case Abandon(why):
                self._coming = None
                if why is not None:  # else it was told already
                    log.error("reload.failed", message=why, consequence="the old workers stay")
            case Leave():
                self._has_left = True

    def _spawn(self, place: Place, generation: int) -> None:
        """No memory, or no process to be had: then later."""
        try:
            self._fork(place, generation)
        except OSError as error:
            log.error("spawn.failed", role=place.role, slot=place.slot, error=str(error))
            self._histories.setdefault(place, History()).resting_until = time.monotonic() + 1.0
            if self._coming is not None and generation == self._coming.number:
                self._coming = replace(self._coming, has_failed=True)

    def _fork(self, place: Place, generation: int) -> None:
        settings = self._settings[generation]
        self._born += 1
        slots = settings.concurrency + page.SPARE_SLOTS if place.role == "worker" else 0
        ours, theirs = Channel.pair()
        kid = Kid(self._born, place, generation, Page(slots, name=self._mark), ours, Stacks())
        birth = child.Birth(place, settings, kid.page, theirs, kid.stacks, kid.ledger, self._mark, self._pid)
        try:
            with signals.held_back():
                kid.pid = os.fork()
                if kid.pid == 0:
                    child.live(birth, [ours.close, self._guardian.close, self._leave_behind])
        except OSError:
            kid.close()
            raise
        finally:
            theirs.close()
        with contextlib.suppress(OSError):  # it may be quicker, or dead already
            os.setpgid(kid.pid, kid.pid)
        self._guardian.groups.add(kid.pid)
        self._kids[kid.number] = kid
        if self._is_paused and place.role == "worker":
            kid.channel.send({"say": "pause"})
        log.info(f"{place.role}.spawned", slot=place.slot, pid=kid.pid, generation=generation)

    def _guard(self) -> None:
        """No process to be had: then later."""
        self._guard_at = math.inf
        try:
            self._guardian.start(self._leave_behind)
        except OSError as error:
            log.error("guardian.missing", error=str(error))
            self._guard_at = time.monotonic() + GUARD_SECONDS

    def _leave_behind(self) -> None:
        """In a child: everything of the supervisor's and of its siblings. A new child is not in the list yet."""
        for each in (self._signals, self._control, *self._kids.values()):
            if each is not None:
                each.close()

    def _stop(self, kid: Kid, why: str, stop_by: float, cause: Cause) -> None:
        kid.stop_by, kid.why, kid.cause = stop_by, why, cause
        kid.advance(Stage.ASKED, signal.SIGTERM, page.DRAIN)
        log.info(f"{kid.place.role}.stopping", slot=kid.place.slot, pid=kid.pid, why=why)

    def _hurry(self, kid: Kid) -> None:
        kid.advance(Stage.HURRIED, signal.SIGTERM, page.HURRY)
        log.warning(f"{kid.place.role}.hurried", slot=kid.place.slot, pid=kid.pid)

    def _abort(self, kid: Kid, why: str) -> None:
        log.error(f"{kid.place.role}.hung", slot=kid.place.slot, pid=kid.pid, why=why, running=kid.running())
        kid.why, kid.cause = why, "hang"
        kid.advance(Stage.ABORTED, signal.SIGABRT)

    def _kill(self, kid: Kid, cause: Cause | None, guilty: UUID | None) -> None:
        kid.cause, kid.guilty = cause or kid.cause, guilty
        if guilty is not None:
            kid.why = "a task was over its time" if cause == "hard_timeout" else "a cancelled task did not stop"
        log.warning(f"{kid.place.role}.killed", slot=kid.place.slot, pid=kid.pid, cause=kid.cause, task_id=guilty)
        kid.advance(Stage.KILLED, signal.SIGKILL)

    # --- reload ---

    def _reload(self) -> None:
        self._wants_reload = False
        self._manager.note_reload()
        try:
            settings = self._reread()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the old one serves
            log.error("reload.refused", error=str(error), consequence="nothing has changed")
            return
        # What an operator has said since the start holds, unless the settings say something new.
        workers = self._serving.workers if settings.workers == self.settings.workers else settings.workers
        self._generations += 1
        self._settings[self._generations] = settings
        self._coming = Generation(self._generations, workers, has_web=settings.web.port is not None)
        log.info("reload.started", generation=self._generations, workers=workers)

    def _reread(self) -> Settings:
        """Where the daemon is found stays as it was."""
        new, old = self._reload_settings(), self.settings
        return new.model_copy(
            update={"runtime_directory": old.runtime_directory, "control_socket": old.control_socket, "log": old.log}
        )

    def _adopt(self) -> None:
        if self._coming is not None:
            self._serving, self._coming = self._coming, None
            self._limits = _limits(self.settings)
            log.info("reload.done", generation=self._serving.number)

    # --- what it tells ---

    def _tell(self) -> None:
        now = time.monotonic()
        if self._wants_reload and self._coming is None and self._ending is None:
            self._reload()
        if now >= self._stacks_at:
            self._stacks_at = math.inf
            self._log_stacks()
        if now >= self._guard_at:
            self._guard()
        if self._ending is not None and self._ending.workers_gone_at is None and not self._workers():
            self._ending = replace(self._ending, workers_gone_at=now)
        if now >= self._tell_at:
            self._tell_at = now + TELL_SECONDS
            self._once_a_second(now)
        phase, words = self._phase(), self._last_words or self._headline
        # Children that die again and again get no more time to start: the manager is to say that it failed.
        self._manager.tell(phase, words, now, extends=phase != "starting" or not self._problems)

    def _once_a_second(self, now: float) -> None:
        for kid in self._kids.values():
            kid.measure()
        self._cancels = {task: moment for task, moment in self._cancels.items() if moment > now - 60}
        self._judge_health(now)
        self._headline = headline(self._status())
        workers = [self._kid_status(kid) for kid in self._workers() if kid.view is not None and kid.view.worker_id]
        for kid in self._keepers():
            kid.channel.send({"say": "workers", "workers": workers}, is_status=True)
        for kid in self._kids.values():
            self._book.look(kid.number, kid.ledger, kid.view)
        self._tell_web({"say": "status", **self._status()})
        self._tell_web({"say": "totals", "totals": to_json(self._book.totals())})
        if now >= self._write_down_at:
            self._write_down_at = now + WRITE_DOWN_SECONDS
            self._write_down()

    def _tell_web(self, message: Message) -> None:
        for kid in self._kids.values():
            if kid.place.role == "web":
                kid.channel.send(message, is_status=True)

    def _write_down(self) -> None:
        """By the keeper: we have no connection. If there is none to tell, it waits."""
        ready = [kid for kid in self._keepers() if kid.is_ready]
        amounts = self._book.to_write_down() if ready else {}
        if amounts:
            ready[0].channel.send({"say": "counted", "amounts": to_json(amounts)})

    def _judge_health(self, now: float) -> None:
        restart = self.settings.restart
        problems = [
            f"{_called(place)} died {restart.crash_loop_deaths} times or more within {restart.crash_loop_seconds:g} s"
            for place, history in self._histories.items()
            if place in self._serving.places() and history.is_crash_loop(now, self._lived(place, now), restart)
        ]
        problems += [kid.problem for kid in self._kids.values() if kid.problem is not None]
        if problems and not self._problems:
            log.error("daemon.unhealthy", problems=problems)
        if self._problems and not problems:
            log.info("daemon.healthy")
        self._problems = problems

    def _lived(self, place: Place, now: float) -> float:
        """How long the one has served that is in this place now."""
        return max((now - kid.born for kid in self._kids.values() if kid.place == place and kid.is_ready), default=0.0)

    def _log_stacks(self) -> None:
        for kid in self._kids.values():
            log.info(
                f"{kid.place.role}.stacks",
                slot=kid.place.slot,
                pid=kid.pid,
                stacks=kid.stacks.take(),
                running=kid.running(),
            )

    def _status(self) -> Status:
        says = self._keeper_says if any(kid.is_ready for kid in self._keepers()) else {}
        status: Status = {
            "name": self.settings.name,
            "version": __version__,
            "pid": self._pid,
            "started_at": self._started_at.isoformat(),
            "state": self._word(),
            "is_healthy": not self._problems,
            "problems": self._problems,
            "database": bool(says.get("database")),
            "listening": bool(says.get("listening")),
            "elected": bool(says.get("elected")),
            "unserved": list(says.get("unserved") or []),
            "unclaimable": list(says.get("unclaimable") or []),
            "term": says.get("term"),
            "connections": int(says.get("connections") or 0),
            "budget": int(says.get("budget") or 0),
            "wanted_workers": self._serving.workers,
            "concurrency": self.settings.concurrency,
            "workers": [*self._statuses("worker")],
        }
        usage = kernel.usage(self._pid)
        if usage is not None:
            status["memory_bytes"], status["cpu_seconds"] = usage
        for keeper in self._statuses("keeper"):
            status["keeper"] = keeper
        for web in self._statuses("web"):
            status["web"] = web
        return status

    def _word(self) -> Literal["starting", "running", "paused", "draining", "stopping"]:
        if self._ending is not None:
            is_late = self._ending.is_now or time.monotonic() >= self._ending.hurry_at
            return "stopping" if is_late or not self._workers() else "draining"
        if not self._has_started:
            return "starting"
        return "paused" if self._is_paused else "running"

    def _phase(self) -> Phase:
        """As a service manager sees it."""
        if self._ending is not None:
            return "stopping"
        if not self._has_started:
            return "starting"
        return "reloading" if self._coming is not None else "running"

    def _statuses(self, role: str) -> Iterator[ChildStatus]:
        """Every child, and every wanted place that has none."""
        kids = sorted((kid for kid in self._kids.values() if kid.place.role == role), key=lambda kid: kid.place)
        for kid in kids:
            yield self._kid_status(kid)
        for place in self._serving.places():
            if place.role == role and not any(kid.place == place for kid in kids):
                restarts = self._histories.get(place, History()).restarts
                yield {"slot": place.slot, "pid": None, "state": "waiting", "started_at": None, "restarts": restarts}

    def _kid_status(self, kid: Kid) -> ChildStatus:
        now = time.monotonic()
        is_hung = kid.stage == Stage.ABORTED
        if kid.stage == Stage.SERVING:  # one that drains claims nothing any more
            seen = kid.seen(self._cancels, now)
            is_hung = why_hung(self._limits, seen, now, awake_since=self._awake_since) is not None
        return kid.status(restarts=self._histories.get(kid.place, History()).restarts, is_hung=is_hung)

    # --- who is there ---

    def _workers(self) -> list[Kid]:
        return [kid for kid in self._kids.values() if kid.is_worker]

    def _keepers(self) -> list[Kid]:
        return [kid for kid in self._kids.values() if kid.place.role == "keeper"]

    def _serves(self, place: Place) -> bool:
        return any(kid.place == place and kid.is_ready for kid in self._kids.values())


def _known_code(code: Any) -> ExitCode:
    return ExitCode(code) if isinstance(code, int) and code in set(ExitCode) else ExitCode.FAILED


def _limits(settings: Settings) -> Limits:
    recycle, memory = settings.recycle, settings.recycle.max_memory_mb
    return Limits(
        settings.grace_seconds, settings.boot_seconds, settings.hang_seconds, settings.stall_seconds,
        settings.library.database_timeout_seconds, recycle.max_tasks, recycle.max_age_seconds,
        None if memory is None else memory * 1024**2,
    )  # fmt: skip


def _called(place: Place) -> str:
    return f"worker {place.slot}" if place.role == "worker" else f"the {place.role}"


def _since(moment: float) -> float:
    return round(time.monotonic() - moment, 2)
