"""Submitting: the original interface line by line, in bulk, in the caller's transaction, and from SQL."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row

import tasklib
from tasklib.statements import BATCH_ROWS
from tests.support.raw_sql import Conn, literal

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.postgres_versions


@pytest.fixture
def send_email() -> tasklib.TaskFunction[..., bool]:
    @tasklib.task
    def send_email(to: str, subject: str, body: str | None = None) -> bool:
        return True

    return send_email


async def test_record_1_of_the_original_documentation(app: None, conn: Conn) -> None:
    """A pending task, column by column. Ids and times are of today; everything else is as printed."""

    @tasklib.task(timeout_seconds=30)
    def send_email(to: str, subject: str, body: str) -> None: ...

    tags = {"batch": "welcome-emails", "cohort": "2025-10-25"}
    scheduled_at = datetime.now(UTC) + timedelta(hours=1)
    task_id = await tasklib.submit_task(
        send_email,
        to="alice@example.com",
        subject="Welcome!",
        body="Hello Alice...",
        tags=tags,
        scheduled_at=scheduled_at,
    )
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute("select * from tasklib.tasks").fetchone()
    assert row is not None
    printed = {
        "id": task_id,
        "name": "send_email",
        "state": "pending",
        "scheduled_at": scheduled_at,
        "started_at": None,
        "completed_at": None,
        "created_at": row["created_at"],
        "args": {},
        "kwargs": {"to": "alice@example.com", "subject": "Welcome!", "body": "Hello Alice..."},
        "result": None,
        "error": None,
        "retry_count": 0,
        "max_retries": 3,
        "next_retry_at": None,
        "worker_id": None,
        "locked_until": None,
        "timeout_seconds": 30,
        "priority": 0,
        "tags": tags,
    }
    assert {name: row[name] for name in printed} == printed
    assert abs(row["created_at"] - datetime.now(UTC)) < timedelta(minutes=1)
    assert tasklib.get_task(task_id) == tasklib.list_tasks()[0]


async def test_the_story_of_a_task_begins(app: None, send_email: Any) -> None:
    """'1. User submits task': an id comes back, and the row waits, due at once."""
    task_id = await tasklib.submit_task(send_email, to="user@example.com", subject="Hello")
    assert isinstance(task_id, UUID)
    task = tasklib.get_task(task_id)
    assert task is not None
    assert (task.name, task.state, task.kwargs) == (
        "send_email",
        "pending",
        {"to": "user@example.com", "subject": "Hello"},
    )
    assert task.scheduled_at == task.created_at
    assert task.ready
    assert tasklib.is_pending(task)
    assert not tasklib.is_completed(task)


async def test_arguments_are_validated_against_the_signature(app: None, send_email: Any) -> None:
    """'1. Validate arguments against function signature': refused before anything is inserted."""
    with pytest.raises(tasklib.InvalidArguments, match=r'send_email.*"subject"'):
        await tasklib.submit_task(send_email, to="user@example.com")
    assert tasklib.list_tasks() == []


async def test_delay_sets_the_time(app: None, send_email: Any) -> None:
    """'4. Calculate scheduled_at = now + delay_seconds', by the database's clock; until then it is not ready."""
    task_id = await tasklib.submit_task(send_email, to="a", subject="b", delay_seconds=90)
    task = tasklib.get_task(task_id)
    assert task is not None
    assert task.scheduled_at - task.created_at == timedelta(seconds=90)
    assert not task.ready


async def test_every_option_is_stored(app: None, send_email: Any) -> None:
    """Each lands in its own column."""
    later = datetime.now(UTC) + timedelta(days=1)
    task_id = await tasklib.submit_task(
        send_email, to="a", subject="b", max_retries=0, timeout_seconds=2.5, priority=-10, tags={"user_id": 123},
        queue="mail", scheduled_at=later, expires_at=later, idempotency_key="k", store_result=False, on_crash="fail",
    )  # fmt: skip
    task = tasklib.get_task(str(task_id))
    assert task is not None
    assert (task.max_retries, task.timeout_seconds, task.priority, task.tags) == (0, 2.5, -10, {"user_id": 123})
    assert (task.queue, task.scheduled_at, task.expires_at) == ("mail", later, later)
    assert (task.idempotency_key, task.store_result, task.on_crash) == ("k", False, "fail")
    assert task.payload_digest is not None


