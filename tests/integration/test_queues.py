"""The verbs of operators: the policies of queues and of the cluster, and the audit."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

import tasklib
from tasklib import UNCHANGED
from tasklib.queue_options import CLUSTER_CHECKS, QUEUE_CHECKS
from tasklib.sql import columns
from tests.support.raw_sql import literal
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.raw_sql import Conn, NewDatabase

pytestmark = pytest.mark.postgres_versions

RATE = {"rate_limit": 5, "rate_seconds": 1.0}
BREAKER = {"breaker_failures": 5}
# Of each option: the least and the most that it may be, and what is outside.
EDGES: dict[str, tuple[Any, Any, list[Any]]] = {
    "max_running": (0, 1_000_000, [-1, 1_000_001]),
    "max_per_worker": (1, 1_000_000, [0, 1_000_001]),
    "rate_limit": (1, 1_000_000_000, [0, 1_000_000_001]),
    "rate_seconds": (0.01, 31_536_000.0, [0.009, 31_536_001]),
    "rate_burst": (1, 1_000_000_000, [0, 1_000_000_001]),
    "breaker_failures": (1, 1_000_000, [0, 1_000_001]),
    "breaker_share": (0.0001, 1.0, [0, 1.01]),
    "breaker_window_seconds": (1.0, 86_400.0, [0.9, 86_401]),
    "breaker_open_seconds": (2.0, 86_400.0, [1.9, 86_401]),
    "breaker_probes": (1, 1_000, [0, 1_001]),
    "ageing_seconds": (1.0, 31_536_000.0, [0.9, 31_536_001]),
    "rank": (-1_000, 1_000, [-1_001, 1_001]),
    "weight": (0.001, 1_000.0, [0.0009, 1_000.1]),
    "default_priority": (1 - 2**31, 2**31 - 1, [2**31]),
    "default_max_retries": (0, 2**31 - 1, [-1, 2**31]),
    "default_timeout_seconds": (0.001, 3_153_600_000.0, [0, 3_153_600_001]),
    "retention_days": (0.001, 36_500.0, [0, 36_501]),
}


def company(option: str) -> dict[str, Any]:
    """What has to be set with it."""
    return RATE if option.startswith("rate_") else BREAKER if option.startswith("breaker_") else {}


def old_worker(conn: Conn) -> None:
    """A live worker of a version that knows no policies."""
    conn.execute(
        """insert into tasklib.workers (worker_id, name, hostname, pid, process_name, task_names, concurrency,
                                        lease_until, features)
           values ('old-one', 'w', 'host', 1, 'main', '{}', 1, now() + interval '1 hour', '{}')"""
    )


# --- the records ---


def test_records_have_the_columns_of_their_tables(conn: Conn) -> None:
    """In the order of the queries. A column that is added later is missing here first."""

    def of(table: str) -> set[str]:
        rows = conn.execute(
            "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0", [f"tasklib.{table}"]
        )
        return {row[0] for row in rows}

    policy = [name.rpartition(".")[2] for name in columns("queue_columns")]
    in_force = [name.rpartition(".")[2] for name in columns("queue_in_force")]
    assert [field.name for field in fields(tasklib.Queue)] == policy + in_force
    assert set(policy) == of("queues")
    assert set(QUEUE_CHECKS) < of("queues")
    cluster = {field.name for field in fields(tasklib.ClusterPolicy)}
    assert cluster - {"permits_in_use", "permit_holders"} == of("policy") - {"only_row"}
    assert {field.name for field in fields(tasklib.Transition)} == of("task_transitions")


def test_every_option_has_its_edges() -> None:
    """The tests below try all that are numbers."""
    assert set(EDGES) == set(QUEUE_CHECKS) - {"breaker_codes", "audit"}
    assert set(CLUSTER_CHECKS) == {"cluster_wide_cap", "refuses_unknown_queues"}


# --- set, get and list ---


def test_an_option_that_is_left_out_stays_and_none_removes_it(client: tasklib.Client) -> None:
    """UNCHANGED says the same as leaving it out."""
    made = client.set_queue("mail", max_running=10, default_priority=3)
    assert (made.name, made.max_running, made.default_priority, made.rank, made.weight) == ("mail", 10, 3, 0, 1)
    raised = client.set_queue("mail", max_running=20, default_priority=UNCHANGED)
    assert (raised.max_running, raised.default_priority) == (20, 3)
    removed = client.set_queue("mail", max_running=None)
    assert (removed.max_running, removed.default_priority) == (None, 3)
    assert client.get_queue("mail") == removed


def test_a_queue_without_a_policy_is_none(client: tasklib.Client) -> None:
    assert client.get_queue("mail") is None
    assert client.list_queues() == []


def test_setting_nothing_makes_a_row(client: tasklib.Client) -> None:
    """So that a queue is known, where unknown ones are refused."""
    assert client.set_queue("mail").created_at is not None
    assert [queue.name for queue in client.list_queues()] == ["mail"]


@pytest.mark.parametrize("option", EDGES)
def test_the_edges_of_an_option_are_those_of_the_table(client: tasklib.Client, conn: Conn, option: str) -> None:
    """What is outside is refused by name before the database is asked, and by the database if SQL is used."""
    least, most, outside = EDGES[option]
    for value in (least, most):
        assert getattr(client.set_queue("mail", **{**company(option), option: value}), option) == value
    before = client.get_queue("mail")
    for value in outside:
        with pytest.raises(tasklib.InvalidOptions, match=rf"^{option} must be .*got {value}"):
            client.set_queue("mail", **{option: value})
        with pytest.raises(psycopg.Error):
            conn.execute("select tasklib.set_queue('mail', %s)", [Jsonb({option: value})])
    assert client.get_queue("mail") == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_running": 1.5}, "max_running must be a whole number from 0 to 1000000, got 1.5"),
        ({"max_running": True}, "max_running must be"),
        ({"max_running": "10"}, "max_running must be"),
        ({"weight": float("nan")}, "weight must be a number from 0.001 to 1000, got nan"),
        ({"rate_seconds": float("inf"), "rate_limit": 1}, "rate_seconds must be"),
        ({"audit": 1}, "audit must be True or False"),
        ({"breaker_codes": "TIMEOUT", **BREAKER}, "breaker_codes must be a list"),
        ({"breaker_codes": [], **BREAKER}, "breaker_codes must have a code"),
        ({"breaker_codes": [1], **BREAKER}, "an error code is"),
        ({"rate_limit": 5}, "rate_limit needs rate_seconds"),
        ({"rate_seconds": 5}, "need rate_limit"),
        ({"rate_burst": 5}, "need rate_limit"),
        ({"breaker_probes": 5}, "a breaker needs breaker_failures or breaker_share"),
        ({"reason": 5}, "reason must be a string"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(client: tasklib.Client, options: dict[str, Any], said: str) -> None:
    with pytest.raises(tasklib.InvalidOptions, match=said):
        client.set_queue("mail", **options)
    assert client.get_queue("mail") is None


def test_unknown_options_are_refused(client: tasklib.Client, conn: Conn) -> None:
    """By Python, and by the function in SQL, which names those that there are."""
    with pytest.raises(TypeError, match="max_runing"):
        client.set_queue("mail", max_runing=5)  # type: ignore[call-arg]
    with pytest.raises(psycopg.Error, match="unknown key in set_queue: max_runing"):
        conn.execute("select tasklib.set_queue('mail', '{\"max_runing\": 5}')")
    with pytest.raises(psycopg.Error, match="unknown key in set_cluster"):
        conn.execute("select tasklib.set_cluster('{\"cap\": 5}')")


@pytest.mark.parametrize("name", ["Mail", "", "*", "q" * 49, None, 5])
def test_names_of_queues_are_checked(client: tasklib.Client, name: Any) -> None:
    for call in (client.set_queue, client.get_queue, client.pause_queue, client.resume_queue):
        with pytest.raises(tasklib.InvalidOptions, match="queue's name"):
            call(name)


def test_a_rate_and_a_breaker_go_as_a_whole(client: tasklib.Client) -> None:
    """Their parts get defaults, and go with them."""
    made = client.set_queue("mail", rate_limit=100, rate_seconds=60, rate_burst=10, breaker_share=0.5)
    assert (made.breaker_window_seconds, made.breaker_open_seconds, made.breaker_probes) == (60, 30, 1)
    assert made.breaker_state == "closed"
    coded = client.set_queue("mail", breaker_codes=["TIMEOUT", "OSError"])
    assert coded.breaker_codes == ["TIMEOUT", "OSError"]
    gone = client.set_queue("mail", rate_limit=None, breaker_share=None)
    assert (gone.rate_limit, gone.rate_seconds, gone.rate_burst) == (None, None, None)
    assert (gone.breaker_state, gone.breaker_probes, gone.breaker_codes) == (None, None, None)


def test_a_list_has_queues_with_a_policy_and_queues_with_ready_tasks(client: tasklib.Client) -> None:
    """What only waits for its time has no worker to tell yet."""
    client.set_queue("mail", max_running=1)
    for queue in ("bulk", "mail", "zebra"):
        client.submit_task("a", queue=queue)
    client.submit_task("a", queue="later", delay_seconds=3600)
    listed = client.list_queues()
    assert [queue.name for queue in listed] == ["bulk", "mail", "zebra"]
    assert [queue.created_at is None for queue in listed] == [True, False, True]
    assert (listed[0].rank, listed[0].weight, listed[0].audit, listed[0].is_paused) == (0, 1, False, False)
    assert listed[1] == client.get_queue("mail")


# --- what is in force ---


def test_permits_in_use_are_shown(client: tasklib.Client, conn: Conn) -> None:
    client.set_queue("mail", max_running=10)
    for worker, wants in (("a", 8), ("b", 8), ("c", 1)):
        conn.execute("select tasklib.permit('mail', %s, %s, 0)", [worker, wants])
    queue = client.get_queue("mail")
    assert queue is not None
    assert (queue.effective_cap, queue.permits_in_use, queue.permit_holders) == (10, 10, 2)


def test_a_breaker_is_shown_as_it_acts(client: tasklib.Client, conn: Conn) -> None:
    """Closed it leaves the cap as it is, open nothing, half open its probes."""

    def seen() -> tuple[str | None, int | None, bool]:
        queue = client.get_queue("mail")
        assert queue is not None
        return queue.breaker_state, queue.effective_cap, queue.breaker_open_until is not None

    assert client.set_queue("mail", breaker_failures=1, breaker_probes=2).effective_cap is None
    client.set_queue("mail", max_running=10)
    assert seen() == ("closed", 10, False)
    conn.execute("select tasklib.report_breaker('mail', 1, 0, 1)")
    assert seen() == ("open", 0, True)
    conn.execute("update tasklib.breakers set open_until = now()")
    assert seen() == ("half_open", 2, True)


def test_the_answer_of_a_change_is_what_is_in_force_after_it(client: tasklib.Client) -> None:
    """And not what was there when the statement began."""
    assert client.set_queue("mail", max_running=5).effective_cap == 5
    assert client.set_queue("mail", max_running=7).effective_cap == 7
    assert client.pause_queue("mail").is_paused
    assert client.set_cluster(cluster_wide_cap=3).cluster_wide_cap == 3


# --- pause and resume ---


def test_pause_and_resume(client: tasklib.Client) -> None:
    paused = client.pause_queue("mail", "the provider is down")
    assert (paused.is_paused, paused.pause_reason, paused.paused_by) == (True, "the provider is down", "postgres")
    assert paused.paused_until is None
    assert client.resume_queue("mail") is True
    assert client.resume_queue("mail") is False
    assert client.resume_queue("never-seen") is False
    resumed = client.get_queue("mail")
    assert resumed is not None
    assert (resumed.is_paused, resumed.paused_at, resumed.pause_reason) == (False, None, None)


def test_a_pause_ends_by_itself(client: tasklib.Client, conn: Conn) -> None:
    """At a moment, or after a time by the database's clock. A second pause begins then, and not with the first."""
    end = datetime.now(UTC) + timedelta(hours=2)
    assert client.pause_queue("mail", until=end).paused_until == end
    first = client.pause_queue("mail", until=timedelta(minutes=30))
    assert first.paused_at is not None
    assert first.paused_until is not None
    assert timedelta(minutes=29) < first.paused_until - datetime.now(UTC) < timedelta(minutes=31)
    conn.execute("update tasklib.queues set paused_at = now() - interval '1 h', paused_until = now()")
    over = client.get_queue("mail")
    assert over is not None
    assert not over.is_paused
    again = client.pause_queue("mail")
    assert again.paused_at is not None
    assert again.paused_at >= first.paused_at
    assert client.pause_queue("mail", "and why").paused_at == again.paused_at


