"""The plans of what workers and duties send, over a million rows: pinned, whatever the planner knows or believes.

Half of the tasks are delayed, and of a higher priority than those that are ready. Pages are counted, because a plan
that names the right index can still walk all of it.
"""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import psycopg
import pytest

import tasklib
from tasklib import migrate
from tasklib.connection import WORKER_SETTINGS
from tasklib.connection_string import connection_string
from tasklib.duties.statements import KeeperStatements
from tasklib.runtime.session import Session
from tasklib.statements import Place, Started, WorkerStatements
from tasklib.statistics import StatisticsStatements
from tests.support.explain import PLACE, Statistics, explain
from tests.support.raw_sql import Conn, NewDatabase, literal
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = [
    pytest.mark.postgres_versions,
    pytest.mark.direct("asks for the plans of prepared statements, in sessions of its own"),
]

NAMES = ["name_0", "name_1", "name_2"]
WORKER = "worker-0"
DEAD_WORKER = "worker-3"
CLAIM_SIZE = 50
TABLES = ["tasklib.tasks", "tasklib.claims", "tasklib.workers", "tasklib.attempts"]

# The kinds lie mixed in the table, as they do when tasks come and go.
FILL = """
insert into tasklib.tasks (id, name, queue, state, ready, priority, suspect, created_at, scheduled_at, due_at,
                           next_retry_at, expires_at, completed_at, error, error_code, kwargs,
                           worker_id, claimed_at, locked_until, started_at, fencing_token, attempt,
                           max_retries, store_result)
select lpad(to_hex(n), 32, '0')::uuid, 'name_' || n % 3, case n % 2 when 0 then 'default' else 'mail' end, state,
       kind in ('ready', 'expiring', 'suspect'), case kind when 'delayed' then 10 else 0 end, kind = 'suspect',
       created_at, case kind when 'delayed' then due_at else created_at end,
       case when kind in ('delayed', 'retrying', 'expiring') then due_at end,
       case kind when 'retrying' then due_at end,
       case kind when 'expiring' then due_at end,
       case when kind in ('completed', 'failed') then created_at end,
       case when state = 'failed' then 'OSError: no' end, case when state = 'failed' then 'OSError' end,
       '{"to": "someone@example.com"}',
       case when kind = 'leased' then 'worker-' || n / 100 % 4 end, case when kind = 'leased' then now() end,
       case when kind = 'leased' then now() + interval '10 minutes' end, case when kind = 'completed' then now() end,
       (kind in ('leased', 'completed', 'retrying', 'failed'))::integer,
       (kind in ('completed', 'retrying', 'failed'))::integer, 3, true
from generate_series(1, 1000000) as n,
     lateral (select case
         when n % 100 < 50 then 'delayed'
         when n % 100 < 80 then case n % 10000 when 79 then 'suspect' when 78 then 'expiring' else 'ready' end
         when n % 100 < 99 then 'completed'
         else case n / 100 % 5 when 0 then 'leased' when 1 then 'expiring' when 2 then 'failed' else 'retrying' end
     end as kind) as kinds,
     lateral (select case kind when 'leased' then 'claimed' when 'completed' then 'completed'
                     when 'retrying' then 'failed' when 'failed' then 'failed' else 'pending' end as state,
              now() - (1000001 - n) * interval '1 second' as created_at,
              now() + interval '1 hour' + n * interval '1 second' as due_at) as made
"""
# What there was when the statistics were taken: how many of a thousand tasks were ready, the rest was done.
FEW = {
    f"taken with {ready} ready": f"""
        insert into tasklib.tasks (name, queue, state, ready, completed_at)
        select 'name_' || n % 3, case n / 3 % 2 when 0 then 'default' else 'mail' end,
               case when n <= {ready} then 'pending' else 'completed' end, n <= {ready},
               case when n > {ready} then now() end
        from generate_series(1, 1000) as n
    """
    for ready in (0, 10, 1000)
}
HOLD = f"""
with workers as (
    insert into tasklib.workers (worker_id, name, hostname, pid, process_name, task_names, concurrency, lease_until,
                                 died_at, features)
    select 'worker-' || n, 'worker', 'host', n, 'worker', '{{name_0,name_1}}', 100, now() + interval '1 day',
           case 'worker-' || n when '{DEAD_WORKER}' then now() end, '{{policies}}'
    from generate_series(0, 19) as n
)
insert into tasklib.claims (worker_id, locked_until, task_ids)
select worker_id, now() + interval '10 minutes', array_agg(id)
from (select id, worker_id, row_number() over (partition by worker_id order by id) / {CLAIM_SIZE} as batch
        from tasklib.tasks where worker_id is not null) as leased
group by worker_id, batch
"""
MAKE_DUE = {
    "promote": """
        update tasklib.tasks set scheduled_at = now(), due_at = now()
         where id in (select id from tasklib.tasks where state = 'pending' and due_at is not null and expires_at is null
                      order by id limit 100)
    """,
    "expire": """
        update tasklib.tasks set expires_at = now(), due_at = now()
         where id in (select id from tasklib.tasks where expires_at is not null order by id limit 100)
    """,
}


