"""`python3 dev.py demo` starts PostgreSQL, submits sample tasks and shows them, and leaves nothing behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_shows_what_it_submitted() -> None:
    """The program that `dev.py demo` runs, to its end."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "demo.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
    assert re.search(r"send_email\s+pending\s+mail", run.stdout)
    assert re.search(r"send_email\s+pending in 60\.0m\s+mail", run.stdout)
    assert "first == second=True, second.existed=True" in run.stdout
    assert re.search(r"pending\s+default\s+1001", run.stdout)
    assert "2 before, 2 after" in run.stdout
    directory = re.search(r"host=%2F(\S+?)%2Fsocket", run.stdout)
    assert directory is not None
    assert not Path("/" + directory[1].replace("%2F", "/")).exists()
