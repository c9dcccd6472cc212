"""Checks of what changes sessions without a word: rows that are hidden, triggers that do not fire, and time limits that
are too short for a queue. Nothing is refused, and so nobody would look for them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from tasklib.doctor.findings import Finding, Severity, critical, ok
from tasklib.doctor.limits import age, some
from tasklib.doctor.server import OF_A_ROLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasklib.doctor.limits import Limits
    from tasklib.doctor.patient import Patient

REPLICATION_ROLE = "session_replication_role"
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"\s*([0-9.eE+-]+)\s*(us|ms|s|min|h|d)?\s*")


def check_row_security(patient: Patient, _limits: Limits) -> Iterator[Finding]:
    yield ok("off for all tables")
    tables = patient.ask("row_security", patient.config.schema)
    if tables:
        names = [name for name, _ in tables]
        here = "this role too" if any(is_active for _, is_active in tables) else "not for this role, but for others"
        yield critical(
            f"row-level security is on ({here}) for: {some(names)}. What a policy does not show is not there, without "
            f"an error: tasks wait that nobody claims",
            " ".join(f"alter table {patient.schema}.{name} disable row level security;" for name in names),
            tables=names,
        )


class _Given(NamedTuple):
    """A setting of a role, of a database, of a role in one, or of this session. Empty: every one."""

    name: str
    value: str
    role: str
    database: str
    source: str = ""

    def whom(self) -> str:
        if self.source:
            return "this session, by its address" if self.source == "client" else "every session of the server"
        where = f" in database {self.database}" if self.database else ""
        return f"{f'role {self.role}' if self.role else 'every role'}{where}"

    def remedy(self) -> str:
        if self.source == "client":
            return f"take {self.name} out of `options` in the address, or out of PGOPTIONS"
        if self.source:
            return (
                f"alter system reset {self.name}; select pg_reload_conf(); and take it out of postgresql.conf, and out "
                f"of `options` in the address"
            )
        if self.database and not self.role:
            return f"alter database {self.database} reset {self.name};"
        where = f" in database {self.database}" if self.database else ""
        return f"alter role {self.role or 'all'}{where} reset {self.name};"


def check_sessions(patient: Patient, limits: Limits) -> Iterator[Finding]:
    yield ok("no setting keeps them from their work")
    for given in _settings(patient, [REPLICATION_ROLE, *limits.shortest_timeouts]):
        finding = _of_triggers(given) if given.name == REPLICATION_ROLE else _of_time(given, limits)
        if finding is not None:
            yield finding


def _settings(patient: Patient, names: list[str]) -> Iterator[_Given]:
    """Of whoever has any, since it may be who runs tasks or who submits; and of this session, unless it has it from one
    of them.
    """
    of_roles = [_Given(*row) for row in patient.ask("role_settings", names)]
    yield from of_roles
    known = {(each.name, _seconds(each.value)) for each in of_roles}
    for name, value, source in patient.ask("own_settings", names):
        if source not in OF_A_ROLE and (name, _seconds(value)) not in known:
            yield _Given(name, value, "", "", source)


def _of_triggers(given: _Given) -> Finding | None:
    if given.value.strip("'\"").lower() != "replica":
        return None
    return critical(
        f"{REPLICATION_ROLE} is replica for {given.whom()}: triggers do not fire. Workers are not woken, who waits for "
        f"a result is not told, and rows that are written in SQL lack what the triggers add",
        given.remedy(),
        setting=given.name,
        role=given.role,
        database=given.database,
    )


def _of_time(given: _Given, limits: Limits) -> Finding | None:
    seconds, shortest = _seconds(given.value), limits.shortest_timeouts[given.name]
    if seconds is None or not 0 < seconds < shortest:
        return None
    return Finding(
        Severity.CRITICAL if seconds < shortest / 10 else Severity.WARNING,
        f"{given.name} is {given.value} for {given.whom()}: what takes longer is broken off, and done again in vain. "
        f"At least {age(shortest)} would do",
        given.remedy(),
        {"setting": given.name, "seconds": seconds, "role": given.role, "database": given.database},
    )


def _seconds(value: str) -> float | None:
    """Without a unit it is in milliseconds. None: it is none that PostgreSQL would take."""
    found = _TIME.fullmatch(value.strip("'"))
    try:
        return float(found[1]) * _UNITS[found[2] or "ms"] if found else None
    except ValueError:
        return None
