"""A task that is submitted by its name alone gets the options of its function, from wherever it is submitted."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import tasklib
from tasklib import TaskWorker
from tasklib.duties.janitor import FUNCTIONS_SECONDS
from tasklib.duties.statements import KeeperStatements
from tasklib.registry import default_registry
from tasklib.runtime.observer import WorkerObserver
from tasklib.runtime.session import Session
from tasklib.worker.basis import Basis, Options
from tasklib.worker.declaration import Declaration
from tasklib.worker.served import Served
from tests.support.raw_sql import literal
from tests.support.working import ManualWorker, get, grown_up_reaper, running
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from uuid import UUID

    from tests.support.raw_sql import Conn

pytestmark = pytest.mark.postgres_versions

DECLARED: dict[str, Any] = {
    "queue": "mail", "priority": 7, "max_retries": 9, "timeout_seconds": 30.0, "store_result": False,
    "on_crash": "fail",
}  # fmt: skip
LIBRARY: dict[str, Any] = {
    "queue": "default", "priority": 0, "max_retries": 3, "timeout_seconds": None, "store_result": True,
    "on_crash": None,
}  # fmt: skip
IN_SQL = {
    "submit": "select id from tasklib.submit('send')",
    "submit with nulls": """select id from tasklib.submit('send', queue => null, priority => null, max_retries => null,
        timeout_seconds => null, store_result => null, on_crash => null)""",
    "submit_many": """select id from tasklib.submit_many('[{"name": "send"}]')""",
    "submit_many with nulls": """select id from tasklib.submit_many('[{"name": "send", "queue": null, "priority": null,
        "max_retries": null, "timeout_seconds": null, "store_result": null, "on_crash": null}]')""",
    "insert": "insert into tasklib.tasks (name) values ('send') returning id",
}


@pytest.fixture
def declared(config: tasklib.Config) -> None:
    """A worker has been there, and this process does not know the function."""
    tasklib.task(name="send", **DECLARED)(lambda: None)
    declare(config)
    forget("send")


def declare(config: tasklib.Config) -> None:
    TaskWorker(config).run_until_empty_sync()


def forget(name: str) -> None:
    del default_registry._functions[name]
    default_registry.revision += 1


def options(conn: Conn, task_id: Any) -> dict[str, Any]:
    cursor = conn.execute(literal(f"select {', '.join(DECLARED)} from tasklib.tasks where id = %s"), [task_id])
    (row,) = cursor.fetchall()
    return dict(zip(DECLARED, row, strict=True))


def in_sql(conn: Conn, sql: str) -> UUID:
    row = conn.execute(literal(sql)).fetchone()
    assert row is not None
    task_id: UUID = row[0]
    return task_id


@pytest.mark.usefixtures("declared")
@pytest.mark.parametrize("sql", IN_SQL.values(), ids=IN_SQL)
def test_sql_gets_the_options_of_the_function(conn: Conn, sql: str) -> None:
    """What a statement leaves out is as the decorator says, whichever way it is sent; null counts as left out."""
    assert options(conn, in_sql(conn, sql)) == DECLARED


@pytest.mark.usefixtures("declared")
async def test_python_gets_the_options_of_a_function_that_it_has_not_imported(
    client: tasklib.Client, async_client: tasklib.AsyncClient, conn: Conn
) -> None:
    """Sync, async, in a transaction of the caller's; with an option of its own beside them."""
    ids = [
        client.submit_task("send"),
        await async_client.submit_task("send"),
        client.submit_task("send", connection=conn),
    ]
    assert [options(conn, task_id) for task_id in ids] == [DECLARED] * 3
    given = client.submit_task("send", priority=1, delay_seconds=60, idempotency_key="k")
    assert options(conn, given) == {**DECLARED, "priority": 1}
    assert client.submit_task("send", priority=1, idempotency_key="k").existed


