"""The web child: takes the supervisor's reports, and serves them over HTTP."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from typing import TYPE_CHECKING

from tasklib_daemon import logs
from tasklib_daemon.counters import from_json
from tasklib_daemon.exit_codes import Exit, ExitCode
from tasklib_daemon.logs import log
from tasklib_daemon.web.app import HealthApp, LatestReport
from tasklib_daemon.web.server import Server

if TYPE_CHECKING:
    from tasklib_daemon.channel import Channel
    from tasklib_daemon.settings import Settings

TRY_AGAIN_SECONDS = 0.5
HOPELESS = frozenset({errno.EACCES, errno.EPERM})


def run(settings: Settings, channel: Channel) -> None:
    """Run until SIGTERM, or until the supervisor is gone."""
    asyncio.run(_WebChild(settings, channel).run())


class _WebChild:
    def __init__(self, settings: Settings, channel: Channel) -> None:
        self._web = settings.web
        self._channel = channel
        self._report = LatestReport()
        self._server = Server(HealthApp(settings.web, self._report))
        self._stop = asyncio.Event()
        self._problem: str | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, self._stop.set)
        loop.add_signal_handler(signal.SIGUSR1, logs.reopen)
        loop.add_reader(self._channel.fileno(), self._receive)
        port = await self._try_to_listen()
        self._channel.send({"say": "ready", "port": port, "problem": self._problem})
        while port is None and not self._stop.is_set():
            await self._pause(TRY_AGAIN_SECONDS)
            port = await self._try_to_listen(is_first=False)
            if port is not None:
                self._channel.send({"say": "listening", "port": port})
        await self._stop.wait()
        await self._server.close()

    def _receive(self) -> None:
        for message in self._channel.receive(0):
            match message["say"]:
                case "status":
                    self._report.take_status({key: value for key, value in message.items() if key != "say"})  # type: ignore[arg-type]
                case "totals":
                    self._report.take_totals(from_json(message["totals"]))
                case "gauges":
                    self._report.take_gauges(message["samples"], message["read_at"])
        if self._channel.is_closed:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._stop.set()

    async def _try_to_listen(self, *, is_first: bool = True) -> int | None:
        """The port may be in use, also by the web child that this one replaces. The tasks do not wait for it."""
        where = f"{self._web.host}:{self._web.port}"
        try:
            port = await self._server.listen(self._web.host, self._web.port or 0)
        except socket.gaierror as error:
            raise Exit(ExitCode.CONFIG, f"web.host {self._web.host} cannot be found: {error.strerror}") from None
        except OSError as error:
            if error.errno in HOPELESS:
                raise Exit(ExitCode.CONFIG, f"web: cannot listen on {where}: {error.strerror}") from None
            self._problem = f"the web child cannot listen on {where}: {error.strerror}"
            if is_first:
                log.warning(
                    "web.waiting", address=where, error=error.strerror, consequence="tried again until it works"
                )
            return None
        log.info("web.listening", host=self._web.host, port=port)
        return port

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            pass
