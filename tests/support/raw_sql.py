"""Types and a cast for tests that speak SQL themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, LiteralString, TypeAlias, cast

import psycopg

Conn: TypeAlias = psycopg.Connection[tuple[Any, ...]]
NewDatabase: TypeAlias = Callable[[], str]


def literal(text: Any) -> LiteralString:
    """SQL that a test has put together: psycopg's types ask for literals."""
    return cast("LiteralString", text)
