"""The keeper: the child that keeps house for its daemon, and, when elected, for all of them.

For its daemon, always: it recovers what workers held that died, renews the leases of those that are alive, listens and
rings the bell, and writes snapshots. When elected: it reaps, expires, prunes, and says which tasks nobody serves. It
runs no user code and imports none. Each loop has a connection of its own, so that none of these waits for another.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import select
import signal
import socket
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from tasklib.budget import BudgetCheck, daemon_budget
from tasklib.database import Database
from tasklib.duties.census import Census
from tasklib.duties.expirer import Expirer
from tasklib.duties.janitor import DAY_SECONDS, Janitor, Retention
from tasklib.duties.reaper import Reaper
from tasklib.duties.rollups import Rollups
from tasklib.duties.rota import Rota
from tasklib.duties.snapshots import Limits, Snapshots, WorkerState
from tasklib.duties.standstill import Standstill
from tasklib.duties.statements import KeeperStatements
from tasklib.errors import DatabaseUnavailable, TasklibError
from tasklib.log import log
from tasklib.statements import WorkerStatements
from tasklib.worker.claimer import CLAIM_LIMIT
from tasklib.worker.listener import Listener
from tasklib.worker.loop import Loop
from tasklib.worker.session import Session
from tasklib.worker.tally import Counts, Tally
from tasklib_daemon import gauges
from tasklib_daemon.bell import Bell
from tasklib_daemon.crashes import CrashReport, Recoveries
from tasklib_daemon.election import Election, WhenElected
from tasklib_daemon.gauges import Gauges
from tasklib_daemon.ledger import LedgerTally, from_json
from tasklib_daemon.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from tasklib.worker.loop import Service
    from tasklib_daemon.channel import Channel
    from tasklib_daemon.ledger import Ledger
    from tasklib_daemon.settings import Settings

Message = dict[str, Any]

TICK_SECONDS = 1.0
FRESH_SECONDS = 5.0  # what the supervisor said of its workers; it says so every second
ANSWER_SECONDS = 5.0  # the database has answered lately: the election asks every second or so
CENSUS_SECONDS = 10.0  # also before the first: workers that have just started have to register
DRAIN_SECONDS = 5.0  # for reports that wait, when it is told to stop
STOP_SECONDS = 5.0  # for its loops
LISTEN_SECONDS = 1.0  # at a time: a stop may have to wait for it
HOUR_SECONDS = 3600.0


def run(settings: Settings, channel: Channel, ledger: Ledger | None = None) -> None:
    """Until SIGTERM, or until there is no supervisor any more. Reports that wait are dealt with first, unless a second
    SIGTERM comes.
    """
    signals = Signals([signal.SIGTERM])
    poll = select.poll()
    for each in (signals, channel):
        poll.register(each, select.POLLIN)
    tally = Tally() if ledger is None else LedgerTally(ledger, "keeper")
    with contextlib.closing(Keeper(settings, channel.send, tally)) as keeper:
        keeper.start()
        while not signals.take() and not channel.is_closed:
            keeper.tick()
            poll.poll(1000 * (TICK_SECONDS if keeper.is_ready else 0.02))
            keeper.hear(channel.receive(0))
        keeper.hear(channel.receive(0))  # the last that was counted
        until = time.monotonic() + DRAIN_SECONDS
        while keeper.is_recovering and not (signals.take() or channel.is_closed) and time.monotonic() < until:
            keeper.hear(channel.receive(0.02))


class Keeper:
    """The parts of a keeper, and what they tell each other and the supervisor."""

    def __init__(self, settings: Settings, send: Callable[[Message], None], tally: Tally | None = None) -> None:
        config = self._config = settings.config()
        self._send = send
        self._tally = tally = tally or Tally()
        self._counts = Counts()  # what workers have counted, and is not written down yet
        self._workers: list[Message] = []
        self._workers_told = -FRESH_SECONDS
        self.is_ready = False
        self._told: tuple[float, Message] = (0.0, {})
        self._boot = _Boot(Database(config), self._booted)
        self._bell = Bell(settings.runtime_directory)
        statements, own_statements = WorkerStatements(config), KeeperStatements(config)
        self._sessions = {
            "duties": Session(config, "duties", settings="-c lock_timeout=2s"),
            "crashes": Session(config, "crashes", settings="-c lock_timeout=500ms"),
            "history": Session(config, "history", settings="-c lock_timeout=2s"),
            "listen": Session(config, "listen"),
            "gauges": Session(config, "gauges", settings=gauges.SETTINGS),
        }
        self._connection_budget = daemon_budget(config, workers=settings.workers, concurrency=settings.concurrency)
        duties, history = self._sessions["duties"], self._sessions["history"]
        self.election = Election(
            duties, own_statements, name="duties", holder=f"{settings.name}-{uuid4()}",
            ttl_seconds=settings.election_ttl_seconds, tally=tally,
        )  # fmt: skip
        self.recoveries = Recoveries(
            config,
            self._sessions["crashes"],
            statements,
            own_statements,
            on_recovered=self._tell_recovered,
            tally=tally,
        )
        self._cancels = _Cancels(self._sessions["crashes"], own_statements, self._tell_cancel)
        keep_dead = settings.retention.heartbeats_hours
        reaper = Reaper(
            config, duties, statements, keep_dead_seconds=None if keep_dead is None else keep_dead * HOUR_SECONDS,
            tally=tally,
        )  # fmt: skip
        self._census = Census(duties, statements, pause_seconds=CENSUS_SECONDS)
        self._standstill = Standstill(config, duties, statements, settings.queues)
        self._listener = Listener(
            self._sessions["listen"], statements, settings.queues, on_ring=self._ring, on_cancel=self._cancel,
            wait_seconds=LISTEN_SECONDS,
        )  # fmt: skip
        self._rollups = Rollups(config, history, self._counts.take)
        self._loops = {
            "crashes": Loop("crashes", _AtOnce([self.recoveries, self._cancels])),
            "listen": Loop("listen", self._listener),
            "duties": Loop("duties", Rota([
                self.election,
                BudgetCheck(duties, self._connection_budget),
                _Renewals(duties, own_statements, self._alive, config.lease_seconds),
                WhenElected(self.election, reaper),
                WhenElected(self.election, Expirer(duties, statements, tally)),
                WhenElected(self.election, self._census, after_seconds=CENSUS_SECONDS),
                self._standstill,
            ], on_refusal=functools.partial(tally.failed, "duties", "refused"))),
            "history": Loop("history", Rota([
                Snapshots(
                    history, own_statements, _limits(settings), take=self._states,
                    every_seconds=settings.snapshot_seconds,
                ),
                self._rollups,
                WhenElected(self.election, Janitor(history, own_statements, _retention(settings))),
            ], on_refusal=functools.partial(tally.failed, "history", "refused"))),
            "gauges": Loop("gauges", Gauges(
                config, self._sessions["gauges"], tally, is_elected=self.election.is_held,
                unserved=lambda: len(self._census.unserved), tell=send,
            )),
        }  # fmt: skip
        for role, loop in self._loops.items():
            loop.on_failure = tally.failed
            loop.answers = functools.partial(getattr, self._sessions[role], "answers")
        self._boot_loop = Loop("boot", self._boot)

    # --- coming and going ---

    def start(self) -> None:
        """The loops begin when the schema has been seen to fit; a database that is away is waited for."""
        self._boot_loop.start()

    def _booted(self) -> None:
        for loop in self._loops.values():
            loop.start()
        log.info("keeper.started")

    @property
    def is_recovering(self) -> bool:
        return self.recoveries.is_waiting

    def close(self) -> None:
        self._boot_loop.stop()  # first: it is who starts the others
        self._boot_loop.join(STOP_SECONDS)
        for loop in self._loops.values():
            loop.stop()
        until = time.monotonic() + STOP_SECONDS
        for role, loop in self._loops.items():
            self._leave(role, loop, max(until - time.monotonic(), 0.0))
        log.info("keeper.stopped")

    def _leave(self, role: str, loop: Loop, seconds: float) -> None:
        """A loop that does not end, because the database does not answer, keeps what it uses."""
        if loop.is_alive():
            loop.join(seconds)
        if loop.is_alive():
            return
        if role == "duties":
            with contextlib.suppress(Exception):  # then its term runs out by itself
                self.election.resign()
        if role == "listen":
            self._bell.close()
        if role == "history":
            self._write_down()
        self._sessions[role].close()

    def _write_down(self) -> None:
        try:
            self._rollups.run_once()
        except Exception as error:  # noqa: BLE001 - then the last seconds are missing in the statistics
            log.warning("statistics.lost", error=str(error).partition("\n")[0])

    # --- what it hears ---

    def hear(self, messages: list[Message]) -> None:
        for message in messages:
            try:
                self._hear(message)
            except (KeyError, TypeError, ValueError) as error:
                log.error("message.nonsense", say=str(message.get("say")), error=f"{type(error).__name__}: {error}")

    def _hear(self, message: Message) -> None:
        match message["say"]:
            case "died":
                self.recoveries.add(CrashReport.from_json(message["report"]))
                self._loops["crashes"].wake()
            case "workers":
                self._workers = [each for each in message["workers"] if each.get("worker_id")]
                self._workers_told = time.monotonic()
            case "counted":
                self._counts.add(from_json(message["amounts"]))

    def _fresh_workers(self) -> list[Message]:
        """Nothing, if the supervisor has fallen silent: nobody knows then who is alive."""
        return self._workers if time.monotonic() - self._workers_told < FRESH_SECONDS else []

    def _alive(self) -> list[str]:
        return [each["worker_id"] for each in self._fresh_workers() if not each.get("is_hung")]

    def _states(self) -> list[WorkerState]:
        return [_state(each) for each in self._fresh_workers()]

    # --- what it tells ---

    def tick(self) -> None:
        """Every second, and when something has changed. Raises what makes it impossible to go on."""
        if self._boot.error is not None:
            raise self._boot.error
        if not self._boot.has_tried:
            return
        if not self.is_ready:
            self.is_ready = True
            self._send({"say": "ready"})
        self._tally.rounds({name: loop.beats for name, loop in self._loops.items()})
        state = self._state()
        told_at, told = self._told
        if state != told or time.monotonic() - told_at >= TICK_SECONDS:
            self._told = (time.monotonic(), state)
            self._send(state)

    def _state(self) -> Message:
        return {
            "say": "state",
            "database": time.monotonic() - self.election.answered < ANSWER_SECONDS,
            "listening": self._listener.is_heard,
            "elected": self.election.is_held(),
            "term": self.election.term if self.election.is_held() else None,
            "unserved": self._census.unserved if self.election.is_held() else [],
            "unclaimable": self._standstill.hidden,
            "connections": sum(session.is_connected for session in self._sessions.values()),
            "budget": self._connection_budget.total,
        }

    def _tell_recovered(self, report: CrashReport, seconds: float) -> None:
        self._send({"say": "recovered", "worker_id": report.worker_id, "pid": report.pid, "seconds": round(seconds, 4)})

    def _tell_cancel(self, task_id: UUID, token: int) -> None:
        self._send({"say": "cancel", "task_id": str(task_id), "token": token})

    def _ring(self) -> None:
        self._tally.count("rings")
        self._bell.ring()

    def _cancel(self, task_id: UUID) -> None:
        self._bell.cancel(task_id)
        self._cancels.add(task_id)
        self._loops["crashes"].wake()


class _AtOnce:
    """Services of one loop that are asked at every round."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = services

    def run_once(self) -> float | None:
        pauses = [service.run_once() for service in self._services]
        return min((pause for pause in pauses if pause is not None), default=None)


