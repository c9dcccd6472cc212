"""What the database says that a worker holds, and the worker does not know: its end was lost with an old primary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import tasklib
from tests.support.working import ManualWorker, get, grown_up_reaper, running, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from uuid import UUID

    from tests.support.raw_sql import Conn

pytestmark = pytest.mark.postgres_versions


def forget_the_end(conn: Conn, worker_id: str | None, task_id: UUID, state: str) -> None:
    """What a failover to a standby that lags does: the task is as it was before its end."""
    with conn.transaction():
        conn.execute(
            """update tasklib.tasks
                  set state = %s, completed_at = null, result = null, completed_by = null, worker_id = %s,
                      claimed_at = now(), locked_until = now() + interval '10 minutes', attempt = (%s = 'running')::int
                where id = %s""",
            [state, worker_id, state, task_id],
        )
        conn.execute(
            "insert into tasklib.claims (worker_id, locked_until, task_ids) values (%s, now() + interval '10 min', %s)",
            [worker_id, [task_id]],
        )


def cut_connections(conn: Conn) -> None:
    conn.execute(
        """select pg_terminate_backend(pid) from pg_stat_activity
            where datname = current_database() and application_name like 'tasklib%' and pid <> pg_backend_pid()"""
    )


@pytest.mark.parametrize("state", ["claimed", "running"])
def test_a_task_whose_end_was_lost_runs_again(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, state: str
) -> None:
    """Its worker lives and has forgotten it, so no lease runs out: the worker gives it back, whatever its state. That
    costs neither a retry nor a crash.
    """
    ran: list[int] = []
    job = tasklib.task(name="job")(lambda: ran.append(1))
    with running(config) as worker:
        task_id = client.submit_task(job)
        wait_final(client, task_id)
        forget_the_end(conn, worker.worker_id, task_id, state)
        cut_connections(conn)
        wait_until(lambda: len(ran) == 2, "it has run again")
        found = wait_final(client, task_id)
    assert (found.state, found.retry_count, found.crash_count, found.suspect) == ("completed", 0, 0, False)


def test_a_task_that_must_not_run_twice_does_not_when_its_end_was_lost(
    client: tasklib.Client, conn: Conn, config: tasklib.Config
) -> None:
    """It had begun: it fails, and says why."""
    ran: list[int] = []
    once = tasklib.task(name="once", on_crash="fail")(lambda: ran.append(1))
    with running(config) as worker:
        task_id = client.submit_task(once)
        wait_final(client, task_id)
        forget_the_end(conn, worker.worker_id, task_id, "running")
        cut_connections(conn)
        found = wait_final(client, task_id)
    assert (found.state, found.error_code, found.error) == (
        "failed", "INTERRUPTED", "Interrupted: what became of it was lost",
    )  # fmt: skip
    assert ran == [1]


def test_the_tasks_of_a_worker_that_the_database_has_forgotten_are_recovered(
    client: tasklib.Client, conn: Conn, config: tasklib.Config
) -> None:
    """Its registration was lost with the old primary: nobody declares it dead, and its lock would last ten minutes. It
    has some time to find out itself.
    """
    quick = tasklib.Config(config.database_url, lease_seconds=0.3)
    job = tasklib.task(name="job")(lambda: None)
    task_id = client.submit_task(job)
    forgotten, grave = ManualWorker(quick, "forgotten", lives=False), ManualWorker(quick, "grave")
    (claimed,) = forgotten.claim("job")
    assert forgotten.start(claimed)
    reaper = grown_up_reaper(quick, grave.session)
    reaper.run_once()
    assert get(client, task_id).state == "running"
    conn.execute("update tasklib.claims set locked_until = locked_until - interval '11 s'")
    reaper.run_once()
    found = get(client, task_id)
    assert (found.state, found.ready, found.suspect) == ("pending", True, True)
    forgotten.close()
    grave.close()
