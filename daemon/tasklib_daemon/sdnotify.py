"""What a service manager is told: systemd's notify protocol (sd_notify(3)), in datagrams to a socket that it names.

The supervisor tells it at the end of each round. So a loop that hangs, or fails each time, tells nothing: the watchdog
sees it, and no timeout is extended any more. Nothing here ever waits; what cannot be told now is told in a later round.
Without a manager it does nothing.
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
PINGS = 3  # in the time that the watchdog allows: some may be late
_WORDS: dict[Phase, str] = {"running": "READY=1", "stopping": "STOPPING=1"}


class ServiceManager:
    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Its variables are taken out of the environment: what tasks start must not speak for the daemon."""
        self._address = environment.pop("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):  # a name that is in no file system
            self._address = "\0" + self._address[1:]
        self._ping_every = _watchdog_seconds(environment) / PINGS
        self._ping_at = 0.0
        self._extend_at = 0.0
        self._told: Phase = "starting"
        self._headline = ""
        self._has_reload_to_tell = False
        self._is_deaf = False

    def note_reload(self) -> None:
        """One begins. It may be over in the same round: a manager that asked for it waits for the word all the same."""
        self._has_reload_to_tell = True

    def tell(self, phase: Phase, headline: str, now: float, *, extends: bool = True) -> None:
        """What is new, and that the loop goes on. `extends`: it gets on with its start, reload or stop."""
        if not self._address:
            return
        if self._has_reload_to_tell and self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}"):
            self._has_reload_to_tell, self._told = False, "reloading"
        changed = phase != self._told and phase in _WORDS
        is_extending = extends and phase != "running" and now >= self._extend_at
        is_pinging = now >= self._ping_at and math.isfinite(self._ping_every)
        lines = [
            *([_WORDS[phase]] if changed else []),
            *([f"STATUS={headline}"] if headline != self._headline else []),
            *([f"EXTEND_TIMEOUT_USEC={int(EXTENSION_SECONDS * 1e6)}"] if is_extending else []),
            *(["WATCHDOG=1"] if is_pinging else []),
        ]
        if lines and self._send(*lines):
            self._told, self._headline = phase if changed else self._told, headline
            self._extend_at = now + EXTEND_EVERY_SECONDS if is_extending else self._extend_at
            self._ping_at = now + self._ping_every if is_pinging else self._ping_at

    def _send(self, *lines: str) -> bool:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)  # noqa: FBT003 - its only parameter
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            if not self._is_deaf:
                log.warning("manager.deaf", error=str(error), consequence="it is told again")
            self._is_deaf = True
            return False
        self._is_deaf = False
        return True


def _watchdog_seconds(environment: MutableMapping[str, str]) -> float:
    """Infinite: nobody waits for pings, or not for ours."""
    microseconds, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
    is_ours = pid in {"", str(os.getpid())}
    return int(microseconds) / 1e6 if is_ours and microseconds.isdecimal() and int(microseconds) else math.inf
