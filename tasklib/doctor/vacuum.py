"""Checks of conditions that slow down claims, and finally stop them: dead rows, transactions that keep them, unread
notifications.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasklib.doctor.findings import Finding, Severity, Thresholds, age, critical, note, ok, severity_of, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasklib.doctor.probe import Probe, Row


def check_autovacuum(probe: Probe, thresholds: Thresholds) -> Iterator[Finding]:
    tables = probe.ask("tables", probe.config.schema)
    yield ok(f"{sum(dead for *_, dead, _ in tables):,} dead rows")
    for setting, value in probe.ask("settings", ["autovacuum", "track_counts"]):
        if value == "off":
            yield critical(
                f"{setting} is off: dead rows are never removed, claims become slower, and the disk fills",
                f"alter system set {setting} = on; select pg_reload_conf();",
            )
    for name, _, is_enabled, live, dead, waits_for in tables:
        if not is_enabled:
            yield critical(
                f"autovacuum is off for table {name}: its dead rows are never removed",
                f"alter table {probe.schema}.{name} reset (autovacuum_enabled);",
                table=name,
            )
        if dead > max(thresholds.dead_rows, 2 * waits_for):
            yield warning(
                f"{name} has {dead:,} dead rows beside {live:,} others: autovacuum, which starts at {waits_for:,.0f}, "
                f"does not keep up, or is blocked",
                f"end what `transactions` shows, then: vacuum {probe.schema}.{name}; if it comes again: "
                f"alter table {probe.schema}.{name} set (autovacuum_vacuum_cost_delay = 0);",
                table=name,
                live=live,
                dead=dead,
                threshold=round(waits_for),
            )


def check_transactions(probe: Probe, thresholds: Thresholds) -> Iterator[Finding]:
    rows = probe.ask("transactions")
    dated = [row for row in rows if row[-1] is not None]
    yield ok(f"the longest has lasted {max((seconds for *_, seconds in dated), default=0.0):.1f} s")
    for row in dated:
        if severity := severity_of(row[-1], thresholds.transaction_seconds):
            yield _long_transaction(severity, row)
    hidden = [int(name) for _, name, *_, seconds in rows if seconds is None]
    if hidden:
        yield note(
            f"{len(hidden)} sessions of other roles are in transactions whose age this role may not see",
            f"grant pg_read_all_stats to {probe.server.role};",
            pids=hidden,
        )
    yield from _forgotten_slots(probe, thresholds)


def _forgotten_slots(probe: Probe, thresholds: Thresholds) -> Iterator[Finding]:
    """Slots of standbys that are gone. A standby that is only restarted is back before much is kept."""
    for name, keeps_rows, wal_bytes in probe.ask("slots"):
        keeps = [*(["dead rows"] if keeps_rows else []), *([f"{wal_bytes / 1e6:,.0f} MB of WAL"] if wal_bytes else [])]
        if keeps_rows or wal_bytes > thresholds.slot_wal_bytes:
            yield warning(
                f"no standby reads from replication slot {name}, for which the server keeps {' and '.join(keeps)}",
                f"start its standby again, or: select pg_drop_replication_slot('{name}');",
                slot=name,
                wal_bytes=wal_bytes,
            )


def _long_transaction(severity: Severity, row: Row) -> Finding:
    kind, name, owner, application, state, seconds = row
    details = {"kind": kind, "name": name, "owner": owner, "application": application, "seconds": round(seconds)}
    held = "dead rows are kept for as long as it lasts"
    if kind == "prepared":
        quoted = "'" + name.replace("'", "''") + "'"
        return Finding(
            severity,
            f"prepared transaction {name} of {owner} has waited for {age(seconds)} to be committed: {held}",
            f"commit prepared {quoted}; or: rollback prepared {quoted};",
            details,
        )
    return Finding(
        severity,
        f"a transaction of {owner} (pid {name}, {application or 'unnamed'}, {state}) has lasted {age(seconds)}: {held}",
        f"select pg_terminate_backend({name}); and against the next one: "
        f"alter role {owner} set idle_in_transaction_session_timeout = '5min';",
        details,
    )


def check_notify_queue(probe: Probe, thresholds: Thresholds) -> Iterator[Finding]:
    ((usage,),) = probe.ask("notify_queue")
    yield ok(f"{usage:.1%} full")
    if severity := severity_of(usage, thresholds.notify_queue_share):
        yield Finding(
            severity,
            f"the server's queue of notifications is {usage:.2%} full: a session that listens, in any database, is in "
            f"a long transaction. When it is full, every submit fails",
            "end the oldest: select pid, datname, application_name, state, xact_start from pg_stat_activity where "
            "xact_start is not null order by xact_start; then: select pg_terminate_backend(PID);",
            {"usage": usage},
        )
