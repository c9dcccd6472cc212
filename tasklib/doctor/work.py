"""Checks of the work: whether live workers serve all tasks, and whether tasks of dead workers are recovered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasklib.doctor.findings import Finding, Severity, Thresholds, age, critical, ok, some, warning
from tasklib.sql import in_schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasklib.doctor.probe import Probe


def check_workers(probe: Probe, thresholds: Thresholds) -> Iterator[Finding]:
    workers, waiting = probe.ask("live_workers"), probe.ask("unserved")
    yield ok(f"{len(workers)} alive, which serve the names of all waiting tasks")
    longest = max((seconds for *_, seconds in waiting), default=0.0)
    is_late = longest > thresholds.unserved_seconds
    shown = some([f"{name} in queue {queue} ({count:,})" for queue, name, count, _ in waiting])
    details = {
        "waiting": [
            {"queue": queue, "name": name, "count": count, "seconds": round(seconds)}
            for queue, name, count, seconds in waiting
        ]
    }
    if not workers:
        yield Finding(
            Severity.CRITICAL if is_late else Severity.NOTE,
            f"no worker is alive; {f'waiting for up to {age(longest)}: {shown}' if waiting else 'nothing waits'}",
            "start one: tasklibd run --app your.tasks; if it runs: tasklibd status, and its log",
            details,
        )
    elif waiting:
        yield Finding(
            Severity.WARNING if is_late else Severity.NOTE,
            f"no live worker serves tasks that have waited for up to {age(longest)}: {shown}",
            "let a worker of that queue import the modules that define them (app of tasklibd), or: tasklib cancel ID",
            details,
        )


def check_leases(probe: Probe, thresholds: Thresholds) -> Iterator[Finding]:
    yield ok("none is stuck")
    for worker_id, hostname, pid, seconds in probe.ask("undeclared", thresholds.stuck_seconds):
        yield critical(
            f"the lease of worker {worker_id} (pid {pid} on {hostname}) ran out {age(seconds)} ago, and its "
            f"tasks are not recovered",
            "any live worker or daemon recovers them within 20 s: start one, or see why its log says `database.lost`",
            worker_id=worker_id,
            seconds=round(seconds),
        )
    for worker_id, count, seconds in probe.ask("unrecovered", thresholds.stuck_seconds):
        yield critical(
            f"{count} tasks of worker {worker_id}, which is dead or has held them for too long, have waited for "
            f"{age(seconds)} to be recovered",
            "start a worker or daemon, if none is alive; else find the session that locks their rows: select pid, "
            "application_name, pg_blocking_pids(pid) from pg_stat_activity where pg_blocking_pids(pid) <> '{}';",
            worker_id=worker_id,
            tasks=count,
            seconds=round(seconds),
        )
    grace = thresholds.stuck_seconds + probe.config.timeout_delta_seconds
    for task_id, name, worker_id, seconds in probe.ask("overdue", grace):
        yield warning(
            f"task {task_id} ({name}) goes on {age(seconds)} after its timeout; its worker {worker_id} cannot stop it",
            "restart the process that this worker is embedded in; tasklibd would have ended it by itself",
            task_id=str(task_id),
            worker_id=worker_id,
            seconds=round(seconds),
        )


def check_unnoted_leases(probe: Probe, _thresholds: Thresholds) -> Iterator[Finding]:
    yield ok("a claim lists every leased task")
    for worker_id, count, example in probe.ask("unnoted"):
        yield critical(
            f"{count} tasks are leased to worker {worker_id}, but no claim lists them, so they would never be "
            f"recovered; one is {example}",
            in_schema(NOTE_LEASES, probe.config.schema),
            worker_id=worker_id,
            tasks=count,
        )


# With a claim, the reaper finds these tasks, and they run again when their lock has passed.
NOTE_LEASES = (
    "insert into tasklib.claims (worker_id, locked_until, task_ids) "
    "select worker_id, max(locked_until), array_agg(id) from tasklib.tasks as task "
    "where worker_id is not null and not exists (select from tasklib.claims as claim "
    "where claim.worker_id = task.worker_id and task.id = any(claim.task_ids)) group by worker_id;"
)
