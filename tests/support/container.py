"""A container without an engine: the steps of Dockerfile are run in namespaces of their own, and then what a pod of
kubernetes/ says, as it says it: as process 1, as its user, with a file system that is read-only, with its mounts.

The file system is that of the host, with its own /etc, /opt, /run and /tmp. What an engine adds beyond that (a base
image, limits, a network) is not there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import namespaces

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"

# Python may lie where only root can look; as the base image's, it is below /opt. What is there already stays: pip may
# be told to look there.
_BASE = f"""
mount -t proc proc /proc
cp -a /etc "$STAGE/etc"
mount --bind "$STAGE/etc" /etc
mkdir "$STAGE/opt"
for each in /opt/*; do if [ -d "$each" ]; then mkdir "$STAGE$each"; mount --bind "$each" "$STAGE$each"; fi; done
mount --rbind "$STAGE/opt" /opt
for each in /run /var/log; do mount -t tmpfs -o mode=755 tmpfs "$each"; done
mkdir -p /opt/python /opt/app/tests/support
mount --bind -o ro {shlex.quote(sys.base_prefix)} /opt/python
cp -r {shlex.quote(str(ROOT))}/tests/daemon_app /opt/app/tests
cp {shlex.quote(str(ROOT))}/tests/support/hostile_tasks.py /opt/app/tests/support
chmod -R a+rX /opt/app
export LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/opt/app PATH="$PATH:/usr/sbin:/sbin"
python() {{ /opt/python/bin/{PYTHON} "$@"; }}
"""


def steps(dockerfile: str) -> str:
    """As a script. A stage is a subshell; what a later one copies from it is at the same place."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", dockerfile))
    lines = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    stages: list[list[str]] = []
    for word, rest in lines:
        match word:
            case "FROM":
                stages.append([])
            case "ENV":
                stages[-1].append(f"export {rest.replace('PIP_NO_CACHE_DIR=1', '')}")  # for the image's size only
            case "WORKDIR":
                stages[-1].append(f"mkdir -p {rest}; cd {rest}")
            case "COPY" if not rest.startswith("--from"):
                *sources, target = rest.split()
                stages[-1].append(f"cp -r {' '.join(f'{shlex.quote(str(ROOT))}/{each}' for each in sources)} {target}")
            case "RUN":
                stages[-1].append(rest)
            case _:
                assert word in {"ARG", "COPY", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}, word
    *builds, last = ["\n".join(stage) for stage in stages]
    return "\n".join([*(f"(\n{build}\n)" for build in builds), "rm -rf /opt/src", last])


def instruction(dockerfile: str, name: str) -> Any:
    """Of the exec form, the words; else the text."""
    (found,) = re.findall(rf"^{name} (?:--\S+ )*(?:CMD )?(.*)$", dockerfile, re.MULTILINE)
    return json.loads(found) if found.startswith("[") else found


def volume(mount: str, files: Mapping[str, str]) -> str:
    """As the kubelet lays out a secret or a config map: each file is a link to one of the last version."""
    lines = [f"mkdir -p {mount}/..1", f"ln -s ..1 {mount}/..data"]
    for name, text in files.items():
        lines += [f"printf %s {shlex.quote(text)} >{mount}/..1/{name}", f"ln -s ..data/{name} {mount}/{name}"]
    return "\n".join([*lines, f"chgrp -R 10001 {mount}/..1", f"chmod -R g+rX,o-rwx {mount}/..1"])


def confined(pod: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """The command of the pod's only container, after `exec` or alone."""
    user, (container,) = pod["securityContext"], pod["containers"]
    given = {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}
    variables = {**given, **environment}
    ids = f"--reuid={user['runAsUser']} --regid={user['runAsGroup']} --clear-groups"
    rights = "--inh-caps=-all --bounding-set=-all --no-new-privs"
    words = [*(f"{name}={value}" for name, value in variables.items()), *container["command"]]
    return f"setpriv {ids} {rights} env {shlex.join(words)}"


class Container:
    """`pid` is that of its process 1, as the host sees it."""

    def __init__(self, unshare: subprocess.Popen[bytes], log: Path) -> None:
        self.popen = unshare
        self.pid = namespaces.first_process(unshare)
        self._log = log

    def output(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def run(self, words: Sequence[str], user: int) -> subprocess.CompletedProcess[str]:
        """As `kubectl exec`, or a HEALTHCHECK."""
        enter = [*namespaces.ENTER, str(self.pid), "--"]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        path = {"PATH": f"/opt/tasklib/bin:{os.environ['PATH']}:/usr/sbin:/sbin", "LD_LIBRARY_PATH": "/opt/python/lib"}
        return subprocess.run(
            [*enter, *become, *words], env=path, capture_output=True, text=True, check=False, timeout=60
        )


@contextlib.contextmanager
def container(*parts: str) -> Iterator[Container]:
    """Parts of one script; the last one ends with `exec`."""
    with tempfile.TemporaryDirectory(prefix="container-") as stage:
        log = Path(stage) / "log"
        script = "\n".join([_BASE, *parts])
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TASKLIB", "PYTHON", "PG"))}
        with log.open("wb") as output:
            popen = subprocess.Popen(
                [*namespaces.UNSHARE, "sh", "-euc", script], env=kept | {"STAGE": stage}, cwd="/",
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        try:
            yield Container(popen, log)
        finally:
            popen.kill()
            popen.wait()