@pytest.fixture(scope="module")
def config(new_database: NewDatabase) -> tasklib.Config:
    config = tasklib.Config(new_database(), lease_seconds=0.3)
    migrate.migrate(config)
    return config


@pytest.fixture(scope="module")
def million(config: tasklib.Config) -> Iterator[Statistics]:
    """A filled database, and all that the planner may believe about it."""
    with psycopg.connect(config.database_url, autocommit=True) as conn:
        statistics = Statistics(conn, TABLES)
        for table in TABLES:
            conn.execute(literal(f"alter table {table} set (autovacuum_enabled = off)"))
        conn.execute("alter table tasklib.tasks disable trigger ring_on_insert")
        for name, rows in FEW.items():
            conn.execute(literal(rows))
            statistics.keep(name)
            conn.execute("truncate tasklib.tasks")
        conn.execute(FILL)
        conn.execute(literal(HOLD))
        conn.execute("alter table tasklib.tasks enable trigger ring_on_insert")
        statistics.keep("fresh")
        yield statistics


@pytest.fixture(params=["none", "fresh", *FEW])
def known(request: pytest.FixtureRequest, million: Statistics) -> None:
    """What the planner knows."""
    million.conn.execute("vacuum tasklib.claims")  # or what other tests have undone would be read, and counted
    if request.param == "none":
        million.forget()
    else:
        million.bring_back(request.param)


@pytest.fixture(scope="module", params=["default settings", "worker's settings"])
def conn(request: pytest.FixtureRequest, config: tasklib.Config) -> Iterator[Conn]:
    """A worker's connection; and one without its settings, as other poolers than PgBouncer might make it."""
    settings = {} if request.param == "default settings" else WORKER_SETTINGS
    with psycopg.connect(connection_string(config), autocommit=True, prepare_threshold=None) as made:
        for setting in settings.items():
            made.execute("select set_config(%s, %s, false)", setting)
        yield made


@pytest.fixture(params=["auto", "force_generic_plan"])
def plan_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def statements(config: tasklib.Config) -> WorkerStatements:
    return WorkerStatements(config)


@pytest.fixture(scope="module")
def leased(million: Statistics, config: tasklib.Config) -> list[tuple[uuid.UUID, int]]:
    """What the worker holds: (id, token)."""
    with psycopg.connect(config.database_url) as conn:
        return conn.execute("select id, fencing_token from tasklib.tasks where worker_id = %s", [WORKER]).fetchall()


@pytest.fixture(scope="module")
def claim_ids(million: Statistics, config: tasklib.Config) -> dict[str, list[int]]:
    with psycopg.connect(config.database_url) as conn:
        return dict(conn.execute("select worker_id, array_agg(id) from tasklib.claims group by worker_id").fetchall())


CLAIM_INDEXES = {"tasks_claim", "tasks_pkey", "tasks_due", "tasks_suspects"}  # the last two if it comes short