def test_configured_defaults_apply_where_nobody_says_otherwise(config: tasklib.Config) -> None:
    """Config, then the decorator, then the submit: the last one that speaks is heard. Bulk as single."""

    @tasklib.task
    def plain() -> None: ...

    @tasklib.task(max_retries=0, timeout_seconds=5)
    def own() -> None: ...

    chosen = tasklib.Config(config.database_url, max_retries=7, default_task_timeout_seconds=60)
    with tasklib.Client(chosen) as client:
        ids = [client.submit(plain.new()), client.submit(own.new()), *client.submit_many([plain.new(), own.new()])]
        tasks = [client.get_task(task_id) for task_id in ids]
    assert [(task.max_retries, task.timeout_seconds) for task in tasks if task] == [(7, 60), (0, 5), (7, 60), (0, 5)]


async def test_typed_submits_of_the_function(app: None, send_email: Any) -> None:
    """`submit`, `submit_sync` and the options step, positional arguments included."""
    first = await send_email.submit("a", subject="b")
    second = send_email.submit_sync("a", "b", "c")
    third = await send_email.options(queue="mail").submit(to="a", subject="b")
    tasks = [tasklib.get_task(task_id) for task_id in (first, second, third)]
    assert [task.kwargs for task in tasks if task] == [
        {"to": "a", "subject": "b"},
        {"to": "a", "subject": "b", "body": "c"},
        {"to": "a", "subject": "b"},
    ]
    assert [task.queue for task in tasks if task] == ["default", "default", "mail"]


def test_rich_arguments_come_back_equal(app: None) -> None:
    """What is stored decodes to what was given."""

    @tasklib.task
    def pay(amount: Decimal, at: datetime, parts: tuple[int, ...], who: UUID) -> None: ...

    given = (Decimal("10.10"), datetime.now(UTC), (1, 2), UUID(int=5))
    task = tasklib.get_task(pay.submit_sync(*given))
    assert task is not None
    assert tuple(pay.arguments.decode(json.dumps(task.args), json.dumps(task.kwargs))[1].values()) == given


def test_a_submit_by_name(client: tasklib.Client) -> None:
    """For producers that do not import the consumer's code."""
    task = client.get_task(client.submit_task("reports.daily", day="2026-01-01", priority=3))
    assert task is not None
    assert (task.name, task.kwargs, task.priority) == ("reports.daily", {"day": "2026-01-01"}, 3)


def test_many_at_once_in_the_order_given(app: None, send_email: Any) -> None:
    """More than one batch; an id for each, in order; the order of claims is the order given."""
    count = BATCH_ROWS * 2 + 10
    news = [send_email.options(priority=n % 3).new(to=str(n), subject="s") for n in range(count)]
    ids = tasklib.submit_many_sync(news)
    assert ids == [new.id for new in news]
    assert not any(task_id.existed for task_id in ids)
    listed = tasklib.list_tasks(limit=10_000)
    assert [int(task.kwargs["to"]) for task in reversed(listed)] == list(range(count))
    assert [task.priority for task in reversed(listed)] == [n % 3 for n in range(count)]
    claims = sorted(listed, key=lambda task: (task.created_at, task.id))
    assert [int(task.kwargs["to"]) for task in claims] == list(range(count))


async def test_many_async(app: None, send_email: Any) -> None:
    """The same over the async client; nothing at all is fine too."""
    assert await tasklib.submit_many([]) == []
    ids = await tasklib.submit_many(send_email.new(to=str(n), subject="s") for n in range(3))
    assert len(ids) == 3
    assert len(tasklib.list_tasks()) == 3


