"""Checks of the server and its settings: whether it is the right one, whether its clock is right, whether confirmed
commits survive a crash, and whether settings of roles and databases hide rows, switch off triggers or cancel statements
too early. Such settings raise no error, so they are hard to find otherwise.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, NamedTuple

from tasklib.clock import time
from tasklib.doctor.findings import Finding, Severity, Thresholds, age, critical, note, ok, severity_of, some, warning
from tasklib.doctor.probe import REPORTED_ELSEWHERE, Probe
from tasklib.sql import queries

if TYPE_CHECKING:
    from collections.abc import Iterator


OLDEST_POSTGRES = 150000
CLOCK_LOOKS = 3
OF_A_ROLE = ("user", "database", "database user", "global")  # sources that are reported with their role or database


def check_database(probe: Probe, _thresholds: Thresholds) -> Iterator[Finding]:
    server = probe.server
    yield ok(f"PostgreSQL {server.version}, database {server.database}, role {server.role}")
    if server.version_num < OLDEST_POSTGRES:
        yield critical(f"PostgreSQL {server.version} is older than 15, the oldest that works", "upgrade the server")
    if server.is_standby:
        yield critical(
            "the address leads to a standby: nothing can be submitted or claimed there",
            "name the primary in the address, or all hosts and target_session_attrs=read-write",
        )
    elif server.is_read_only:
        yield critical("transactions are read-only by default: nothing can be submitted or claimed", _writable(probe))
    if server.encoding != "UTF8":
        yield note(
            f"the database is encoded in {server.encoding}: it refuses text that has other characters",
            "move to a database that was created with encoding 'UTF8'",
        )


def _writable(probe: Probe) -> str:
    """Depends on where the setting comes from. New sessions are read-only too, and have to switch that off first."""
    server, setting = probe.server, "default_transaction_read_only"
    ((source,),) = probe.ask("source", setting)
    if source == "client":
        return f"take {setting} out of `options` in the address, or out of PGOPTIONS"
    of_a_role = {
        "database": f"alter database {server.database} reset {setting};",
        "user": f"alter role {server.role} reset {setting};",
        "database user": f"alter role {server.role} in database {server.database} reset {setting};",
        "global": f"alter role all reset {setting};",
    }
    reset = of_a_role.get(source, f"alter system set {setting} = off; select pg_reload_conf();")
    return f"see why first (providers do so when a disk is full); then set {setting} = off; {reset}"


def check_clock(probe: Probe, thresholds: Thresholds) -> Iterator[Finding]:
    """Leases depend on the database's clock alone. A host's clock decides the order of ids, the times that applications
    choose, and which tasks are looked at for pruning.
    """
    skew, doubt = min((_skew(probe) for _ in range(CLOCK_LOOKS)), key=lambda look: look[1])
    yield ok(f"within {abs(skew) + doubt:.3f} s of this host's")
    if severity := severity_of(abs(skew) - doubt, thresholds.clock_seconds):
        side = "behind" if skew > 0 else "ahead of"
        yield Finding(
            severity,
            f"this host's clock is {abs(skew):.1f} s {side} the database's: the times that applications choose "
            f"(scheduled_at, expires_at) and the order of lists are wrong by as much",
            "have both hosts set their clocks by NTP: timedatectl set-ntp true, or chrony",
            {"skew_seconds": round(skew, 3), "doubt_seconds": round(doubt, 3)},
        )
    with contextlib.suppress(*REPORTED_ELSEWHERE):
        ((back,),) = probe.ask("clock_back")
        if severity := severity_of(back, thresholds.clock_seconds):
            yield Finding(
                severity,
                f"a lease was renewed {back:.1f} s in the future: the database's clock was set back (is it another "
                f"server, after a failover?), and leases from before last that much longer",
                "have primary and standbys set their clocks by NTP; then it passes by itself",
                {"back_seconds": round(back, 3)},
            )


def _skew(probe: Probe) -> tuple[float, float]:
    """The seconds by which the database is ahead, and the possible error: half of the round trip."""
    with probe.transaction() as conn:
        before, began = probe.wall_clock(), time.monotonic()
        ((said,),) = conn.execute(queries("doctor", probe.config.schema)["clock"]).fetchall()
        half = (time.monotonic() - began) / 2
    return said - (before + half), half


def check_durability(probe: Probe, _thresholds: Thresholds) -> Iterator[Finding]:
    names = ["fsync", "full_page_writes", "synchronous_commit"]
    settings: dict[str, str] = dict(probe.ask("settings", names))
    yield ok(", ".join(f"{name} is {settings[name]}" for name in names))
    if settings["fsync"] == "off":
        yield critical(
            "fsync is off: a crash of the machine can destroy the database, and every task in it",
            "alter system set fsync = on; select pg_reload_conf(); and no command line option must turn it off",
        )
    if settings["full_page_writes"] == "off":
        yield warning(
            "full_page_writes is off: a crash of the machine can tear pages, unless the file system never does",
            "alter system set full_page_writes = on; select pg_reload_conf();",
        )
    for role, database in probe.ask("asynchronous_roles"):
        given = _Given("synchronous_commit", "off", role, database)
        yield warning(
            f"synchronous_commit is off for {given.whom()}: a crash of the server takes back its last commits, "
            f"confirmed submits too",
            given.remedy(),
            role=role,
            database=database,
        )
    ((source,),) = probe.ask("source", "synchronous_commit")
    if settings["synchronous_commit"] == "off" and source not in OF_A_ROLE:
        yield warning(
            "synchronous_commit is off: a crash of the server takes back its last commits, confirmed submits too",
            "take it out of `options` in the address, or out of PGOPTIONS"
            if source == "client"
            else "alter system set synchronous_commit = on; select pg_reload_conf();",
        )
    unlogged = [name for name, is_unlogged, *_ in probe.ask("tables", probe.config.schema) if is_unlogged]
    if unlogged:
        yield critical(
            f"unlogged, and so empty after a crash of the server: {', '.join(unlogged)}",
            " ".join(f"alter table {probe.schema}.{name} set logged;" for name in unlogged),
            tables=unlogged,
        )


REPLICATION_ROLE = "session_replication_role"
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"\s*([0-9.eE+-]+)\s*(us|ms|s|min|h|d)?\s*")


def check_row_security(probe: Probe, _thresholds: Thresholds) -> Iterator[Finding]:
    yield ok("off for all tables")
    tables = probe.ask("row_security", probe.config.schema)
    if tables:
        names = [name for name, _ in tables]
        here = "this role too" if any(is_active for _, is_active in tables) else "not for this role, but for others"
        yield critical(
            f"row-level security is on ({here}) for: {some(names)}. A policy hides rows without an error: tasks may "
            f"wait, and no worker sees them",
            " ".join(f"alter table {probe.schema}.{name} disable row level security;" for name in names),
            tables=names,
        )


class _Given(NamedTuple):
    """A setting of a role, of a database, of a role in a database, or of this session. Names are quoted where SQL needs
    it; an empty name stands for every role, or every database.
    """

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


def check_sessions(probe: Probe, thresholds: Thresholds) -> Iterator[Finding]:
    yield ok("no setting hinders them")
    for given in _settings(probe, [REPLICATION_ROLE, *thresholds.shortest_timeouts]):
        finding = _of_triggers(given) if given.name == REPLICATION_ROLE else _of_time(given, thresholds)
        if finding is not None:
            yield finding


def _settings(probe: Probe, names: list[str]) -> Iterator[_Given]:
    """Settings of all roles and databases, because any of them may run tasks or submit them. Those of this session
    are added, unless it has them from its role or database.
    """
    of_roles = [_Given(*row) for row in probe.ask("role_settings", names)]
    yield from of_roles
    known = {(each.name, _seconds(each.value)) for each in of_roles}
    for name, value, source in probe.ask("own_settings", names):
        if source not in OF_A_ROLE and (name, _seconds(value)) not in known:
            yield _Given(name, value, "", "", source)


def _of_triggers(given: _Given) -> Finding | None:
    if given.value.strip("'\"").lower() != "replica":
        return None
    return critical(
        f"{REPLICATION_ROLE} is replica for {given.whom()}: triggers do not fire. Workers are not woken, clients "
        f"that wait for results are not notified, and rows that are inserted by SQL lack the values that triggers add",
        given.remedy(),
        setting=given.name,
        role=given.role,
        database=given.database,
    )


def _of_time(given: _Given, thresholds: Thresholds) -> Finding | None:
    seconds, shortest = _seconds(given.value), thresholds.shortest_timeouts[given.name]
    if seconds is None or not 0 < seconds < shortest:
        return None
    return Finding(
        Severity.CRITICAL if seconds < shortest / 10 else Severity.WARNING,
        f"{given.name} is {given.value} for {given.whom()}: statements that take longer are cancelled, and repeated in "
        f"vain. Set it to {age(shortest)} or more",
        given.remedy(),
        {"setting": given.name, "seconds": seconds, "role": given.role, "database": given.database},
    )


def _seconds(value: str) -> float | None:
    """Without a unit, milliseconds. None: PostgreSQL would not accept it."""
    found = _TIME.fullmatch(value.strip("'"))
    try:
        return float(found[1]) * _UNITS[found[2] or "ms"] if found else None
    except ValueError:
        return None
