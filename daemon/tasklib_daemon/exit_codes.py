"""How the daemon's processes exit: with a code for programs and one line for people.

The codes follow sysexits.h where it has one for the case, so that a service manager knows which errors a restart may
cure. Imports only the standard library, so that `tasklibd status` starts quickly.
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    OK = 0
    FAILED = 1  # an unexpected error, or a running daemon refused
    USAGE = 2  # the command line
    NOT_RUNNING = 69  # no daemon answers on the control socket
    IMPORT = 70  # the application's task modules
    RUNNING_ALREADY = 73  # another daemon has the control socket
    SCHEMA = 76  # the database's schema does not fit this version
    CONFIG = 78  # the settings


BOOT_ERRORS = frozenset({ExitCode.CONFIG, ExitCode.IMPORT, ExitCode.SCHEMA})  # a restart cures none of them


class Exit(Exception):
    """Ends the process with `code`, and prints `message`, which is one line."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def exit_for(error: BaseException) -> Exit:
    """The code and the line for a process that ends because of this error."""
    from tasklib.errors import (  # noqa: PLC0415 - see above
        InvalidConfig,
        InvalidOptions,
        InvalidTaskDefinition,
        SchemaError,
    )

    if isinstance(error, Exit):
        return error
    code = ExitCode.FAILED
    if isinstance(error, InvalidConfig | InvalidOptions):
        code = ExitCode.CONFIG
    elif isinstance(error, InvalidTaskDefinition):
        code = ExitCode.IMPORT
    elif isinstance(error, SchemaError):
        code = ExitCode.SCHEMA
    return Exit(code, one_line(error))


def one_line(error: BaseException) -> str:
    """The text of the error; for errors that are not ours, with their type."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    is_ours = isinstance(error, Exit) or type(error).__module__.startswith("tasklib")
    return text if is_ours and text else f"{type(error).__name__}: {text}".rstrip(": ")
