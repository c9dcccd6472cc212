"""What the supervisor tells others about the daemon: operators, the keeper, the web child and the service manager."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from tasklib.version import __version__
from tasklib_daemon import linux
from tasklib_daemon.counters import Totals, to_json
from tasklib_daemon.crashes import CrashReport, Done, Executing
from tasklib_daemon.logs import log
from tasklib_daemon.plan import Cause, Role, Stage, why_hung
from tasklib_daemon.redaction import redactor
from tasklib_daemon.sdnotify import ServiceManager
from tasklib_daemon.status import ChildStatus, Status, headline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasklib_daemon.channel import Message
    from tasklib_daemon.child_process import ChildProcess
    from tasklib_daemon.children import Children
    from tasklib_daemon.generations import Generations
    from tasklib_daemon.lifecycle import Lifecycle
    from tasklib_daemon.scoreboard import ScoreboardView

REPORT_SECONDS = 1.0
STATISTICS_SECONDS = 10.0  # the keeper stores them by the minute


class Reporter:
    def __init__(self, children: Children, generations: Generations, lifecycle: Lifecycle) -> None:
        self._children = children
        self._generations = generations
        self._lifecycle = lifecycle
        self.manager = ServiceManager(os.environ)
        self.keeper_state: Message = {}
        self._gauges: Message = {}  # of the cluster, as the elected keeper last read them
        self._totals = Totals()
        self._problems: list[str] = []
        self._headline = ""
        self._statistics_at = 0.0
        self.next_at = 0.0

    # --- what it learns ---

    def take_gauges(self, message: Message) -> None:
        self._gauges = message
        self._children.send("web", message, is_status=True)

    def greet_web(self, child: ChildProcess) -> None:
        """A new web child gets the gauges at once: the next ones may be some time off."""
        if self._gauges:
            child.channel.send(self._gauges, is_status=True)

    def note_death(self, child: ChildProcess, board: ScoreboardView, cause: Cause) -> None:
        self._totals.close(child.child_id, child.counters, board)
        if child.is_worker:
            self._totals.count("deaths", cause)
            if self._lifecycle.shutdown is not None and not self._children.has_workers:
                self._send_statistics()  # the keeper stops next

    # --- what it tells ---

    def report(self, now: float) -> None:
        if now >= self.next_at:
            self.next_at = now + REPORT_SECONDS
            self._report_to_children(now)
        phase = self._lifecycle.phase(is_reloading=self._generations.coming is not None)
        # A start in a crash loop gets no more time, so that the manager declares it failed.
        self.manager.notify(phase, self._words(), now, extends=phase != "starting" or not self._problems)

    def _words(self) -> str:
        failure = self._lifecycle.failure
        return self._headline if failure is None else redactor(self._generations.settings.secrets())(failure.message)

    def _report_to_children(self, now: float) -> None:
        for child in self._children:
            child.usage.measure(child.pid)
            self._totals.look(child.child_id, child.counters, child.view)
        self._judge_health()
        status = self.status()
        self._headline = headline(status)
        workers = [worker for worker in status.get("workers", []) if worker.get("worker_id")]
        self._children.send("keeper", {"say": "workers", "workers": workers}, is_status=True)
        self._children.send("web", {"say": "status", **status}, is_status=True)
        self._children.send("web", {"say": "totals", "totals": to_json(self._totals.totals())}, is_status=True)
        if now >= self._statistics_at:
            self._statistics_at = now + STATISTICS_SECONDS
            self._send_statistics()

    def _send_statistics(self) -> None:
        """The keeper writes them, because the supervisor has no connection. Without a keeper they wait."""
        keepers = self._children.ready_keepers()
        amounts = self._totals.take_for_statistics() if keepers else {}
        if amounts:
            keepers[0].channel.send({"say": "counted", "amounts": to_json(amounts)})

    def _judge_health(self) -> None:
        """Only slots of the serving generation count: a crash loop that was scaled away is over."""
        problems = self._children.crash_loops(self._generations.serving.slots(), self._generations.settings.restart)
        problems += [child.problem for child in self._children if child.problem is not None]
        if problems and not self._problems:
            log.error("daemon.unhealthy", problems=problems)
        if self._problems and not problems:
            log.info("daemon.healthy")
        self._problems = problems

    # --- the status ---

    def status(self) -> Status:
        keeper = self.keeper_state if self._children.ready_keepers() else {}
        settings, serving = self._generations.settings, self._generations.serving
        status: Status = {
            "name": settings.name,
            "version": __version__,
            "pid": os.getpid(),
            "started_at": self._lifecycle.started_at.isoformat(),
            "state": self._lifecycle.state(has_workers=self._children.has_workers),
            "is_healthy": not self._problems,
            "problems": self._problems,
            "database": bool(keeper.get("database")),
            "listening": bool(keeper.get("listening")),
            "elected": bool(keeper.get("elected")),
            "unserved": list(keeper.get("unserved") or []),
            "unclaimable": list(keeper.get("unclaimable") or []),
            "term": keeper.get("term"),
            "connections": int(keeper.get("connections") or 0),
            "budget": int(keeper.get("budget") or 0),
            "wanted_workers": serving.workers,
            "concurrency": settings.concurrency,
            "workers": [*self._statuses("worker")],
        }
        usage = linux.usage(os.getpid())
        if usage is not None:
            status["memory_bytes"], status["cpu_seconds"] = usage
        for found in self._statuses("keeper"):
            status["keeper"] = found
        for found in self._statuses("web"):
            status["web"] = found
        return status

    def _statuses(self, role: Role) -> Iterator[ChildStatus]:
        """Every child, and every wanted slot that has none."""
        children = sorted(self._children.in_role(role), key=lambda child: child.slot)
        for child in children:
            restarts = self._children.history(child.slot).restarts
            yield child.status(restarts=restarts, is_hung=self._is_hung(child))
        for slot in self._generations.serving.slots():
            if slot.role == role and not any(child.slot == slot for child in children):
                restarts = self._children.history(slot).restarts
                yield {"slot": slot.number, "pid": None, "state": "waiting", "started_at": None, "restarts": restarts}

    def _is_hung(self, child: ChildProcess) -> bool:
        """A draining worker is not: it claims nothing, so its claim loop may be silent."""
        if child.stage != Stage.SERVING:
            return child.stage == Stage.ABORTED
        now, limits = time.monotonic(), self._generations.limits
        return why_hung(limits, child.seen(now), now, awake_since=self._lifecycle.awake_since) is not None


class CrashReports:
    """What dead workers held. Each report is kept until a keeper has recovered the tasks: the keeper may die too."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self._reports: dict[str, CrashReport] = {}

    def __bool__(self) -> bool:
        return bool(self._reports)

    def add(self, child: ChildProcess, board: ScoreboardView, *, name: str, how: str, cause: Cause) -> None:
        now = time.monotonic()
        executing = tuple(Executing(each.task_id, each.token, now - each.started) for each in board.executing)
        is_guilty_there = child.stop.guilty in {each.task_id for each in executing}  # it may have ended in time
        report = CrashReport(
            worker_id=board.worker_id,
            name=name,
            hostname=socket.gethostname(),
            pid=child.pid,
            slot=child.slot.number,
            how=how,
            cause=cause,
            guilty=child.stop.guilty if is_guilty_there else None,
            executing=executing,
            done=tuple(Done(each.task_id, each.token) for each in board.done),
            backends=board.backends,
            is_counted=board.is_counted,
        )
        self._reports[report.worker_id] = report
        for keeper in self._children.ready_keepers():  # another gets it as soon as it is ready
            keeper.channel.send({"say": "died", "report": report.to_message()})

    def send_all(self, keeper: ChildProcess) -> None:
        """The keeper's predecessor may have left some. A report that comes twice does no harm."""
        for report in self._reports.values():
            keeper.channel.send({"say": "died", "report": report.to_message()})

    def remove(self, worker_id: str) -> None:
        self._reports.pop(worker_id, None)
