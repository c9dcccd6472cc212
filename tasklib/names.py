"""The rules for names that users choose. The database has the same rules as CHECK constraints."""

from __future__ import annotations

import re
from typing import Any

from tasklib.errors import InvalidConfig, InvalidOptions, InvalidTaskDefinition

_TASK = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,199}")
_QUEUE = re.compile(r"[a-z0-9_.-]{1,48}")
_TAG_KEY = re.compile(r"[A-Za-z0-9_.-]+")
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,47}")
MAX_KEY_CHARACTERS = 255


def check_task_name(name: Any) -> str:
    if not isinstance(name, str) or not _TASK.fullmatch(name):
        raise InvalidTaskDefinition(
            f"{name!r} cannot be a task's name: it must start with a letter or underscore, use only ASCII letters, "
            f'digits and _ . : -, and have at most 200 characters. Give one with @task(name="...").'
        )
    return name


def check_queue(queue: str) -> str:
    if not _QUEUE.fullmatch(queue):
        raise InvalidOptions(
            f"{queue!r} cannot be a queue's name: use 1 to 48 of lower-case ASCII letters, digits and _ . -"
        )
    return queue


def check_key(key: str, what: str) -> str:
    if not 1 <= len(key) <= MAX_KEY_CHARACTERS or "\0" in key or not _encodable(key):
        raise InvalidOptions(f"{what} must have 1 to {MAX_KEY_CHARACTERS} characters, none of them NUL or a surrogate")
    return key


def check_tag_key(key: object) -> str:
    if not isinstance(key, str) or not _TAG_KEY.fullmatch(key):
        raise InvalidOptions(f"{key!r} cannot be a tag's key: use ASCII letters, digits and _ . -")
    return key


def check_schema(schema: str) -> str:
    if not _SCHEMA.fullmatch(schema) or schema.startswith("pg_"):
        raise InvalidConfig(
            f"{schema!r} cannot be the schema: use up to 48 of lower-case ASCII letters, digits and underscore, "
            f"starting with a letter or underscore, not with pg_"
        )
    return schema


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
