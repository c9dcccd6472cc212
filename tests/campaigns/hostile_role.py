"""A role of the database is hostile: it has USAGE on the schema, TEMP, and CREATE on public, where it has made
functions, operators, types and relations of every name that PostgreSQL has, and casts for a type of its own. It calls
every function of tasklib's that it may with values of that type, and makes every trigger function that it may a trigger
of its tables; first with no other right, then with those of a daemon. Meanwhile the migrations, daemons, clients and
the doctor of other roles do their work, with `search_path = public, pg_catalog`, directly and behind PgBouncer.

No function of the hostile role ever sees another current_user, and every task ends as it should.

    python3 dev.py hostile-role                 a minute
    python3 dev.py hostile-role --seconds 600
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import psycopg2

import tasklib
from tasklib import doctor, embedded, migrate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

from tests.campaigns import hostile_role_tasks as tasks
from tests.campaigns.soak import say
from tests.support import pooler
from tests.support.hostile import DAEMON, OWNER, WEB, HostileDatabase
from tests.support.raw_sql import literal
from tools.daemons import daemon
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ENDS = {tasks.fails.name: "failed"}  # all others: completed
DRAIN_SECONDS = 120.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it goes on, after the first round")
    options = parser.parse_args(arguments)
    problems = run(options.seconds)
    for problem in problems:
        say(f"VIOLATION {problem}")
    say("FAILED" if problems else "nothing hostile ran as another role")
    return 1 if problems else 0


def run(seconds: float) -> list[str]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(embedded.postgres())
        database = HostileDatabase(server.dsn)
        database.make()
        say("the hostile objects are made, and the migrations have run among them")
        addresses = _addresses(stack, server.dsn)
        settings: dict[str, Any] = {"app": ["tests.campaigns.hostile_role_tasks"], "concurrency": 4}
        for address in addresses:
            stack.enter_context(daemon(address(database.of(DAEMON)), **settings))
        _rounds(database, addresses, time.monotonic() + seconds)
        return database.problems() + _judged(database)


def _addresses(stack: contextlib.ExitStack, dsn: str) -> list[Callable[[str], str]]:
    """The ways to the database: directly, and by a pooler."""
    if pooler.PROGRAM is None:
        say(f"without a pooler: {pooler.WHY_NOT}")
        return [str]
    return [str, stack.enter_context(pooler.pgbouncer(dsn)).pooled]


def _rounds(database: HostileDatabase, addresses: Sequence[Callable[[str], str]], until: float) -> None:
    number = 0
    while number < 2 or time.monotonic() < until:
        database.attack()
        for address in addresses:
            config = tasklib.Config(address(database.of(WEB)), pool_size=2)
            _use_client(config)
            asyncio.run(_use_async_client(config))
        _submit_on_borrowed(database.of(WEB))
        _look_after(database)
        database.attack()  # once more, now that there are rows
        number += 1
        if number == 1:
            database.trust_mallory_more()
    say(f"{number} rounds")


def _every_task() -> list[tasklib.NewTask]:
    return [
        tasks.plain.new(1),
        *(each.new() for each in (tasks.in_a_transaction, tasks.in_an_async_transaction, tasks.fails, tasks.snoozes)),
        *(each.new() for each in (tasks.tells_its_progress, tasks.in_a_process, tasks.submits_another)),
        tasks.kills_its_worker.new(),
        tasks.plain.options(delay_seconds=0.1, tags={"a": 1}, max_retries=2).new(2),
    ]


def _use_client(config: tasklib.Config) -> None:
    with tasklib.Client(config) as client:
        ids = client.submit_many(_every_task())
        once = tasks.plain.options(idempotency_key=f"once-{ids[0]}").new(3)
        ids.append(client.submit(once))
        client.submit(tasks.plain.options(idempotency_key=f"once-{ids[0]}").new(3))
        client.wait_for(ids, timeout=DRAIN_SECONDS)
        client.get_task(ids[0])
        client.list_tasks(state="failed", name=tasks.fails.name, queue="default", tags={}, limit=5)
        client.cancel_task(client.submit(tasks.plain.options(delay_seconds=60).new(4)), "not needed")
        client.retry_task(ids[0])
        client.expire_tasks()
        client.queue_statistics()
        client.task_statistics()
        client.backlog()


async def _use_async_client(config: tasklib.Config) -> None:
    async with tasklib.AsyncClient(config) as client:
        ids = await asyncio.gather(*(client.submit(each) for each in _every_task()))
        await client.wait_for(ids, timeout=DRAIN_SECONDS)
        await client.get_task(ids[0])
        await client.list_tasks()
        await client.retry_task(ids[0])
        await client.cancel_task(ids[0])
        await client.queue_statistics()
        await client.backlog(["default"])


def _submit_on_borrowed(dsn: str) -> None:
    soon = tasks.plain.options(scheduled_at=tasks.soon(), timeout_seconds=5).new(5)
    with tasklib.Client(tasklib.Config(dsn)) as client:
        with psycopg.connect(dsn) as conn:
            client.submit(soon, connection=conn)
            client.submit_many([tasks.plain.new(6), tasks.plain.new(7)], connection=conn)
        with contextlib.closing(psycopg2.connect(dsn)) as other, other:
            client.submit(tasks.plain.options(expires_at=tasks.soon(3600)).new(8), connection=other)
            client.submit_many([tasks.plain.new(9)], connection=other)


def _look_after(database: HostileDatabase) -> None:
    """What the owner does: it looks, and puts the functions in place once more."""
    config = tasklib.Config(database.of(OWNER))
    list(doctor.run_checks(config))
    with database.connect(OWNER) as conn:
        conn.execute("delete from tasklib.schema_migrations where version = 0")
    migrate.migrate(config)
    migrate.check(config)


def _judged(database: HostileDatabase) -> list[str]:
    """Each task has ended as it should; those of the hostile role are nobody's."""
    known = [each.name for each in vars(tasks).values() if isinstance(each, tasklib.TaskFunction)]
    with database.connect() as conn:

        def states() -> collections.Counter[tuple[str, str]]:
            rows = conn.execute(literal(_STATES), [known]).fetchall()
            return collections.Counter({(name, state): count for name, state, count in rows})

        def unfinished() -> list[str]:
            allowed = {(name, ENDS.get(name, "completed")) for name in known} | {(tasks.plain.name, "cancelled")}
            return [
                f"{count} of {name} are {state}"
                for (name, state), count in states().items()
                if (name, state) not in allowed
            ]

        with contextlib.suppress(AssertionError):
            wait_until(lambda: not unfinished(), "all tasks to end", seconds=DRAIN_SECONDS)
        say(", ".join(f"{name} {state} {count}" for (name, state), count in sorted(states().items())))
        return unfinished()


_STATES = """
select name::text, case when state = 'failed' and completed_at is null then 'retrying' else state end, count(*)
  from tasklib.tasks where name = any(%s) group by 1, 2
"""


if __name__ == "__main__":
    sys.exit(main())
