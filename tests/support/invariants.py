"""Runs tests/support/invariants.sql: queries that must return no rows after any run that was drained."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.raw_sql import literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.support.raw_sql import Conn

# These need no journal, and hold at any moment, also under load.
AT_ANY_TIME = ("I7", "I12")

JOURNAL_TABLES = """
create schema chaos;
create table chaos.submit (
    id uuid primary key, key text, outcome text not null check (outcome in ('ok', 'unknown', 'refused')));
create table chaos.run (
    task_id uuid not null, token bigint not null, attempt integer not null, worker_id text not null,
    pid integer not null, began timestamptz not null, finished timestamptz, ended text,
    was_hit boolean not null default false);
create table chaos.live (pid integer primary key);
"""

_NAME = re.compile(r"^-- name: (I\d+) (.+)$", re.MULTILINE)
_SHOWN_ROWS = 5


@dataclass(frozen=True, slots=True)
class Invariant:
    number: str
    says: str
    query: str


@dataclass(frozen=True, slots=True)
class Violation:
    invariant: Invariant
    rows: list[tuple[Any, ...]]

    def __str__(self) -> str:
        shown = "; ".join(", ".join(map(str, row)) for row in self.rows[:_SHOWN_ROWS])
        return f"{self.invariant.number} {self.invariant.says}: {len(self.rows)} rows: {shown}"


def _read() -> dict[str, Invariant]:
    parts = _NAME.split(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))
    found = zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    return {number: Invariant(number, says, query.strip().rstrip(";")) for number, says, query in found}


INVARIANTS = _read()


def make_journal_tables(conn: Conn) -> None:
    conn.execute(literal(JOURNAL_TABLES))


def violations(conn: Conn, numbers: Iterable[str] = tuple(INVARIANTS)) -> list[Violation]:
    asked = [INVARIANTS[number] for number in numbers]
    found = [Violation(each, conn.execute(literal(each.query)).fetchall()) for each in asked]
    return [each for each in found if each.rows]
