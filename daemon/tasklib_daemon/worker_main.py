"""A worker as a child of the daemon: the library's TaskWorker, its scoreboard, and its link to the supervisor."""

from __future__ import annotations

import gc
import select
import signal
import threading
import time
from typing import TYPE_CHECKING

from tasklib import application
from tasklib.worker.isolation import fork_server_link, launching
from tasklib.worker.isolation.suspect_limits import SuspectLimits
from tasklib.worker.worker import TaskWorker
from tasklib_daemon import linux, logs, scoreboard
from tasklib_daemon.counters import CounterMetrics, Counters
from tasklib_daemon.logs import log
from tasklib_daemon.signals import Signals
from tasklib_daemon.wake import WakeReceiver

if TYPE_CHECKING:
    from tasklib_daemon.channel import Channel
    from tasklib_daemon.scoreboard import Scoreboard
    from tasklib_daemon.settings import Settings

UNLIMITED_SECONDS = 10.0**6  # the supervisor decides when the grace is over
POLL_SECONDS = 0.2  # of the scoreboard, when signals and messages no longer arrive


def run(settings: Settings, board: Scoreboard, channel: Channel, slot: int, counters: Counters) -> None:
    """Run until told to stop, and drain. A signal that comes before the worker holds any task just ends it."""
    _import_app(settings, channel)
    config = settings.config()
    if not application.is_initialised():  # tasks submit to the daemon's database, unless the app says otherwise
        application.init(config)
    worker = TaskWorker(
        config, settings.concurrency, settings.poll_interval_seconds, settings.queues,
        buffer_size=settings.buffer_size, grace_seconds=UNLIMITED_SECONDS, listen=False, duties=False,
        suspects_in_processes=True,
        suspect_limits=SuspectLimits(
            settings.recycle.max_memory_mb, settings.grace_seconds, settings.stall_seconds
        ),
        handle_signals=False, observer=board.observer(),
        metrics=CounterMetrics(counters, "worker", board),
    )  # fmt: skip
    fork_server_link.begin_with(
        "tasklib_daemon.logs:configure_isolated", logs.LogPlan.of(settings, f"worker {slot} task")
    )
    link = SupervisorLink(worker, board, channel)
    receiver = WakeReceiver(settings.runtime_directory, slot, worker)
    worker.has_listener, worker.on_full = receiver.start(), receiver.pass_on
    link.start()
    board.set_phase(scoreboard.BOOTED)
    gc.collect()
    gc.freeze()  # the collector need not go through imported objects again and again
    try:
        worker.run_sync()
    finally:
        receiver.stop()


def _import_app(settings: Settings, channel: Channel) -> None:
    """Import the application, then fork the fork server before this process has threads. If the import has started
    threads or opened connections, nothing is forked: a new interpreter is started later, when one is needed.
    """
    sockets = launching.count_sockets()
    settings.import_app()
    logs.revive()
    gc.collect()
    gc.freeze()  # a collection would write to, and so copy, every memory page that is shared with the fork server
    if launching.can_fork(sockets):

        def become_fork_server() -> None:
            channel.close()
            linux.name_process("tasklibd-forks")

        launching.fork_ahead(become_fork_server)


class SupervisorLink:
    """Receives the supervisor's signals to stop and its messages to pause. A signal only says "look": the scoreboard
    holds the request. So a signal from elsewhere makes the worker drain, and never interrupts its tasks.
    """

    def __init__(self, worker: TaskWorker, board: Scoreboard, channel: Channel) -> None:
        self._worker = worker
        self._scoreboard = board
        self._channel = channel
        self._signals = Signals([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
        self._obeyed = scoreboard.SERVE
        self._identities = self._identify()

    def start(self) -> None:
        self._receive_messages()  # the first may be a pause
        for name, target in {"link": self._receive, "ready": self._report_ready}.items():
            threading.Thread(target=target, name=f"tasklib-{name}", daemon=True).start()

    def _report_ready(self) -> None:
        if self._worker.wait_until_ready():
            self._scoreboard.beat()  # from here on the supervisor expects beats
            self._scoreboard.set_phase(scoreboard.READY)
            self._channel.send({"say": "ready"})

    def _receive(self) -> None:
        poll = select.poll()
        for each in (self._signals, self._channel):
            poll.register(each.fileno(), select.POLLIN)
        while not self._channel.is_closed:
            poll.poll()
            if self._identify() != self._identities:
                break
            if set(self._signals.take()) & {signal.SIGTERM, signal.SIGINT}:
                self._stop()
            self._receive_messages()
        self._stop_without_link()

    def _identify(self) -> list[tuple[int, int] | None]:
        """Which pipe and which socket these are. A task may close them, and other files then get their numbers."""
        return [logs.identity(each.fileno()) for each in (self._signals, self._channel)]

    def _stop_without_link(self) -> None:
        """A task has closed our file descriptors, or the supervisor is gone. Tasks may finish. The scoreboard is
        memory, and still shows whether to interrupt them.
        """
        log.error(
            "worker.disconnected", why="the supervisor is gone, or a task has closed the worker's file descriptors",
            consequence="the worker drains, and ends",
        )  # fmt: skip
        while True:
            self._stop()
            time.sleep(POLL_SECONDS)

    def _stop(self) -> None:
        request = max(self._scoreboard.requested(), scoreboard.DRAIN)
        while self._obeyed < request:  # the worker's second stop interrupts its tasks
            self._obeyed += 1
            self._worker.stop()

    def _receive_messages(self) -> None:
        for message in self._channel.receive(0.0):
            if message["say"] == "pause":
                self._worker.pause()
            elif message["say"] == "resume":
                self._worker.resume()
