"""For a daemon whose tasks have processes of their own. Apart from the others: a worker starts a fork server for it."""

from __future__ import annotations

import logging
import os

import structlog

import tasklib
from tests.support import hostile_tasks

log = structlog.get_logger("shop")


@tasklib.task(isolation="process")
def say(word: str) -> int:
    log.warning("said.by_structlog", word=word)
    logging.getLogger("shop").warning("said.by_logging")
    return os.getpid()


@tasklib.task(isolation="process")
def crash_alone() -> None:
    """Its own process dies, and its worker tells of it: it is buried at the third time."""
    hostile_tasks.kill_process()