def completions(tasks: Sequence[tuple[uuid.UUID, int]]) -> list[str]:
    now = datetime.now(UTC).isoformat()
    what = {"state": "completed", "began": True, "outcome": "COMPLETED", "started_at": now, "finished_at": now}
    return [json.dumps({"id": str(id_), "token": token, "result": {"value": 1}, **what}) for id_, token in tasks]


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("limit", [1, CLAIM_SIZE, 1000])
@pytest.mark.parametrize("names", [NAMES, NAMES[:1]], ids=["all names", "one name"])
def test_a_claim_reads_what_it_takes(
    conn: Conn, plan_mode: str, statements: WorkerStatements, names: list[str], limit: int
) -> None:
    """In the order of its index, and no further than it has to: the backlog, the delayed and the done cost nothing."""
    floor = Place(0.0, 0) if limit == CLAIM_SIZE else None
    plan = explain(conn, plan_mode, statements.claim(WORKER, "mail", names, limit, floor=floor))
    assert plan.ways_to("tasks") == CLAIM_INDEXES, plan
    assert plan.sorted_rows <= limit, plan
    assert plan.pages_of("tasks") <= 20 * limit + 20, plan


@pytest.mark.usefixtures("known")
def test_a_claim_from_an_empty_queue_reads_next_to_nothing(
    conn: Conn, plan_mode: str, statements: WorkerStatements
) -> None:
    """It is what an idle worker does all day: also what is due, and a probe for each of the other queues."""
    claim = statements.claim(WORKER, "nothing_here", NAMES, 100, queues=["nothing_here"])
    plan = explain(conn, plan_mode, claim)
    assert plan.ways_to("tasks") == CLAIM_INDEXES, plan
    assert plan.pages <= 30, plan


@pytest.mark.usefixtures("known")
def test_a_claim_from_many_queues_reads_what_it_takes(conn: Conn, plan_mode: str, statements: WorkerStatements) -> None:
    """A probe for each queue, and then its first tasks in the order of the index."""
    claim = statements.claim_each(WORKER, "", NAMES, CLAIM_SIZE, share=5, served=None, apart_from=["default"])
    plan = explain(conn, plan_mode, claim)
    assert plan.ways_to("tasks") == {"tasks_claim", "tasks_pkey"}, plan
    assert plan.pages_of("tasks") <= 20 * CLAIM_SIZE + 20, plan


@pytest.mark.usefixtures("known")
def test_suspects_are_looked_for_in_an_index_of_their_own(
    conn: Conn, plan_mode: str, statements: WorkerStatements
) -> None:
    """A busy worker does that four times a second: whatever the backlog, it reads what it takes."""
    plan = explain(conn, plan_mode, statements.claim_suspects(WORKER, None, NAMES, 10))
    assert plan.ways_to("tasks") == {"tasks_suspects", "tasks_pkey"}, plan
    assert plan.pages <= 20 * 10 + 20, plan


@pytest.mark.usefixtures("known")
def test_the_ready_queues_are_found_by_a_probe_each(conn: Conn, plan_mode: str, statements: WorkerStatements) -> None:
    """Not by reading what is ready."""
    plan = explain(conn, plan_mode, statements.ready_queues())
    assert plan.ways_to("tasks") == {"tasks_claim"}, plan
    assert plan.pages <= 50, plan


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("count", [1, 100])
def test_a_start_goes_by_the_key(
    conn: Conn, plan_mode: str, statements: WorkerStatements, leased: list[tuple[uuid.UUID, int]], count: int
) -> None:
    """One lookup for each task."""
    started = [Started(id_, token, datetime.now(UTC)) for id_, token in leased[:count]]
    plan = explain(conn, plan_mode, statements.start(WORKER, started))
    assert plan.ways_to("tasks") - {PLACE} == {"tasks_pkey"}, plan
    assert plan.pages_of("tasks") <= 10 * count, plan


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("count", [1, 500])
def test_a_settle_goes_by_the_key(
    conn: Conn,
    plan_mode: str,
    statements: WorkerStatements,
    leased: list[tuple[uuid.UUID, int]],
    claim_ids: dict[str, list[int]],
    count: int,
) -> None:
    """One lookup for each task; a hash join would read the whole table for one of them."""
    plan = explain(conn, plan_mode, statements.settle(WORKER, completions(leased[:count]), claim_ids[WORKER]))
    assert plan.ways_to("tasks") == {"tasks_pkey"}, plan
    assert not plan.kinds & {"Hash Join", "Merge Join"}, plan
    assert plan.pages_of("tasks") <= 10 * count, plan
    assert plan.pages_of("workers") <= 4 * count, plan


