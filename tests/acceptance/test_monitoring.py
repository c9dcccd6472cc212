"""A real Prometheus watches two real daemons, while tasks succeed, fail in every way, and kill their workers: every
panel shows something, what is counted is what the database holds, and the alerts that ought to fire do.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import pytest

import tasklib
from tasklib import migrate
from tests.daemon_app import all_ends as ends
from tests.support import grafana_files as files
from tests.support.prometheus import needs_prometheus, prometheus
from tests.support.working import get
from tools.daemons import daemon
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.prometheus import Prometheus
    from tests.support.raw_sql import Conn, NewDatabase

pytestmark = [
    pytest.mark.xdist_group("monitoring"),  # they share what takes long to make
    needs_prometheus,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc"),
    pytest.mark.direct("ends the workers' sessions by their names"),
]
ROUNDS = 12
ROUND_SECONDS = 0.5
BULK = 50
WINDOW = "10s"  # Grafana would say four scrapes, or more
NEVER_RUN = {"come_later", "unknown"}  # they are left waiting

POLICY = '{"max_running": 5, "rate_limit": 5, "rate_seconds": 60, "breaker_failures": 5}'
CUT: LiteralString = "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'tasklib:%'"
FIRING = 'ALERTS{alertstate="firing"}'
# What Prometheus has, by which labels, and what the database has of it.
RECOUNTS: dict[str, tuple[tuple[str, ...], LiteralString]] = {
    "tasklib_tasks_finished_total": (("task", "queue", "outcome"), """
        select name, queue, lower(outcome), count(*)
        from tasklib.task_attempts join tasklib.tasks on id = task_id group by 1, 2, 3
    """),
    "tasklib_task_duration_seconds_count": (("task", "queue"), """
        select name, queue, count(*) from tasklib.task_attempts join tasklib.tasks on id = task_id group by 1, 2
    """),
    "tasklib_tasks_started_total": ((), "select count(*) from tasklib.task_attempts"),
    "tasklib_tasks_retried_total": (("task", "queue"), """
        select name, queue, count(*) from tasklib.task_attempts join tasklib.tasks on id = task_id
        where will_retry and outcome in ('FAILED', 'TIMED_OUT') group by 1, 2
    """),
    "tasklib_tasks_failed_total": (("task", "queue"), """
        select name, queue, count(*) from tasklib.tasks where state = 'failed' group by 1, 2
    """),
    "tasklib_tasks_expired_total": ((), "select count(*) from tasklib.tasks where state = 'expired'"),
    "tasklib_tasks_buried_total": (("task",), """
        select name, count(*) from tasklib.tasks where state = 'buried' group by 1
    """),
    # A task is a suspect if it was executing when its worker died, or if a second worker that held it died.
    "tasklib_tasks_suspected_total": (("task",), """
        select name, count(*) from tasklib.tasks
        where crash_count > 1
           or id in (select task_id from tasklib.task_attempts where outcome in ('WORKER_FAILURE', 'LEASE_LOST'))
        group by 1
    """),
    "max without (instance) (tasklib_tasks_submitted_total)": ((), "select count(*) from tasklib.tasks"),
    "max without (instance) (tasklib_queue_tasks)": (("queue", "state"), """
        select queue, case when ready then 'ready' else 'scheduled' end, count(*)
        from tasklib.tasks where completed_at is null group by 1, 2
    """),
}  # fmt: skip

Counts = dict[tuple[str, ...], float]


@dataclass(frozen=True)
class Scene:
    prometheus: Prometheus
    conn: Conn
    began: float
    ended: float

    def counted(self, series: str, *labels: str) -> Counts:
        """As Prometheus has it, of both daemons. Nought is what was announced and did not happen."""
        found = self.prometheus.query(f"sum by ({', '.join(labels)}) ({series})")
        return {tuple(metric[label] for label in labels): value for metric, value in found if value}

    def recounted(self, query: LiteralString) -> Counts:
        """As the database has it: labels, then the number."""
        return {row[:-1]: float(row[-1]) for row in self.conn.execute(query) if row[-1]}

    def shown(self, each: files.Expression) -> list[float]:
        """The values that a panel would have to show."""
        seconds = f"{self.ended - self.began:.0f}s"
        everything = dict.fromkeys(("namespace", "job", "queue", "task", "instance"), ".*")
        text = each.with_values({**everything, "__rate_interval": WINDOW, "__range": seconds})
        if each.is_instant:
            values = [value for _, value in self.prometheus.query(text)]
        else:
            lines = self.prometheus.query_range(text, start=self.began, end=self.ended)
            values = [value for line in lines for value in line]
        return [value for value in values if not math.isnan(value)]


@pytest.fixture(scope="module")
def scene(new_database: NewDatabase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    url = new_database()
    config = tasklib.Config(url)
    migrate.migrate(config)
    with ExitStack() as stack:
        conn = stack.enter_context(psycopg.connect(url, autocommit=True))
        daemons = [stack.enter_context(_daemon(url, name)) for name in ("one", "two")]
        targets = [f"127.0.0.1:{each.wait_for('web.listening')['port']}" for each in daemons]
        server = stack.enter_context(prometheus({"tasklib": targets}, rules=files.RULES))
        wait_until(lambda: len(server.up()) == len(targets), "the first scrapes")
        # A policy that holds nothing up, so that there are figures of one.
        conn.execute("select tasklib.set_queue('limited', %s::jsonb)", [POLICY])
        began = time.time()
        with tasklib.Client(config) as client:
            _load(client, conn, tmp_path_factory.mktemp("flags"))
        wait_until(lambda: _is_over(conn), "all tasks to end", seconds=40)
        _wait_until_told(server, conn)
        yield Scene(server, conn, began, time.time())


def _daemon(url: str, name: str) -> Any:
    return daemon(
        url, app=["tests.daemon_app.all_ends"], name=name, workers=2, concurrency=4, bury_after=1,
        timeout_delta_seconds=0.3, web={"port": 0}, restart={"crash_loop_deaths": 50},
    )  # fmt: skip


def _load(client: tasklib.Client, conn: Conn, flags: Path) -> None:
    """Some seconds of work, so that there are rates; and each of what happens seldom."""
    now = datetime.now(UTC)
    in_a_day, in_a_second = now + timedelta(days=1), now + timedelta(seconds=1)
    client.submit(ends.come_later.options(scheduled_at=in_a_day).new())
    client.submit(ends.sum_up.options(scheduled_at=in_a_day, expires_at=in_a_second).new(0, 0))
    client.submit_task("unknown", queue="quick")
    stuck = client.submit(ends.never_end_in_c.new())
    # Before others crash: if it was beside one of them, it would have a process of its own, and no worker would die.
    wait_until(lambda: tasklib.is_final(get(client, stuck)), "its worker to be killed")
    seldom: dict[int, Callable[[], object]] = {
        2: lambda: client.submit(ends.die_always.new()),
        8: lambda: conn.execute(CUT),
    }
    for number in range(ROUNDS):
        began = time.monotonic()
        often = [ends.stumble, ends.fail_always, ends.fail_for_good, ends.hesitate, ends.decline, ends.never_end]
        client.submit_many([each.new() for each in often])
        client.submit_many([ends.sum_up.new(number, each) for each in range(BULK)])
        client.submit_many([ends.doze.new(ROUND_SECONDS), ends.die_once.new(str(flags / str(number // 4)))])
        seldom.get(number, lambda: None)()
        time.sleep(max(began + ROUND_SECONDS - time.monotonic(), 0))  # the load's own pace: a rate needs time


def _is_over(conn: Conn) -> bool:
    query = "select name from tasklib.tasks where completed_at is null"
    return {name for (name,) in conn.execute(query)} == NEVER_RUN


def _wait_until_told(server: Prometheus, conn: Conn) -> None:
    """What has ended was counted and scraped. The figures of the cluster come last: they are read seldom, of statistics
    that PostgreSQL's sessions hand in when they like.
    """
    query = "select (select count(*) from tasklib.tasks), (select count(*) from tasklib.task_attempts)"
    row = conn.execute(query).fetchone()
    assert row is not None
    told = (
        f"max(tasklib_tasks_submitted_total) >= {row[0]} and sum(tasklib_tasks_finished_total) >= {row[1]}"
        f" and sum(tasklib_queue_tasks) == {len(NEVER_RUN)}"
    )
    wait_until(lambda: bool(server.query(told)), "everything to be told", seconds=30)


def test_every_panel_shows_something(scene: Scene) -> None:
    """No expression that parses and finds nothing: in no panel, and in no variable."""
    asked = [*files.expressions(), *files.variables()]
    assert len(asked) > 100
    assert [each.where for each in asked if not scene.shown(each)] == []


@pytest.mark.parametrize("series", RECOUNTS, ids=lambda series: series.partition("tasklib_")[2].strip(")"))
def test_counters_are_what_the_database_holds(scene: Scene, series: str) -> None:
    """Of both daemons together, exactly: no attempt is missed or counted twice, though workers died on the way."""
    labels, query = RECOUNTS[series]
    recounted = scene.recounted(query)
    assert recounted
    assert scene.counted(series, *labels) == recounted


def test_what_happened_is_in_the_figures(scene: Scene) -> None:
    """Tasks ended in each way that was provoked, workers died of each cause, and connections broke."""
    outcomes = {outcome for (outcome,) in scene.counted("tasklib_tasks_finished_total", "outcome")}
    assert outcomes >= {"completed", "failed", "timed_out", "cancelled", "snoozed", "worker_failure"}
    causes = scene.counted("tasklib_worker_deaths_total", "cause")
    assert causes["crash",] >= 4  # three times once, and once by the one that is buried: then it has its own processes
    assert causes["hard_timeout",] == 1
    assert scene.counted("tasklib_tasks_lost_total", "cause")["worker_died",] >= 5
    assert scene.counted("tasklib_database_errors_total", "kind")["outage",] >= 1
    assert scene.prometheus.query("sum(tasklib_elected)") == [({}, 1.0)]


def test_the_alerts_that_ought_to_fire_do(scene: Scene) -> None:
    """Those of what has happened, and none that would get somebody up."""
    firing = {metric["alertname"]: metric["severity"] for metric, _ in scene.prometheus.query(FIRING)}
    assert {"TasklibTasksLost", "TasklibBuriedGrowing", "TasklibWorkersDying"} <= {*firing}
    assert "critical" not in firing.values(), firing
