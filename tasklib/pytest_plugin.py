"""The pytest fixture `tasklib_postgres`: one real PostgreSQL for the whole run, for any project that installs tasklib.

`pytest_plugins = ["tasklib.pytest_plugin"]` in a conftest.py brings it in. It is a temporary server of its own, unless
TASKLIB_TEST_DSN names another.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tasklib import embedded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasklib.embedded import EmbeddedPostgres, ExternalPostgres


@pytest.fixture(scope="session")
def tasklib_postgres() -> Iterator[EmbeddedPostgres | ExternalPostgres]:
    if dsn := os.environ.get("TASKLIB_TEST_DSN"):
        yield embedded.ExternalPostgres(dsn)
        return
    with embedded.postgres() as server:
        yield server