@pytest.mark.usefixtures("known")
def test_looking_for_due_tasks_costs_a_handful_of_pages(
    conn: Conn, plan_mode: str, statements: WorkerStatements
) -> None:
    """Every worker does so once a second, whatever is delayed."""
    assert explain(conn, plan_mode, statements.promote()).pages <= 20
    assert explain(conn, plan_mode, statements.expire()).pages <= 20


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("verb", ["promote", "expire"])
def test_due_tasks_are_found_among_the_delayed(conn: Conn, statements: WorkerStatements, verb: str) -> None:
    """A hundred of them cost a hundred times what one does, not what the other half million would."""
    with conn.transaction(force_rollback=True):
        conn.execute(literal(MAKE_DUE[verb]))
        plan = explain(conn, "auto", getattr(statements, verb)())
    assert 100 <= plan.pages <= 5_000, plan


@pytest.mark.usefixtures("known")
def test_what_keeps_a_lease_goes_by_keys(
    conn: Conn, plan_mode: str, statements: WorkerStatements, leased: list[tuple[uuid.UUID, int]]
) -> None:
    """Renewing the worker's row; extending the locks of what it holds; asking what it holds, and what should stop."""
    assert explain(conn, plan_mode, statements.renew(WORKER, NAMES, stopping=False)).pages <= 20

    ids = [id_ for id_, _ in leased]
    for statement in (
        statements.extend(WORKER, ids),
        statements.held(WORKER),
        statements.asked_to_stop(WORKER, ids),
    ):
        plan = explain(conn, plan_mode, statement)
        assert plan.ways_to("tasks") - {PLACE} == {"tasks_pkey"}, plan
        assert plan.pages_of("tasks") <= 10 * len(ids), plan
        assert plan.pages_of("claims") <= 50, plan


@pytest.mark.usefixtures("known")
def test_recovering_reads_the_claims_of_the_dead(
    conn: Conn, plan_mode: str, statements: WorkerStatements, claim_ids: dict[str, list[int]]
) -> None:
    """Not the tasks: which of them are leased is known from the claims alone."""
    for statement in (statements.declare_dead(), statements.forget_dead(), statements.abandoned(("", -1))):
        plan = explain(conn, plan_mode, statement)
        assert plan.ways_to("tasks") == set(), plan
        assert plan.pages <= 200, plan

    claim_id = claim_ids[DEAD_WORKER][0]
    for recovery in (
        statements.abandoned_tasks(DEAD_WORKER, claim_id),
        statements.forget_claim(DEAD_WORKER, claim_id),
    ):
        plan = explain(conn, plan_mode, recovery)
        assert plan.ways_to("tasks") == {"tasks_pkey"}, plan
        assert plan.pages_of("tasks") <= 10 * CLAIM_SIZE, plan


@pytest.mark.usefixtures("known")
def test_a_death_that_was_seen_is_recovered_by_keys(conn: Conn, plan_mode: str, config: tasklib.Config) -> None:
    """The claims of one worker, and what stands in them; never the table."""
    statements = KeeperStatements(config)
    for statement in (statements.held(DEAD_WORKER), statements.forget_claims(DEAD_WORKER)):
        plan = explain(conn, plan_mode, statement)
        assert plan.ways_to("tasks") == {"tasks_pkey"}, plan
        assert plan.pages_of("tasks") <= 5_000, plan  # it holds five hundred
        assert plan.pages_of("claims") <= 50, plan
    for change in (statements.declare_dead(DEAD_WORKER), statements.renew_for([WORKER])):
        assert explain(conn, plan_mode, change).pages <= 20


