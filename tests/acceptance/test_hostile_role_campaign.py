"""A short campaign: a hostile role attacks while others work. `dev.py hostile-role` is the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.direct("has a server, and a pooler, of its own")
def test_nothing_hostile_runs_as_another_role() -> None:
    """Whatever a role with USAGE on the schema, TEMP and CREATE on public makes, calls and attaches, while daemons,
    clients, migrations and the doctor work: no function of it ever sees another current_user.
    """
    command = [sys.executable, "-W", "error", "-m", "tests.campaigns.hostile_role", "--seconds", "0"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "nothing hostile ran as another role" in run.stdout
