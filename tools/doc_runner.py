"""Runs the code blocks of one Markdown file in order: python (in one namespace, top-level await allowed), bash, sql.

python tools/doc_runner.py FILE, with DATABASE_URL set. Blocks in other languages are for reading. A python block whose
first line is a file name (`# shop.py`) is written to that file instead, for the blocks after it.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg

from tasklib import embedded

_FILE_NAME = re.compile(r"# (\w+\.py)\n")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Commands that are run, but not from here: where they are.
ELSEWHERE = {
    "python3 dev.py demo": "tests/acceptance/test_demo.py",
    "python3 dev.py test": "this is part of it",
    'pip install "tasklib-pg[binary,daemon]"': "tests/acceptance/test_packaging.py",
    'pip install "tasklib-pg[embedded]"': "tests/acceptance/test_packaging.py",
}


def blocks(path: Path) -> list[tuple[int, str, str]]:
    text = path.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start()) + 2, found[1], found[2]) for found in _BLOCK.finditer(text)]


async def run_python(code: str, place: str, namespace: dict[str, Any]) -> None:
    compiled = compile(code, place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    result = eval(compiled, namespace)  # noqa: S307 - our own documentation
    if inspect.isawaitable(result):
        await result


def write_file(name: str, code: str) -> None:
    Path(name).write_text(code, encoding="utf-8")


def run_bash(code: str) -> None:
    lines = [line for line in code.splitlines() if line.split("  #")[0].rstrip() not in ELSEWHERE]
    # PostgreSQL's programs of the test server's version: pg_dump refuses a newer server.
    path = os.pathsep.join([str(Path(sys.executable).parent), str(embedded.find_binaries()), os.environ["PATH"]])
    subprocess.run(["bash", "-euo", "pipefail", "-c", "\n".join(lines)], env=os.environ | {"PATH": path}, check=True)


def run_sql(code: Any) -> None:
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as conn:
        conn.execute(code)


async def run_file(path: Path) -> int:
    module = sys.modules["documentation"] = ModuleType("documentation")
    count = 0
    for line, language, code in blocks(path):
        place = f"{path}:{line}"
        print(f"--- {place} {language}", flush=True)
        if language == "python" and (named := _FILE_NAME.match(code)):
            write_file(named[1], code)
        elif language == "python":
            await run_python(code, place, vars(module))
        elif language == "bash":
            run_bash(code)
        elif language == "sql":
            run_sql(code)
        else:
            continue
        count += 1
    return count


if __name__ == "__main__":
    print(f"{asyncio.run(run_file(Path(sys.argv[1]).resolve()))} blocks ran")