@pytest.mark.parametrize(
    "until", [datetime(2020, 1, 1), datetime(2020, 1, 1, tzinfo=UTC), timedelta(0), timedelta(-1), 30, "30m"]
)
def test_a_pause_ends_in_the_future(client: tasklib.Client, until: Any) -> None:
    with pytest.raises(tasklib.InvalidOptions):
        client.pause_queue("mail", until=until)
    assert client.get_queue("mail") is None


@pytest.mark.parametrize("until", ["infinity", "12000-01-01"])
def test_a_pause_whose_end_python_cannot_read_hides_no_queue(client: tasklib.Client, conn: Conn, until: str) -> None:
    conn.execute("select tasklib.pause_queue('mail', 'why', %s::text::timestamptz)", [until])
    (queue,) = client.list_queues()
    assert (queue.is_paused, queue.paused_until) == (True, None)


# --- the cluster ---


def test_the_cluster(client: tasklib.Client, conn: Conn) -> None:
    before = client.get_cluster()
    assert (before.cluster_wide_cap, before.refuses_unknown_queues, before.features) == (None, False, [])
    made = client.set_cluster(cluster_wide_cap=200, reason="the database is small")
    assert (made.cluster_wide_cap, made.refuses_unknown_queues, made.features) == (200, False, ["policies"])
    assert made.version > before.version
    refusing = client.set_cluster(refuses_unknown_queues=True)
    assert (refusing.cluster_wide_cap, refusing.refuses_unknown_queues) == (200, True)
    conn.execute("select tasklib.permit('*', 'a', 7, 0)")
    cluster = client.get_cluster()
    assert (cluster.permits_in_use, cluster.permit_holders) == (7, 1)
    assert client.set_cluster(cluster_wide_cap=None).cluster_wide_cap is None
    for wrong in (-1, 1_000_001, "many"):
        with pytest.raises(tasklib.InvalidOptions, match="cluster_wide_cap must be"):
            client.set_cluster(cluster_wide_cap=wrong)  # type: ignore[arg-type]


