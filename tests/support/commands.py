"""Runs the command `tasklib` in a process of its own, as a user does. The processes are forked from one that has
imported what the command needs: that import takes half a second of each command otherwise.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tasklib import cli

if TYPE_CHECKING:
    from collections.abc import Mapping

COMMAND = Path(sys.executable).with_name("tasklib")
PRELOAD = ["tasklib.client", "tasklib.commands", "tasklib.doctor", "tasklib.migrate", "tasklib.printing"]


def run_tasklib(
    *words: str, variables: Mapping[str, str], directory: Path, seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    """`tasklib WORDS`, with these environment variables and no others, in this directory."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        streams = [f"/proc/{os.getpid()}/fd/{stream.fileno()}" for stream in (out, err)]
        child = context.Process(target=_run, args=(words, dict(variables), directory, *streams))
        child.start()
        child.join(seconds)
        if child.exitcode is None:
            child.kill()
            raise subprocess.TimeoutExpired([str(COMMAND), *words], seconds)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([str(COMMAND), *words], child.exitcode, out.read(), err.read())


def _run(words: tuple[str, ...], variables: dict[str, str], directory: Path, out: str, err: str) -> None:
    """In the forked process: what the shell and Python's start would have done."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    for path, number, name in ((out, 1, "stdout"), (err, 2, "stderr")):
        with Path(path).open("w") as stream:
            os.dup2(stream.fileno(), number)
        setattr(sys, name, os.fdopen(number, "w", closefd=False))
    sys.argv = [str(COMMAND), *words]
    sys.path[0] = str(COMMAND.parent)
    cli.main()
