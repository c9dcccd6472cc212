-- What the daemon needs beside the queue: who does what is done once for all of them, and how its workers were.

-- One row is one group of duties, and who does them until when. A new holder is a new term.
create table tasklib.elections (
    name   text        not null primary key,
    holder text        not null,
    term   bigint      not null,
    until  timestamptz not null,
    constraint elections_term_counted check (term > 0)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

comment on table tasklib.elections is 'who does the duties of the cluster; judged by the database clock';

-- One row is one worker at one moment: a time series for charts. Kept for days, so ids and times grow together.
create table tasklib.worker_states (
    id                    bigint           not null generated always as identity primary key,
    snapshot_at           timestamptz      not null default clock_timestamp(),
    worker_started_at     timestamptz,
    worker_id             text             not null,
    hostname              text             not null,
    pid                   integer          not null,
    processes             integer          not null,
    tasks_running         integer          not null,
    tasks_claimed         integer          not null,
    memory_usage_mb       double precision,
    memory_percent        double precision,
    cpu_percent           double precision,
    max_claim_batch       integer,
    max_claim_per_worker  integer,
    cluster_wide_cap      integer,
    queues                text[],
    queue_priorities      jsonb,
    queue_max_concurrency jsonb,
    recovery_config       jsonb            not null
);

comment on table tasklib.worker_states is 'one row is one worker at one moment, as its daemon saw it';
comment on column tasklib.worker_states.queues is 'null: every queue';
comment on column tasklib.worker_states.tasks_claimed is 'held by the worker and not executing';
comment on column tasklib.worker_states.max_claim_per_worker is 'null: as many as fit the pace of its tasks';

create index worker_states_time on tasklib.worker_states (snapshot_at);
