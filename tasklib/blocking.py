"""Warns of sync calls on a running event loop: they work, but stop everything else on the loop meanwhile.

There is one warning for each place in the code. There is none in threads, which have no running loop (sync views,
`to_thread`, sync tasks), outside of asyncio tasks (greenlets beside a loop), in notebooks and interactive sessions, and
in test files.
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
_warned: set[tuple[str, int]] = set()  # file and line


def warn_if_on_loop() -> None:
    if asyncio._get_running_loop() is None:  # noqa: SLF001 - get_running_loop raises, which takes ten times as long
        return
    if len(_warned) < MOST_PLACES and "ipykernel" not in sys.modules and asyncio.current_task() is not None:
        _warn(sys._getframe(1))  # noqa: SLF001 - the caller


def _warn(frame: FrameType | None) -> None:
    verb = ""
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        verb, frame = frame.f_code.co_name, frame.f_back
    if frame is None or _is_no_application(frame.f_code.co_filename):
        return
    place = (frame.f_code.co_filename, frame.f_lineno)
    if place not in _warned:
        _warned.add(place)
        log.warning(
            "loop.blocked", call=verb, file=place[0], line=place[1],
            hint="a sync call stops the event loop until the database answers: await its async form (submit, "
            "get_task_async, result, AsyncClient), or call it in asyncio.to_thread",
        )  # fmt: skip


def _is_no_application(file: str) -> bool:
    """An interactive session ("<stdin>"), or a test."""
    name = Path(file).name
    return name.startswith(("<", "test_")) or name.endswith("_test.py") or name in {"conftest.py", "tests.py"}
