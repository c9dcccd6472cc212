"""The daemon's settings: where they come from, which wins, and what is said when one is wrong."""

from __future__ import annotations

import os
import re
import socket
import stat
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel

import tasklib
from tasklib.config import Config
from tasklib.errors import InvalidConfig
from tasklib.ranges import Range
from tasklib.registry import default_registry
from tasklib_daemon.exit_codes import Exit, ExitCode, exit_for, one_line
from tasklib_daemon.redaction import redactor
from tasklib_daemon.settings import KEYS, SECRETS, SECTIONS, Settings, load

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLE = Path(__file__).resolve().parents[2] / "daemon" / "tasklibd.toml"
SECRET = "S3CR3T-canary-41"
URL = f"postgresql://app:{SECRET}@db/shop"
NAMED = {"TASKLIB_DATABASE_URL": URL}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refusal(path: Path | None = None, environment: dict[str, str] | None = None, **overrides: Any) -> str:
    """What it says when it refuses; never with the secret in it."""
    with pytest.raises(InvalidConfig) as refused:
        load(path, NAMED if environment is None else environment, overrides)
    assert SECRET not in repr(refused.value)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_later_sources_win(tmp_path: Path) -> None:
    """File, credentials, environment, command line: each overrides the ones before it, key by key."""
    file = write(
        tmp_path / "tasklibd.toml",
        "workers = 3\nconcurrency = 4\nqueues = ['mail', 'reports']\nmax_retries = 7\n"
        "[web]\nport = 1000\ntoken = 'from-the-file-1234'\n[log]\nlevel = 'debug'",
    )
    (tmp_path / "credentials").mkdir()
    write(tmp_path / "credentials" / "database_url", URL + "\n")
    write(tmp_path / "credentials" / "web_token", "from-credentials-1234\n")
    environment = {
        "CREDENTIALS_DIRECTORY": str(tmp_path / "credentials"),
        "TASKLIB_CONCURRENCY": "5",
        "TASKLIB_WEB_PORT": "2000",
        "TASKLIB_BURY_AFTER": "2",
        "DATABASE_URL": "postgresql://other-programs-use-this-one-too/db",
        "PATH": "/bin",
    }
    settings = load(file, environment, {"web": {"port": 3000}})
    assert (settings.workers, settings.concurrency, settings.queues) == (3, 5, ("mail", "reports"))
    assert (settings.web.port, settings.log.level) == (3000, "debug")
    assert settings.web.token is not None
    assert settings.web.token.get_secret_value() == "from-credentials-1234"
    config = settings.config()
    assert (config.database_url, config.max_retries, config.bury_after) == (URL, 7, 2)
    assert (config.worker_id, settings.name) == (socket.gethostname(), socket.gethostname())


def test_an_empty_credential_is_none(tmp_path: Path) -> None:
    """A service manager that finds no file for one may give an empty one instead."""
    for name in ("database_url", "listen_database_url", "web_token"):
        write(tmp_path / name, "\n")
    settings = load(None, {"CREDENTIALS_DIRECTORY": str(tmp_path), "DATABASE_URL": URL})
    assert (settings.config().database_url, settings.config().listen_database_url) == (URL, None)
    assert settings.web.token is None


