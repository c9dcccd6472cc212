"""Judges what executed of queues with policies, by what the bodies of tasks have journaled outside the database. Pure.

All times are CLOCK_MONOTONIC, which all processes of a host share. A body counts from its first line to its last, or to
the death of its worker. So it counts for less than the time in which it held a permit, and never for more.
"""

from __future__ import annotations

import bisect
import collections
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

Value = TypeVar("Value")

KNOWN_SECONDS = 1.2  # after a change was committed, every worker obeys it


@dataclass(frozen=True)
class Body:
    task_id: str
    queue: str
    worker_id: str
    decided: float  # its worker let it start
    began: float  # its first line
    ended: float


@dataclass
class Timeline(Generic[Value]):
    """What was set, in order: when it was sent, when the commit was confirmed, and what."""

    changes: list[tuple[float, float, Value]] = field(default_factory=list)

    def note(self, sent: float, confirmed: float, value: Value) -> None:
        self.changes.append((sent, confirmed, value))

    def in_force(self, since: float, until: float) -> list[Value]:
        """All that may have been in force at some moment of that time."""
        return [value for start, end, value in self.periods() if start <= until and end >= since]

    def periods(self) -> Iterable[tuple[float, float, Value]]:
        """The longest time for which each may have been in force."""
        ends = [*(confirmed for _, confirmed, _ in self.changes[1:]), math.inf]
        return ((sent, end, value) for (sent, _, value), end in zip(self.changes, ends, strict=True))

    def certain_periods(self) -> Iterable[tuple[float, float, Value]]:
        """The shortest time for which each was in force."""
        ends = [*(sent for sent, _, _ in self.changes[1:]), math.inf]
        return ((confirmed, end, value) for (_, confirmed, value), end in zip(self.changes, ends, strict=True))


def read_bodies(lines: Iterable[str], deaths: Mapping[int, float], pids: Mapping[str, int]) -> tuple[list[Body], int]:
    """Also the number of bodies whose end nobody has seen; they count as if they had ended at once. `deaths` is by pid,
    and `pids` is by worker: an isolated task has a pid of its own.
    """
    began: dict[tuple[str, int, int], dict[str, object]] = {}
    ends: dict[tuple[str, int, int], float] = {}
    died = dict(deaths)
    for line in lines:
        said = json.loads(line)
        key = (said["task_id"], said["token"], said["pid"])
        if said["event"] == "began":
            began[key] = said
        else:
            ends[key] = said["monotonic"]
        if said["event"] == "crashed":
            died[said["pid"]] = said["monotonic"]
    bodies, unknown = [], 0
    for key, said in began.items():
        start, worker_id = float(str(said["monotonic"])), str(said["worker_id"])
        end = min(ends.get(key, math.inf), died.get(pids.get(worker_id, key[2]), math.inf))
        if end == math.inf:
            unknown, end = unknown + 1, start
        decided = min(float(str(said["started"])), start)
        bodies.append(Body(key[0], str(said["queue"]), worker_id, decided, start, max(end, start)))
    return sorted(bodies, key=lambda body: body.began), unknown


def executing_at_starts(bodies: Sequence[Body]) -> Iterable[tuple[Body, int]]:
    """Each body with how many executed at its first line, itself included. They are sorted by that."""
    ends: list[float] = []
    for body in bodies:
        del ends[: bisect.bisect_right(ends, body.began)]
        bisect.insort(ends, body.ended)
        yield body, len(ends)


def over_cap(
    bodies: Sequence[Body], caps: Timeline[int | None], group: Callable[[Body], Hashable] = lambda _: None
) -> list[str]:
    """Starts while the cap was used up. What ran when a cap was lowered goes on, and nothing starts beside it."""
    groups: dict[Hashable, list[Body]] = collections.defaultdict(list)
    for body in bodies:
        groups[group(body)].append(body)
    found = []
    for each in groups.values():
        for body, executing in executing_at_starts(each):
            allowed = most(caps.in_force(body.decided - KNOWN_SECONDS, body.began))
            if executing > allowed:
                found.append(f"{body.task_id} was number {executing} at {body.began:.3f}, and {allowed:g} were allowed")
    return found


def most(caps: Iterable[int | None]) -> float:
    return max((math.inf if cap is None else cap for cap in caps), default=math.inf)


def started_while_paused(bodies: Sequence[Body], pauses: Timeline[bool]) -> list[str]:
    return [
        f"{body.task_id} started {body.decided - confirmed:.3f} s after its queue was paused"
        for confirmed, end, is_paused in pauses.certain_periods()
        if is_paused
        for body in bodies
        if confirmed + KNOWN_SECONDS < body.decided < end
    ]


def over_rate(bodies: Sequence[Body], rates: Timeline[int | None], rate_seconds: float) -> list[str]:
    """Periods with more starts than any rate that was in force then, or in the period before."""
    starts = sorted(body.decided for body in bodies)
    found = []
    first = 0
    for last, until in enumerate(starts):
        while starts[first] <= until - rate_seconds:
            first += 1
        number = last - first + 1
        allowed = most(rates.in_force(until - 2 * rate_seconds - KNOWN_SECONDS, until))
        if number > allowed:
            found.append(f"{number} starts in the {rate_seconds:g} s before {until:.3f}, and {allowed:g} were allowed")
    return found


def used_share(bodies: Sequence[Body], cap: int, since: float, until: float) -> float:
    """The share of the cap that executed, over time."""
    busy = sum(max(min(body.ended, until) - max(body.began, since), 0.0) for body in bodies)
    return busy / (cap * (until - since))
