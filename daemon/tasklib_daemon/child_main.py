"""A child's first and last steps: from the fork to the work of its role, and to its exit.

It gives up what it must not inherit: signals, file descriptors, the scoreboards of other children, random state. It
dies with its parent, and never returns into the supervisor's code.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from tasklib_daemon import linux, logs, signals
from tasklib_daemon.exit_codes import BOOT_ERRORS, ExitCode, exit_for
from tasklib_daemon.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tasklib_daemon.channel import Channel
    from tasklib_daemon.counters import Counters
    from tasklib_daemon.plan import Slot
    from tasklib_daemon.scoreboard import Scoreboard
    from tasklib_daemon.settings import Settings
    from tasklib_daemon.stacks import Stacks

MARK_VARIABLE = "TASKLIB_DAEMON_MARK"  # processes that tasks start inherit it, and the guardian finds them by it


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSetup:
    """What a child gets from the supervisor."""

    slot: Slot
    settings: Settings
    scoreboard: Scoreboard
    channel: Channel
    stacks: Stacks
    counters: Counters
    mark: str
    parent: int


def live(setup: ChildSetup, close_inherited: Iterable[Callable[[], None]]) -> NoReturn:
    """`close_inherited` closes what belongs to the supervisor or to other children."""
    code = int(ExitCode.FAILED)
    try:
        _prepare(setup, close_inherited)
        _work(setup)
        code = ExitCode.OK
    except BaseException as error:  # noqa: BLE001 - it must not reach the supervisor's loop
        with contextlib.suppress(Exception):
            code = _report(setup, error)
    finally:
        _exit(code)


def _prepare(setup: ChildSetup, close_inherited: Iterable[Callable[[], None]]) -> None:
    with contextlib.suppress(PermissionError):  # the supervisor has done it already
        os.setpgid(0, 0)
    linux.die_with_parent(setup.parent)
    atexit._clear()  # noqa: SLF001 - the supervisor's exit functions are not ours
    for close in close_inherited:
        close()
    signals.reset()
    _reseed()
    setup.stacks.enable()
    _detach_input()
    linux.name_process(f"tasklibd-{setup.slot.role}")
    os.environ[MARK_VARIABLE] = setup.mark
    logs.configure(setup.settings, _process_name(setup.slot))
    signal.signal(signal.SIGUSR1, lambda *_: logs.reopen())
    signals.unblock()


def _work(setup: ChildSetup) -> None:
    """Each role is imported only in its child, so that the supervisor stays small."""
    if setup.slot.role == "worker":
        from tasklib_daemon import worker_main  # noqa: PLC0415

        worker_main.run(setup.settings, setup.scoreboard, setup.channel, setup.slot.number, setup.counters)
    elif setup.slot.role == "keeper":
        from tasklib_daemon import keeper  # noqa: PLC0415

        keeper.run(setup.settings, setup.channel, setup.counters)
    else:
        from tasklib_daemon.web import main  # noqa: PLC0415

        main.run(setup.settings, setup.channel)


def _report(setup: ChildSetup, error: BaseException) -> int:
    """The supervisor logs a boot error once for all children that fail alike. Other errors are logged here."""
    ended = exit_for(error)
    if ended.code not in BOOT_ERRORS:
        log.exception("child.failed", exc_info=error)
    setup.channel.send({"say": "failed", "code": int(ended.code), "message": ended.message})
    return int(ended.code)


def _exit(code: int) -> NoReturn:
    """Run the application's exit functions, and nothing of the supervisor's stack."""
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()  # noqa: SLF001 - a normal exit would run the parent's code too
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _process_name(slot: Slot) -> str:
    return f"{slot.role} {slot.number}" if slot.role == "worker" else slot.role


def _reseed() -> None:
    """Two workers with the same random state would draw the same numbers."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # preloaded
        numpy.random.seed()


def _detach_input() -> None:
    """A child has no use for the terminal's input."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
