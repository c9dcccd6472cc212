"""Faults and rare moments while workers obey policies: no start too many, and no task or permit left behind."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import psycopg
import pytest

import tasklib
from tasklib.worker.policy_watch import READ_EVERY_SECONDS
from tests.integration.test_policies import Meter, count, knows_policies, set_queue
from tests.support.proxy import CuttingProxy
from tests.support.raw_sql import literal
from tests.support.working import get, running, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tasklib.worker.limited_queues import LimitedQueue
    from tests.support.raw_sql import Conn

HELD_SECONDS = 0.5  # long enough for what must not happen


@pytest.fixture
def meter() -> Iterator[Meter]:
    made = Meter()
    yield made
    made.release.set()


def permits(conn: Conn, queue: str = "default") -> int:
    row = conn.execute("select coalesce(sum(permits), 0) from tasklib.permits where queue = %s", [queue]).fetchone()
    assert row is not None
    return int(row[0])


def limit_of(worker: tasklib.TaskWorker, queue: str = "default") -> LimitedQueue:
    assert worker._run is not None
    return worker._run.buffer.limits.by_queue[queue]


def make_suspect(conn: Conn) -> None:
    conn.execute("update tasklib.tasks set suspect = true, crash_count = 1 where state = 'pending'")


# --- the policy itself changes ---


def test_permits_of_a_cap_that_was_removed_do_not_count_when_it_is_set_again(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter
) -> None:
    """A worker that has other things to do would keep them from all others."""

    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            meter.release.wait(30)

    set_queue(conn, '{"max_running": 2}')
    with running(config, concurrency=2) as worker:
        client.submit_many([job.new(n) for n in range(2)])
        wait_until(lambda: meter.now == 2, "two to run")
        set_queue(conn, '{"max_running": null}')
        wait_until(lambda: knows_policies(worker, conn), "the worker to hear of it")
        meter.release.set()
        wait_until(lambda: count(conn, "completed_at is null") == 0, "them to end")
        wait_until(lambda: permits(conn) == 0, "the permits to go back")


def test_a_cap_of_none_and_back(client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter) -> None:
    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            pass

    set_queue(conn, '{"max_running": 0}')
    with running(config, concurrency=2) as worker:
        wait_until(lambda: knows_policies(worker, conn), "the worker to hear of it")
        ids = client.submit_many([job.new(n) for n in range(5)])
        other = client.submit_task(job, 0, queue="other")
        assert wait_final(client, other).state == "completed"
        time.sleep(HELD_SECONDS)
        assert meter.begun == 1
        set_queue(conn, '{"max_running": 1}')
        for task_id in ids:
            assert wait_final(client, task_id).state == "completed"
    assert meter.most == 1


def test_tasks_that_wait_for_permits_run_when_the_policy_is_deleted(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter
) -> None:
    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            meter.release.wait(30 if n == 0 else 0)

    @tasklib.task
    async def job_async(n: int) -> None:
        with meter.inside():
            pass

    set_queue(conn, '{"max_running": 1}')
    with running(config, concurrency=4) as worker:
        client.submit_task(job, 0)
        wait_until(lambda: meter.now == 1, "one to run")
        limit_of(worker).may_have_more = True
        ids = client.submit_many([kind.new(n) for n in range(1, 5) for kind in (job, job_async)])
        conn.execute("delete from tasklib.queues")
        for task_id in ids:
            assert wait_final(client, task_id).state == "completed"
        meter.release.set()
        wait_until(lambda: count(conn, "completed_at is null") == 0, "all to end")


def test_a_task_that_must_not_run_twice_gets_its_permit(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter
) -> None:
    """It is marked before it starts. In a queue with a cap or a rate, several wait at once, and no others come."""

    @tasklib.task(on_crash="fail")
    def job(n: int) -> None:
        with meter.inside():
            meter.release.wait(0.02)

    set_queue(conn, '{"max_running": 1}')
    set_queue(conn, '{"rate_limit": 3, "rate_seconds": 0.5, "rate_burst": 1}', "rated")
    with running(config, concurrency=4, poll_interval_seconds=0.2):
        ids = [client.submit_task(job, n, queue=queue) for n in range(8) for queue in ("default", "rated")]
        for task_id in ids:
            assert wait_final(client, task_id).state == "completed"


def test_a_task_that_must_not_run_twice_goes_back_at_a_pause(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter
) -> None:
    @tasklib.task(on_crash="fail")
    def job(n: int) -> None:
        with meter.inside():
            meter.release.wait(30)

    with running(config, concurrency=1, buffer_size=5) as worker:
        client.submit_many([job.new(n) for n in range(4)])
        wait_until(lambda: meter.now == 1, "one to run")
        wait_until(lambda: count(conn, "state <> 'pending'") == 4, "the others to be held")
        conn.execute("select tasklib.pause_queue('default')")
        wait_until(lambda: knows_policies(worker, conn), "the worker to hear of it")
        wait_until(lambda: count(conn, "state = 'pending' and attempt = 0") == 3, "the others to go back")


@pytest.mark.parametrize("policy", ["paused", '{"max_running": 0}'])
def test_a_suspect_of_a_closed_queue_holds_nobody_up(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, policy: str, meter: Meter
) -> None:
    """It would have the worker for itself, and may not start. It is not even claimed."""

    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            pass

    suspect = client.submit_task(job, 0, queue="mail")
    make_suspect(conn)
    if policy == "paused":
        conn.execute("select tasklib.pause_queue('mail')")
    else:
        set_queue(conn, policy, "mail")
    with running(config, concurrency=2):
        for n in range(10):
            assert wait_final(client, client.submit_task(job, n), seconds=5).state == "completed"
        time.sleep(HELD_SECONDS)
        row = conn.execute("select state, fencing_token from tasklib.tasks where id = %s", [suspect]).fetchone()
        assert row == ("pending", 0)
        conn.execute("select tasklib.resume_queue('mail')")
        set_queue(conn, '{"max_running": 1}', "mail")
        assert wait_final(client, suspect).state == "completed"


def test_idle_workers_hold_no_permits_and_come_to_rest(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter
) -> None:
    """They do not hand permits on to each other, nor stand in line for some."""

    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            meter.release.wait(0.01)

    set_queue(conn, '{"max_running": 2}')
    with running(config, concurrency=4), running(config, concurrency=4), running(config, concurrency=4):
        ids = client.submit_many([job.new(n) for n in range(60)])
        for task_id in ids:
            assert wait_final(client, task_id).state == "completed"
        wait_until(lambda: conn.execute("select from tasklib.permits").fetchone() is None, "all permits to go back")
        ends = time.monotonic() + 1.0
        while time.monotonic() < ends:
            assert conn.execute("select from tasklib.permits").fetchone() is None


# --- the database is slow, away, or locked ---


def test_tasks_of_a_claim_are_not_lost_if_the_policies_cannot_be_read(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter, open_directory: Path
) -> None:
    """The connection is cut between the claim and the read of the policies that it has told to be new."""
    is_armed = threading.Event()

    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            pass

    def decide(said: Any) -> Any:
        if is_armed.is_set() and "cluster_wide_cap" in said.sql and "set_cluster" not in said.sql:
            is_armed.clear()
            return "before"
        return "pass"

    with CuttingProxy(config.database_url, open_directory, decide) as proxy:
        through = tasklib.Config(proxy.url)
        with running(through, concurrency=2) as worker:
            assert wait_final(client, client.submit_task(job, 0)).state == "completed"
            is_armed.set()
            set_queue(conn, '{"max_running": 2}')
            ids = client.submit_many([job.new(n) for n in range(5)])
            for task_id in ids:
                assert wait_final(client, task_id, seconds=40).state == "completed"
            assert not is_armed.is_set()
            assert knows_policies(worker, conn)
    assert meter.begun == 6


def test_an_operator_with_an_open_transaction_holds_up_no_worker(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter, database_url: str
) -> None:
    """He has changed the queue and the row of all policies, and has not committed."""

    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            pass

    set_queue(conn, '{"max_running": 2, "rate_limit": 1000, "rate_seconds": 1, "breaker_failures": 100}')
    with psycopg.connect(database_url) as operator, running(config, concurrency=2):
        operator.execute("select tasklib.set_queue('default', '{\"max_running\": 3}')")
        operator.execute("select tasklib.set_cluster('{\"cluster_wide_cap\": 5}')")
        operator.execute("select tasklib.pause_queue('default')")
        operator.execute("select from tasklib.queues for update")
        ids = client.submit_many([job.new(n) for n in range(20)])
        for task_id in ids:
            assert wait_final(client, task_id).state == "completed"
        with running(config, concurrency=2):  # a worker starts meanwhile
            assert wait_final(client, client.submit_task(job, 0)).state == "completed"
        operator.rollback()


def test_nothing_starts_by_a_policy_that_could_not_be_read_again(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter, database_url: str
) -> None:
    """A pause holds within 1.2 s, also for what waits in a full worker."""

    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            time.sleep(0.45)

    with running(config, concurrency=1, buffer_size=20, poll_interval_seconds=5.0):
        client.submit_many([job.new(n) for n in range(20)])
        for _ in range(3):
            begun = meter.begun
            wait_until(lambda begun=begun: meter.begun > begun, "some to run", seconds=10)  # type: ignore[misc]
            conn.execute("select tasklib.pause_queue('default')")
            time.sleep(1.2)
            begun = meter.begun
            time.sleep(1.0)
            assert meter.begun == begun
            conn.execute("select tasklib.resume_queue('default')")


def test_a_worker_with_waiting_tasks_reads_the_policies_in_time(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter
) -> None:
    """They start without the claim loop, which may sleep meanwhile. If the read fails, it is not put off."""

    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            meter.release.wait(30)

    with running(config, concurrency=1, buffer_size=5) as worker:
        client.submit_many([job.new(n) for n in range(4)])
        wait_until(lambda: meter.now == 1, "one to run")
        assert worker._run is not None
        watch = worker._run.policies
        wait_until(lambda: worker._run is not None and worker._run.buffer.counts()[0] == 3, "three to wait")
        assert watch.seconds_left() <= READ_EVERY_SECONDS
        meter.release.set()
    last_read, watch._session = watch._read_at, mock.Mock()
    watch._session.run.side_effect = psycopg.OperationalError("cut")
    with pytest.raises(psycopg.OperationalError):
        watch.note_version(watch.policies.version + 1)
    assert watch._read_at == last_read


# --- workers that stop, or are taken for dead ---


def test_a_worker_that_stops_leaves_no_permits(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter
) -> None:
    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            meter.release.wait(1 if n < 2 else 0)

    set_queue(conn, '{"max_running": 2}')
    ids = client.submit_many([job.new(n) for n in range(6)])
    with running(config, concurrency=2) as worker:
        wait_until(lambda: meter.now == 2, "two to run")
        assert permits(conn) == 2
        worker.stop()
    assert permits(conn) == 0
    assert count(conn, "state = 'pending'") == 4
    with running(config, concurrency=2):
        for task_id in ids:
            assert wait_final(client, task_id).state == "completed"


def test_a_worker_that_was_fenced_asks_for_permits_anew(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter
) -> None:
    """It goes on under another name. What it was given under the old one is others' by then."""

    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            meter.release.wait(30)

    set_queue(conn, '{"max_running": 2}')
    quick = tasklib.Config(config.database_url, lease_seconds=0.6)
    with running(quick, concurrency=2) as worker:
        client.submit_many([job.new(n) for n in range(2)])
        wait_until(lambda: meter.now == 2, "two to run")
        assert worker._run is not None
        before = worker._run.lease.worker_id
        limit = limit_of(worker)
        # Taken for dead, recovered and forgotten, all before the worker knows; another worker takes what is free.
        with worker._run.buffer.lock:
            conn.execute("delete from tasklib.claims")
            conn.execute("update tasklib.workers set died_at = clock_timestamp(), lease_until = clock_timestamp()")
            conn.execute("select tasklib.forget_permits()")
            conn.execute(
                "insert into tasklib.permits (queue, worker_id, permits, wanted) values ('default', 'b', 2, 2)"
            )
            conn.execute(
                "insert into tasklib.claims (worker_id, locked_until, task_ids) values ('b', 'infinity', '{}')"
            )
        wait_until(lambda: worker._run is not None and worker._run.lease.worker_id != before, "another name")
        wait_until(lambda: worker._run is not None and worker._run.lease.is_valid(), "its lease")
        assert limit.own == 0
        meter.release.set()
        wait_until(lambda: limit.executing == 0, "its tasks to end")
        client.submit_many([job.new(n) for n in range(2)])
        time.sleep(HELD_SECONDS)
        assert (limit.own, meter.begun) == (0, 2)
        conn.execute("delete from tasklib.permits where worker_id = 'b'")
        conn.execute("delete from tasklib.claims where worker_id = 'b'")
        conn.execute("update tasklib.queues set changed_at = clock_timestamp()")  # rings
        wait_until(lambda: meter.begun >= 4, "the others to run")


# --- tests of applications ---


@pytest.mark.parametrize("policy", ["pause", "cap", "cluster", "rate"])
def test_run_until_empty_ends_although_tasks_wait_for_a_policy(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter, policy: str
) -> None:
    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            pass

    statements = {
        "pause": "select tasklib.pause_queue('mail')",
        "cap": "select tasklib.set_queue('mail', '{\"max_running\": 0}')",
        "cluster": "select tasklib.set_cluster('{\"cluster_wide_cap\": 0}')",
        "rate": "select tasklib.set_queue('mail', '{\"rate_limit\": 1, \"rate_seconds\": 3600}')",
    }
    conn.execute(literal(statements[policy]))
    waiting = [client.submit_task(job, n, queue="mail") for n in range(3)]
    other = client.submit_task(job, 0)
    ended = threading.Event()

    def run() -> None:
        tasklib.TaskWorker(config, concurrency=2).run_until_empty_sync()
        ended.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ended.wait(10), "it waits for tasks that may not run"
    expected = {"pause": 0, "cap": 0, "cluster": 0, "rate": 1}[policy]
    assert sum(get(client, each).state == "completed" for each in waiting) == expected
    assert get(client, other).state == ("pending" if policy == "cluster" else "completed")
