"""The counters of a child, in memory shared with the supervisor, so that they outlive the child.

The supervisor creates them before the fork. The child adds; the supervisor reads, also after the child's death. A key
is written first, and then published by one store to the total length of all keys. So a reader never finds half a key.
Of a batch that was being added when the child died, a part may be missing.
"""

from __future__ import annotations

import json
import mmap
import threading
from array import array
from typing import TYPE_CHECKING, Any

from tasklib.runtime.metrics import Amounts, Key, Process, WorkerMetrics, merge
from tasklib_daemon.metrics import BY_WORD, Bounds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tasklib.outcomes import HeldTask, Settlement
    from tasklib_daemon.scoreboard import Scoreboard, ScoreboardView

# Enough for all names within the bounds, at their longest. What has no room is not counted, not even as `other`.
NUMBERS = 24_576
KEY_BYTES = 2 * 1024 * 1024
_KEYS_AT = 8
_NUMBERS_AT = _KEYS_AT + KEY_BYTES
_OTHERS: Key = ("others",)
_STARTED: Key = ("started",)

IN_STATISTICS = frozenset({"finished", "retried", "duration", "wait"})  # stored by the minute in the database


class Counters:
    """Unused parts take no memory."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NUMBERS_AT + 8 * NUMBERS)
        self._length = memoryview(self._memory)[:_KEYS_AT].cast("Q")  # of all keys; written by one store
        self._keys: list[tuple[Key, int]] = []  # those read so far, with the size of each
        self._read = 0

    def close(self) -> None:
        self._length.release()
        self._memory.close()

    # --- the supervisor's side ---

    def read(self) -> Amounts:
        self._read_keys()
        total = sum(size for _, size in self._keys)
        numbers = array("d", self._memory[_NUMBERS_AT : _NUMBERS_AT + 8 * total])
        amounts: Amounts = {}
        start = 0
        for key, size in self._keys:
            amounts[key] = numbers[start : start + size].tolist()
            start += size
        return amounts

    def _read_keys(self) -> None:
        length = self._length[0]
        if length > self._read:
            lines = self._memory[_KEYS_AT + self._read : _KEYS_AT + length].splitlines()
            self._keys += [(tuple(key), size) for size, *key in map(json.loads, lines)]
            self._read = length

    # --- the child's side ---

    def append(self, key: Key, size: int) -> bool:
        """Add a key. False: there is no room."""
        line = json.dumps([size, *key], separators=(",", ":")).encode() + b"\n"
        length = self._length[0]
        if length + len(line) > KEY_BYTES:
            return False
        self._memory[_KEYS_AT + length : _KEYS_AT + length + len(line)] = line
        self._length[0] = length + len(line)
        return True

    def numbers(self) -> Any:
        """A memoryview of floats; mypy takes its items for bytes."""
        return memoryview(self._memory)[_NUMBERS_AT : _NUMBERS_AT + 8 * NUMBERS].cast("d")


class CounterMetrics(WorkerMetrics):
    """Adds to the counters. Names beyond the bounds are counted as `other`."""

    is_counting = True

    def __init__(self, counters: Counters, process: Process, scoreboard: Scoreboard | None = None) -> None:
        self.process = process
        self._counters = counters
        self._scoreboard = scoreboard
        self._numbers = counters.numbers()
        self._offsets: dict[Key, int] = {}
        self._used = 0
        self._bounds = Bounds()
        self._lock = threading.Lock()
        self._new_offset(_OTHERS, 1)

    def add(self, amounts: Amounts) -> None:
        numbers = self._numbers
        with self._lock:
            for key, values in amounts.items():
                offset = self._offsets.get(key)
                if offset is None:
                    offset = self._find_offset(key, len(values))
                if offset is None:
                    numbers[0] += 1
                    continue
                for index, value in enumerate(values, offset):
                    numbers[index] += value

    def completed(self, ended: Iterable[tuple[HeldTask, float]]) -> None:
        super().completed(ended)
        self._mark_counted()

    def settled(self, ended: Iterable[tuple[HeldTask, Settlement, float]]) -> None:
        super().settled(ended)
        self._mark_counted()

    def _mark_counted(self) -> None:
        """Until their entries are free, the scoreboard says that these tasks are counted, so that a keeper does not
        count them again after a death.
        """
        if self._scoreboard is not None:
            self._scoreboard.mark_counted(is_counted=True)

    def _find_offset(self, key: Key, size: int) -> int | None:
        """Names beyond the bounds are not remembered, because there may be any number of them."""
        word, *labels = key
        bounded = (word, *self._bounds.within(BY_WORD[word], labels))
        if bounded != key:
            self._numbers[0] += 1
        offset = self._offsets.get(bounded)
        return self._new_offset(bounded, size) if offset is None else offset

    def _new_offset(self, key: Key, size: int) -> int | None:
        if self._used + size > NUMBERS or not self._counters.append(key, size):
            return None
        offset = self._offsets[key] = self._used
        self._used += size
        return offset


class Totals:
    """The sums of all children, dead ones included."""

    def __init__(self) -> None:
        self._living: dict[int, Amounts] = {}
        self._dead: Amounts = {}
        self._bounds = Bounds()
        self._taken: Amounts = {}

    def count(self, word: str, *labels: str) -> None:
        """Count something in the supervisor itself."""
        self._add(self._dead, {(word, *labels): [1.0]})

    def look(self, number: int, counters: Counters, view: ScoreboardView | None) -> None:
        self._living[number] = counters.read() | self._started(number, view)

    def close(self, number: int, counters: Counters, view: ScoreboardView | None) -> None:
        """The child is dead, and these are its last numbers."""
        self._add(self._dead, counters.read() | self._started(number, view))
        self._living.pop(number, None)

    def _started(self, number: int, view: ScoreboardView | None) -> Amounts:
        """Started tasks are not counted: they are the ended and the executing ones. A scoreboard that changes while it
        is read may show one less than before, so the number never goes down.
        """
        if view is None:
            return {}
        before = self._living.get(number, {}).get(_STARTED, [0.0])[0]
        return {_STARTED: [max(float(view.ended + len(view.executing)), before)]}

    def totals(self) -> Amounts:
        totals: Amounts = {}
        for amounts in (self._dead, *self._living.values()):
            self._add(totals, amounts)
        return totals

    def take_for_statistics(self) -> Amounts:
        """What was added since the last call, of the counters that are stored in the database."""
        totals = {key: values for key, values in self.totals().items() if key[0] in IN_STATISTICS}
        before, self._taken = self._taken, totals
        return {key: more for key, values in totals.items() if any(more := _less(values, before.get(key)))}

    def _add(self, into: Amounts, amounts: Amounts) -> None:
        """Each child has bounds of its own, so the sums are bounded once more."""
        for (word, *labels), values in amounts.items():
            merge(into, {(word, *self._bounds.within(BY_WORD[word], labels)): values})


def to_json(amounts: Amounts) -> list[list[Any]]:
    """For a message."""
    return [[[*key], values] for key, values in amounts.items()]


def from_json(given: list[list[list[Any]]]) -> Amounts:
    return {tuple(key): values for key, values in given}


def _less(values: list[float], before: list[float] | None) -> list[float]:
    return values if before is None else [one - other for one, other in zip(values, before, strict=True)]
