"""What lies between a schema and this library: a pure comparison."""

from __future__ import annotations

from typing import Literal

import pytest

import tasklib
from tasklib import index_builds
from tasklib.migrate import FUNCTIONS_REVISION, Applied, Migration, compare, functions_checksum, known_migrations, steps

PRE, POST = Migration(1, "tasks", "pre", "create table"), Migration(2, "tidy", "post", "drop column")
INDEX_SQL = """-- why
create index concurrently a on tasklib.tasks (x);
create unique index concurrently b on tasklib.tasks (y)
    where y is not null;
"""
INDEX = Migration(3, "fast", "index", INDEX_SQL)


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
        "6e993542a8a447ad768bb82669e0f56db9ae16c07ba740a0e6b9cf2b131ebd17",
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


@pytest.mark.parametrize(
    ("indexes", "waiting"),
    [
        ({}, "0003_fast (index: a; b)"),
        ({"a": True}, "0003_fast (index: b)"),
        ({"a": True, "b": False}, "0003_fast (index: b, invalid)"),
        ({"a": True, "b": True}, "0003_fast (index: built)"),  # by a migrator that was killed before it recorded it
    ],
)
def test_indexes_that_are_not_there_are_built(indexes: dict[str, bool], waiting: str) -> None:
    """The library works without them: it is not outdated, but there is something to do."""
    difference = compare(applied(PRE, POST), [PRE, POST, INDEX], indexes)
    assert str(difference) == waiting
    assert difference.is_incomplete
    assert not difference.is_outdated
    assert difference.pending == ()


def test_a_recorded_index_is_looked_for_nevertheless() -> None:
    """Somebody may have dropped it, or begun to make it anew."""
    known, rows = [PRE, POST, INDEX], applied(PRE, POST, INDEX)
    assert not compare(rows, known, {"a": True, "b": True}).is_incomplete
    assert str(compare(rows, known, {"a": True})) == "0003_fast (index: b)"
    assert str(compare(rows, known, {"a": True, "b": False})) == "0003_fast (index: b, invalid)"


def test_an_index_that_a_later_migration_dropped_is_not_missed() -> None:
    """Nor built again."""
    gone = Migration(4, "gone", "post", "drop index tasklib.b;")
    known = [PRE, POST, INDEX, gone]
    assert str(compare(applied(PRE, POST, INDEX, gone), known, {"a": True})) == "nothing"
    assert str(compare(applied(PRE, POST, INDEX), known, {"a": True})) == "0004_gone (post), 0003_fast (index: b)"


def test_a_new_schema_has_its_indexes_from_the_start() -> None:
    """In the one transaction, where nothing can be built concurrently, and nobody waits."""
    difference = compare(None, [PRE, INDEX])
    assert difference.pending == (PRE, INDEX)
    assert difference.builds == ()
    assert not any(" concurrently " in step for step in steps(difference, "tasklib"))
    assert any("create index a on tasklib.tasks (x)" in step for step in steps(difference, "tasklib"))


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "create index a on tasklib.tasks (x);",
        "create index concurrently on tasklib.tasks (x);",
        "create index concurrently if not exists a on tasklib.tasks (x);",  # an invalid one would count as made
        "create index concurrently a on tasklib.tasks (x); drop table tasklib.tasks;",
    ],
)
def test_an_index_migration_has_nothing_but_named_indexes(sql: str) -> None:
    """Everything else belongs into a transaction."""
    with pytest.raises(ValueError, match="create index concurrently NAME"):
        index_builds.parse(sql)
