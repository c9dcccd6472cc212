"""Checks of the schema: that it is there, as tasklib made it, and that the role may use it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, LiteralString

from tasklib import migrate
from tasklib.doctor.findings import critical, note, ok
from tasklib.doctor.limits import some
from tasklib.doctor.repairs import is_index, repaired_index, repairs
from tasklib.errors import SchemaError
from tasklib.sql import queries, snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tasklib.doctor.findings import Finding
    from tasklib.doctor.limits import Limits
    from tasklib.doctor.patient import Patient, Row

# What tasklibd does with each table, and which functions it calls. A test runs one as a role that may do just this.
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
    "schema_migrations": ("select",),
}
FUNCTION_RIGHTS = (
    "submit", "submit_many", "cancel", "retry", "promote", "expire", "ring", "ring_all", "queue_statistics",
    "task_statistics", "backlog",
)  # fmt: skip


def check_grants(patient: Patient, _limits: Limits) -> Iterator[Finding]:
    """What the role of a daemon needs. One that may submit, and nothing with any table, is taken for a submitter's."""
    role, schema = patient.server.role, patient.schema
    ((exists, may_use),) = patient.ask("rights_on_schema", schema)
    if not exists:
        yield ok("there is no schema yet")
        return
    if not may_use:
        yield critical(f"role {role} may not use schema {schema}", f"grant usage on schema {schema} to {role};")
        return
    needed = [(table, right) for table, rights in TABLE_RIGHTS.items() for right in rights]
    tables = patient.ask("missing_table_rights", patient.config.schema, *map(list, zip(*needed, strict=True)))
    functions = patient.ask("missing_function_rights", patient.config.schema, list(FUNCTION_RIGHTS))
    if len(tables) == len(needed) and not {"submit", "submit_many"} & {name for name, _ in functions}:
        yield note(
            f"role {role} may submit, and nothing else: it cannot run tasks, nor see all that is looked at here",
            "nothing, if it only submits; what the role of tasklibd needs is in docs/operating.md",
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


def check_schema(patient: Patient, _limits: Limits) -> Iterator[Finding]:
    schema = patient.config.schema
    try:
        with patient.transaction() as conn:
            difference = migrate.find_difference(conn, schema)
            applied = [] if difference.missing else conn.execute(_applied(schema)).fetchall()
    except SchemaError as error:
        yield critical(str(error), "install the tasklib-pg that made it: pip install --upgrade tasklib-pg")
        return
    if difference.missing:
        yield critical(f"there is no schema {schema} in database {patient.server.database}", "tasklib migrate")
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
    version, name = max((version, name) for version, name, *_ in applied)
    yield ok(f"at {version:04}_{name}, as tasklib made it")
    if version == max(migration.version for migration in migrate.known_migrations()):
        yield from _drift(patient)
    yield from _without_effect(patient)


def _applied(schema: str) -> LiteralString:
    return queries("schema_migrations", schema)["applied"]


def _without_effect(patient: Patient) -> Iterator[Finding]:
    """The catalogue still shows them as they were made. What is not ours is nobody else's business."""
    schema, ours = patient.schema, snapshot()
    for kind, table, name in patient.ask("without_effect", patient.config.schema):
        if not any(line.startswith(f"table {table} {kind} CREATE") and f" {name} " in line for line in ours):
            continue
        yield critical(
            f"{kind} {name} of table {table} is {'off' if kind == 'trigger' else 'not valid'}: it has no effect",
            f"alter table {schema}.{table} enable trigger {name};"
            if kind == "trigger"
            else f"reindex index concurrently {schema}.{name};",
            **{"table": table, kind: name},
        )


def _drift(patient: Patient) -> Iterator[Finding]:
    """Somebody changed it by hand, or restored a part of it."""
    schema = patient.config.schema
    with patient.transaction() as conn:
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
    """Who may execute a function is a matter of grants. In another schema a function's text has another digest."""
    line = line.replace(" for public", "")
    if schema != "tasklib":
        line = line.replace(f'"{schema}".', "tasklib.").replace(f"{schema}.", "tasklib.")
        line = line.rpartition(" ")[0] if line.startswith("function ") else line
    return line
