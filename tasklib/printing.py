"""Prints the answers of the command line for people.

On a terminal, tables fit its width. In a pipe, each row is one line, however long, so that `grep` and `cut` find all of
it. Control characters in stored text are printed as escapes.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from pydantic_core import to_json

from tasklib.log import printable
from tasklib.record import Attempt, Task, is_failed, is_retrying
from tasklib.states import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from tasklib.doctor import Finding, Severity
    from tasklib.statistics import QueueStatistics, TaskStatistics

ID_CHARACTERS = 36
MAX_ERROR_CHARACTERS = 60  # in a list on a terminal
INDENT = "    "
_STATE_STYLES = {State.COMPLETED: "green", State.RUNNING: "cyan", State.FAILED: "red", State.BURIED: "red"}
_SEVERITY_STYLES = {"ok": "green", "warning": "yellow", "critical": "red"}
_QUEUE_COLUMNS = ("queue", "ready", "scheduled", "retrying", "claimed", "running", "oldest_ready_age_seconds")
_TASK_COLUMNS = (
    "name", "attempts", "completed", "failed", "timed_out", "crashed", "per_second", "p50_seconds", "p95_seconds",
    "p95_wait_seconds",
)  # fmt: skip


class Cell(NamedTuple):
    text: str
    style: str = ""


def print_tasks(tasks: Iterable[Task], *, now: datetime) -> None:
    most = MAX_ERROR_CHARACTERS if sys.stdout.isatty() else None
    rows = [
        [
            Cell(str(task.id)),
            Cell(task.name),
            Cell(state_words(task, now), _STATE_STYLES.get(task.state, "")),
            Cell(task.queue),
            Cell(str(task.priority)),
            Cell(duration((now - task.created_at).total_seconds())),
            Cell(str(task.attempt)),
            Cell(printable((task.error or "").split("\n", 1)[0])[:most]),
        ]
        for task in tasks
    ]
    _print_table(["id", "name", "state", "queue", "priority", "age", "attempt", "error"], rows)


def print_task(task: Task, attempts: Sequence[Attempt]) -> None:
    """Print every column that has a value, then every attempt with its traceback. The last attempt's traceback is also
    the task's error: it is printed once.
    """
    values = {name: value for name, value in task.to_dict().items() if value is not None}
    if task.error and any(attempt.error == task.error for attempt in attempts):
        values["error"] = task.error.split("\n", 1)[0]
    for name, value in values.items():
        first, *rest = (value if isinstance(value, str) else as_json(value).strip('"')).split("\n")
        typer.echo(f"{_styled(f'{name:<16}', bold=True)} {printable(first)}")
        _print_indented(rest)
    for attempt in attempts:
        typer.echo(f"\n{_styled(_headline(attempt), bold=True)}")
        _print_indented((attempt.error or attempt.error_message or attempt.failed_reason or "").splitlines())


def _headline(attempt: Attempt) -> str:
    took = duration((attempt.finished_at - attempt.started_at).total_seconds())
    follows = "; the task went on" if attempt.will_retry else ""
    where = f"on {printable(attempt.worker_id)}"
    began = attempt.started_at.isoformat(sep=" ", timespec="milliseconds")
    return f"attempt {attempt.attempt}: {attempt.outcome} after {took}, begun {began} {where}{follows}"


def _print_indented(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(INDENT + printable(line))


def print_statistics(queues: Iterable[QueueStatistics], tasks: Iterable[TaskStatistics], window_seconds: float) -> None:
    _print_figures(queues, _QUEUE_COLUMNS)
    typer.echo(f"\nin the last {duration(window_seconds)}:")
    _print_figures(tasks, _TASK_COLUMNS)


def _print_figures(rows: Iterable[QueueStatistics | TaskStatistics], columns: Sequence[str]) -> None:
    cells = [[Cell(_figure(getattr(row, column))) for column in columns] for row in rows]
    _print_table([column.replace("_", " ") for column in columns], cells)


def _figure(value: str | float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def findings_text(found: Sequence[Finding], severity: Severity, word: str) -> str:
    """The first line is a summary, since monitoring systems show no other. The worst findings come next."""
    by_rank = sorted(found, key=lambda each: -each.severity.rank)
    counts = Counter(each.severity for each in by_rank)
    shown = ", ".join(f"{count} {each}{'s' * (count > 1 and each != 'ok')}" for each, count in counts.items())
    first = f"{word}: {by_rank[0].check}: {printable(by_rank[0].summary)}" if word != "OK" else word
    lines = [_colored(f"{first} ({shown})", severity)]
    for finding in by_rank:
        level = _colored(f"{finding.severity:<9}", finding.severity)
        lines.append(f"{level}{finding.check:<15}{printable(finding.summary)}")
        if finding.remedy:
            lines.append(f"{'':<24}-> {printable(finding.remedy)}")
    return "\n".join(lines)


def _colored(text: str, severity: Severity) -> str:
    return _styled(text, fg=_SEVERITY_STYLES.get(severity))


def _styled(text: str, **style: Any) -> str:
    """`typer.echo` removes the codes again if the output is not a terminal."""
    return text if os.environ.get("NO_COLOR") else typer.style(text, **style)


def state_words(task: Task, now: datetime) -> str:
    """The state, and whether a failed task gave up or will be retried."""
    if is_failed(task):
        return "failed (gave up)"
    if is_retrying(task):
        due = task.next_retry_at
        return f"failed (retry in {_until(due, now)})" if due is not None and due > now else "failed (retry due)"
    if task.state == State.PENDING and task.scheduled_at > now:
        return f"pending in {_until(task.scheduled_at, now)}"
    return str(task.state)


def _until(moment: datetime, now: datetime) -> str:
    return duration((moment - now).total_seconds())


def duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.1f}{unit}"
    return f"{max(seconds, 0):.1f}s"


def as_json(value: Any) -> str:
    return to_json(value, bytes_mode="hex").decode()


def _print_table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    _print_for_terminal(header, rows) if sys.stdout.isatty() else _print_for_pipe(header, rows)


def _print_for_pipe(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    lines = [list(header), *([cell.text for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _print_for_terminal(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Cells wrap on a narrow terminal. Ids stay whole, so that they can be copied."""
    from rich.console import Console  # noqa: PLC0415 - a pipe needs none of it
    from rich.table import Column, Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    columns = [Column("id", no_wrap=True, min_width=ID_CHARACTERS) if name == "id" else Column(name) for name in header]
    table = Table(*columns, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(Text(cell.text, style=cell.style) for cell in row))
    Console().print(table)
