"""Stores the options of a worker's task functions in the database, for tasks that are submitted by name alone, as from
SQL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg

from tasklib.clock import time
from tasklib.database_errors import is_connection_lost
from tasklib.log import log
from tasklib.options import QUEUE_OPTIONS
from tasklib.runtime.bad_rows import first_line

if TYPE_CHECKING:
    from tasklib.task import TaskFunction
    from tasklib.worker.basis import Basis

AGAIN_SECONDS = 86400.0  # functions that are not declared for long are deleted
AFTER_FAILURE_SECONDS = 60.0
LOCK_SECONDS = 0.1


class Declaration:
    def __init__(self, basis: Basis) -> None:
        self._basis = basis
        self._declared: list[dict[str, Any]] = []
        self._again_at = 0.0  # monotonic
        self._logged = ""

    def run_once(self) -> None:
        """Sends the options when a function is new or has changed, and once a day. An error does not stop the worker:
        only submits by name miss the options.
        """
        functions = [self._options(each) for each in self._basis.served.functions()]
        if not functions or (functions == self._declared and time.monotonic() < self._again_at):
            return
        try:
            self._basis.sessions["lease"].run(self._basis.statements.declare(functions), LOCK_SECONDS)
        except psycopg.Error as error:
            if is_connection_lost(error):
                raise
            self._again_at = time.monotonic() + AFTER_FAILURE_SECONDS
            self._log(first_line(error))
        else:
            self._again_at = time.monotonic() + AGAIN_SECONDS
        self._declared = functions

    def _options(self, function: TaskFunction[..., Any]) -> dict[str, Any]:
        """This worker's Config gives the options that the function leaves open, because SQL has no Config. `own` are
        those that the function itself gives, so that a default of the queue does not replace them.
        """
        config, own = self._basis.config, function.task_options
        timeout = own.timeout_seconds
        return {
            "name": function.name,
            "queue": own.queue,
            "priority": own.priority or 0,
            "max_retries": config.max_retries if own.max_retries is None else own.max_retries,
            "timeout_seconds": config.default_task_timeout_seconds if timeout is None else timeout,
            "store_result": own.store_result,
            "on_crash": own.on_crash,
            "deadline_seconds": own.deadline_seconds,
            "own": sorted(option for option in QUEUE_OPTIONS if getattr(own, option) is not None),
        }

    def _log(self, error: str) -> None:
        if error != self._logged:
            self._logged = error
            log.warning(
                "functions.not_declared",
                error=error,
                consequence="tasks that are submitted by name alone get the library's default options",
            )
