"""The units as systemd runs them, with their hardening, their watchdog and their limits."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

import tasklib
from tasklib import migrate
from tasklib.embedded import postgres
from tests.systemd_host import ROOT, UNITS, Host, systemd_host, why_not
from tests.waiting import wait_until
from tests.working import wait_final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.direct("a server of its own"),
]

SETTINGS = """
app = ["tests.daemon_app.tasks", "tests.daemon_app.isolated"]
workers = 1
concurrency = 2
poll_interval_seconds = 0.2
grace_seconds = 20
[web]
port = "none"
"""

PYTHON = {
    "PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/opt/python/lib", "PYTHONPATH": "/opt/src:/opt/src/daemon:/opt/site",
    "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip

# What only the test needs: where Python is, a log that can be read without a journal, and short times.
DROP_IN = f"""
[Service]
Environment={" ".join(f"{name}={value}" for name, value in PYTHON.items())}
StandardError=append:/var/log/%p.log
WatchdogSec=2
RestartSec=100ms
TimeoutStopSec=1
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a server that a service with a /tmp of its own can reach."""
    with postgres(port=0) as server:
        migrate.migrate(tasklib.Config(server.dsn))
        yield server.dsn


@pytest.fixture(scope="module")
def host(url: str) -> Iterator[Host]:
    """Installed as systemd/README.md says."""
    with systemd_host() as made:
        for name in ("tasklibd.service", "tasklibd@.service"):
            made.write(f"{UNITS}/{name}", (ROOT / "systemd" / name).read_text("utf-8"))
            made.write(f"{UNITS}/{name}.d/test.conf", DROP_IN)
        made.write("/etc/sysusers.d/tasklibd.conf", (ROOT / "systemd" / "tasklibd.sysusers").read_text("utf-8"))
        assert made.run("systemd-sysusers", "/etc/sysusers.d/tasklibd.conf").returncode == 0
        made.write("/etc/tasklibd/tasklibd.toml", SETTINGS)
        made.write("/etc/tasklibd/database_url", url, mode="600")
        made.write("/etc/tasklibd/mail/tasklibd.toml", 'database_url = "wrong"\n' + SETTINGS)
        made.systemctl("daemon-reload")
        yield made


@pytest.fixture
def client(url: str) -> Iterator[tasklib.Client]:
    with tasklib.Client(tasklib.Config(url)) as made:
        yield made


def events(host: Host, name: str) -> list[dict[str, object]]:
    lines = [line for line in host.read("/var/log/tasklibd.log").splitlines() if line.startswith("{")]
    return [event for event in map(json.loads, lines) if event["event"] == name]


def running(client: tasklib.Client, seconds: float) -> UUID:
    napping = client.submit_task("nap", seconds=seconds)
    wait_until(lambda: client.get_task(napping).state == "running", "it to run")  # type: ignore[union-attr]
    return napping


@pytest.mark.slow
def test_a_service_from_start_to_stop(host: Host, client: tasklib.Client) -> None:
    """Ready when it is; confined as the unit says, and yet every kind of task runs; replaced without a gap at a reload;
    restarted when it hangs, with a traceback in its log; not killed while it drains, however short the unit's limit is.
    """
    host.systemctl("start", "tasklibd")
    assert host.property("tasklibd", "ActiveState") == "active"
    assert "running: 1 of 1 workers ready" in host.wait_for_status("tasklibd", "running")
    assert (
        json.loads(host.run("/opt/tasklib/bin/tasklibd", "status", "--json", env=PYTHON).stdout)["state"] == "running"
    )

    task = wait_final(client, client.submit_task("surroundings"))
    assert task.result is not None
    where = task.result["value"]
    assert where["user"] == int(host.run("id", "-u", "tasklib").stdout)
    assert (where["writable"], where["capabilities"], where["no_new_privileges"]) == (["/tmp"], 0, 1)  # noqa: S108 - its own
    assert where["filters"] == 2
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & {*where["variables"]}
    assert wait_final(client, client.submit_task("say", word="isolated")).state == "completed"

    host.systemctl("reload", "tasklibd")
    wait_until(lambda: bool(events(host, "reload.done")), "the reload")
    wait_until(lambda: host.property("tasklibd", "ActiveState") == "active", "the word that it is over")

    first = host.property("tasklibd", "MainPID")
    assert host.run("kill", "-STOP", first).returncode == 0
    wait_until(lambda: host.property("tasklibd", "NRestarts") == "1", "the watchdog")
    wait_until(lambda: host.property("tasklibd", "ActiveState") == "active", "the restart")
    assert host.property("tasklibd", "MainPID") != first
    assert "Fatal Python error: Aborted" in host.read("/var/log/tasklibd.log")

    napping, began = running(client, seconds=3.0), time.monotonic()
    host.systemctl("stop", "tasklibd")
    assert time.monotonic() - began > 2, "it waited for the task, longer than the one second of the unit"
    assert client.get_task(napping).state == "completed"  # type: ignore[union-attr]
    assert (host.property("tasklibd", "Result"), host.property("tasklibd", "ActiveState")) == ("success", "inactive")


@pytest.mark.slow
def test_an_instance_that_cannot_start(host: Host) -> None:
    """The template has its files in a directory of its own. What is wrong with them is told, and not tried again."""
    assert host.run("systemctl", "start", "tasklibd@mail").returncode != 0
    assert host.property("tasklibd@mail", "Result") == "exit-code"
    assert host.property("tasklibd@mail", "ExecMainStatus") == "78"
    assert host.property("tasklibd@mail", "NRestarts") == "0"
    assert "database_url (/etc/tasklibd/mail/tasklibd.toml) must be a libpq URL" in host.read("/var/log/tasklibd.log")
