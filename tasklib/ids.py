"""Task ids: UUIDv7, made by the client, so that a submit can be repeated after an unknown commit."""

from __future__ import annotations

import os
import threading
from uuid import UUID, SafeUUID

from tasklib.clock import time

_set_int = UUID.__dict__["int"].__set__
_MILLISECOND = 1_000_000  # in nanoseconds
_STEP = 1 << 32  # the counter is the upper 30 bits of rand_b
_IDS_PER_MILLISECOND = 1 << 29


class TaskId(UUID):
    """The id of a submitted task. It is a UUID; `existed` tells whether an earlier submit
    with the same idempotency key had made the task.
    """

    __slots__ = ()
    # Class attributes: a bulk submit makes an id for every task, and to set three attributes took half of that time.
    is_safe = SafeUUID.unknown  # type: ignore[misc]  # typeshed calls it final; the value is UUID's own
    existed: bool = False

    def __new__(cls, value: UUID | int | str, *, existed: bool = False) -> TaskId:  # noqa: PYI034 - one of two classes
        return _make(value if isinstance(value, int) else UUID(str(value)).int, _EarlierTaskId if existed else TaskId)

    def __init__(self, value: UUID | int | str, *, existed: bool = False) -> None:
        """`__new__` has made it."""

    def __repr__(self) -> str:
        return f"TaskId({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (self.int, self.existed)


class _EarlierTaskId(TaskId):
    __slots__ = ()
    existed = True


def _make(value: int, kind: type[TaskId] = TaskId) -> TaskId:
    made = object.__new__(kind)
    _set_int(made, value)  # UUID refuses assignments to its attributes
    return made


def _restore(value: int, existed: bool) -> TaskId:
    return TaskId(value, existed=existed)


class IdSource:
    """Makes UUIDv7 that grow strictly within one process: a counter follows the milliseconds.

    A clock that steps back does not break the order: the last millisecond is kept until the clock has caught up.
    Random bits are drawn once per millisecond: two system calls for each id were half of its cost.
    """

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            # A child must neither repeat its parent's counter nor inherit a lock that another thread holds.
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._millisecond = 0
        self._last = 0
        self._left = 0

    def __call__(self) -> TaskId:
        with self._lock:
            now = time.time_ns() // _MILLISECOND
            if now > self._millisecond:
                self._begin(now)
            elif self._left == 0:
                self._begin(self._millisecond + 1)
            self._left -= 1
            self._last += _STEP
            made = object.__new__(TaskId)
            _set_int(made, self._last)
            return made

    def _begin(self, millisecond: int) -> None:
        """The counter starts at a random value in its lower half, so that it does not overflow."""
        drawn = int.from_bytes(os.urandom(9))
        low, counter, high = drawn & 0xFFFFFFFF, drawn >> 32 & (_IDS_PER_MILLISECOND - 1), drawn >> 61 & 0x7FF
        self._millisecond = millisecond
        self._left = _IDS_PER_MILLISECOND
        self._last = millisecond << 80 | 0x7 << 76 | high << 64 | 0b10 << 62 | counter << 32 | low


new_id = IdSource()
