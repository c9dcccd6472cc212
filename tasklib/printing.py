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
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from tasklib.doctor import Finding, Severity
    from tasklib.queues import Queue
    from tasklib.statistics import QueueStatistics, TaskStatistics

ID_CHARACTERS = 36
MAX_ERROR_CHARACTERS = 60  # in a list on a terminal
INDENT = "    "
SPARE_COLUMNS = ("priority", "age", "attempt")  # of a list: they are left out first on a narrow terminal
# Of one task: what is printed first, then its times; values that tell nothing; and columns for tasklib's own use.
FIRST = (
    "id", "name", "state", "queue", "args", "kwargs", "result", "progress", "error", "error_code", "attempt",
    "retry_count", "max_retries", "worker_id",
)  # fmt: skip
TIMES = (
    "created_at", "scheduled_at", "due_at", "next_retry_at", "expires_at", "claimed_at", "started_at", "locked_until",
    "cancel_asked_at", "completed_at",
)  # fmt: skip
USUAL: dict[str, Any] = {
    "args": {}, "tags": {}, "priority": 0, "retry_count": 0, "crash_count": 0, "strikes": 0, "suspect": False,
    "store_result": True, "pending_parents": 0,
}  # fmt: skip
INTERNAL = frozenset({"fencing_token", "payload_digest"})
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


def print_task(task: Task, attempts: Sequence[Attempt], *, now: datetime) -> None:
    """Print what the task is and what became of it, then its times, then what is unusual about it, then every attempt
    with its traceback. The last attempt's traceback is also the task's error: it is printed once.
    """
    values = {name: value for name, value in task.to_dict().items() if value is not None and name not in INTERNAL}
    values = {name: value for name, value in values.items() if name not in USUAL or value != USUAL[name]}
    values["state"] = state_words(task, now)
    if task.state != State.PENDING:
        del values["ready"]
    if task.error and any(attempt.error == task.error for attempt in attempts):
        values["error"] = task.error.split("\n", 1)[0]
    shown = [{name: values.pop(name) for name in names if name in values} for names in (FIRST, TIMES)]
    for number, block in enumerate(block for block in (*shown, values) if block):
        if number:
            typer.echo()
        print_values(block)
    for attempt in attempts:
        typer.echo(f"\n{_styled(_headline(attempt), bold=True)}")
        _print_indented((attempt.error or attempt.error_message or attempt.failed_reason or "").splitlines())


def print_values(values: Mapping[str, Any], width: int = 16) -> None:
    """One line for each name that has a value; further lines of a text are indented."""
    for name, value in values.items():
        if value is not None:
            first, *rest = (value if isinstance(value, str) else as_json(value).strip('"')).split("\n")
            typer.echo(f"{_styled(f'{name:<{width}}', bold=True)} {printable(first)}")
            _print_indented(rest)


def print_queues(queues: Iterable[Queue]) -> None:
    rows = [
        [
            Cell(queue.name),
            Cell(queue_words(queue), "yellow" if queue.is_paused or queue.breaker_state == "open" else ""),
            Cell(_figure(queue.max_running)),
            Cell(f"{queue.permits_in_use} in {queue.permit_holders}" if queue.permit_holders else "-"),
            Cell(_figure(queue.max_per_worker)),
            Cell("-" if queue.rate_limit is None else f"{queue.rate_limit} in {queue.rate_seconds:g}s"),
            Cell(str(queue.rank)),
            Cell(f"{queue.weight:g}"),
        ]
        for queue in queues
    ]
    _print_table(["queue", "state", "max running", "permits", "per worker", "rate", "rank", "weight"], rows)


def queue_words(queue: Queue) -> str:
    """Whether it is paused, by whom and why, and whether its breaker stops it."""
    words = []
    if queue.is_paused:
        until = (
            "" if queue.paused_until is None else f" until {queue.paused_until.isoformat(sep=' ', timespec='seconds')}"
        )
        reason = f": {queue.pause_reason}" if queue.pause_reason else ""
        words.append(printable(f"paused{until} by {queue.paused_by}{reason}"))
    if queue.breaker_state not in (None, "closed"):
        words.append(f"breaker {queue.breaker_state.replace('_', ' ')}")
    return ", ".join(words) or "runs"


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

    if header[-1] == "error" and _width(header, rows) > Console().width:
        _print_narrow(header, rows, Console().width)
        return
    columns = [Column("id", no_wrap=True, min_width=ID_CHARACTERS) if name == "id" else Column(name) for name in header]
    table = Table(*columns, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(Text(cell.text, style=cell.style) for cell in row))
    Console().print(table)


def _print_narrow(header: Sequence[str], rows: Sequence[Sequence[Cell]], width: int) -> None:
    """Each error in a line of its own, and as many columns as fit."""
    errors = [row[-1].text for row in rows]
    names, cells = list(header[:-1]), [list(row[:-1]) for row in rows]
    for spare in SPARE_COLUMNS:
        if _width(names, cells) > width:
            place = names.index(spare)
            del names[place]
            for row in cells:
                del row[place]
    widths = [
        max(map(len, column)) for column in zip(names, *([cell.text for cell in row] for row in cells), strict=True)
    ]
    typer.echo(_styled("  ".join(name.ljust(size) for name, size in zip(names, widths, strict=True)), bold=True))
    for row, error in zip(cells, errors, strict=True):
        padded = (_styled(cell.text.ljust(size), fg=cell.style or None) for cell, size in zip(row, widths, strict=True))
        typer.echo("  ".join(padded))
        _print_indented([error[: width - len(INDENT)]] if error else [])


def _width(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> int:
    """With a gap of two between columns, and cells that do not wrap."""
    columns = zip(header, *([cell.text for cell in row] for row in rows), strict=True)
    return sum(max(map(len, column)) + 2 for column in columns)
