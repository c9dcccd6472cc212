"""The command `tasklibd`. It needs the extra `cli`; without it, it says so."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from tasklib_daemon.exit_codes import ExitCode


def main() -> None:
    missing = [package for package in ("typer", "rich") if find_spec(package) is None]
    if missing:
        needed = f"tasklibd: the command line needs {' and '.join(missing)}: pip install 'tasklib-pg[daemon]'"
        print(needed, file=sys.stderr)  # noqa: T201 - the command's voice
        sys.exit(ExitCode.FAILED)
    from tasklib_daemon.commands import run  # noqa: PLC0415 - importable only with the extra

    run()
