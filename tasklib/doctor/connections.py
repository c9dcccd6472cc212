"""Checks of connections: whether a pooler is in between, and whether enough connections are left."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING
from uuid import uuid4

import psycopg

from tasklib.budget import connection_budget, daemon_budget
from tasklib.clock import time
from tasklib.connection_string import listen_connection_string
from tasklib.doctor.findings import Finding, Thresholds, note, ok, severity_of, warning
from tasklib.doctor.probe import REPORTED_ELSEWHERE, Probe, connect
from tasklib.runtime.listening import listen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasklib.config import Config
    from tasklib.connection import BoundedConnection

HEAR_SECONDS = 3.0


def check_pooler(probe: Probe, _thresholds: Thresholds) -> Iterator[Finding]:
    """Sends a notification and waits for it, as a worker's listener does."""
    if probe.server.is_standby:
        yield note("a standby cannot be listened to", "see `database`")
        return
    is_pooled, own_address = probe.conn.is_pooled, probe.config.listen_database_url is not None
    if is_pooled and not own_address:
        yield warning(
            "a pooler is in front of the database: a worker with this address receives no notifications, finds new "
            "tasks by polling alone, and has every statement planned anew",
            "give workers a direct address for listening: TASKLIB_LISTEN_DATABASE_URL, or Config.listen_database_url",
        )
        return
    remedy = "correct TASKLIB_LISTEN_DATABASE_URL: it must be a direct address of the same database"
    try:
        seconds = _hear_by_own_address(probe) if own_address else _hear(probe, probe.conn)
    except _ListenAddressError as error:
        yield warning(f"listen_database_url cannot be used, so new tasks are found by polling alone: {error}", remedy)
        return
    if seconds is None:
        yield warning(
            "a notification was not received: the address for listening leads to another database, or to a pooler in "
            "transaction mode; new tasks are found by polling alone",
            remedy,
        )
        return
    between = "one, with a direct address for listening" if is_pooled else "none"
    yield ok(f"{between}; a notification is received after {seconds * 1000:.1f} ms")


class _ListenAddressError(Exception):
    pass


def _hear_by_own_address(probe: Probe) -> float | None:
    try:
        listener = connect(listen_connection_string(probe.config), until=time.monotonic() + HEAR_SECONDS)
    except psycopg.Error as error:
        raise _ListenAddressError(" ".join(str(error).split())) from None
    with contextlib.closing(listener):
        return _hear(probe, listener)


def _hear(probe: Probe, listener: BoundedConnection) -> float | None:
    channel = f"tasklib_check_{uuid4().hex}"
    listener.deadline = time.monotonic() + 2 * HEAR_SECONDS
    listen(listener, [channel])
    began = time.monotonic()
    with probe.transaction() as conn:
        conn.execute("select pg_notify(%s, '')", [channel])
    for heard in listener.notifies(timeout=HEAR_SECONDS, stop_after=1):
        return time.monotonic() - began if heard.channel == channel else None
    return None


def check_connections(probe: Probe, thresholds: Thresholds) -> Iterator[Finding]:
    ((most, reserved, used, role_limit, of_role, database_limit, of_database),) = probe.ask("connections")
    role, database = probe.server.role, probe.server.database
    counts = [("the server", most - reserved, used, "raise max_connections of the server, which takes a restart")]
    if role_limit >= 0:
        counts.append((f"role {role}", role_limit, of_role, f"alter role {role} connection limit -1;"))
    if database_limit >= 0:
        more = f"alter database {database} connection limit -1;"
        counts.append((f"database {database}", database_limit, of_database, more))
    yield ok(f"{used} of {most - reserved} in use")
    for whose, limit, count, more in counts:
        if severity := severity_of(count / max(limit, 1), thresholds.connections_share):
            yield Finding(
                severity,
                f"{count} of the {limit} connections of {whose} are in use; when none is left, connecting fails",
                f"lower pool_size, workers or concurrency; or put PgBouncer before the database; or {more}",
                {"limit": limit, "used": count},
            )
    with contextlib.suppress(*REPORTED_ELSEWHERE):
        yield from _over_budget(probe, min(limit for _, limit, _, _ in counts))


def _over_budget(probe: Probe, limit: int) -> Iterator[Finding]:
    """Counts the connections of workers and daemons only. Clients and their pools are not known here, and behind a
    pooler the numbers mean nothing.
    """
    processes = [] if probe.conn.is_pooled else probe.ask("live_processes")
    wanted = sum(_may_open(probe.config, *process) for process in processes)
    if wanted > limit:
        workers = sum(count for _, count, _ in processes)
        yield warning(
            f"{workers} workers may open {wanted} connections, if each of their tasks uses its own, and there are "
            f"{limit}",
            "fewer workers or a lower concurrency; or raise max_connections of the server, which takes a restart",
            workers=workers,
            may_open=wanted,
            limit=limit,
        )


def _may_open(config: Config, of_daemon: bool, workers: int, slots: int) -> int:
    """The workers of one daemon share its keeper's connections. An embedded worker opens all of them itself."""
    alone = connection_budget(config, concurrency=slots)
    budget = daemon_budget(config, workers=workers, concurrency=slots) if of_daemon else alone
    return budget.worker + budget.listener + slots
