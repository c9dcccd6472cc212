"""The library of the commit before the last migration: workers and clients of it run in processes of their own."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "ff4d498"  # the last one that knows migrations up to 0011, and no policies
WHY_NOT = f"commit {COMMIT} is not here: this is no clone of the repository, or a shallow one"


def is_available() -> bool:
    look = ["git", "-C", str(ROOT), "cat-file", "-e", f"{COMMIT}^{{commit}}"]
    try:
        return subprocess.run(look, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:  # no git
        return False


def unpack(directory: Path) -> Path:
    """The folder that has the package in it, for PYTHONPATH."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "--format=tar", COMMIT, "tasklib"], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4
            files.extraction_filter = tarfile.data_filter
        files.extractall(directory)  # noqa: S202 - our own archive
    return directory


def environment(directory: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(directory)}
