-- Statistics of the attempts that ended within a window, by task name: how many, how many of each outcome, how many a second,
-- how long they took, and how long first attempts had waited. Of one name, or of all.
--
--     select * from tasklib.task_statistics(interval '15 minutes');
--
-- They are made from counts by the minute, which workers write every ten seconds. So the window begins with the full minute
-- before, and attempts of the last seconds may be missing. Percentiles are as exact as the buckets.
create or replace function tasklib.task_statistics(time_window interval default '1 hour', task_name text default null)
    returns table (
        name text, attempts bigint, completed bigint, failed bigint, timed_out bigint, cancelled bigint, snoozed bigint,
        interrupted bigint, crashed bigint, retried bigint, per_second double precision,
        average_seconds double precision, p50_seconds double precision, p95_seconds double precision,
        p99_seconds double precision, average_wait_seconds double precision, p50_wait_seconds double precision,
        p95_wait_seconds double precision, p99_wait_seconds double precision)
    language sql stable security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set jit = off
as $$
    with bounds as (
        select date_trunc('minute', clock_timestamp() - $1) as since, clock_timestamp() as now
    ), recent as materialized (
        select rollup.*
          from tasklib.task_rollups as rollup
         where rollup.minute >= (select since from bounds) and ($2 is null or rollup.name = $2)
    ), counts as (
        select recent.name, sum(recent.completed) as completed, sum(recent.failed) as failed,
               sum(recent.timed_out) as timed_out, sum(recent.cancelled) as cancelled, sum(recent.snoozed) as snoozed,
               sum(recent.interrupted) as interrupted, sum(recent.crashed) as crashed, sum(recent.retried) as retried,
               sum(recent.seconds) as seconds, sum(recent.waited) as waited
          from recent
         group by recent.name
    ), buckets as (
        select recent.name, kind, place, sum(tasks) as tasks
          from recent
         cross join lateral (
             select 'duration', * from unnest(recent.durations) with ordinality
             union all
             select 'wait', * from unnest(recent.waits) with ordinality) as found (kind, tasks, place)
         group by 1, 2, 3
    ), sums as (
        select buckets.name, kind, place, tasks,
               sum(tasks) over (partition by buckets.name, kind order by place) as up_to,
               sum(tasks) over (partition by buckets.name, kind) as total
          from buckets
    ), percentiles as (
        -- Values are taken to be spread evenly within a bucket. Values beyond the last bound count as that bound.
        select sums.name, kind, share,
               max(sums.total) as total,
               min(coalesce(lowest[place], 0)
                   + (coalesce(lowest[place + 1], lowest[place]) - coalesce(lowest[place], 0))
                     * (share * total - (up_to - tasks)) / tasks) as seconds
          from sums
         cross join unnest(array[0.5, 0.95, 0.99]) as wanted (share)
         cross join (select array[
             0, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200
             ]::double precision[]) as known (lowest)
         where tasks > 0 and share * total <= up_to and share * total > up_to - tasks
         group by 1, 2, 3
    )
    select counts.name,
           (completed + failed + timed_out + cancelled + snoozed + interrupted + crashed)::bigint,
           completed::bigint, failed::bigint, timed_out::bigint, cancelled::bigint, snoozed::bigint,
           interrupted::bigint, crashed::bigint, retried::bigint,
           (completed + failed + timed_out + cancelled + snoozed + interrupted + crashed)::double precision
               / extract(epoch from (select now - since from bounds))::double precision,
           seconds / nullif(completed + failed + timed_out + cancelled + snoozed + interrupted + crashed, 0)::double precision,
           duration.p50, duration.p95, duration.p99,
           waited / nullif(wait.total, 0)::double precision, wait.p50, wait.p95, wait.p99
      from counts
      left join lateral (
          select max(each.seconds) filter (where share = 0.5) as p50, max(each.seconds) filter (where share = 0.95) as p95,
                 max(each.seconds) filter (where share = 0.99) as p99
            from percentiles as each where each.name = counts.name and kind = 'duration') as duration on true
      left join lateral (
          select max(each.total) as total, max(each.seconds) filter (where share = 0.5) as p50,
                 max(each.seconds) filter (where share = 0.95) as p95, max(each.seconds) filter (where share = 0.99) as p99
            from percentiles as each where each.name = counts.name and kind = 'wait') as wait on true
     order by counts.name
$$;
revoke all on function tasklib.task_statistics(interval, text) from public;
