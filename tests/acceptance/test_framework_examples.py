"""The examples with frameworks, against the real ones; in each, a rollback leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tasklib
from tasklib import migrate
from tests.support.serving import served
from tools.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.raw_sql import NewDatabase

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def environment(new_database: NewDatabase) -> dict[str, str]:
    url = new_database()
    migrate.migrate(tasklib.Config(url))
    return os.environ | {"DATABASE_URL": url}


def run(name: str, environment: dict[str, str]) -> list[str]:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


def test_sqlalchemy(environment: dict[str, str]) -> None:
    """Sync on psycopg, async on asyncpg: an order and its task are there together, or not at all."""
    assert run("sqlalchemy_app.py", environment) == [
        "nobody: rolled back, the order and its task",
        "sync: 1 order(s), 1 task(s)",
        "nobody: rolled back, the order and its task",
        "async: 2 order(s), 2 task(s)",
        "completed: order 1 is confirmed",
        "completed: order 3 is confirmed",
    ]


def test_asyncpg(environment: dict[str, str]) -> None:
    """With a savepoint that takes back one of three."""
    assert run("asyncpg_app.py", environment) == [
        "alice: is here already",
        "nobody: rolled back, the payment failed",
        "2 users, 2 tasks",
        "completed: welcome, alice",
        "completed: welcome, bob",
    ]


def test_fastapi(environment: dict[str, str], tmp_path: Path) -> None:
    """Order and task are committed together, the worker inside runs it, and a refused order leaves neither."""
    with served("fastapi_app:app", EXAMPLES, environment, tmp_path / "socket") as (_, http):
        placed = http.post("/orders", json={"customer": "alice"}).raise_for_status().json()
        assert http.post("/orders", json={"customer": "nobody"}).status_code == 409
        task = f"/tasks/{placed['task_id']}"
        wait_until(lambda: http.get(task).json()["state"] == "completed", "the task to complete")
        assert http.get(task).json()["result"] == f"order {placed['order_id']} is confirmed"
        assert http.get("/orders").json() == 1
    with tasklib.Client(tasklib.Config(environment["DATABASE_URL"])) as client:
        assert [str(task.id) for task in client.list_tasks()] == [placed["task_id"]]
