"""The pages for operators agree with the code: every setting with its default (docs/settings.md), every check of the
doctor with its limits (docs/installing.md), and log events that the daemon really emits.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

import tasklib
from tasklib.doctor import CHECKS, DEEP_CHECKS, EXIT_CODES, UNKNOWN_EXIT_CODE, Thresholds
from tasklib_daemon.settings import KEYS, load

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("*/*.md")})
OF_THE_HOST = {"app", "name", "database_url", "runtime_directory", "control_socket"}  # no two have the same
OF_DAEMON = ("runbook.md", "installing.md", "settings.md", "daemon.md", "systemd/README.md", "kubernetes/README.md")
NOT_IN_DAEMON = {"fastapi.py", "testing.py", "pytest_plugin.py"}  # modules whose events no daemon logs
NO_EVENTS = {"tasklib.embedded", "task.ready"}  # a module and an attribute
ROLES = ("worker", "keeper", "web")


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    return read(page).partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def settings() -> list[tuple[str, str, str]]:
    """Of each setting, as the page has it: name, default, meaning."""
    row = r"^\| `([a-z_.]+)` \| ([^|]+) \| ([^|]+) \|$"
    return re.findall(row, section("settings.md", "Every setting"), re.MULTILINE)


def defaults() -> dict[str, str]:
    return {name: default for name, default, _ in settings()}


def actual(key: str) -> Any:
    loaded: Any = load(None, {"DATABASE_URL": "postgresql://app@db/shop"})
    place, _, name = key.rpartition(".")
    value = getattr(getattr(loaded, place) if place else loaded, name, None)
    if not place and name not in type(loaded).model_fields:
        value = getattr(loaded.library, name)
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def test_every_setting_is_there() -> None:
    """Of the daemon, and of the library: none is missing, and none is left of what is gone."""
    assert sorted(defaults()) == sorted(KEYS)
    assert len(settings()) == len(KEYS)
    library = {field.name for field in fields(tasklib.Config)}
    assert library - set(KEYS) == {"worker_id"}
    assert "`Config.worker_id`" in read("settings.md")


def test_every_setting_is_explained_by_a_sentence() -> None:
    """It begins with a capital letter or a name, and ends with a full stop."""
    for name, _, meaning in settings():
        assert re.fullmatch(r"(?s)[A-Z`].{10,}\.", meaning), name


@pytest.mark.parametrize("key", sorted(set(KEYS) - OF_THE_HOST))
def test_the_default_is_the_real_one(key: str) -> None:
    """As it would be written in the file."""
    said = defaults()[key].strip("`")
    value = None if said == "none" else tomllib.loads(f"value = {said}")["value"]
    assert value == actual(key)
    assert type(value) is type(actual(key))


def test_no_figure_is_left_to_be_filled_in() -> None:
    """A word like MEMORY_FIGURES in the text is a sentence that nobody has written. The lineage has those of others."""
    for page in {*PAGES} - {ROOT / "docs" / "lineage.md"}:
        text = re.sub(r"(?s)```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"))
        assert re.findall(r"\b[A-Z]{3,}_[A-Z_]+\b|\bTODO\b|\bTBD\b|\bXXX\b", text) == [], page.name


def test_every_check_is_described() -> None:
    """One row each."""
    rows = re.findall(r"^\| `([a-z_]+)`(?: \(`--deep`\))? \|", section("installing.md", "Is all well?"), re.MULTILINE)
    assert rows == [*CHECKS, *DEEP_CHECKS]


def test_limits_and_exit_codes_are_the_real_ones() -> None:
    """The figures in the table of checks."""
    text = section("installing.md", "Is all well?")
    limits = Thresholds()
    for said in (
        f"more than {limits.clock_seconds[0]:g} s apart",
        f"the difference is more than {limits.clock_seconds[1]:g} s |",
        f"older than {limits.transaction_seconds[0] / 60:g} min",
        f"older than {limits.transaction_seconds[1] / 3600:g} h",
        f"more than {limits.notify_queue_share[0] * 100:g} % full",
        f"more than {limits.notify_queue_share[1] * 100:g} % full. |",
        f"{limits.connections_share[0] * 100:g} % of the connections",
        f"{limits.connections_share[1] * 100:g} % are in use. |",
        f"more than {limits.dead_rows:,} dead rows",
        f"more than {limits.slot_wal_bytes / 1e9:g} GB of WAL",
        f"have waited for {limits.unserved_seconds:g} s",
        f"not been recovered for {limits.stuck_seconds:g} s",
        f"have held permits of a cap for {limits.stuck_seconds:g} s",
        f"paused for {limits.paused_seconds / 3600:g} h without an end",
        f"half open for {limits.breaker_seconds / 60:g} min",
        f"`idle_in_transaction_session_timeout` below {limits.shortest_timeouts['statement_timeout']:g} s",
        f"`idle_session_timeout` below {limits.shortest_timeouts['idle_session_timeout']:g} s",
        f"`lock_timeout` below {limits.shortest_timeouts['lock_timeout']:g} s",
    ):
        assert said in text
    assert {int(code) for code in re.findall(r"^\| (\d) \|", text, re.MULTILINE)} == {
        *EXIT_CODES.values(),
        UNKNOWN_EXIT_CODE,
    }


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_sections_lead_somewhere(page: Path) -> None:
    """Within a page and between pages: an alert whose link has no section helps nobody at night."""
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        there = (page.parent / target) if target else page
        assert anchor in anchors(there), f"{target}#{anchor}"


def events(*, of_daemon: bool) -> set[str]:
    """What the code logs: every string of the form `noun.past_tense`."""
    found = set()
    for path in [*ROOT.glob("tasklib/**/*.py"), *ROOT.glob("daemon/tasklib_daemon/**/*.py")]:
        if of_daemon and path.name in NOT_IN_DAEMON:
            continue
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r'"([a-z_]+\.[a-z_]+)"', text))
        found |= {f"{role}.{word}" for word in re.findall(r'f"\{[a-z.]*role\}\.([a-z_]+)"', text) for role in ROLES}
    return found | {f"task.{word}" for word in ("completed", "failed", "timed_out", "cancelled", "snoozed")}


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "CHANGELOG.md"],  # which tells of former names, too
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_log_events_are_those_of_the_code(page: Path) -> None:
    """An operator who searches the log for an event that is never logged concludes that nothing happened. What a page
    about the daemon names, the daemon logs: `worker.failed`, for instance, comes from applications only.
    """
    of_daemon = str(page.relative_to(ROOT)).removeprefix("docs/") in OF_DAEMON
    known, nouns = events(of_daemon=of_daemon), {event.partition(".")[0] for event in events(of_daemon=False)}
    named = set(re.findall(r"`([a-z]+\.[a-z_]+)`", page.read_text(encoding="utf-8"))) - NO_EVENTS
    past_tense = {each for each in named if each.partition(".")[0] in nouns and is_past_tense(each)}
    assert sorted(past_tense - known) == []


def is_past_tense(event: str) -> bool:
    return event.endswith("ed") or event.partition(".")[2] in {"lost", "died", "hung", "ready", "deaf", "silent"}