class _Cancels:
    """Anybody may notify: whether a task was asked to stop, and which run of it, is for the database to say."""

    def __init__(self, session: Session, statements: KeeperStatements, tell: Callable[[UUID, int], None]) -> None:
        self._session = session
        self._statements = statements
        self._tell = tell
        self._heard: queue.SimpleQueue[UUID] = queue.SimpleQueue()

    def add(self, task_id: UUID) -> None:
        self._heard.put(task_id)

    def run_once(self) -> float | None:
        heard = {self._heard.get() for _ in range(self._heard.qsize())}
        if heard:
            for task_id, token in self._session.run(self._statements.asked_to_stop([*heard])):
                self._tell(task_id, token)
        return None


class _Boot:
    """Sees once whether the schema fits."""

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
    """For workers that are alive: a task that holds the interpreter's lock keeps its own worker from renewing."""

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


def _state(worker: Message) -> WorkerState:
    return WorkerState(
        worker_id=worker["worker_id"],
        hostname=socket.gethostname(),
        pid=worker["pid"],
        tasks_running=worker.get("running", 0),
        tasks_claimed=worker.get("claimed", 0),
        memory_bytes=worker.get("memory_bytes"),
        cpu_percent=worker.get("cpu_percent"),
        started_at=_moment(worker.get("started_at")),
    )


def _moment(given: str | float | None) -> datetime | None:
    if given is None or isinstance(given, str):
        return None if given is None else datetime.fromisoformat(given)
    return datetime.fromtimestamp(given, UTC)


def _retention(settings: Settings) -> Retention:
    days = settings.retention
    return Retention(*(
        None if each is None else each * DAY_SECONDS
        for each in (days.completed_days, days.failed_days, days.states_days)
    ))  # fmt: skip


def _limits(settings: Settings) -> Limits:
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
    return Limits(settings.queues, CLAIM_LIMIT, per_worker, recovery)
