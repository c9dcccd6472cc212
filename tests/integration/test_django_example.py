"""examples/django_app: its own tests pass, and it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tasklib
from tests.support.working import wait_final

if TYPE_CHECKING:
    from tests.support.raw_sql import NewDatabase

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "examples" / "django_app"


class Example:
    """Its manage.py, with warnings as errors."""

    def __init__(self, url: str) -> None:
        self._environment = os.environ | {"DATABASE_URL": url, "PYTHONPATH": str(ROOT)}

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-W", "error", "manage.py", *words],
            cwd=PROJECT, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, *words: str) -> str:
        process = self.start(*words)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        return said


@pytest.mark.direct("drops its test database, to which a pooler stays connected")
@pytest.mark.parametrize("how", [(), ("--parallel", "2")])
def test_its_tests_pass(new_database: NewDatabase, how: tuple[str, ...]) -> None:
    """On a database that Django makes, and that it can drop afterwards; in several processes, each on its own."""
    said = Example(new_database()).run("test", *how)
    assert "Ran 4 tests" in said


def test_it_runs(new_database: NewDatabase) -> None:
    """An order that comes in by HTTP has its receipt sent by a worker; a refused one leaves nothing."""
    url = new_database()
    example = Example(url)
    example.run("migrate", "--verbosity", "0")
    order = (
        "from django.test import Client; shop = Client(headers={'host': 'localhost'});"
        "print(*[shop.post('/orders/', {'email': email}).status_code for email in ('alice@example.com', 'nobody')])"
    )
    assert example.run("shell", "--verbosity", "0", "--command", order).endswith("201 400\n")
    worker = example.start("tasklib_worker")
    try:
        with tasklib.Client(tasklib.Config(url)) as client:
            [task] = client.list_tasks()
            state = wait_final(client, task.id).state
    finally:
        worker.send_signal(signal.SIGTERM)
        said, _ = worker.communicate(timeout=30)
    assert (worker.returncode, state) == (0, "completed"), said
    assert "to alice@example.com: thank you for order 1" in said
