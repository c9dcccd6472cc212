-- What running tasks needs: when time changes a task, who works, who holds what, and what became of each attempt.

-- The next moment at which time alone changes a waiting task: its promotion, or its expiry. Null otherwise, so that
-- one small index serves the promoter and the expirer, and a finish that succeeds does not touch it.
alter table tasklib.tasks
    add column due_at tasklib.moment,
    add column cancel_asked_at timestamptz,
    add column strikes integer not null default 0;

comment on column tasklib.tasks.due_at is 'when time alone will change the task: its promotion, or its expiry';
comment on column tasklib.tasks.cancel_asked_at is 'when a cancel was asked for while a worker held the task';
comment on column tasklib.tasks.strikes is 'deaths of its worker while it ran alone, and times it was held too long';

update tasklib.tasks
   set due_at = least(case when not ready and pending_parents = 0 then coalesce(next_retry_at, scheduled_at) end, expires_at)
 where (state = 'pending' or next_retry_at is not null) and (not ready or expires_at is not null);

alter table tasklib.tasks
    -- A committed task is never lost: while it waits it is ready, or has parents, or has a time at which it is looked at.
    add constraint tasks_waits_for_something check (
        case when state = 'pending' or next_retry_at is not null
            then due_at is not null or expires_at is null and (ready or pending_parents > 0)
            else due_at is null
        end),
    add constraint tasks_strikes_whole check (strikes >= 0);

create index tasks_due on tasklib.tasks (due_at) where due_at is not null;

create table tasklib.workers (
    worker_id    text        not null primary key,
    name         text        not null,
    hostname     text        not null,
    pid          integer     not null,
    process_name text        not null,
    queues       text[],
    task_names   text[]      not null,
    concurrency  integer     not null,
    started_at   timestamptz not null default clock_timestamp(),
    renewed_at   timestamptz not null default clock_timestamp(),
    lease_until  timestamptz not null,
    stopping     boolean     not null default false,
    died_at      timestamptz
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

comment on table tasklib.workers is 'one row is one live process and its lease; with died_at, one whose tasks are being recovered';
comment on column tasklib.workers.queues is 'null: every queue';

-- One row is one claim statement of one worker: what it took. It goes when all of them are settled. From here the
-- reaper knows what a dead worker held: an index on the leased rows of tasks would be written for every task, tempt the
-- planner, and keep every finish from being a HOT update (where the page has room, it can be one).
create table tasklib.claims (
    worker_id    text        not null,
    id           bigint      not null generated always as identity,
    locked_until timestamptz not null,
    task_ids     uuid[]      not null,
    primary key (worker_id, id)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

insert into tasklib.claims (worker_id, locked_until, task_ids)
select worker_id, max(locked_until), array_agg(id) from tasklib.tasks where worker_id is not null group by worker_id;

-- No foreign key: a lookup and a row lock for every attempt, to guard against what a trigger on delete sees to.
create table tasklib.task_attempts (
    task_id       uuid        not null,
    fencing_token bigint      not null,
    started_at    timestamptz not null,
    finished_at   timestamptz not null,
    attempt       integer     not null,
    worker_pid    integer,
    will_retry    boolean     not null,
    outcome       text        not null,
    worker_id     text        not null,
    worker_hostname     text,
    worker_process_name text,
    error_code    text,
    error_message text,
    failed_reason text,
    primary key (task_id, attempt),
    constraint task_attempts_outcome_known check (outcome in (
        'COMPLETED', 'FAILED', 'WORKER_FAILURE', 'TIMED_OUT', 'CANCELLED', 'SNOOZED', 'INTERRUPTED', 'LEASE_LOST'))
);

comment on table tasklib.task_attempts is 'one row is one execution that began; written with the change of the task, never changed';

-- Who says that a task is being looked after, and when it last said so.
create view tasklib.heartbeats as
select task.id as task_id, worker.worker_id as sender_id,
       case task.state when 'running' then 'runner' else 'claimer' end as role,
       worker.renewed_at as sent_at, worker.hostname, worker.pid
from tasklib.workers as worker
join tasklib.claims as claim using (worker_id)
cross join unnest(claim.task_ids) as held (task_id)
join tasklib.tasks as task on task.id = held.task_id and task.worker_id = worker.worker_id;
