"""A database in which a role is hostile: it has made in `public` all that PostgreSQL lets it make, and every one of
its functions notes who runs it. The other roles have the rights that docs/installing.md gives them, and a search_path
in which `public` comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from psycopg.conninfo import make_conninfo

import tasklib
from tasklib import migrate
from tests.support.raw_sql import literal

if TYPE_CHECKING:
    from tests.support.raw_sql import Conn

HERE = Path(__file__).parent
OWNER, DAEMON, WEB, MALLORY = "shop_owner", "shop_daemon", "shop_web", "mallory"
_GRANTS = f"""
grant usage on schema tasklib to {DAEMON}, {WEB}, {MALLORY};
grant select, insert, update, delete on all tables in schema tasklib to {DAEMON};
grant execute on all functions in schema tasklib to {DAEMON};
grant execute on function tasklib.submit, tasklib.submit_many, tasklib.backlog, tasklib.queue_statistics,
    tasklib.task_statistics to {WEB};
grant select, update on tasklib.tasks to {WEB};
grant insert on tasklib.task_transitions to {WEB};
grant select, insert on tasklib.attempts, tasklib.folded_attempts to {WEB};
"""


@dataclass(frozen=True)
class HostileDatabase:
    admin: str  # a superuser's address, by which the rest is made

    def of(self, role: str) -> str:
        return make_conninfo(self.admin, user=role)

    def config(self, role: str) -> tasklib.Config:
        return tasklib.Config(self.of(role), pool_size=2)

    def make(self) -> None:
        """The hostile objects come first: the migration itself meets them."""
        with psycopg.connect(self.admin, autocommit=True) as conn:
            for role in (OWNER, DAEMON, WEB, MALLORY):
                conn.execute(literal(f"create role {role} login"))
            database = conn.info.dbname
            conn.execute(literal(f"grant create, temporary on database {database} to {OWNER}"))
            conn.execute(literal(f"grant temporary on database {database} to {MALLORY}"))
            conn.execute(literal(f"grant pg_read_all_stats to {DAEMON}"))
            conn.execute(literal(f"grant create, usage on schema public to {MALLORY}"))
        self._run_as(MALLORY, "hostile.sql")
        with psycopg.connect(self.admin, autocommit=True) as conn:
            for role in (OWNER, DAEMON, WEB):
                conn.execute(literal(f"alter role {role} set search_path = public, pg_catalog"))
        migrate.migrate(tasklib.Config(self.of(OWNER)))
        with self.connect(OWNER) as conn:
            conn.execute(literal(_GRANTS))

    def attack(self) -> None:
        """One round of all that the hostile role may do."""
        self._run_as(MALLORY, "hostile_attack.sql")

    def trust_mallory_more(self) -> None:
        """It may use the types, as who makes views of tasks does, and has the documented rights of a daemon."""
        with self.connect(OWNER) as conn:
            domains = conn.execute(
                "select string_agg(oid::regtype::text, ', ') from pg_type "
                "where typtype = 'd' and typnamespace = 'tasklib'::regnamespace"
            ).fetchone()
            assert domains is not None
            conn.execute(literal(f"grant usage on domain {domains[0]} to {MALLORY}"))
            conn.execute(literal(f"grant select, insert, update, delete on all tables in schema tasklib to {MALLORY}"))
            conn.execute(literal(f"grant execute on all functions in schema tasklib to {MALLORY}"))

    def problems(self) -> list[str]:
        """Who else ran what is the hostile role's. It must have run some of it itself, or nothing was tried."""
        with self.connect() as conn:
            rows = conn.execute("select who, what, count(*) from public.seen group by 1, 2 order by 1, 2").fetchall()
            is_other = conn.execute("select is_called from public.others_seen").fetchone() == (True,)
        found = [f"{what} ran as {who}, {count} times" for who, what, count in rows if who != MALLORY]
        if is_other and not found:
            found.append("something ran as another role, and was rolled back: see PostgreSQL's log for `hostile:`")
        return found if {who for who, *_ in rows} >= {MALLORY} else [*found, "nothing hostile ever ran"]

    def connect(self, role: str | None = None) -> Conn:
        """For SQL of the test's own, out of reach of the hostile role."""
        conn = psycopg.connect(self.admin if role is None else self.of(role), autocommit=True)
        conn.execute("set search_path = pg_catalog, pg_temp")
        return conn

    def _run_as(self, role: str, file: str) -> None:
        with psycopg.connect(self.of(role), autocommit=True) as conn:
            conn.execute(literal((HERE / file).read_text("utf-8")))
