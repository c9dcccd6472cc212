-- Statements about statistics by the minute.


-- Adds counts to the current minute. In the order of the key, so that two writers wait for each other and do not deadlock.
-- name: note
insert into tasklib.task_rollups as rollup (
    minute, name, queue, completed, failed, timed_out, cancelled, snoozed, interrupted, crashed, retried, seconds, waited,
    durations, waits)
select date_trunc('minute', clock_timestamp()), name, queue, coalesce(completed, 0), coalesce(failed, 0),
       coalesce(timed_out, 0), coalesce(cancelled, 0), coalesce(snoozed, 0), coalesce(interrupted, 0),
       coalesce(crashed, 0), coalesce(retried, 0), coalesce(seconds, 0), coalesce(waited, 0), durations, waits
  from jsonb_to_recordset($1::jsonb) as each (
    name text, queue text, completed bigint, failed bigint, timed_out bigint, cancelled bigint, snoozed bigint,
    interrupted bigint, crashed bigint, retried bigint, seconds double precision, waited double precision,
    durations bigint[], waits bigint[])
 order by name, queue
on conflict (minute, name, queue) do update
    set completed = rollup.completed + excluded.completed, failed = rollup.failed + excluded.failed,
        timed_out = rollup.timed_out + excluded.timed_out, cancelled = rollup.cancelled + excluded.cancelled,
        snoozed = rollup.snoozed + excluded.snoozed, interrupted = rollup.interrupted + excluded.interrupted,
        crashed = rollup.crashed + excluded.crashed, retried = rollup.retried + excluded.retried,
        seconds = rollup.seconds + excluded.seconds, waited = rollup.waited + excluded.waited,
        durations = case when excluded.durations is null then rollup.durations else array(
            select coalesce(old, 0) + new from unnest(rollup.durations, excluded.durations) with ordinality
                as pair (old, new, place) order by place) end,
        waits = case when excluded.waits is null then rollup.waits else array(
            select coalesce(old, 0) + new from unnest(rollup.waits, excluded.waits) with ordinality
                as pair (old, new, place) order by place) end;


-- Deletes a batch, the oldest rows first. Answers how many were deleted.
-- name: prune
with gone as (
    delete from tasklib.task_rollups
     where (minute, name, queue) in (
         select minute, name, queue from tasklib.task_rollups
          where minute < (select clock_timestamp() - $1::double precision * interval '1 second')
          order by minute limit (select $2::integer))
    returning 1
)
select count(*) from gone;
