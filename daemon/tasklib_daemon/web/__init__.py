"""The web child: tells over HTTP how the daemon is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasklib_daemon.settings import Settings


def run(settings: Settings, channel: Any) -> None:
    """Until SIGTERM, or the supervisor is gone."""
    from tasklib_daemon.web.child import run as run_child  # noqa: PLC0415 - the supervisor needs none of it

    run_child(settings, channel)
