"""Sync calls on a running event loop: they work, but nothing else on the loop goes on meanwhile. Each place that makes
one is told of once.

Not told of: threads, which have no running loop (sync views, `to_thread`, sync tasks); code outside of an asyncio task,
such as greenlets beside a loop; notebooks and interactive sessions; and test files.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tasklib.log import log

if TYPE_CHECKING:
    from types import FrameType

MOST_PLACES = 100
_OURS = str(Path(__file__).parent)
_told: set[tuple[str, int]] = set()


def warn_if_on_loop() -> None:
    if asyncio._get_running_loop() is None:  # noqa: SLF001 - get_running_loop raises, which takes ten times as long
        return
    if len(_told) < MOST_PLACES and "ipykernel" not in sys.modules and asyncio.current_task() is not None:
        _tell(sys._getframe(1))  # noqa: SLF001 - who called


def _tell(frame: FrameType | None) -> None:
    verb = ""
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        verb, frame = frame.f_code.co_name, frame.f_back
    if frame is None or _is_no_application(frame.f_code.co_filename):
        return
    place = (frame.f_code.co_filename, frame.f_lineno)
    if place not in _told:
        _told.add(place)
        log.warning(
            "loop.blocked", call=verb, file=place[0], line=place[1],
            hint="a sync call stops the event loop until the database answers: await its async form (submit, "
            "get_task_async, result, AsyncClient), or call it in asyncio.to_thread",
        )  # fmt: skip


def _is_no_application(file: str) -> bool:
    """Typed in ("<stdin>"), or a test."""
    name = Path(file).name
    return name.startswith(("<", "test_")) or name.endswith("_test.py") or name in {"conftest.py", "tests.py"}
