"""The keeper: the child that does the daemon's housekeeping, and, when elected, that of the whole cluster.

For its own daemon it always recovers the tasks of dead workers, renews the leases of living ones, listens for
notifications and wakes workers, and writes snapshots. When elected it also reaps, expires, prunes, and reports tasks
that no worker serves. It imports and runs no user code. Each loop has its own connection, so that none waits for
another.
"""

from __future__ import annotations

import contextlib
import functools
import math
import queue
import select
import signal
import socket
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from tasklib.budget import daemon_budget
from tasklib.database import Database
from tasklib.duties.duty_list import Duty, DutyList, DutyOptions
from tasklib.duties.janitor import DAY_SECONDS, Retention
from tasklib.duties.runner import DutyRunner
from tasklib.duties.snapshots import ClaimSettings, Snapshots, WorkerState
from tasklib.duties.statements import KeeperStatements
from tasklib.errors import DatabaseUnavailable, TasklibError
from tasklib.log import log
from tasklib.runtime.loop import Loop, Service
from tasklib.runtime.metrics import Counts, WorkerMetrics
from tasklib.runtime.session import Session
from tasklib.statements import WorkerStatements
from tasklib.worker.claimer import CLAIM_LIMIT
from tasklib.worker.listener import Listener
from tasklib_daemon import gauges
from tasklib_daemon.counters import CounterMetrics, Counters, from_json
from tasklib_daemon.crashes import CrashReport, Recoveries
from tasklib_daemon.election import Election, WhenElected
from tasklib_daemon.gauges import Gauges
from tasklib_daemon.signals import Signals
from tasklib_daemon.wake import WakeSender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tasklib_daemon.channel import Channel
    from tasklib_daemon.settings import Settings

Message = dict[str, Any]

TICK_SECONDS = 1.0
SETTLE_SECONDS = 2.0  # for the first answers from the database
FRESH_SECONDS = 5.0  # how long a list of workers is believed; the supervisor sends one every second
ANSWER_SECONDS = 5.0  # the database is up if it has answered so lately; the election asks about every second
UNSERVED_SECONDS = 10.0  # workers that have just started must register before the first look, too
DRAIN_SECONDS = 5.0  # for recoveries that are waiting, when it is told to stop
STOP_SECONDS = 5.0  # for its loops
LISTEN_SECONDS = 1.0  # at a time, because a stop has to wait for it
HOUR_SECONDS = 3600.0


def run(settings: Settings, channel: Channel, counters: Counters | None = None) -> None:
    """Run until SIGTERM, or until the supervisor is gone. Recoveries that are waiting are done first, unless a second
    SIGTERM comes.
    """
    signals = Signals([signal.SIGTERM])
    poll = select.poll()
    for each in (signals, channel):
        poll.register(each, select.POLLIN)
    metrics = WorkerMetrics() if counters is None else CounterMetrics(counters, "keeper")
    with contextlib.closing(Keeper(settings, channel.send, metrics)) as keeper:
        keeper.start()
        while not signals.take() and not channel.is_closed:
            keeper.tick()
            poll.poll(1000 * (TICK_SECONDS if keeper.is_settled else 0.02))
            keeper.receive(channel.receive(0))
        keeper.receive(channel.receive(0))  # the last statistics
        until = time.monotonic() + DRAIN_SECONDS
        while keeper.recoveries.is_waiting and not (signals.take() or channel.is_closed) and time.monotonic() < until:
            keeper.receive(channel.receive(0.02))


class Keeper:
    """The parts of a keeper, and the messages between them and the supervisor."""

    def __init__(
        self, settings: Settings, send: Callable[[Message], None], metrics: WorkerMetrics | None = None
    ) -> None:
        config = settings.config()
        self._settings = settings
        self._send = send
        self._metrics = metrics or WorkerMetrics()
        self._counts = Counts()  # what workers have counted, until it is in the statistics
        self._workers = _ReportedWorkers()
        self.is_ready = False
        self._settles_until = math.inf
        self._last_state: tuple[float, Message] = (0.0, {})  # when it was sent, and which
        self._wake_sender = WakeSender(settings.runtime_directory)
        self._sessions = {
            "duties": Session(config, "duties", settings="-c lock_timeout=2s"),
            "crashes": Session(config, "crashes", settings="-c lock_timeout=500ms"),
            "history": Session(config, "history", settings="-c lock_timeout=2s"),
            "listen": Session(config, "listen"),
            "gauges": Session(config, "gauges", settings=gauges.SETTINGS),
        }
        self._budget = daemon_budget(config, workers=settings.workers, concurrency=settings.concurrency)
        self._make_services()
        self._loops = self._make_loops()
        self._schema_check = _SchemaCheck(Database(config), self._start_loops)
        self._schema_loop = Loop("boot", self._schema_check)

    def _make_services(self) -> None:
        """Those that other parts ask or tell something."""
        settings, config = self._settings, self._settings.config()
        statements, own_statements = WorkerStatements(config), KeeperStatements(config)
        duties, crashes = self._sessions["duties"], self._sessions["crashes"]
        self.election = Election(
            duties, own_statements, name="duties", holder=f"{settings.name}-{uuid4()}",
            ttl_seconds=settings.election_ttl_seconds, metrics=self._metrics,
        )  # fmt: skip
        self.recoveries = Recoveries(
            config, crashes, statements, own_statements, on_recovered=self._send_recovered, metrics=self._metrics
        )
        self._cancels = _Cancels(crashes, own_statements, self._send_cancel)
        keep_dead = settings.retention.heartbeats_hours
        options = DutyOptions(
            settings.queues, self._budget, unserved_seconds=UNSERVED_SECONDS, retention=_retention(settings),
            keep_dead_seconds=None if keep_dead is None else keep_dead * HOUR_SECONDS,
        )  # fmt: skip
        self._duties = DutyList(
            config, options, duties, self._sessions["history"], metrics=self._metrics, take_counts=self._counts.take
        )
        self._listener = Listener(
            self._sessions["listen"], statements, settings.queues, on_ring=self._wake_worker, on_cancel=self._cancel,
            wait_seconds=LISTEN_SECONDS,
        )  # fmt: skip

    def _duties_for_keeper(self) -> dict[str, list[Service]]:
        """All duties, in the order in which they run, by the session that they use."""
        settings, config = self._settings, self._settings.config()
        session, history = self._sessions["duties"], self._sessions["history"]
        statements = KeeperStatements(config)
        snapshots = Snapshots(
            history, statements, _claim_settings(settings), take=self._workers.states,
            every_seconds=settings.snapshot_seconds,
        )  # fmt: skip
        renewals = _Renewals(session, statements, self._workers.alive, config.lease_seconds)
        return {
            "duties": [self.election, renewals, *map(self._when_elected, self._duties.current)],
            "history": [snapshots, *map(self._when_elected, self._duties.history)],
        }

    def _when_elected(self, duty: Duty) -> Service:
        if not duty.once_per_cluster:
            return duty.service
        return WhenElected(self.election, duty.service, after_seconds=duty.after_seconds)

    def _make_loops(self) -> dict[str, Loop]:
        services: dict[str, Service] = {
            "crashes": _AtOnce([self.recoveries, self._cancels]),
            "listen": self._listener,
            "gauges": Gauges(
                self._settings.config(), self._sessions["gauges"], self._metrics, is_elected=self.election.is_held,
                unserved=lambda: len(self._duties.unserved_names.unserved), send=self._send,
            ),
        }  # fmt: skip
        for role, duties in self._duties_for_keeper().items():
            services[role] = DutyRunner(duties, on_refusal=functools.partial(self._metrics.failed, role, "refused"))
        loops = {role: Loop(role, service) for role, service in services.items()}
        for role, loop in loops.items():
            loop.on_failure = self._metrics.failed
            loop.answers = functools.partial(getattr, self._sessions[role], "answers")
        return loops

    # --- start and stop ---

    def start(self) -> None:
        """The loops start when the schema is known to fit. A database that is away is waited for."""
        self._schema_loop.start()

    def _start_loops(self) -> None:
        for loop in self._loops.values():
            loop.start()
        log.info("keeper.started")

    def close(self) -> None:
        self._schema_loop.stop()  # first, because it starts the others
        self._schema_loop.join(STOP_SECONDS)
        for loop in self._loops.values():
            loop.stop()
        until = time.monotonic() + STOP_SECONDS
        for role, loop in self._loops.items():
            self._close_loop(role, loop, max(until - time.monotonic(), 0.0))
        log.info("keeper.stopped")

    def _close_loop(self, role: str, loop: Loop, seconds: float) -> None:
        """A loop that does not end, because the database does not answer, keeps its session."""
        if loop.is_alive():
            loop.join(seconds)
        if loop.is_alive():
            return
        if role == "duties":
            with contextlib.suppress(Exception):  # then its term runs out
                self.election.resign()
        if role == "listen":
            self._wake_sender.close()
        if role == "history":
            self._duties.rollups.write_last()
        self._sessions[role].close()

    # --- messages from the supervisor ---

    def receive(self, messages: list[Message]) -> None:
        for message in messages:
            try:
                self._handle(message)
            except (KeyError, TypeError, ValueError) as error:
                log.error("message.rejected", say=str(message.get("say")), error=f"{type(error).__name__}: {error}")

    def _handle(self, message: Message) -> None:
        match message["say"]:
            case "died":
                self.recoveries.add(CrashReport(**message["report"]))
                self._loops["crashes"].wake()
            case "workers":
                self._workers.take(message["workers"])
            case "counted":
                self._counts.add(from_json(message["amounts"]))

    # --- messages to the supervisor and to workers ---

    def tick(self) -> None:
        """Report the state if it has changed, or if a second has passed. Raises an error that makes it impossible to
        go on.
        """
        if self._schema_check.error is not None:
            raise self._schema_check.error
        if not self._schema_check.has_tried:
            return
        if not self.is_ready:
            self.is_ready = True
            self._settles_until = time.monotonic() + SETTLE_SECONDS
            self._send({"say": "ready"})
        self._metrics.rounds({name: loop.beats for name, loop in self._loops.items()})
        state, now = self._state(), time.monotonic()
        sent_at, last = self._last_state
        if state != last or now - sent_at >= TICK_SECONDS:
            self._last_state = (now, state)
            self._send(state)

    @property
    def is_settled(self) -> bool:
        """Its first answers from the database are in its state, or have not come in time. Until then `tick` is called
        more often: otherwise `tasklibd status` would say "not connected" in the first second.
        """
        _, state = self._last_state
        is_complete = bool(state) and state["database"] and state["listening"]
        return is_complete or time.monotonic() >= self._settles_until

    def _state(self) -> Message:
        is_elected = self.election.is_held()
        return {
            "say": "state",
            "database": time.monotonic() - self.election.answered < ANSWER_SECONDS,
            "listening": self._listener.is_heard,
            "elected": is_elected,
            "term": self.election.term if is_elected else None,
            "unserved": self._duties.unserved_names.unserved if is_elected else [],
            "unclaimable": self._duties.standstill.hidden,
            "connections": sum(session.is_connected for session in self._sessions.values()),
            "budget": self._budget.total,
        }

    def _send_recovered(self, report: CrashReport, seconds: float) -> None:
        self._send({"say": "recovered", "worker_id": report.worker_id, "pid": report.pid, "seconds": round(seconds, 4)})

    def _send_cancel(self, task_id: UUID, token: int) -> None:
        self._send({"say": "cancel", "task_id": str(task_id), "token": token})

    def _wake_worker(self) -> None:
        self._metrics.count("rings")
        self._wake_sender.ring()

    def _cancel(self, task_id: UUID) -> None:
        self._wake_sender.cancel(task_id)
        self._cancels.add(task_id)
        self._loops["crashes"].wake()


