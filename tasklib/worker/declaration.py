"""What a worker's task functions say about their tasks, told to the database: whoever submits one by its name alone,
from SQL for instance, gets these options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg

from tasklib.clock import time
from tasklib.connection import is_connection_lost
from tasklib.duties.apart import first_line
from tasklib.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tasklib.config import Config
    from tasklib.statements import WorkerStatements
    from tasklib.task import TaskFunction
    from tasklib.worker.session import Session

AGAIN_SECONDS = 86400.0  # so that a function in use does not count as forgotten
AFTER_FAILURE_SECONDS = 60.0
LOCK_SECONDS = 0.1


class Declaration:
    def __init__(
        self,
        config: Config,
        session: Session,
        statements: WorkerStatements,
        functions: Callable[[], Iterable[TaskFunction[..., Any]]],
    ) -> None:
        self._config = config
        self._session = session
        self._statements = statements
        self._functions = functions
        self._declared: list[dict[str, Any]] = []
        self._again_at = 0.0  # monotonic
        self._told = ""

    def run_once(self) -> None:
        """Sends something when a function is new or has changed, and once a day. A worker that may not write it works
        all the same: only submits by name miss it.
        """
        functions = [self._options(each) for each in self._functions()]
        if not functions or (functions == self._declared and time.monotonic() < self._again_at):
            return
        try:
            self._session.run_patiently(self._statements.declare(functions), LOCK_SECONDS)
        except psycopg.Error as error:
            if is_connection_lost(error):
                raise
            self._again_at = time.monotonic() + AFTER_FAILURE_SECONDS
            self._tell(first_line(error))
        else:
            self._again_at = time.monotonic() + AGAIN_SECONDS
        self._declared = functions

    def _options(self, function: TaskFunction[..., Any]) -> dict[str, Any]:
        """With this worker's Config for what the function leaves to it: who submits from SQL has no other."""
        own = function.task_options
        timeout = own.timeout_seconds
        return {
            "name": function.name,
            "queue": own.queue,
            "priority": own.priority,
            "max_retries": self._config.max_retries if own.max_retries is None else own.max_retries,
            "timeout_seconds": self._config.default_task_timeout_seconds if timeout is None else timeout,
            "store_result": own.store_result,
            "on_crash": own.on_crash,
        }

    def _tell(self, error: str) -> None:
        if error != self._told:
            self._told = error
            log.warning(
                "functions.not_declared",
                error=error,
                consequence="tasks that are submitted by name alone get the library's default options",
            )
