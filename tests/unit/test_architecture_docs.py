"""The pages for developers: the map names files that exist, decisions and versions have their dates."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def rows(title: str) -> list[tuple[str, str]]:
    """The table of a section: first and second column, without its head."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (?!question|step|-)([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)


def test_every_path_exists() -> None:
    """Anywhere on the page: a file that was moved or renamed must not leave a wrong signpost."""
    paths = set(re.findall(r"`((?:tasklib|daemon|docs|grafana|tools)/[\w./-]*)`", PAGE))
    assert len(paths) > 40
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_question_has_a_file() -> None:
    """Twenty questions, each with a file in full."""
    answers = rows("Where is ...?")
    assert len(answers) == 20
    for question, answer in answers:
        files = re.findall(r"`([\w./-]+)`", answer)
        assert files, question
        assert all((ROOT / file).is_file() for file in files), question


def test_every_step_of_a_task_has_a_file() -> None:
    """From submit to completed, numbered without a gap."""
    steps = rows("From submit to completed")
    assert [step.partition(".")[0] for step, _ in steps] == [str(number) for number in range(1, len(steps) + 1)]
    assert all((ROOT / file.strip("`")).is_file() for _, file in steps)


def test_every_decision_has_a_date_and_a_status() -> None:
    """So that a reader knows which of two entries holds."""
    text = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    entries = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    known = r"\n\n\*\d{4}-\d\d-\d\d · (accepted|superseded by|rejected|measurement)\b[^*]*\*\n\n"
    assert [entry.partition("\n")[0] for entry in entries if not re.search(rf"^[^\n]+{known}", entry)] == []


def test_every_version_in_the_changelog_has_a_date() -> None:
    """Keep a Changelog: the newest first, with its kinds of change."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version) for version in versions[1:])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds
