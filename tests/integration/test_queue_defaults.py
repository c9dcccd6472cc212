"""What a queue's row says about submits: defaults for options that nobody gave, and whether a queue must have a row."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import tasklib
from tasklib.sql import folder
from tests.support.raw_sql import literal
from tests.support.working import get, running
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.raw_sql import Conn

pytestmark = pytest.mark.postgres_versions

OPTIONS = ("priority", "max_retries", "timeout_seconds")
OF_THE_QUEUE = (7, 1, 9.0)


def set_queue(conn: Conn, policy: str, queue: str = "mail") -> None:
    conn.execute("select tasklib.set_queue(%s, %s::jsonb)", [queue, policy])


def give_defaults(conn: Conn) -> None:
    set_queue(conn, '{"default_priority": 7, "default_max_retries": 1, "default_timeout_seconds": 9}')


def options_of(conn: Conn) -> list[tuple[Any, ...]]:
    return conn.execute("select distinct priority, max_retries, timeout_seconds from tasklib.tasks").fetchall()


def send(client: tasklib.Client, conn: Conn, way: str, task: Any, options: dict[str, Any]) -> None:
    """One task, by each way in."""
    match way:
        case "submit":
            client.submit(task.options(**options).new())
        case "submit_many":
            client.submit_many([task.options(**options).new(), task.options(**options, idempotency_key="k").new()])
        case "by name":
            client.submit_task("nobodys", queue="mail", **options)
        case "sql":
            given = "".join(f", {name} => {value}" for name, value in options.items())
            conn.execute(literal(f"select tasklib.submit('nobodys', queue => 'mail'{given})"))
        case _:
            columns = "".join(f", {name}" for name in options)
            values = "".join(f", {value}" for value in options.values())
            conn.execute(literal(f"insert into tasklib.tasks (name, queue{columns}) values ('a', 'mail'{values})"))


WAYS = ["submit", "submit_many", "by name", "sql", "insert"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({}, OF_THE_QUEUE),
        ({"priority": 0}, (0, 1, 9.0)),
        ({"max_retries": 3}, (7, 3, 9.0)),
        ({"timeout_seconds": 2}, (7, 1, 2.0)),
    ],
)
def test_the_queue_says_what_nobody_gave(
    client: tasklib.Client, conn: Conn, way: str, given: dict[str, Any], stored: tuple[Any, ...]
) -> None:
    """A value that equals the library's default counts as given."""
    give_defaults(conn)
    send(client, conn, way, tasklib.task(name="work", queue="mail")(lambda: None), given)
    assert options_of(conn) == [stored]


@pytest.mark.parametrize("way", ["submit", "submit_many"])
def test_the_function_comes_before_the_queue(client: tasklib.Client, conn: Conn, way: str) -> None:
    give_defaults(conn)
    own = tasklib.task(name="own", queue="mail", priority=0, max_retries=3)(lambda: None)
    send(client, conn, way, own, {})
    assert options_of(conn) == [(0, 3, 9.0)]


@pytest.mark.parametrize("way", ["submit", "submit_many", "by name"])
def test_the_queue_comes_before_the_configuration(database_url: str, conn: Conn, way: str) -> None:
    """Which counts for what the queue leaves open."""
    set_queue(conn, '{"default_max_retries": 1}')
    config = tasklib.Config(database_url, max_retries=5, default_task_timeout_seconds=60)
    work = tasklib.task(name="work", queue="mail")(lambda: None)
    with tasklib.Client(config) as client:
        send(client, conn, way, work, {})
        assert options_of(conn) == [(0, 1, 60.0)]
        conn.execute("delete from tasklib.tasks")
        set_queue(conn, '{"default_max_retries": null}')
        send(client, conn, way, work, {})
        assert options_of(conn) == [(0, 5, 60.0)]


def declare(conn: Conn, own: str | None) -> None:
    conn.execute(
        """insert into tasklib.task_functions (name, queue, priority, max_retries, timeout_seconds, store_result,
               on_crash, own, deadline_seconds)
           values ('known', 'mail', 3, 4, 5, true, 'retry', %s, 60)""",
        [own],
    )


