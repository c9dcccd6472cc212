"""What lies between a schema and this library: a pure comparison."""

from __future__ import annotations

from typing import Literal

import pytest

import tasklib
from tasklib.migrate import Applied, Migration, compare, known_migrations

FUNCTIONS = "create function ..."
PRE, POST = Migration(1, "tasks", "pre", "create table"), Migration(2, "tidy", "post", "drop column")


def applied(*migrations: Migration, functions: str = FUNCTIONS) -> list[Applied]:
    rows = [Applied(m.version, m.name, m.phase, m.checksum) for m in migrations]
    return [*rows, Applied(0, "functions", "functions", Migration(0, "", "pre", functions).checksum)]


def test_a_missing_schema_needs_everything() -> None:
    """First use makes it."""
    difference = compare(None, [PRE, POST], FUNCTIONS)
    assert difference.missing
    assert difference.pending == (PRE, POST)
    assert str(difference) == "0001_tasks (pre), 0002_tidy (post), functions"


def test_a_schema_that_fits_needs_nothing() -> None:
    """And is not called outdated."""
    difference = compare(applied(PRE, POST), [PRE, POST], FUNCTIONS)
    assert not difference.is_outdated
    assert str(difference) == "nothing"


def test_what_only_takes_away_can_wait() -> None:
    """During a rollout the new library runs before the `post` migrations: old workers still need what they drop."""
    assert not compare(applied(PRE), [PRE, POST], FUNCTIONS).is_outdated
    assert compare(applied(POST), [PRE, POST], FUNCTIONS).is_outdated


def test_other_functions_are_outdated() -> None:
    """The library may call what the old ones do not know."""
    assert compare(applied(PRE, functions="older"), [PRE], FUNCTIONS).is_outdated
    assert compare([Applied(1, "tasks", "pre", PRE.checksum)], [PRE], FUNCTIONS).is_outdated


@pytest.mark.parametrize("phase", ["pre", "post"])
def test_a_newer_schema_is_refused_only_if_something_was_taken_away(phase: Literal["pre", "post"]) -> None:
    """An old worker goes on with a schema that only grew, and leaves its newer functions alone."""
    newer = applied(PRE, Migration(9, "next", phase, "..."), functions="newer")
    if phase == "post":
        with pytest.raises(tasklib.SchemaTooNew, match="0009_next"):
            compare(newer, [PRE], FUNCTIONS)
    else:
        assert not compare(newer, [PRE], FUNCTIONS).is_outdated


def test_a_changed_migration_is_refused() -> None:
    """Its checksum was recorded when it was applied."""
    with pytest.raises(tasklib.SchemaChanged, match="0001_tasks"):
        compare(applied(Migration(1, "tasks", "pre", "other")), [PRE], FUNCTIONS)


def test_migrations_are_numbered_without_gaps() -> None:
    """Forward only, one file a number."""
    versions = [migration.version for migration in known_migrations()]
    assert versions == list(range(1, len(versions) + 1))
