"""Arrays that are written by hand: PostgreSQL reads what psycopg would have told it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from psycopg.pq import Format

from tasklib import arrays

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.raw_sql import Conn

pytestmark = pytest.mark.postgres_versions

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
KINDS: dict[str, tuple[Callable[[Any], bytes], st.SearchStrategy[Any]]] = {
    "uuid": (arrays.uuids, st.uuids()),
    "bigint": (arrays.bigints, st.integers(-(2**63), 2**63 - 1)),
    "double precision": (arrays.doubles, st.floats(allow_nan=False)),
    "text": (arrays.texts, st.none() | TEXTS),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_postgresql_reads_them(conn: Conn, kind: str, data: st.DataObject) -> None:
    """Whatever their length, none included, and with NULL among texts."""
    written, values = KINDS[kind]
    some = data.draw(st.lists(values))
    answer = conn.pgconn.exec_params(
        f"select $1::{kind}[] is not distinct from $2::{kind}[]".encode(),
        [written(some), _literal(some).encode()],
        param_formats=[Format.BINARY, Format.TEXT],
    )
    assert answer.get_value(0, 0) == b"t", answer.error_message


def _literal(values: list[Any]) -> str:
    """An array as PostgreSQL's own text."""
    quoted = (
        "NULL" if each is None else '"' + str(each).replace("\\", "\\\\").replace('"', '\\"') + '"' for each in values
    )
    return "{" + ",".join(quoted) + "}"
