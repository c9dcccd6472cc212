"""The commands of `tasklib`, for people (tables) and for programs (`--json`).

The database is named by TASKLIB_DATABASE_URL, DATABASE_URL or libpq's PG* variables, never by an argument:
arguments are shown to every user of the machine by `ps`. Exit codes: 0 done, 1 refused or failed, 2 wrong usage;
those of `doctor` are what monitoring expects.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic_core import to_json
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from tasklib import migrate as migrations
from tasklib.client import Client
from tasklib.config import Config
from tasklib.doctor import (
    CHECKS,
    DEEP_CHECKS,
    EXIT_CODES,
    SECONDS,
    UNKNOWN_EXIT_CODE,
    Finding,
    Severity,
    examine,
    worst,
)
from tasklib.errors import InvalidArguments, InvalidConfig, TasklibError
from tasklib.options import RESERVED_PARAMETERS
from tasklib.record import Task, is_retrying
from tasklib.registry import default_registry, discover
from tasklib.states import State
from tasklib.strict_json import parse_json
from tasklib.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tasklib.statistics import QueueStatistics, TaskStatistics

app = typer.Typer(
    name="tasklib",
    help="Submit and inspect tasks. The database is the one that DATABASE_URL (or libpq's PG* variables) names.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="KEY=VALUE (text) or KEY:=JSON; may be repeated.")]
SEVERITY_STYLES = {Severity.OK: "green", Severity.NOTE: "", Severity.WARNING: "yellow", Severity.CRITICAL: "red"}
STATE_STYLES = {State.COMPLETED: "green", State.RUNNING: "cyan", State.FAILED: "red", State.BURIED: "red"}


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
        print(f"tasklib: {error}", file=sys.stderr)  # noqa: T201 - this is the command's voice
        sys.exit(1)


@app.command()
def migrate(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 if the schema is not up to date.")
    ] = False,
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL instead of running it.")] = False,
    pre: Annotated[bool, typer.Option("--pre", help="Only what may run before the new version is rolled out.")] = False,
) -> None:
    """Create tasklib's schema, or bring it to this version."""
    raise typer.Exit(migrations.run_command(check_only=check, print_sql=sql, pre=pre))


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
    values = _arguments(kwargs, arguments)
    if app_module is not None:
        discover([app_module])
    with Client(Config.from_environment()) as client:
        task_id = client.submit_task(
            name if app_module is None else default_registry.get(name),
            queue=queue,
            priority=priority,
            delay_seconds=delay,
            scheduled_at=_moment(scheduled_at),
            expires_at=_moment(expires_at),
            max_retries=max_retries,
            timeout_seconds=timeout,
            idempotency_key=idempotency_key,
            tags=_pairs(tag),
            **values,
        )
    typer.echo(_json({"id": task_id, "existed": task_id.existed}) if as_json else task_id)


@app.command()
def cancel(
    task_id: str,
    reason: Annotated[str | None, typer.Option(help="Kept with the task.")] = None,
) -> None:
    """Cancel a task: one that waits will not run, one that runs is asked to stop."""
    with Client(Config.from_environment()) as client:
        answer = client.cancel_task(task_id, reason)
    _answer(answer, f"task {task_id} does not exist, or is final already")


@app.command()
def retry(task_id: str) -> None:
    """Run a task again, now: one that is final, or that waits for its next attempt."""
    with Client(Config.from_environment()) as client:
        is_done = client.retry_task(task_id)
    _answer("retried" if is_done else None, f"task {task_id} does not exist, or is waiting or running already")


def _answer(word: str | None, otherwise: str) -> None:
    if word is None:
        typer.echo(f"tasklib: {otherwise}", err=True)
        raise typer.Exit(1)
    typer.echo(word)


@app.command("list")
def list_(
    state: Annotated[str | None, typer.Option(help=f"One of: {', '.join(State)}.")] = None,
    name: str | None = None,
    queue: str | None = None,
    tag: Tags = None,
    limit: int = 20,
    after: Annotated[str | None, typer.Option(help="The last id of the page before.")] = None,
    as_json: Json = False,
) -> None:
    """List tasks, newest first."""
    with Client(Config.from_environment()) as client:
        tasks = client.list_tasks(state, name, limit, queue=queue, tags=_pairs(tag) or None, after=after)
    if as_json:
        typer.echo(_json([task.to_dict() for task in tasks]))
        return
    _print(_tasks_table(tasks, now=datetime.now(UTC)))
    if len(tasks) == limit:
        typer.echo(f"next page: --after {tasks[-1].id}")