def test_a_live_worker_that_knows_no_policies_is_named(client: tasklib.Client, conn: Conn) -> None:
    """What it would not obey is refused; what it obeys without knowing is not."""
    old_worker(conn)
    said = "worker old-one is of a version that does not know policies. Upgrade all workers first"
    for change in (
        lambda: client.set_queue("mail", max_running=1),
        lambda: client.pause_queue("mail"),
        lambda: client.set_cluster(cluster_wide_cap=1),
    ):
        with pytest.raises(tasklib.WorkerTooOld, match=said):
            change()
    assert client.get_queue("mail") is None
    assert client.set_queue("mail", default_priority=5).default_priority == 5
    conn.execute("update tasklib.workers set died_at = now()")
    assert client.pause_queue("mail").is_paused


# --- the audit ---


def test_what_operators_do_is_in_the_audit(client: tasklib.Client, conn: Conn) -> None:
    """Newest first, with what changed. A call that changes nothing is not there."""
    client.set_queue("mail", max_running=1, reason="new contract")
    client.set_queue("mail", max_running=1)
    client.pause_queue("mail", "down")
    client.set_queue("bulk", weight=2)
    client.set_cluster(cluster_wide_cap=9)
    client.set_cluster(cluster_wide_cap=9)
    task_id = uuid4()
    conn.execute(
        literal("select tasklib.note_transition('cancel', %s, 'mail', null, null, 'twice', 'alice')"), [task_id]
    )
    audit = client.list_transitions()
    assert [each.verb for each in audit] == ["cancel", "set_cluster", "set_queue", "pause_queue", "set_queue"]
    assert (audit[1].before, audit[1].after) == ({"cluster_wide_cap": None}, {"cluster_wide_cap": 9})
    first = audit[-1]
    assert (first.queue, first.actor, first.reason) == ("mail", "postgres", "new contract")
    assert (first.before, first.after) == ({"max_running": None}, {"max_running": 1})
    assert [each.verb for each in client.list_transitions(queue="mail")] == ["cancel", "pause_queue", "set_queue"]
    (cancel,) = client.list_transitions(task_id)
    assert (cancel.task_id, cancel.actor, cancel.reason) == (task_id, "alice", "twice")
    assert client.list_transitions(task_id, queue="bulk") == []
    assert client.list_transitions(str(uuid4())) == []
    assert client.list_transitions(limit=1) == audit[:1]
    for wrong in ({"limit": 0}, {"limit": 10_001}, {"queue": "No Queue"}, {"task_id": "5"}):
        with pytest.raises(tasklib.InvalidOptions):
            client.list_transitions(**wrong)