def test_many_are_all_or_none(client: tasklib.Client, conn: Conn) -> None:
    """A batch that is refused in its last row leaves nothing of its first batches."""

    @tasklib.task
    def once(n: int) -> None: ...

    client.submit(once.options(idempotency_key="z-taken").new(0))
    news = [once.options(idempotency_key=f"a{n}").new(n) for n in range(BATCH_ROWS + 5)]
    news.append(once.options(idempotency_key="z-taken").new(1))
    with pytest.raises(tasklib.IdempotencyConflict, match="'z-taken'"):
        client.submit_many(news)
    assert conn.execute("select count(*) from tasklib.tasks").fetchone() == (1,)


def test_the_same_new_task_twice_is_one_task(client: tasklib.Client) -> None:
    """It carries its id: after an unknown commit it can simply be submitted again."""
    new = tasklib.task(name="again")(lambda: None).new()
    assert client.submit(new) == client.submit(new)
    assert not client.submit(new).existed
    assert client.submit_many([new, new]) == [new.id, new.id]
    assert len(client.list_tasks()) == 1


def test_rolled_back_means_never_existed(database_url: str, client: tasklib.Client) -> None:
    """Sync, in the caller's transaction, single and bulk, with a savepoint."""
    task = tasklib.task(name="in_transaction")(lambda: None)
    with psycopg.connect(database_url) as mine:
        client.submit(task.new(), connection=mine)
        client.submit_many([task.new() for _ in range(BATCH_ROWS + 1)], connection=mine)
        assert client.list_tasks() == []
        mine.rollback()
        assert client.list_tasks() == []
        kept = client.submit(task.new(), connection=mine)
        with mine.transaction(force_rollback=True):
            client.submit_task(task, connection=mine)
        mine.commit()
    assert [found.id for found in client.list_tasks()] == [kept]


async def test_rolled_back_means_never_existed_async(database_url: str, async_client: tasklib.AsyncClient) -> None:
    """The same on an async connection, through the function's own submit."""
    task = tasklib.task(name="in_transaction")(lambda: None)
    async with await psycopg.AsyncConnection.connect(database_url) as mine:
        await async_client.submit(task.new(), connection=mine)
        await async_client.submit_many([task.new() for _ in range(BATCH_ROWS + 1)], connection=mine)
        await mine.rollback()
        kept = await async_client.submit_task(task, connection=mine)
        await mine.commit()
    assert [found.id for found in await async_client.list_tasks()] == [kept]


@pytest.mark.parametrize("count", [1, BATCH_ROWS + 1])
def test_a_bulk_does_not_commit_for_the_caller(database_url: str, client: tasklib.Client, count: int) -> None:
    """The first statement of the caller's transaction, of any size: the caller alone ends it."""
    task = tasklib.task(name="in_transaction")(lambda: None)
    with psycopg.connect(database_url) as mine:
        client.submit_many([task.new() for _ in range(count)], connection=mine)
        mine.rollback()
        assert client.list_tasks() == []
        mine.autocommit = True
        client.submit_many([task.new() for _ in range(count)], connection=mine)
    assert len(client.list_tasks(limit=10_000)) == count


def test_a_new_task_holds_no_connection(database_url: str) -> None:
    """It would be dropped in silence, and the task committed elsewhere."""
    task = tasklib.task(name="in_transaction")(lambda: None)
    with psycopg.connect(database_url) as mine, pytest.raises(tasklib.InvalidOptions, match="submit_many"):
        task.options(connection=mine).new()


