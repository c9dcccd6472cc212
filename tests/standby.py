"""A real streaming standby of a test server, reached by a Unix socket of its own."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import psycopg
from psycopg.conninfo import conninfo_to_dict

from tasklib import embedded
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tasklib.embedded import EmbeddedPostgres

SLOT = "standby"


class Standby:
    """`stop` ends it and leaves its slot; `promote` makes it a primary of its own."""

    def __init__(self, directory: Path, port: str, process: subprocess.Popen[bytes]) -> None:
        self.directory = directory
        self.port = port
        self._process = process

    def dsn_for(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={quote(str(self.directory), safe='')}&port={self.port}"

    def promote(self) -> None:
        with psycopg.connect(self.dsn_for("postgres"), autocommit=True) as conn:
            conn.execute("select pg_promote(true, 30)")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)

    def is_ready(self) -> bool:
        assert self._process.poll() is None, (self.directory / "log").read_text()
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.dsn_for("postgres"), connect_timeout=5).close()
            return True
        return False


@contextlib.contextmanager
def standby(primary: EmbeddedPostgres, *, settings: Mapping[str, object] | None = None) -> Iterator[Standby]:
    """Of a server on a Unix socket. It runs as the primary's user, in a directory that is gone afterwards."""
    given = conninfo_to_dict(primary.dsn)
    owner = Path(str(given["host"])).stat().st_uid
    account: dict[str, Any] = {}
    if owner != os.geteuid():
        account = {"user": owner, "group": pwd.getpwuid(owner).pw_gid, "extra_groups": []}
    directory = Path(tempfile.mkdtemp(prefix="standby-"))
    process = None
    try:
        if account:
            os.chown(directory, owner, account["group"])
            directory.chmod(0o755)
        binaries = _binaries(primary)
        copy = [
            "--checkpoint=fast",
            "--write-recovery-conf",
            "--create-slot",
            f"--slot={SLOT}",
            f"--dbname={primary.dsn}",
        ]
        subprocess.run(
            [binaries / "pg_basebackup", f"--pgdata={directory}/data", *copy], cwd=directory, check=True, **account
        )
        listen = {"unix_socket_directories": directory, "listen_addresses": "", "port": given["port"]}
        options = {**_not_less(primary.dsn), **listen, **(settings or {})}
        words = [f"-c{name}={value}" for name, value in options.items()]
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                [binaries / "postgres", "-D", directory / "data", *words],
                cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **account,
            )  # fmt: skip
        made = Standby(directory, str(given["port"]), process)
        wait_until(made.is_ready, "the standby")
        yield made
    finally:
        if process is not None:
            process.kill()
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _not_less(dsn: str) -> dict[str, object]:
    """Settings of which a standby must not have less than its primary."""
    names = ["max_connections", "max_prepared_transactions", "max_worker_processes", "max_wal_senders"]
    with psycopg.connect(dsn) as conn:
        return dict(conn.execute("select name, setting from pg_settings where name = any(%s)", [names]).fetchall())


def _binaries(primary: EmbeddedPostgres) -> Path:
    """Those that the server runs from: for another user it may have made a copy."""
    copies = sorted((primary.directory / "binaries").glob("**/bin"))
    return copies[0] if copies else embedded.find_binaries()
