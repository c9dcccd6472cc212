"""Short campaigns with daemons, as `dev.py soak daemon` runs them at length. Figures are judged there, on a quiet
machine; here it is that nothing is lost, done twice, or paid for by who has done nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(scenario: str, options: str) -> str:
    """What it said. It must not have found anything wrong."""
    command = [sys.executable, "-W", "error", "-m", f"tests.campaigns.daemon_{scenario}", *options.split()]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=170)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.direct
def test_nobody_pays_for_children_that_are_killed() -> None:
    """After kill -9 of random ones, what was executing runs again, and no attempt is charged."""
    said = run("kills", "--kills 10 --seconds-per-kill 1 --rate 10 --recovery-seconds 30")
    assert "all invariants hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_nobody_survives_a_supervisor_that_is_killed() -> None:
    """Also who has left its session; and the other daemon takes over."""
    said = run("supervisors", "--kills 1 --lease-seconds 2 --recovery-seconds 30")
    assert "all invariants hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_a_daemon_that_was_frozen_changes_nothing_and_rejoins() -> None:
    """It is stopped past its lease; the other takes over, and its late writes are refused."""
    said = run("freeze", "--freezes 1 --lease-seconds 2 --recovery-seconds 30")
    assert "all invariants hold" in said