@app.command()
def show(task_id: str, as_json: Json = False) -> None:
    """Show everything about one task."""
    with Client(Config.from_environment()) as client:
        task = client.get_task(task_id)
    if task is None:
        raise TasklibError(f"there is no task {task_id}")
    if as_json:
        typer.echo(_json(task.to_dict()))
    else:
        _print(_task_table(task))


@app.command()
def stats(
    window: Annotated[float, typer.Option(help="Seconds to look back at what became of tasks.")] = 3600,
    as_json: Json = False,
) -> None:
    """Show how the queues are, and what became of tasks lately."""
    with Client(Config.from_environment()) as client:
        queues, tasks = client.queue_statistics(), client.task_statistics(window)
    if as_json:
        typer.echo(_json({"queues": [asdict(each) for each in queues], "tasks": [asdict(each) for each in tasks]}))
        return
    _print(
        _figures_table(
            queues, ("queue", "ready", "scheduled", "retrying", "claimed", "running", "oldest_ready_age_seconds")
        )
    )
    typer.echo(f"\nin the last {_duration(window)}:")
    _print(_figures_table(tasks, (
        "name", "attempts", "completed", "failed", "timed_out", "crashed", "per_second", "p50_seconds", "p95_seconds",
        "p95_wait_seconds",
    )))  # fmt: skip


def _figures_table(rows: Iterable[QueueStatistics | TaskStatistics], columns: Sequence[str]) -> Table:
    table = Table(*(column.replace("_", " ") for column in columns), box=None, header_style="bold")
    for row in rows:
        table.add_row(*(_figure(getattr(row, column)) for column in columns))
    return table


