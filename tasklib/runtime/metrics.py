"""The counts of a worker: the outcomes of tasks, how long they ran and waited, and the rounds and errors of its loops.

Metrics are counted per batch, never per task, so that a task costs well under a microsecond. WorkerMetrics itself
keeps nothing. `Counts` keeps numbers in memory. The daemon's version keeps them in memory that outlives the worker.
Exporters choose the public metric names.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections import defaultdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

from tasklib.states import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tasklib.outcomes import AttemptOutcome, HeldTask, Settlement
    from tasklib.runtime.loop import FailureKind
    from tasklib.statements import ClaimedTask

Process: TypeAlias = Literal["worker", "keeper"]
Found: TypeAlias = Literal["notification", "poll", "due", "backlog"]
Key: TypeAlias = tuple[str, ...]  # a word, then its labels
Amounts: TypeAlias = dict[Key, list[float]]  # one number; of a histogram, the number in each bucket, then the sum

# Upper bounds; the last bucket has none. tasklib.task_statistics knows them too.
SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0,
)  # fmt: skip
STATEMENT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 30.0)
BATCHES = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


class WorkerMetrics:
    """Called from all of the worker's threads, and must neither wait nor raise."""

    is_counting = False
    process: Process = "worker"
    _beats: Mapping[str, int] = MappingProxyType({})

    def add(self, amounts: Amounts) -> None:
        """Adds all of them at once, or none."""

    # --- tasks ---

    def claimed(self, queue: str, tasks: Sequence[ClaimedTask], found: Found, seconds: float) -> None:
        """One claim statement was answered, in so many seconds."""
        if not self.is_counting:
            return
        amounts: Amounts = {
            ("claim_seconds",): histogram(STATEMENT_SECONDS, [seconds]),
            ("claim_batch",): histogram(BATCHES, [len(tasks)]),
        }
        if tasks:
            amounts["claimed", queue, found] = [float(len(tasks))]
        waits: defaultdict[str, list[float]] = defaultdict(list)
        for task in tasks:
            if not task.held.attempt:  # later attempts have waited for their retry
                waits[task.held.name].append(task.waited_seconds)
        for name, waited in waits.items():
            amounts["wait", name, queue] = histogram(SECONDS, waited)
        self.add(amounts)

    def flushed(self, count: int, seconds: float) -> None:
        """One statement with so many outcomes was answered."""
        if self.is_counting:
            self.add({
                ("finish_seconds",): histogram(STATEMENT_SECONDS, [seconds]),
                ("finish_batch",): histogram(BATCHES, [count]),
            })  # fmt: skip

    def completed(self, ended: Iterable[tuple[HeldTask, float]]) -> None:
        """These plain successes are written. Each has the seconds for which it ran."""
        if not self.is_counting:
            return
        grouped: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for task, seconds in ended:
            grouped[task.name, task.queue].append(seconds)
        amounts: Amounts = {}
        for (name, queue), seconds_of in grouped.items():
            amounts["finished", name, queue, "completed"] = [float(len(seconds_of))]
            amounts["duration", name, queue] = histogram(SECONDS, seconds_of)
        self.add(amounts)

    def settled(self, ended: Iterable[tuple[HeldTask, Settlement, float]]) -> None:
        """These are written. Each has what became of it, and the seconds for which it ran."""
        if not self.is_counting:
            return
        grouped: defaultdict[tuple[str, str, AttemptOutcome | None], list[float]] = defaultdict(list)
        amounts: Amounts = {}
        for task, settlement, seconds in ended:
            outcome = settlement.outcome
            if outcome != "COMPLETED":
                seconds = max(seconds, 0.0)  # noqa: PLW2901 - minus infinity for a task that was marked and never ran
                for also in _consequences(task, settlement):
                    _add(amounts, also, [1.0])
            grouped[task.name, task.queue, outcome].append(seconds)
        for (name, queue, attempted), seconds_of in grouped.items():
            if attempted is not None:
                amounts["finished", name, queue, attempted.lower()] = [float(len(seconds_of))]
                _add(amounts, ("duration", name, queue), histogram(SECONDS, seconds_of))
        self.add(amounts)

    def found(
        self,
        name: str,
        queue: str,
        outcome: AttemptOutcome,
        *,
        seconds: float,
        will_retry: bool,
        is_buried: bool = False,
    ) -> None:
        """An attempt that a worker wrote and did not live to count."""
        amounts: Amounts = {
            ("finished", name, queue, outcome.lower()): [1.0],
            ("duration", name, queue): histogram(SECONDS, [seconds]),
        }
        if outcome in {"FAILED", "TIMED_OUT"}:
            amounts["retried" if will_retry else "failed", name, queue] = [1.0]
        elif is_buried:
            amounts["buried", name] = [1.0]
        elif outcome == "WORKER_FAILURE" and not will_retry:
            amounts["failed", name, queue] = [1.0]
        self.add(amounts)

    def expired(self, count: int) -> None:
        self.count("expired", amount=count)

    def lost(self, count: int, cause: Literal["worker_died", "lease_expired"]) -> None:
        """So many tasks were recovered from a worker."""
        self.count("lost", cause, amount=count)

    # --- the worker itself ---

    def fenced(self, count: int) -> None:
        """So many outcomes were refused, because their tasks belong to other workers by now."""
        self.count("fenced", amount=count)

    def lease_lost(self, how: Literal["ran_out", "fenced"]) -> None:
        self.count("lease_lost", how)

    def failed(self, loop: str, kind: FailureKind) -> None:
        """A round of a loop failed."""
        self.count("errors", self.process, loop, kind)

    def rounds(self, beats: Mapping[str, int]) -> None:
        """How many rounds each loop has made so far. Called by one thread."""
        if not self.is_counting:
            return
        new: Amounts = {
            ("rounds", self.process, loop): [float(count - self._beats.get(loop, 0))] for loop, count in beats.items()
        }
        self._beats = dict(beats)
        self.add(new)

    def count(self, word: str, *labels: str, amount: float = 1.0) -> None:
        if self.is_counting and amount:
            self.add({(word, *labels): [float(amount)]})