def test_database_of_other_programs_is_the_last_resort() -> None:
    """DATABASE_URL, then libpq's own variables; with none of them, it says what to set."""
    assert load(None, {"DATABASE_URL": URL, "PGHOST": "x"}).config().database_url == URL
    assert load(None, {"PGHOST": "x"}).config().database_url == ""
    assert "TASKLIB_DATABASE_URL" in refusal(environment={})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workerz = 3", "unknown setting workerz (FILE): did you mean workers?"),
        ("[web]\nprot = 1", "unknown setting web.prot (FILE): did you mean web.port?"),
        ("[wbe]\nport = 1", "unknown setting wbe (FILE): did you mean web?"),
        ("max_memory_mb = 1", "unknown setting max_memory_mb (FILE): did you mean recycle.max_memory_mb?"),
        ("zzzzzzzzzzzzzzzz = 1", "unknown setting zzzzzzzzzzzzzzzz (FILE): there is nothing like it"),
        ("worker_id = 'x'", "unknown setting worker_id (FILE): did you mean workers?"),
        ("web = 8000", "web (FILE) is a section: write [web], and its settings below"),
        ("workers = 0", "workers (FILE): must be a whole number from 1 to 1000, got 0"),
        ("queues = ['Bad Name']", "queues (FILE): 'Bad Name' cannot be a queue's name"),
        ("queues = []", "queues (FILE): is empty: leave it out for every queue"),
        ("max_retries = -1", "max_retries (FILE): must be a whole number from 0 to 1000000, got -1"),
        ("schema = 'Bad'", "cannot be the schema"),
        ("[log]\nlevel = 'loud'", "log.level (FILE): Input should be 'debug', 'info', 'warning' or 'error'"),
        ("workers = x", "FILE is not TOML: there is a mistake (at line 1, column 11)"),
    ],
)
def test_mistakes_are_named_with_their_place(tmp_path: Path, text: str, said: str) -> None:
    """An unknown key is an error that names the nearest one; a wrong value says where it stands and what it may be."""
    file = write(tmp_path / "tasklibd.toml", text)
    assert said.replace("FILE", str(file)) in refusal(file)


# --- how large they may be ---

UNBOUNDED = {  # by a number: what keeps it in bounds instead
    "runtime_directory": "the length of a socket's address", "control_socket": "the length of a socket's address",
    "log.file": "a file of that name has to be opened", "web.token": "its own check of length and characters",
}  # fmt: skip


def hints() -> dict[str, Any]:
    """Every setting of the daemon and of the library, with its whole type."""
    found: dict[str, Any] = dict(get_type_hints(tasklib.Config, include_extras=True))
    for name, hint in get_type_hints(Settings, include_extras=True).items():
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            found |= {f"{name}.{each}": kind for each, kind in get_type_hints(hint, include_extras=True).items()}
        elif name not in {"library", "model_config"}:
            found[name] = hint
    return {name: hint for name, hint in found.items() if not name.endswith("model_config")}


def parts(hint: Any) -> Iterator[Any]:
    """Of a type: itself, what it is annotated with, and what it is made of."""
    yield hint
    yield from getattr(hint, "__metadata__", ())
    for each in (getattr(hint, "__origin__", None), *get_args(hint)):
        if each is not None and get_origin(hint) is not Literal:
            yield from parts(each)


@pytest.mark.parametrize("key", sorted(hints()))
def test_every_setting_has_a_range(key: str) -> None:
    """A number has both ends, a text a greatest length, a choice its values: also the setting that comes next."""
    found = [*parts(hints()[key])]
    is_bounded = any(isinstance(each, Range) for each in found)
    is_choice = bool in found or any(get_origin(each) is Literal for each in found)
    has_length = any(getattr(each, "max_length", None) or _has_max_length(each) for each in found)
    assert is_bounded or not {int, float} & set(found), "a number without a Range"
    assert is_bounded or is_choice or has_length or key in UNBOUNDED


def _has_max_length(part: Any) -> bool:
    return any(getattr(each, "max_length", None) for each in getattr(part, "metadata", ()))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hang_seconds", 1e-7, "hang_seconds (options): must be a number from 0.5 to 86400, got 1e-07"),
        ("hang_seconds", 1.5, "hang_seconds must be at least 2, got 1.5: twice poll_interval_seconds"),
        ("stall_seconds", 1.0, "stall_seconds must be at least 2, got 1"),
        ("database_timeout_seconds", 1e-7, "must be a number from 0.1 to 3600, got 1e-07"),
        ("lock_timeout_seconds", 1e20, "must be a whole number from 1 to 2.592e+06"),
        ("lock_timeout_seconds", 10**20, "must be a whole number from 1 to 2.592e+06, got 1000000"),
        ("election_ttl_seconds", 1e-7, "must be a number from 0.5 to 4.99, got 1e-07"),
        ("workers", True, "workers (options): must be a whole number from 1 to 1000, got true or false"),
        ("lease_seconds", True, "must be a number from 0.3 to 3600, got true or false"),
        ("database_url", [], "database_url (options): Input should be a valid string"),
        ("database_url", 0, "database_url (options): Input should be a valid string"),
        ("poll_interval_seconds", float("nan"), "must be a number from 0.01 to 60, got nan"),
        ("grace_seconds", float("inf"), "got inf"),
    ],
)
def test_a_value_with_which_nothing_runs_is_refused(key: str, value: Any, said: str) -> None:
    """By the setting's name, what was given, and what may be given."""
    assert said in refusal(**{key: value})