@pytest.mark.usefixtures("known")
def test_the_census_looks_at_the_heads_of_the_queues(conn: Conn, plan_mode: str, statements: WorkerStatements) -> None:
    """Two hundred tasks of each."""
    plan = explain(conn, plan_mode, statements.waiting_names(["default", "mail"], NAMES[:2]))
    assert plan.ways_to("tasks") == {"tasks_claim"}, plan
    assert plan.pages <= 1_000, plan


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("queue", [None, "mail"])
def test_figures_of_the_queues_read_what_waits_and_no_more_than_is_asked_for(
    conn: Conn, plan_mode: str, config: tasklib.Config, queue: str | None
) -> None:
    """Three hundred thousand are ready and half a million delayed, and what is done is never looked at."""
    plan = explain(conn, plan_mode, StatisticsStatements(config).queues(queue, most=1000))
    assert plan.pages <= 8_000, plan  # rows that no vacuum has seen are looked at: a page each


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("queues", [None, ["mail", "nothing_here"]])
def test_the_backlog_costs_what_it_counts(
    conn: Conn, plan_mode: str, config: tasklib.Config, queues: list[str] | None
) -> None:
    """A scaler asks for it every few seconds, whatever there is to do."""
    plan = explain(conn, plan_mode, StatisticsStatements(config).backlog(queues, most=100))
    assert plan.pages <= 1_500, plan


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("queues", [None, ["default", "mail"]])
def test_what_waits_in_paused_queues_is_not_read_for_the_backlog(
    conn: Conn, plan_mode: str, config: tasklib.Config, queues: list[str] | None
) -> None:
    """Three hundred thousand are ready. What workers hold is looked up: two thousand tasks."""
    with conn.transaction(force_rollback=True):
        conn.execute("select tasklib.pause_queue('default'), tasklib.pause_queue('mail')")
        plan = explain(conn, plan_mode, StatisticsStatements(config).backlog(queues, most=1_000_000))
    assert plan.pages <= 20_000, plan


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("queues", [None, ["default", "mail"]])
def test_the_look_for_a_standstill_is_a_few_probes(
    conn: Conn, plan_mode: str, statements: WorkerStatements, queues: list[str] | None
) -> None:
    """Also if the first queue is paused: its tasks are not walked through."""
    with conn.transaction(force_rollback=True):
        conn.execute("select tasklib.pause_queue('default')")
        plan = explain(conn, plan_mode, statements.lockable(queues, 10.0, [uuid.UUID(int=1)]))
    assert plan.pages <= 100, plan


@pytest.mark.usefixtures("known")
def test_figures_of_the_cluster_cost_next_to_nothing(conn: Conn, plan_mode: str, config: tasklib.Config) -> None:
    """The longest due task is at the head of its index; the rest are rows of small tables. Only the keeper asks."""
    with conn.transaction():
        for name, value in WORKER_SETTINGS.items():
            if name != "default_transaction_isolation":
                conn.execute("select set_config(%s, %s, true)", [name, value])
        plan = explain(conn, plan_mode, StatisticsStatements(config).cluster())
    assert plan.ways_to("tasks") == {"tasks_due"}, plan
    assert plan.pages_of("tasks") <= 10, plan


@pytest.mark.usefixtures("known")
def test_what_the_dead_had_written_is_found_by_keys(
    conn: Conn,
    plan_mode: str,
    config: tasklib.Config,
    statements: WorkerStatements,
    leased: list[tuple[uuid.UUID, int]],
) -> None:
    """Attempts are in two tables: one lookup in each."""
    ids = [id_ for id_, _ in leased[:100]]
    for statement in (KeeperStatements(config).written(ids, WORKER), statements.written(WORKER, ids)):
        plan = explain(conn, plan_mode, statement)
        assert plan.ways_to("tasks") == {"tasks_pkey"}, plan
        assert plan.pages_of("tasks") <= 10 * len(ids), plan
        assert plan.pages_of("attempts") <= 10 * len(ids), plan


