"""One statement, as a value, and the simplest ways to read its rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, LiteralString, TypeVar
from uuid import UUID

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

T_co = TypeVar("T_co", covariant=True)
Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Statement(Generic[T_co]):
    sql: LiteralString
    parameters: Sequence[Any]
    read: Callable[[list[Row]], T_co]
    is_change: bool = True
    as_bytes: Callable[[], Sequence[bytes | None]] | None = None  # the parameters once more: see send_alone
    is_binary: bool = False  # these bytes are in PostgreSQL's binary form, and not text
    is_qualified: bool = False  # every name in it has its schema, so that it means the same on every connection


def read_nothing(_rows: list[Row]) -> None:
    pass


def read_value(rows: list[Row]) -> Any:
    return rows[0][0] if rows else None


def read_column(rows: list[Row]) -> list[Any]:
    return [row[0] for row in rows]


def as_texts(values: Iterable[object]) -> list[bytes | None]:
    """Parameters as PostgreSQL reads them, for the few types that hot statements have."""
    return [None if value is None else _as_text(value) for value in values]


def _as_text(value: object) -> bytes:
    match value:
        case str():
            return value.encode()
        case UUID():
            return b"%032x" % value.int
        case list():
            return _as_array(tuple(value))
        case bool():
            return b"t" if value else b"f"
        case int() | float():
            return repr(value).encode()
        case _:
            raise TypeError(f"no text is known for a {type(value).__name__}")


@functools.lru_cache(maxsize=100)
def _as_array(texts: tuple[str, ...]) -> bytes:
    quoted = (text.replace("\\", "\\\\").replace('"', '\\"') for text in texts)
    return ("{" + ",".join(f'"{text}"' for text in quoted) + "}").encode()
