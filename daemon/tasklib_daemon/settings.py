"""One validated settings object, from a TOML file, the environment, a credentials directory and command line options.

Later sources win: file, credentials, environment, options. Every field of `tasklib.Config` is a setting under its own
name; `[sections]` group the others. Errors never show a value, because it may be a secret in the wrong place.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import ipaddress
import os
import pkgutil
import re
import secrets
import socket
import tempfile
import tomllib
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from tasklib.config import Config
from tasklib.errors import InvalidConfig, InvalidOptions, TaskNotRegistered
from tasklib.names import check_queue
from tasklib.ranges import DAY_SECONDS, YEAR_SECONDS, Range, plain
from tasklib.registry import default_registry, discover
from tasklib.runtime.loop import LONGEST_SILENCE_SECONDS
from tasklib.worker.forks import call_in_one_process
from tasklib_daemon.control import MOST_WORKERS
from tasklib_daemon.exit_codes import Exit, ExitCode, one_line
from tasklib_daemon.redaction import redactor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PREFIX = "TASKLIB_"
SECRETS = ("database_url", "listen_database_url", "web.token")  # as files: database_url, listen_database_url, web_token
MIN_TOKEN_CHARACTERS = 16
MAX_SOCKET_PATH_BYTES = 100  # 104 on macOS and 108 on Linux, the final zero included
LONGEST_SOCKET_NAME = "wake-9999-99999999"
RETRY_JITTER = 0.1  # Config's default is 0, for exact 5, 10, 20 s; a daemon's tasks tend to fail all at once


def _split(given: Any) -> Any:
    """`a,b` in the environment and on the command line, where a list cannot be written."""
    return tuple(part.strip() for part in given.split(",") if part.strip()) if isinstance(given, str) else given


Names = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=200)], ...], BeforeValidator(_split), Field(max_length=10_000)
]
Days = Annotated[float, Range(0.01, 36_500)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Web(Section):
    """`/livez`, `/readyz` and `/status`. An address that others can reach needs a token."""

    host: Annotated[str, Field(min_length=1, max_length=253)] = "127.0.0.1"
    port: Annotated[int, Range(0, 65535)] | None = 8642  # 0: any free port; None: no web child
    token: Annotated[SecretStr, Field(max_length=4096)] | None = None
    public_probes: bool = False  # without a token, /livez and /readyz say only yes or no

    @field_validator("token")
    @classmethod
    def _is_hard_to_guess(cls, token: SecretStr | None) -> SecretStr | None:
        text = token.get_secret_value() if token is not None else None
        if text is not None and (len(text) < MIN_TOKEN_CHARACTERS or not re.fullmatch(r"[!-~]*", text)):
            raise ValueError(f"must have at least {MIN_TOKEN_CHARACTERS} ASCII characters, none of them a space")
        return token

    @property
    def is_loopback(self) -> bool:
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"


class Log(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"  # auto: console on a terminal, else JSON
    file: Path | None = None  # None: standard error
    tasks: Literal["all", "failures", "none"] = "failures"  # which attempts log a line at their end


class Recycle(Section):
    """A worker that reaches one of these limits is replaced. None: no limit."""

    max_tasks: Annotated[int, Range(1, 10**9)] | None = None
    max_age_seconds: Annotated[float, Range(1, YEAR_SECONDS)] | None = None
    max_memory_mb: Annotated[int, Range(100, 10**7)] | None = None  # a new worker takes 60


class Restart(Section):
    """How long a slot rests after a death, and when the daemon is unhealthy."""

    first_seconds: Annotated[float, Range(0.01, 3600)] = 0.1
    longest_seconds: Annotated[float, Range(0.01, 3600)] = 30.0
    crash_loop_deaths: Annotated[int, Range(1, 10_000)] = 5
    crash_loop_seconds: Annotated[float, Range(1, DAY_SECONDS)] = 60.0


class Retention(Section):
    """How long the janitor keeps finished tasks and old records. None: for ever. Buried tasks are always kept."""

    completed_days: Days | None = 30.0
    failed_days: Days | None = 90.0
    heartbeats_hours: Annotated[float, Range(0.1, 876_000)] | None = 24.0
    states_days: Days | None = 7.0
    audit_days: Days | None = 365.0


class Settings(Section):
    """Made by `load`."""

    library: Config
    app: Names = ()
    preload: bool = False
    workers: Annotated[int, Range(1, MOST_WORKERS)] = 2
    concurrency: Annotated[int, Range(1, 10_000)] = 10
    queues: Names | None = None
    poll_interval_seconds: Annotated[float, Range(0.01, 60)] = 1.0
    buffer_size: Annotated[int, Range(0, 100_000)] | None = None
    grace_seconds: Annotated[float, Range(0, YEAR_SECONDS)] = 30.0
    name: Annotated[str, Field(min_length=1, max_length=200)] = Field(default_factory=socket.gethostname)
    runtime_directory: Path
    control_socket: Path
    boot_seconds: Annotated[float, Range(1, DAY_SECONDS)] = 60.0
    hang_seconds: Annotated[float, Range(0.5, DAY_SECONDS)] = 15.0
    stall_seconds: Annotated[float, Range(0.5, YEAR_SECONDS)] = 60.0
    snapshot_seconds: Annotated[float, Range(0.1, 3600)] = 5.0
    election_ttl_seconds: Annotated[float, Range(0.5, 4.99)] = 4.0  # under 5 s: due tasks do not wait for it
    web: Web = Web()
    log: Log = Log()
    recycle: Recycle = Recycle()
    restart: Restart = Restart()
    retention: Retention = Retention()

    def config(self) -> Config:
        """The library's settings. Workers make their ids from the daemon's name."""
        return replace(self.library, worker_id=self.name)

    def secrets(self) -> tuple[str, ...]:
        """Texts that must not appear anywhere, the longest first."""
        urls = [self.library.database_url, self.library.listen_database_url or ""]
        token = self.web.token.get_secret_value() if self.web.token is not None else ""
        found = {token, *(password for url in urls for password in _passwords(url))}
        return tuple(sorted(found - {""}, key=len, reverse=True))

    def import_app(self) -> None:
        """Import the task modules; `pkg.*` means the package and every module in it."""
        if not self.app:
            raise InvalidConfig("app names no module: name one that defines tasks, e.g. --app shop.tasks")
        redact = redactor(self.secrets())
        for module in self.app:
            call_in_one_process(functools.partial(_import, module, redact))
        if not list(default_registry):
            raise Exit(ExitCode.IMPORT, f"{', '.join(self.app)} can be imported, but defines no tasks")

    def make_runtime_directory(self) -> None:
        """Only this user may write to it. An existing one is checked."""
        try:
            self.runtime_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = self.runtime_directory.stat()
        except OSError as error:
            raise InvalidConfig(f"runtime_directory {self.runtime_directory}: {error.strerror}") from None
        if about.st_uid != os.geteuid() or about.st_mode & 0o022:
            raise InvalidConfig(
                f"runtime_directory {self.runtime_directory} must belong to the daemon's user, "
                f"and no other user may write to it (chmod 700)"
            )

    @model_validator(mode="after")
    def _hangs_differ_from_rests(self) -> Self:
        """An idle worker is silent until its next poll, but never for more than a few seconds. That is no hang."""
        rest = 2 * min(self.poll_interval_seconds, LONGEST_SILENCE_SECONDS)
        for name in ("hang_seconds", "stall_seconds"):
            if getattr(self, name) < rest:
                raise ValueError(
                    f"{name} must be at least {rest:g}, got {getattr(self, name):g}: twice poll_interval_seconds, and "
                    f"{2 * LONGEST_SILENCE_SECONDS:g} is always enough"
                )
        return self

    @field_validator("queues")
    @classmethod
    def _queues_have_good_names(cls, queues: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if queues is not None and not queues:
            raise ValueError("is empty: leave it out for every queue")
        try:
            return queues and tuple(check_queue(queue) for queue in queues)
        except InvalidOptions as error:
            raise ValueError(str(error)) from None

    @field_validator("web")
    @classmethod
    def _others_need_a_token(cls, web: Web) -> Web:
        if web.port is not None and not web.is_loopback and web.token is None:
            raise ValueError(
                "a host that is not loopback needs a token: put one in the credential web_token or TASKLIB_WEB_TOKEN"
            )
        return web

    @field_validator("runtime_directory", "control_socket")
    @classmethod
    def _fits_a_socket_address(cls, path: Path, info: Any) -> Path:
        path = path.absolute()
        longest = path / LONGEST_SOCKET_NAME if info.field_name == "runtime_directory" else path
        if len(os.fsencode(longest)) > MAX_SOCKET_PATH_BYTES:
            raise ValueError("is too long for the address of a Unix socket: choose a shorter path")
        return path


def load(
    path: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """`overrides` has the shape of the file. Raises InvalidConfig with all mistakes in one line."""
    given = {
        **(_from_file(path) if path is not None else {}),
        **_from_credentials(environment),
        **_from_environment(environment),
        **_from_tables(overrides or {}, "options"),
    }
    directory = given.setdefault("runtime_directory", _Given(default_runtime_directory(environment), "default"))
    given.setdefault("control_socket", _Given(Path(str(directory.value)) / "control.sock", "default"))
    given.setdefault("retry_jitter", _Given(RETRY_JITTER, "default"))
    library = {key: one.value for key, one in given.items() if key in LIBRARY_KEYS}
    rest = {key: one.value for key, one in given.items() if key not in LIBRARY_KEYS}
    try:
        return Settings(library=_config(library, environment, given), **nested(rest))
    except ValidationError as error:
        lines = [_line(".".join(map(str, e["loc"])), e["msg"], given) for e in error.errors(include_input=False)]
        raise InvalidConfig("; ".join(lines)) from None


def default_runtime_directory(environment: Mapping[str, str]) -> Path:
    """The supervisor creates it."""
    if environment.get("RUNTIME_DIRECTORY"):  # systemd's; it may name several
        return Path(environment["RUNTIME_DIRECTORY"].split(":")[0])
    if environment.get("XDG_RUNTIME_DIR"):
        return Path(environment["XDG_RUNTIME_DIR"]) / f"tasklibd-{os.getpid()}"
    # Every user may write to this directory, so the name must be one that cannot be guessed and taken.
    return Path(tempfile.gettempdir()) / f"tasklibd-{os.getpid()}-{secrets.token_hex(4)}"


# --- where values come from ---


@dataclass(frozen=True, slots=True)
class _Given:
    value: Any
    origin: str


def _from_file(path: Path) -> dict[str, _Given]:
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        where = re.search(r"\(at .*\)$", str(error))
        raise InvalidConfig(f"{path} is not TOML: there is a mistake {where[0] if where else 'in it'}") from None
    return _from_tables(tables, str(path))


def _from_credentials(environment: Mapping[str, str]) -> dict[str, _Given]:
    """One file for each secret; an empty one does not count. Other files belong to the application, unless their name
    is nearly one of ours. `.cred` files are encrypted by systemd, and not for us.
    """
    directory = environment.get("CREDENTIALS_DIRECTORY")
    if not directory:
        return {}
    names = {key.replace(".", "_"): key for key in SECRETS}
    found = {}
    try:
        for file in Path(directory).iterdir():
            if file.name in names:
                if value := file.read_text("utf-8").strip():
                    found[names[file.name]] = _Given(value, f"credential {file.name}")
            elif file.suffix != ".cred" and (nearest := difflib.get_close_matches(file.name, names, 1, cutoff=0.8)):
                raise InvalidConfig(f"unknown credential {file.name} in {directory}: did you mean {nearest[0]}?")
    except OSError as error:
        raise InvalidConfig(f"credentials in {directory} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidConfig(f"a credential in {directory} is not text") from None
    return found


def _from_environment(environment: Mapping[str, str]) -> dict[str, _Given]:
    known = {PREFIX + key.replace(".", "_").upper(): key for key in KEYS}
    found = {}
    for name, value in environment.items():
        if not name.startswith(PREFIX) or _is_not_ours(name, value):
            continue
        if name not in known:
            raise InvalidConfig(f"unknown variable {name}: {_hint(name, {each: each for each in known})}")
        if value:
            found[known[name]] = _Given(_no_value(known[name], value), name)
    return found


# Variables of other parts (the command line, the tests, the daemon's mark on its processes), and those that Kubernetes
# sets in every container for a service called tasklib or tasklib-web.
_OTHER_VARIABLES = re.compile(
    r"TASKLIB_(CONFIG|PG_BIN|DAEMON_\w*|TEST_\w*|MODEL_\w*|(\w+_)?SERVICE_(HOST|PORT)\w*|\w*PORT_\d+_\w+)"
)
_LINK = re.compile(r"(tcp|udp|sctp)://")


def _is_not_ours(name: str, value: str) -> bool:
    return bool(_OTHER_VARIABLES.fullmatch(name) or _LINK.match(value))


def _from_tables(tables: Mapping[str, Any], origin: str) -> dict[str, _Given]:
    found = {}
    for key, value in _flat(tables):
        if key in SECTIONS:
            raise InvalidConfig(f"{key} ({origin}) is a section: write [{key}], and its settings below")
        if key not in KEYS:
            leaves = {each: each for each in KEYS} | {each.partition(".")[2]: each for each in KEYS if "." in each}
            raise InvalidConfig(f"unknown setting {key} ({origin}): {_hint(key, leaves)}")
        found[key] = _Given(_no_value(key, value), origin)
    return found


def _flat(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Pairs such as `web.port`, 8642. An unknown section stays whole, so that its name is reported."""
    for key, value in tables.items():
        if key in SECTIONS and isinstance(value, dict):
            yield from ((f"{key}.{name}", each) for name, each in value.items())
        else:
            yield key, value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"web.port": 8642}` in the shape of the file: `{"web": {"port": 8642}}`."""
    tables: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (tables.setdefault(section, {}) if section else tables)[name] = value
    return tables


def _no_value(key: str, value: Any) -> Any:
    """TOML and the environment have no None, so "none" stands for it."""
    is_none = isinstance(value, str) and value.lower() == "none" and NoneType in get_args(KEYS[key])
    return None if is_none else value


def _hint(name: str, candidates: Mapping[str, str]) -> str:
    nearest = difflib.get_close_matches(name, [*candidates, *SECTIONS], 1, cutoff=0.5)
    return f"did you mean {candidates.get(nearest[0], nearest[0])}?" if nearest else "there is nothing like it"


# --- the library's part ---


def _config(values: Mapping[str, Any], environment: Mapping[str, str], given: Mapping[str, _Given]) -> Config:
    url = values.get("database_url", "")
    url = _url_of_others(environment) if url == "" else url
    for key, one in {"database_url": url, "listen_database_url": values.get("listen_database_url")}.items():
        _check_url(key, one, given)
    try:
        return Config(**{**values, "database_url": url})
    except InvalidConfig as error:
        text = re.sub(r"Config\.(\w+)(?=: )", lambda found: _named(found[1], given), str(error))
        raise InvalidConfig(text) from None


def _url_of_others(environment: Mapping[str, str]) -> str:
    """Without a database of our own: DATABASE_URL, which other programs read too, or libpq's PG* variables."""
    url = environment.get("DATABASE_URL", "")
    if not url and not any(name in environment for name in ("PGHOST", "PGDATABASE", "PGSERVICE", "PGUSER")):
        raise InvalidConfig(
            "no database is configured: put its URL in the credential database_url, in TASKLIB_DATABASE_URL, "
            "DATABASE_URL or the file's database_url, or set libpq's PG* variables"
        )
    return url


def _check_url(key: str, url: Any, given: Mapping[str, _Given]) -> None:
    """The message of libpq could quote a password."""
    try:
        conninfo_to_dict(_plain(url) if isinstance(url, str) else "")
    except ProgrammingError:
        wanted = "must be a libpq URL (postgresql://user@host/database) or a key=value string"
        raise InvalidConfig(f"{_named(key, given)} {wanted}") from None


def _passwords(url: str) -> Iterator[str]:
    """As written in the URL, and as sent to the server."""
    with contextlib.suppress(ProgrammingError):
        yield str(conninfo_to_dict(_plain(url)).get("password") or "")
    written = re.match(r"\w+://[^:/@]*:([^@]*)@", url)
    yield written[1] if written else ""
    yield os.environ.get("PGPASSWORD", "")


def _plain(url: str) -> str:
    """Without the driver that SQLAlchemy puts into its URLs."""
    return re.sub(r"^(postgres(?:ql)?)\+\w+(?=://)", r"\1", url)


def _line(key: str, message: str, given: Mapping[str, _Given]) -> str:
    return f"{_named(key, given)}: {plain(message)}" if key else plain(message)


def _named(key: str, given: Mapping[str, _Given]) -> str:
    origin = given[key].origin if key in given else None
    return key if origin is None else f"{key} ({origin})"


# --- the application's part ---


def _import(name: str, redact: Callable[[str], str]) -> None:
    package, star, _ = name.partition(".*")
    try:
        discover([package])
        if star:
            discover(_modules_in(package))
    except TaskNotRegistered as error:
        raise Exit(ExitCode.IMPORT, f"cannot import {name}: {error}") from None
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        where = _where_in_app(error)
        raise Exit(ExitCode.IMPORT, redact(f"cannot import {name}: {one_line(error)}{where}")) from error


def _modules_in(package: str) -> Iterator[str]:
    paths = getattr(importlib.import_module(package), "__path__", None)
    for found in pkgutil.iter_modules(paths, f"{package}.") if paths is not None else ():
        if not found.name.endswith(".__main__"):
            yield found.name
            yield from _modules_in(found.name) if found.ispkg else ()


def _where_in_app(error: BaseException) -> str:
    """The innermost line of a file that does not belong to the import machinery."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    ours = ("<", importlib.__file__, str(Path(discover.__code__.co_filename).parent), str(Path(__file__).parent))
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    return f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""


# --- what there is ---


def _kinds() -> Iterator[tuple[str, Any]]:
    for name, about in Settings.model_fields.items():
        if name == "library":
            fields = Config.__pydantic_fields__  # type: ignore[attr-defined]
            yield from ((each, field.annotation) for each, field in fields.items() if each != "worker_id")
        elif isinstance(about.annotation, type) and issubclass(about.annotation, Section):
            yield from ((f"{name}.{each}", field.annotation) for each, field in about.annotation.model_fields.items())
        else:
            yield name, about.annotation


KEYS: dict[str, Any] = dict(_kinds())  # every setting, with its kind
LIBRARY_KEYS = frozenset(Config.__pydantic_fields__) - {"worker_id"}  # type: ignore[attr-defined]
SECTIONS = frozenset(key.partition(".")[0] for key in KEYS if "." in key)
