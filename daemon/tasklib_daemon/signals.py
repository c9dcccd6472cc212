"""Signals: handlers only record them and wake the loop. The loop handles them one after another."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_AT_A_TIME = 4096


class Signals:
    """A pipe into which the interpreter writes the number of each signal as it comes. One for each process, created in
    its main thread.
    """

    def __init__(self, signums: Iterable[signal.Signals]) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._known = frozenset(signums)
        for each in self._known:
            signal.signal(each, _record)
        os.register_at_fork(after_in_child=self._disown)

    def fileno(self) -> int:
        return self._read_end

    def take(self) -> list[signal.Signals]:
        """The signals since the last call."""
        found = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._read_end, _AT_A_TIME):
                found += chunk
        return [signal.Signals(number) for number in found if number in self._known]

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self._write_end)

    def _disown(self) -> None:
        """A forked process, ours or a task's, must not write into our pipe."""
        signal.set_wakeup_fd(-1)
        for each in self._known:
            signal.signal(each, signal.SIG_DFL)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Block all signals during a fork, so that a signal for one process does not end the other."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def reset() -> None:
    """In a child: restore the default handlers, except for signals that Python itself ignores (SIGPIPE). Signals stay
    blocked until the child has handlers of its own.
    """
    signal.set_wakeup_fd(-1)
    for each in signal.valid_signals():
        if callable(signal.getsignal(each)) or (each in _FROM_OUTSIDE and signal.getsignal(each) is signal.SIG_IGN):
            signal.signal(each, signal.SIG_DFL)


def unblock() -> None:
    """Unblock all signals, whatever the parent's mask was."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)


def _record(_signum: int, _frame: object) -> None:
    """The interpreter has recorded it already."""
