-- Statistics for people, and for the gauges that the elected keeper exports for all daemons.


-- One row for each queue, with the columns in the order of tasklib.statistics.QueueStatistics.
-- name: queues
select queue, ready, scheduled, retrying, claimed, running, oldest_ready_age_seconds, newest_ready_age_seconds
from tasklib.queue_statistics($1::text, $2::bigint);


-- One row for each task function, with the columns in the order of tasklib.statistics.TaskStatistics.
-- name: tasks
select name, attempts, completed, failed, timed_out, cancelled, snoozed, interrupted, crashed, retried, per_second,
       average_seconds, p50_seconds, p95_seconds, p99_seconds, average_wait_seconds, p50_wait_seconds, p95_wait_seconds,
       p99_wait_seconds
from tasklib.task_statistics($1::double precision * interval '1 second', $2::text);


-- How much work there is, for a scaler.
-- name: backlog
select tasklib.backlog($1::text[], $2::bigint);


-- Figures of the whole cluster. Every role may read the counts of connections, but a role without pg_read_all_stats does not see
-- transactions of other roles. Prepared transactions hold back vacuum like open ones. Transactions of other databases do not, nor
-- does another vacuum. A task of a paused queue is not late: workers that could promote it may all have been taken away. Such tasks
-- are passed over, up to a thousand of them.
-- name: cluster
select (select n_tup_ins from pg_stat_user_tables where relid = 'tasklib.tasks'::regclass),
       (select extract(epoch from clock_timestamp() - due_at)::double precision
          from (select due_at, queue from tasklib.tasks
                 where due_at <= (select clock_timestamp()) and not ready and pending_parents = 0
                 order by due_at limit 1000) as late
         where queue not in (select limits.queue from tasklib.queue_limits as limits where limits.is_paused)
         order by due_at limit 1),
       workers.alive, workers.stopping, workers.dead, workers.slots,
       (select extract(epoch from clock_timestamp() - min(began))::double precision
          from (select xact_start from pg_stat_activity
                 where datname = current_database() and backend_type = 'client backend'
                   and pid not in (select pid from pg_stat_progress_vacuum)
                union all
                select prepared from pg_prepared_xacts where database = current_database()) as transactions (began)),
       pg_notification_queue_usage(),
       (select sum(numbackends)::bigint from pg_stat_database),
       current_setting('max_connections')::bigint - current_setting('superuser_reserved_connections')::bigint
           - coalesce(current_setting('reserved_connections', true), '0')::bigint
from (select count(*) filter (where is_alive and not stopping) as alive,
             count(*) filter (where is_alive and stopping) as stopping,
             count(*) filter (where not is_alive) as dead,
             coalesce(sum(concurrency) filter (where is_alive and not stopping), 0) as slots
        from (select stopping, concurrency, died_at is null and lease_until > clock_timestamp() as is_alive
                from tasklib.workers) as each) as workers;


-- One row for each queue with a policy, and '*' for the cap over all queues, with the columns in the order of
-- tasklib.statistics.PolicyReading. No task is read. Permits of a worker that is dead, or that has no row, are forgotten ones: nobody
-- will give them back. The room of a rate is reckoned as tasklib.grant_starts does, without a lock and without taking any.
-- name: policies
select limits.queue, limits.is_paused, limits.cap, held.permits, held.wanted, held.forgotten, limits.breaker,
       case when room.starts is not null then greatest(room.starts, 0) end::bigint,
       case when room.starts > 0 then 0
            when room.starts <= 0 then greatest(
                case when room.used >= limits.rate_limit then room.first_seconds + limits.rate_seconds end,
                room.owed_seconds - (limits.rate_burst - 1) * room.step_seconds, 0.001)
       end::double precision
from tasklib.queue_limits as limits
cross join lateral (
    select coalesce(sum(permit.permits), 0)::bigint, coalesce(sum(permit.wanted - permit.permits), 0)::bigint,
           coalesce(sum(permit.permits) filter (where not exists (
               select from tasklib.workers as worker where worker.worker_id = permit.worker_id and worker.died_at is null)), 0)::bigint
      from tasklib.permits as permit where permit.queue = limits.queue) as held (permits, wanted, forgotten)
left join lateral (
    select granted.used, granted.first_seconds, rate.owed_seconds, rate.step_seconds,
           least(limits.rate_limit - granted.used,
                 floor(limits.rate_burst - rate.owed_seconds / rate.step_seconds + 1e-6)) as starts
      from (select coalesce(stored.at, '{}') as at, coalesce(stored.taken, '{}') as taken, clock.now,
                   greatest(coalesce(extract(epoch from stored.full_at - clock.now), 0), 0)::double precision as owed_seconds,
                   limits.rate_seconds / limits.rate_limit as step_seconds
              from (values (clock_timestamp())) as clock (now)
              left join tasklib.rates as stored on stored.queue = limits.queue) as rate
     cross join lateral (
         select coalesce(sum(entry.taken), 0) as used,
                extract(epoch from min(entry.at) - rate.now)::double precision as first_seconds
           from unnest(rate.at, rate.taken) as entry (at, taken)
          where entry.at > rate.now - limits.rate_seconds * interval '1 second') as granted
) as room on limits.rate_limit is not null
order by limits.queue;


-- The size of each table, and its live and dead rows.
-- name: tables
select relname, pg_total_relation_size(relid), n_live_tup, n_dead_tup
from pg_stat_user_tables
where schemaname = (select nspname from pg_class join pg_namespace on pg_namespace.oid = relnamespace
                     where pg_class.oid = 'tasklib.tasks'::regclass);
