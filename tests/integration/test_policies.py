"""Workers obey the policies of queues. A counter outside of the database sees what really executes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import tasklib
from tests.support.raw_sql import literal
from tests.support.working import get, running, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.raw_sql import Conn


class Meter:
    """How many execute at one time, now and at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.most = self.begun = 0
        self.release = threading.Event()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        with self._lock:
            self.now += 1
            self.begun += 1
            self.most = max(self.most, self.now)
        try:
            yield
        finally:
            with self._lock:
                self.now -= 1


@pytest.fixture
def meter() -> Iterator[Meter]:
    made = Meter()
    yield made
    made.release.set()


def set_queue(conn: Conn, policy: str, queue: str = "default") -> None:
    conn.execute("select tasklib.set_queue(%s, %s::jsonb)", [queue, policy])


def count(conn: Conn, condition: str) -> int:
    row = conn.execute(literal(f"select count(*) from tasklib.tasks where {condition}")).fetchone()
    assert row is not None
    return int(row[0])


def knows_policies(worker: tasklib.TaskWorker, conn: Conn) -> bool:
    assert worker._run is not None
    return conn.execute("select version from tasklib.policy").fetchone() == (worker._run.policies.policies.version,)


def test_a_cap_holds_over_several_workers(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter
) -> None:
    set_queue(conn, '{"max_running": 3}')

    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            meter.release.wait(0.005)

    ids = client.submit_many([job.new(n) for n in range(200)])
    with running(config, concurrency=4), running(config, concurrency=4):
        for task_id in ids:
            assert wait_final(client, task_id, seconds=60).state == "completed"
        wait_until(lambda: conn.execute("select from tasklib.permits").fetchone() is None, "unused permits to go back")
    assert meter.most <= 3
    assert meter.begun == 200


def test_async_tasks_obey_a_cap(client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter) -> None:
    set_queue(conn, '{"max_running": 2}')

    @tasklib.task
    async def job(n: int) -> None:
        with meter.inside():
            await asyncio.sleep(0.002)

    ids = client.submit_many([job.new(n) for n in range(100)])
    with running(config, concurrency=10):
        for task_id in ids:
            assert wait_final(client, task_id, seconds=60).state == "completed"
    assert meter.most <= 2


def test_one_cap_over_all_queues(client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter) -> None:
    conn.execute("select tasklib.set_cluster('{\"cluster_wide_cap\": 2}')")

    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            meter.release.wait(0.005)

    ids = [client.submit_task(job, n, queue=f"queue{n % 3}") for n in range(40)]
    with running(config, concurrency=4), running(config, concurrency=4):
        for task_id in ids:
            assert wait_final(client, task_id, seconds=60).state == "completed"
    assert meter.most <= 2


def test_a_worker_runs_no_more_than_its_share(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter
) -> None:
    set_queue(conn, '{"max_per_worker": 1}')

    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            meter.release.wait(0.005)

    ids = client.submit_many([job.new(n) for n in range(30)])
    with running(config, concurrency=4), running(config, concurrency=4):
        for task_id in ids:
            assert wait_final(client, task_id, seconds=60).state == "completed"
    assert meter.most <= 2


def test_a_paused_queue_starts_nothing_and_others_go_on(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter
) -> None:
    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            pass

    with running(config, concurrency=2):
        conn.execute("select tasklib.pause_queue('mail', 'the provider is down')")
        other = client.submit_task(job, 0)
        assert wait_final(client, other).state == "completed"
        paused = [client.submit_task(job, n, queue="mail") for n in range(5)]
        for n in range(20):
            assert wait_final(client, client.submit_task(job, n)).state == "completed"
        assert {get(client, task_id).state for task_id in paused} == {"pending"}
        assert {get(client, task_id).attempt for task_id in paused} == {0}
        conn.execute("select tasklib.resume_queue('mail')")
        for task_id in paused:
            assert wait_final(client, task_id).state == "completed"


def test_a_pause_gives_back_what_waits_and_lets_finish_what_runs(
    client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter
) -> None:
    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            meter.release.wait(30)

    with running(config, concurrency=1, buffer_size=5) as worker:
        ids = client.submit_many([job.new(n) for n in range(5)])
        wait_until(lambda: meter.now == 1, "one to run")
        wait_until(lambda: count(conn, "state <> 'pending'") == 5, "the others to be held")
        conn.execute("select tasklib.pause_queue('default')")
        wait_until(lambda: knows_policies(worker, conn), "the worker to hear of it")
        wait_until(lambda: count(conn, "state = 'pending'") == 4, "the others to go back")
        meter.release.set()
        wait_until(lambda: count(conn, "state = 'completed'") == 1, "the running one to end")
        assert (meter.begun, count(conn, "state = 'pending' and attempt = 0")) == (1, 4)
        conn.execute("select tasklib.resume_queue('default')")
        for task_id in ids:
            assert wait_final(client, task_id).state == "completed"


