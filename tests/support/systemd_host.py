"""A systemd that runs units, for the length of a `with` block: process 1 of namespaces of its own, with its own /etc,
/run and /opt, in a control group of its own. The kernel and the network are those of the host.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import namespaces
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
SYSTEMD = Path("/lib/systemd/systemd")
UNITS = "/etc/systemd/system"
TARGETS = ("sysinit", "basic", "multi-user", "network-online", "shutdown", "umount", "final", "exit")

# The interpreter may lie where a service must not look (ProtectHome=): it is shown below /opt too. Mounts are shared,
# as on any host: credentials need it. A /tmp of its own: commands look there for daemons.
_SCRIPT = f"""
mount -t proc proc /proc
mount --bind -o ro /proc/sys /proc/sys
umount -R /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
cp -a /etc "$STAGE/etc"
mount --bind "$STAGE/etc" /etc
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=755 tmpfs /opt
mount -t tmpfs -o mode=755 tmpfs /var/log
rm -rf {UNITS}
mkdir -p /run/lock {UNITS} /opt/python /opt/site /opt/src/tests/support /opt/tasklib/bin
mount --bind -o ro "$PYTHON" /opt/python
mount --bind -o ro "$SITE" /opt/site
cp -r "$ROOT/tasklib" "$ROOT/daemon" "$ROOT/systemd" /opt/src
cp -r "$ROOT/tests/daemon_app" /opt/src/tests
cp "$ROOT/tests/support/hostile_tasks.py" /opt/src/tests/support
printf '#!/bin/sh\\nexec /opt/python/bin/%s -m tasklib_daemon "$@"\\n' "$PROGRAM" >/opt/tasklib/bin/tasklibd
printf '#!/bin/sh\\nexec /opt/python/bin/%s -c "from tasklib.cli import main; main()" "$@"\\n' "$PROGRAM" \\
    >/opt/tasklib/bin/tasklib
chmod -R a+rX /opt/src /opt/tasklib
chmod +x /opt/tasklib/bin/tasklib /opt/tasklib/bin/tasklibd
for name in {" ".join(TARGETS)}; do
    printf '[Unit]\\nDefaultDependencies=no\\n' >"{UNITS}/$name.target"
done
mkdir "$STAGE/keys"
mount --bind "$STAGE/keys" /var/lib/systemd
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount --make-rshared /
export container=test SYSTEMD_UNIT_PATH={UNITS} SYSTEMD_GENERATOR_PATH=/none
exec {SYSTEMD} --system --unit=multi-user.target --log-target=console --show-status=no
"""


def why_not() -> str | None:
    """Why no systemd can be started here."""
    if not SYSTEMD.exists():
        return "systemd is not installed here: apt-get install systemd"
    if _control_groups() is None:
        return "there are no control groups of version 2 here"
    return namespaces.why_not()


class Host:
    """Paths are those inside."""

    def __init__(self, unshare: subprocess.Popen[bytes], log: Path) -> None:
        self._pid = namespaces.first_process(unshare)
        self._log = log

    def run(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        enter = [*namespaces.ENTER, str(self._pid), "--cgroup", "--"]
        return subprocess.run([*enter, *words], capture_output=True, text=True, check=False, timeout=60, **options)

    def systemctl(self, *words: str) -> str:
        ended = self.run("systemctl", *words)
        assert ended.returncode == 0, f"systemctl {' '.join(words)}: {ended.stderr}\n{self._log.read_text()}"
        return ended.stdout.strip()

    def property(self, unit: str, name: str) -> str:
        return self.systemctl("show", unit, "-P", name)

    def wait_for_status(self, unit: str, word: str) -> str:
        """What the unit says of itself."""
        wait_until(lambda: self.property(unit, "StatusText").startswith(word), f"{unit} to say {word}")
        return self.property(unit, "StatusText")

    def write(self, path: str, text: str, mode: str = "644") -> None:
        ended = self.run("install", "-D", "-m", mode, "/dev/stdin", path, input=text)
        assert ended.returncode == 0, ended.stderr

    def read(self, path: str) -> str:
        return self.run("cat", path).stdout

    def wait_until_up(self) -> None:
        """Degraded: a unit that is not ours has failed."""
        up = {"running", "degraded"}
        wait_until(lambda: self.run("systemctl", "is-system-running").stdout.strip() in up, "systemd to be up")


@contextlib.contextmanager
def systemd_host() -> Iterator[Host]:
    groups = _control_groups()
    assert groups is not None
    group = groups / f"tasklib-test-{os.getpid()}"
    group.mkdir()
    unshare = None
    with tempfile.TemporaryDirectory(prefix="systemd-") as stage:
        try:
            log = Path(stage) / "log"
            unshare = _start(group, Path(stage), log)
            host = Host(unshare, log)
            host.wait_until_up()
            yield host
        finally:
            if unshare is not None:
                unshare.kill()  # and systemd with it, and so everybody
                unshare.wait()
            wait_until(lambda: _is_removed(group), "everybody to be gone")


def _start(group: Path, stage: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [*namespaces.UNSHARE, "--cgroup", "sh", "-euc", _SCRIPT]
    environment = {
        "PATH": os.environ["PATH"], "STAGE": str(stage), "ROOT": str(ROOT), "PYTHON": sys.base_prefix,
        "SITE": sysconfig.get_path("purelib"),
        "PROGRAM": f"python{sys.version_info.major}.{sys.version_info.minor}",
    }  # fmt: skip
    join = f'echo $$ >"{group}/cgroup.procs"; exec "$@"'
    with log.open("wb") as output:
        return subprocess.Popen(["sh", "-euc", join, "sh", *command], env=environment, stdout=output, stderr=output)


def _control_groups() -> Path | None:
    mounts = [line.split() for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    found = [Path(words[1]) for words in mounts if words[2] == "cgroup2" and "rw" in words[3].split(",")]
    return found[0] if found else None


def _is_removed(group: Path) -> bool:
    """Only when nobody is in it any more."""
    with contextlib.suppress(OSError):
        for each in sorted(group.rglob("*"), reverse=True):
            if each.is_dir():
                each.rmdir()
        group.rmdir()
    return not group.exists()
