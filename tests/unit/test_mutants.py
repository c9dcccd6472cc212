"""The list of mutants fits the code: `dev.py mutants` tries all of them, and that takes an hour."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from tools.mutants import ROOT, mutated

MUTANTS: list[dict[str, Any]] = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text("utf-8"))["mutant"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: str(mutant["guard"]))
def test_every_guard_is_found_once(mutant: dict[str, Any]) -> None:
    """A guard that has moved would no longer be removed, and its test no longer proven. Its test is there, too."""
    texts = mutated(mutant, ROOT)

    assert all(path.read_text("utf-8") != text for path, text in texts.items())
    path, _, name = mutant["test"].partition("::")
    wanted = f"def {name.partition('[')[0]}(" if name else "def test_"  # a whole file, or one of its tests
    assert wanted in (ROOT / path).read_text("utf-8")
