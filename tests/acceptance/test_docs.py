"""Every code block of the documentation runs, as a reader would run it: from top to bottom."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools.doc_runner import ELSEWHERE, blocks

if TYPE_CHECKING:
    from tests.support.raw_sql import NewDatabase

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_code_blocks_run(document: Path, new_database: NewDatabase, tmp_path: Path) -> None:
    """In order, in one namespace, on an empty database, with warnings as errors."""
    environment = os.environ | {
        "DATABASE_URL": new_database(),
        "PYTHONWARNINGS": "error",
        "TASKLIB_CONTROL_SOCKET": str(tmp_path / "control.sock"),  # the pages' daemons may run beside others
        "TASKLIB_WEB_PORT": "0",
    }
    command = [sys.executable, str(ROOT / "tools" / "doc_runner.py"), str(document)]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr
    runnable = [language for _, language, _ in blocks(document) if language in {"python", "bash", "sql"}]
    assert f"{len(runnable)} blocks ran" in run.stdout


def test_only_known_languages() -> None:
    """A block in another language would not be run; a typo in its name must not hide it."""
    found = {language for document in DOCUMENTS for _, language, _ in blocks(document)}
    assert found <= {"python", "bash", "sql", "text", "json", "mermaid"}
    assert all(text.count("```") % 2 == 0 for text in (document.read_text() for document in DOCUMENTS))


def test_what_runs_elsewhere_is_still_in_the_documentation() -> None:
    """The list of exceptions must not outlive its reasons."""
    everything = "\n".join(
        code for document in DOCUMENTS for _, language, code in blocks(document) if language == "bash"
    )
    for command in ELSEWHERE:
        assert command in everything


def test_links_lead_somewhere() -> None:
    """Between our own files, to a file and to a heading in it."""
    for document in DOCUMENTS:
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                found = document.parent / target if target else document
                assert found.exists(), f"{document.name}: {target}"
                assert not anchor or anchor in anchors(found), f"{document.name}: {target}#{anchor}"


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short() -> None:
    """Under 200 lines."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200
