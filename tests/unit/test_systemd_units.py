"""The files of systemd/, by systemd's own tools; tests/acceptance/test_systemd_service.py runs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasklib_daemon import plan
from tasklib_daemon.exit_codes import BOOT_ERRORS, ExitCode
from tasklib_daemon.sdnotify import EXTENSION_SECONDS
from tasklib_daemon.settings import SECRETS, load
from tasklib_daemon.supervisor import IDLE_SECONDS, SUSPENDED_SECONDS

SYSTEMD = Path(__file__).resolve().parents[2] / "systemd"
UNITS = ("tasklibd.service", "tasklibd@.service")
MOST_EXPOSED = 20  # tenths, of a scale to 10

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd is not installed here: apt-get install systemd"
)


def analyze(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "--no-pager", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def verified(unit: str, place: Path, *, change: tuple[str, str] = ("", "")) -> subprocess.CompletedProcess[str]:
    """With a program that is there in the place of the one that will be installed."""
    text = (SYSTEMD / unit).read_text("utf-8").replace("/opt/tasklib/bin/tasklibd", sys.executable).replace(*change)
    copy = place / unit.replace("@.", "@mail.")
    (place / unit).write_text(text, "utf-8")
    if copy.name != unit:
        copy.symlink_to(unit)
    return analyze("verify", "--man=no", "--recursive-errors=one", copy)


def values(unit: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", (SYSTEMD / unit).read_text("utf-8"), re.MULTILINE)


@needs_analyze
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_understands_every_line(unit: str, tmp_path: Path) -> None:
    """Not one warning; and a line that is wrong is an error of the check."""
    found = verified(unit, tmp_path)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")
    (tmp_path / "wrong").mkdir()
    assert verified(unit, tmp_path / "wrong", change=("WatchdogSec", "WatchdogSeconds")).returncode != 0


@needs_analyze
@pytest.mark.parametrize("unit", UNITS)
def test_little_is_exposed(unit: str) -> None:
    """Under 2.0, where 10 is a service without any limits."""
    found = analyze("security", "--offline=true", f"--threshold={MOST_EXPOSED - 1}", SYSTEMD / unit)
    assert found.returncode == 0, found.stdout[-200:]
    assert float(re.findall(r"exposure level for .*: ([\d.]+)", found.stdout)[0]) < MOST_EXPOSED / 10


def test_the_two_units_are_alike() -> None:
    """Save for where an instance has its files, and its name."""
    one, other = ([*map(str.strip, (SYSTEMD / unit).read_text("utf-8").splitlines())] for unit in UNITS)
    alike = [line.replace("/%i/", "/").replace("-%i", "").replace(" %i", "") for line in other]
    own = "Environment=TASKLIB_NAME=%H"
    assert own in alike
    assert [line for line in one if not line.startswith("#")] == [
        line for line in alike if not line.startswith("#") and line != own
    ]


@pytest.mark.parametrize("unit", UNITS)
def test_the_unit_knows_the_daemon(unit: str) -> None:
    """Its secrets, its exit codes, and how long it takes: a limit that is shorter than the default drain, or a watchdog
    that bites a loop which is merely late, would be a trap.
    """
    assert [each.partition(":")[0] for each in values(unit, "LoadCredential")] == [
        secret.replace(".", "_") for secret in SECRETS
    ]
    assert [each.partition(":")[0] for each in values(unit, "SetCredential")] == [
        secret.replace(".", "_") for secret in SECRETS
    ]
    never_again = {ExitCode(int(code)) for code in values(unit, "RestartPreventExitStatus")[0].split()}
    assert never_again == {ExitCode.USAGE, ExitCode.RUNNING_ALREADY, *BOOT_ERRORS} - {ExitCode.SCHEMA}
    grace = load(None, {"PGHOST": "x"}).grace_seconds
    drain = grace + plan.INTERRUPT_SECONDS + plan.SETTLE_SECONDS + plan.EXIT_SECONDS
    assert float(values(unit, "TimeoutStopSec")[0]) > drain
    assert float(values(unit, "WatchdogSec")[0]) > 5 * (IDLE_SECONDS + SUSPENDED_SECONDS)
    assert float(values(unit, "WatchdogSec")[0]) >= EXTENSION_SECONDS
    assert values(unit, "RuntimeDirectory")[0].startswith("tasklibd")  # where the commands look for it


@pytest.mark.parametrize("unit", UNITS)
def test_children_are_left_to_the_supervisor(unit: str) -> None:
    """Which ends them in its order; one that is out of memory dies alone; and none of them speaks for the service. Its
    sockets are nobody else's.
    """
    keys = ("Type", "NotifyAccess", "KillMode", "OOMPolicy", "RuntimeDirectoryMode")
    assert [values(unit, key) for key in keys] == [["notify"], ["main"], ["mixed"], ["continue"], ["0700"]]


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None or os.geteuid() != 0, reason="needs systemd, and root")
def test_the_user_is_made(tmp_path: Path) -> None:
    """With no shell and no home."""
    (tmp_path / "etc").mkdir()
    command = ["systemd-sysusers", f"--root={tmp_path}", "-"]
    subprocess.run(command, input=(SYSTEMD / "tasklibd.sysusers").read_bytes(), check=True, capture_output=True)
    assert re.match(
        r"tasklib:x:\d+:\d+:tasklib daemon:/:/usr/sbin/nologin\n", (tmp_path / "etc" / "passwd").read_text()
    )
    (user,) = {*values("tasklibd.service", "User"), *values("tasklibd@.service", "Group")}
    assert user == "tasklib"
