"""The units as systemd runs them, with their hardening, their watchdog and their limits."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

import pytest

import tasklib
from tasklib.embedded import postgres
from tests.support.systemd_host import ROOT, UNITS, Host, systemd_host, why_not
from tests.support.working import wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

pytestmark = [
    pytest.mark.xdist_group("systemd"),  # they share what takes long to make
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.direct("a server of its own"),
]

DATABASE = "postgresql://tasklib:secret@db.example.org/shop"
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
    """Of an empty database, in a server that a service with a /tmp of its own can reach."""
    with postgres(port=0) as server:
        yield server.dsn


@pytest.fixture(scope="module")
def host(url: str) -> Iterator[Host]:
    """Installed by the commands of systemd/README.md, as they stand there. Only the environment is here already, and
    the database is another one.
    """
    with systemd_host() as made:
        for name in ("tasklibd.service", "tasklibd@.service"):
            made.write(f"{UNITS}/{name}.d/test.conf", DROP_IN)
        made.write("/opt/settings.toml", SETTINGS)
        made.write("/etc/tasklibd/mail/tasklibd.toml", 'database_url = "wrong"\n' + SETTINGS)
        lines = commands("Install").splitlines()
        kept = [line for line in lines if not re.search(r"-m venv|/pip install|^journalctl", line)]
        assert len(kept) == len(lines) - 3
        script = "\n".join(kept).replace(DATABASE, url)
        installed = "/etc/tasklibd/tasklibd.toml   # set app, at least\n"
        follow(made, script.replace(installed, f"{installed}cp /opt/settings.toml /etc/tasklibd/tasklibd.toml\n"))
        yield made


def commands(section: str) -> str:
    """Of the README, the first block in a section."""
    text = (ROOT / "systemd" / "README.md").read_text("utf-8").partition(f"\n## {section}\n")[2]
    return text.partition("```bash\n")[2].partition("```")[0]


def follow(host: Host, script: str) -> None:
    """As root, in the source tree."""
    ended = host.run("bash", "-euo", "pipefail", "-c", f"cd /opt/src\n{script}", env=PYTHON)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture
def client(url: str) -> Iterator[tasklib.Client]:
    with tasklib.Client(tasklib.Config(url)) as made:
        yield made


def events(host: Host, name: str) -> list[dict[str, object]]:
    lines = [line for line in host.read("/var/log/tasklibd.log").splitlines() if line.startswith("{")]
    return [event for event in map(json.loads, lines) if event["event"] == name]


def running(client: tasklib.Client, name: str, seconds: float) -> UUID:
    made = client.submit_task(name, seconds=seconds)
    wait_until(lambda: client.get_task(made).state == "running", "it to run")  # type: ignore[union-attr]
    return made


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

    task = wait_final(client, client.submit_task("task_context"))
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

    napping, began = running(client, "nap", seconds=3.0), time.monotonic()
    waiting = running(client, "wait_for_a_program", seconds=2.0)
    host.systemctl("stop", "tasklibd")
    assert time.monotonic() - began > 2, "it waited for the task, longer than the one second of the unit"
    assert client.get_task(napping).state == "completed"  # type: ignore[union-attr]
    assert client.get_task(waiting).result == {"value": 0}, "TERM is the supervisor's"  # type: ignore[union-attr]
    assert (host.property("tasklibd", "Result"), host.property("tasklibd", "ActiveState")) == ("success", "inactive")


@pytest.mark.slow
def test_a_secret_that_is_encrypted(host: Host, url: str) -> None:
    """By the commands of the README: it is decrypted for the daemon alone, the file in plain text is gone, and the
    other secrets are still there.
    """
    if (setup := host.run("systemd-creds", "setup")).returncode:
        pytest.skip(f"there can be no key here: {setup.stderr}")
    host.write("/etc/tasklibd/web_token", "the-other-secret-of-it", mode="600")
    try:
        follow(host, commands("Secrets"))
        assert host.run("test", "-e", "/etc/tasklibd/database_url").returncode == 1
        host.systemctl("restart", "tasklibd")
        assert host.read("/run/credentials/tasklibd.service/database_url").strip() == url
        readme = (ROOT / "systemd" / "README.md").read_text("utf-8")
        (by_hand,) = re.findall(r"`export DATABASE_URL=\$\((.*)\)`", readme)
        assert host.run(*by_hand.split()).stdout.strip() == url
        assert host.read("/run/credentials/tasklibd.service/web_token") == "the-other-secret-of-it"
        assert url.encode() not in host.run("cat", "/etc/tasklibd/database_url.cred").stdout.encode()
    finally:
        host.write("/etc/tasklibd/database_url", url, mode="600")
        host.run("rm", f"{UNITS}/tasklibd.service.d/credentials.conf", "/etc/tasklibd/web_token")
        host.systemctl("daemon-reload")


@pytest.mark.slow
def test_an_instance_that_cannot_start(host: Host) -> None:
    """The template has its files in a directory of its own. What is wrong with them is told, and not tried again."""
    assert host.run("systemctl", "start", "tasklibd@mail").returncode != 0
    assert host.property("tasklibd@mail", "Result") == "exit-code"
    assert host.property("tasklibd@mail", "ExecMainStatus") == "78"
    assert host.property("tasklibd@mail", "NRestarts") == "0"
    assert "database_url (/etc/tasklibd/mail/tasklibd.toml) must be a libpq URL" in host.read("/var/log/tasklibd.log")
