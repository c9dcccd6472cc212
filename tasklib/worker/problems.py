"""An exception as it is stored: a code for programs, a message, and a text with the traceback, but without locals."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from tasklib.options import MAX_ERROR_CODE
from tasklib.outcomes import Fail, Problem
from tasklib.strict_json import storable

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_ERROR_CHARACTERS = 64 * 1024
MAX_MESSAGE_CHARACTERS = 2 * 1024
_OURS = str(Path(__file__).parent)


def problem_of(
    error: BaseException, codes: Mapping[type[BaseException], str] | None = None, *, code: str | None = None
) -> Problem:
    kind = type(error).__qualname__
    message = storable(_message(error), MAX_MESSAGE_CHARACTERS)
    trace = "".join(_trace(error))
    text = storable(f"{kind}: {message}\nTraceback:\n{trace}".rstrip(), MAX_ERROR_CHARACTERS)
    return Problem(code or _code(error, codes or {}), message, text)


def _code(error: BaseException, codes: Mapping[type[BaseException], str]) -> str:
    """The task's own mapping, nearest class first; the exception's own `error_code`; else the name of its class."""
    mapped = next((codes[kind] for kind in type(error).__mro__ if kind in codes), None)
    own = getattr(error, "error_code", None)
    if isinstance(error, Fail) and own is None:
        own = "FAILED"
    code = mapped or (own if isinstance(own, str) and own else type(error).__name__)
    return storable(code)[:MAX_ERROR_CODE]


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - a message that cannot be made must not cost the outcome
        return f"(its message cannot be shown: {type(broken).__name__})"


def _trace(error: BaseException) -> list[str]:
    """From the task function on: the worker's own frames do not help its author."""
    lines = _frames(error)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and cause is not error:
        lines.append(f"Caused by {type(cause).__qualname__}: {storable(_message(cause), MAX_MESSAGE_CHARACTERS)}\n")
        lines += _frames(cause)
    return lines


def _frames(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    return traceback.format_list([each for each in frames if not each.filename.startswith(_OURS)])