class Counts(WorkerMetrics):
    """Numbers in memory, until they are taken."""

    is_counting = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amounts: Amounts = {}

    def add(self, amounts: Amounts) -> None:
        with self._lock:
            merge(self._amounts, amounts)

    def take(self) -> Amounts:
        with self._lock:
            taken, self._amounts = self._amounts, {}
            return taken


def histogram(bounds: Sequence[float], values: Sequence[float]) -> list[float]:
    """The number of values in each bucket, and the sum of all values."""
    counts = [0.0] * (len(bounds) + 2)
    for place in map(bisect_left, itertools.repeat(bounds), values):
        counts[place] += 1.0
    counts[-1] = sum(values)
    return counts


def merge(into: Amounts, more: Mapping[Key, Sequence[float]]) -> None:
    for key, values in more.items():
        _add(into, key, values)


def _add(amounts: Amounts, key: Key, values: Sequence[float]) -> None:
    known = amounts.get(key)
    amounts[key] = [*values] if known is None else [one + other for one, other in zip(known, values, strict=True)]


def _consequences(task: HeldTask, settlement: Settlement) -> Iterator[Key]:
    """Further counters of an outcome that is not a plain success."""
    if settlement.outcome is None:
        if settlement.state == State.PENDING and not settlement.is_crash:
            yield ("released",)
        elif settlement.state == State.EXPIRED:
            yield ("expired",)
    if settlement.is_retry:
        yield "retried", task.name, task.queue
    if settlement.state == State.FAILED and settlement.due_at is None:
        yield "failed", task.name, task.queue
    if settlement.state == State.BURIED:
        yield "buried", task.name
    if settlement.suspect and not task.suspect:
        yield "suspected", task.name
