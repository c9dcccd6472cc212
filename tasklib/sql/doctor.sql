-- Queries of the doctor. None of them writes, and none but `unnoted`, which is optional, reads all tasks. Each is sent in a
-- transaction of its own, with limits on its time and on its waits for locks.


-- name: server
select current_setting('server_version'), current_setting('server_version_num')::integer, quote_ident(current_user),
       quote_ident(current_database()), pg_is_in_recovery(), current_setting('default_transaction_read_only')::boolean,
       current_setting('server_encoding');


-- name: rights_on_schema
select to_regnamespace($1) is not null, coalesce(has_schema_privilege(to_regnamespace($1), 'usage'), false);


-- Those of these rights on tables (two arrays) that the role does not have.
-- name: missing_table_rights
select needed.relation, needed.privilege
  from unnest($2::text[], $3::text[]) as needed (relation, privilege)
  join pg_class as class on class.relname = needed.relation
  join pg_namespace as namespace on namespace.oid = class.relnamespace
 where namespace.nspname = $1 and not has_table_privilege(class.oid, needed.privilege)
 order by 1, 2;


-- name: missing_function_rights
select proc.proname::text, proc.oid::regprocedure::text
  from pg_proc as proc join pg_namespace as namespace on namespace.oid = proc.pronamespace
 where namespace.nspname = $1 and proc.proname = any($2::text[]) and not has_function_privilege(proc.oid, 'execute')
 order by 2;


-- Parts that exist and have no effect: triggers that are off (an interrupted restore with `--disable-triggers` leaves them so),
-- and indexes that a failed build has left.
-- name: without_effect
select 'trigger', class.relname::text, trigger.tgname::text
  from pg_trigger as trigger join pg_class as class on class.oid = trigger.tgrelid
  join pg_namespace as namespace on namespace.oid = class.relnamespace
 where namespace.nspname = $1 and trigger.tgenabled not in ('O', 'A') and not trigger.tgisinternal
union all
select 'index', class.relname::text, built.relname::text
  from pg_index as index join pg_class as class on class.oid = index.indrelid
  join pg_class as built on built.oid = index.indexrelid
  join pg_namespace as namespace on namespace.oid = class.relnamespace
 where namespace.nspname = $1 and not index.indisvalid
 order by 1, 2, 3;


-- name: clock
select extract(epoch from clock_timestamp())::double precision;


-- By how much the newest renewal lies in the future: the clock was set back, or this is another server.
-- name: clock_back
select coalesce(extract(epoch from max(renewed_at) - clock_timestamp()), 0)::double precision from tasklib.workers;


-- name: settings
select name, setting from pg_settings where name = any($1::text[]);


-- Where a session's own value comes from: the server, a role or database, or the address of the connection.
-- name: source
select source from pg_settings where name = $1;


-- Roles, databases, and roles in a database that commit without waiting for the disk, apart from the server's own setting.
-- name: asynchronous_roles
select coalesce(quote_ident(role.rolname), ''), coalesce(quote_ident(database.datname), '')
  from pg_db_role_setting as given
  left join pg_roles as role on role.oid = given.setrole
  left join pg_database as database on database.oid = given.setdatabase
 where (given.setdatabase = 0 or database.datname = current_database())
   and exists (select from unnest(given.setconfig) as line
                where lower(line) in ('synchronous_commit=off', 'synchronous_commit=false', 'synchronous_commit=no',
                                      'synchronous_commit=0'))
 order by 1, 2;


-- Settings with these names of roles, databases, or roles in a database: name, value, role, database.
-- name: role_settings
select split_part(line, '=', 1), substr(line, strpos(line, '=') + 1), coalesce(quote_ident(role.rolname), ''),
       coalesce(quote_ident(database.datname), '')
  from pg_db_role_setting as given
 cross join unnest(given.setconfig) as line
  left join pg_roles as role on role.oid = given.setrole
  left join pg_database as database on database.oid = given.setdatabase
 where (given.setdatabase = 0 or database.datname = current_database()) and split_part(line, '=', 1) = any($1::text[])
 order by 1, 3, 4;


-- The values with which this session began, if they are not PostgreSQL's default. The present values are not used, because the
-- doctor has set limits of its own for this transaction (source `session`).
-- name: own_settings
select name, reset_val || coalesce(unit, ''), source
  from pg_settings
 where name = any($1::text[]) and reset_val is distinct from boot_val;


-- Tables with row-level security, and whether it applies to this role.
-- name: row_security
select class.relname::text, row_security_active(class.oid)
  from pg_class as class join pg_namespace as namespace on namespace.oid = class.relnamespace
 where namespace.nspname = $1 and class.relrowsecurity
 order by 1;


