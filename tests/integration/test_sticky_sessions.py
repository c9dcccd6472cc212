"""What a session keeps from the moment at which it began must not outlast its cause: sessions are replaced."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import tasklib
from tasklib import migrate
from tasklib.runtime import session
from tests.support.raw_sql import literal
from tests.support.working import running, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.raw_sql import Conn, NewDatabase

pytestmark = pytest.mark.direct("is about the server's own sessions; behind a pooler they are the pooler's")

NEW_SESSIONS = """
select pg_terminate_backend(pid) from pg_stat_activity
 where datname = current_database() and application_name like 'tasklib%'
"""
SESSIONS = (
    "select count(*) from pg_stat_activity where datname = current_database() and application_name like 'tasklib%'"
)

# What refuses our statements while it is set, for the sessions that begin meanwhile.
SETTINGS = {
    "read-only": "default_transaction_read_only = on",
    "another role": "role = sticky_nobody",
    "too short a limit": "statement_timeout = 300",
}


@pytest.fixture
def config(new_database: NewDatabase) -> tasklib.Config:
    made = tasklib.Config(new_database(), pool_size=3)
    migrate.migrate(made)
    return made


@pytest.fixture
def admin(config: tasklib.Config) -> Iterator[Conn]:
    """Not one of ours, and begun before anything is set."""
    with psycopg.connect(config.database_url, autocommit=True) as conn:
        conn.execute("drop role if exists sticky_nobody; create role sticky_nobody")
        yield conn
        conn.execute("drop role sticky_nobody")


def submit_with(client: tasklib.AsyncClient, kind: str) -> Callable[[], Any]:
    job = tasklib.task(name="job")(lambda: None)
    if kind == "sync":
        return lambda: client.as_sync().submit(job.new())
    return lambda: client.submit(job.new())


async def done(answer: Any) -> Any:
    return await answer if asyncio.iscoroutine(answer) else answer


def change(admin: Conn, setting: str) -> None:
    """For sessions that begin from now on; and ours begin anew."""
    row = admin.execute("select quote_ident(current_database())").fetchone()
    assert row is not None
    admin.execute(literal(f"alter database {row[0]} set {setting}"))
    admin.execute(NEW_SESSIONS)


def change_back(admin: Conn, setting: str) -> None:
    row = admin.execute("select quote_ident(current_database())").fetchone()
    assert row is not None
    admin.execute(literal(f"alter database {row[0]} reset {setting.partition(' ')[0]}"))


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
async def test_a_client_does_not_keep_a_session_that_is_refused(
    config: tasklib.Config, admin: Conn, setting: str, kind: str
) -> None:
    """The setting was for a while. As soon as it is gone, calls succeed, though connections were opened meanwhile."""
    async with tasklib.AsyncClient(config) as client:
        submit = submit_with(client, kind)
        await done(submit())
        change(admin, setting)
        if "timeout" in setting:
            admin.execute("begin; lock table tasklib.tasks")
        with pytest.raises(tasklib.DatabaseError):
            await done(submit())
        change_back(admin, setting)
        if "timeout" in setting:
            admin.execute("commit")
        await done(submit())
        client.as_sync().close()


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_sessions_that_stayed_read_only_are_gone_through_within_one_call(
    config: tasklib.Config, admin: Conn, kind: str
) -> None:
    """A pool full of sessions that only read, and so were never refused: the first change does not fail."""
    async with tasklib.AsyncClient(config) as client:
        submit = submit_with(client, kind)
        change(admin, SETTINGS["read-only"])
        if kind == "sync":
            await asyncio.gather(*(asyncio.to_thread(client.as_sync().list_tasks) for _ in range(9)))
        else:
            await asyncio.gather(*(client.list_tasks() for _ in range(9)))
        change_back(admin, SETTINGS["read-only"])
        await done(submit())
        client.as_sync().close()


def test_a_worker_goes_on_when_the_database_is_writable_again(config: tasklib.Config, admin: Conn) -> None:
    """All its sessions began while it was not."""
    job = tasklib.task(name="job")(lambda: None)
    with tasklib.Client(config) as client, running(config):
        wait_final(client, client.submit(job.new()))
        change(admin, SETTINGS["read-only"])
        wait_until(lambda: (admin.execute(SESSIONS).fetchone() or (0,))[0] >= 3, "new sessions")
        change_back(admin, SETTINGS["read-only"])
        for _ in range(3):
            assert wait_final(client, client.submit(job.new())).state == "completed"


def test_a_worker_replaces_an_old_session_that_is_refused(
    config: tasklib.Config, admin: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began with another role. What is refused all the time does not replace it every time."""
    monkeypatch.setattr(session, "REFUSED_SECONDS", 0.5)
    job = tasklib.task(name="job")(lambda: None)
    with tasklib.Client(config) as client, running(config):
        wait_final(client, client.submit(job.new()))
        change(admin, SETTINGS["another role"])
        wait_until(lambda: (admin.execute(SESSIONS).fetchone() or (0,))[0] >= 3, "new sessions")
        change_back(admin, SETTINGS["another role"])
        assert wait_final(client, client.submit(job.new())).state == "completed"


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_schema_that_was_made_anew_is_used(config: tasklib.Config, admin: Conn, kind: str) -> None:
    """What was prepared names tables and types that are gone."""
    async with tasklib.AsyncClient(config) as client:
        submit = submit_with(client, kind)

        async def use() -> Any:
            task_id: Any = None
            for _ in range(7):  # psycopg prepares what it sees for the sixth time
                task_id = await done(submit())
                await (
                    client.get_task(task_id)
                    if kind == "async"
                    else asyncio.to_thread(client.as_sync().get_task, task_id)
                )
                await (client.list_tasks() if kind == "async" else asyncio.to_thread(client.as_sync().list_tasks))
            return task_id

        with running(config):
            await asyncio.to_thread(wait_final, client.as_sync(), await use())
            admin.execute("drop schema tasklib cascade")
            migrate.migrate(config)
            await asyncio.to_thread(wait_final, client.as_sync(), await use())
        client.as_sync().close()
