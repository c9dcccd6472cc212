"""How the daemon's processes end: a code for programs, one line for people.

The codes keep to sysexits.h where it has a word for the case, so that a service manager can tell an error that a
restart may cure from one that it will not. Imports nothing but the standard library: `tasklibd status` is to be quick.
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    OK = 0
    FAILED = 1  # nobody foresaw it, or a running daemon refused
    USAGE = 2  # the command line
    NOT_RUNNING = 69  # no daemon answers at the control socket
    IMPORT = 70  # the application's task modules
    RUNNING_ALREADY = 73  # another daemon has the control socket
    SCHEMA = 76  # the database's schema does not fit this version
    CONFIG = 78  # the settings


BOOT_ERRORS = frozenset({ExitCode.CONFIG, ExitCode.IMPORT, ExitCode.SCHEMA})  # a restart cures none of them


class Exit(Exception):
    """Ends the process with `code`; `message` is the one line that it says."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def exit_for(error: BaseException) -> Exit:
    """For a process that ends of an error: the code, and one line that says what happened."""
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
    """Ours speak for themselves; of others the type is worth knowing."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    is_ours = isinstance(error, Exit) or type(error).__module__.startswith("tasklib")
    return text if is_ours and text else f"{type(error).__name__}: {text}".rstrip(": ")