class _ReportedWorkers:
    """The workers, as the supervisor last reported them. After a long silence of the supervisor the list is empty:
    then it is not known which workers live.
    """

    def __init__(self) -> None:
        self._workers: list[Message] = []
        self._taken_at = -FRESH_SECONDS

    def take(self, workers: list[Message]) -> None:
        self._workers = [each for each in workers if each.get("worker_id")]
        self._taken_at = time.monotonic()

    def _fresh(self) -> list[Message]:
        return self._workers if time.monotonic() - self._taken_at < FRESH_SECONDS else []

    def alive(self) -> list[str]:
        return [each["worker_id"] for each in self._fresh() if not each.get("is_hung")]

    def states(self) -> list[WorkerState]:
        return [_worker_state(each) for each in self._fresh()]


class _AtOnce:
    """Services of one loop that all run in every round."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = services

    def run_once(self) -> float | None:
        pauses = [service.run_once() for service in self._services]
        return min((pause for pause in pauses if pause is not None), default=None)


class _Cancels:
    """Any client may notify. The database says whether a task was really cancelled, and which run of it."""

    def __init__(self, session: Session, statements: KeeperStatements, send: Callable[[UUID, int], None]) -> None:
        self._session = session
        self._statements = statements
        self._send = send
        self._notified: queue.SimpleQueue[UUID] = queue.SimpleQueue()

    def add(self, task_id: UUID) -> None:
        self._notified.put(task_id)

    def run_once(self) -> float | None:
        notified = {self._notified.get() for _ in range(self._notified.qsize())}
        if notified:
            for task_id, token in self._session.run(self._statements.asked_to_stop([*notified])):
                self._send(task_id, token)
        return None


class _SchemaCheck:
    """Checks once whether the schema fits this version."""

    def __init__(self, database: Database, on_fit: Callable[[], None]) -> None:
        self._database = database
        self._on_fit = on_fit
        self.has_tried = False
        self.error: TasklibError | None = None

    def run_once(self) -> float | None:
        try:
            self._database.check_schema()
        except DatabaseUnavailable:
            self.has_tried = True
            raise
        except TasklibError as error:
            self.error = error
            return None
        self._on_fit()
        self.has_tried = True
        return None


class _Renewals:
    """Renews leases for living workers: a task that holds the interpreter's lock keeps its own worker from it."""

    def __init__(
        self, session: Session, statements: KeeperStatements, alive: Callable[[], list[str]], lease_seconds: float
    ) -> None:
        self._session = session
        self._statements = statements
        self._alive = alive
        self._pause_seconds = lease_seconds / 6

    def run_once(self) -> float | None:
        alive = self._alive()
        renewed = self._session.run(self._statements.renew_for(alive)) if alive else []
        if renewed:
            log.warning("workers.silent", worker_ids=renewed, consequence="the keeper has renewed their leases")
        return self._pause_seconds


