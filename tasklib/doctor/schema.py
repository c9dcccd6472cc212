"""Checks of the schema: that it is there, as tasklib made it, and that the role may use it.

A part that is missing or was changed is put back by statements that are made from its description. A part that was
changed is still there under its name, and is dropped first. A missing index is built concurrently, which only a
statement that is sent alone may do. So it has a finding of its own, whose remedy can be run by `psql -c`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from tasklib import migrate
from tasklib.doctor.findings import Finding, Thresholds, critical, note, ok, some
from tasklib.errors import SchemaError
from tasklib.sql import folder, in_schema, queries, snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tasklib.doctor.probe import Probe, Row


# The rights that tasklibd needs on tables and functions. A test runs it as a role that has only these.
TABLE_RIGHTS = {
    "tasks": ("select", "update", "delete"),
    "attempts": ("insert",),
    "folded_attempts": ("select",),
    "task_attempts": ("select",),
    "claims": ("select", "insert", "update", "delete"),
    "workers": ("select", "insert", "update", "delete"),
    "elections": ("select", "insert", "update"),
    "worker_states": ("select", "insert", "delete"),
    "task_rollups": ("select", "insert", "update", "delete"),
    "task_functions": ("select", "insert", "update", "delete"),
    "queues": ("select",),
    "policy": ("select",),
    "queue_limits": ("select",),
    "permits": ("select", "insert", "update", "delete"),
    "rates": ("select", "insert", "update"),
    "breakers": ("select", "insert", "update"),
    "task_transitions": ("select", "insert", "delete"),
    "schema_migrations": ("select",),
}
FUNCTION_RIGHTS = (
    "submit", "submit_many", "cancel", "retry", "promote", "expire", "ring", "ring_all", "queue_statistics",
    "task_statistics", "backlog", "permit", "forget_permits", "grant_starts", "report_breaker",
    "pause_queue", "note_transition", "caller", "ended_late",
)  # fmt: skip


def check_grants(probe: Probe, _thresholds: Thresholds) -> Iterator[Finding]:
    """The rights that a daemon needs. A role that may submit and has no rights on tables is taken for a client's."""
    role, schema = probe.server.role, probe.schema
    ((exists, may_use),) = probe.ask("rights_on_schema", schema)
    if not exists:
        yield ok("there is no schema yet")
        return
    if not may_use:
        yield critical(f"role {role} may not use schema {schema}", f"grant usage on schema {schema} to {role};")
        return
    needed = [(table, right) for table, rights in TABLE_RIGHTS.items() for right in rights]
    tables = probe.ask("missing_table_rights", probe.config.schema, *map(list, zip(*needed, strict=True)))
    functions = probe.ask("missing_function_rights", probe.config.schema, list(FUNCTION_RIGHTS))
    if len(tables) == len(needed) and not {"submit", "submit_many"} & {name for name, _ in functions}:
        yield note(
            f"role {role} may only submit: it cannot run tasks, and not all checks are possible with it",
            "nothing, if it is to submit only; docs/installing.md lists the rights of the role of tasklibd",
        )
    elif tables or functions:
        missing = [f"{right} on {table}" for table, right in tables] + [f"execute on {name}" for name, _ in functions]
        yield critical(
            f"role {role} may not do all that a daemon does; missing: {some(missing)}",
            " ".join(_grants(schema, role, tables, [signature for _, signature in functions])),
            missing=missing,
        )
    yield ok(f"role {role} may do all that a daemon does")


def _grants(schema: str, role: str, tables: Iterable[Row], functions: Iterable[str]) -> Iterator[str]:
    by_table = defaultdict(list)
    for table, right in tables:
        by_table[table].append(right)
    for table, rights in by_table.items():
        yield f"grant {', '.join(rights)} on {schema}.{table} to {role};"
    for function in functions:
        yield f"grant execute on function {function} to {role};"


def check_schema(probe: Probe, _thresholds: Thresholds) -> Iterator[Finding]:
    schema = probe.config.schema
    try:
        with probe.transaction() as conn:
            difference = migrate.find_difference(conn, schema)
            applied = (
                [] if difference.missing else conn.execute(queries("schema_migrations", schema)["applied"]).fetchall()
            )
    except SchemaError as error:
        yield critical(str(error), "install the tasklib-pg that made it: pip install --upgrade tasklib-pg")
        return
    if difference.missing:
        yield critical(f"there is no schema {schema} in database {probe.server.database}", "tasklib migrate")
        return
    if difference.is_outdated:
        yield critical(f"the schema is older than this tasklib; waiting: {difference}", "tasklib migrate")
        return
    if difference.pending:
        yield note(
            f"an upgrade is not finished; waiting: {difference}",
            "tasklib migrate, when no process of the version before is left",
        )
        return
    if {each.migration.version for each in difference.builds} - {version for version, *_ in applied}:
        yield note(f"an upgrade is not finished; waiting: {difference}", "tasklib migrate")
        return
    version, name = max((version, name) for version, name, *_ in applied)
    yield ok(f"at {version:04}_{name}, as tasklib made it")
    if version == max(migration.version for migration in migrate.known_migrations()):
        yield from _drift(probe)
    yield from _without_effect(probe)


