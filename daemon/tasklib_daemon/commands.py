"""The commands of `tasklibd`: run and check a daemon, and ask one that runs.

No option takes a secret: arguments are shown to every user of the machine by `ps`. Exit codes are in exit_codes.py.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tasklib_daemon import control
from tasklib_daemon.exit_codes import Exit, ExitCode, exit_for
from tasklib_daemon.redaction import redactor
from tasklib_daemon.status import Status, describe

if TYPE_CHECKING:
    from tasklib_daemon.settings import Settings

app = typer.Typer(
    name="tasklibd",
    help="Run tasks. Settings come from a TOML file, credentials, TASKLIB_* variables and options; later sources win.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", envvar="TASKLIB_CONFIG", help="A TOML file.")]
App = Annotated[
    list[str] | None, typer.Option("--app", help="Module that defines tasks; pkg.* for all of a package's. Repeatable.")
]
Preload = Annotated[bool | None, typer.Option("--preload/--no-preload", help="Import the app before forking.")]
Workers = Annotated[int | None, typer.Option("--workers", "-w", help="Processes.")]
Concurrency = Annotated[int | None, typer.Option("--concurrency", help="Tasks at a time in each worker.")]
Queues = Annotated[str | None, typer.Option("--queues", "-q", help="Comma-separated names; all queues by default.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of this daemon; the host name by default.")]
Grace = Annotated[float | None, typer.Option("--grace", help="Seconds that tasks have to finish at a stop.")]
LogLevel = Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error.")]
LogFormat = Annotated[str | None, typer.Option("--log-format", help="json, console, or auto.")]
LogFile = Annotated[Path | None, typer.Option("--log-file", help="Reopened at SIGUSR1; standard error by default.")]
WebHost = Annotated[str | None, typer.Option("--web-host", help="An address that is not loopback needs a token.")]
WebPort = Annotated[str | None, typer.Option("--web-port", help="0 for any free port, none for no web child.")]
Socket = Annotated[
    Path | None,
    typer.Option("--socket", envvar="TASKLIB_CONTROL_SOCKET", help="The daemon's control socket, if not the only one."),
]

_secrets: list[str] = []  # removed from the message at the end


def run() -> None:
    try:
        app()
    except Exception as error:
        if not isinstance(error, Exit) and not type(error).__module__.startswith("tasklib."):
            raise
        found = exit_for(error)
        print(f"tasklibd: {redactor(_secrets)(found.message)}", file=sys.stderr)  # noqa: T201 - the command's voice
        sys.exit(found.code)


@app.callback(invoke_without_command=True)
def version(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if show_version:
        from tasklib.version import __version__  # noqa: PLC0415 - the other commands start quickly without it

        typer.echo(__version__)
        raise typer.Exit


@app.command("run")
def run_daemon(
    *,
    config: ConfigFile = None, app_modules: App = None, preload: Preload = None, workers: Workers = None,
    concurrency: Concurrency = None, queues: Queues = None, name: Name = None, grace: Grace = None,
    log_level: LogLevel = None, log_format: LogFormat = None, log_file: LogFile = None, web_host: WebHost = None,
    web_port: WebPort = None,
) -> None:  # fmt: skip
    """Run workers, keeper and web until SIGTERM."""
    options = locals()
    settings = _settings(options)
    from tasklib_daemon import logs  # noqa: PLC0415 - the other commands start quickly without it
    from tasklib_daemon.supervisor import Supervisor  # noqa: PLC0415 - as above

    logs.configure(settings)
    raise typer.Exit(Supervisor(settings, reload=lambda: _settings(options)).run())


@app.command()
def check(
    *,
    config: ConfigFile = None, app_modules: App = None, preload: Preload = None, workers: Workers = None,
    concurrency: Concurrency = None, queues: Queues = None, name: Name = None, grace: Grace = None,
    log_level: LogLevel = None, log_format: LogFormat = None, log_file: LogFile = None, web_host: WebHost = None,
    web_port: WebPort = None,
) -> None:  # fmt: skip
    """Check that these settings and this application can run. Needs no database, and changes nothing."""
    settings = _settings(locals())
    from tasklib_daemon.import_check import check_import  # noqa: PLC0415 - as above

    tasks = check_import(settings)
    where = f"queues {', '.join(settings.queues)}" if settings.queues else "all queues"
    typer.echo(f"ok: {settings.workers} workers, {settings.concurrency} tasks each, {where}")
    typer.echo(f"tasks: {', '.join(tasks)}")


def _settings(options: dict[str, Any]) -> Settings:
    from tasklib.errors import InvalidConfig  # noqa: PLC0415 - as above
    from tasklib_daemon.settings import load, nested  # noqa: PLC0415 - as above

    names = {
        "app_modules": "app", "preload": "preload", "workers": "workers", "concurrency": "concurrency",
        "queues": "queues", "name": "name", "grace": "grace_seconds", "log_level": "log.level",
        "log_format": "log.format", "log_file": "log.file", "web_host": "web.host", "web_port": "web.port",
    }  # fmt: skip
    given = {name: options[option] for option, name in names.items() if options[option] is not None}
    settings = load(options["config"], os.environ, nested(given))
    _secrets.extend(settings.secrets())
    if not settings.app:
        raise InvalidConfig("app names no module: name one that defines tasks, e.g. --app shop.tasks")
    return settings


# --- asking a daemon that runs ---


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    socket: Socket = None,
    config: ConfigFile = None,
) -> None:
    """Show what the daemon does."""
    reply = control.ask(_find(socket, config), "status")
    told = {key: value for key, value in reply.items() if key != "ok"}
    typer.echo(json.dumps(told, indent=2) if as_json else "\n".join(describe(cast("Status", told))))


@app.command()
def pause(socket: Socket = None, config: ConfigFile = None) -> None:
    """Claim no more tasks until `resume`. Executing tasks go on."""
    control.ask(_find(socket, config), "pause")
    typer.echo("paused")


@app.command()
def resume(socket: Socket = None, config: ConfigFile = None) -> None:
    """Claim again after `pause`."""
    control.ask(_find(socket, config), "resume")
    typer.echo("resumed")


@app.command()
def drain(socket: Socket = None, config: ConfigFile = None) -> None:
    """Claim no more tasks, finish those that execute, then exit. Returns at once."""
    control.ask(_find(socket, config), "drain")
    typer.echo("draining")


@app.command()
def scale(
    workers: Annotated[int, typer.Argument(min=1, max=control.MOST_WORKERS, help="The new number of workers.")],
    socket: Socket = None,
    config: ConfigFile = None,
) -> None:
    """Change the number of workers until the daemon ends."""
    control.ask(_find(socket, config), "scale", workers=workers)
    typer.echo(f"scaling to {workers}")


def _find(socket: Path | None, config: Path | None) -> Path:
    """The socket named by the option, or by the settings file, or the only one on this host."""
    named = socket if socket is not None else _named_in(config) if config is not None else None
    return named if named is not None else control.find()


def _named_in(config: Path) -> Path | None:
    """Only these two settings are read: the others need not be valid to ask a daemon."""
    try:
        tables = tomllib.loads(config.read_text("utf-8"))
    except (OSError, ValueError):
        raise Exit(ExitCode.CONFIG, f"{config} cannot be read as TOML: see `tasklibd check`") from None
    if "control_socket" in tables:
        return Path(str(tables["control_socket"]))
    return Path(str(tables["runtime_directory"])) / "control.sock" if "runtime_directory" in tables else None