# --- all forms ---


@pytest.mark.usefixtures("app")
async def test_every_verb_has_its_async_and_module_forms(async_client: tasklib.AsyncClient) -> None:
    """They answer the same."""
    assert (await async_client.set_queue("mail", max_running=3)).max_running == 3
    assert tasklib.set_queue("mail", rank=1) == await tasklib.get_queue_async("mail")
    assert (await tasklib.set_queue_async("mail", weight=2)).rank == 1
    assert tasklib.get_queue("mail") == await async_client.get_queue("mail")
    assert tasklib.list_queues() == await async_client.list_queues() == await tasklib.list_queues_async()
    assert (await async_client.pause_queue("mail")).is_paused
    assert await tasklib.resume_queue_async("mail")
    assert (await tasklib.pause_queue_async("mail", "why")).is_paused
    assert tasklib.resume_queue("mail")
    assert tasklib.pause_queue("mail").is_paused
    assert await async_client.resume_queue("mail")
    assert (await async_client.set_cluster(cluster_wide_cap=5)).cluster_wide_cap == 5
    assert tasklib.set_cluster(cluster_wide_cap=6) == await tasklib.get_cluster_async()
    assert (await tasklib.set_cluster_async(cluster_wide_cap=7)) == await async_client.get_cluster()
    assert tasklib.get_cluster().cluster_wide_cap == 7
    audit = tasklib.list_transitions(queue="mail")
    assert audit == await async_client.list_transitions(None, "mail")
    assert audit == await tasklib.list_transitions_async(queue="mail")
    with pytest.raises(tasklib.InvalidOptions):
        await async_client.set_queue("mail", max_running=-1)


