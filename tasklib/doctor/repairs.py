"""What puts back the parts of the schema that somebody took away or changed: statements, made from their descriptions.

A part that was changed is still there under its name, and goes first. An index that is missing is built while others
work, which only a statement that is sent alone may do: so it has a finding of its own, and `psql -c` runs its remedy.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from tasklib.sql import folder, in_schema, snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Each kind as `tasklib.migrate.describe` words it, with what makes it; in the order in which they can be made.
KINDS = {
    "constraint": (
        re.compile(r"table (?P<table>\w+) constraint (?P<name>\w+) (?P<text>.+)"),
        "alter table tasklib.{table} drop constraint if exists {name}, add constraint {name} {text};",
    ),
    "index": (
        re.compile(r"table \w+ index CREATE (?P<unique>|UNIQUE )INDEX (?P<name>\w+) (?P<text>.+)"),
        "create {unique}index concurrently {name} {text};",
    ),
    "view": (re.compile(r"view (?P<name>\w+) (?P<text>.+);"), "create or replace view tasklib.{name} as {text};"),
    "trigger": (
        re.compile(r"table \w+ trigger CREATE TRIGGER (?P<name>\w+) (?P<text>.+)"),
        "create or replace trigger {name} {text};",
    ),
    "function": (re.compile(r"function (?P<name>\w+).*"), ""),  # its description has no text, only a digest
    "other": (re.compile(r"(?P<name>.+)"), ""),
}
ALL_ANEW = "delete from tasklib.schema_migrations where version = 0;"


class _Part(NamedTuple):
    kind: str
    name: str
    statement: str  # empty: its description does not say how it is made


def repairs(missing: Sequence[str], schema: str) -> Iterator[str]:
    """For lines of the description. The functions that every upgrade replaces, with their triggers, come by one; the
    index of a constraint comes with that.
    """
    parts = sorted(map(_part, missing), key=lambda part: [*KINDS].index(part.kind))
    constraints = {part.name for part in parts if part.kind == "constraint"}
    replaced = {name for name, _ in folder("functions")}
    by_upgrade = [part for part in parts if part.kind in {"function", "trigger"} and part.name in replaced]
    by_itself = [part for part in parts if part.kind == "index" and part.name in constraints]
    left = [part for part in parts if part not in by_upgrade and part not in by_itself]
    yield from (in_schema(part.statement, schema) for part in left if part.statement)
    if by_upgrade:
        yield f"{in_schema(ALL_ANEW, schema)} then: tasklib migrate"
    if hard := [part.name for part in left if not part.statement]:
        yield f"as in tasklib/sql/migrations, or from a backup: {', '.join(hard)}"


def is_index(line: str) -> bool:
    """And not one that comes with its constraint."""
    part = _part(line)
    return part.kind == "index" and not any(f" constraint {part.name} " in each for each in snapshot())


def repaired_index(line: str, added: Sequence[str], schema: str) -> str:
    """One that was changed is replaced in one transaction, so that the table is never without it."""
    part = _part(line)
    if not any(f" INDEX {part.name} " in each for each in added):
        return in_schema(part.statement, schema)
    build = part.statement.replace(" concurrently", "")
    return in_schema(f"drop index tasklib.{part.name}; {build} -- holds up every change while it is built", schema)


def _part(line: str) -> _Part:
    kind, found, statement = next(
        (kind, found, statement) for kind, (pattern, statement) in KINDS.items() if (found := pattern.fullmatch(line))
    )
    return _Part(kind, found["name"], statement.format(**found.groupdict()))
