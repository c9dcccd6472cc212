"""A worker of this daemon has died: what it was executing runs again at once, and what it merely held loses nothing."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from uuid import UUID

Cause = Literal["crash", "hard_timeout", "cancelled", "hang", "memory", "recycled", "shutdown"]


class Executing(NamedTuple):
    task_id: UUID
    token: int
    seconds: float  # since it started


class Done(NamedTuple):
    """Its function has ended, and nobody knows whether that was written."""

    task_id: UUID
    token: int


@dataclass(frozen=True, slots=True)
class CrashReport:
    """What the supervisor knows of a worker that died: from `waitpid`, and from its page."""

    worker_id: str
    name: str
    hostname: str
    pid: int
    slot: int
    how: str
    cause: Cause
    guilty: UUID | None = None
    executing: tuple[Executing, ...] = ()
    done: tuple[Done, ...] = ()
    backends: tuple[int, ...] = ()
    died: float = field(default_factory=time.monotonic)

    def to_json(self) -> dict[str, Any]:
        """Of plain values: for a message."""
        return {
            "worker_id": self.worker_id,
            "name": self.name,
            "hostname": self.hostname,
            "pid": self.pid,
            "slot": self.slot,
            "how": self.how,
            "cause": self.cause,
            "guilty": None if self.guilty is None else str(self.guilty),
            "executing": [[str(each.task_id), each.token, each.seconds] for each in self.executing],
            "done": [[str(each.task_id), each.token] for each in self.done],
            "backends": list(self.backends),
            "died": self.died,
        }

    @classmethod
    def from_json(cls, given: dict[str, Any] | str) -> CrashReport:
        values = dict(json.loads(given) if isinstance(given, str) else given)
        guilty = values.pop("guilty", None)
        executing = tuple(Executing(UUID(id_), token, seconds) for id_, token, seconds in values.pop("executing", ()))
        done = tuple(Done(UUID(id_), token) for id_, token in values.pop("done", ()))
        backends = tuple(values.pop("backends", ()))
        return cls(
            **values,
            guilty=None if guilty is None else UUID(guilty),
            executing=executing,
            done=done,
            backends=backends,
        )