@pytest.mark.usefixtures("declared")
def test_what_is_given_comes_first(conn: Conn, client: tasklib.Client) -> None:
    """Also when it is what the library would have taken; no limit is written as infinity."""
    given = (
        """queue => 'default', priority => 0, max_retries => 3, timeout_seconds => 'infinity', store_result => true"""
    )
    expected = {**LIBRARY, "on_crash": "retry"}
    assert (
        options(conn, in_sql(conn, f"select id from tasklib.submit('send', {given}, on_crash => 'retry')")) == expected
    )
    one = """{"name": "send", "queue": "default", "priority": 0, "max_retries": 3, "timeout_seconds": "infinity",
              "store_result": true, "on_crash": "retry"}"""
    assert options(conn, in_sql(conn, f"select id from tasklib.submit_many('[{one}]')")) == expected
    raw = """insert into tasklib.tasks (name, queue, priority, max_retries, timeout_seconds, store_result, on_crash)
             values ('send', 'default', 0, 3, 'infinity', true, 'retry') returning id"""
    assert options(conn, in_sql(conn, raw)) == expected
    said = {key: value for key, value in expected.items() if value is not None}
    assert options(conn, client.submit_task("send", **said)) == {**expected, "timeout_seconds": 30.0}


@pytest.mark.parametrize("sql", IN_SQL.values(), ids=IN_SQL)
def test_a_name_that_no_worker_has_served_has_the_defaults_of_the_library(conn: Conn, sql: str) -> None:
    """From SQL."""
    assert options(conn, in_sql(conn, sql)) == LIBRARY


def test_a_name_that_no_worker_has_served_has_the_defaults_of_the_config(config: tasklib.Config, conn: Conn) -> None:
    """From Python: until a worker has said more."""
    own = tasklib.Config(config.database_url, max_retries=5, default_task_timeout_seconds=60)
    with tasklib.Client(own) as client:
        assert options(conn, client.submit_task("send")) == {**LIBRARY, "max_retries": 5, "timeout_seconds": 60.0}
        tasklib.task(name="send", **DECLARED)(lambda: None)
        declare(config)
        forget("send")
        assert options(conn, client.submit_task("send")) == DECLARED


def test_a_worker_says_what_its_config_adds(config: tasklib.Config, conn: Conn) -> None:
    """A submit in SQL has no Config: the worker's is the one there is."""
    tasklib.task(name="send")(lambda: None)
    declare(tasklib.Config(config.database_url, max_retries=5, default_task_timeout_seconds=60))
    found = options(conn, in_sql(conn, IN_SQL["submit"]))
    assert found == {**LIBRARY, "max_retries": 5, "timeout_seconds": 60.0}


@pytest.mark.usefixtures("declared")
def test_a_client_that_has_the_function_is_not_overruled(client: tasklib.Client, conn: Conn) -> None:
    """An older worker may have said something else: alone, with options, with a key, in bulk, when a row was there."""
    send = tasklib.task(name="send")(lambda: None)
    plain = send.new()
    ids = [client.submit(plain), client.submit(send.options(tags={"a": 1}).new()), client.submit_task("send")]
    ids += client.submit_many([send.new(), send.options(idempotency_key="k").new(), plain])
    assert [options(conn, task_id) for task_id in ids] == [LIBRARY] * len(ids)
    other = tasklib.task(name="other", on_crash="fail", timeout_seconds=5)(lambda: None)
    found = options(conn, client.submit(other.new()))
    assert found == {**LIBRARY, "on_crash": "fail", "timeout_seconds": 5.0}


@pytest.mark.usefixtures("declared")
def test_who_may_only_submit_gets_the_options_too(conn: Conn) -> None:
    """No right on the table of functions is needed: neither for the functions of SQL, nor for a raw INSERT."""
    conn.execute("create role only_submits")
    try:
        conn.execute("grant usage on schema tasklib to only_submits")
        conn.execute("grant execute on function tasklib.submit, tasklib.submit_many to only_submits")
        conn.execute("grant insert, select on tasklib.tasks to only_submits")
        conn.execute("set role only_submits")
        assert [options(conn, in_sql(conn, sql)) for sql in IN_SQL.values()] == [DECLARED] * len(IN_SQL)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("select from tasklib.task_functions")
    finally:
        conn.execute("reset role; drop owned by only_submits; drop role only_submits")


# --- what must not run twice ---


