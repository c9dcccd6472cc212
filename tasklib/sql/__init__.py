"""Reads the SQL files. They say `tasklib.` everywhere, so that they can be pasted into psql. The name of another
schema is put in here, and so are the parts that several queries share.
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
_PART_NAME = re.compile(r"^-- part: (\w+)$", re.MULTILINE)
_COMMA = re.compile(r",(?!(?:[^()]|\([^()]*\))*\))")  # outside of parentheses


def in_schema(sql: str, schema: str) -> LiteralString:
    """A schema's name has nothing but letters, digits and underscores, which is checked elsewhere. The quotes are for
    reserved words. LiteralString is psycopg's guard against injection: this text is the package's own.
    """
    named: Any = sql if schema == "tasklib" else _SCHEMA_MENTION.sub(f'"{schema}"', sql)
    return cast("LiteralString", named)


@functools.cache
def queries(noun: str, schema: str) -> dict[str, LiteralString]:
    """The named queries of one file: `-- name: get` up to the next name. Each `:part` is replaced by its text."""
    return {name: in_schema(_with_parts(body), schema) for name, body in _named(_QUERY_NAME, f"{noun}.sql")}


def columns(part: str) -> list[str]:
    """The names of the columns in a part, in their order: rows are read by these names."""
    return [re.split(r"[ \n]", column)[-1] for column in _COMMA.split(_parts()[part])]


def _with_parts(body: str) -> str:
    """A part may contain others."""
    parts = _parts()
    mention = re.compile(f":({'|'.join(parts)})\\b")
    return mention.sub(lambda found: _with_parts(parts[found[1]]), body)


@functools.cache
def _parts() -> dict[str, str]:
    return dict(_named(_PART_NAME, "parts.sql"))


def _named(name: re.Pattern[str], file: str) -> list[tuple[str, str]]:
    """Names and texts, without the comment that belongs to the next one."""
    found = name.split(_read(files(__name__) / file))
    texts = (_COMMENT_AT_END.sub("", text).strip().rstrip(";") for text in found[2::2])
    return [*zip(found[1::2], texts, strict=True)]


def folder(name: str) -> list[tuple[str, str]]:
    """The name and the text of each file in one folder, in the order of their names."""
    entries = sorted((files(__name__) / name).iterdir(), key=lambda entry: entry.name)
    return [(entry.name.removesuffix(".sql"), _read(entry)) for entry in entries if entry.name.endswith(".sql")]


def snapshot() -> list[str]:
    """The schema after all migrations, one line for each part of it: see `tasklib.migrate.describe`."""
    lines = _read(files(__name__) / "schema.sql").splitlines()
    return [line.removeprefix("-- ") for line in lines[1:]]


def _read(entry: Traversable) -> str:
    return entry.read_text(encoding="utf-8")
