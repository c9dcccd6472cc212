"""A child's first and last steps: from the fork until it does what its role is, and out.

It keeps nothing of its parent's that it must not have: signals, file descriptors, siblings' pages, random state. It
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

from tasklib_daemon import kernel, logs, signals
from tasklib_daemon.exits import BOOT_ERRORS, ExitCode, exit_for
from tasklib_daemon.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tasklib_daemon.channel import Channel
    from tasklib_daemon.ledger import Ledger
    from tasklib_daemon.page import Page
    from tasklib_daemon.plan import Place
    from tasklib_daemon.settings import Settings
    from tasklib_daemon.stacks import Stacks

MARK_VARIABLE = "TASKLIB_DAEMON_MARK"  # inherited by what tasks start: the guardian knows them by it


@dataclass(frozen=True, slots=True)
class Birth:
    """What a child is given."""

    place: Place
    settings: Settings
    page: Page
    channel: Channel
    stacks: Stacks
    ledger: Ledger
    mark: str
    parent: int


def live(birth: Birth, leave_behind: Iterable[Callable[[], None]]) -> NoReturn:
    """`leave_behind` closes what is the supervisor's or a sibling's."""
    code = int(ExitCode.FAILED)
    try:
        _settle_in(birth, leave_behind)
        _work(birth)
        code = ExitCode.OK
    except BaseException as error:  # noqa: BLE001 - it must not get into the supervisor's loop
        with contextlib.suppress(Exception):
            code = _tell(birth, error)
    finally:
        _leave(code)


def _settle_in(birth: Birth, leave_behind: Iterable[Callable[[], None]]) -> None:
    with contextlib.suppress(PermissionError):  # the supervisor has done it
        os.setpgid(0, 0)
    kernel.die_with_parent(birth.parent)
    atexit._clear()  # noqa: SLF001 - what the supervisor wants tidied up is not ours
    for close in leave_behind:
        close()
    signals.reset()
    _reseed()
    birth.stacks.enable()
    _leave_terminal()
    kernel.name_process(f"tasklibd-{birth.place.role}")
    os.environ[MARK_VARIABLE] = birth.mark
    logs.configure(birth.settings, _process_name(birth.place))
    signal.signal(signal.SIGUSR1, _reopen_logs)
    signals.release()


def _work(birth: Birth) -> None:
    """Each is imported only where it is needed: the supervisor stays small."""
    if birth.place.role == "worker":
        from tasklib_daemon import worker_child  # noqa: PLC0415

        worker_child.run(birth.settings, birth.page, birth.channel, birth.place.slot, birth.ledger)
    elif birth.place.role == "keeper":
        from tasklib_daemon import keeper  # noqa: PLC0415

        keeper.run(birth.settings, birth.channel, birth.ledger)
    else:
        from tasklib_daemon import web  # noqa: PLC0415

        web.run(birth.settings, birth.channel)


def _tell(birth: Birth, error: BaseException) -> int:
    """Why it ends. The supervisor says it once, for all children that fail alike; the traceback is told here."""
    ended = exit_for(error)
    if ended.code not in BOOT_ERRORS:
        log.exception("child.failed", exc_info=error)
    birth.channel.send({"say": "failed", "code": int(ended.code), "message": ended.message})
    return int(ended.code)


def _leave(code: int) -> NoReturn:
    """Without the parent's stack: what the application wants done at the exit is done, and nothing else."""
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()  # noqa: SLF001 - the interpreter's own end would run the parent's code too
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _process_name(place: Place) -> str:
    return f"{place.role} {place.slot}" if place.role == "worker" else place.role


def _reseed() -> None:
    """Two workers with one random state would draw the same numbers."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # preloaded
        numpy.random.seed()


def _reopen_logs(_signum: int, _frame: object) -> None:
    logs.reopen()


def _leave_terminal() -> None:
    """Nobody types for a child."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
