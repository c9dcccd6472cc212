-- What became of tasks, by the minute: throughput and latency over a window, without a look at the tasks themselves. Workers
-- count, and add to these rows every few seconds: an index on completed_at would be written for every task instead.

-- One row is one minute of one task function in one queue. A bucket counts attempts that took so long; the bounds are
-- those of tasklib.task_statistics.
create table tasklib.task_rollups (
    minute      timestamptz      not null,
    name        text             not null,
    queue       text             not null,
    completed   bigint           not null default 0,
    failed      bigint           not null default 0,
    timed_out   bigint           not null default 0,
    cancelled   bigint           not null default 0,
    snoozed     bigint           not null default 0,
    interrupted bigint           not null default 0,
    crashed     bigint           not null default 0,
    retried     bigint           not null default 0,
    seconds     double precision not null default 0,
    waited      double precision not null default 0,
    durations   bigint[],
    waits       bigint[],
    primary key (minute, name, queue)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

comment on table tasklib.task_rollups is 'one row is what became of the attempts of one task function, in one queue, in one minute';
comment on column tasklib.task_rollups.retried is 'of the failed and timed out ones, those that are tried again';
comment on column tasklib.task_rollups.seconds is 'that attempts took, in all';
comment on column tasklib.task_rollups.waited is 'seconds that first attempts had waited, in all';