@pytest.fixture
def small(new_database: NewDatabase) -> Iterator[tuple[tasklib.Config, Conn]]:
    """A database of one's own, that nobody analyzes."""
    config = tasklib.Config(new_database())
    migrate.migrate(config)
    with psycopg.connect(config.database_url, autocommit=True) as conn:
        for table in TABLES:
            conn.execute(literal(f"alter table {table} set (autovacuum_enabled = off)"))
        yield config, conn


def counts_of_tasks(conn: Conn, columns: str) -> int:
    """When the other backends have gone: only then are their counts complete."""
    others = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    wait_until(lambda: conn.execute(others).fetchone() == (0,), "the session's backend to go")
    row = conn.execute(literal(f"select {columns} from pg_stat_user_tables where relname = 'tasks'")).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("rows", [0, 100], ids=["empty", "small and analyzed"])
def test_plans_from_when_the_table_was_small_do_no_harm(small: tuple[tasklib.Config, Conn], rows: int) -> None:
    """A worker that has long waited for work has generic plans; they are kept until the next ANALYZE."""
    config, conn = small
    session = Session(config, "test")
    statements = WorkerStatements(config)
    if rows:
        conn.execute(
            "insert into tasklib.tasks (name, queue) select 'name_0', 'old' from generate_series(1, %s)", [rows]
        )
        conn.execute("analyze")
    for _ in range(12):  # psycopg prepares the sixth, PostgreSQL makes a generic plan for the sixth of those
        claim_start_settle(session, statements)
    conn.execute("insert into tasklib.tasks (name) select 'name_0' from generate_series(1, 30000)")
    for _ in range(5):
        assert claim_start_settle(session, statements) == 100
    session.close()

    # By the claim's search and its update, by the start, the settle and each of the six others.
    assert counts_of_tasks(conn, "seq_tup_read + idx_tup_fetch") <= 5 * 100 * 15


def claim_start_settle(session: Session, statements: WorkerStatements) -> int:
    """Everything that a worker and a reaper do to leased tasks, once. How many tasks were completed."""
    claimed = session.run(statements.claim(WORKER, "default", NAMES, 100)).tasks
    claim_id = claimed[0].claim_id if claimed else 1
    held = [(each.held.id, each.held.fencing_token) for each in claimed] or [(uuid.uuid4(), 1)]
    ids = [id_ for id_, _ in held]
    session.run(statements.ready_queues())
    session.run(statements.waiting_names(["default"], NAMES))
    session.run(statements.start(WORKER, [Started(*each, datetime.now(UTC)) for each in held]))
    session.run(statements.extend(WORKER, ids))
    session.run(statements.asked_to_stop(WORKER, ids))
    session.run(statements.held(WORKER))
    session.run(statements.abandoned_tasks(WORKER, claim_id))
    session.run(statements.forget_claim(WORKER, claim_id))
    session.run(statements.promote())
    session.run(statements.expire())
    return len(session.run(statements.settle(WORKER, completions(held), [claim_id])))


def test_a_start_and_a_success_write_to_no_index(small: tuple[tasklib.Config, Conn]) -> None:
    """Where its page has room, the row's new version stays on it (HOT): no indexed column changes."""
    config, conn = small
    statements = WorkerStatements(config)
    session = Session(config, "test")
    conn.execute("insert into tasklib.tasks (name) select 'name_0' from generate_series(1, 5)")
    claimed = session.run(statements.claim(WORKER, "default", NAMES, 5)).tasks
    held = [(each.held.id, each.held.fencing_token) for each in claimed]
    assert len(session.run(statements.start(WORKER, [Started(*each, datetime.now(UTC)) for each in held[:2]]))) == 2
    assert len(session.run(statements.settle(WORKER, completions(held)))) == 5
    session.close()

    assert counts_of_tasks(conn, "n_tup_upd") == 5 + 2 + 5
    assert counts_of_tasks(conn, "n_tup_hot_upd") == 2 + 5
