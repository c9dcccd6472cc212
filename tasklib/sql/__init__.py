"""Reads the SQL files. They say `tasklib.` everywhere, so that they paste into psql; another
schema's name is put in once, here.
"""

from __future__ import annotations

import functools
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any, LiteralString, cast

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_SCHEMA_MENTION = re.compile(r"\btasklib(?=\.)")
_COMMENT_AT_END = re.compile(r"(?:^(?:--.*)?\n)*\Z", re.MULTILINE)
_QUERY_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def in_schema(sql: str, schema: str) -> LiteralString:
    """Schema names are checked to hold nothing but letters, digits and underscore; quotes are for reserved words.

    LiteralString is psycopg's guard against injection: what comes from here is the package's own text.
    """
    named: Any = sql if schema == "tasklib" else _SCHEMA_MENTION.sub(f'"{schema}"', sql)
    return cast("LiteralString", named)


@functools.cache
def queries(noun: str, schema: str) -> dict[str, LiteralString]:
    """The named queries of one file: `-- name: get` up to the next name."""
    parts = _QUERY_NAME.split(_read(files(__name__) / f"{noun}.sql"))
    return {name: in_schema(_statement(body), schema) for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def _statement(body: str) -> str:
    """Without the comment that belongs to the next one."""
    return _COMMENT_AT_END.sub("", body).strip().rstrip(";")


def folder(name: str) -> list[tuple[str, str]]:
    """The files of one folder in order of their names: (name, text)."""
    entries = sorted((files(__name__) / name).iterdir(), key=lambda entry: entry.name)
    return [(entry.name.removesuffix(".sql"), _read(entry)) for entry in entries if entry.name.endswith(".sql")]


def snapshot() -> list[str]:
    """The schema as it is when all has been applied, a line for each part of it: see `tasklib.migrate.describe`."""
    lines = _read(files(__name__) / "schema.sql").splitlines()
    return [line.removeprefix("-- ") for line in lines[1:]]


def _read(entry: Traversable) -> str:
    return entry.read_text(encoding="utf-8")
