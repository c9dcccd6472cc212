"""Notifies a service manager: systemd's protocol (sd_notify(3)), with datagrams to a socket that the manager names.

The supervisor notifies at the end of each round. If its loop hangs, or fails every time, the manager gets no message:
its watchdog notices, and its timeouts are not extended. Nothing here waits; a message that cannot be sent now is sent
in a later round. Without a manager it does nothing.
"""

from __future__ import annotations

import math
import os
import socket
import time
from typing import TYPE_CHECKING, Literal

from tasklib_daemon.logs import log

if TYPE_CHECKING:
    from collections.abc import MutableMapping

Phase = Literal["starting", "running", "reloading", "stopping"]

EXTENSION_SECONDS = 30.0  # how long the loop may be silent while it starts, reloads or drains
EXTEND_EVERY_SECONDS = 1.0
PINGS = 3  # per watchdog interval, because some may be late
_WORDS: dict[Phase, str] = {"running": "READY=1", "stopping": "STOPPING=1"}


class ServiceManager:
    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Its variables are removed from the environment: processes that tasks start must not notify in our name."""
        self._address = environment.pop("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):  # an abstract socket, outside the file system
            self._address = "\0" + self._address[1:]
        self._ping_every = _watchdog_seconds(environment) / PINGS
        self._ping_at = 0.0
        self._extend_at = 0.0
        self._sent_phase: Phase = "starting"
        self._headline = ""
        self._has_new_reload = False
        self._is_unreachable = False

    def note_reload(self) -> None:
        """A reload begins. It may be over in the same round, and the manager waits for the message all the same."""
        self._has_new_reload = True

    def notify(self, phase: Phase, headline: str, now: float, *, extends: bool = True) -> None:
        """Send what has changed, and that the loop runs. `extends`: its start, reload or stop makes progress."""
        if not self._address:
            return
        if self._has_new_reload and self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}"):
            self._has_new_reload, self._sent_phase = False, "reloading"
        changed = phase != self._sent_phase and phase in _WORDS
        is_extending = extends and phase != "running" and now >= self._extend_at
        is_pinging = now >= self._ping_at and math.isfinite(self._ping_every)
        lines = [
            *([_WORDS[phase]] if changed else []),
            *([f"STATUS={headline}"] if headline != self._headline else []),
            *([f"EXTEND_TIMEOUT_USEC={int(EXTENSION_SECONDS * 1e6)}"] if is_extending else []),
            *(["WATCHDOG=1"] if is_pinging else []),
        ]
        if lines and self._send(*lines):
            self._sent_phase, self._headline = phase if changed else self._sent_phase, headline
            self._extend_at = now + EXTEND_EVERY_SECONDS if is_extending else self._extend_at
            self._ping_at = now + self._ping_every if is_pinging else self._ping_at

    def _send(self, *lines: str) -> bool:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)  # noqa: FBT003 - its only parameter
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            if not self._is_unreachable:
                log.warning("manager.unreachable", error=str(error), consequence="it is notified again later")
            self._is_unreachable = True
            return False
        self._is_unreachable = False
        return True


def _watchdog_seconds(environment: MutableMapping[str, str]) -> float:
    """Infinity: no watchdog waits for pings of this process."""
    microseconds, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
    is_ours = pid in {"", str(os.getpid())}
    return int(microseconds) / 1e6 if is_ours and microseconds.isdecimal() and int(microseconds) else math.inf
