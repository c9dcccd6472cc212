"""Connection strings for libpq: the address that the Config gives, with time limits for peers that vanish."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import psycopg
from psycopg import conninfo

from tasklib.errors import InvalidConfig

if TYPE_CHECKING:
    from tasklib.config import Config

CONNECT_SECONDS = (2, 10)  # libpq's minimum, and the longest that we wait for one host
_UNESCAPED_AT = re.compile(r"\w+://[^/?#]*@[^/?#]*@")
# With these settings, a peer that vanished is noticed within 30 s; with the system's defaults, after hours. The user's
# URL takes precedence.
_CONNECTION_DEFAULTS = {
    "application_name": "tasklib",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
}


def connection_string(config: Config) -> str:
    return _conninfo("database_url", config.database_url, config)


def listen_connection_string(config: Config) -> str:
    """For connections that LISTEN, which a pooler may not allow: `listen_database_url`, if there is one."""
    if config.listen_database_url is None:
        return connection_string(config)
    return _conninfo("listen_database_url", config.listen_database_url, config)


def worker_connection_string(config: Config, role: str) -> str:
    """For a worker's own connections. The role is part of application_name, and so seen in pg_stat_activity."""
    dsn = listen_connection_string(config) if role == "listen" else connection_string(config)
    given = conninfo.conninfo_to_dict(dsn)
    return conninfo.make_conninfo(dsn, application_name=f"{given['application_name']}:{role}")


def _conninfo(field: str, url: str, config: Config) -> str:
    if _UNESCAPED_AT.match(url):
        # libpq would take the rest of the password for the host, and show it in its error.
        raise InvalidConfig(f'{field} has two "@": write the one in the password as %40')
    try:
        given = conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        # libpq's own message repeats parts of the string, perhaps the password.
        raise InvalidConfig(
            f"{field} cannot be read: write postgresql://user:password@host:port/database or libpq's key=value form"
        ) from None
    defaults = _CONNECTION_DEFAULTS | {"connect_timeout": _connect_timeout(config)}
    return conninfo.make_conninfo("", **{**defaults, **given, "client_encoding": "utf8"})


def _connect_timeout(config: Config) -> str:
    """No longer than a call waits: otherwise one host that does not answer would hold up the next calls too."""
    least, most = CONNECT_SECONDS
    return str(min(max(math.ceil(config.database_timeout_seconds), least), most))
