"""The notify protocol, to a real socket: what is told, and when."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING

import pytest

from tasklib_daemon.sdnotify import EXTENSION_SECONDS, ServiceManager
from tasklib_daemon.status import headline
from tests.support.managers import NotifySocket

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXTEND = f"EXTEND_TIMEOUT_USEC={int(EXTENSION_SECONDS * 1e6)}"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[NotifySocket]:
    with NotifySocket(str(tmp_path / "notify")) as made:
        yield made


def test_a_life_in_its_order(manager: NotifySocket) -> None:
    """READY once, when it runs; more time while it starts or stops; a status when it is a new one."""
    us = ServiceManager(manager.environment())
    us.notify("starting", "a", 0.0)
    us.notify("starting", "a", 0.5)
    us.notify("starting", "b", 1.0)
    us.notify("running", "c", 1.5)
    us.notify("running", "c", 9.5)
    us.notify("stopping", "d", 10.0)
    us.notify("stopping", "d", 11.0)
    assert manager.take() == [
        ["STATUS=a", EXTEND],
        ["STATUS=b", EXTEND],
        ["READY=1", "STATUS=c"],
        ["STOPPING=1", "STATUS=d", EXTEND],
        [EXTEND],
    ]


def test_a_start_that_gets_nowhere_has_no_more_time(manager: NotifySocket) -> None:
    """So that the manager's own limit ends it."""
    us = ServiceManager(manager.environment())
    us.notify("starting", "a", 0.0, extends=False)
    assert manager.take() == [["STATUS=a"]]


def test_a_reload_that_is_over_at_once_is_told_too(manager: NotifySocket) -> None:
    """RELOADING with the moment, in a message of its own, then READY: a manager that asked for it waits for both."""
    us = ServiceManager(manager.environment())
    us.notify("running", "a", 0.0)
    before = time.monotonic_ns() // 1000
    us.note_reload()
    us.notify("running", "a", 1.0)
    _, reloading, ready = manager.take()
    assert (reloading[0], ready) == ("RELOADING=1", ["READY=1"])
    assert before <= int(reloading[1].removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000


def test_a_reload_that_takes_its_time_is_extended(manager: NotifySocket) -> None:
    """And READY comes when it is over, not before."""
    us = ServiceManager(manager.environment())
    us.notify("running", "a", 0.0)
    us.note_reload()
    us.notify("reloading", "a", 1.0)
    us.notify("reloading", "a", 2.0)
    us.notify("running", "a", 3.0)
    assert [lines[0] for lines in manager.take()] == ["READY=1", "RELOADING=1", EXTEND, EXTEND, "READY=1"]


def test_the_watchdog_is_pinged_three_times_in_its_time(manager: NotifySocket) -> None:
    """In every phase; not when it waits for another process, or for none."""
    us = ServiceManager(manager.environment(WATCHDOG_USEC="6000000", WATCHDOG_PID=str(os.getpid())))
    for moment in range(6):
        us.notify("running", "a", float(moment))
    assert [lines[-1] for lines in manager.take()] == ["WATCHDOG=1"] * 3
    for variables in (
        {"WATCHDOG_USEC": "6000000", "WATCHDOG_PID": "1"},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "x"},
    ):
        ServiceManager(manager.environment(**variables)).notify("running", "a", 1.0)
        assert manager.take() == [["READY=1", "STATUS=a"]]


def test_its_variables_are_nobody_elses(manager: NotifySocket) -> None:
    """What a task starts must not speak for the daemon."""
    environment = manager.environment(WATCHDOG_USEC="6000000", WATCHDOG_PID="1", PATH="/bin")
    ServiceManager(environment)
    assert environment == {"PATH": "/bin"}


def test_a_name_that_is_in_no_file_system() -> None:
    """An address with an @ is an abstract one."""
    with NotifySocket(f"@tasklib-{os.getpid()}") as manager:
        ServiceManager(manager.environment()).notify("running", "a", 0.0)
        assert manager.take() == [["READY=1", "STATUS=a"]]


def test_a_manager_that_does_not_read_costs_no_time_and_no_word(manager: NotifySocket) -> None:
    """The loop goes on; what could not be told is told later."""
    us = ServiceManager(manager.environment())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, contextlib.suppress(BlockingIOError):
        other.setblocking(False)
        while True:
            other.sendto(b"X=1", manager.address)
    us.note_reload()
    us.notify("running", "a", 0.0)
    assert set(map(tuple, manager.take())) == {("X=1",)}
    us.notify("running", "a", 0.1)
    assert [lines[0] for lines in manager.take()] == ["RELOADING=1", "READY=1"]


def test_without_a_manager_nothing_is_sent() -> None:
    """As on a terminal or in a container."""
    ServiceManager({"WATCHDOG_USEC": "1"}).notify("running", "a", 0.0)


def test_a_manager_that_is_gone_is_no_error(tmp_path: Path) -> None:
    us = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    us.notify("running", "a", 0.0)
    us.notify("stopping", "a", 1.0)


def test_the_headline_says_what_somebody_waits_for() -> None:
    """How many are ready, what is missing; while it drains, what still executes."""
    assert headline({}) == "starting: 0 of 0 workers ready, no connection to the database"
    running = {"slot": 1, "state": "ready", "running": 3}
    assert headline({"state": "running", "database": True, "wanted_workers": 2, "workers": [running]}) == (  # type: ignore[list-item]
        "running: 1 of 2 workers ready"
    )
    told = headline({"state": "draining", "database": True, "workers": [running], "problems": ["worker 1 died"]})  # type: ignore[list-item]
    assert told == "draining: 3 tasks execute, worker 1 died"