def test_a_section_has_ranges_too() -> None:
    said = "retention.states_days (options): must be a number from 0.01 to 36500, got 1e+300"
    assert said in refusal(retention={"states_days": 1e300})


def test_mistakes_in_the_environment(tmp_path: Path) -> None:
    """A misspelt variable would otherwise be ignored in silence; so would a misspelt credential."""
    assert refusal(environment={**NAMED, "TASKLIB_WORKERZ": "3"}) == (
        "unknown variable TASKLIB_WORKERZ: did you mean TASKLIB_WORKERS?"
    )
    assert "workers (TASKLIB_WORKERS): " in refusal(environment={**NAMED, "TASKLIB_WORKERS": SECRET})
    write(tmp_path / "databse_url", URL)
    environment = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert "unknown credential databse_url" in refusal(environment=environment)
    assert "cannot be read" in refusal(environment={"CREDENTIALS_DIRECTORY": str(tmp_path / "missing")})


def test_what_others_put_beside_ours_is_left_alone(tmp_path: Path) -> None:
    """Kubernetes tells every container about a service called tasklib-web; an application has credentials too."""
    write(tmp_path / "stripe_key", "x")
    write(tmp_path / "database_url.cred", "encrypted")
    (tmp_path / "..data").mkdir()
    links = {
        "TASKLIB_WEB_PORT": "tcp://10.0.0.1:80",
        "TASKLIB_WEB_SERVICE_HOST": "10.0.0.1",
        "TASKLIB_WEB_SERVICE_PORT_HTTP": "80",
        "TASKLIB_WEB_PORT_80_TCP_ADDR": "10.0.0.1",
        "TASKLIB_PORT": "tcp://10.0.0.1:80",
        "TASKLIB_TEST_DSN": "x",
    }
    assert load(None, {**NAMED, **links, "CREDENTIALS_DIRECTORY": str(tmp_path)}).web.port == 8642


def test_none_can_be_said() -> None:
    """Neither TOML nor the environment has a word for no value."""
    settings = load(None, {**NAMED, "TASKLIB_RETENTION_FAILED_DAYS": "none"}, {"web": {"port": "none"}})
    assert (settings.retention.failed_days, settings.web.port) == (None, None)
    assert "workers" in refusal(workers="none")


def test_lists_have_commas_where_there_are_no_lists() -> None:
    """As in `--queues a,b`."""
    settings = load(None, {**NAMED, "TASKLIB_APP": "shop.tasks, mail.tasks"}, {"queues": "a,b"})
    assert (settings.app, settings.queues) == (("shop.tasks", "mail.tasks"), ("a", "b"))


def test_settings_show_no_secret() -> None:
    """Neither printed nor in an error; the log is told what to strike out, in each of its forms."""
    url = "postgresql+asyncpg://app:p%40ss-word@db/shop"
    settings = load(None, {"TASKLIB_DATABASE_URL": url, "TASKLIB_WEB_TOKEN": SECRET}, {"listen_database_url": URL})
    for shown in (
        repr(settings),
        str(settings),
        repr(settings.config()),
        settings.model_dump_json(exclude={"library"}),
    ):
        assert SECRET not in shown
        assert "ss-word" not in shown
    assert {SECRET, "p@ss-word", "p%40ss-word"} <= set(settings.secrets())
    assert refusal(environment={"DATABASE_URL": f"host=db password {SECRET}"}) == (
        "database_url must be a libpq URL (postgresql://user@host/database) or a key=value string"
    )