def _worker_state(worker: Message) -> WorkerState:
    started_at = worker.get("started_at")
    return WorkerState(
        worker_id=worker["worker_id"],
        hostname=socket.gethostname(),
        pid=worker["pid"],
        tasks_running=worker.get("running", 0),
        tasks_claimed=worker.get("claimed", 0),
        memory_bytes=worker.get("memory_bytes"),
        cpu_percent=worker.get("cpu_percent"),
        started_at=None if started_at is None else datetime.fromisoformat(started_at),
    )


def _retention(settings: Settings) -> Retention:
    days = settings.retention
    return Retention(*(
        None if each is None else each * DAY_SECONDS
        for each in (days.completed_days, days.failed_days, days.states_days, days.audit_days)
    ))  # fmt: skip


def _claim_settings(settings: Settings) -> ClaimSettings:
    config = settings.config()
    per_worker = None if settings.buffer_size is None else settings.concurrency + settings.buffer_size
    recovery = {
        "lease_seconds": config.lease_seconds,
        "lock_timeout_seconds": config.lock_timeout_seconds,
        "timeout_delta_seconds": config.timeout_delta_seconds,
        "bury_after": config.bury_after,
        "poll_interval_seconds": settings.poll_interval_seconds,
        "grace_seconds": settings.grace_seconds,
        "hang_seconds": settings.hang_seconds,
        "stall_seconds": settings.stall_seconds,
        "election_ttl_seconds": settings.election_ttl_seconds,
        "retention": settings.retention.model_dump(),
    }
    return ClaimSettings(settings.queues, CLAIM_LIMIT, per_worker, recovery)
