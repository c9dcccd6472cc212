"""Where a child writes its stacks, when it is asked to, crashes or hangs: memory that outlives it, without a name."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import tempfile

LONGEST = 65536


class Stacks:
    """Made by the supervisor before the fork. The child's interpreter writes from its signal handlers, which work also
    while C code holds the GIL.
    """

    def __init__(self) -> None:
        self._file = _nameless()
        self._seen = 0

    # --- the child's side ---

    def enable(self) -> None:
        """At SIGSEGV, SIGFPE, SIGABRT, SIGBUS and SIGILL, and, without harm, at SIGUSR2."""
        faulthandler.enable(self._file, all_threads=True)
        faulthandler.register(signal.SIGUSR2, self._file, all_threads=True, chain=False)

    # --- the supervisor's side ---

    def take(self) -> str:
        """What is new, as far as it is bearable."""
        size = os.fstat(self._file).st_size
        found = os.pread(self._file, min(size - self._seen, LONGEST), self._seen)
        self._seen = size
        return found.decode(errors="replace").strip()

    def close(self) -> None:
        os.close(self._file)


def _nameless() -> int:
    if hasattr(os, "memfd_create"):
        made = os.memfd_create("tasklibd-stacks")
    else:
        with tempfile.TemporaryFile() as file:
            made = os.dup(file.fileno())
    fcntl.fcntl(made, fcntl.F_SETFL, fcntl.fcntl(made, fcntl.F_GETFL) | os.O_APPEND)
    return made
