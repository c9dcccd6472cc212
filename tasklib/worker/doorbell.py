"""Says in the database that a worker sleeps, so that inserts notify it. The SQL function `ring` is the other side.

A sleeping worker holds a shared advisory lock in its session, and looks for tasks once more after it has it. An insert
that looked for sleepers before that may still be uncommitted. While there is such an insert, the doorbell is "in
doubt", and the worker looks again and again, less and less often.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tasklib.clock import time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasklib.runtime.session import Session
    from tasklib.statements import WorkerStatements

ALL_QUEUES = "*"  # no queue can have this name
FIRST_DOUBT_SECONDS = 0.002


class Doorbell:
    """Armed: inserts ring. Armed and in doubt: an insert that is about to commit may not. Used by one thread alone."""

    def __init__(
        self, session: Session, statements: WorkerStatements, queues: Sequence[str] | None, *, longest_doubt: float
    ) -> None:
        self._session = session
        self._statements = statements
        self._queues = [ALL_QUEUES] if queues is None else list(queues)
        self._longest_doubt = longest_doubt
        self._held: list[str] = []
        self._connection = 0
        self._doubt_seconds = 0.0
        self._ask_at = 0.0

    @property
    def is_armed(self) -> bool:
        return len(self._still_held()) == len(self._queues)

    @property
    def is_at_rest(self) -> bool:
        """It holds no lock, and none is to be tried again."""
        return not self._held and self._doubt_seconds == 0

    @property
    def is_in_doubt(self) -> bool:
        return self.is_armed and self._doubt_seconds > 0

    @property
    def is_to_ask(self) -> bool:
        """In doubt, and it is time to ask again, before the next look. Not at each look: notifications would use up the
        growing pauses.
        """
        return self.is_in_doubt and time.monotonic() >= self._ask_at

    def until_asked(self) -> float:
        """Seconds until it has to be armed, or asked, again; infinite if there is no doubt."""
        return max(self._ask_at - time.monotonic(), 0.0) if self._doubt_seconds > 0 else math.inf

    def arm(self) -> None:
        """The caller has to look for tasks after this."""
        doubt_seconds = self._doubt_seconds if self.is_armed else 0.0
        missing = [queue for queue in self._queues if queue not in self._still_held()]
        held, no_insert_is_open = self._session.run(self._statements.arm(missing))
        self._held = [*self._still_held(), *held]
        self._connection = self._session.connections
        if no_insert_is_open and self.is_armed:
            self._doubt_seconds = 0.0
        else:
            self._doubt_seconds = min(max(2 * doubt_seconds, FIRST_DOUBT_SECONDS), self._longest_doubt)
            self._ask_at = time.monotonic() + self._doubt_seconds

    def disarm(self) -> None:
        """Inserts do not ring from here on."""
        held, self._held = self._still_held(), []
        self._doubt_seconds = 0.0
        if held:
            self._session.run(self._statements.disarm(held))

    def _still_held(self) -> list[str]:
        """The locks end with their connection."""
        is_same = self._session.connections == self._connection and self._session.is_connected
        return self._held if is_same else []
