"""A worker as a child of the daemon: the library's TaskWorker, shown on the page, and told by signals what to do."""

from __future__ import annotations

import gc
import os
import select
import signal
import threading
import time
from typing import TYPE_CHECKING

from tasklib import application
from tasklib.worker import launching, processes
from tasklib.worker.worker import TaskWorker
from tasklib_daemon import kernel, logs, page
from tasklib_daemon.bell import Ear
from tasklib_daemon.ledger import LedgerTally
from tasklib_daemon.logs import log
from tasklib_daemon.signals import Signals

if TYPE_CHECKING:
    from tasklib_daemon.channel import Channel
    from tasklib_daemon.ledger import Ledger
    from tasklib_daemon.page import Page
    from tasklib_daemon.settings import Settings

UNTIL_TOLD_SECONDS = 10.0**6  # the supervisor says when the grace is over
LOOK_SECONDS = 0.2


def run(settings: Settings, own_page: Page, channel: Channel, slot: int, ledger: Ledger) -> None:
    """Until it is told to stop, and drained. A signal that comes before it has anything to drain just ends it."""
    _import_app(settings, channel)
    config = settings.config()
    if not application.is_initialised():  # the app need not say which database its tasks submit to
        application.init(config)
    worker = TaskWorker(
        config, settings.concurrency, settings.poll_interval_seconds, settings.queues,
        buffer_size=settings.buffer_size, grace_seconds=UNTIL_TOLD_SECONDS, listen=False, duties=False,
        suspects_in_processes=True,
        suspect_limits=processes.SuspectLimits(
            settings.recycle.max_memory_mb, settings.grace_seconds, settings.stall_seconds
        ),
        handle_signals=False, witness=own_page.witness(),
        tally=LedgerTally(ledger, "worker", own_page),
    )  # fmt: skip
    processes.begin_with("tasklib_daemon.logs:configure_isolated", logs.Plan.of(settings, f"worker {slot} task"))
    ears = Ears(worker, own_page, channel)
    bell = Ear(settings.runtime_directory, slot, worker)
    worker.is_rung, worker.on_full = bell.start(), bell.pass_on
    ears.start()
    own_page.set_phase(page.BOOTED)
    gc.collect()
    gc.freeze()  # what was imported: the collector would go through all of it again and again, as tasks come and go
    try:
        worker.run_sync()
    finally:
        bell.stop()


def _import_app(settings: Settings, channel: Channel) -> None:
    """Imports the application, and forks the fork server off before this process has threads. If the import has started
    threads or opened connections, nothing is forked: a fresh interpreter is started later, when one is needed.
    """
    sockets = launching.count_sockets()
    settings.import_app()
    logs.revive()
    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, every page that is shared
    if launching.can_fork(sockets):

        def become_fork_server() -> None:
            channel.close()
            kernel.name_process("tasklibd-forks")

        launching.fork_ahead(become_fork_server)


class Ears:
    """Hears the supervisor: signals to stop, messages to pause. Signals say only "look": the page tells what is
    wished. So one that comes from elsewhere makes it drain, and never hurries it.
    """

    def __init__(self, worker: TaskWorker, own_page: Page, channel: Channel) -> None:
        self._worker = worker
        self._page = own_page
        self._channel = channel
        self._signals = Signals([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
        self._asked = page.SERVE
        self._identities = self._look()

    def start(self) -> None:
        self._hear_messages()  # it may be born paused
        for name, listen in {"ears": self._listen, "ready": self._tell_when_ready}.items():
            threading.Thread(target=listen, name=f"tasklib-{name}", daemon=True).start()

    def _tell_when_ready(self) -> None:
        if self._worker.wait_until_ready():
            self._page.beat()  # from here on it is judged by its beat
            self._page.set_phase(page.READY)
            self._channel.send({"say": "ready"})

    def _listen(self) -> None:
        poll = select.poll()
        for each in (self._signals, self._channel):
            poll.register(each.fileno(), select.POLLIN)
        while not self._channel.is_closed:
            poll.poll()
            if self._look() != self._identities:
                break
            self._hear_signals()
            self._hear_messages()
        self._go_deaf()

    def _look(self) -> list[tuple[int, int] | None]:
        """Which pipe and which socket these are: a task may close them, and others get their numbers."""
        return [_identity(each.fileno()) for each in (self._signals, self._channel)]

    def _go_deaf(self) -> None:
        """A task has got at our file descriptors, or the supervisor is gone. What executes may end; the page, which is
        memory, tells whether to hurry.
        """
        log.error("worker.deaf", consequence="its descriptors were closed: it drains, and another takes its place")
        while True:
            self._stop(max(self._page.asked(), page.DRAIN))
            time.sleep(LOOK_SECONDS)

    def _hear_signals(self) -> None:
        if set(self._signals.take()) & {signal.SIGTERM, signal.SIGINT}:
            self._stop(max(self._page.asked(), page.DRAIN))

    def _stop(self, wish: int) -> None:
        while self._asked < wish:  # its second stop ends the grace
            self._asked += 1
            self._worker.stop()

    def _hear_messages(self) -> None:
        for message in self._channel.receive(0.0):
            if message["say"] == "pause":
                self._worker.pause()
            elif message["say"] == "resume":
                self._worker.resume()


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        about = os.fstat(descriptor)
    except OSError:
        return None
    return about.st_dev, about.st_ino
