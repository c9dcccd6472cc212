"""Removes secrets from text: those of the settings, and passwords in URLs and connection strings."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

STRUCK_OUT = "***"
MIN_SECRET_CHARACTERS = 6  # a shorter one would match parts of ordinary words
_IN_URL = r"(\b[a-z][a-z0-9+.-]*://[^\s:/@\"']*:)[^\s\"']+(?=@)"
_IN_STRING = r"(\bpassword\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s'\"&]+)"
_PASSWORD = re.compile(f"{_IN_URL}|{_IN_STRING}", re.IGNORECASE)


def redactor(secrets: Iterable[str] = ()) -> Callable[[str], str]:
    """Works on complete lines, so that it also covers keys, tracebacks and text that JSON has escaped."""
    forms = {form for each in secrets if len(each) >= MIN_SECRET_CHARACTERS for form in (each, json.dumps(each)[1:-1])}
    known = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None

    def redact(text: str) -> str:
        if "://" in text or "assword" in text or "ASSWORD" in text:
            text = _PASSWORD.sub(lambda found: f"{found[1] or found[2]}{STRUCK_OUT}", text)
        return known.sub(STRUCK_OUT, text) if known is not None else text

    return redact