# --- several operators ---


def is_waiting(conn: Conn) -> bool:
    sql = "select 1 from pg_stat_activity where application_name like 'tasklib%' and wait_event_type = 'Lock'"
    return conn.execute(sql).fetchone() is not None


@pytest.mark.parametrize("exists", [True, False])
def test_two_operators_lose_nothing_of_each_other(
    client: tasklib.Client, conn: Conn, database_url: str, exists: bool
) -> None:
    """The second waits for the first, and changes what the first has left; also if both would make the row."""
    if exists:
        client.set_queue("mail")
    with psycopg.connect(database_url) as other, ThreadPoolExecutor(1) as threads:
        other.execute("select tasklib.set_queue('mail', '{\"max_running\": 4, \"rank\": 1}')")
        second = threads.submit(client.set_queue, "mail", rank=2)
        wait_until(lambda: is_waiting(conn), "the second operator to wait")
        other.commit()
        queue = second.result(20)
    assert (queue.max_running, queue.rank) == (4, 2)
    assert [each.after for each in client.list_transitions()] == [{"rank": 2}, {"max_running": 4, "rank": 1}]


def test_an_open_transaction_of_an_operator_holds_up_no_reader(
    client: tasklib.Client, conn: Conn, database_url: str
) -> None:
    """Nor a worker that asks for permits or starts, nor a submit. They see what is committed."""
    client.set_queue("mail", max_running=4, rate_limit=5, rate_seconds=60)
    version = client.get_cluster().version
    with psycopg.connect(database_url) as other:
        other.execute("select tasklib.set_queue('mail', '{\"max_running\": 1}'), tasklib.pause_queue('mail')")
        other.execute("select tasklib.set_cluster('{\"cluster_wide_cap\": 1}')")
        queue = client.get_queue("mail")
        assert queue is not None
        assert (queue.max_running, queue.is_paused) == (4, False)
        assert client.list_queues() == [queue]
        assert client.get_cluster().version == version
        assert len(client.list_transitions()) == 1
        conn.execute("set lock_timeout = '1s'")
        assert conn.execute("select permits from tasklib.permit('mail', 'a', 9, 0)").fetchone() == (4,)
        assert conn.execute("select granted from tasklib.grant_starts('mail', 2)").fetchone() == (2,)
        client.submit_task("a", queue="mail")
        other.rollback()


def test_an_operator_who_waits_too_long_gets_an_end(database_url: str) -> None:
    """Within the client's time for a call."""
    with (
        psycopg.connect(database_url) as other,
        tasklib.Client(tasklib.Config(database_url, database_timeout_seconds=1)) as client,
    ):
        client.list_queues()
        other.execute("select tasklib.pause_queue('mail')")
        with pytest.raises(tasklib.DatabaseUnavailable):
            client.pause_queue("mail")
        other.rollback()