def _figure(value: str | float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


@app.command()
def doctor(
    as_json: Json = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that all of it may take.")] = SECONDS,
    skip: Annotated[list[str] | None, typer.Option(help="A check to leave out; may be repeated.")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Also what reads whole tables.")] = False,
) -> None:
    """Look at the database as a queue needs it: what is wrong, and what to do about it. Changes nothing.

    Exit codes: 0 all is well, 1 a warning, 2 something critical, 3 there is nothing to look at.
    """
    known = CHECKS | DEEP_CHECKS
    if unknown := [name for name in skip or () if name not in known]:
        raise typer.BadParameter(f"there is no check {', '.join(unknown)}; there are: {', '.join(known)}")
    with _progress() as tell:
        try:
            config = Config.from_environment()
            found = examine(config, seconds=timeout, skip=skip or (), deep=deep, on_check=tell)
        except InvalidConfig as error:
            typer.echo(f"UNKNOWN: {error}", err=True)
            raise typer.Exit(UNKNOWN_EXIT_CODE) from None
        except Exception as error:  # noqa: BLE001 - a bug of ours: Python's exit code for it would mean a warning
            typer.echo(f"UNKNOWN: {type(error).__name__}, which is a bug of tasklib", err=True)
            traceback.print_exc()
            raise typer.Exit(UNKNOWN_EXIT_CODE) from None
    severity = worst(found)
    findings = [each.to_dict() for each in found]
    told = {"severity": severity, "exit_code": EXIT_CODES[severity], "findings": findings}
    with _whoever_reads_it():
        typer.echo(_json(told) if as_json else _findings_text(found, severity))
    raise typer.Exit(EXIT_CODES[severity])


@contextlib.contextmanager
def _whoever_reads_it() -> Iterator[None]:
    """The exit code says what was found, also if nobody can be told: `tasklib doctor | head -1`, a full disk."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            typer.echo(f"tasklib: what was found cannot be written: {error.strerror}", err=True)
        nowhere = os.open(os.devnull, os.O_WRONLY)  # for what is still in a buffer, when Python ends
        os.dup2(nowhere, sys.stdout.fileno())


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """On a terminal; what is printed in the end goes elsewhere, and to monitoring."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("looking") as status:
        yield lambda check: status.update(f"looking at {check}")


def _findings_text(found: Sequence[Finding], severity: Severity) -> str:
    """The first line says it all: monitoring systems show no other. Then the worst first."""
    by_rank = sorted(found, key=lambda each: -each.severity.rank)
    counts = Counter(each.severity for each in by_rank)
    shown = ", ".join(f"{count} {each}{'s' * (count > 1 and each != Severity.OK)}" for each, count in counts.items())
    word = ("OK", "WARNING", "CRITICAL")[EXIT_CODES[severity]]
    first = f"{word}: {by_rank[0].check}: {_printable(by_rank[0].summary)}" if word != "OK" else word
    console = Console(soft_wrap=True, highlight=False)
    with console.capture() as text:
        console.print(Text(f"{first} ({shown})", style=SEVERITY_STYLES[severity]))
        for finding in by_rank:
            line = Text(f"{finding.severity:<9}", style=SEVERITY_STYLES[finding.severity])
            console.print(line + f"{finding.check:<15}{_printable(finding.summary)}")
            if finding.remedy:
                console.print(Text(f"{'':<24}-> {_printable(finding.remedy)}"))
    return text.get().removesuffix("\n")


def _tasks_table(tasks: Iterable[Task], *, now: datetime) -> Table:
    whole_id = Column("id", no_wrap=True, min_width=36)
    table = Table(
        whole_id, "name", "state", "queue", "priority", "age", "attempt", "error", box=None, header_style="bold"
    )
    for task in tasks:
        state = Text(_state_words(task, now), style=STATE_STYLES.get(task.state, ""))
        error = _printable((task.error or "").split("\n", 1)[0])[:60]
        age = _duration((now - task.created_at).total_seconds())
        cells: list[str | Text] = [
            str(task.id),
            task.name,
            state,
            task.queue,
            str(task.priority),
            age,
            str(task.attempt),
            Text(error),
        ]
        table.add_row(*cells)
    return table


def _task_table(task: Task) -> Table:
    table = Table(Column(), Column(overflow="fold"), box=None, show_header=False)
    for field, value in task.to_dict().items():
        if value is not None:
            shown = value if isinstance(value, str) else _json(value).strip('"')
            table.add_row(Text(field, style="bold"), Text("\n".join(map(_printable, shown.split("\n")))))
    return table


def _state_words(task: Task, now: datetime) -> str:
    due = task.next_retry_at if is_retrying(task) else task.scheduled_at if task.state == State.PENDING else None
    if due is not None and due > now:
        return f"{'retry' if is_retrying(task) else task.state} in {_duration((due - now).total_seconds())}"
    return str(task.state)


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.1f}{unit}"
    return f"{max(seconds, 0):.1f}s"


def _printable(text: str) -> str:
    """Stored text may hold terminal control codes: they are shown, not obeyed."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _print(table: Table) -> None:
    # A pipe has no width: cells must not be cut there, whatever the default of 80 columns says.
    console = Console()
    console.print(table) if console.is_terminal else Console(width=400).print(table)


def _json(value: Any) -> str:
    return to_json(value, bytes_mode="hex").decode()


def _moment(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a moment such as 2030-01-31T12:00:00+01:00") from None


def _arguments(kwargs: str | None, words: Iterable[str] | None) -> dict[str, Any]:
    whole, single = _object(kwargs), _pairs(words)
    if twice := sorted(whole.keys() & single.keys()):
        raise typer.BadParameter(f"{', '.join(twice)} is given twice")
    if options := sorted(RESERVED_PARAMETERS & (whole.keys() | single.keys())):
        raise typer.BadParameter(f"{', '.join(options)} is an option of submit, not an argument: see --help")
    return whole | single


def _object(text: str | None) -> dict[str, Any]:
    value = {} if text is None else parse_json(text, "--kwargs")
    if not isinstance(value, dict):
        raise InvalidArguments("--kwargs must be a JSON object")
    return value


def _pairs(words: Iterable[str] | None) -> dict[str, Any]:
    pairs = [_pair(word) for word in words or ()]
    found = dict(pairs)
    if len(found) < len(pairs):
        raise typer.BadParameter("a key is given twice")
    return found


def _pair(word: str) -> tuple[str, Any]:
    key, equals, value = word.partition("=")
    if not equals or not key.rstrip(":"):
        raise typer.BadParameter(f"{word!r} is not KEY=VALUE or KEY:=JSON")
    return (key[:-1], parse_json(value, key[:-1])) if key.endswith(":") else (key, value)
