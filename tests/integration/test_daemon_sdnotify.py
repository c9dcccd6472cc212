"""What a service manager sees of a real daemon; the test is the manager."""

from __future__ import annotations

import signal
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tasklib_daemon.exit_codes import ExitCode
from tests.support.managers import NotifySocket
from tests.support.working import wait_final
from tools.daemons import daemon, is_alive
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import tasklib

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")

# As systemd does it: the watchdog is for one process only.
FOR_THIS_PID = ("sh", "-c", 'WATCHDOG_PID=$$ exec "$@"', "sh")

# The loop stands still, in the middle of a round, as soon as there is a file.
HANGING = """
import time
from pathlib import Path
from tasklib_daemon.cli import main
from tasklib_daemon.supervisor import Supervisor

def hear_operators_or_hang(self, hear=Supervisor._answer_operators):
    if (self.settings.runtime_directory / "hang").exists():
        (self.settings.runtime_directory / "hangs").touch()
        time.sleep(3600)
    hear(self)

Supervisor._answer_operators = hear_operators_or_hang
main()
"""


@pytest.fixture
def manager() -> Iterator[NotifySocket]:
    with tempfile.TemporaryDirectory(prefix="manager-") as made, NotifySocket(str(Path(made) / "notify")) as opened:
        yield opened


def test_from_start_to_stop(client: tasklib.Client, database_url: str, manager: NotifySocket, tmp_path: Path) -> None:
    """READY when every child is; pings; RELOADING and READY again, also if the reload is refused or fails; STOPPING,
    and more time for as long as it drains: an operator's drain has no limit. The variables are not handed on.
    """
    variables, word = manager.environment(WATCHDOG_USEC="600000"), tmp_path / "word"
    word.write_text("")
    with daemon(
        database_url, environment=variables | {"DAEMON_APP_IMPORT": str(word)}, wrapper=FOR_THIS_PID, workers=2
    ) as made:
        manager.wait_for("READY=1")
        assert manager.messages[0][0].startswith("STATUS=starting: 0 of 2 workers ready")
        manager.wait_for("STATUS=running: 2 of 2 workers ready")
        manager.wait_for("WATCHDOG=1", times=5)
        inherited = wait_final(client, client.submit_task("task_context")).result
        assert inherited is not None
        assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & {*inherited["value"]["variables"]}

        manager.forget()
        made.signal(signal.SIGHUP)
        manager.wait_for("READY=1")
        made.wait_for("reload.done")
        assert _words(manager) == ["RELOADING=1", "READY=1"]

        manager.forget()
        word.write_text("fail")
        made.signal(signal.SIGHUP)
        manager.wait_for("READY=1")
        made.wait_for("reload.failed")
        assert _words(manager) == ["RELOADING=1", "READY=1"]

        manager.forget()
        made.settings_file.write_text("workerz = 3")
        made.signal(signal.SIGHUP)
        manager.wait_for("READY=1")
        made.wait_for("reload.refused")
        assert _words(manager) == ["RELOADING=1", "READY=1"]

        manager.forget()
        goes_on = tmp_path / "goes on"
        waiting = client.submit_task("wait_for_file", path=str(goes_on))
        wait_until(lambda: client.get_task(waiting).state == "running", "it to run")  # type: ignore[union-attr]
        made.ask("drain")
        manager.wait_for("STATUS=draining: 1 tasks execute")
        manager.wait_for("EXTEND_TIMEOUT_USEC=30000000", times=2)
        goes_on.touch()
        assert _words(manager) == ["STOPPING=1"]
        assert made.wait() == ExitCode.OK


def _words(manager: NotifySocket) -> list[str]:
    """Those about the phase."""
    return [line for line in manager.lines() if line in {"READY=1", "RELOADING=1", "STOPPING=1"}]


def test_a_hung_loop_stops_the_pings(database_url: str, manager: NotifySocket) -> None:
    """The process lives, its children work; but no ping comes. The signal that the watchdog then sends leaves a
    traceback that shows where it hangs, and nobody survives.
    """
    environment = manager.environment(WATCHDOG_USEC="600000")
    program = ("-c", HANGING, "run", "--config")
    with daemon(database_url, environment=environment, program=program) as made:
        manager.wait_for("WATCHDOG=1", times=3)
        children = [made.child("worker"), made.child("keeper")]
        (made.directory / "run" / "hang").touch()
        wait_until((made.directory / "run" / "hangs").exists, "the loop to hang")
        manager.forget()
        manager.is_silent(seconds=2.0)
        assert all(map(is_alive, [made.pid, *children]))
        made.signal(signal.SIGABRT)
        assert made.wait() == -signal.SIGABRT
        assert "hear_operators_or_hang" in made.output()
        wait_until(lambda: not made.processes(), "nobody to survive")


def test_a_start_without_a_database_is_given_time(manager: NotifySocket) -> None:
    """An outage is no reason to fail: it is told why it is not ready, and asks for more time."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"postgresql://nobody@127.0.0.1:{taken.getsockname()[1]}/nowhere"
        with daemon(url, environment=manager.environment(), waits=False) as made:
            manager.wait_for("STATUS=starting: 0 of 1 workers ready, no connection to the database")
            manager.wait_for("EXTEND_TIMEOUT_USEC=", times=3)
            assert _words(manager) == []
            assert made.stop() == ExitCode.OK
            assert _words(manager) == ["STOPPING=1"]


def test_a_start_that_fails_says_why(database_url: str, manager: NotifySocket) -> None:
    """In one line, as the log does; with the exit code that the unit knows. One whose children die again and again asks
    for no more time.
    """
    with daemon(database_url, environment=manager.environment(DAEMON_APP_IMPORT="fail"), waits=False) as failed:
        assert failed.wait() == ExitCode.IMPORT
        manager.wait_for("STATUS=cannot import tests.daemon_app.tasks: RuntimeError: the import fails on purpose")
        assert _words(manager) == ["STOPPING=1"]
    manager.forget()
    restart = {"first_seconds": 0.01, "longest_seconds": 0.02, "crash_loop_deaths": 2}
    environment = manager.environment(DAEMON_APP_IMPORT="die")
    with daemon(database_url, environment=environment, waits=False, restart=restart):
        manager.wait_for("STATUS=starting: 0 of 1 workers ready, worker 1 died 2 times or more")
        manager.forget()
        manager.is_silent(seconds=2.0)
