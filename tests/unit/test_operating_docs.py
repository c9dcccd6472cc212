"""docs/operating.md has every setting with its default, every check of the doctor with its limits, no dead link."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

import tasklib
from tasklib.doctor import CHECKS, DEEP_CHECKS, EXIT_CODES, UNKNOWN_EXIT_CODE, Limits
from tasklib_daemon.settings import KEYS, load

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
OF_THE_HOST = {"app", "name", "database_url", "runtime_directory", "control_socket"}  # no two have the same


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def settings() -> dict[str, str]:
    """By name, what the page says is the default."""
    return dict(re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \|", section("Every setting"), re.MULTILINE))


def actual(key: str) -> Any:
    loaded: Any = load(None, {"DATABASE_URL": "postgresql://app@db/shop"})
    place, _, name = key.rpartition(".")
    value = getattr(getattr(loaded, place) if place else loaded, name, None)
    if not place and name not in type(loaded).model_fields:
        value = getattr(loaded.library, name)
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def test_every_setting_is_there() -> None:
    """Of the daemon, and of the library: none is missing, and none is left of what is gone."""
    assert set(settings()) == set(KEYS)
    library = {field.name for field in fields(tasklib.Config)}
    assert library - set(KEYS) == {"worker_id"}
    assert "`Config.worker_id`" in section("Every setting")


@pytest.mark.parametrize("key", sorted(set(KEYS) - OF_THE_HOST))
def test_the_default_is_the_real_one(key: str) -> None:
    """As it would be written in the file."""
    said = settings()[key].strip("`")
    value = None if said == "none" else tomllib.loads(f"value = {said}")["value"]
    assert value == actual(key)
    assert type(value) is type(actual(key))


def test_no_figure_is_left_to_be_filled_in() -> None:
    """A word like MEMORY_FIGURES in the text is a sentence that nobody has written. The lineage has those of others."""
    for page in {*ROOT.glob("*.md"), *ROOT.glob("*/*.md")} - {ROOT / "docs" / "lineage.md"}:
        text = re.sub(r"(?s)```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"))
        assert re.findall(r"\b[A-Z]{3,}_[A-Z_]+\b|\bTODO\b|\bTBD\b|\bXXX\b", text) == [], page.name


def test_every_check_is_described() -> None:
    """One row each."""
    rows = re.findall(r"^\| `([a-z_]+)`(?: \(`--deep`\))? \|", section("Is all well?"), re.MULTILINE)
    assert rows == [*CHECKS, *DEEP_CHECKS]


def test_limits_and_exit_codes_are_the_real_ones() -> None:
    """The figures in the table of checks."""
    text = section("Is all well?")
    limits = Limits()
    for said in (
        f"more than {limits.clock_seconds[0]:g} s apart",
        f"more than {limits.clock_seconds[1]:g} s |",
        f"older than {limits.transaction_seconds[0] / 60:g} min",
        f"older than {limits.transaction_seconds[1] / 3600:g} h",
        f"more than {limits.notify_queue_share[0] * 100:g} % full",
        f"more than {limits.notify_queue_share[1] * 100:g} % |",
        f"{limits.connections_share[0] * 100:g} % of those",
        f"{limits.connections_share[1] * 100:g} % |",
        f"more than {limits.dead_rows:,} dead rows",
        f"more than {limits.slot_wal_bytes / 1e9:g} GB of WAL",
        f"have waited for {limits.unserved_seconds:g} s",
        f"nobody has taken up for {limits.stuck_seconds:g} s",
        f"`idle_in_transaction_session_timeout` below {limits.shortest_timeouts['statement_timeout']:g} s",
        f"`idle_session_timeout` below {limits.shortest_timeouts['idle_session_timeout']:g} s",
        f"`lock_timeout` below {limits.shortest_timeouts['lock_timeout']:g} s",
    ):
        assert said in text
    assert {int(code) for code in re.findall(r"^\| (\d) \|", text, re.MULTILINE)} == {
        *EXIT_CODES.values(),
        UNKNOWN_EXIT_CODE,
    }


def test_links_within_the_page_lead_somewhere() -> None:
    """An alert that points to a section that is not there helps nobody at night."""
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors
