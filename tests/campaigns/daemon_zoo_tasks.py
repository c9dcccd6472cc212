"""The application of daemon_zoo.py: a zoo of hostile task functions, and the harmless ones beside them.

Nothing that they start or take is unbounded, whom they start is noted, and each is submitted with a timeout: those that
never end have to be ended.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import time

import tasklib

COMPANY = "ZOO_COMPANY"  # a file: whom the bombs have started, one pid a line
FOR_EVER = 1000
BOMB_GENERATIONS = 4  # 30 processes
HOG_MB = 300
HOG_LIMIT_MB = 200  # of a worker, and of one with a process of its own
MB = 1024**2
MOST_DESCRIPTORS = 4096


# --- harmless ---


@tasklib.task
def fetch(seconds: float) -> None:
    """As one that waits for an answer from elsewhere."""
    time.sleep(seconds)


@tasklib.task
async def fetch_async(seconds: float) -> None:
    await asyncio.sleep(seconds)


# --- those that die ---


@tasklib.task
def segfault() -> None:
    ctypes.string_at(0)


@tasklib.task(isolation="process")
def segfault_apart() -> None:
    ctypes.string_at(0)


@tasklib.task
def exit_at_once() -> None:
    os._exit(3)


@tasklib.task
async def exit_async() -> None:
    os._exit(0)


@tasklib.task(isolation="process")
def kill_parent_apart() -> None:
    """Its parent is the fork server of its worker."""
    os.kill(os.getppid(), signal.SIGKILL)


@tasklib.task
def kill_supervisor() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(FOR_EVER)


# --- those that never end ---


@tasklib.task
def backtrack() -> None:
    """A loop in C that holds the GIL."""
    re.match(r"(a+)+$", "a" * 60 + "b")


@tasklib.task
def multiply() -> None:
    """The same; it takes minutes."""
    3 ** (10**9)


@tasklib.task
def hold_gil() -> None:
    ctypes.PyDLL(None).sleep(FOR_EVER)


@tasklib.task(isolation="process")
def hold_gil_apart() -> None:
    ctypes.PyDLL(None).sleep(FOR_EVER)


@tasklib.task
async def block_loop() -> None:
    time.sleep(FOR_EVER)  # noqa: ASYNC251 - that is what it is about


@tasklib.task
def ignore_signals() -> None:
    """Also the interrupts of its worker."""
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        ctypes.CDLL(None).signal(int(each), ctypes.c_void_p(1))
    while True:
        try:
            time.sleep(0.01)
        except BaseException:  # noqa: BLE001, S112 - that is what it is about
            continue


# --- those that take what is there ---


@tasklib.task
def hog() -> None:
    """More than its worker may have. It can be stopped; what it has taken stays taken."""
    _hoard()
    while True:
        time.sleep(0.01)


@tasklib.task(isolation="process", memory_limit_mb=HOG_LIMIT_MB)
def hog_apart() -> None:
    _hoard()


def _hoard() -> None:
    _hoards.extend(bytearray(b"x") * (20 * MB) for _ in range(HOG_MB // 20))


_hoards: list[bytearray] = []


@tasklib.task
def close_descriptors() -> None:
    os.closerange(0, MOST_DESCRIPTORS)


@tasklib.task(isolation="process")
def close_descriptors_apart() -> None:
    os.closerange(0, MOST_DESCRIPTORS)


@tasklib.task
def fork_bomb() -> None:
    _explode(BOMB_GENERATIONS)
    time.sleep(FOR_EVER)


@tasklib.task(isolation="process")
def fork_bomb_apart() -> None:
    _explode(BOMB_GENERATIONS)
    time.sleep(FOR_EVER)


def _explode(generations: int) -> None:
    """Two children, each with two; one of them leaves its group."""
    for has_session in (False, True) if generations else ():
        if os.fork() == 0:
            _note()
            if has_session:
                os.setsid()
            _explode(generations - 1)
            time.sleep(FOR_EVER)
            os._exit(0)


def _note() -> None:
    with open(os.environ[COMPANY], "a", encoding="ascii") as file:  # noqa: PTH123 - one write
        file.write(f"{os.getpid()}\n")
