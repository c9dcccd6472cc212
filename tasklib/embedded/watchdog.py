"""The process between an owner and its PostgreSQL: the parent of postgres, which it stops when the owner stops or dies.

It is run by its path with one argument, the plan as JSON. It answers on stdout with one line of JSON. On stdin it reads
how to stop: a mode, or the end of the file. It imports nothing of the package, so its errors are plain ones.

PostgreSQL refuses to run as root. So if root is the owner, another account owns the data and runs the programs:
`_Cluster.account`. It is None for all other users, and then nothing else of the section "Root" is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING
from urllib.parse import quote

if sys.platform != "win32":
    import fcntl
    import pwd
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_START_SECONDS = 30.0
_STOP_SECONDS = 5.0  # patience with each signal of a stop, and with the removal of a directory
_LOCK_SECONDS = 3.0  # more than the server of an owner killed a moment ago needs to stop
_POLL_SECONDS = 0.02
_OWNER_POLL_SECONDS = 0.25
_SOCKET_PATH_BYTES = 103  # macOS; Linux allows 107
_SHORT_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - for a private directory in one of them
_NOTHING: Mapping[str, str] = {}
_NEW_USER_NAMESPACE = 0x10000000  # CLONE_NEWUSER, for Pythons without os.unshare


def watch(*, owner: int, directory: str | None, binaries: str, port: int | None, settings: Mapping[str, str]) -> None:
    os.umask(0o022)
    stops = _stop_requests()
    with contextlib.ExitStack() as leftovers:
        try:
            cluster = _open_cluster(directory, binaries, leftovers)
            if not cluster.data.exists():
                _initialise(cluster, is_temporary=directory is None)
            server, dsn = _launch_server(cluster, port, settings, leftovers)
            _wait_until_ready(cluster, server, stops)
        except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            _tell_owner(error=str(error))
            return
        version = int((cluster.data / "PG_VERSION").read_text())
        _tell_owner(dsn=dsn, version=version, directory=str(cluster.directory), pid=server.pid)
        _stop(server, _next_stop(stops, owner, server))


def _stop_requests() -> SimpleQueue[str]:
    """How to stop, from the owner's pipe or from signals. A signal handler may put into a SimpleQueue."""
    stops: SimpleQueue[str] = SimpleQueue()
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_: stops.put("fast"))
    # If the owner dies, the read returns nothing: the end of the file.
    threading.Thread(target=lambda: stops.put(os.read(0, 64).decode() or "fast"), daemon=True).start()
    return stops


def _next_stop(stops: SimpleQueue[str], owner: int, server: subprocess.Popen[bytes]) -> str:
    """The end of the file alone would miss a dead owner whose forked child still holds the pipe: hence getppid."""
    while server.poll() is None and (os.name == "nt" or os.getppid() == owner):
        with contextlib.suppress(Empty):
            return stops.get(timeout=_OWNER_POLL_SECONDS)
    return "fast"


def _tell_owner(**report: object) -> None:
    with contextlib.suppress(OSError):  # the owner may be dead, which `_next_stop` notices
        os.write(1, json.dumps(report).encode() + b"\n")


