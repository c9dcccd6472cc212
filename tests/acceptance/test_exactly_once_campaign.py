"""A short campaign: connections cut around COMMIT, workers killed and frozen. `dev.py exactly-once` is the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT = "--tasks 60 --rate 8 --kills 2 --freezes 1 --restarts 2 --lease-seconds 1.5 --drain-seconds 60"


@pytest.mark.slow
@pytest.mark.direct("has a server of its own")
def test_effects_are_completions() -> None:
    """Every task that wrote through its own connection is completed once, with one effect, whatever happened to its
    connection, its worker, its lease and its server.
    """
    command = [sys.executable, "-W", "error", "-m", "tests.campaigns.exactly_once", *SHORT.split()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=150)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "effects = completions" in run.stdout
