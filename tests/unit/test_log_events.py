"""Log events: documentation names only those that the code emits, and each is found by a search for its name."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from tasklib.outcomes import AttemptOutcome
from tasklib_daemon.settings import KEYS

ROOT = Path(__file__).resolve().parents[2]
LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
LOGGERS = frozenset({"log", "task_log"})
SHAPE = re.compile(r"[a-z_]+\.[a-z_]+")
# Pages speak of these nouns' attributes and modules in the same form.
NOT_EVENTS = re.compile(
    r".*\.(py|md|txt|toml|sql|sh)|(tasklib|django|asyncio|os|time|error|context|handle|job|task_id|contextlib|inspect"
    r"|struct|warnings|tasklib_daemon)\..*|task\.(ready|error|error_code)|tasks\.on_crash|transaction\.on_commit"
)


@cache
def trees() -> dict[Path, ast.Module]:
    paths = [*(ROOT / "tasklib").rglob("*.py"), *(ROOT / "daemon").rglob("*.py")]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@cache
def emitted() -> set[str]:
    """Every string in the code that has the form of an event; and the line that ends an attempt, by its outcome."""
    return {f"task.{outcome.lower()}" for outcome in get_args(AttemptOutcome)} | {
        node.value
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and SHAPE.fullmatch(node.value)
    }


def named_in(page: Path) -> set[str]:
    """What stands in backticks and has the form of an event, and is no setting, module, attribute or file."""
    found = set(re.findall(rf"`({SHAPE.pattern})`", page.read_text(encoding="utf-8")))
    return {name for name in found if name not in KEYS and not NOT_EVENTS.fullmatch(name)}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_events_in_the_documentation_are_emitted(page: Path) -> None:
    """An operator who searches the log for an event that is never logged loses time when it matters."""
    assert named_in(page) - emitted() == set()


def test_a_failed_start_is_documented_as_the_daemon_logs_it() -> None:
    """The daemon logs `child.failed`. Only a worker without a daemon, as in FastAPI, logs `worker.failed`."""
    pages = {page.stem for page in (ROOT / "docs").glob("*.md") if "worker.failed" in named_in(page)}
    assert pages <= {"fastapi"}


def test_no_event_is_put_together() -> None:
    """The first argument of every log call is a plain string, or a name that stands for one."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
                receiver, event = node.func.value, node.args[0] if node.args else None
                is_ours = isinstance(receiver, ast.Name) and receiver.id in LOGGERS
                is_made = isinstance(event, ast.JoinedStr | ast.BinOp)
                assert not (is_ours and is_made), f"{path}:{node.lineno}"
