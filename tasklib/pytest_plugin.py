"""The pytest fixture `tasklib_postgres`: one real PostgreSQL for the whole run, for any project that installs tasklib.

It is a temporary server of its own, unless TASKLIB_TEST_DSN names another. pytest loads this file in every project of
the environment, whether it asks for the fixture or not, so the launcher is imported only on demand.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasklib.embedded import EmbeddedPostgres, ExternalPostgres


@pytest.fixture(scope="session")
def tasklib_postgres() -> Iterator[EmbeddedPostgres | ExternalPostgres]:
    from tasklib import embedded  # noqa: PLC0415 - see above

    if dsn := os.environ.get("TASKLIB_TEST_DSN"):
        yield embedded.ExternalPostgres(dsn)
        return
    with embedded.postgres() as server:
        yield server