-- Each table with the threshold of autovacuum: its own options where it has them, else the server's. PostgreSQL 18 has an upper
-- bound.
-- name: tables
select class.relname::text, class.relpersistence = 'u',
       coalesce((options.given ->> 'autovacuum_enabled')::boolean, true),
       coalesce(stat.n_live_tup, 0), coalesce(stat.n_dead_tup, 0),
       least(
           coalesce((options.given ->> 'autovacuum_vacuum_threshold')::double precision,
                    current_setting('autovacuum_vacuum_threshold')::double precision)
           + coalesce((options.given ->> 'autovacuum_vacuum_scale_factor')::double precision,
                      current_setting('autovacuum_vacuum_scale_factor')::double precision)
             * greatest(class.reltuples, 0),
           nullif(coalesce((options.given ->> 'autovacuum_vacuum_max_threshold')::double precision,
                           current_setting('autovacuum_vacuum_max_threshold', true)::double precision), -1))
  from pg_class as class
  join pg_namespace as namespace on namespace.oid = class.relnamespace
  left join pg_stat_all_tables as stat on stat.relid = class.oid
  cross join lateral (select coalesce(jsonb_object_agg(option_name, option_value), '{}')
                        from pg_options_to_table(class.reloptions)) as options (given)
 where namespace.nspname = $1 and class.relkind = 'r'
 order by 1;


-- Transactions, open and prepared, that keep dead rows from being removed. A role without pg_read_all_stats sees that other roles'
-- sessions hold a snapshot, but not since when: they have no age. A vacuum's own snapshot does not count, and parallel workers are
-- counted with their leader.
-- name: transactions
select 'session' as kind, pid::text as name, quote_ident(usename) as owner, coalesce(application_name, '') as application,
       coalesce(state, '') as state,
       extract(epoch from clock_timestamp() - xact_start)::double precision as seconds
  from pg_stat_activity
 where datname = current_database() and pid <> pg_backend_pid() and usesysid is not null
   and (xact_start is not null or backend_xid is not null or backend_xmin is not null)
   and coalesce(backend_type, '') <> 'parallel worker'
   and pid not in (select pid from pg_stat_progress_vacuum)
union all
select 'prepared', gid, owner::text, '', 'prepared',
       extract(epoch from clock_timestamp() - prepared)::double precision
  from pg_prepared_xacts
 where database = current_database()
order by seconds desc nulls last;


-- Slots without a reader: whether they keep dead rows (a standby with feedback), and how much of the log they keep.
-- name: slots
select slot_name::text, xmin is not null,
       coalesce(pg_wal_lsn_diff(
           case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end, restart_lsn),
           0)::bigint
  from pg_replication_slots
 where not active
 order by 1;


-- name: notify_queue
select pg_notification_queue_usage();


-- Connections that exist and that are in use: of the server, of this role, and of this database. A limit of -1 is none.
-- name: connections
select current_setting('max_connections')::integer,
       current_setting('superuser_reserved_connections')::integer
           + coalesce(current_setting('reserved_connections', true), '0')::integer,
       (select sum(numbackends)::integer from pg_stat_database),
       role.rolconnlimit, (select count(*)::integer from pg_stat_activity where usesysid = role.oid),
       database.datconnlimit, (select numbackends from pg_stat_database where datid = database.oid)
  from pg_roles as role, pg_database as database
 where role.rolname = current_user and database.datname = current_database();


-- name: live_workers
select worker_id, concurrency from tasklib.workers where died_at is null and lease_until > clock_timestamp();


-- Live workers, grouped by the process whose connections they share: a daemon, which has written a snapshot of each lately, or the
-- worker alone. The time is a subquery, or the index would not be used.
-- name: live_processes
select worker.of_daemon, count(*)::integer, sum(worker.concurrency)::bigint
  from (select worker_id, name, hostname, concurrency,
               worker_id in (select worker_id from tasklib.worker_states
                              where snapshot_at > (select clock_timestamp() - interval '1 minute')) as of_daemon
          from tasklib.workers where died_at is null and lease_until > clock_timestamp()) as worker
 group by worker.of_daemon, worker.hostname, worker.name, case when not worker.of_daemon then worker.worker_id end;


-- Names that wait and that no live worker serves, by queue. Only the first ten thousand ready tasks of each queue are read: one
-- short scan of the index of the claims. A paused queue needs no worker.
-- name: unserved
with recursive queues as (
    (select queue from tasklib.tasks where ready order by queue limit 1)
    union all
    select (select queue from tasklib.tasks where ready and queue > queues.queue order by queue limit 1)
    from queues where queues.queue is not null
)
select queues.queue::text, waiting.name::text, count(*),
       extract(epoch from clock_timestamp() - min(waiting.since))::double precision
  from queues,
       lateral (select name, greatest(created_at, scheduled_at, next_retry_at) as since
                  from tasklib.tasks where ready and tasks.queue = queues.queue
                 order by priority desc, created_at, id limit 10000) as waiting
 where queues.queue not in (select limits.queue from tasklib.queue_limits as limits where limits.is_paused)
   and not exists (select from tasklib.workers
                    where died_at is null and lease_until > clock_timestamp() and waiting.name = any(task_names)
                      and (workers.queues is null or queues.queue = any(workers.queues)))
 group by 1, 2
 order by 4 desc;


-- Workers whose lease has run out and that were not declared dead. Until the server has been up for a lease, none is declared dead.
-- name: undeclared
select worker_id, hostname, pid, extract(epoch from clock_timestamp() - lease_until)::double precision
  from tasklib.workers
 where died_at is null and lease_until < clock_timestamp() - $1::double precision * interval '1 second'
   and pg_postmaster_start_time() < clock_timestamp() - $1::double precision * interval '1 second'
 order by lease_until;