@pytest.mark.parametrize("way", ["by name", "sql", "insert"])
@pytest.mark.parametrize(("own", "stored"), [("{}", OF_THE_QUEUE), ("{priority}", (3, 1, 9.0)), (None, (3, 4, 5.0))])
def test_what_a_worker_declared_of_its_own_configuration_comes_after_the_queue(
    client: tasklib.Client, conn: Conn, way: str, own: str | None, stored: tuple[Any, ...]
) -> None:
    """The function's own options come before it. A worker of an earlier version does not tell them apart."""
    give_defaults(conn)
    declare(conn, own)
    match way:
        case "by name":
            client.submit_task("known")
        case "sql":
            conn.execute("select tasklib.submit('known')")
        case _:
            conn.execute("insert into tasklib.tasks (name) values ('known')")
    assert options_of(conn) == [stored]
    left = conn.execute("select deadline_at - created_at = interval '60 s' from tasklib.tasks").fetchall()
    assert left == [(True,)]


def test_a_worker_declares_what_its_functions_give_themselves(
    client: tasklib.Client, conn: Conn, config: tasklib.Config
) -> None:
    tasklib.task(name="plain")(lambda: None)
    tasklib.task(name="own", priority=0, timeout_seconds=5, deadline_seconds=60)(lambda: None)
    declared = """select name, own, deadline_seconds, priority from tasklib.task_functions
                   where name in ('plain', 'own') order by name"""
    with running(config):
        wait_until(lambda: len(conn.execute(declared).fetchall()) == 2, "the functions to be declared")
    assert conn.execute(declared).fetchall() == [
        ("own", ["priority", "timeout_seconds"], 60.0, 0), ("plain", [], None, 0),
    ]  # fmt: skip


def test_a_default_holds_from_its_commit_on(client: tasklib.Client, conn: Conn, database_url: str) -> None:
    """A session that has submitted before looks again. While the change is open, submits wait for nothing."""
    work = tasklib.task(name="work", queue="mail")(lambda: None)
    client.submit(work.new())
    with psycopg.connect(database_url) as operator:
        operator.execute("select tasklib.set_queue('mail', '{\"default_priority\": 7}')")
        before = client.submit(work.new())
    after, many = client.submit(work.new()), client.submit_many([work.new()])
    found = [get(client, each).priority for each in (before, after, *many)]
    assert found == [0, 7, 7]


# --- unknown queues ---


def refuse_unknown(conn: Conn) -> None:
    conn.execute("select tasklib.set_cluster('{\"refuses_unknown_queues\": true}')")


@pytest.mark.parametrize("way", WAYS)
def test_a_queue_without_a_row_is_refused_if_the_policy_says_so(client: tasklib.Client, conn: Conn, way: str) -> None:
    """Nothing is stored. The error names queues that are called much like it, and the remedy."""
    for queue in ("mails", "email", "reports"):
        conn.execute("select tasklib.ensure_task_queue(%s)", [queue])
    work = tasklib.task(name="work", queue="mail")(lambda: None)
    send(client, conn, way, work, {})
    conn.execute("delete from tasklib.tasks")
    refuse_unknown(conn)
    with pytest.raises((tasklib.UnknownQueue, psycopg.Error)) as refusal:
        send(client, conn, way, work, {})
    assert isinstance(refusal.value, tasklib.UnknownQueue) or getattr(refusal.value, "sqlstate", "") == "TL404"
    said = str(refusal.value)
    assert "there is no queue 'mail'" in said
    assert "Did you mean 'email', 'mails'?" in said
    assert "reports" not in said
    assert "select tasklib.ensure_task_queue('mail')" in said
    assert conn.execute("select count(*) from tasklib.tasks").fetchall() == [(0,)]
    conn.execute("select tasklib.ensure_task_queue('mail')")
    send(client, conn, way, work, {})


