"""The library's own events: `noun.past_tense` with values as keys, through the standard library's logging.

The host's logging is never configured here. Without any, warnings go to stderr, as Python does by default. The values
are in the message as key=value, and in the record as `tasklib` for formatters that write JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from collections.abc import MutableMapping

MAX_SHOWN = 500
logger = logging.getLogger("tasklib")
task_logger = logging.getLogger("tasklib.tasks")  # the line at the end of each attempt: apart, since there may be many


def _render(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
    name = str(event.pop("event"))
    exc_info = event.pop("exc_info", None)
    words = " ".join(
        f"{key}={_shown(value)}" for key, value in event.items() if value is not None and key != "exception"
    )
    message = f"{name} {words}".rstrip() + _below(event.get("exception"))
    return (message,), {"extra": {"tasklib": {"event": name, **event}}, "exc_info": exc_info}


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


class _Calm(structlog.stdlib.BoundLogger):
    """A handler of the application's that raises must not end a loop of ours."""

    def _proxy_to_logger(self, method_name: str, event: str | None = None, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._proxy_to_logger(method_name, event, *args, **kwargs)
        except Exception:  # noqa: BLE001 - whatever it is, it is told where logging itself tells its troubles
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc(file=sys.stderr)


def _wrapped(wrapped: logging.Logger) -> structlog.stdlib.BoundLogger:
    made: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        wrapped, processors=[structlog.stdlib.filter_by_level, _render], wrapper_class=_Calm
    )
    return made


log = _wrapped(logger)
task_log = _wrapped(task_logger)