def test_other_addresses_need_a_token() -> None:
    """Loopback by default; another address only with a token that cannot be guessed."""
    assert load(None, NAMED).web.is_loopback
    assert load(None, NAMED, {"web": {"host": "::1"}}).web.is_loopback
    for host in ("0.0.0.0", "::", "10.1.2.3", "db.example.com"):  # noqa: S104 - the example
        assert "needs a token" in refusal(web={"host": host})
        assert not load(None, NAMED, {"web": {"host": host, "token": SECRET}}).web.is_loopback
    assert "web.token" in refusal(web={"token": "short"})
    assert "web.token" in refusal(web={"token": "with a space in the middle"})


def test_runtime_directory(tmp_path: Path) -> None:
    """systemd's, else one of one's own; for this user alone, and short enough for a socket's address."""
    assert load(None, {**NAMED, "RUNTIME_DIRECTORY": "/run/a:/run/b"}).control_socket == Path("/run/a/control.sock")
    own = load(None, {**NAMED, "XDG_RUNTIME_DIR": str(tmp_path)})
    assert own.runtime_directory == tmp_path / f"tasklibd-{os.getpid()}"
    assert load(None, NAMED).runtime_directory != load(None, NAMED).runtime_directory
    own.make_runtime_directory()
    own.make_runtime_directory()
    assert stat.S_IMODE(own.runtime_directory.stat().st_mode) == 0o700
    own.runtime_directory.chmod(0o777)
    with pytest.raises(InvalidConfig, match="no other user may write"):
        own.make_runtime_directory()
    write(tmp_path / "file", "")
    with pytest.raises(InvalidConfig, match=r"runtime_directory .*Not a directory"):
        load(None, NAMED, {"runtime_directory": str(tmp_path / "file" / "x")}).make_runtime_directory()
    assert "too long" in refusal(runtime_directory="/run/" + "x" * 90)


def test_sample_file_has_every_setting_and_its_default() -> None:
    """Uncommented, daemon/tasklibd.toml is the defaults: it cannot drift from the model."""
    text = SAMPLE.read_text()
    tables = tomllib.loads(re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE))
    flat = {
        f"{key}.{name}" if key in SECTIONS else key: each
        for key, value in tables.items()
        for name, each in (value.items() if key in SECTIONS else [("", value)])
    }
    assert set(flat) == set(KEYS)
    defaults = load(None, {"PGHOST": "x"})
    examples = {"app", "name", "database_url", "runtime_directory", "control_socket"}
    for key in set(KEYS) - examples:
        assert flat[key] == ("none" if value_of(defaults, key) is None else value_of(defaults, key)), key
    load(SAMPLE, NAMED)
    assert tomllib.loads(text) == {section: {} for section in SECTIONS}


def test_retries_are_spread_by_default() -> None:
    """What fails together must not come back together. The library's own delays stay exact: 5, 10, 20 s."""
    assert load(None, NAMED).config().retry_jitter == 0.1
    assert load(None, NAMED | {"TASKLIB_RETRY_JITTER": "0"}).config().retry_jitter == 0
    assert load(None, NAMED, {"retry_jitter": 0.3}).config().retry_jitter == 0.3
    assert Config("postgresql://").retry_jitter == 0


