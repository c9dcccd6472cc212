"""System calls that only Linux has. On other systems these functions do nothing, and their answers say so."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

IS_LINUX = sys.platform == "linux"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


class Usage(NamedTuple):
    memory_bytes: int
    cpu_seconds: float


def die_with_parent(parent: int) -> None:
    """The kernel sends SIGKILL when the thread that forked us ends. If the parent is dead already, we end at once."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> bool:
    """Processes whose parent has died become our children, instead of those of init."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """As `ps -e` and `top` show it: 15 bytes."""
    if IS_LINUX:
        text = ctypes.create_string_buffer(name.encode()[:15])
        _prctl(_PR_SET_NAME, ctypes.addressof(text))


def usage(pid: int) -> Usage | None:
    """Resident memory and CPU time. None: the process is gone, or this is not Linux."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        after_name = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        return Usage(int(after_name[21]) * PAGE_BYTES, (int(after_name[11]) + int(after_name[12])) / TICKS)
    return None


def threads_of_this_process() -> int:
    with contextlib.suppress(OSError):
        return len([*Path("/proc/self/task").iterdir()])
    return 1


def kill_marked(mark: bytes) -> int:
    """Kill every process with this mark in its environment (one of ours started it) or in its memory map (one of ours
    forked it). A pidfd is used, because a pid might belong to another process by now. Returns how many there were.
    """
    pids = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()] if IS_LINUX else []
    spared = {os.getpid(), os.getppid()}  # a living parent waits for us
    return sum(_kill_if_marked(pid, mark) for pid in pids if pid not in spared)


def _kill_if_marked(pid: int, mark: bytes) -> bool:
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if any(mark in Path(f"/proc/{pid}/{file}").read_bytes() for file in ("environ", "maps")):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                return True
        finally:
            os.close(handle)
    return False


def _prctl(option: int, value: int) -> bool:
    if not IS_LINUX:
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0)
