"""Which parts of the repository may import which. The package's own contracts are in pyproject.toml."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = {
    "tasklib": {"bench", "examples", "grafana", "tests", "tools"},
    "daemon": {"bench", "examples", "grafana", "tests", "tools"},
    "tools": {"bench", "tests"},
    "bench": {"tests"},
    "examples": {"bench", "tests", "tools"},
    "tests": {"bench"},
}
ABOUT_THE_BENCH = "test_bench"  # how the names of its own tests begin


def imported(file: Path) -> set[str]:
    """The first words of the modules that a file imports, also inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).partition(".")[0])
    return found


@pytest.mark.parametrize("part", FORBIDDEN)
def test_a_part_imports_only_what_it_may(part: str) -> None:
    """Programs and examples stand without the tests; tests know nothing of the bench, save the bench's own."""
    files = [file for file in (ROOT / part).rglob("*.py") if not file.name.startswith(ABOUT_THE_BENCH)]
    assert files
    wrong = {str(file.relative_to(ROOT)): sorted(imported(file) & FORBIDDEN[part]) for file in files}
    assert {file: names for file, names in wrong.items() if names} == {}
