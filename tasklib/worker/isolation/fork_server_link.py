"""The fork server, as its worker sees it: started with a setup, asked to fork and to stop processes, replaced if it
hangs.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from tasklib import application
from tasklib.clock import time
from tasklib.errors import InvalidTaskDefinition, TasklibError
from tasklib.log import log
from tasklib.worker.hooks import all_hooks
from tasklib.worker.isolation.launching import launch
from tasklib.worker.isolation.protocol import CHUNK_BYTES, Message, how_it_ended, line_of, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tasklib.config import Config
    from tasklib.task import TaskFunction

BOOT_SECONDS = 60.0  # for a fork server to import the tasks' modules
SEND_SECONDS = 1.0  # a fork server that does not read for so long is broken

_beginning: tuple[str, Sequence[Any]] | None = None


def begin_with(function: str, arguments: Sequence[Any]) -> None:
    """Call `module:function` first in every fork server of this process, and in each process that it forks. The
    arguments are plain values. A program that sets up this process, its logs for example, sets up those like it.
    """
    global _beginning  # noqa: PLW0603 - about this process, as what it sets up
    _beginning = (function, arguments)


class ForkServerLink:
    """The fork server ends with its worker, and the processes that it forked end with it."""

    def __init__(
        self, config: Config, functions: Sequence[TaskFunction[..., Any]], required: Sequence[str] | None = None
    ) -> None:
        setup = line_of(_setup(config, functions, required))
        self._process, self._control, self.is_shared = launch()
        self._control.settimeout(SEND_SECONDS)
        self._sending = threading.Lock()
        self._forks = 0
        self.is_ready = False
        self._answer = b""
        self._deadline = time.monotonic() + BOOT_SECONDS
        with contextlib.suppress(OSError):  # it has died already: there will be no answer
            self._control.sendall(setup)

    def is_usable(self) -> bool:
        """It lives, and is ready or may become so."""
        return self._process.poll() is None and (self.is_ready or time.monotonic() < self._deadline)

    def wait_until_ready(self, gives_up: Callable[[], bool]) -> bool:
        while not self.is_ready:
            if gives_up():
                return False
            if time.monotonic() > self._deadline:
                raise TasklibError(f"the fork server for isolated tasks was not ready within {BOOT_SECONDS:g} s")
            self._receive()
        return True

    def receive_if_ready(self) -> bool:
        """Whether it is ready. Never waits."""
        if not self.is_ready and select.select([self._control], [], [], 0)[0]:
            self._receive()
        return self.is_ready

    def fork(self, channel: int, report: int) -> int:
        """Returns the number of the process."""
        with self._sending:
            self._forks += 1
            with self._killed_on_error():
                socket.send_fds(self._control, [line_of({"fork": self._forks})], [channel, report])
            return self._forks

    def send(self, message: Message) -> None:
        with self._sending, self._killed_on_error():
            self._control.sendall(line_of(message))

    def give_up(self) -> None:
        """It is hung, or was stopped: its processes die with it, and another one takes its place."""
        log.error("fork_server.hung", pid=self._process.pid, consequence="it was killed, with all that it had forked")
        self._process.kill()

    def stop(self) -> None:
        """It ends when its socket is shut down. To close our end would not do: a process that a task started may hold a
        copy of it.
        """
        with contextlib.suppress(OSError):  # it is gone already
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(SEND_SECONDS * 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @contextlib.contextmanager
    def _killed_on_error(self) -> Iterator[None]:
        """A fork server that does not read, or has read half of a message, is of no more use."""
        try:
            yield
        except OSError:
            self._process.kill()
            raise

    def _receive(self) -> None:
        try:
            received = self._control.recv(CHUNK_BYTES)
        except TimeoutError:
            return
        except ConnectionError:
            received = b""
        if not received:
            raise TasklibError(f"the fork server for isolated tasks {how_it_ended(self._process.wait())} at its start")
        self._answer += received
        if b"\n" in self._answer:
            _check_answer(from_json(self._answer))
            self.is_ready = True


def _check_answer(answer: Message) -> None:
    if "error" in answer:
        raise InvalidTaskDefinition(f'isolation="process": {answer["error"]}')
    if answer["threads"] or answer["sockets"]:
        log.warning(
            "fork_server.shared", threads=answer["threads"], sockets=answer["sockets"],
            consequence="the tasks' modules started these when they were imported: a forked process has no threads but "
            "its own, and shares these connections with all others",
        )  # fmt: skip


def _setup(config: Config, functions: Sequence[TaskFunction[..., Any]], required: Sequence[str] | None) -> Message:
    """Sent through the socket, so that `ps` and the environment show nothing of it."""
    places = [place_of(each) for each in (*(function.function for function in functions), *all_hooks())]
    apps = sys.modules.get("django.apps")
    return {
        "path": sys.path,
        "beginning": _beginning,
        "pythonpath": os.environ.get("PYTHONPATH"),
        "places": list(dict.fromkeys(places)),
        "names": [each.name for each in functions] if required is None else list(required),
        "config": asdict(config),
        "is_initialised": application.is_initialised(),  # then the process has the same default client
        "is_django": apps is not None and apps.apps.ready and "DJANGO_SETTINGS_MODULE" in os.environ,
    }
