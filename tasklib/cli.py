"""The entry point of the command `tasklib`. Without the extra `cli` it says what to install."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    missing = [package for package in ("typer", "rich") if find_spec(package) is None]
    if missing:
        print(
            f"tasklib: the command line needs {' and '.join(missing)}: pip install 'tasklib-pg[cli]'. "
            f"Migrations run without: python -m tasklib.migrate",
            file=sys.stderr,
        )
        sys.exit(1)
    from tasklib.commands import run  # noqa: PLC0415 - importable only with the extra

    run()
