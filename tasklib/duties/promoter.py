"""Makes tasks ready whose time has come. It needs no election: rows that another session is promoting are skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasklib.runtime.bad_rows import Sweep
from tasklib.statements import Promotion, WorkerStatements

if TYPE_CHECKING:
    from tasklib.runtime.session import Session


class Promoter:
    def __init__(self, session: Session, statements: WorkerStatements) -> None:
        self._session = session
        self._statements = statements
        self._sweep = Sweep(
            "task.not_promoted", session.run, due=statements.promotable, change=statements.promote_given
        )

    def promote(self) -> Promotion:
        return self._sweep.run_once(
            lambda: self._session.run(self._statements.promote()), lambda promoted: Promotion(promoted, None)
        )
