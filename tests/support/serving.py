"""An ASGI application in a process of its own, served by uvicorn."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx

from tools.waiting import START_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def served(
    app: str, directory: Path, environment: dict[str, str], socket: Path
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """On a Unix socket: no other test can have it. Whoever has not ended the process has it killed."""
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(directory), "--uds", str(socket), app]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: socket.exists() or process.poll() is not None, "uvicorn to listen", seconds=START_SECONDS)
        assert process.poll() is None, process.communicate()[0]
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://example") as client:
            yield process, client
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
