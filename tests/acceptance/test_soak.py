"""A short soak: workers killed, frozen, and cut off from their database under load. `dev.py soak` is the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A short lease, so that the dead are found soon; time to recover is judged by the long one, on a quiet machine.
SHORT = """
--kills 6 --seconds-per-kill 1 --restarts 4 --seconds-per-restart 2 --mixed 1 --freezes 1
--lease-seconds 2 --recovery-seconds 30 --drain-seconds 40 --rate 20
"""


@pytest.mark.slow
def test_nothing_is_lost_under_kills_and_restarts() -> None:
    """Every invariant holds after kill -9 of workers, restarts of PostgreSQL, both at once, and a worker that was
    frozen until others had taken its tasks.
    """
    command = [sys.executable, "-W", "error", "-m", "tests.campaigns.soak", *SHORT.split()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=150)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all invariants hold" in run.stdout
