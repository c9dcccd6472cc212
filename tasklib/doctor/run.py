"""Runs the checks one after another, within a time limit for all of them. A check that fails does not stop the others.

They run in a thread, because some calls that can hang have no time limit of their own, such as a name lookup.
"""

from __future__ import annotations

import contextlib
import re
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import psycopg
from psycopg import errors

from tasklib.clock import time
from tasklib.connection_string import connection_string
from tasklib.database_errors import is_connection_lost, translate
from tasklib.doctor.connections import check_connections, check_pooler
from tasklib.doctor.findings import Finding, Severity, Thresholds, critical, note, warning
from tasklib.doctor.policies import check_policies
from tasklib.doctor.probe import LOCK_SECONDS, REPORTED_ELSEWHERE, STATEMENT_SECONDS, Probe, connect
from tasklib.doctor.schema import check_grants, check_schema
from tasklib.doctor.server import check_clock, check_database, check_durability, check_row_security, check_sessions
from tasklib.doctor.vacuum import check_autovacuum, check_notify_queue, check_transactions
from tasklib.doctor.work import check_leases, check_unnoted_leases, check_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from tasklib.config import Config

# Each check yields its findings. Its `ok` is shown only if there is no other. The first checks are those that all need.
Check: TypeAlias = "Callable[[Probe, Thresholds], Iterator[Finding]]"
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
    "policies": check_policies,
}
DEEP_CHECKS: dict[str, Check] = {"unnoted_leases": check_unnoted_leases}  # reads the whole table
SECONDS = 30.0


def run_checks(
    config: Config,
    *,
    seconds: float = SECONDS,
    skip: Collection[str] = (),
    deep: bool = False,
    thresholds: Thresholds | None = None,
    wall_clock: Callable[[], float] = time.time,
    on_check: Callable[[str], None] = lambda _: None,
) -> list[Finding]:
    """The findings of every check, in order. `deep` adds checks that read whole tables."""
    checks = {name: check for name, check in {**CHECKS, **(DEEP_CHECKS if deep else {})}.items() if name not in skip}
    until = time.monotonic() + seconds
    look = _Look(config, checks, thresholds or Thresholds(), until=until, wall_clock=wall_clock, on_check=on_check)
    thread = threading.Thread(target=look.run, name="tasklib-doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if look.error is not None:
        raise look.error
    found = [*look.found]
    if thread.is_alive():
        late = critical(f"no answer within {seconds:g} s, while looking at: {look.at}", REMEDY_UNREACHABLE)
        found.append(replace(late, check="database"))
    return found


REMEDY_UNREACHABLE = (
    "check from this host whether the server answers: psql with the same address; then look at the server's log, its "
    "disk, and the network in between"
)
REMEDY_ADDRESS = "correct the address, which is in TASKLIB_DATABASE_URL, DATABASE_URL or libpq's variables"
REMEDY_REFUSED = (
    f"the server answers, but refuses this connection: {REMEDY_ADDRESS} (role, password, database), or allow the "
    f"connection in the server's pg_hba.conf; if the server is starting, wait"
)
REMEDY_FULL = (
    "all of its connections are in use: see by whom, as a superuser, for whom some are reserved: select usename, "
    "application_name, count(*) from pg_stat_activity group by 1, 2 order by 3 desc; then lower pool_size, workers or "
    "concurrency, or raise max_connections"
)


def _remedy(error: psycopg.Error) -> str:
    """Chosen by the text of the server's error. A text in another language is not recognised, and gets a general
    remedy.
    """
    said = str(error)
    if re.search(r"too many (clients|connections)|connection slots", said):
        return REMEDY_FULL
    if isinstance(error, psycopg.ProgrammingError):
        return REMEDY_ADDRESS
    return REMEDY_REFUSED if "FATAL: " in said else REMEDY_UNREACHABLE


class _Look:
    def __init__(
        self,
        config: Config,
        checks: dict[str, Check],
        thresholds: Thresholds,
        *,
        until: float,
        wall_clock: Callable[[], float],
        on_check: Callable[[str], None],
    ) -> None:
        self._config = config
        self._checks = checks
        self._thresholds = thresholds
        self._until = until
        self._wall_clock = wall_clock
        self._on_check = on_check
        self.at = "database"
        self.found: list[Finding] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except psycopg.Error as error:
            self._add("database", critical(" ".join(str(translate(error)).split()), _remedy(error)))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asked
            self.error = error

    def _run(self) -> None:
        self._on_check(self.at)
        dsn = connection_string(self._config)
        with contextlib.closing(connect(dsn, until=self._until)) as conn:
            probe = Probe(self._config, conn, until=self._until, wall_clock=self._wall_clock)
            for name, check in self._checks.items():
                self.at = name
                self._on_check(name)
                self._add(name, *self._found_by(check, probe))

    def _found_by(self, check: Check, probe: Probe) -> Sequence[Finding]:
        """A query that fails is a finding of its own. A lost connection ends the run."""
        try:
            found = list(check(probe, self._thresholds))
        except psycopg.Error as error:
            if probe.conn.closed or is_connection_lost(error):
                raise
            return [_unanswered(error, probe)]
        return [each for each in found if each.severity != Severity.OK] or found

    def _add(self, check: str, *found: Finding) -> None:
        self.found += [replace(each, check=check) for each in found]


def _unanswered(error: psycopg.Error, probe: Probe) -> Finding:
    said = error.diag.message_primary or str(error).strip()
    if isinstance(error, errors.InsufficientPrivilege):
        return note(f"role {probe.server.role} may not see this: {said}", "run the doctor as the role of tasklibd")
    if isinstance(error, REPORTED_ELSEWHERE):
        return note(f"this cannot be checked: {said}", "see `schema`")
    if isinstance(error, errors.LockNotAvailable):
        return warning(
            f"another session holds a lock that blocks all readers; waited for {LOCK_SECONDS:g} s",
            "find it: select pid, application_name, state, pg_blocking_pids(pid) from pg_stat_activity; then end it: "
            "select pg_terminate_backend(PID);",
        )
    if isinstance(error, errors.QueryCanceled):
        return warning(
            f"no answer within {STATEMENT_SECONDS:g} s",
            "the server is overloaded, or the tables are in a bad state: see `autovacuum` and `transactions`",
        )
    return warning(f"PostgreSQL refused to answer: {said}", "see the server's log")
