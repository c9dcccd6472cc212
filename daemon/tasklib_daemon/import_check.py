"""Imports the application in a separate process, to check that it can be imported. It may do anything there."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from typing import TYPE_CHECKING, NoReturn

from tasklib.registry import default_registry
from tasklib_daemon import preload
from tasklib_daemon.exit_codes import Exit, ExitCode, exit_for

if TYPE_CHECKING:
    from tasklib_daemon.settings import Settings


def check_import(settings: Settings) -> list[str]:
    """Return the names of its tasks. Raises Exit with one line about what is wrong."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _import_and_report(settings, theirs)
    os.close(theirs)
    answer = _read(ours, settings.boot_seconds)
    ended = _end(pid, is_late=answer is None)
    if answer is None:
        raise Exit(ExitCode.IMPORT, f"the import of {_names(settings)} takes longer than {settings.boot_seconds:g} s")
    try:
        code, message, tasks = json.loads(answer)
    except ValueError:
        raise Exit(ExitCode.IMPORT, f"the import of {_names(settings)} ended its process: {ended}") from None
    if code:
        raise Exit(ExitCode(code), message)
    return list(tasks)


def _import_and_report(settings: Settings, pipe: int) -> NoReturn:
    answer: tuple[int, str, list[str]]
    try:
        os.setpgid(0, 0)
        preload.import_app(settings) if settings.preload else settings.import_app()
        answer = (0, "", sorted(function.name for function in default_registry))
    except BaseException as error:  # noqa: BLE001 - reported to the parent
        found = exit_for(error)
        answer = (int(found.code), found.message, [])
    with contextlib.suppress(OSError):
        os.write(pipe, json.dumps(answer).encode() + b"\n")
    os._exit(0)


def _read(pipe: int, seconds: float) -> bytes | None:
    """Up to the end of the line. None: it did not come in time."""
    deadline = time.monotonic() + seconds
    answer = b""
    try:
        while not answer.endswith(b"\n"):
            if not select.select([pipe], [], [], max(deadline - time.monotonic(), 0))[0]:
                return None
            chunk = os.read(pipe, 65536)
            if not chunk:
                break
            answer += chunk
    finally:
        os.close(pipe)
    return answer


def _end(pid: int, *, is_late: bool) -> str:
    """End the process and what it has started. Returns in words how it ended."""
    if is_late:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _names(settings: Settings) -> str:
    return ", ".join(settings.app)
