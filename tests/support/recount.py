"""Compares what daemons have counted with the rows: every attempt once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.promtool import by_labels
from tests.support.raw_sql import literal

if TYPE_CHECKING:
    from tests.support.promtool import Series
    from tests.support.raw_sql import Conn

_ATTEMPTS = "from tasklib.task_attempts as attempt join tasklib.tasks as task on task.id = attempt.task_id"
RECOUNTS: dict[tuple[str, tuple[str, ...]], str] = {
    ("tasklib_tasks_finished_total", ("task", "queue", "outcome")): f"""
        select name, queue, lower(outcome), count(*) {_ATTEMPTS} group by 1, 2, 3""",
    ("tasklib_task_duration_seconds_count", ("task", "queue")): f"""
        select name, queue, count(*) {_ATTEMPTS} group by 1, 2""",
    ("tasklib_tasks_retried_total", ("task", "queue")): f"""
        select name, queue, count(*) {_ATTEMPTS} where will_retry and outcome in ('FAILED', 'TIMED_OUT')
         group by 1, 2""",
    ("tasklib_tasks_failed_total", ("task", "queue")): """
        select name, queue, count(*) from tasklib.tasks where state = 'failed' and completed_at is not null
         group by 1, 2""",
    ("tasklib_tasks_buried_total", ("task",)): """
        select name, count(*) from tasklib.tasks where state = 'buried' group by 1""",
}  # fmt: skip


def differences(conn: Conn, *daemons: Series) -> list[str]:
    """What the counters of all daemons say, and what the rows say."""
    found = []
    for (name, labels), query in RECOUNTS.items():
        rows = {tuple(row[:-1]): float(row[-1]) for row in conn.execute(literal(query))}
        counted: dict[tuple[str, ...], float] = {}
        for series in daemons:
            for key, number in by_labels(series, name, *labels).items():
                counted[key] = counted.get(key, 0.0) + number
        found += [
            f"{name}{key}: counted {counted.get(key, 0):g}, there are {rows.get(key, 0):g}"
            for key in sorted(rows.keys() | counted.keys())
            if rows.get(key, 0) != counted.get(key, 0)
        ]
    return found
