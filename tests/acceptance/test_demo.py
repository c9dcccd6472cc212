"""`python3 dev.py demo` starts PostgreSQL and a daemon, shows what happens to tasks, and leaves nothing behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_shows_what_happens() -> None:
    """The program that `dev.py demo` runs, to its end."""
    command = [sys.executable, "-W", "error", "-m", "examples.demo"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
    for story in (
        r"send_email\s+mail\s+pending\s+ready",
        r"send_email\s+mail\s+completed\s+attempt \d, result True",
        r"call_api\s+default\s+failed\s+attempt \d, again at \S+ ConnectionError: 503",
        r"call_api\s+default\s+completed\s+attempt \d, result 'done'",
        r"too_slow\s+default\s+failed\s+attempt \d: TimeoutError: timeout_seconds=0\.3 passed",
        r"crash_once\s+default\s+completed\s+attempt 2, result 'survived'",
        r"crash_always\s+default\s+buried\s+attempt \d: Buried: killed by SIGSEGV; strike 3 of 3",
        r"wait_for_stock\s+default\s+pending\s+snoozed until",
        r"never\s+default\s+cancelled\s+never started: Cancelled: changed my mind",
        r"never\s+default\s+expired\s+never started",
        r"fetch\s+default\s+completed\s+attempt \d",
        r"failed\s+CARD_DECLINED\s+1\n",
        r"completed\s+5006\n",
        r"it has drained, exit code 0",
    ):
        assert re.search(story, run.stdout), story
    assert "the same key twice is one task: True" in run.stdout
    directory = re.search(r"host=%2F(\S+?)%2Fsocket", run.stdout)
    assert directory is not None
    assert not Path("/" + directory[1].replace("%2F", "/")).exists()
