-- The queue: one row is one task, from submit to its final state.
--
-- The CHECKs hold the invariants that every reader relies on, whoever writes: a raw
-- INSERT from psql is bound by them like the library. Names and payloads are domains,
-- because a domain is checked when a value enters the column, while a table CHECK is
-- evaluated again at every update of the row (a task is updated twice in its life).

-- Lengths are checked apart from the pattern: a bounded repeat is slow in PostgreSQL's
-- regular expressions, '{0,199}' 15 us a match and '{1,48}' 5 us, against 0.4 us for '*'.
create domain tasklib.task_name as text
    constraint task_name_valid check (value ~ '^[A-Za-z_][A-Za-z0-9_.:-]*$' and octet_length(value) <= 200);

-- 48, not 63: "task_queue_" is put before it to name a channel, and a channel of
-- 64 bytes makes pg_notify raise inside the user's insert.
create domain tasklib.queue_name as text
    constraint queue_name_valid check (value ~ '^[a-z0-9_.-]+$' and octet_length(value) <= 48);

create domain tasklib.task_key as text
    constraint task_key_valid check (char_length(value) between 1 and 255);

create domain tasklib.task_tags as jsonb
    constraint task_tags_object check (jsonb_typeof(value) = 'object')
    constraint task_tags_size check (pg_column_size(value) <= 65536)
    constraint task_tags_keys check (
        not jsonb_path_exists(value, '$.keyvalue() ? (!(@.key like_regex "^[A-Za-z0-9_.-]+$"))'));

-- What a calendar has: an infinite time, or one beyond the year 9999, could be stored but not be read by Python.
create domain tasklib.moment as timestamptz
    constraint moment_in_calendar check (value between '0001-01-02 00:00:00+00' and '9999-12-30 00:00:00+00');

-- The wall for every client. Python refuses earlier (256 KiB of JSON text by default);
-- JSON text grows up to six times in jsonb's own format, so the wall must be far above.
create domain tasklib.task_args as jsonb
    constraint task_args_shape check (jsonb_typeof(value) in ('object', 'array'))
    constraint task_args_size check (pg_column_size(value) <= 8388608);

create domain tasklib.task_kwargs as jsonb
    constraint task_kwargs_object check (jsonb_typeof(value) = 'object')
    constraint task_kwargs_size check (pg_column_size(value) <= 8388608);

-- Time-ordered ids keep the primary key growing at one end: 30k against 22k tasks/s in
-- the raw claim-and-finish loop. The 12 bits after the milliseconds hold its fraction.
create function tasklib.uuid7() returns uuid
    language sql volatile parallel safe
    set search_path = pg_catalog, pg_temp
as $$
    select encode(
        overlay(
            overlay(uuid_send(gen_random_uuid()) placing substring(int8send(micros / 1000) from 3) from 1 for 6)
            placing substring(int4send((28672 + (micros % 1000) * 4096 / 1000)::integer) from 3) from 7 for 2),
        'hex')::uuid
    from (select (extract(epoch from clock_timestamp()) * 1000000)::bigint) as clock (micros)
$$;

-- What an idempotency key stands for. jsonb has one text per value (keys sorted, once),
-- so equal payloads have equal digests whoever wrote them. Declared immutable because
-- it is: convert_to is only marked stable for the sake of custom encodings.
-- Part of the table's definition: to change it is a migration, not a new function file.
create function tasklib.payload_digest(name text, args jsonb, kwargs jsonb) returns bytea
    language sql immutable parallel safe
    set search_path = pg_catalog, pg_temp
as $$
    select sha256(convert_to(jsonb_build_array(name, args, kwargs)::text, 'UTF8'))
$$;

