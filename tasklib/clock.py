"""The clock of the library's own waits, leases and ids: a copy of Python's `time` that test tools do not patch.

Tests patch `time` to stop or move the time of the application under test: freezegun replaces the functions of `time`,
and every name in every module that refers to one of them. A worker whose clock stands still never reaches a deadline,
so it would wait for ever. The functions of the copy are other objects, which freezegun does not know. They cost the
same.

Write `from tasklib.clock import time` instead of `import time`, which ruff refuses in this package.
"""

from __future__ import annotations

import time as shared_time  # noqa: TID251 - the one place
from asyncio import AbstractEventLoop, BaseEventLoop
from importlib.util import module_from_spec
from typing import TYPE_CHECKING

__all__ = ["time", "with_real_time"]


def _copy_of_time() -> object:
    spec = shared_time.__spec__
    assert spec is not None  # noqa: S101 - every module has one
    assert spec.loader is not None  # noqa: S101 - as above
    copy = module_from_spec(spec)
    spec.loader.exec_module(copy)
    vars(copy)["sleep"] = shared_time.sleep  # reads no clock, and gevent must be able to replace it
    return copy


if TYPE_CHECKING:
    import time  # noqa: TID251 - for the types alone
else:
    time = _copy_of_time()


def with_real_time(loop: AbstractEventLoop) -> AbstractEventLoop:
    """The same event loop, with timers that use this clock. Those of uvloop never use Python's clock."""
    if isinstance(loop, BaseEventLoop):
        vars(loop)["time"] = time.monotonic
    return loop
