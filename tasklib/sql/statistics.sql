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
-- does another vacuum.
-- name: cluster
select (select n_tup_ins from pg_stat_user_tables where relid = 'tasklib.tasks'::regclass),
       (select extract(epoch from clock_timestamp() - due_at)::double precision from tasklib.tasks
         where due_at <= (select clock_timestamp()) and not ready and pending_parents = 0
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


-- The size of each table, and its live and dead rows.
-- name: tables
select relname, pg_total_relation_size(relid), n_live_tup, n_dead_tup
from pg_stat_user_tables
where schemaname = (select nspname from pg_class join pg_namespace on pg_namespace.oid = relnamespace
                     where pg_class.oid = 'tasklib.tasks'::regclass);
