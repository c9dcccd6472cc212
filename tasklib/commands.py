"""The commands of `tasklib`, for people (tables) and for programs (`--json`).

TASKLIB_DATABASE_URL, DATABASE_URL or libpq's PG* variables name the database. No argument does, since `ps` shows the
arguments to every user of the machine. Exit codes: 0 done, 1 refused or failed, 2 wrong usage. `doctor` has the exit
codes that monitoring expects.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from tasklib.command_line import Json, open_client, print_answer, read_json, read_moment, read_pairs
from tasklib.errors import (
    DatabaseError,
    InvalidConfig,
    InvalidOptions,
    InvalidTaskDefinition,
    TasklibError,
)
from tasklib.queue_commands import cluster_app, queue_app
from tasklib.states import State
from tasklib.version import __version__

# Each command imports what it needs, and `--help` nothing: neither shell completion nor help should wait for a database
# driver.
# ruff: noqa: PLC0415

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tasklib.client import Client
    from tasklib.record import Attempt

app = typer.Typer(
    name="tasklib",
    help="Submit and inspect tasks. The database is the one that DATABASE_URL (or libpq's PG* variables) names.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(queue_app)
app.add_typer(cluster_app)

Tags = Annotated[list[str] | None, typer.Option("--tag", help="KEY=VALUE (text) or KEY:=JSON; may be repeated.")]
TaskIdArgument = Annotated[str, typer.Argument(metavar="TASK_ID", help="The id, or a beginning that no other id has.")]
DOCTOR_SECONDS = 30.0  # a test compares it with the doctor's own
NO_RIGHT = "42501"


@app.callback(invoke_without_command=True)
def version(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if show_version:
        typer.echo(__version__)
        raise typer.Exit


def run() -> None:
    try:
        app()
    except TasklibError as error:
        print(f"tasklib: {error}", file=sys.stderr)  # noqa: T201 - the command's own error
        sys.exit(2 if isinstance(error, InvalidOptions) else 1)


@app.command()
def migrate(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 if the schema is not up to date.")
    ] = False,
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL instead of running it.")] = False,
    pre: Annotated[bool, typer.Option("--pre", help="Only what may run before the new version is rolled out.")] = False,
) -> None:
    """Create tasklib's schema, or bring it to this version."""
    from tasklib import migrate as migrations

    raise typer.Exit(migrations.run_command(None, sys.stdout.write, check_only=check, print_sql=sql, pre=pre))


@app.command()
def submit(
    name: Annotated[str, typer.Argument(help="The task's name.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE (text) or KEY:=JSON.")] = None,
    kwargs: Annotated[str | None, typer.Option(help="All arguments as one JSON object.")] = None,
    app_module: Annotated[
        str | None,
        typer.Option("--app", envvar="TASKLIB_APP", help="Module that defines the task: checks its arguments."),
    ] = None,
    queue: str | None = None,
    priority: Annotated[int | None, typer.Option(help="Higher runs first.")] = None,
    delay: Annotated[float, typer.Option(help="Seconds to wait before it may run.")] = 0,
    scheduled_at: Annotated[str | None, typer.Option(help="Not before this moment: 2030-01-31T12:00:00+01:00.")] = None,
    expires_at: Annotated[str | None, typer.Option(help="Not run at all if not started by then.")] = None,
    max_retries: int | None = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds that one attempt may take.")] = None,
    idempotency_key: str | None = None,
    tag: Tags = None,
    as_json: Json = False,
) -> None:
    """Submit one task."""
    from tasklib.registry import default_registry, discover

    _check_name(name)
    values = _arguments(kwargs, arguments)
    if app_module is not None:
        discover([app_module])
    with open_client() as client:
        task_id = client.submit_task(
            name if app_module is None else default_registry.get(name),
            queue=queue,
            priority=priority,
            delay_seconds=delay,
            scheduled_at=read_moment(scheduled_at),
            expires_at=read_moment(expires_at),
            max_retries=max_retries,
            timeout_seconds=timeout,
            idempotency_key=idempotency_key,
            tags=read_pairs(tag),
            **values,
        )
    typer.echo(f'{{"id":"{task_id}","existed":{str(task_id.existed).lower()}}}' if as_json else task_id)


