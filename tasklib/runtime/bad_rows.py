"""One bad row never fails its batch. A batch that PostgreSQL refuses is halved until the bad row is alone. That row
is set aside for a while, an error event names it, and the rest goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import psycopg

from tasklib.clock import time
from tasklib.database_errors import is_about_rows
from tasklib.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
    from uuid import UUID

    from tasklib.statements import Statement

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K", bound="Hashable")
LONGEST_SECONDS = 60.0  # until a row that was refused is tried again
FORGET_SECONDS = 600.0  # until a row that was repaired or deleted is forgotten


def may_be_one_row(error: psycopg.Error) -> bool:
    """Whether the statement may pass without one of its rows: a row was refused, needs a lock, or takes too long."""
    return is_about_rows(error) or isinstance(error, psycopg.errors.LockNotAvailable | psycopg.errors.QueryCanceled)


def send_apart(
    batch: Sequence[T], send: Callable[[Sequence[T]], R], refuse: Callable[[T, psycopg.Error], None]
) -> Iterator[R]:
    """The answers for the parts that passed. `refuse` is called for each row that is refused alone. An error that is
    not about one row is raised.
    """
    waiting = [batch]
    while waiting:
        part = waiting.pop()
        if not part:
            continue
        try:
            answer = send(part)
        except psycopg.Error as error:
            if not may_be_one_row(error):
                raise
            if len(part) == 1:
                refuse(part[0], error)
            else:
                middle = len(part) // 2
                waiting += [part[middle:], part[:middle]]
        else:
            yield answer


class Aside(Generic[K]):
    """Rows that were refused, each until it is tried again. The pause doubles each time, up to a minute. With
    `at_once` the first pause is zero, for callers that have a pause of their own.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._less = 1.0 if at_once else 0.0
        self._refused: dict[K, tuple[float, int]] = {}  # until when, and how often it was refused

    def add(self, key: K) -> None:
        times = self._refused.get(key, (0.0, 0))[1] + 1
        pause = min(2.0 ** min(times - 1, 10) - self._less, LONGEST_SECONDS)
        self._refused[key] = (time.monotonic() + pause, times)

    def current(self) -> set[K]:
        """Rows that must not be tried now."""
        now = time.monotonic()
        old = [key for key, (until, _) in self._refused.items() if until + FORGET_SECONDS < now]
        for key in old:
            del self._refused[key]
        return {key for key, (until, _) in self._refused.items() if until > now}


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


class Sweep:
    """A statement that changes all tasks that are due. While PostgreSQL refuses one of them, the due tasks are looked
    up first, and changed by key.
    """

    def __init__(
        self,
        event: str,
        run: Callable[[Statement[Any]], Any],
        *,
        due: Callable[[Iterable[UUID]], Statement[list[UUID]]],
        change: Callable[[Sequence[UUID]], Statement[int]],
    ) -> None:
        self._event = event
        self._run = run
        self._due = due
        self._change = change
        self._aside: Aside[UUID] = Aside()

    def run_once(self, whole: Callable[[], R], as_answer: Callable[[int], R]) -> R:
        """The answer of `whole`; or, if that is refused, `as_answer` of the number of changed tasks."""
        if not self._aside.current():
            try:
                return whole()
            except psycopg.Error as error:
                if not may_be_one_row(error):
                    raise
        due = self._run(self._due(self._aside.current()))
        return as_answer(sum(send_apart(due, lambda part: self._run(self._change(part)), self._refuse)))

    def _refuse(self, task_id: UUID, error: psycopg.Error) -> None:
        self._aside.add(task_id)
        log.error(self._event, task_id=task_id, error=first_line(error))
