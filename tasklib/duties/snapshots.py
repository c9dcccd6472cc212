"""Writes snapshots of a daemon's workers for charts: one row for each worker, every few seconds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasklib.log import log
from tasklib.runtime.bad_rows import first_line, send_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    import psycopg

    from tasklib.duties.statements import KeeperStatements
    from tasklib.runtime.session import Session

_MEGABYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class WorkerState:
    worker_id: str
    hostname: str
    pid: int
    tasks_running: int
    tasks_claimed: int
    memory_bytes: int | None = None
    cpu_percent: float | None = None
    started_at: datetime | None = None
    processes: int = 1

    def to_row(self) -> dict[str, Any]:
        memory, total = self.memory_bytes, _memory_of_host()
        return {
            "worker_id": self.worker_id,
            "hostname": self.hostname,
            "pid": self.pid,
            "processes": self.processes,
            "tasks_running": self.tasks_running,
            "tasks_claimed": self.tasks_claimed,
            "memory_usage_mb": None if memory is None else round(memory / _MEGABYTE, 3),
            "memory_percent": None if memory is None or total is None else round(100 * memory / total, 3),
            "cpu_percent": self.cpu_percent,
            "worker_started_at": self.started_at,
        }


@dataclass(frozen=True, slots=True)
class ClaimSettings:
    """The settings that all workers of one daemon share."""

    queues: Sequence[str] | None
    max_claim_batch: int
    max_claim_per_worker: int | None  # None: it depends on how fast its tasks run
    recovery_config: Mapping[str, Any]


class Snapshots:
    def __init__(
        self,
        session: Session,
        statements: KeeperStatements,
        claim_settings: ClaimSettings,
        *,
        take: Callable[[], Sequence[WorkerState]],
        every_seconds: float = 5.0,
    ) -> None:
        self._session = session
        self._statements = statements
        self._claim_settings = claim_settings
        self._take = take
        self._every_seconds = every_seconds

    def run_once(self) -> float | None:
        for _ in send_apart([state.to_row() for state in self._take()], self._note, _tell_refused):
            pass
        return self._every_seconds

    def _note(self, states: Sequence[Mapping[str, Any]]) -> None:
        same = self._claim_settings
        self._session.run(
            self._statements.note_states(
                states,
                queues=same.queues,
                max_claim_batch=same.max_claim_batch,
                max_claim_per_worker=same.max_claim_per_worker,
                recovery_config=same.recovery_config,
            )
        )


def _tell_refused(state: Mapping[str, Any], error: psycopg.Error) -> None:
    log.error("snapshot.refused", worker_id=state["worker_id"], error=first_line(error))


def _memory_of_host() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on every system
        return None
