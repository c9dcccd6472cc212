"""A worker as a child of the daemon: the library's TaskWorker, shown on the page, and told by signals what to do."""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import TYPE_CHECKING

from tasklib.worker.worker import TaskWorker
from tasklib_daemon import logs, page
from tasklib_daemon.bell import Ear
from tasklib_daemon.logs import log
from tasklib_daemon.signals import Signals

if TYPE_CHECKING:
    from tasklib_daemon.channel import Channel
    from tasklib_daemon.page import Page
    from tasklib_daemon.settings import Settings

UNTIL_TOLD_SECONDS = 10.0**6  # the supervisor says when the grace is over


def run(settings: Settings, own_page: Page, channel: Channel, slot: int) -> None:
    """Until it is told to stop, and drained. A signal that comes before it has anything to drain just ends it."""
    settings.import_app()
    logs.revive()
    worker = TaskWorker(
        settings.config(), settings.concurrency, settings.poll_interval_seconds, settings.queues,
        buffer_size=settings.buffer_size, grace_seconds=UNTIL_TOLD_SECONDS, listen=False, duties=False,
        handle_signals=False, witness=own_page.witness(),
    )  # fmt: skip
    ears = Ears(worker, own_page, channel)
    bell = Ear(settings.runtime_directory, slot, worker)
    bell.start()
    ears.start()
    own_page.set_phase(page.BOOTED)
    try:
        worker.run_sync()
    finally:
        bell.stop()


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

    def start(self) -> None:
        self._hear_messages(0.0)  # it may be born paused
        for name, listen in {"ears": self._listen, "ready": self._tell_when_ready}.items():
            threading.Thread(target=listen, name=f"tasklib-{name}", daemon=True).start()

    def _tell_when_ready(self) -> None:
        if self._worker.wait_until_ready():
            self._page.set_phase(page.READY)
            self._channel.send({"say": "ready"})

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._signals.fileno(), select.POLLIN)
        poll.register(self._channel.fileno(), select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._signals.fileno():
                    self._hear_signals()
                else:
                    self._hear_messages(0.0)
                    if self._channel.is_closed:  # the supervisor is gone, and we with it; or a task has closed it
                        poll.unregister(descriptor)

    def _hear_signals(self) -> None:
        came = set(self._signals.take())
        if came & {signal.SIGTERM, signal.SIGINT}:
            self._stop(max(self._page.asked(), page.DRAIN))

    def _stop(self, wish: int) -> None:
        while self._asked < wish:  # its second stop ends the grace
            self._asked += 1
            self._worker.stop()

    def _hear_messages(self, timeout_seconds: float) -> None:
        for message in self._channel.receive(timeout_seconds):
            if message["say"] == "pause":
                self._worker.pause()
            elif message["say"] == "resume":
                self._worker.resume()
            log.info("worker.told", what=message["say"], pid=os.getpid())
