"""The connection of the checks. Each query has a short transaction of its own.

Time limits are set for that transaction only, so that it works the same behind a pooler.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psycopg import errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo, timeout_from_conninfo

from tasklib.clock import time
from tasklib.connection import SEARCH_PATH, BoundedConnection, meet
from tasklib.sending import send
from tasklib.sql import queries
from tasklib.statements import Statement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tasklib.config import Config

Row = tuple[Any, ...]

STATEMENT_SECONDS = 5.0
LOCK_SECONDS = 2.0
CONNECT_SECONDS = 5
GRACE_SECONDS = 1.0  # for the server to report a cancelled query; after that it counts as silent

# Errors that another check reports: the schema is missing, is not ours, or is not visible to the role.
REPORTED_ELSEWHERE = (
    errors.UndefinedTable, errors.InvalidSchemaName, errors.UndefinedColumn, errors.InsufficientPrivilege
)  # fmt: skip

# PostgreSQL's description of the schema depends on the last three.
_LIMITS = """
select pg_catalog.set_config('statement_timeout', $1, true), pg_catalog.set_config('lock_timeout', $2, true),
       pg_catalog.set_config('search_path', $3, true), pg_catalog.set_config('timezone', 'UTC', true),
       pg_catalog.set_config('datestyle', 'ISO', true)
"""


@dataclass(frozen=True, slots=True)
class Server:
    version: str
    version_num: int
    role: str  # quoted where SQL needs it, as is the database
    database: str
    is_standby: bool
    is_read_only: bool
    encoding: str


class Probe:
    """`ask` sends one of the doctor's queries. `transaction` is for checks that send statements themselves."""

    def __init__(
        self, config: Config, conn: BoundedConnection, *, until: float, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.config = config
        self.conn = conn
        self.wall_clock = wall_clock
        self._until = until  # monotonic
        self._queries = queries("doctor", config.schema)
        self.schema = config.schema if config.schema == "tasklib" else f'"{config.schema}"'
        self.server = Server(*self.ask("server")[0])

    def ask(self, query: str, *parameters: Any) -> list[Row]:
        with self.transaction() as conn:
            return send(conn, [Statement(self._queries[query], parameters, list)])[0]

    @contextlib.contextmanager
    def transaction(self) -> Iterator[BoundedConnection]:
        seconds = max(min(STATEMENT_SECONDS, self._until - time.monotonic()), 0.1)
        self.conn.deadline = time.monotonic() + seconds + GRACE_SECONDS
        limits = (f"{seconds * 1000:.0f}", f"{min(LOCK_SECONDS, seconds / 2) * 1000:.0f}", SEARCH_PATH)
        with self.conn.transaction():
            send(self.conn, [Statement(_LIMITS, limits, list)])
            yield self.conn


def connect(dsn: str, *, until: float) -> BoundedConnection:
    given = conninfo_to_dict(dsn)
    seconds = min(timeout_from_conninfo(given), CONNECT_SECONDS)  # psycopg refuses what is not a number
    name = f"{given['application_name']}:doctor"
    conn = BoundedConnection.connect(
        make_conninfo(dsn, connect_timeout=seconds, application_name=name), autocommit=True
    )
    try:
        conn.deadline = until
        meet(conn)
    except BaseException:
        conn.close()
        raise
    return conn