@app.command()
def cancel(
    task_id: TaskIdArgument,
    reason: Annotated[str | None, typer.Option(help="Kept with the task.")] = None,
) -> None:
    """Cancel a task: one that waits will not run, one that runs is asked to stop."""
    with open_client() as client:
        answer = client.cancel_task(_whole_id(client, task_id), reason)
    print_answer(answer, f"task {task_id} does not exist, or is final already")


@app.command()
def retry(task_id: TaskIdArgument) -> None:
    """Run a task again, now: one that is final, or that waits for its next attempt."""
    with open_client() as client:
        is_done = client.retry_task(_whole_id(client, task_id))
    print_answer("retried" if is_done else None, f"task {task_id} does not exist, or is waiting or running already")


@app.command("list")
def list_(
    state: Annotated[str | None, typer.Option(help=f"One of: {', '.join(State)}.")] = None,
    name: str | None = None,
    queue: str | None = None,
    tag: Tags = None,
    limit: int = 20,
    after: Annotated[str | None, typer.Option(help="The last id of the page before.")] = None,
    final: Annotated[
        bool | None,
        typer.Option(
            "--final/--retrying", help="Only final tasks; or only failed ones that wait for their next attempt."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List tasks, newest first."""
    from tasklib import printing

    if final is False:
        state = _failed(state)
    with open_client() as client:
        last = None if after is None else _whole_id(client, after)
        tasks = client.list_tasks(
            state, name, limit, queue=queue, tags=read_pairs(tag) or None, after=last, final=final
        )
    if as_json:
        typer.echo(printing.as_json([task.to_dict() for task in tasks]))
        return
    printing.print_tasks(tasks, now=datetime.now(UTC))
    if len(tasks) == limit:
        typer.echo(f"next page: --after {tasks[-1].id}")


def _failed(state: str | None) -> str:
    if state not in (None, State.FAILED):
        raise typer.BadParameter(f"--retrying lists failed tasks: it cannot be combined with --state {state}")
    return State.FAILED


@app.command()
def show(task_id: TaskIdArgument, as_json: Json = False) -> None:
    """Show one task, and every attempt with its traceback. Usual values are left out; --json has every column."""
    from tasklib import printing

    with open_client() as client:
        whole_id = _whole_id(client, task_id)
        task = client.get_task(whole_id)
        attempts = _attempts(client, whole_id)
    if task is None:
        raise TasklibError(f"there is no task {task_id}")
    if as_json:
        shown = None if attempts is None else [each.to_dict() for each in attempts]
        typer.echo(printing.as_json({**task.to_dict(), "attempts": shown}))
    else:
        printing.print_task(task, attempts or [], now=datetime.now(UTC))


def _attempts(client: Client, task_id: UUID) -> list[Attempt] | None:
    """None: the role may read tasks, but not their attempts."""
    try:
        return client.get_attempts(task_id)
    except DatabaseError as error:
        if error.sqlstate != NO_RIGHT:
            raise
        schema = client.config.schema
        typer.echo(f"tasklib: attempts are not shown: grant select on {schema}.task_attempts to this role", err=True)
        return None


def _whole_id(client: Client, text: str) -> UUID:
    """Find the one id that begins with the text, as a range of the primary key."""
    from tasklib.statements import Statements

    digits = text.strip().lower().replace("-", "")
    if not digits or len(digits) > 32 or not set(digits) <= set("0123456789abcdef"):  # noqa: PLR2004 - of a UUID
        raise typer.BadParameter(f"{text!r} is not a task id, nor the beginning of one")
    first, last = UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))
    if first == last:
        return first
    found = client.database.run(Statements(client.config).ids_between(first, last))[0]
    if not found:
        raise TasklibError(f"there is no task whose id begins with {text}")
    if len(found) > 1:
        raise InvalidOptions(f"several ids begin with {text}, such as {', '.join(map(str, found))}. Give more of it")
    return found[0]


@app.command()
def stats(
    window: Annotated[float, typer.Option(help="How many seconds the statistics of tasks cover.")] = 3600,
    as_json: Json = False,
) -> None:
    """Show the state of the queues, and the outcomes of recent tasks."""
    from tasklib import printing

    with open_client() as client:
        queues, tasks = client.queue_statistics(), client.task_statistics(window)
    if as_json:
        shown = {"queues": [asdict(each) for each in queues], "tasks": [asdict(each) for each in tasks]}
        typer.echo(printing.as_json(shown))
    else:
        printing.print_statistics(queues, tasks, window)


@app.command()
def doctor(
    as_json: Json = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that all of it may take.")] = DOCTOR_SECONDS,
    skip: Annotated[list[str] | None, typer.Option(help="A check to leave out; may be repeated.")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Also run the checks that read whole tables.")] = False,
) -> None:
    """Check whether the database suits a queue: what is wrong, and what to do about it. Changes nothing.

    Exit codes: 0 all is well, 1 a warning, 2 something critical, 3 there is nothing to look at.
    """
    from tasklib.config import Config
    from tasklib.doctor import CHECKS, DEEP_CHECKS, EXIT_CODES, UNKNOWN_EXIT_CODE, run_checks, worst
    from tasklib.printing import as_json as to_json
    from tasklib.printing import findings_text

    known = CHECKS | DEEP_CHECKS
    if unknown := [name for name in skip or () if name not in known]:
        raise typer.BadParameter(f"there is no check {', '.join(unknown)}; there are: {', '.join(known)}")
    with _progress() as tell:
        try:
            config = Config.from_environment()
            found = run_checks(config, seconds=timeout, skip=skip or (), deep=deep, on_check=tell)
        except InvalidConfig as error:
            typer.echo(f"UNKNOWN: {error}", err=True)
            raise typer.Exit(UNKNOWN_EXIT_CODE) from None
        except Exception as error:  # noqa: BLE001 - a bug of ours; Python's exit code 1 would mean a warning
            typer.echo(f"UNKNOWN: {type(error).__name__}, which is a bug of tasklib", err=True)
            traceback.print_exc()
            raise typer.Exit(UNKNOWN_EXIT_CODE) from None
    severity = worst(found)
    findings = [each.to_dict() for each in found]
    shown = {"severity": severity, "exit_code": EXIT_CODES[severity], "findings": findings}
    word = ("OK", "WARNING", "CRITICAL")[EXIT_CODES[severity]]
    with _ignoring_closed_output():
        typer.echo(to_json(shown) if as_json else findings_text(found, severity, word))
    raise typer.Exit(EXIT_CODES[severity])


@contextlib.contextmanager
def _ignoring_closed_output() -> Iterator[None]:
    """Keep the exit code if the output cannot be written: `tasklib doctor | head -1`, a full disk."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            typer.echo(f"tasklib: the findings cannot be written: {error.strerror}", err=True)
        nowhere = os.open(os.devnull, os.O_WRONLY)  # takes what Python flushes when it ends
        os.dup2(nowhere, sys.stdout.fileno())


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show on a terminal which check runs. It goes to stderr: stdout is for the findings."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("looking") as status:
        yield lambda check: status.update(f"looking at {check}")


def _arguments(kwargs: str | None, words: Iterable[str] | None) -> dict[str, Any]:
    whole, single = _object(kwargs), read_pairs(words)
    if twice := sorted(whole.keys() & single.keys()):
        raise typer.BadParameter(f"{', '.join(twice)} is given twice")
    from tasklib.options import RESERVED_PARAMETERS

    if options := sorted(RESERVED_PARAMETERS & (whole.keys() | single.keys())):
        raise typer.BadParameter(f"{', '.join(options)} is an option of submit, not an argument: see --help")
    return whole | single


def _object(text: str | None) -> dict[str, Any]:
    value = {} if text is None else read_json(text, "--kwargs")
    if not isinstance(value, dict):
        raise typer.BadParameter("--kwargs must be a JSON object")
    return value


def _check_name(name: str) -> None:
    from tasklib.names import check_task_name

    try:
        check_task_name(name)
    except InvalidTaskDefinition as error:
        raise typer.BadParameter(str(error).removesuffix(' Give one with @task(name="...").')) from None