def test_a_pause_ends_by_itself(client: tasklib.Client, config: tasklib.Config, conn: Conn) -> None:
    job = tasklib.task(name="job")(lambda: None)
    conn.execute("select tasklib.pause_queue('default', null, clock_timestamp() + interval '1 second')")
    task_id = client.submit_task(job)
    with running(config):
        assert wait_final(client, task_id).state == "completed"
    row = conn.execute("select bool_and(started_at > paused_until) from tasklib.tasks, tasklib.queues").fetchone()
    assert row == (True,)


def test_a_task_pauses_its_queue(client: tasklib.Client, config: tasklib.Config, conn: Conn) -> None:
    """At no cost: it runs again after the pause, with all its retries before it."""
    ran: list[int] = []

    @tasklib.task(max_retries=0)
    def job() -> None:
        ran.append(1)
        if len(ran) == 1:
            raise tasklib.PauseQueue("quota used up", until=timedelta(hours=1))

    task_id = client.submit_task(job)
    with running(config):
        wait_until(lambda: conn.execute("select from tasklib.queues").fetchone() is not None, "the pause")
        row = conn.execute("select name, pause_reason, paused_by, paused_until > now() from tasklib.queues").fetchone()
        assert row == ("default", "quota used up", f"task {task_id}", True)
        wait_until(lambda: count(conn, "state = 'pending' and ready") == 1, "the task to wait")
        assert get(client, task_id).retry_count == 0
        conn.execute("select tasklib.resume_queue('default')")
        assert wait_final(client, task_id).state == "completed"
    assert ran == [1, 1]


def test_a_rate_limits_starts(client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter) -> None:
    set_queue(conn, '{"rate_limit": 3, "rate_seconds": 3600}')

    @tasklib.task
    def job(n: int) -> None:
        with meter.inside():
            pass

    ids = client.submit_many([job.new(n) for n in range(10)])
    with running(config, concurrency=2), running(config, concurrency=2):
        wait_until(lambda: count(conn, "state = 'completed'") == 3, "three to run")
        other = client.submit_task(job, 0, queue="other")
        assert wait_final(client, other).state == "completed"
        wait_until(lambda: count(conn, "state = 'pending' and ready") == 7, "the others to go back")
        set_queue(conn, '{"rate_limit": null, "rate_seconds": null}')
        for task_id in ids:
            assert wait_final(client, task_id).state == "completed"
    assert meter.begun == 11


def test_a_breaker_opens_and_closes(client: tasklib.Client, config: tasklib.Config, conn: Conn, meter: Meter) -> None:
    set_queue(conn, '{"breaker_failures": 3, "breaker_open_seconds": 3600}')
    is_well = threading.Event()

    @tasklib.task(max_retries=0)
    def job(n: int) -> None:
        with meter.inside():
            if not is_well.is_set():
                raise ConnectionError("the provider is down")

    def state() -> Any:
        return conn.execute("select breaker from tasklib.queue_limits where queue = 'default'").fetchone()

    with running(config, concurrency=2):
        for n in range(3):
            wait_final(client, client.submit_task(job, n))
        wait_until(lambda: state() == ("open",), "the breaker to open")
        waiting = client.submit_many([job.new(n) for n in range(10)])
        other = client.submit_task(job, 0, queue="other")
        wait_final(client, other)
        assert {get(client, task_id).state for task_id in waiting} <= {"pending", "claimed"}
        is_well.set()
        conn.execute("update tasklib.breakers set open_until = clock_timestamp()")
        conn.execute("update tasklib.queues set changed_at = clock_timestamp()")  # rings
        for task_id in waiting:
            assert wait_final(client, task_id).state == "completed"
        wait_until(lambda: state() == ("closed",), "the breaker to close")


def test_a_queue_of_a_higher_rank_comes_first(client: tasklib.Client, config: tasklib.Config, conn: Conn) -> None:
    set_queue(conn, '{"rank": 10}', "urgent")
    order: list[str] = []

    @tasklib.task
    def job(name: str) -> None:
        order.append(name)

    for queue in ("default", "urgent", "default", "urgent", "default", "urgent"):
        client.submit_task(job, queue, queue=queue)
    with running(config, concurrency=1, buffer_size=0, queues=["default", "urgent"]):
        wait_until(lambda: len(order) == 6, "all to run")
    assert order == ["urgent"] * 3 + ["default"] * 3


def test_waiting_raises_priority(client: tasklib.Client, config: tasklib.Config, conn: Conn) -> None:
    """A step for each minute: an old task of a low priority comes before a new one of a higher priority."""
    set_queue(conn, '{"ageing_seconds": 60}')
    order: list[int] = []

    @tasklib.task
    def job(number: int) -> None:
        order.append(number)

    waited = {1: (0, 0), 2: (3, 0), 3: (0, 4 * 60 + 5), 4: (-10, 12 * 60 + 5), 5: (3, 65), 6: (0, 0)}
    for number, (priority, seconds) in waited.items():
        task_id = client.submit_task(job, number, priority=priority)
        conn.execute(
            "update tasklib.tasks set created_at = created_at - %s * interval '1 second' where id = %s",
            [seconds, task_id],
        )
    with running(config, concurrency=1, buffer_size=0):
        wait_until(lambda: len(order) == 6, "all to run")
    assert order == [5, 3, 2, 4, 1, 6]
