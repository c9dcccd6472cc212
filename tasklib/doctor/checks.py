"""Every check by its name, from what all the others need to what may go wrong on a good day.

A check yields what it found; its `ok` stands if there is nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from tasklib.doctor.reach import check_connections, check_pooler
from tasklib.doctor.schema import check_grants, check_schema
from tasklib.doctor.server import check_clock, check_database, check_durability
from tasklib.doctor.sessions import check_row_security, check_sessions
from tasklib.doctor.vacuum import check_autovacuum, check_notify_queue, check_transactions
from tasklib.doctor.work import check_leases, check_unnoted_leases, check_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tasklib.doctor.findings import Finding
    from tasklib.doctor.limits import Limits
    from tasklib.doctor.patient import Patient

Check: TypeAlias = "Callable[[Patient, Limits], Iterator[Finding]]"
CHECKS: dict[str, Check] = {
    "database": check_database,
    "grants": check_grants,
    "schema": check_schema,
    "row_security": check_row_security,
    "sessions": check_sessions,
    "clock": check_clock,
    "durability": check_durability,
    "autovacuum": check_autovacuum,
    "transactions": check_transactions,
    "notify_queue": check_notify_queue,
    "pooler": check_pooler,
    "connections": check_connections,
    "workers": check_workers,
    "leases": check_leases,
}
DEEP_CHECKS: dict[str, Check] = {"unnoted_leases": check_unnoted_leases}  # reads the whole table