def test_a_registered_name_stands_for_its_function(client: tasklib.Client) -> None:
    """With its checks and its defaults: work that must not run twice stays so when it is submitted by name."""

    @tasklib.task(queue="mail", max_retries=0, on_crash="fail")
    def once(x: int) -> None: ...

    task = client.get_task(client.submit_task("once", x=1))
    assert task is not None
    assert (task.queue, task.max_retries, task.on_crash) == ("mail", 0, "fail")
    with pytest.raises(tasklib.InvalidArguments):
        client.submit_task("once", x="not a number")


def test_times_are_the_same_single_and_in_bulk(client: tasklib.Client) -> None:
    """An offset of minutes and seconds included, which JSON cannot say."""
    odd = datetime(2030, 1, 1, tzinfo=timezone(timedelta(seconds=561)))
    step = tasklib.task(name="timed")(lambda: None).options(scheduled_at=odd)
    ids = [client.submit(step.new()), *client.submit_many([step.new()])]
    assert [task.scheduled_at for task in map(client.get_task, ids) if task] == [odd, odd]


@pytest.mark.parametrize("wrong", [[print], ["a"], 5, [{"name": "a"}]])
def test_what_is_not_a_new_task_is_refused(client: tasklib.Client, wrong: Any) -> None:
    """With a word on what is wanted."""
    with pytest.raises(tasklib.InvalidOptions, match=r"function\.new"):
        client.submit_many(wrong)


def test_the_options_step_carries_the_connection(app: None, database_url: str) -> None:
    """`send.options(connection=conn).submit_sync(...)`."""
    task = tasklib.task(name="in_transaction")(lambda: None)
    with psycopg.connect(database_url, row_factory=dict_row) as mine:
        task.options(connection=mine).submit_sync()
        mine.rollback()
    assert tasklib.list_tasks() == []


async def test_the_wrong_kind_of_connection_is_refused(app: None, database_url: str) -> None:
    """A sync connection would block the event loop; an object of another library is not understood."""
    task = tasklib.task(name="in_transaction")(lambda: None)
    with psycopg.connect(database_url) as mine, pytest.raises(tasklib.InvalidOptions, match="AsyncConnection"):
        await task.options(connection=mine).submit()
    with pytest.raises(tasklib.InvalidOptions, match=r"psycopg\.Connection"):
        task.options(connection=object()).submit_sync()


