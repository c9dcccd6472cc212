"""A real PgBouncer in transaction mode before the test server, reached by a Unix socket of its own."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

# Debian puts it where only root's PATH leads.
PROGRAM = shutil.which("pgbouncer", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
WHY_NOT = "PgBouncer is not installed here, and could not be: apt-get install pgbouncer"

# Roles are looked up in PostgreSQL, which trusts who comes by its socket; so does the pooler.
_SETTINGS = """
[databases]
* = host={host} port={port}

[pgbouncer]
listen_addr =
listen_port = {port}
unix_socket_dir = {directory}
logfile = {directory}/log
auth_type = trust
auth_file = {directory}/users
auth_user = {user}
auth_query = select usename, passwd from pg_catalog.pg_shadow where usename = $1
pool_mode = transaction
server_login_retry = 1
max_client_conn = 500
default_pool_size = {size}
{more}
"""


class Pooler:
    def __init__(self, direct_dsn: str, directory: Path) -> None:
        self._direct = conninfo_to_dict(direct_dsn)
        self._directory = directory

    def pooled(self, dsn: str) -> str:
        """The same database by way of the pooler."""
        return _with_host(dsn, str(self._directory))

    def direct(self, dsn: str) -> str:
        return _with_host(dsn, str(self._direct["host"]))

    def is_ready(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.pooled(make_conninfo("", **self._direct)), connect_timeout=20).close()
            return True
        return False

    def log(self) -> str:
        return (self._directory / "log").read_text()


@contextlib.contextmanager
def pgbouncer(direct_dsn: str, *, size: int = 20, more: str = "") -> Iterator[Pooler]:
    """`direct_dsn` leads to a Unix socket. `more` are further lines of its settings."""
    assert PROGRAM is not None, WHY_NOT
    given = conninfo_to_dict(direct_dsn)
    with tempfile.TemporaryDirectory(prefix="pgbouncer-", dir="/tmp") as made:  # sockets have short paths
        directory = Path(made)
        settings = directory / "pgbouncer.ini"
        settings.write_text(
            _SETTINGS.format(
                host=given["host"], port=given["port"], user=given["user"], directory=directory, size=size, more=more
            )
        )
        (directory / "users").write_text(f'"{given["user"]}" ""\n')
        # It refuses root, and must enter the private directory of PostgreSQL's socket: it runs as who owns that.
        user, group = _give_to(Path(str(given["host"])).stat().st_uid, directory)
        process = subprocess.Popen(
            [PROGRAM, "-q", str(settings)], cwd=directory, user=user, group=group, extra_groups=[] if user else None
        )
        try:
            pooler = Pooler(direct_dsn, directory)
            wait_until(lambda: process.poll() is not None or pooler.is_ready(), "PgBouncer")
            assert process.poll() is None, pooler.log()
            yield pooler
        finally:
            process.kill()
            process.wait()


def _with_host(dsn: str, host: str) -> str:
    """A URL stays one: there are drivers that know nothing else."""
    if "://" in dsn:
        return re.sub(r"(?<=[?&]host=)[^&]*", quote(host, safe=""), dsn)
    return make_conninfo(dsn, host=host)


def _give_to(uid: int, directory: Path) -> tuple[int, int] | tuple[None, None]:
    """The user and group to become, if they are not our own; then the directory is theirs."""
    if os.geteuid() == uid:
        return None, None
    gid = pwd.getpwuid(uid).pw_gid
    for path in (directory, *directory.iterdir()):
        os.chown(path, uid, gid)
    directory.chmod(0o755)
    return uid, gid
