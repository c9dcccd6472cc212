"""What is imported when. By the names of modules, not by the clock: a machine may be busy."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tasklib
import tasklib.worker

HEAVY = {"psycopg", "psycopg_pool", "pydantic", "structlog", "rich", "typer", "asyncio", "prometheus_client"}


def modules_after(code: str, *words: str) -> set[str]:
    """Of a new interpreter that has run this."""
    told = "import atexit, json, sys; atexit.register(lambda: print(json.dumps(list(sys.modules)), file=sys.stderr))"
    command = [sys.executable, "-c", f"{told}\n{code}", *words]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(json.loads(run.stderr.splitlines()[-1]))


def packages(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def own(modules: set[str]) -> set[str]:
    return {name for name in modules if name.startswith("tasklib.")}


def test_the_import_alone_needs_nothing() -> None:
    """Who imports tasklib for one of its exceptions waits for no driver."""
    assert not packages(modules_after("import tasklib")) & HEAVY
    assert own(modules_after("import tasklib; tasklib.TaskFailed")) == {"tasklib.errors"}


def test_help_needs_no_database() -> None:
    """Nor tables, nor a validator."""
    loaded = modules_after("import sys, tasklib.cli; sys.argv[0] = 'tasklib'; tasklib.cli.main()", "--help")
    assert not packages(loaded) & (HEAVY - {"typer"})
    names = ("cli", "command_line", "commands", "errors", "queue_commands", "states", "version")
    assert own(loaded) == {f"tasklib.{name}" for name in names}


def test_a_submitter_has_all_it_needs_before_its_first_submit(database_url: str) -> None:
    """That imports only what looks at the schema once, and what the driver does. Nothing of a worker is there."""
    code = f"""
import sys
import tasklib
tasklib.init(tasklib.Config({database_url!r}))
add = tasklib.task(name="add")(lambda a: a)
before = set(sys.modules)
add.submit_sync(1)
tasklib.submit_task_sync("other", a=1)
print(*sorted(set(sys.modules) - before))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(run.stdout.split())
    assert own(imported) == {"tasklib.migrate", "tasklib.index_builds"}
    assert packages(imported) <= {"tasklib", "argparse", "gettext", "locale", "psycopg", "psycopg_binary"}
    loaded = modules_after(code)
    assert not packages(loaded) & {"structlog", "rich", "typer", "prometheus_client"}
    assert not {name for name in own(loaded) if name.startswith(("tasklib.worker", "tasklib.duties", "tasklib.doctor"))}


def test_the_public_names_are_listed_alike() -> None:
    """For type checkers, for `import *`, and for who asks for one."""
    source = ast.parse(Path(tasklib.__file__).read_text(encoding="utf-8"))
    block = next(node for node in source.body if isinstance(node, ast.If))
    typed = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == tasklib._MODULES
    assert sorted(typed) == sorted(tasklib.__all__)
    assert all(getattr(tasklib, name) is not None for name in typed)
    assert set(tasklib.__all__) <= set(dir(tasklib))


def test_a_name_that_is_not_there_is_an_error() -> None:
    """Also for type checkers, which would let everything pass if they saw how names are found."""
    with pytest.raises(AttributeError, match="no attribute 'submt'"):
        tasklib.submt  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'TaskWorkr'"):
        tasklib.worker.TaskWorkr  # type: ignore[attr-defined]  # noqa: B018


def test_the_decorator_keeps_its_name() -> None:
    """Python puts a module that it imports where its package has the decorator."""
    code = "import tasklib, tasklib.task; from tasklib.task import TaskFunction; print(tasklib.task.__name__)"
    code += "; from tasklib import task; assert task is tasklib.task"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "task\n"
