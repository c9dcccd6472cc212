"""Asks a daemon for its metrics, over HTTP as Prometheus does."""

from __future__ import annotations

import contextlib
import http.client
import socket
from typing import TYPE_CHECKING

from tests.support.promtool import parsed

if TYPE_CHECKING:
    from tests.support.promtool import Series


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, path: str = "/metrics") -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as conn:
        conn.request("GET", path)
        response = conn.getresponse()
        return response.status, response.read().decode()


def scrape(port: int) -> Series:
    code, text = ask(port)
    assert code == 200, text
    return parsed(text)
