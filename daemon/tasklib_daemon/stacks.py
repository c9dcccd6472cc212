"""Where a child writes its stacks when it crashes, hangs or is asked to: an anonymous file that outlives it."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import tempfile

MAX_BYTES = 65536


class Stacks:
    """Created by the supervisor before the fork. The child's interpreter writes in signal handlers, which work also
    while C code holds the GIL.
    """

    def __init__(self) -> None:
        self._file = _nameless()
        self._seen = 0

    # --- the child's side ---

    def enable(self) -> None:
        """Write the stacks at SIGSEGV, SIGFPE, SIGABRT, SIGBUS and SIGILL; and at SIGUSR2, which does not end the
        child.
        """
        faulthandler.enable(self._file, all_threads=True)
        faulthandler.register(signal.SIGUSR2, self._file, all_threads=True, chain=False)

    # --- the supervisor's side ---

    def take(self) -> str:
        """What was written since the last call, up to MAX_BYTES bytes."""
        size = os.fstat(self._file).st_size
        found = os.pread(self._file, min(size - self._seen, MAX_BYTES), self._seen)
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