@pytest.mark.parametrize("route", ["insert", "submit", "name", "older function"])
def test_what_must_not_run_twice_does_not_however_it_was_submitted(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, route: str
) -> None:
    """No worker had been there: the row says nothing. The worker that runs it writes it down before the first line, so
    that whoever recovers it knows.
    """
    quick = tasklib.Config(config.database_url, lease_seconds=0.6)
    submits: dict[str, Callable[[], UUID]] = {
        "insert": lambda: in_sql(conn, "insert into tasklib.tasks (name) values ('once') returning id"),
        "submit": lambda: in_sql(conn, "select id from tasklib.submit('once')"),
        "name": lambda: client.submit_task("once"),
        "older function": lambda: client.submit(tasklib.task(name="once")(lambda: None).new()),
    }
    task_id = submits[route]()
    assert get(client, task_id).on_crash is None
    default_registry._functions.pop("once", None)
    ran: list[int] = []
    began, release = threading.Event(), threading.Event()

    @tasklib.task(name="once", on_crash="fail")
    def once() -> None:
        ran.append(1)
        began.set()
        release.wait(30)

    observer = ManualWorker(quick, "observer", lives=False)
    reaper = grown_up_reaper(quick, observer.session)
    try:
        with running(config):
            assert began.wait(20)
            assert (get(client, task_id).state, get(client, task_id).on_crash) == ("running", "fail")
            conn.execute("update tasklib.workers set died_at = clock_timestamp()")
            wait_until(lambda: [reaper.run_once(), get(client, task_id).state][1] == "failed", "it to be recovered")
            release.set()
    finally:
        release.set()
        observer.close()
    task = get(client, task_id)
    assert (task.state, task.error_code, task.attempt, ran) == ("failed", "WORKER_CRASHED", 1, [1])


def test_an_explicit_retry_overrules_the_function(client: tasklib.Client, conn: Conn, config: tasklib.Config) -> None:
    """Who submits it knows that this one may run twice: it is not marked before its first line."""
    found: list[Any] = []

    @tasklib.task(on_crash="fail")
    def once() -> None:
        found.extend(conn.execute("select state, on_crash from tasklib.tasks").fetchall())

    client.submit_task("once", on_crash="retry")
    TaskWorker(config).run_until_empty_sync()
    assert found == [("claimed", "retry")]


# --- what workers say ---


@pytest.fixture
def session(config: tasklib.Config) -> Iterator[Session]:
    made = Session(config, "test")
    yield made
    made.close()


def declaration(config: tasklib.Config, session: Session) -> Declaration:
    served, options = Served(default_registry, None, None), Options(1, 1.0, None, 0.0, listen=False)
    basis = Basis(config, served, options, WorkerObserver(), None)
    basis.sessions["lease"] = session
    return Declaration(basis)


def versions(conn: Conn) -> dict[str, tuple[str, int]]:
    rows = conn.execute("select name::text, xmin::text, priority from tasklib.task_functions").fetchall()
    return {name: (version, priority) for name, version, priority in rows}


def test_only_what_differs_is_written(config: tasklib.Config, session: Session, conn: Conn) -> None:
    """A restart writes nothing; a function that changed, or that is new, is written alone."""
    tasklib.task(name="same")(lambda: None)
    tasklib.task(name="other")(lambda: None)
    declaration(config, session).run_once()
    before = versions(conn)
    declaration(config, session).run_once()
    assert versions(conn) == before
    forget("other")
    worker = declaration(config, session)
    worker.run_once()
    tasklib.task(name="other", priority=5)(lambda: None)
    tasklib.task(name="new")(lambda: None)
    worker.run_once()  # a function may be registered while its worker runs
    after = versions(conn)
    assert after["same"] == before["same"]
    assert (after["other"][1], after["new"][1]) == (5, 0)


def test_functions_that_nobody_serves_are_forgotten(config: tasklib.Config, session: Session, conn: Conn) -> None:
    """A worker that runs says once a day that it still has its own."""
    tasklib.task(name="used")(lambda: None)
    tasklib.task(name="gone")(lambda: None)
    declaration(config, session).run_once()
    forget("gone")
    conn.execute("update tasklib.task_functions set seen_at = now() - interval '91 days'")
    declaration(config, session).run_once()
    assert session.run(KeeperStatements(config).forget_functions(FUNCTIONS_SECONDS)) == 1
    assert "used" in versions(conn)
    assert "gone" not in versions(conn)


def test_a_worker_that_may_not_say_it_works_all_the_same(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once. Somebody who has locked the table does not hold up its start either."""
    ran: list[int] = []
    tasklib.task(name="job")(lambda: ran.append(1))
    client.submit_task("job")
    with conn.transaction():
        conn.execute("lock tasklib.task_functions")
        TaskWorker(config).run_until_empty_sync()
    assert ran == [1]
    assert caplog.text.count("functions.not_declared") == 1
