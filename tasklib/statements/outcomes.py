"""Statements about executions: that a task runs, how far it is, and how it ended. Every one names the worker, and the
token of its claim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import to_json

from tasklib import arrays
from tasklib.sql import queries
from tasklib.statements.statement import Row, Statement, read_column

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime
    from uuid import UUID

    from tasklib.config import Config
    from tasklib.outcomes import HeldTask, Settlement


class Started(NamedTuple):
    """An execution that has begun, or is about to."""

    id: UUID
    token: int
    started_at: datetime
    is_contained: bool = False  # it has a process of its own
    fails_on_crash: bool = False  # as its function or its submit says


class Completions(NamedTuple):
    """Successes, by column."""

    ids: list[UUID]
    tokens: list[int]
    started: list[float]  # seconds since 1970
    finished: list[float]
    results: list[str | None]


class OutcomeStatements:
    def __init__(self, config: Config) -> None:
        self._outcomes = queries("outcomes", config.schema)

    def start(self, worker_id: str, started: Sequence[Started]) -> Statement[dict[UUID, bool]]:
        """For each task that is still the worker's: whether it was marked as running. A locked row is not marked."""
        given = [list(column) for column in zip(*started, strict=True)]
        return Statement(self._outcomes["start"], (worker_id, *given), dict)

    def note_progress(self, worker_id: str, said: Sequence[tuple[UUID, int, str]]) -> Statement[list[UUID]]:
        """The tasks whose report need not be sent again. A locked row is not among them."""
        given = [list(column) for column in zip(*said, strict=True)]
        return Statement(self._outcomes["note_progress"], (worker_id, *given), read_column)

    def settle(self, worker_id: str, settled: Iterable[str], claim_ids: Iterable[int] = ()) -> Statement[list[UUID]]:
        """`settled` are JSON objects, one for each task, as `settlement_json` writes them."""
        parameters = (worker_id, f"[{','.join(settled)}]", list(claim_ids))
        return Statement(self._outcomes["settle"], parameters, read_column)

    def complete(self, worker_id: str, completed: Completions, claim_ids: Iterable[int] = ()) -> Statement[list[UUID]]:
        """Plain successes."""
        claims = list(claim_ids)

        def as_bytes() -> list[bytes]:
            ids, tokens, started, finished, results = completed
            times = arrays.doubles(started), arrays.doubles(finished)
            return [
                worker_id.encode(), arrays.uuids(ids), arrays.bigints(tokens), *times, arrays.texts(results),
                arrays.bigints(claims),
            ]  # fmt: skip

        def read(rows: list[Row]) -> list[UUID]:
            return rows[0][0] if rows else completed.ids

        parameters = (worker_id, *completed, claims)
        return Statement(self._outcomes["complete"], parameters, read, as_bytes=as_bytes, is_binary=True)

    def written(self, worker_id: str, task_ids: Sequence[UUID]) -> Statement[list[tuple[UUID, int]]]:
        """The runs of this worker, with their tokens, whose end is written."""
        return Statement(self._outcomes["written"], (worker_id, list(task_ids)), list, is_change=False)

    def unlocked(self, task_ids: Sequence[UUID]) -> Statement[list[UUID]]:
        """Those of them whose rows no other session has locked."""
        return Statement(self._outcomes["unlocked"], (list(task_ids),), read_column)


def settlement_json(
    task: HeldTask,
    settlement: Settlement,
    *,
    started_at: datetime | None,
    finished_at: datetime,
    seen: str | None = None,
    progress: str | None = None,
) -> str:
    """One element of what `settle` takes. Values that are None or False are left out. `seen` is the state that the
    decision was made for: it guards writers that do not hold the task themselves.
    """
    problem = settlement.problem
    values: dict[str, Any] = {
        "id": task.id,
        "token": task.fencing_token,
        "state": settlement.state,
        "seen": seen,
        "began": settlement.began,
        "outcome": settlement.outcome,
        "due_at": settlement.due_at,
        "scheduled_at": settlement.scheduled_at,
        "started_at": started_at if settlement.began else None,
        "finished_at": finished_at,
        "error": problem and problem.text,
        "error_code": problem and problem.code,
        "error_message": problem and problem.message,
        "failed_reason": settlement.failed_reason,
        "is_retry": settlement.is_retry,
        "is_crash": settlement.is_crash,
        "is_strike": settlement.is_strike,
        "suspect": settlement.suspect,
    }
    head = to_json({key: value for key, value in values.items() if value or key == "began"}).decode()
    # These two are JSON already.
    for key, text in (("result", settlement.result), ("progress", progress)):
        head = head if text is None else f'{head[:-1]},"{key}":{text}}}'
    return head
