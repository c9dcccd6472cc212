"""The library's own events: `noun.past_tense` with values as keys, through the standard library's logging.

The library never configures logging. Where the application has not either, Python prints warnings to stderr. The values
of an event are in the message as key=value, and in the record as `tasklib` for formatters that write JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from typing import Any

MAX_SHOWN = 500
logger = logging.getLogger("tasklib")
task_logger = logging.getLogger("tasklib.tasks")  # one line at the end of each attempt, which may be many


def _render(name: str, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The message, and the other arguments of a logger's method."""
    exc_info = values.pop("exc_info", None)
    words = " ".join(
        f"{key}={_shown(value)}" for key, value in values.items() if value is not None and key != "exception"
    )
    message = f"{name} {words}".rstrip() + _below(values.get("exception"))
    return message, {"extra": {"tasklib": {"event": name, **values}}, "exc_info": exc_info}


def _below(trace: str | None) -> str:
    """A traceback, on indented lines of its own: no text of a user's can look like an event."""
    return "".join(f"\n    {printable(line)}" for line in (trace or "").splitlines())


def printable(text: str) -> str:
    """Control characters as escapes: a terminal must not obey stored text."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def bounded(text: str, most: int) -> str:
    """Keeps both ends: a traceback says at its end where the error happened."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def _shown(value: Any) -> str:
    """Bounded, on one line, and without control characters, since it may be a user's text."""
    text = value if isinstance(value, str) else repr(value) if isinstance(value, list | tuple) else str(value)
    short = text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
    return short if short.isprintable() and " " not in short and short else json.dumps(short)


class Log:
    """Writes events to one logger. It has the methods of structlog that the library needs; to import structlog took a
    third of the time of `import tasklib`.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def info(self, event: str, **values: Any) -> None:
        self._write(logging.INFO, event, values)

    def warning(self, event: str, **values: Any) -> None:
        self._write(logging.WARNING, event, values)

    def error(self, event: str, **values: Any) -> None:
        self._write(logging.ERROR, event, values)

    def exception(self, event: str, **values: Any) -> None:
        self._write(logging.ERROR, event, {"exc_info": True, **values})

    def log(self, level: int, event: str, **values: Any) -> None:
        self._write(level, event, values)

    def _write(self, level: int, event: str, values: dict[str, Any]) -> None:
        """An error in a handler of the application's must not end a loop of ours."""
        if not self._logger.isEnabledFor(level):
            return
        try:
            message, settings = _render(event, values)
            self._logger.log(level, message, **settings, stacklevel=3)
        except Exception:  # noqa: BLE001 - reported as logging reports its own errors
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc(file=sys.stderr)


log = Log(logger)
task_log = Log(task_logger)
