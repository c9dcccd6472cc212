"""examples/shop is an application with tests of its own: they pass wherever tasklib is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tasklib
from tests.support.working import wait_final

if TYPE_CHECKING:
    from tasklib.embedded import EmbeddedPostgres

SHOP = Path(__file__).resolve().parents[2] / "examples" / "shop"


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Away from this repository and its settings."""
    copied = shutil.copytree(SHOP, tmp_path / "shop", ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
    return Path(copied)


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_its_tests_pass(shop: Path, tasklib_postgres: EmbeddedPostgres, options: tuple[str, ...]) -> None:
    """The plugin is found by itself; with pytest-xdist too."""
    environment = os.environ | {"TASKLIB_TEST_DSN": tasklib_postgres.dsn}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options], cwd=shop, env=environment, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "8 passed" in run.stdout


@pytest.mark.direct("compares all that the worker says; behind a pooler it warns")
def test_its_worker_serves(shop: Path, config: tasklib.Config, client: tasklib.Client) -> None:
    """`python -m shop`, as its README says; SIGTERM ends it in good order."""
    order = client.submit_task("send_confirmation", order=1, to="ann@example.com", lines=[], queue="mail")
    environment = os.environ | {"DATABASE_URL": config.database_url}
    worker = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "shop"], cwd=shop.parent, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert tasklib.is_completed(wait_final(client, order))
    finally:
        worker.terminate()
        said, _ = worker.communicate(timeout=60)
    assert worker.returncode == 0, said
    assert said.startswith("serving send_confirmation, charge, remind\nto ann@example.com: Order 1")
