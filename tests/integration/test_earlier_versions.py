"""Workers of earlier versions go on through a migration, with the rights that they had and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import pytest

import tasklib
from tasklib import migrate
from tests.support.raw_sql import literal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from tests.support.raw_sql import Conn, NewDatabase

pytestmark = [
    pytest.mark.postgres_versions,
    pytest.mark.direct("roles are the server's"),
]

FOLDER = Path(__file__).resolve().parents[1] / "earlier_versions"
ROLE = "old_worker"

# What a worker of each version needed, and no more.
_COMMON = {
    "tasks": "select, update",
    "claims": "select, insert, update, delete",
    "workers": "select, insert, update, delete",
}
RIGHTS = {
    4: {**_COMMON, "task_attempts": "insert"},
    7: {**_COMMON, "attempts": "insert", "folded_attempts": "select", "task_attempts": "select"},
}
EVERY_RIGHT = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")


class OldWorker:
    """Sends the statements of its version, as its role."""

    def __init__(self, conn: Conn, version: int) -> None:
        text = (FOLDER / f"{version:04}.sql").read_text(encoding="utf-8")
        parts = re.split(r"^-- name: (\w+)$", text, flags=re.MULTILINE)
        self.statements: dict[str, LiteralString] = {
            name: literal(body.strip().rstrip(";")) for name, body in zip(parts[1::2], parts[2::2], strict=True)
        }
        self._cursor = psycopg.RawCursor(conn)
        self._is_first = version < 5  # times went as dates

    def send(self, name: str, *values: Any) -> list[Any]:
        """With nulls for what is not given: what is asked is whether it is allowed."""
        sql = self.statements[name]
        places = max((int(number) for number in re.findall(r"\$(\d+)", sql)), default=0)
        self._cursor.execute(sql, [*values, *[None] * (places - len(values))])
        return self._cursor.fetchall() if self._cursor.description else []

    def claim(self, worker_id: str) -> tuple[UUID, int]:
        rows = self.send("tasks_claim", worker_id, "default", ["job"], True, 1, 600.0)
        row = next(row for row in rows if row[0] is not None)
        token = next(value for value in row[1:] if isinstance(value, int) and not isinstance(value, bool))
        return row[0], token

    def settle(self, worker_id: str, task_id: UUID, token: int, **values: Any) -> list[Any]:
        now = "2026-01-01T00:00:00Z"
        given = {"id": str(task_id), "token": token, "began": True, "started_at": now, "finished_at": now, **values}
        return self.send("tasks_settle", worker_id, json.dumps([given]), [])

    def complete(self, worker_id: str, task_id: UUID, token: int) -> None:
        moments: list[Any] = [1.7e9]
        if self._is_first:
            moments = ["2026-01-01T00:00:00Z"]
        self.send("tasks_complete", worker_id, [task_id], [token], moments, moments, [None], [])


@pytest.fixture
def old_database(new_database: NewDatabase) -> Iterator[str]:
    url = new_database()
    yield url
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(literal(f"drop owned by {ROLE}; drop role {ROLE}"))


def at_version(monkeypatch: pytest.MonkeyPatch, url: str, version: int) -> None:
    """The schema as it was, with a role that may use it and nothing in it."""
    known = migrate.known_migrations()
    with monkeypatch.context() as patch:
        patch.setattr(migrate, "known_migrations", lambda: [each for each in known if each.version <= version])
        patch.setattr(migrate, "folder", lambda _: [])  # the functions of today need the schema of today
        migrate.migrate(tasklib.Config(url))
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(literal(f"create role {ROLE}"))
        conn.execute(literal(f"grant usage on schema tasklib to {ROLE}"))


@pytest.mark.parametrize("version", sorted(RIGHTS))
def test_workers_of_an_earlier_version_finish_their_tasks(
    old_database: str, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Under least privilege: they register, claim, mark, fail, retry, complete and recover, and are refused nothing.
    A worker that may claim and not finish runs its tasks again and again.
    """
    at_version(monkeypatch, old_database, version)
    with psycopg.connect(old_database, autocommit=True) as conn:
        for relation, rights in RIGHTS[version].items():
            conn.execute(literal(f"grant {rights} on tasklib.{relation} to {ROLE}"))
        migrate.migrate(tasklib.Config(old_database))
        conn.execute(literal(f"grant execute on function tasklib.promote, tasklib.expire, tasklib.cancel to {ROLE}"))
        conn.execute(literal(f"grant execute on function tasklib.retry, tasklib.ring, tasklib.ring_all to {ROLE}"))
        conn.execute("insert into tasklib.tasks (name) values ('job')")
        conn.execute(literal(f"set role {ROLE}"))
        worker = OldWorker(conn, version)
        worker.send("workers_register", "w", "w", "h", 1, "p", None, ["job"], 1, 15.0)
        task_id, token = worker.claim("w")
        worker.send("tasks_start", "w", [task_id], [token], ["2026-01-01T00:00:00Z"])
        failed = {"state": "failed", "outcome": "FAILED", "error_code": "X", "is_retry": True, "due_at": "2026-01-01"}
        assert len(worker.settle("w", task_id, token, **failed)) == 1
        worker.send("tasks_promote")
        task_id, token = worker.claim("w")
        worker.complete("w", task_id, token)
        rest = set(worker.statements) - {"tasks_claim", "tasks_settle", "tasks_complete", "workers_register"}
        for name in sorted(rest):
            worker.send(name)
        conn.execute("reset role")
        found = conn.execute("select outcome, worker_id from tasklib.task_attempts order by attempt").fetchall()
        assert found == [("FAILED", "w"), ("COMPLETED", "w")]
        assert conn.execute("select state, attempt from tasklib.tasks").fetchall() == [("completed", 2)]


@pytest.mark.parametrize("version", range(1, max(each.version for each in migrate.known_migrations())))
def test_no_migration_takes_a_right_away(old_database: str, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Whatever a role may do with a table, with one of its columns or with a view, and may pass on, it may do by the
    same name afterwards: what replaces it has its privileges.
    """
    at_version(monkeypatch, old_database, version)
    with psycopg.connect(old_database, autocommit=True) as conn:
        relations = [name for (name,) in conn.execute(RELATIONS)]
        for number, relation in enumerate(relations):
            rights = [EVERY_RIGHT[number % len(EVERY_RIGHT)], EVERY_RIGHT[(number + 1) % len(EVERY_RIGHT)]]
            rights = [*EVERY_RIGHT] if "attempts" in relation else rights
            conn.execute(literal(f"grant {', '.join(rights)} on tasklib.{relation} to {ROLE} with grant option"))
        if "task_attempts" in relations:
            conn.execute("grant select (outcome) on tasklib.task_attempts to public")
        before = conn.execute(HELD, [ROLE]).fetchall()
        migrate.migrate(tasklib.Config(old_database))
        after = conn.execute(HELD, [ROLE]).fetchall()
        assert set(before) <= set(after)
        if "task_attempts" in relations:
            readable = "select has_column_privilege('pg_monitor', 'tasklib.task_attempts', 'outcome', 'select')"
            assert conn.execute(readable).fetchall() == [(True,)]


RELATIONS = """
select relname::text from pg_class
 where relnamespace = 'tasklib'::regnamespace and relkind in ('r', 'v') and relname <> 'schema_migrations' order by 1
"""
HELD = """
select relname::text, privilege_type, is_grantable
  from pg_class, aclexplode(relacl) as acl
 where relnamespace = 'tasklib'::regnamespace and grantee = %s::regrole
"""
