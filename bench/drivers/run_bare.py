"""The limits: what psycopg and SQL by hand reach on tasklib's own table, as a driver like those of the systems.

- submit: one INSERT, its own commit, in a session whose triggers are off, so that nobody is notified.
- bulk: COPY of 1,000 rows, in the same kind of session.
- work: claims and finishes 500 rows at a time, in binary, with prepared statements, and writes a row for each attempt.
  It runs nothing. The attempts go into a table of this driver's, so that the limit stays the same whatever tasklib
  does with its own. The tasks' table is as it is, with its CHECKs, indexes and triggers.
- kind "notify": an INSERT that notifies, and a worker that only listens. From the one to the other is the shortest
  way from a submit to a process that sleeps.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg

import tasklib
from bench.drivers.driver import TEXT, Later, System, began, main, note
from tasklib.ids import new_id

if TYPE_CHECKING:
    from uuid import UUID

BATCH = 500
CHANNEL = "bare"

ATTEMPTS = """
create schema bare;
create table bare.attempts (
    task_id uuid not null, fencing_token bigint not null, started_at timestamptz not null,
    finished_at timestamptz not null, attempt integer not null, worker_pid integer, will_retry boolean not null,
    outcome text not null, worker_id text not null, worker_hostname text, worker_process_name text,
    primary key (task_id, attempt))
"""
TRIGGERS_OFF = "set session_replication_role = replica"
COLUMNS = "id, name, kwargs, ready, queue, priority, max_retries, store_result"  # the rest has defaults
INSERT = f"""
insert into tasklib.tasks ({COLUMNS}) values (%s, 'async_task', %s, true, 'default', 0, 3, true)
"""  # noqa: S608 - a constant of ours
INSERT_AND_NOTIFY = f"""
with inserted as (
    insert into tasklib.tasks ({COLUMNS}) values (%s, 'async_task', %s, true, 'default', 0, 3, true)
)
select pg_notify('{CHANNEL}', %s)
"""  # noqa: S608 - a constant of ours
COPY = f"copy tasklib.tasks ({COLUMNS}) from stdin"
CLAIM = """
update tasklib.tasks
   set state = 'claimed', ready = false, worker_id = %s, claimed_at = clock_timestamp(),
       locked_until = clock_timestamp() + interval '10 minutes', fencing_token = fencing_token + 1
 where id = any(array(
     select id from tasklib.tasks
      where ready and queue = 'default'
      order by priority desc, created_at, id
      limit %s
      for update skip locked))
returning id, fencing_token, name, kwargs::text
"""
FINISH = """
with given as (
    select * from unnest(%s::uuid[], %s::bigint[], %s::timestamptz[], %s::timestamptz[], %s::text[])
        as each (id, token, started_at, finished_at, result)
    where token between 1 and 9223372036854775807
), finished as (
    update tasklib.tasks as task
       set state = 'completed', completed_at = given.finished_at, result = given.result::jsonb,
           started_at = given.started_at, attempt = task.attempt + 1, worker_id = null, claimed_at = null,
           locked_until = null
      from given
     where task.id = given.id and task.fencing_token = given.token
    returning task.id, task.attempt, task.fencing_token, task.started_at, given.finished_at
)
insert into bare.attempts
select id, fencing_token, started_at, finished_at, attempt, %s, false, 'COMPLETED', %s, %s, 'bare' from finished
"""


class Bare(System):
    packages: ClassVar = ["psycopg", "psycopg-binary"]

    def __init__(self, dsn: str, kind: str = "async") -> None:
        super().__init__(dsn, kind)
        self._idle: list[psycopg.AsyncConnection[Any]] = []  # connections that nobody uses just now
        self._stopped = threading.Event()

    async def install(self) -> None:
        async with tasklib.AsyncClient(tasklib.Config(self.dsn)) as client:
            await client.list_tasks()  # the first use makes the schema
        async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as conn:
            await conn.execute(ATTEMPTS)

    async def open(self, connections: int) -> None:
        for _ in range(connections):
            conn = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)
            await conn.execute(TRIGGERS_OFF)
            self._idle.append(conn)

    async def submit(self, number: int) -> None:
        conn = self._idle.pop()
        if self.kind == "notify":
            await conn.execute(INSERT_AND_NOTIFY, [new_id(), kwargs(number), str(number)])
        else:
            await conn.execute(INSERT, [new_id(), kwargs(number)])
        self._idle.append(conn)

    async def bulk(self, numbers: list[int], later: Later) -> None:
        assert later == Later(), "the limit is of tasks that are due now"
        async with self._idle[0].cursor() as cursor, cursor.copy(COPY) as stream:
            for number in numbers:
                await stream.write_row((new_id(), "async_task", kwargs(number), True, "default", 0, 3, True))

    async def run(self) -> None:
        await asyncio.to_thread(self._listen if self.kind == "notify" else self._loop)

    async def stop(self) -> None:
        self._stopped.set()

    def _listen(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute(f"listen {CHANNEL}")
            while not self._stopped.is_set():
                for notify in conn.notifies(timeout=0.5, stop_after=1):
                    note(int(notify.payload))

    def _loop(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn, conn.cursor(binary=True) as cursor:
            worker_id, pid, host = f"bare-{new_id()}", os.getpid(), socket.gethostname()
            while not self._stopped.is_set():
                claimed: list[tuple[UUID, int, str, str]]
                claimed = cursor.execute(CLAIM, [worker_id, BATCH], prepare=True).fetchall()
                if not claimed:
                    time.sleep(0.005)
                    continue
                moment, now = time.monotonic(), datetime.now(UTC)
                began.update(dict.fromkeys(range(len(began), len(began) + len(claimed)), moment))
                times, results = [now] * len(claimed), ['{"value":1}'] * len(claimed)
                ids, tokens = [row[0] for row in claimed], [row[1] for row in claimed]
                cursor.execute(FINISH, [ids, tokens, times, times, results, pid, worker_id, host], prepare=True)


def kwargs(number: int) -> str:
    return json.dumps({"number": number, "text": TEXT})


if __name__ == "__main__":
    main(Bare)
