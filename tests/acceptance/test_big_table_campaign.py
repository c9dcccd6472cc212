"""A short campaign: a table is migrated while the version before uses it. `dev.py big-table` is the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import previous_version

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.direct("has a server of its own")
@pytest.mark.skipif(not previous_version.is_available(), reason=previous_version.WHY_NOT)
def test_a_table_in_use_is_migrated() -> None:
    """Migrators are killed in their transaction and in mid build, and a user's transaction is open: every task that was
    submitted is completed once, no old row is lost, the schema is complete and its index valid.
    """
    options = ["--rows", "20000", "--seconds", "0.5", "--any-wait"]
    command = [sys.executable, "-W", "error", "-m", "tests.campaigns.big_table", *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "nothing was lost" in run.stdout