def value_of(settings: Settings, key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        inner = getattr(value, part, None)
        value = inner if part in type(value).model_fields else getattr(settings.library, part)
    assert not isinstance(value, BaseModel)
    return value


def test_secrets_are_not_options() -> None:
    """Arguments are shown by `ps`: no command has one for a secret."""
    from tasklib_daemon import commands  # noqa: PLC0415 - needs the extra

    parameters = {name for each in commands.app.registered_commands for name in each.callback.__annotations__}
    assert "web_port" in parameters
    assert not parameters & {*SECRETS, *(key.replace(".", "_") for key in SECRETS)}


# --- the application ---


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An application's package, importable for the length of a test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = tmp_path / "daemon_shop"
    (made / "mail").mkdir(parents=True)
    for each in ("__init__.py", "mail/__init__.py"):
        write(made / each, "")
    write(made / "tasks.py", "import tasklib\n@tasklib.task\ndef charge() -> None: ...\n")
    write(made / "mail" / "jobs.py", "import tasklib\n@tasklib.task\ndef send() -> None: ...\n")
    write(made / "mail" / "__main__.py", "raise RuntimeError('a program, not a module')\n")
    yield made
    for name in [name for name in sys.modules if name.startswith("daemon_shop")]:
        del sys.modules[name]


def import_app(*modules: str) -> set[str]:
    load(None, NAMED, {"app": modules}).import_app()
    return {function.name for function in default_registry}


def test_modules_of_a_package_are_found(package: Path) -> None:
    """One module by its name, or all of a package."""
    assert import_app("daemon_shop.tasks") >= {"charge"}
    assert "send" not in default_registry
    assert import_app("daemon_shop.*") >= {"charge", "send"}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name' (FILE, line 2)"),
        ("1 / 0", "ZeroDivisionError: division by zero (FILE, line 2)"),
        ("def f(:", "SyntaxError: "),
        ("import sys; sys.exit('no')", "SystemExit: no (FILE, line 2)"),
        (f"raise ValueError('cannot reach {URL}')", "ValueError: cannot reach postgresql://app:***@db/shop"),
        (f"raise ValueError('what is {SECRET}?')", "ValueError: what is ***?"),
        ("import tasklib\n@tasklib.task(queue='A B')\ndef f() -> None: ...", "'A B' cannot be a queue's name"),
        ("import tasklib\n@tasklib.task(queue='A B')\ndef f() -> None: ...", "(FILE, line 3)"),
    ],
)
def test_broken_application_is_one_line_with_its_place(package: Path, source: str, said: str) -> None:
    """What, and where in the application's own files; nothing of ours, no secret, one line."""
    file = write(package / "broken.py", "\n" + source)
    with pytest.raises(Exit) as refused:
        import_app("daemon_shop.broken")
    assert refused.value.code == ExitCode.IMPORT
    assert refused.value.message.startswith("cannot import daemon_shop.broken: ")
    assert said.replace("FILE", str(file)) in refused.value.message
    assert "\n" not in refused.value.message
    assert SECRET not in refused.value.message


def test_missing_application_is_told(package: Path) -> None:
    """A module that is not there is told with the place that was looked at; so is that none was named."""
    with pytest.raises(Exit, match=r"'daemon_shop.nothing' cannot be found from"):
        import_app("daemon_shop.nothing")
    with pytest.raises(InvalidConfig, match="app names no module"):
        import_app()


# --- exits and redaction ---


def test_each_kind_of_end_has_a_code_of_its_own() -> None:
    """A service manager tells by the code what a restart will not cure."""
    assert exit_for(InvalidConfig("x")).code == ExitCode(78)
    assert exit_for(tasklib.errors.SchemaOutdated("x")).code == ExitCode(76)
    assert exit_for(Exit(ExitCode.IMPORT, "x")).code == ExitCode(70)
    assert exit_for(tasklib.InvalidTaskDefinition("x")).code == ExitCode(70)
    assert exit_for(ValueError("x")).code == ExitCode(1)
    assert len(set(ExitCode)) == len(ExitCode)
    assert one_line(ValueError("two\n  lines")) == "ValueError: two lines"
    assert one_line(KeyError()) == "KeyError"
    assert one_line(InvalidConfig("plain")) == "plain"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:p@ss@h/db and more", "postgresql://u:***@h/db and more"),
        ("amqp://u:secret@h", "amqp://u:***@h"),
        ("postgresql://u@h/db", "postgresql://u@h/db"),
        ("host=h password=x\\'y dbname=d", "host=h password=***"),
        ("host=h password='a b\\'c' dbname=d", "host=h password=*** dbname=d"),
        ("PASSWORD = x", "PASSWORD = ***"),
        ('{"token": "quo\\"ted-token"}', '{"token": "***"}'),
        ("at 12:30 mail a@b.c", "at 12:30 mail a@b.c"),
    ],
)
def test_passwords_are_struck_out(text: str, shown: str) -> None:
    """In URLs, in connection strings, and what is known, also as JSON writes it."""
    assert redactor(['quo"ted-token', "u", ""])(text).startswith(shown)
