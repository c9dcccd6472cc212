"""Looking at tasks: one by its id, many by filter, page by page."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

import tasklib
from tasklib import Task
from tasklib.states import State

if TYPE_CHECKING:
    from tests.support.raw_sql import Conn

pytestmark = pytest.mark.postgres_versions


@pytest.fixture
def zoo(conn: Conn) -> None:
    """One task of each kind, by raw SQL: nothing here runs tasks yet."""
    conn.execute(
        """insert into tasklib.tasks (name, state, completed_at, next_retry_at, worker_id, claimed_at, locked_until)
           values ('t', 'pending', null, null, null, null, null), ('t', 'claimed', null, null, 'w', now(), now()),
                  ('t', 'running', null, null, 'w', now(), now()), ('t', 'completed', now(), null, null, null, null),
                  ('retrying', 'failed', null, now() + interval '1 h', null, null, null),
                  ('t', 'failed', now(), null, null, null, null), ('t', 'cancelled', now(), null, null, null, null),
                  ('t', 'expired', now(), null, null, null, null), ('t', 'buried', now(), null, null, null, null)"""
    )


def test_get_finds_by_id_or_says_none(client: tasklib.Client) -> None:
    """A UUID or its text; an id that nobody has is None, something else is an error."""
    task_id = client.submit_task("a")
    found = client.get_task(task_id)
    assert found == client.get_task(str(task_id))
    assert found is not None
    assert found.id == task_id
    assert client.get_task(uuid4()) is None
    with pytest.raises(tasklib.InvalidOptions, match="not a task id"):
        client.get_task("42")


@pytest.mark.usefixtures("zoo")
@pytest.mark.parametrize("state", list(State))
def test_list_by_state(client: tasklib.Client, state: State) -> None:
    """Every state can be asked for, as text or as State."""
    found = client.list_tasks(state=state)
    assert {task.state for task in found} == {state}
    assert found == client.list_tasks(state=str(state))
    assert len(found) == (2 if state == State.FAILED else 1)


@pytest.mark.usefixtures("zoo")
def test_questions_about_a_task(client: tasklib.Client) -> None:
    """Each kind of task answers yes to just its own question, and to `is_final` if it is over."""

    def ask(task: Task) -> list[str]:
        names = ("pending", "running", "completed", "retrying", "failed", "cancelled", "expired", "buried", "final")
        return [name for name in names if getattr(tasklib, f"is_{name}")(task)]

    answers = {(task.state, task.name): ask(task) for task in reversed(client.list_tasks())}
    assert answers == {
        ("pending", "t"): ["pending"],
        ("claimed", "t"): ["running"],
        ("running", "t"): ["running"],
        ("completed", "t"): ["completed", "final"],
        ("failed", "retrying"): ["retrying"],
        ("failed", "t"): ["failed", "final"],
        ("cancelled", "t"): ["cancelled", "final"],
        ("expired", "t"): ["expired", "final"],
        ("buried", "t"): ["buried", "final"],
    }


@pytest.mark.usefixtures("zoo")
def test_filters_apply_to_unsuccessful_states_too(client: tasklib.Client) -> None:
    """The list of failures is another query; it must not forget a filter."""
    assert [task.name for task in client.list_tasks("failed", "retrying")] == ["retrying"]
    assert client.list_tasks("failed", queue="other") == []
    assert client.list_tasks("failed", tags={"a": 1}) == []
    newest, oldest = client.list_tasks("failed")
    assert client.list_tasks("failed", after=newest.id) == [oldest]
    assert client.list_tasks("failed", created_after=datetime.now(UTC) + timedelta(hours=1)) == []
    assert client.list_tasks("failed", created_before=datetime.now(UTC) - timedelta(hours=1)) == []


def test_list_by_everything_else(client: tasklib.Client) -> None:
    """Name, queue, tags (all of those given), time; alone and together."""
    first = client.submit_task("a", queue="q", tags={"batch": "daily", "user": {"id": 5}})
    second = client.submit_task("b", queue="q", tags={"batch": "daily"})
    third = client.submit_task("b", tags={"batch": "weekly"})

    def ids(**filters: Any) -> list[Any]:
        return [task.id for task in client.list_tasks(**filters)]

    assert ids() == [third, second, first]
    assert ids(name="b") == [third, second]
    assert ids(queue="q") == [second, first]
    assert ids(tags={"batch": "daily"}) == [second, first]
    assert ids(tags={"user": {"id": 5}}) == [first]
    assert ids(name="b", queue="q", tags={"batch": "daily"}, state="pending") == [second]
    created = client.list_tasks()[1].created_at
    assert ids(created_after=created) == [third, second]
    assert ids(created_before=created) == [first]
    assert ids(limit=1) == [third]


def test_pages_cover_everything_once(client: tasklib.Client) -> None:
    """Keyset pages: new tasks that come in meanwhile do not shift them."""
    task = tasklib.task(name="paged")(lambda: None)
    expected = client.submit_many(task.new() for _ in range(25))
    seen: list[Any] = []
    while page := client.list_tasks(limit=7, after=seen[-1] if seen else None):
        client.submit(task.new())
        seen += [found.id for found in page]
    assert seen == expected[::-1]


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ({"state": "done"}, "'done' is not a state; there are: pending"),
        ({"limit": 0}, "limit"),
        ({"limit": 10_001}, "1 to 10000"),
        ({"limit": "5"}, "limit"),
        ({"limit": 1.5}, "limit"),
        ({"tag": {"a": 1}}, "unknown filter tag"),
        ({"name": 5}, "name"),
        ({"created_after": "yesterday"}, "created_after"),
        ({"created_before": datetime(2030, 1, 1)}, "time zone"),
        ({"after": "x"}, "not a task id"),
        ({"final": "yes"}, "final must be True or False"),
        ({"tags": {"a b": 1}}, "tag"),
    ],
)
def test_a_wrong_filter_is_named(client: tasklib.Client, filters: dict[str, Any], said: str) -> None:
    """And no query is sent."""
    with pytest.raises(tasklib.InvalidOptions, match=said):
        client.list_tasks(**filters)


def test_what_sql_let_in_can_be_looked_at(client: tasklib.Client, conn: Conn) -> None:
    """One row must not blind every list that it is in: a number that no float holds comes as a Decimal."""
    conn.execute("""select tasklib.submit('big', '{"x": 1e131071, "y": [1.5, 7]}')""")
    (task,) = client.list_tasks()
    assert task.kwargs == {"x": Decimal("1e131071"), "y": [1.5, 7]}
    deep = "[" * 3000 + "]" * 3000
    conn.execute("select tasklib.submit('deep', jsonb_build_object('x', %s::jsonb))", [deep])
    assert "unreadable" in client.list_tasks()[0].kwargs


async def test_async_and_module_level_verbs_say_the_same(app: None, async_client: tasklib.AsyncClient) -> None:
    """Over the same statements."""
    task_id = await async_client.submit_task("a", tags={"x": 1})
    assert await async_client.get_task(task_id) == tasklib.get_task(task_id) == await tasklib.get_task_async(task_id)
    expected = tasklib.list_tasks("pending", "a", 10, tags={"x": 1})
    assert expected == await tasklib.list_tasks_async("pending", "a", 10, tags={"x": 1})
    assert expected == await async_client.list_tasks("pending", "a", 10, tags={"x": 1})
    assert len(expected) == 1
    assert tasklib.submit_task_sync("a", idempotency_key="k") == tasklib.submit_task_sync("a", idempotency_key="k")


@pytest.mark.usefixtures("zoo")
def test_failed_tasks_are_told_apart(client: tasklib.Client) -> None:
    """Those that gave up, and those that wait for a retry. The other list knows the filter, too."""
    assert [task.name for task in client.list_tasks("failed", final=False)] == ["retrying"]
    assert [task.name for task in client.list_tasks("failed", final=True)] == ["t"]
    assert {task.state for task in client.list_tasks(final=False)} == {"pending", "claimed", "running", "failed"}


async def test_attempts_are_kept_with_their_tracebacks(
    app: None, config: tasklib.Config, async_client: tasklib.AsyncClient, client: tasklib.Client
) -> None:
    """Of every execution that has ended, from the first on; sync, async and module-level."""
    numbers = iter((1, 2))

    @tasklib.task(max_retries=2, backoff=tasklib.Fixed(0))
    def unlucky() -> int:
        if (number := next(numbers, 3)) < 3:
            raise ValueError(f"number {number}")
        return number

    task_id = unlucky.submit_sync()
    assert client.get_attempts(task_id) == []
    await tasklib.TaskWorker(config).run_until_empty()
    first, second, third = client.get_attempts(task_id)
    assert (first.attempt, first.outcome, first.will_retry, first.error_code) == (1, "FAILED", True, "ValueError")
    assert (second.error or "").startswith("ValueError: number 2\nTraceback:\n")
    assert "in unlucky" in (first.error or "")
    assert (third.attempt, third.outcome, third.will_retry, third.error) == (3, "COMPLETED", False, None)
    assert client.retry_task(task_id)
    assert client.get_attempts(task_id) == [first, second, third]
    assert tasklib.get_attempts(str(task_id)) == [first, second, third] == await tasklib.get_attempts_async(task_id)
    assert await async_client.get_attempts(task_id) == [first, second, third]
    assert set(first.to_dict()) == {field.name for field in dataclasses.fields(tasklib.Attempt)}
    assert client.get_attempts(uuid4()) == []
