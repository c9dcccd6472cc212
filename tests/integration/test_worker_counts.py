"""What a real worker counts: how tasks were found, what it lost to others, what expired, what it took back."""

from __future__ import annotations

import contextlib
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

import tasklib
from tasklib.runtime.metrics import Counts
from tests.integration.test_doorbell import wait_asleep
from tests.support.working import quick_reaper, renew_now, running, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.raw_sql import Conn

pytestmark = pytest.mark.postgres_versions


class Totals:
    """All that was counted, by word and labels."""

    def __init__(self) -> None:
        self.metrics = Counts()
        self._numbers: dict[tuple[str, ...], float] = {}

    def of(self, *key: str) -> float:
        for each, values in self.metrics.take().items():
            self._numbers[each] = self._numbers.get(each, 0.0) + values[0]
        return self._numbers.get(key, 0.0)

    def wait_for(self, *key: str) -> None:
        wait_until(lambda: self.of(*key) >= 1, " ".join(key))


@tasklib.task
def counted_work() -> None:
    pass


@pytest.fixture
def book() -> Totals:
    return Totals()


# --- how tasks are found ---


@pytest.mark.direct("listens, which no pooler lets it do")
def test_what_a_notification_woke_it_for_is_found_by_notification(
    config: tasklib.Config, client: tasklib.Client, conn: Conn, book: Totals
) -> None:
    """The poll is half a minute away."""
    with running(config, metrics=book.metrics, poll_interval_seconds=30):
        wait_asleep(conn)
        wait_final(client, client.submit_task(counted_work))
        book.wait_for("claimed", "default", "notification")
        assert book.of("claimed", "default", "poll") == 0


def test_what_nobody_told_it_of_is_found_by_the_poll(
    config: tasklib.Config, client: tasklib.Client, book: Totals
) -> None:
    """It does not listen. The first one may have been there before its first look, and be a backlog."""
    with running(config, metrics=book.metrics, poll_interval_seconds=0.05, listen=False):
        for _ in range(2):
            wait_final(client, client.submit_task(counted_work))
        book.wait_for("claimed", "default", "poll")
        assert book.of("claimed", "default", "notification") == 0


def test_what_its_time_came_for_is_found_as_due(config: tasklib.Config, client: tasklib.Client, book: Totals) -> None:
    """The worker knows when that is."""
    with running(config, metrics=book.metrics, poll_interval_seconds=30):

        def is_found_as_due() -> bool:
            """If the machine stands still, the task may be due at the worker's first look: another one is needed."""
            wait_final(client, client.submit_task(counted_work, delay_seconds=0.3))
            return book.of("claimed", "default", "due") >= 1

        wait_until(is_found_as_due, "one to be found as due")


# --- what goes wrong ---


def test_a_lease_that_was_given_away_and_a_write_that_was_refused_are_counted(
    config: tasklib.Config, client: tasklib.Client, conn: Conn, book: Totals
) -> None:
    """The worker was given up for dead while it executed; and so is what it had to be taken back from it."""
    began, release = threading.Event(), threading.Event()

    @tasklib.task(name="counted_job")
    def job() -> None:
        began.set()
        while not release.is_set():
            with contextlib.suppress(tasklib.StopInterrupt):  # it will not stop
                release.wait(0.01)

    with (
        quick_reaper(config, book.metrics) as reaper,
        running(config, metrics=book.metrics, duties=False) as worker,
    ):
        task_id = client.submit_task(job)
        assert began.wait(20)
        conn.execute("update tasklib.workers set died_at = clock_timestamp() where worker_id = %s", [worker.worker_id])
        renew_now(worker)
        book.wait_for("lease_lost", "fenced")
        reaper.run_once()
        book.wait_for("lost", "lease_expired")
        release.set()
        book.wait_for("fenced")
        wait_final(client, task_id)
    assert book.of("finished", "counted_job", "default", "completed") == 1


def test_what_was_not_started_in_time_is_counted(config: tasklib.Config, client: tasklib.Client, book: Totals) -> None:
    """It was to run tomorrow, and no later than now."""
    soon = datetime.now(UTC) + timedelta(seconds=0.2)
    client.submit_task(counted_work, scheduled_at=soon + timedelta(days=1), expires_at=soon)
    with running(config, metrics=book.metrics):
        book.wait_for("expired")
