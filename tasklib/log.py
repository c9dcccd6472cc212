"""The library's own events: `noun.past_tense` with values as keys, through the standard library's logging.

The host's logging is never configured here. Without any, warnings go to stderr, as Python does by default. The values
are in the message as key=value, and in the record as `tasklib` for formatters that write JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from typing import Any

MAX_SHOWN = 500
logger = logging.getLogger("tasklib")
task_logger = logging.getLogger("tasklib.tasks")  # the line at the end of each attempt: apart, since there may be many


def _render(name: str, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The message, and the other arguments of a logger's method."""
    exc_info = values.pop("exc_info", None)
    words = " ".join(
        f"{key}={_shown(value)}" for key, value in values.items() if value is not None and key != "exception"
    )
    message = f"{name} {words}".rstrip() + _below(values.get("exception"))
    return message, {"extra": {"tasklib": {"event": name, **values}}, "exc_info": exc_info}


def _below(trace: str | None) -> str:
    """A traceback as text, on lines of its own. They are indented, so that no text of a user's looks like an event."""
    return "".join(f"\n    {printable(line)}" for line in (trace or "").splitlines())


def printable(text: str) -> str:
    """Control codes are shown, not obeyed."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def bounded(text: str, most: int) -> str:
    """Both ends are kept: a traceback says at its end where it happened."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def _shown(value: Any) -> str:
    """Bounded, on one line, and without control characters: it may be a user's text."""
    text = value if isinstance(value, str) else repr(value) if isinstance(value, list | tuple) else str(value)
    short = text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
    return short if short.isprintable() and " " not in short and short else json.dumps(short)


class Log:
    """Writes events to one logger. Not structlog's: to import that, with what it imports, took a third of the time of
    `import tasklib`, and of all of it this is what the library needs.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **values: Any) -> None:
        self._write(logging.DEBUG, event, values)

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
        """A handler of the application's that raises must not end a loop of ours."""
        if not self._logger.isEnabledFor(level):
            return
        try:
            message, settings = _render(event, values)
            self._logger.log(level, message, **settings, stacklevel=3)
        except Exception:  # noqa: BLE001 - whatever it is, it is told where logging itself tells its troubles
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc(file=sys.stderr)


log = Log(logger)
task_log = Log(task_logger)
