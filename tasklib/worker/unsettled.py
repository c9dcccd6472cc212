"""The executions whose end is not committed yet, and how many of each claim there are. The buffer's lock guards it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from tasklib.worker.execution import Execution


class Unsettled(dict["Execution", None]):
    """By execution, not by task: a task that goes back may be claimed again before its end is noted here."""

    def __init__(self) -> None:
        super().__init__()
        self._claims: Counter[int] = Counter()

    def add(self, execution: Execution) -> None:
        self[execution] = None
        self._claims[execution.claimed.claim_id] += 1

    def claims_ended_by(self, executions: Collection[Execution]) -> list[int]:
        """The claims of which nothing is held any more once these are settled."""
        return [claim for claim, count in self._counts(executions).items() if count == self._claims[claim]]

    def settle(self, executions: Collection[Execution]) -> None:
        for claim, count in self._counts(executions).items():
            self._claims[claim] -= count
            if not self._claims[claim]:
                del self._claims[claim]
        for each in executions:
            self.pop(each, None)

    def _counts(self, executions: Collection[Execution]) -> Counter[int]:
        return Counter([each.claimed.claim_id for each in executions if each in self])