async def test_an_application_gets_the_same_error(async_client: tasklib.AsyncClient, conn: Conn) -> None:
    refuse_unknown(conn)
    with pytest.raises(tasklib.UnknownQueue, match="there is no queue 'default'"):
        await async_client.submit_task("a")


def test_a_queue_is_made_once(conn: Conn) -> None:
    """With defaults; its row comes back either way. Only the first call is an act."""
    first = conn.execute("select * from tasklib.ensure_task_queue('mail')").fetchall()
    assert conn.execute("select * from tasklib.ensure_task_queue('mail')").fetchall() == first
    set_queue(conn, '{"max_running": 3}')
    assert conn.execute("select max_running from tasklib.ensure_task_queue('mail')").fetchall() == [(3,)]
    verbs = conn.execute("select verb from tasklib.task_transitions order by id").fetchall()
    assert verbs == [("ensure_task_queue",), ("set_queue",)]


@pytest.mark.parametrize("is_kept", [True, False])
def test_two_that_make_a_queue_at_once_make_one(
    conn: Conn, database_url: str, direct: Callable[[str], str], is_kept: bool
) -> None:
    """The second waits for the first, and makes the row if the first is rolled back."""
    answers: list[Any] = []
    with (
        psycopg.connect(direct(database_url)) as first,
        psycopg.connect(direct(database_url), autocommit=True) as second,
    ):
        first.execute("select tasklib.ensure_task_queue('mail')")
        ask = "select name, created_at from tasklib.ensure_task_queue('mail')"
        thread = threading.Thread(target=lambda: answers.append(second.execute(ask).fetchone()))
        thread.start()
        waits = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
        wait_until(lambda: conn.execute(waits, [second.info.backend_pid]).fetchone() == (True,), "the second to wait")
        (first.commit if is_kept else first.rollback)()
        thread.join(20)
    assert answers == conn.execute("select name, created_at from tasklib.queues").fetchall()
    assert conn.execute("select count(*) from tasklib.task_transitions").fetchall() == [(1,)]


# --- the signature of submit ---


@pytest.mark.direct("roles are the server's")
def test_who_could_submit_can_submit_after_the_migration(conn: Conn) -> None:
    """The function with more parameters takes the place of the earlier one, with its privileges."""
    (submit,) = [sql for name, sql in folder("functions") if name == "submit"]
    earlier = (
        "tasklib.submit(text, jsonb, jsonb, text, integer, double precision, timestamptz, timestamptz, integer, "
        "double precision, jsonb, text, boolean, text, uuid)"
    )
    conn.execute("begin")
    conn.execute("create role old_submitter; create role other_role")
    conn.execute("drop function tasklib.submit")
    conn.execute(literal(f"create function {earlier} returns uuid language sql as 'select null::uuid'"))
    conn.execute(literal(f"revoke all on function {earlier} from public"))
    conn.execute(literal(f"grant execute on function {earlier} to old_submitter with grant option"))
    conn.execute(literal(submit))
    found = conn.execute(
        """select count(*), bool_and(has_function_privilege('old_submitter', oid, 'execute with grant option')),
                  bool_or(has_function_privilege('other_role', oid, 'execute'))
             from pg_proc where proname = 'submit' and pronamespace = 'tasklib'::regnamespace"""
    ).fetchall()
    conn.execute("rollback")
    assert found == [(1, True, False)]


def test_clients_of_the_version_before_submit_as_they_did(conn: Conn) -> None:
    """They give every option, and their bulks leave out what has the library's default."""
    give_defaults(conn)
    conn.execute(
        """select tasklib.submit(id => gen_random_uuid(), name => 'a', kwargs => '{}', queue => 'mail', priority => 0,
                                 max_retries => 3, timeout_seconds => 'infinity', store_result => true)"""
    )
    assert options_of(conn) == [(0, 3, None)]
    conn.execute(
        """select tasklib.submit_many('[{"name": "a", "queue": "mail", "max_retries": 5, "resolved": true}]')"""
    )
    assert set(options_of(conn)) == {(0, 3, None), (7, 5, 9.0)}