def _without_effect(probe: Probe) -> Iterator[Finding]:
    """Triggers that are off and indexes that are invalid look unchanged in the catalogue. Only tasklib's own are
    checked.
    """
    schema, ours = probe.schema, snapshot()
    for kind, table, name in probe.ask("without_effect", probe.config.schema):
        if not any(line.startswith(f"table {table} {kind} CREATE") and f" {name} " in line for line in ours):
            continue
        yield critical(
            f"{kind} {name} of table {table} is {'off' if kind == 'trigger' else 'not valid'}: it has no effect",
            f"alter table {schema}.{table} enable trigger {name};"
            if kind == "trigger"
            else f"reindex index concurrently {schema}.{name};",
            **{"table": table, kind: name},
        )


def _drift(probe: Probe) -> Iterator[Finding]:
    """The schema was changed by hand, or only a part of it was restored."""
    schema = probe.config.schema
    with probe.transaction() as conn:
        found = {_comparable(line, schema): line for line in migrate.describe(conn, schema).splitlines()}
    wanted = {_comparable(line, schema): line for line in snapshot()}
    missing = sorted(wanted[key] for key in wanted.keys() - found.keys())
    added = sorted(found[key] for key in found.keys() - wanted.keys())
    others = [line for line in missing if not is_index(line)]
    for line in sorted(set(missing) - set(others)):
        yield critical(
            f"the schema is not as tasklib made it; missing or changed: {line}",
            repaired_index(line, added, schema),
            missing=[line],
            added=added,
        )
    if others:
        yield critical(
            f"the schema is not as tasklib made it; missing or changed: {some(others)}",
            " ".join(repairs(others, schema)),
            missing=others,
            added=added,
        )
    if added and not missing:
        yield note(
            f"the schema has more than tasklib made: {some(added)}",
            "nothing, if it is meant; an index costs time at every step of every task, a trigger that raises stops it",
            added=added,
        )


def _comparable(line: str, schema: str) -> str:
    """Without the right to execute, which is a matter of grants. In another schema a function's text has another
    digest.
    """
    line = line.replace(" for public", "")
    if schema != "tasklib":
        line = line.replace(f'"{schema}".', "tasklib.").replace(f"{schema}.", "tasklib.")
        line = line.rpartition(" ")[0] if line.startswith("function ") else line
    return line


# Each kind as `tasklib.migrate.describe` writes it, with the statement that makes it, in the order of creation.
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
REPLACED = re.compile(r"^create or replace (?:function tasklib\.|trigger )(\w+)", re.MULTILINE)  # by every upgrade
ALL_ANEW = "delete from tasklib.schema_migrations where version = 0;"


class _Part(NamedTuple):
    kind: str
    name: str
    statement: str  # empty: its description does not say how it is made


def repairs(missing: Sequence[str], schema: str) -> Iterator[str]:
    """Statements that restore lines of the description. Functions that every upgrade replaces, and their triggers, are
    restored by an upgrade, and the index of a constraint by the constraint.
    """
    parts = sorted(map(_part, missing), key=lambda part: [*KINDS].index(part.kind))
    constraints = {part.name for part in parts if part.kind == "constraint"}
    replaced = {name for _, text in folder("functions") for name in REPLACED.findall(text)}
    by_upgrade = [part for part in parts if part.kind in {"function", "trigger"} and part.name in replaced]
    by_itself = [part for part in parts if part.kind == "index" and part.name in constraints]
    left = [part for part in parts if part not in by_upgrade and part not in by_itself]
    yield from (in_schema(part.statement, schema) for part in left if part.statement)
    if by_upgrade:
        yield f"{in_schema(ALL_ANEW, schema)} then: tasklib migrate"
    if hard := [part.name for part in left if not part.statement]:
        yield f"as in tasklib/sql/migrations, or from a backup: {', '.join(hard)}"


def is_index(line: str) -> bool:
    """An index of its own, and not that of a constraint."""
    part = _part(line)
    return part.kind == "index" and not any(f" constraint {part.name} " in each for each in snapshot())


def repaired_index(line: str, added: Sequence[str], schema: str) -> str:
    """A changed index is replaced in one transaction, so that the table is never without it."""
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
