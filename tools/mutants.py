"""Removes guards one by one, in a copy of the tree, and expects the named test to fail.

A test that still passes without its guard proves nothing. The list is tools/mutants.toml.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    "tasklib",
    "daemon",
    "tests",
    "tools",
    "examples",
    "systemd",
    "kubernetes",
    "grafana",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
SECONDS = 150  # a test that hangs without its guard counts as red
# Imported once, and inherited by every run of pytest. None of them imports the library.
PRELOADED = ("psycopg", "psycopg_pool", "pydantic", "structlog", "prometheus_client", "typer", "rich.console")
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
    """Removes the guard for the length of a `with` block."""
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
    """Compiled code is removed too: its date may be the same as the new text's."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def check_that_the_copy_is_tested(tree: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import tasklib; print(tasklib.__file__)"],
        env=os.environ | variables_of(tree), cwd=tree, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if not run.stdout.startswith(str(tree)):
        raise SystemExit(f"the copy in {tree} is not what would be tested, but {run.stdout}")


def variables_of(tree: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'daemon'}", "TASKLIB_TEST_WAIT_SECONDS": "20"}


def run_pytest(test: str, tree: Path, output: Path, variables: dict[str, str]) -> None:
    """In a forked process, which has imported the third-party packages already, and nothing of the tree."""
    os.setsid()
    os.environ.update(variables)
    os.chdir(tree)
    sys.path[:0] = [str(tree), str(tree / "daemon")]
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    import pytest  # noqa: PLC0415 - its plugins are loaded in the directory of the tree

    os._exit(pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", test]))


def goes_red(mutant: dict[str, Any], tree: Path, variables: dict[str, str]) -> bool:
    output = tree / "output.txt"
    arguments = (mutant["test"], tree, output, variables)
    process = multiprocessing.get_context("fork").Process(target=run_pytest, args=arguments)
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        return True
    if process.exitcode not in (0, TESTS_FAILED):
        raise SystemExit(f"{mutant['guard']}: pytest exited with {process.exitcode}\n{output.read_text('utf-8')}")
    return process.exitcode == TESTS_FAILED


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The DSN of one PostgreSQL for all mutants: starting one takes longer than most of the tests. It runs in another
    process, because this one must not import the library that its children test.
    """
    command = [sys.executable, "-m", "tasklib.embedded"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def find_green(mutants: Sequence[dict[str, Any]]) -> list[str]:
    """The guards whose tests pass without them."""
    for name in PRELOADED:
        importlib.import_module(name)
    green = []
    with tempfile.TemporaryDirectory() as directory, server() as dsn:
        tree = Path(directory)
        tree.chmod(0o755)
        copy_tree(tree)
        check_that_the_copy_is_tested(tree)
        variables = variables_of(tree) | {"TASKLIB_TEST_DSN": dsn}
        for mutant in mutants:
            began = time.monotonic()
            with applied(mutant, tree):
                is_red = goes_red(mutant, tree, variables)
            print(f"{'red  ' if is_red else 'GREEN'} {time.monotonic() - began:6.1f} s  {mutant['guard']}", flush=True)
            green += [] if is_red else [mutant["guard"]]
    return green


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the few that run with the suite")
    parser.add_argument("words", nargs="*", help="only guards that contain these words")
    options = parser.parse_args()
    mutants = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text(encoding="utf-8"))["mutant"]
    chosen = [
        m for m in mutants if (m.get("quick") or not options.quick) and all(w in m["guard"] for w in options.words)
    ]
    green = find_green(chosen)
    print(f"{len(chosen) - len(green)} of {len(chosen)} guards are proven by their tests")
    return 1 if green else 0


if __name__ == "__main__":
    sys.exit(main())