async def test_a_sync_call_on_the_event_loop_works_and_is_told_of(
    app: None, database_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In each place that makes one: a submit, a cancel, a wait. On a connection of one's own it is one's own affair."""
    names: dict[str, Any] = {"add": tasklib.task(name="add")(lambda: None), "tasklib": tasklib}
    lines = [
        "handle = add.submit_handle_sync()",
        "tasklib.cancel_task(handle.id)",
        "try: handle.result_sync(timeout=20)",
        "except tasklib.TaskCancelled: pass",
        "add.options(connection=conn).submit_sync()",
    ]
    with psycopg.connect(database_url) as names["conn"]:
        exec(compile("\n".join(lines), tmp_path / "views.py", "exec"), names)
    told = [record.tasklib for record in caplog.records]  # type: ignore[attr-defined]
    assert [(each["event"], each["call"], each["line"]) for each in told] == [
        ("loop.blocked", "submit_handle_sync", 1),
        ("loop.blocked", "cancel_task", 2),
        ("loop.blocked", "result_sync", 3),
    ]


def test_an_aborted_transaction_is_reported_in_our_words(database_url: str, client: tasklib.Client) -> None:
    """The caller's transaction had failed before; our error carries PostgreSQL's code."""
    with psycopg.connect(database_url) as mine:
        with pytest.raises(psycopg.errors.DivisionByZero):
            mine.execute("select 1/0")
        with pytest.raises(tasklib.DatabaseError) as refused:
            client.submit_task("x", connection=mine)
        assert refused.value.sqlstate == "25P02"
        mine.rollback()


def test_submit_from_sql(conn: Conn, client: tasklib.Client) -> None:
    """Any language, any ORM: one function with the same names, defaults and rules."""
    row = conn.execute(
        """select * from tasklib.submit('send_email', '{"to": "a"}', queue => 'mail', priority => 7,
                                        delay_seconds => 60, tags => '{"a": 1}', max_retries => 1,
                                        timeout_seconds => 2)"""
    ).fetchone()
    assert row is not None
    assert row[1] is False
    task = client.get_task(row[0])
    assert task is not None
    assert (task.name, task.kwargs, task.queue, task.priority, task.ready) == (
        "send_email",
        {"to": "a"},
        "mail",
        7,
        False,
    )
    assert task.scheduled_at - task.created_at == timedelta(seconds=60)
    assert (task.tags, task.max_retries, task.timeout_seconds) == ({"a": 1}, 1, 2)


def test_submit_many_from_sql(conn: Conn, client: tasklib.Client) -> None:
    """One row for each, told by its ordinal; what is left out has submit's defaults."""
    rows = conn.execute(
        """select * from tasklib.submit_many('[
             {"name": "a"}, {"name": "b", "kwargs": {"x": 1}, "queue": "q", "delay_seconds": 5, "priority": null}]')"""
    ).fetchall()
    assert [(ordinal, existed) for ordinal, _, existed in rows] == [(1, False), (2, False)]
    plain, other = (client.get_task(row[1]) for row in rows)
    assert plain is not None
    assert other is not None
    assert (plain.name, plain.queue, plain.max_retries, plain.ready, plain.priority) == ("a", "default", 3, True, 0)
    assert (other.name, other.kwargs, other.queue, other.ready, other.priority) == ("b", {"x": 1}, "q", False, 0)
    single = client.get_task(conn.execute("select id from tasklib.submit('a')").fetchone()[0])  # type: ignore[index]
    assert single is not None
    same = ("args", "kwargs", "queue", "priority", "max_retries", "timeout_seconds", "tags", "store_result", "on_crash")
    assert [getattr(plain, name) for name in same] == [getattr(single, name) for name in same]


def test_submit_many_from_sql_tells_which_existed(conn: Conn) -> None:
    """By their ordinals, among new ones with ids of their own and without."""
    earlier = conn.execute("select id from tasklib.submit('a', idempotency_key => 'k')").fetchone()
    rows = conn.execute(
        f"""select ordinal, id, existed from tasklib.submit_many('[
             {{"name": "b"}}, {{"name": "a", "idempotency_key": "k"}}, {{"name": "c", "id": "{UUID(int=7)}"}}]')
             order by ordinal"""
    ).fetchall()
    assert earlier is not None
    assert [(ordinal, existed) for ordinal, _, existed in rows] == [(1, False), (2, True), (3, False)]
    assert [row[1] for row in rows[1:]] == [earlier[0], UUID(int=7)]
    names = conn.execute("select name from tasklib.tasks where id = any(%s) order by name", [[row[1] for row in rows]])
    assert names.fetchall() == [("a",), ("b",), ("c",)]


def test_submit_many_from_sql_meets_an_earlier_id(conn: Conn) -> None:
    """Without any key: the others are inserted, and it stands for itself; with another payload nothing is."""
    again, new, other = UUID(int=7), UUID(int=8), UUID(int=9)
    conn.execute("select from tasklib.submit('a', id => %s)", [again])
    submit_many = "select ordinal, id, existed from tasklib.submit_many(%s::text::jsonb) order by ordinal"
    both = json.dumps([{"name": "b", "id": str(new)}, {"name": "a", "id": str(again)}])
    assert conn.execute(submit_many, [both]).fetchall() == [(1, new, False), (2, again, True)]
    with pytest.raises(psycopg.Error) as refused:
        conn.execute(submit_many, [json.dumps([{"name": "b", "id": str(other)}, {"name": "b", "id": str(again)}])])
    assert refused.value.sqlstate == "TL409"
    assert conn.execute("select name from tasklib.tasks order by id").fetchall() == [("a",), ("b",)]


@pytest.mark.parametrize("key", [None, "k"])
def test_a_row_that_somebody_else_swallows_is_an_error(conn: Conn, client: tasklib.Client, key: str | None) -> None:
    """A trigger that is not ours: nobody is told that a task was submitted which is not there."""
    conn.execute("""
        create function swallow() returns trigger language plpgsql as $$ begin return null; end $$;
        create trigger swallow before insert on tasklib.tasks
            for each row when (new.name = 'b') execute function swallow()
    """)
    function = {name: tasklib.task(name=name)(lambda: None) for name in "ab"}
    news = [function[name].options(idempotency_key=key and key + name).new() for name in "ab"]
    try:
        with pytest.raises(tasklib.TasklibError, match="was not inserted"):
            client.submit_many(news)
    finally:
        conn.execute("drop function swallow cascade")
    assert client.list_tasks() == []


def test_many_bulks_in_one_transaction_are_not_many_subtransactions(conn: Conn) -> None:
    """Past 64 of them every reader pays: only the first write of a transaction may open one."""
    with conn.transaction():
        for _ in range(3):
            conn.execute("""select from tasklib.submit_many('[{"name": "a"}, {"name": "b"}]')""")
        others = conn.execute(
            """select count(distinct xmin::text) from tasklib.tasks
                where xmin::text <> (pg_current_xact_id()::text::bigint % 4294967296)::text"""
        ).fetchone()
    assert others == (1,)


@pytest.mark.parametrize(
    ("call", "sqlstate"),
    [
        ("submit('bad name')", "23514"),
        ("submit(null)", "23502"),
        ("submit('a', queue => 'Bad')", "23514"),
        ("submit('a', delay_seconds => -1)", "TL400"),
        ("submit('a', delay_seconds => 5, scheduled_at => now())", "TL400"),
        ("submit('a', scheduled_at => 'infinity')", "23514"),
        ("submit('a', '[]')", "23514"),
        ('submit_many(\'[{"name": "a", "prioritty": 1}]\')', "TL400"),
        ('submit_many(\'[{"name": "a", "delay_seconds": -1}]\')', "TL400"),
        ("submit_many('[{\"kwargs\": {}}]')", "23502"),
        (
            f'submit_many(\'[{{"name": "a", "id": "{UUID(int=1)}"}}, {{"name": "b", "id": "{UUID(int=1).hex}"}}]\')',
            "TL400",
        ),
        ("submit_many('{}')", "22023"),
    ],
)
def test_sql_is_held_to_the_same_rules(conn: Conn, call: str, sqlstate: str) -> None:
    """Nothing is passed over in silence, and nothing is inserted."""
    with pytest.raises(psycopg.Error) as refused:
        conn.execute(literal(f"select * from tasklib.{call}"))
    assert refused.value.sqlstate == sqlstate
    assert conn.execute("select count(*) from tasklib.tasks").fetchone() == (0,)


def test_ten_threads_and_ten_coroutines_submit_at_once(app: None, send_email: Any) -> None:
    """One default client serves them all."""

    async def many() -> None:
        await asyncio.gather(
            *(send_email.submit(to=str(n), subject="async") for n in range(100)),
            *(asyncio.to_thread(send_email.submit_sync, to=str(n), subject="sync") for n in range(100)),
        )

    asyncio.run(many())
    assert len(tasklib.list_tasks(limit=1000)) == 200


def test_another_schema(new_database: Any) -> None:
    """Two queues in one database do not see each other; a reserved word may be a schema's name."""
    url = new_database()
    with (
        tasklib.Client(tasklib.Config(url, schema="order")) as mine,
        tasklib.Client(tasklib.Config(url)) as other,
    ):
        mine.submit_task("a", idempotency_key="k")
        assert mine.submit_task("a", idempotency_key="k").existed
        mine.submit_many([tasklib.task(name="b")(lambda: None).new()])
        assert len(mine.list_tasks()) == 2
        assert other.list_tasks() == []
