"""What lies between a schema and this library: a pure comparison."""

from __future__ import annotations

from typing import Literal

import pytest

import tasklib
from tasklib.migrate import FUNCTIONS_REVISION, Applied, Migration, compare, functions_checksum, known_migrations

PRE, POST = Migration(1, "tasks", "pre", "create table"), Migration(2, "tidy", "post", "drop column")


def applied(*migrations: Migration, revision: int = FUNCTIONS_REVISION) -> list[Applied]:
    rows = [Applied(m.version, m.name, m.phase, m.checksum) for m in migrations]
    return [*rows, Applied(0, "functions", "functions", "", revision)]


def test_a_missing_schema_needs_everything() -> None:
    """First use makes it."""
    difference = compare(None, [PRE, POST])
    assert difference.missing
    assert difference.pending == (PRE, POST)
    assert str(difference) == "0001_tasks (pre), 0002_tidy (post), functions"


def test_a_schema_that_fits_needs_nothing() -> None:
    """And is not called outdated."""
    difference = compare(applied(PRE, POST), [PRE, POST])
    assert not difference.is_outdated
    assert str(difference) == "nothing"


def test_what_only_takes_away_can_wait() -> None:
    """During a rollout the new library runs before the `post` migrations: old workers still need what they drop."""
    assert not compare(applied(PRE), [PRE, POST]).is_outdated
    assert compare(applied(POST), [PRE, POST]).is_outdated


def test_older_functions_are_outdated() -> None:
    """The library may call what the old ones do not know."""
    assert compare(applied(PRE, revision=FUNCTIONS_REVISION - 1), [PRE]).is_outdated
    assert compare([Applied(1, "tasks", "pre", PRE.checksum)], [PRE]).is_outdated


def test_newer_functions_are_left_alone() -> None:
    """Of two versions in a rollout the older one neither refuses to start nor puts its own back."""
    assert not compare(applied(PRE, revision=FUNCTIONS_REVISION + 1), [PRE]).is_outdated


def test_a_changed_function_has_a_new_revision() -> None:
    """If this fails: add one to FUNCTIONS_REVISION in migrate.py, and put the new checksum here."""
    assert (FUNCTIONS_REVISION, functions_checksum()) == (
        18,
        "cc42bd436397c3c5e27468252921b901df0c342b1b8df8611475177418af224a",
    )


@pytest.mark.parametrize("phase", ["pre", "post"])
def test_a_newer_schema_is_refused_only_if_something_was_taken_away(phase: Literal["pre", "post"]) -> None:
    """An old worker goes on with a schema that only grew, and leaves its newer functions alone."""
    newer = applied(PRE, Migration(9, "next", phase, "..."), revision=FUNCTIONS_REVISION - 1)
    if phase == "post":
        with pytest.raises(tasklib.SchemaTooNew, match="0009_next"):
            compare(newer, [PRE])
    else:
        assert not compare(newer, [PRE]).is_outdated


def test_a_changed_migration_is_refused() -> None:
    """Its checksum was recorded when it was applied."""
    with pytest.raises(tasklib.SchemaChanged, match="0001_tasks"):
        compare(applied(Migration(1, "tasks", "pre", "other")), [PRE])


def test_migrations_are_numbered_without_gaps() -> None:
    """Forward only, one file a number."""
    versions = [migration.version for migration in known_migrations()]
    assert versions == list(range(1, len(versions) + 1))
