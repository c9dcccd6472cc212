"""Writes statistics of finished attempts by the minute: a few rows every ten seconds, however many tasks there were.
Counts that a process had not written when it was killed are missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, LiteralString

from pydantic_core import to_json

from tasklib.log import log
from tasklib.runtime.bad_rows import first_line, send_apart
from tasklib.runtime.metrics import Amounts, merge
from tasklib.sql import queries
from tasklib.statements import Statement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import psycopg

    from tasklib.config import Config
    from tasklib.runtime.session import Session

EVERY_SECONDS = 10.0
LOOK_SECONDS = 1.0  # while there is nothing to write
_CRASHES = {"worker_failure": "crashed", "lease_lost": "crashed"}
_HISTOGRAMS = {"duration": ("durations", "seconds"), "wait": ("waits", "waited")}


class Rollups:
    def __init__(self, config: Config, session: Session, take: Callable[[], Amounts]) -> None:
        self._sql: LiteralString = queries("rollups", config.schema)["note"]
        self._session = session
        self._take = take
        self._unwritten: Amounts = {}

    def run_once(self) -> float | None:
        """Counts that cannot be written are kept for the next time."""
        merge(self._unwritten, self._take())
        rows = _rows(self._unwritten)
        if not rows:
            self._unwritten = {}
            return LOOK_SECONDS
        for _ in send_apart(rows, self._note, self._refuse):
            pass
        self._unwritten = {}
        return EVERY_SECONDS

    def write_last(self) -> None:
        """At the end of the process. An error only costs the statistics of the last seconds."""
        try:
            self.run_once()
        except Exception as error:  # noqa: BLE001 - see above
            log.warning("statistics.lost", error=first_line(error))

    def _note(self, rows: Sequence[dict[str, Any]]) -> None:
        self._session.run(Statement(self._sql, (to_json(rows).decode(),), lambda _: None))
        for row in rows:
            self._forget(row)  # at once: if a later part is sent again, this one must not be counted twice

    def _refuse(self, row: dict[str, Any], error: psycopg.Error) -> None:
        log.error("statistics.refused", task=row["name"], queue=row["queue"], error=first_line(error))
        self._forget(row)

    def _forget(self, row: dict[str, Any]) -> None:
        of_this = [key for key in self._unwritten if key[1:3] == (row["name"], row["queue"])]
        for key in of_this:
            del self._unwritten[key]


def _rows(amounts: Amounts) -> list[dict[str, Any]]:
    """One row for each task function and queue."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for (word, *labels), values in amounts.items():
        if word not in {"finished", "retried", *_HISTOGRAMS}:
            continue
        name, queue, *outcome = labels
        row = rows.setdefault((name, queue), {"name": name, "queue": queue})
        if word in _HISTOGRAMS:
            *buckets, total = values
            counts, summed = _HISTOGRAMS[word]
            row[counts], row[summed] = [int(each) for each in buckets], total
        else:
            column = _CRASHES.get(outcome[0], outcome[0]) if outcome else word
            row[column] = row.get(column, 0) + int(values[0])
    return [*rows.values()]
