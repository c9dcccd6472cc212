"""The ledger: what a child has counted, in memory that its supervisor sees, so that it outlives the child.

Made before the fork, one for each child. The child adds; the supervisor reads, also after its death. A key is written
once, and published by the length of all of them, in one store; then its numbers have their place. So whatever a reader
finds is whole, and of a batch that was being added when the child died at most a part is there.
"""

from __future__ import annotations

import json
import mmap
import threading
from array import array
from typing import TYPE_CHECKING, Any

from tasklib.worker.tally import Tally, merge
from tasklib_daemon.metrics import BY_WORD, Bounds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tasklib.outcomes import HeldTask, Settlement
    from tasklib.worker.tally import Amounts, Key, Process
    from tasklib_daemon.page import Page, PageView

# For all that the bounds let in, with the longest names: what has no room is counted nowhere, not even as `other`.
NUMBERS = 24_576
KEY_BYTES = 2 * 1024 * 1024
_KEYS_AT = 8
_NUMBERS_AT = _KEYS_AT + KEY_BYTES
_OTHERS: Key = ("others",)
_STARTED: Key = ("started",)

WRITTEN_DOWN = frozenset({"finished", "retried", "duration", "wait"})  # in the database too, by the minute


class Ledger:
    """Only what is used of it takes memory."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NUMBERS_AT + 8 * NUMBERS)
        self._length = memoryview(self._memory)[:_KEYS_AT].cast("Q")  # of all keys; written by one store
        self._keys: list[tuple[Key, int]] = []  # with how many numbers each has; as far as they were read
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
        """A new key. False: the ledger is full."""
        line = json.dumps([size, *key], separators=(",", ":")).encode() + b"\n"
        length = self._length[0]
        if length + len(line) > KEY_BYTES:
            return False
        self._memory[_KEYS_AT + length : _KEYS_AT + length + len(line)] = line
        self._length[0] = length + len(line)
        return True

    def numbers(self) -> Any:
        """A memoryview of floats: mypy thinks that they hold bytes."""
        return memoryview(self._memory)[_NUMBERS_AT : _NUMBERS_AT + 8 * NUMBERS].cast("d")


class LedgerTally(Tally):
    """Counts into a ledger. Names beyond the bounds, and what has no room, are counted as others."""

    is_counting = True

    def __init__(self, ledger: Ledger, process: Process, page: Page | None = None) -> None:
        self.process = process
        self._ledger = ledger
        self._page = page
        self._numbers = ledger.numbers()
        self._places: dict[Key, int] = {}
        self._used = 0
        self._bounds = Bounds()
        self._lock = threading.Lock()
        self._new_place(_OTHERS, 1)

    def add(self, amounts: Amounts) -> None:
        numbers = self._numbers
        with self._lock:
            for key, values in amounts.items():
                place = self._places.get(key)
                if place is None:
                    place = self._find_place(key, len(values))
                if place is None:
                    numbers[0] += 1
                    continue
                for index, value in enumerate(values, place):
                    numbers[index] += value

    def completed(self, ended: Iterable[tuple[HeldTask, float]]) -> None:
        super().completed(ended)
        self._mark_counted()

    def settled(self, ended: Iterable[tuple[HeldTask, Settlement, float]]) -> None:
        super().settled(ended)
        self._mark_counted()

    def _mark_counted(self) -> None:
        """From here on, until their slots are free, the page says that these were counted: whoever finds them there
        after a death need not.
        """
        if self._page is not None:
            self._page.mark_counted(is_counted=True)

    def _find_place(self, key: Key, size: int) -> int | None:
        """Of a name that is not among the first, nothing is remembered: there may be any number of them."""
        word, *labels = key
        bounded = (word, *self._bounds.within(BY_WORD[word], labels))
        if bounded != key:
            self._numbers[0] += 1
        place = self._places.get(bounded)
        return self._new_place(bounded, size) if place is None else place

    def _new_place(self, key: Key, size: int) -> int | None:
        if self._used + size > NUMBERS or not self._ledger.append(key, size):
            return None
        place = self._places[key] = self._used
        self._used += size
        return place


class Book:
    """What all children have counted, the dead too. The supervisor's."""

    def __init__(self) -> None:
        self._living: dict[int, Amounts] = {}
        self._dead: Amounts = {}
        self._bounds = Bounds()
        self._written_down: Amounts = {}

    def count(self, word: str, *labels: str) -> None:
        """For the supervisor itself."""
        self._add(self._dead, {(word, *labels): [1.0]})

    def look(self, number: int, ledger: Ledger, view: PageView | None) -> None:
        self._living[number] = ledger.read() | self._started(number, view)

    def close(self, number: int, ledger: Ledger, view: PageView | None) -> None:
        """The child is dead: these are its last numbers."""
        self._add(self._dead, ledger.read() | self._started(number, view))
        self._living.pop(number, None)

    def _started(self, number: int, view: PageView | None) -> Amounts:
        """Nobody counts them: what has started has ended, or executes. A page that is written while it is read may
        tell one less than before.
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

    def to_write_down(self) -> Amounts:
        """What has come since the last time of what is written down in the database, too."""
        totals = {key: values for key, values in self.totals().items() if key[0] in WRITTEN_DOWN}
        before, self._written_down = self._written_down, totals
        return {key: more for key, values in totals.items() if any(more := _less(values, before.get(key)))}

    def _add(self, into: Amounts, amounts: Amounts) -> None:
        """Each child has its own first names: all of them together are bounded once more."""
        for (word, *labels), values in amounts.items():
            merge(into, {(word, *self._bounds.within(BY_WORD[word], labels)): values})


def to_json(amounts: Amounts) -> list[list[Any]]:
    """For a message."""
    return [[[*key], values] for key, values in amounts.items()]


def from_json(given: list[list[list[Any]]]) -> Amounts:
    return {tuple(key): values for key, values in given}


def _less(values: list[float], before: list[float] | None) -> list[float]:
    return values if before is None else [one - other for one, other in zip(values, before, strict=True)]
