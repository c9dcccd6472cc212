"""The bodies of hostile tasks: functions that crash, block, or exhaust the process that calls them.

Applications of tests and campaigns declare tasks that call them, each with the options that it needs. This module
imports nothing but the standard library, so that any of them can use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from pathlib import Path

FOREVER_SECONDS = 1000
MOST_DESCRIPTORS = 4096
_MB = 2**20
_memory: list[bytearray] = []
_sockets: list[tuple[socket.socket, socket.socket]] = []


# --- the process dies ---


def segfault() -> None:
    ctypes.string_at(0)


def exit_process(code: int) -> None:
    """Without any cleaning up."""
    os._exit(code)


def kill_process() -> None:
    """As the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_process_once(flag: str) -> None:
    """The first time only: the flag is a file."""
    if not Path(flag).exists():
        Path(flag).touch()
        kill_process()


def kill_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)


# --- the function never returns ---


def hold_gil(seconds: float = FOREVER_SECONDS) -> None:
    """One call in C that keeps the GIL: no other thread runs, and no Python signal handler."""
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))


def ignore_signals() -> None:
    """Also the exceptions by which a worker interrupts a task."""
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        ctypes.CDLL(None).signal(int(each), ctypes.c_void_p(1))
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(0.01)


# --- the function takes what others need ---


def hold_memory(megabytes: int) -> None:
    """The memory stays in use after the call. It is written to, in pieces, so that it is really taken."""
    while megabytes > 0:
        _memory.append(bytearray(os.urandom(1024)) * 1024 * min(megabytes, 20))
        megabytes -= 20


def fill_memory() -> None:
    """A megabyte at a time, without end."""
    kept = []
    while True:
        kept.append(bytearray(os.urandom(_MB)))
        time.sleep(0.001)


def close_descriptors(first: int = 0, *, reuse: bool = False) -> None:
    """With `reuse`, other files are opened, and get the numbers that were closed."""
    os.closerange(first, MOST_DESCRIPTORS)
    if reuse:
        _sockets.extend(socket.socketpair() for _ in range(32))


def fork_bomb(generations: int, journal: str, *, own_sessions: bool = True) -> None:
    """Every process starts two others, and none of them ends by itself. With `own_sessions`, every second one leaves
    the session and the process group of its parent.

    The pids of all new processes go to the journal, one in a line.
    """
    for has_session in (False, True) if generations else ():
        if os.fork() == 0:
            with open(journal, "a", encoding="ascii") as file:  # noqa: PTH123 - one write, which others do not split
                file.write(f"{os.getpid()}\n")
            if has_session and own_sessions:
                os.setsid()
            fork_bomb(generations - 1, journal, own_sessions=own_sessions)
            os._exit(0)
    time.sleep(FOREVER_SECONDS)
