"""The child that keeps the daemon's house: crash reports, leases, duties for the cluster, and the bell."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType


def run(settings: Any, channel: Any) -> None:
    """Until SIGTERM."""
    stopped: list[int] = []

    def note(signum: int, _frame: FrameType | None) -> None:
        stopped.append(signum)

    signal.signal(signal.SIGTERM, note)
    channel.send({"say": "ready"})
    while not stopped:
        signal.pause()
