"""Removes guards one by one, in a copy of the tree, and sees the named test go red.

A test that stays green without its guard proves nothing. The list is tests/mutants.toml.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasklib import embedded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    "tasklib",
    "daemon",
    "tests",
    "examples",
    "systemd",
    "kubernetes",
    "grafana",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
SECONDS = 150  # a test that hangs without its guard has gone red too
TESTS_FAILED = 1  # pytest's exit code; anything else (no such test, wrong usage) is a mistake in the list


def copy_tree(target: Path) -> None:
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)


def mutated(mutant: dict[str, Any], tree: Path) -> dict[Path, str]:
    """The files without the guard."""
    texts: dict[Path, str] = {}
    for edit in mutant["edits"]:
        path = tree / edit["file"]
        text = texts.get(path) or path.read_text(encoding="utf-8")
        count = text.count(edit["find"])
        if count != 1:
            raise SystemExit(f"{mutant['guard']}: {edit['find']!r} stands {count} times in {edit['file']}, not once")
        texts[path] = text.replace(edit["find"], edit["replace"])
    return texts


@contextlib.contextmanager
def applied(mutant: dict[str, Any], tree: Path) -> Iterator[None]:
    """The guard is gone for the length of a `with` block."""
    changed = mutated(mutant, tree)
    originals = {path: path.read_text(encoding="utf-8") for path in changed}
    try:
        for path, text in changed.items():
            write(path, text)
        yield
    finally:
        for path, text in originals.items():
            write(path, text)


def write(path: Path, text: str) -> None:
    """Compiled code goes with the old text: its date may not tell that it is old."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def environment_of(tree: Path) -> dict[str, str]:
    """In which the copy is what is tested."""
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'daemon'}"}
    where = subprocess.run(
        [sys.executable, "-c", "import tasklib; print(tasklib.__file__)"],
        env=environment, cwd=tree, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    if not where.startswith(str(tree)):
        raise SystemExit(f"the copy in {tree} is not what would be tested, but {where}")
    return environment


def goes_red(mutant: dict[str, Any], tree: Path, environment: dict[str, str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", mutant["test"]]
    try:
        run = subprocess.run(
            command, env=environment, cwd=tree, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return True
    if run.returncode not in (0, TESTS_FAILED):
        raise SystemExit(f"{mutant['guard']}: pytest exited with {run.returncode}\n{run.stdout}{run.stderr}")
    return run.returncode == TESTS_FAILED


def find_green(mutants: Sequence[dict[str, Any]]) -> list[str]:
    """The guards that no test misses. One server serves all: to start one takes longer than most of the tests."""
    green = []
    with tempfile.TemporaryDirectory() as directory, embedded.postgres() as server:
        tree = Path(directory)
        tree.chmod(0o755)
        copy_tree(tree)
        environment = environment_of(tree) | {"TASKLIB_TEST_DSN": server.dsn}
        for mutant in mutants:
            began = time.monotonic()
            with applied(mutant, tree):
                is_red = goes_red(mutant, tree, environment)
            print(f"{'red  ' if is_red else 'GREEN'} {time.monotonic() - began:6.1f} s  {mutant['guard']}", flush=True)
            green += [] if is_red else [mutant["guard"]]
    return green


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the few that run with the suite")
    parser.add_argument("words", nargs="*", help="only guards that contain these words")
    options = parser.parse_args()
    mutants = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text(encoding="utf-8"))["mutant"]
    chosen = [
        m for m in mutants if (m.get("quick") or not options.quick) and all(w in m["guard"] for w in options.words)
    ]
    green = find_green(chosen)
    print(f"{len(chosen) - len(green)} of {len(chosen)} guards are proven by their tests")
    return 1 if green else 0


if __name__ == "__main__":
    sys.exit(main())
