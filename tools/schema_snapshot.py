"""Write or compare tasklib/sql/schema.sql: the schema as the catalogue tells it, the same on every PostgreSQL."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import psycopg

import tasklib
from tasklib import embedded, migrate

SNAPSHOT = Path(tasklib.__file__).parent / "sql" / "schema.sql"
HEADER = "-- What the migrations and functions amount to. Written by `python3 dev.py schema`; compared by a test.\n"


def snapshot(url: str) -> str:
    with psycopg.connect(url, autocommit=True) as conn:
        lines = migrate.describe(conn, "tasklib").splitlines()
    return HEADER + "".join(f"-- {line}\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with embedded.postgres() as server:
        migrate.migrate(tasklib.Config(server.dsn))
        made = snapshot(server.dsn)
    if options.write:
        SNAPSHOT.write_text(made, encoding="utf-8")
        sys.stdout.write(f"wrote {SNAPSHOT}\n")
        return 0
    return 0 if made == SNAPSHOT.read_text(encoding="utf-8") else 1


if __name__ == "__main__":
    sys.exit(main())
