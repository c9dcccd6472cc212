"""Processes in namespaces of their own, started by unshare(1): when it is killed, so are they. It needs root."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from pathlib import Path

from tools.waiting import wait_until

UNSHARE = ("unshare", "--kill-child", "--mount", "--pid", "--fork", "--uts", "--ipc", "--propagation", "private")
ENTER = ("nsenter", "-m", "-p", "-u", "-i", "-t")


@functools.cache
def why_not() -> str | None:
    """Why there can be none here."""
    if os.geteuid() != 0:
        return "only root can have namespaces of its own"
    missing = [program for program in ("unshare", "nsenter", "setpriv") if shutil.which(program) is None]
    if missing:
        return f"there is no {missing[0]} here: apt-get install util-linux"
    tried = subprocess.run([*UNSHARE, "mount", "-t", "proc", "proc", "/proc"], capture_output=True, check=False)
    return "this machine allows no namespaces" if tried.returncode else None


def first_process(unshare: subprocess.Popen[bytes]) -> int:
    """Process 1 of the namespaces, as the host sees it."""
    found: list[int] = []

    def is_there() -> bool:
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text("ascii")
            found.extend(map(int, children.split()))
        return bool(found) or unshare.poll() is not None

    wait_until(is_there, "a first process")
    assert found, "it ended before it began"
    return found[0]
