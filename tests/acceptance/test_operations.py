"""What docs/installing.md and docs/runbook.md say of roles, backups and failovers, done with real servers."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import tasklib
from tasklib import embedded, migrate
from tasklib.doctor import CHECKS, Severity, run_checks, worst
from tasklib.doctor.schema import FUNCTION_RIGHTS, TABLE_RIGHTS
from tasklib_daemon.status import why_not_ready
from tests.support.raw_sql import literal
from tests.support.standby import standby
from tests.support.working import get, quick_reaper, wait_final
from tools.daemons import daemon
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasklib_daemon.status import Status
    from tests.support.raw_sql import NewDatabase

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
        found = run_checks(tasklib.Config(daemon_role))
        assert {each.check for each in found if each.severity.rank > Severity.NOTE.rank} == set(), found
        wait_until(lambda: client.list_tasks(state="completed", name="old") == [], "the janitor")
        flag = str(tmp_path / "flag")
        wait_final(client, client.submit_task("submit_another", text="a child"))
        assert wait_final(client, client.submit_task("kill_once", flag=flag)).attempt >= 2
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
        errors = [line for line in made.lines() if line.get("level") in {"error", "critical"}]
        slow = {"lease.expired", "worker.fenced"}  # a lease of two seconds may run out on a slow machine
        errors = [line for line in errors if line["event"] not in slow]
        assert [(line["event"], line["task"]) for line in errors] == [("task.failed", "exit_now")]


def test_a_daemon_that_can_claim_nothing_says_so(daemon_role: str) -> None:
    """Row-level security hides its tasks, and refuses nothing: it is not ready, and says why; the doctor finds it."""
    owner = make_conninfo(daemon_role, user="postgres")
    with daemon(daemon_role) as made, psycopg.connect(owner, autocommit=True) as conn:
        conn.execute("alter table tasklib.tasks enable row level security")
        conn.execute("select tasklib.submit('echo', '{\"text\": \"hidden\"}')")
        made.wait_for("tasks.unclaimable", seconds=60)
        wait_until(lambda: made.status()["unclaimable"] == ["default"], "the status to tell")
        assert "tasks wait that cannot be claimed, in: default" in why_not_ready(cast("Status", made.status()), 0.0)[0]
        found = [each for each in run_checks(tasklib.Config(daemon_role)) if each.check == "row_security"]
        assert [each.severity for each in found] == [Severity.CRITICAL]
        conn.execute("alter table tasklib.tasks disable row level security")
        wait_until(lambda: made.status()["unclaimable"] == [], "the status to tell", seconds=60)


def test_a_queue_is_restored_with_its_claimed_tasks(new_database: NewDatabase, tmp_path: Path) -> None:
    """A dump of a queue at work. What was claimed then runs after the restore, what was running does so as a crashed
    attempt, or fails if it must not run twice; what had ended stays as it was, and what is due later stays so.
    """
    url, restored = new_database(), new_database()
    migrate.migrate(tasklib.Config(url))
    with (
        tasklib.Client(tasklib.Config(url)) as client,
        daemon(url, concurrency=2, buffer_size=2, grace_seconds=0.1),
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

    assert worst(run_checks(tasklib.Config(restored), skip=set(CHECKS) - {"schema", "durability"})) == Severity.OK
    with (
        tasklib.Client(tasklib.Config(restored)) as client,
        psycopg.connect(restored, autocommit=True) as conn,
    ):
        assert [get(client, each).state for each in (running, *claimed)] == ["running", "claimed", "claimed"]
        conn.execute("update tasklib.tasks set kwargs = jsonb_set(kwargs, '{seconds}', '0') where id = %s", [running])
        conn.execute("update tasklib.workers set lease_until = clock_timestamp()")  # a restore takes longer
        with quick_reaper(tasklib.Config(restored)) as reaper:
            reaper.run_once()  # as the keeper does when it has been connected for a lease
        with daemon(restored):
            for each in (*claimed, waiting, running):
                assert wait_final(client, each).state == "completed"
            assert (wait_final(client, once).state, get(client, once).error_code) == ("failed", "WORKER_CRASHED")
        attempts = "select outcome from tasklib.task_attempts where task_id = %s order by attempt"
        assert conn.execute(attempts, [running]).fetchall() == [("WORKER_FAILURE",), ("COMPLETED",)]
        assert conn.execute(attempts, [claimed[0]]).fetchall() == [("COMPLETED",)]
        assert conn.execute(attempts, [done]).fetchall() == [("COMPLETED",)]
        assert get(client, later).state == "pending"
        assert get(client, done).result == {"value": "done"}


def test_a_restore_survives_a_submitter_in_between(new_database: NewDatabase, tmp_path: Path) -> None:
    """Between the disaster and the restore, and while it is under way, an application submits: it makes an empty schema
    each time that there is none. The page's own commands bring back what was in the dump, and keep what was submitted.
    """
    url = new_database()
    backup, restore = (code for code in restore_commands() if "queue.dump" in code)
    migrate.migrate(tasklib.Config(url))
    with tasklib.Client(tasklib.Config(url)) as client:
        before = client.submit_task("echo", text="before")
    run_commands(backup, url, tmp_path)
    submitted, is_over = [], threading.Event()

    def submit() -> None:
        while not is_over.is_set():
            with tasklib.Client(tasklib.Config(url)) as client, contextlib.suppress(tasklib.TasklibError):
                submitted.append(client.submit_task("echo", text="meanwhile", delay_seconds=LONG))

    submitter = threading.Thread(target=submit)
    submitter.start()
    wait_until(lambda: len(submitted) >= 3, "a schema in the dump's place")
    try:
        run_commands(restore, url, tmp_path)
        restored_at = len(submitted)
        wait_until(lambda: len(submitted) > restored_at + 1, "a submit afterwards")
    finally:
        is_over.set()
        submitter.join()
    with tasklib.Client(tasklib.Config(url)) as client, psycopg.connect(url) as conn:
        assert get(client, before).state == "pending"
        assert [each for each in submitted if client.get_task(each) is None] == []
        assert conn.execute("select to_regnamespace('tasklib_meanwhile')").fetchone() == (None,)
    assert worst(run_checks(tasklib.Config(url), skip={"workers", "connections"}, deep=True)) == Severity.OK


def restore_commands() -> list[str]:
    page = (Path(__file__).resolve().parents[2] / "docs" / "runbook.md").read_text(encoding="utf-8")
    section = page.partition("\n## Backup and restore\n")[2].partition("\n## ")[0]
    return re.findall(r"```bash\n(.*?)```", section, re.DOTALL)


def run_commands(code: str, url: str, directory: Path) -> None:
    here = [str(Path(sys.executable).parent), str(embedded.find_binaries()), os.environ["PATH"]]
    environment = os.environ | {"DATABASE_URL": url, "PATH": os.pathsep.join(here)}
    code = code.replace("tasklib doctor --deep\n", "")  # it has an opinion of the rest of the server, too
    subprocess.run(["bash", "-euo", "pipefail", "-c", code], env=environment, cwd=directory, check=True, timeout=120)


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
            assert wait_final(client, client.submit_task("echo", text="after")).state == "completed"
            assert {wait_final(client, each).state for each in confirmed} == {"completed"}
            assert wait_final(client, nap).attempt == 1
            assert made.processes() == pids
