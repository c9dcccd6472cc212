"""What docs/operating.md says of roles, backups and failovers, done with real daemons and real servers."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import tasklib
from tasklib import embedded, migrate
from tasklib.doctor import CHECKS, Severity, examine, worst
from tasklib.doctor.schema import FUNCTION_RIGHTS, TABLE_RIGHTS
from tests.daemons import daemon
from tests.raw_sql import literal
from tests.standby import standby
from tests.waiting import wait_until
from tests.working import get, wait_final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.raw_sql import NewDatabase

pytestmark = pytest.mark.direct("roles, dumps and standbys are the server's")

LONG = 3600.0
OLD_TASK = """
insert into tasklib.tasks (id, name, state, created_at, scheduled_at, completed_at)
values ('00000000-0000-7000-8000-000000000000', 'old', 'completed', '2020-01-01', '2020-01-01', '2020-01-01')
"""


@pytest.fixture
def daemon_role(new_database: NewDatabase) -> Iterator[str]:
    """The address of a database for a role that has the rights that the doctor looks for, and no other."""
    url = new_database()
    migrate.migrate(tasklib.Config(url))
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(literal(OLD_TASK))
        conn.execute("revoke execute on all functions in schema tasklib from public")
        conn.execute("create role daemon_of_the_shop login")
        conn.execute("grant usage on schema tasklib to daemon_of_the_shop")
        for table, rights in TABLE_RIGHTS.items():
            conn.execute(literal(f"grant {', '.join(rights)} on tasklib.{table} to daemon_of_the_shop"))
        for function in FUNCTION_RIGHTS:
            conn.execute(literal(f"grant execute on function tasklib.{function} to daemon_of_the_shop"))
        yield make_conninfo(url, user="daemon_of_the_shop")
        conn.execute("drop owned by daemon_of_the_shop")
        conn.execute("drop role daemon_of_the_shop")


def test_a_daemon_needs_the_rights_that_the_doctor_looks_for(daemon_role: str, tmp_path: Path) -> None:
    """And no others: it submits, runs, retries, cancels, expires, recovers a crash, prunes, and is refused nothing."""
    with (
        daemon(daemon_role, snapshot_seconds=0.2, lease_seconds=2) as made,
        tasklib.Client(tasklib.Config(daemon_role)) as client,
        psycopg.connect(daemon_role, autocommit=True) as conn,
    ):
        found = examine(tasklib.Config(daemon_role))
        assert {each.check for each in found if each.severity.rank > Severity.NOTE.rank} == set(), found
        wait_until(lambda: client.list_tasks(state="completed", name="old") == [], "the janitor")
        flag = str(tmp_path / "flag")
        wait_final(client, client.submit_task("submit_another", text="a child"))
        assert wait_final(client, client.submit_task("kill_once", flag=flag)).attempt == 2
        assert wait_final(client, client.submit_task("exit_now", code="no number", max_retries=0)).state == "failed"
        retried = client.submit_task("sleep_in_c", seconds=-1)  # an error, which is worth a retry
        wait_until(lambda: get(client, retried).next_retry_at is not None, "its retry")
        assert client.retry_task(retried)
        nap = client.submit_task("nap", seconds=LONG)
        wait_until(lambda: get(client, nap).state == "running", "it to run")
        assert client.cancel_task(nap) == "asked"
        wait_final(client, nap)
        conn.execute("select tasklib.submit('nobodys', expires_at => clock_timestamp() + interval '0.1 seconds')")
        wait_until(lambda: len(client.list_tasks(state="expired")) == 1, "the expirer")
        assert made.stop() == 0
        assert "permission denied" not in made.output()
        assert [line for line in made.lines() if line.get("level") in {"error", "critical"}] == []


def test_a_queue_is_restored_with_its_claimed_tasks(new_database: NewDatabase, tmp_path: Path) -> None:
    """A dump of a queue at work. What was claimed then runs after the restore, what was running does so as a crashed
    attempt, or fails if it must not run twice; what had ended stays as it was, and what is due later stays so.
    """
    url, restored = new_database(), new_database()
    migrate.migrate(tasklib.Config(url))
    with (
        tasklib.Client(tasklib.Config(url)) as client,
        daemon(url, concurrency=2, buffer_size=2, lease_seconds=1, grace_seconds=0.1),
        psycopg.connect(url, autocommit=True) as conn,
    ):
        done = client.submit_task("echo", text="done")
        wait_final(client, done)
        later = client.submit_task("echo", text="later", delay_seconds=LONG)
        running = client.submit_task("nap", seconds=LONG)
        submit = """select id from tasklib.submit('nap', '{"seconds": 3600}', on_crash => 'fail')"""
        ((once,),) = conn.execute(submit).fetchall()
        wait_until(lambda: {get(client, each).state for each in (running, once)} == {"running"}, "both to run")
        claimed = [client.submit_task("echo", text="claimed") for _ in range(2)]
        wait_until(lambda: {get(client, each).state for each in claimed} == {"claimed"}, "both to be claimed")
        waiting = client.submit_task("echo", text="waiting")
        pg_run("pg_dump", "--format=custom", f"--file={tmp_path / 'queue.dump'}", url)
    pg_run("pg_restore", "--exit-on-error", f"--dbname={restored}", str(tmp_path / "queue.dump"))

    assert worst(examine(tasklib.Config(restored), skip=set(CHECKS) - {"schema", "durability"})) == Severity.OK
    with (
        tasklib.Client(tasklib.Config(restored)) as client,
        psycopg.connect(restored, autocommit=True) as conn,
    ):
        assert [get(client, each).state for each in (running, *claimed)] == ["running", "claimed", "claimed"]
        conn.execute("update tasklib.tasks set kwargs = jsonb_set(kwargs, '{seconds}', '0') where id = %s", [running])
        with daemon(restored, lease_seconds=1):
            for each in (*claimed, waiting, running):
                assert wait_final(client, each).state == "completed"
            assert (wait_final(client, once).state, get(client, once).error_code) == ("failed", "WORKER_CRASHED")
        attempts = "select outcome from tasklib.task_attempts where task_id = %s order by attempt"
        assert conn.execute(attempts, [running]).fetchall() == [("WORKER_FAILURE",), ("COMPLETED",)]
        assert conn.execute(attempts, [claimed[0]]).fetchall() == [("COMPLETED",)]
        assert conn.execute(attempts, [done]).fetchall() == [("COMPLETED",)]
        assert get(client, later).state == "pending"
        assert get(client, done).result == {"value": "done"}


def pg_run(program: str, *words: str) -> None:
    subprocess.run([embedded.find_binaries() / program, *words], check=True, timeout=60)


def test_a_failover() -> None:
    """A synchronous standby is promoted when the primary has died. The daemon's address names both: the same processes
    go on, what was executing completes in the same attempt, and no confirmed submit is lost.
    """
    with embedded.postgres() as primary, standby(primary) as other:
        migrate.migrate(tasklib.Config(primary.dsn))
        with psycopg.connect(primary.dsn, autocommit=True) as admin:
            admin.execute("alter system set synchronous_standby_names = '*'")
            admin.execute("select pg_reload_conf()")
            host = admin.info.host
            wait_until(
                lambda: (
                    admin.execute("select from pg_stat_replication where sync_state = 'sync'").fetchone() is not None
                ),
                "the standby to be synchronous",
            )
        both = f"host={host},{other.directory} port={other.port} dbname=postgres user=postgres"
        address = f"{both} target_session_attrs=read-write"
        with tasklib.Client(tasklib.Config(address)) as client, daemon(address, concurrency=2) as made:
            nap = client.submit_task("nap", seconds=3.0)
            wait_until(lambda: get(client, nap).state == "running", "it to run")
            pids = made.processes()
            confirmed = [client.submit_task("echo", text=str(n), delay_seconds=1) for n in range(50)]
            primary.stop("immediate")
            other.promote()
            promoted = time.monotonic()
            wait_final(client, client.submit_task("echo", text="after"))
            assert time.monotonic() - promoted < 10
            assert {wait_final(client, each).state for each in confirmed} == {"completed"}
            assert wait_final(client, nap).attempt == 1
            assert made.processes() == pids