# --- Its directory ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cluster:
    """A server's directory, the programs that work on it, and the user and group that they run as (None: our own)."""

    directory: Path
    binaries: Path
    account: tuple[int, int] | None

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def launch(
        self,
        program: str,
        *arguments: str,
        before: Callable[[], None] | None = None,
        variables: Mapping[str, str] = _NOTHING,
    ) -> subprocess.Popen[bytes]:
        """The working directory is one that the account may enter, because PostgreSQL 15 asks for its name."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        user, group = self.account or (None, None)
        others: list[int] | None = [] if self.account else None
        command = [str(self.binaries / program), *arguments]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory,
                env=environment | {"LC_ALL": "C", **variables}, user=user, group=group, extra_groups=others,
                preexec_fn=before,  # noqa: PLW1509 - it takes no lock that the other thread might hold
            )  # fmt: skip

    def succeeds(
        self,
        program: str,
        *arguments: str,
        before: Callable[[], None] | None = None,
        variables: Mapping[str, str] = _NOTHING,
    ) -> bool:
        process = self.launch(program, *arguments, before=before, variables=variables)
        try:
            return process.wait(_START_SECONDS) == 0
        finally:
            process.kill()

    def give(self, path: Path) -> Path:
        if self.account:
            os.chown(path, *self.account)
        return path

    def make_private(self, path: Path) -> Path:
        path.mkdir(mode=0o700, exist_ok=True)
        return self.give(path)

    def failure(self, what: str) -> RuntimeError:
        user = f" (as user {self.account[0]}, since it refuses root)" if self.account else ""
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
        return RuntimeError(f"PostgreSQL in {self.directory}{user} {what}. Its log ends with:\n{tail}")


def _open_cluster(directory: str | None, binaries: str, leftovers: contextlib.ExitStack) -> _Cluster:
    account = _account(directory)
    if directory is None:
        place = _temporary_directory(account, leftovers)
    else:
        place = Path(directory)
        place.mkdir(mode=0o711 if account else 0o700, parents=True, exist_ok=True)
        _refuse_closed(place, account)
        _lock(place, leftovers)
    cluster = _Cluster(place, Path(binaries), account)
    cluster.log.unlink(missing_ok=True)
    cluster.log.touch(mode=0o600)
    if account and not _can_run(cluster):
        cluster = replace(cluster, binaries=_copy_binaries(cluster))
    os.truncate(cluster.log, 0)  # output of `initdb --show` would only confuse
    return cluster


def _temporary_directory(
    account: tuple[int, int] | None, leftovers: contextlib.ExitStack, base: Path | None = None
) -> Path:
    base = base or Path(tempfile.gettempdir())
    if account and _closed_to(account, base):
        base = Path("/tmp")  # noqa: S108 - root's own TMPDIR may be closed to the account, as with pam_tmpdir
    place = Path(tempfile.mkdtemp(prefix="tasklib-", dir=base))
    leftovers.callback(_remove, place)
    if account:
        place.chmod(0o711)
    return place


def _remove(directory: Path) -> None:
    """Try again and again: the backends of a killed postmaster may still write a file."""
    deadline = time.monotonic() + _STOP_SECONDS
    shutil.rmtree(directory, ignore_errors=True)
    while directory.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        shutil.rmtree(directory, ignore_errors=True)


def _lock(directory: Path, leftovers: contextlib.ExitStack) -> None:
    """One watchdog per directory; the kernel frees the lock of a dead one. On Windows, postgres itself has to check."""
    if sys.platform != "win32":
        handle = os.open(directory, os.O_RDONLY)
        leftovers.callback(os.close, handle)
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _is_locked_by_us(handle):
            if time.monotonic() > deadline:
                raise RuntimeError(f"A server is already running in {directory}: stop it or choose another directory")
            time.sleep(_POLL_SECONDS)


def _is_locked_by_us(handle: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


# --- initdb ----------------------------------------------------------------------------------------------------------


def _initialise(cluster: _Cluster, *, is_temporary: bool) -> None:
    """Under another name first: if the power fails, half-made data must never be taken for a database."""
    unfinished = cluster.directory / "data.new"
    shutil.rmtree(unfinished, ignore_errors=True)
    cluster.make_private(unfinished)
    password = cluster.directory / "password"
    password.touch(mode=0o600)
    cluster.give(password).write_text(secrets.token_urlsafe())
    options = ["--encoding=UTF8", "--no-locale", "--username=postgres", *(["--no-sync"] if is_temporary else [])]
    # A user who can enter the socket's private directory is trusted; every user of the machine can reach 127.0.0.1.
    options += ["--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={password}"]
    if not _succeeds_for_known_user(cluster, "initdb", *options, f"--pgdata={unfinished}"):
        raise cluster.failure("could not be initialised")
    unfinished.rename(cluster.data)


def _succeeds_for_known_user(cluster: _Cluster, *command: str) -> bool:
    """Containers often run with a user id that has no entry in /etc/passwd. initdb refuses that, although it does not
    need the name. So it is shown another user: in a user namespace that maps a known user's id to ours, or by
    nss_wrapper, if that is installed. The files belong to us in either case.
    """
    if cluster.account or _is_known_user():
        return cluster.succeeds(*command)
    with contextlib.suppress(StopIteration, subprocess.SubprocessError):  # no user is known; namespaces are not allowed
        known = next(user.pw_uid for user in pwd.getpwall() if user.pw_uid != 0)
        return cluster.succeeds(*command, before=functools.partial(_run_as_known_user, known))
    if wrapper := ctypes.util.find_library("nss_wrapper"):
        return cluster.succeeds(*command, variables={"LD_PRELOAD": wrapper, **_wrapped_names(cluster.directory)})
    raise RuntimeError(
        f"User {os.geteuid()} has no entry in /etc/passwd, and initdb refuses to run for such a user. Add an entry, "
        f"install libnss-wrapper, allow user namespaces, or use another server (TASKLIB_TEST_DSN for the pytest plugin)"
    )


def _is_known_user() -> bool:
    if sys.platform == "win32":
        return True
    try:
        return bool(pwd.getpwuid(os.geteuid()))
    except KeyError:
        return False


def _run_as_known_user(known: int) -> None:
    """Called in the new process, before its program is loaded."""
    user, group = os.geteuid(), os.getegid()
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER_NAMESPACE) != 0:
        raise OSError(ctypes.get_errno(), "no user namespace")
    Path("/proc/self/setgroups").write_text("deny", "ascii")
    Path("/proc/self/uid_map").write_text(f"{known} {user} 1", "ascii")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", "ascii")


def _wrapped_names(directory: Path) -> dict[str, str]:
    users, groups = directory / "passwd", directory / "group"
    users.write_text(f"postgres:x:{os.geteuid()}:{os.getegid()}::/:/bin/false\n", "ascii")
    groups.write_text(f"postgres:x:{os.getegid()}:\n", "ascii")
    return {"NSS_WRAPPER_PASSWD": str(users), "NSS_WRAPPER_GROUP": str(groups)}


# --- The server ------------------------------------------------------------------------------------------------------


def _launch_server(
    cluster: _Cluster, port: int | None, settings: Mapping[str, str], leftovers: contextlib.ExitStack
) -> tuple[subprocess.Popen[bytes], str]:
    sockets = _socket_directory(cluster, leftovers)
    number = 5432 if port is None else port or _free_port()
    listen = {"listen_addresses": "" if port is None else "127.0.0.1", "port": str(number)}
    if os.name != "nt":
        listen["unix_socket_directories"] = str(sockets)
    options = [f"-c{name}={value}" for name, value in {**settings, **listen}.items()]
    server = cluster.launch("postgres", "-D", str(cluster.data), *options)
    leftovers.callback(_stop, server, "fast")
    # With port and sslmode, so that PGPORT and PGSSLMODE in the user's environment have no effect.
    if port is None:
        return server, f"postgresql://postgres@/postgres?host={quote(os.fsencode(sockets), safe='')}&port={number}"
    password = (cluster.directory / "password").read_text()
    return server, f"postgresql://postgres:{password}@127.0.0.1:{number}/postgres?sslmode=disable"


def _socket_directory(cluster: _Cluster, leftovers: contextlib.ExitStack) -> Path:
    if _is_fit_for_sockets(cluster.directory):
        return cluster.make_private(cluster.directory / "socket")
    for base in map(Path, (tempfile.gettempdir(), *_SHORT_DIRECTORIES)):
        place = base / "tasklib-12345678"  # as long as the real one
        if _is_fit_for_sockets(place) and base.is_dir() and os.access(base, os.W_OK | os.X_OK):
            return cluster.make_private(_temporary_directory(cluster.account, leftovers, base) / "socket")
    raise RuntimeError(
        f"{cluster.directory} is too long for the path of a Unix socket, or has a comma in it, and no directory of "
        f"{', '.join(_SHORT_DIRECTORIES)} can be used instead: set TMPDIR to a shorter path without a comma"
    )


def _is_fit_for_sockets(place: Path) -> bool:
    is_short = len(os.fsencode(place / "socket" / ".s.PGSQL.65535")) <= _SOCKET_PATH_BYTES
    return is_short and "," not in str(place)  # a comma separates hosts


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_until_ready(cluster: _Cluster, server: subprocess.Popen[bytes], stops: SimpleQueue[str]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not _is_ready(cluster.data / "postmaster.pid", server.pid):
        if server.poll() is not None:
            raise cluster.failure("did not start")
        if time.monotonic() > deadline:
            raise cluster.failure(f"was not ready within {_START_SECONDS:.0f} seconds")
        if not stops.empty():
            raise RuntimeError("Told to stop before the server was ready")
        time.sleep(_POLL_SECONDS)


def _is_ready(pid_file: Path, pid: int) -> bool:
    """Line 8 is the state. Line 1 is the pid: the file may be that of another or an earlier server."""
    with contextlib.suppress(FileNotFoundError):
        lines = [line.strip() for line in pid_file.read_text().splitlines()]
        return lines[:1] == [str(pid)] and lines[7:8] == ["ready"]
    return False


def _stop(server: subprocess.Popen[bytes], mode: str) -> None:
    """Fast: the server writes a checkpoint. Immediate: the next start recovers from the log. No commit is lost."""
    if sys.platform == "win32":
        signals = [signal.SIGTERM]  # Windows has only one way to end a process
    else:
        signals = (
            [signal.SIGINT, signal.SIGQUIT, signal.SIGKILL] if mode == "fast" else [signal.SIGQUIT, signal.SIGKILL]
        )
    for number in signals:
        server.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_STOP_SECONDS)
            return


# --- Root ------------------------------------------------------------------------------------------------------------


def _account(directory: str | None) -> tuple[int, int] | None:
    """The user and group for PostgreSQL, if we are root: the owner of existing data, or else `postgres` or `nobody`."""
    if sys.platform == "win32" or os.geteuid() != 0:
        return None
    if directory and (data := Path(directory, "data")).exists():
        return data.stat().st_uid, data.stat().st_gid
    with contextlib.suppress(KeyError):
        user = pwd.getpwnam("postgres")
        return user.pw_uid, user.pw_gid
    return 65534, 65534


def _refuse_closed(place: Path, account: tuple[int, int] | None) -> None:
    if account and (closed := _closed_to(account, place)):
        raise RuntimeError(
            f"{closed} is closed to user {account[0]}, as whom PostgreSQL runs here because it refuses root: "
            f"choose another directory"
        )


def _closed_to(account: tuple[int, int], place: Path) -> Path | None:
    """The first directory on the way that the account may not enter."""
    for path in (*reversed(place.parents), place):
        found = path.stat()
        needed = 0o100 if found.st_uid == account[0] else 0o010 if found.st_gid == account[1] else 0o001
        if not found.st_mode & needed:
            return path
    return None


def _can_run(cluster: _Cluster) -> bool:
    """Let initdb, as the account, find postgres, its libraries and the share directory."""
    with contextlib.suppress(PermissionError):
        return cluster.succeeds("initdb", "--show", f"--pgdata={cluster.data}")
    return False


def _copy_binaries(cluster: _Cluster) -> Path:
    """For binaries in a directory that is closed to the account, such as a venv under /root. Programs find their
    libraries by relative paths, also in a wheel's `package.libs`, so the copy keeps the last three levels.
    """
    prefix = cluster.binaries.parent
    package = prefix.parent
    sources = [cluster.binaries, prefix / "lib", prefix / "lib64", prefix / "share", package / ".dylibs"]
    copy = cluster.directory / "binaries"
    shutil.rmtree(copy, ignore_errors=True)
    for source in [*sources, package.parent / f"{package.name}.libs"]:
        for folder, _, names in os.walk(source, followlinks=True):
            target = copy / Path(folder).relative_to(package.parent)
            target.mkdir(parents=True)
            for name in names:
                _link_or_copy(Path(folder, name).resolve(), target / name)
    return copy / cluster.binaries.relative_to(package.parent)


def _link_or_copy(source: Path, target: Path) -> None:
    mode = source.stat().st_mode
    wanted = 0o755 if mode & 0o100 else 0o644
    with contextlib.suppress(OSError):  # it is on another filesystem, as a rule
        if mode & 0o005 == wanted & 0o005:  # a link shares the mode of the source, which must not change
            target.hardlink_to(source)
            return
    shutil.copyfile(source, target)
    target.chmod(wanted)


if __name__ == "__main__":
    watch(**json.loads(sys.argv[1]))