create table tasklib.tasks (
    -- Fixed width and never null: their offsets are known without looking at the row.
    id              uuid                  not null default tasklib.uuid7() primary key,
    created_at      tasklib.moment        not null default clock_timestamp(),
    scheduled_at    tasklib.moment        not null default clock_timestamp(),
    fencing_token   bigint                not null default 0,
    priority        integer               not null default 0,
    retry_count     integer               not null default 0,
    max_retries     integer               not null default 3,
    attempt         integer               not null default 0,
    crash_count     integer               not null default 0,
    pending_parents integer               not null default 0,
    ready           boolean               not null,
    suspect         boolean               not null default false,
    store_result    boolean               not null default true,
    on_crash        text                  not null default 'retry',
    state           text                  not null default 'pending',
    queue           tasklib.queue_name    not null default 'default',
    name            tasklib.task_name     not null,
    args            tasklib.task_args     not null default '{}',
    kwargs          tasklib.task_kwargs   not null default '{}',
    tags            tasklib.task_tags     not null default '{}',
    -- Absent until something happens; a null costs a bit.
    started_at      timestamptz,
    completed_at    timestamptz,
    next_retry_at   tasklib.moment,
    expires_at      tasklib.moment,
    timeout_seconds double precision,
    worker_id       text,
    claimed_at      timestamptz,
    locked_until    timestamptz,
    result          jsonb,
    error           text,
    error_code      text,
    progress        jsonb,
    trace_headers   jsonb,
    serial_key      tasklib.task_key,
    idempotency_key tasklib.task_key,
    payload_digest  bytea generated always as (
        case when idempotency_key is not null then tasklib.payload_digest(name, args, kwargs) end) stored,
    resolved_at     timestamptz,
    resolved_by     text,
    resolution_note text,
    parent_id       uuid,
    workflow_id     uuid,
    step_name       text,

    constraint tasks_state_known check (
        state in ('pending', 'claimed', 'running', 'completed', 'failed', 'cancelled', 'expired', 'buried')),
    constraint tasks_ready_waits check (
        not ready or pending_parents = 0 and (state = 'pending' or state = 'failed' and next_retry_at is not null)),
    constraint tasks_lease_whole check (
        num_nonnulls(worker_id, claimed_at, locked_until)
            = case when state in ('claimed', 'running') then 3 else 0 end),
    constraint tasks_lease_numbered check (state not in ('claimed', 'running') or fencing_token > 0),
    constraint tasks_completed_at_final check (
        (completed_at is not null)
            = (state in ('completed', 'cancelled', 'expired', 'buried') or (state = 'failed' and next_retry_at is null))),
    constraint tasks_retry_only_failed check (next_retry_at is null or state = 'failed'),
    -- Every task that did not succeed says why in a word; the index below stands on it.
    constraint tasks_error_code_told check (
        error_code is not null or state not in ('failed', 'cancelled', 'expired', 'buried')),
    constraint tasks_counts_whole check (
        least(retry_count, max_retries, attempt, crash_count, pending_parents) >= 0 and fencing_token >= 0),
    constraint tasks_timeout_positive check (timeout_seconds > 0 and timeout_seconds < 'infinity'),
    constraint tasks_on_crash_known check (on_crash in ('retry', 'fail')),
    constraint tasks_resolution_whole check (
        num_nonnulls(resolved_at, resolved_by) in (0, 2) and (resolution_note is null or resolved_at is not null)
            and (resolved_at is null or state in ('failed', 'buried') and completed_at is not null))
);

comment on table tasklib.tasks is 'one row is one task; higher priority runs first';
comment on column tasklib.tasks.ready is 'may be claimed as far as time and parents go';
comment on column tasklib.tasks.fencing_token is 'grows by one with each claim, never reset; guards every write after a claim';
comment on column tasklib.tasks.attempt is 'executions that began';
comment on column tasklib.tasks.priority is 'higher runs first; usual range -10 to 100';

-- One key, one task, for as long as the row is kept.
create unique index tasks_idempotency_key on tasklib.tasks (idempotency_key) where idempotency_key is not null;

-- The order of claims. Delayed, retrying and finished tasks are not in it, so it is as
-- small as the backlog, however large the table grows.
create index tasks_claim on tasklib.tasks (queue, priority desc, created_at, id) where ready;

-- What went wrong, newest first. A task that succeeds never enters it; an index on
-- `state` would be written at every step of every task.
create index tasks_unsuccessful on tasklib.tasks (id) where error_code is not null;
