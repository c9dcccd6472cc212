"""A real streaming standby of a test server, reached by a Unix socket of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from tasklib import embedded
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tasklib.embedded import EmbeddedPostgres

SLOT = "standby"


class Standby:
    """`stop` ends it and leaves its slot; `promote` makes it a primary of its own. An address has `directory` as its
    host.
    """

    def __init__(self, server: EmbeddedPostgres) -> None:
        given = conninfo_to_dict(server.dsn)
        self.directory = Path(str(given["host"]))
        self.port = str(given["port"])
        self._server = server

    def dsn_for(self, database: str) -> str:
        return self._server.dsn_for(database)

    @property
    def pid(self) -> int:
        """Of its postmaster."""
        return self._server.pid

    def promote(self) -> None:
        with psycopg.connect(self.dsn_for("postgres"), autocommit=True) as conn:
            conn.execute("select pg_promote(wait => false)")  # a longer query may be cancelled by what is replayed
            wait_until(lambda: _is_primary(conn), "the standby to be the primary")

    def stop(self) -> None:
        self._server.stop()


def _is_primary(conn: psycopg.Connection[tuple[Any, ...]]) -> bool:
    row = conn.execute("select not pg_is_in_recovery()").fetchone()
    return row is not None and row[0]


@contextlib.contextmanager
def standby(
    primary: EmbeddedPostgres, *, binaries: Path | None = None, settings: Mapping[str, object] | None = None
) -> Iterator[Standby]:
    """A server like any other, on a copy of the primary's data: nothing that it needs goes when the primary goes."""
    with tempfile.TemporaryDirectory(prefix="standby-") as name:
        directory = Path(name)
        directory.chmod(0o711)  # for the server's user, if we are root
        _copy_data(primary, directory / "data", embedded.find_binaries(binaries))
        with embedded.postgres(directory, binaries, settings={**_not_less(primary.dsn), **(settings or {})}) as server:
            yield Standby(server)


def _copy_data(primary: EmbeddedPostgres, data: Path, binaries: Path) -> None:
    words = ["--checkpoint=fast", "--write-recovery-conf", "--create-slot", f"--slot={SLOT}"]
    subprocess.run(
        [binaries / "pg_basebackup", *words, f"--dbname={primary.dsn}", f"--pgdata={data}"], check=True, timeout=60
    )
    owner = (primary.directory / "data").stat()
    for path in (data, *data.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _not_less(dsn: str) -> dict[str, object]:
    """Settings of which a standby must not have less than its primary."""
    names = ["max_connections", "max_prepared_transactions", "max_worker_processes", "max_wal_senders"]
    with psycopg.connect(dsn) as conn:
        return dict(conn.execute("select name, setting from pg_settings where name = any(%s)", [names]).fetchall())