-- Claims of dead workers, and claims whose lock has passed, that were not recovered.
-- name: unrecovered
select claim.worker_id, sum(cardinality(claim.task_ids))::bigint,
       extract(epoch from clock_timestamp() - min(least(claim.locked_until, worker.died_at)))::double precision
  from tasklib.claims as claim
  left join tasklib.workers as worker using (worker_id)
 where least(claim.locked_until, worker.died_at) < clock_timestamp() - $1::double precision * interval '1 second'
   and pg_postmaster_start_time() < clock_timestamp() - $1::double precision * interval '1 second'
 group by 1
 order by 3 desc;


-- Tasks that run for longer than their timeout allows although they were told to stop ($1 seconds of grace).
-- `offset 0` keeps the lookup by key in place, as in `held` of claims.
-- name: overdue
select task.id, task.name::text, claim.worker_id,
       extract(epoch from clock_timestamp() - task.started_at)::double precision - task.timeout_seconds
  from tasklib.claims as claim
  cross join unnest(claim.task_ids) as held (task_id)
  cross join lateral (
      select id, name, started_at, timeout_seconds from tasklib.tasks
       where tasks.id = held.task_id and tasks.worker_id = claim.worker_id and tasks.state = 'running'
      offset 0) as task
 where isfinite(task.started_at)
   and extract(epoch from clock_timestamp() - task.started_at)::double precision > task.timeout_seconds + $1::double precision
 order by 4 desc;


-- Live workers that do not know a feature that is in use, and the first that they lack.
-- name: ignorant
select worker.worker_id, worker.pid, worker.hostname, min(feature)
  from tasklib.policy, unnest(policy.features) as feature, tasklib.workers as worker
 where worker.died_at is null and worker.lease_until > clock_timestamp() and feature <> all(worker.features)
 group by 1, 2, 3
 order by 1;


-- Permits that nobody will give back, and that forget_permits would free, if they have been so for $1 seconds: by queue.
-- name: forgotten_permits
select held.queue, sum(held.permits)::bigint, count(*),
       extract(epoch from clock_timestamp() - min(greatest(held.since, worker.died_at)))::double precision
  from tasklib.permits as held
  left join tasklib.workers as worker using (worker_id)
 where (worker.worker_id is null or worker.died_at is not null)
   and not exists (select from tasklib.claims as claim where claim.worker_id = held.worker_id)
   and greatest(held.since, worker.died_at) < clock_timestamp() - $1::double precision * interval '1 second'
 group by 1
 order by 1;


-- Queues with ready tasks that have been paused for more than $1 seconds, without an end.
-- name: forgotten_pauses
select queue.name::text, coalesce(queue.paused_by, 'somebody'), coalesce(queue.pause_reason, ''),
       extract(epoch from clock_timestamp() - queue.paused_at)::double precision
  from tasklib.queues as queue
 where queue.paused_at < clock_timestamp() - $1::double precision * interval '1 second' and queue.paused_until is null
   and exists (select from tasklib.tasks as task where task.ready and task.queue = queue.name)
 order by 4 desc;


-- Queues with ready tasks, of which none may ever start; '*' if that holds for all queues. (A rate of 0 is refused by a CHECK.)
-- name: closed_caps
select name::text from tasklib.queues as queue
 where max_running = 0 and exists (select from tasklib.tasks as task where task.ready and task.queue = queue.name)
union all
select '*' from tasklib.policy
 where cluster_wide_cap = 0 and exists (select from tasklib.tasks as task where task.ready)
 order by 1;


-- Breakers of queues with ready tasks that will not close or half open by themselves: half open for more than $1 seconds without
-- a report, because nobody probes; or open for longer than the policy says, because it was changed, or the clock was set back.
-- name: stuck_breakers
select breaker.queue, limits.breaker = 'half_open',
       abs(extract(epoch from clock_timestamp() - breaker.open_until))::double precision
  from tasklib.breakers as breaker
  join tasklib.queue_limits as limits on limits.queue = breaker.queue
  join tasklib.queues as queue on queue.name = breaker.queue
 where (limits.breaker = 'half_open' and breaker.open_until < clock_timestamp() - $1::double precision * interval '1 second'
        or limits.breaker = 'open'
           and breaker.open_until > clock_timestamp() + (queue.breaker_open_seconds + 60) * interval '1 second')
   and not limits.is_paused
   and exists (select from tasklib.tasks as task where task.ready and task.queue = breaker.queue)
 order by 1;


-- Leases without a claim, which would never be recovered. Workers never leave one; SQL by hand may, and so may a restore of `tasks`
-- without `claims`. Reads the whole table.
-- name: unnoted
select worker_id, count(*), (min(id::text))::uuid
  from tasklib.tasks as task
 where worker_id is not null
   and not exists (select from tasklib.claims as claim
                    where claim.worker_id = task.worker_id and task.id = any(claim.task_ids))
 group by 1
 order by 2 desc;
