"""Checks of the server: that it is the right one, that its clock is right, and that it keeps what it has confirmed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tasklib.clock import time
from tasklib.doctor.findings import Finding, critical, note, ok, warning
from tasklib.doctor.limits import severity_of
from tasklib.doctor.patient import NOT_TO_BE_SEEN
from tasklib.sql import queries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasklib.doctor.limits import Limits
    from tasklib.doctor.patient import Patient

OLDEST_POSTGRES = 150000
CLOCK_LOOKS = 3
OF_A_ROLE = ("user", "database", "database user", "global")  # told by name


def check_database(patient: Patient, _limits: Limits) -> Iterator[Finding]:
    server = patient.server
    yield ok(f"PostgreSQL {server.version}, database {server.database}, role {server.role}")
    if server.version_num < OLDEST_POSTGRES:
        yield critical(f"PostgreSQL {server.version} is older than 15, the oldest that works", "upgrade the server")
    if server.is_standby:
        yield critical(
            "the address leads to a standby: nothing can be submitted or claimed there",
            "name the primary in the address, or all hosts and target_session_attrs=read-write",
        )
    elif server.is_read_only:
        yield critical("transactions are read-only by default: nothing can be submitted or claimed", _writable(patient))
    if server.encoding != "UTF8":
        yield note(
            f"the database is encoded in {server.encoding}: it refuses text that has other characters",
            "move to a database that was created with encoding 'UTF8'",
        )


def _writable(patient: Patient) -> str:
    """By who has made it read-only. Every new session is so, too, and could not change that."""
    server, setting = patient.server, "default_transaction_read_only"
    ((source,),) = patient.ask("source", setting)
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


def check_clock(patient: Patient, limits: Limits) -> Iterator[Finding]:
    """Leases are judged by the database's clock alone. What a host's clock decides is the order of ids, the times that
    applications choose, and what is looked at for pruning.
    """
    skew, doubt = min((_skew(patient) for _ in range(CLOCK_LOOKS)), key=lambda look: look[1])
    yield ok(f"within {abs(skew) + doubt:.3f} s of this host's")
    if severity := severity_of(abs(skew) - doubt, limits.clock_seconds):
        side = "behind" if skew > 0 else "ahead of"
        yield Finding(
            severity,
            f"this host's clock is {abs(skew):.1f} s {side} the database's: so far off are the times that applications "
            f"choose (scheduled_at, expires_at), and the order of lists",
            "have both hosts set their clocks by NTP: timedatectl set-ntp true, or chrony",
            {"skew_seconds": round(skew, 3), "doubt_seconds": round(doubt, 3)},
        )
    with contextlib.suppress(*NOT_TO_BE_SEEN):
        ((back,),) = patient.ask("clock_back")
        if severity := severity_of(back, limits.clock_seconds):
            yield Finding(
                severity,
                f"a lease was renewed {back:.1f} s in the future: the database's clock was set back (is it another "
                f"server, after a failover?), and leases from before last that much longer",
                "have primary and standbys set their clocks by NTP; then it passes by itself",
                {"back_seconds": round(back, 3)},
            )


def _skew(patient: Patient) -> tuple[float, float]:
    """By how much the database is ahead; and half of the round trip, by which that may be wrong."""
    with patient.transaction() as conn:
        before, began = patient.wall_clock(), time.monotonic()
        ((said,),) = conn.execute(queries("doctor", patient.config.schema)["clock"]).fetchall()
        half = (time.monotonic() - began) / 2
    return said - (before + half), half


def check_durability(patient: Patient, _limits: Limits) -> Iterator[Finding]:
    names = ["fsync", "full_page_writes", "synchronous_commit"]
    settings: dict[str, str] = dict(patient.ask("settings", names))
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
    others = patient.ask("asynchronous_roles")
    for role, database in others:
        yield _asynchronous(role, database)
    ((source,),) = patient.ask("source", "synchronous_commit")
    if settings["synchronous_commit"] == "off" and source not in OF_A_ROLE:
        yield warning(
            "synchronous_commit is off: a crash of the server takes back its last commits, confirmed submits too",
            "take it out of `options` in the address, or out of PGOPTIONS"
            if source == "client"
            else "alter system set synchronous_commit = on; select pg_reload_conf();",
        )
    unlogged = [name for name, is_unlogged, *_ in patient.ask("tables", patient.config.schema) if is_unlogged]
    if unlogged:
        yield critical(
            f"unlogged, and so empty after a crash of the server: {', '.join(unlogged)}",
            " ".join(f"alter table {patient.schema}.{name} set logged;" for name in unlogged),
            tables=unlogged,
        )


def _asynchronous(role: str, database: str) -> Finding:
    """Both are quoted where they need it; empty means every one."""
    whom = f"role {role}" if role else "every role"
    where = f" in database {database}" if database else ""
    command = f"alter role {role or 'all'}{where} reset synchronous_commit;"
    if database and not role:
        command = f"alter database {database} reset synchronous_commit;"
    return warning(
        f"synchronous_commit is off for {whom}{where}: a crash of the server takes back its last commits, confirmed "
        f"submits too",
        command,
        role=role,
        database=database,
    )
