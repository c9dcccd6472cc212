"""A row and its task in one asyncpg transaction. With DATABASE_URL set:

tasklib migrate
python examples/asyncpg_app.py
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import asyncpg

import tasklib

URL = os.environ["DATABASE_URL"]
config = tasklib.Config(URL)
tasklib.init(config)


@tasklib.task
async def welcome(user: str) -> str:
    return f"welcome, {user}"


async def sign_up(conn: Any, user: str) -> None:
    await conn.execute("insert into users (name) values ($1)", user)
    await welcome.options(connection=conn, idempotency_key=f"welcome-{user}").submit(user)


async def sign_up_team(conn: Any, *users: str) -> None:
    """Who is there already is turned down by the table; the savepoint takes back that one's task, and no other."""
    for user in users:
        try:
            async with conn.transaction():
                await sign_up(conn, user)
        except asyncpg.UniqueViolationError:
            print(f"{user}: is here already")


async def fail_to_pay(conn: Any) -> None:
    async with conn.transaction():
        await sign_up(conn, "nobody")
        raise ConnectionError("the payment failed")


async def main() -> None:
    async with asyncpg.create_pool(URL) as pool, pool.acquire() as conn:
        await conn.execute("create table users (name text primary key)")
        async with conn.transaction():
            await sign_up_team(conn, "alice", "bob", "alice")
        try:
            await fail_to_pay(conn)
        except ConnectionError as error:
            print(f"nobody: rolled back, {error}")
        users = await conn.fetchval("select count(*) from users")
        print(f"{users} users, {len(await tasklib.list_tasks_async())} tasks")
    await tasklib.TaskWorker(config).run_until_empty()
    for task in reversed(await tasklib.list_tasks_async()):
        print(f"{task.state}: {task.result and task.result['value']}")


if __name__ == "__main__":
    asyncio.run(main())