def test_many_operators_at_once(client: tasklib.Client) -> None:
    """Different queues, one row that all of them raise: no deadlock, and every change counts."""
    start = threading.Barrier(8)
    before = client.get_cluster().version

    def change(number: int) -> None:
        start.wait(20)
        for value in range(5):
            client.set_queue(f"q{number % 4}", max_running=10 * number + value)

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(change, number) for number in range(8)]:
            done.result(60)
    assert len(client.list_queues()) == 4
    assert client.get_cluster().version >= before + 40


# --- roles ---


@pytest.fixture
def operator(conn: Conn, database_url: str) -> Iterator[Callable[[str], tasklib.Client]]:
    """A client of a role that has these grants."""
    clients = []
    conn.execute("create role shop_operator login; grant usage on schema tasklib to shop_operator")

    def granted(grants: str) -> tasklib.Client:
        conn.execute(literal(grants))
        url = make_conninfo(database_url, options="-c role=shop_operator")
        clients.append(tasklib.Client(tasklib.Config(url)))
        return clients[-1]

    yield granted
    for each in clients:
        each.close()
    conn.execute("drop owned by shop_operator; drop role shop_operator")


@pytest.mark.direct("sets its role in the connection string")
def test_what_an_operator_has_to_be_granted(operator: Callable[[str], tasklib.Client], conn: Conn) -> None:
    """As docs/installing.md says. The audit names the role, which can write to no table itself."""
    client = operator(
        """grant select on all tables in schema tasklib to shop_operator;
           grant execute on function tasklib.set_queue, tasklib.pause_queue, tasklib.resume_queue, tasklib.set_cluster
              to shop_operator"""
    )
    client.set_queue("mail", max_running=5)
    assert client.pause_queue("mail").paused_by == "shop_operator"
    assert client.resume_queue("mail")
    client.set_cluster(cluster_wide_cap=5)
    assert client.get_queue("mail") == client.list_queues()[0]
    assert client.get_cluster().cluster_wide_cap == 5
    assert {each.actor for each in client.list_transitions()} == {"shop_operator"}
    with conn.transaction():
        conn.execute("set local role shop_operator")
        for change in (
            "update tasklib.queues set max_running = 1",
            "update tasklib.policy set cluster_wide_cap = null",
            "delete from tasklib.task_transitions",
            "select tasklib.note_transition('set_queue', null, 'mail', null, null, null, 'bob')",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege), conn.transaction():
                conn.execute(literal(change))


@pytest.mark.direct("sets its role in the connection string")
def test_a_role_without_grants_is_no_operator(operator: Callable[[str], tasklib.Client]) -> None:
    """Whoever may read may not change."""
    client = operator("grant select on all tables in schema tasklib to shop_operator")
    assert client.list_queues() == []
    for change in (
        lambda: client.set_queue("mail", rank=1),
        lambda: client.pause_queue("mail"),
        lambda: client.resume_queue("mail"),
        lambda: client.set_cluster(cluster_wide_cap=1),
    ):
        with pytest.raises(tasklib.DatabaseError, match="may not do this"):
            change()


@pytest.mark.direct("sets its role in the connection string")
def test_who_may_not_read_arguments_may_list_queues(operator: Callable[[str], tasklib.Client]) -> None:
    """Two columns of the tasks are enough."""
    client = operator(
        """grant select on tasklib.queues, tasklib.queue_limits, tasklib.permits to shop_operator;
           grant select (queue, ready) on tasklib.tasks to shop_operator"""
    )
    assert client.list_queues() == []
    assert client.get_queue("mail") is None


# --- another schema ---


def test_another_schema(new_database: NewDatabase) -> None:
    """Every verb, beside a schema of the usual name that has policies of its own."""
    url = new_database()
    with tasklib.Client(tasklib.Config(url, schema="jobs")) as jobs, tasklib.Client(tasklib.Config(url)) as usual:
        usual.set_queue("mail", max_running=1)
        assert jobs.get_queue("mail") is None
        assert jobs.set_queue("mail", max_running=2, rate_limit=1, rate_seconds=1).max_running == 2
        jobs.submit_task("a", queue="bulk")
        assert jobs.pause_queue("mail").is_paused
        assert [queue.name for queue in jobs.list_queues()] == ["bulk", "mail"]
        assert jobs.resume_queue("mail")
        assert jobs.set_cluster(cluster_wide_cap=4) == jobs.get_cluster()
        assert len(jobs.list_transitions()) == 4
        assert usual.get_cluster().cluster_wide_cap is None
        assert len(usual.list_transitions()) == 1
