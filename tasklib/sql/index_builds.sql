-- Statements of a migrator that builds indexes, on a session of its own.


-- A pooler tells its clients another number than the server's.
-- name: backend
select pg_catalog.pg_backend_pid();


-- Whatever the role's settings say: a build takes as long as it takes. transaction_timeout is unknown to PostgreSQL 16.
-- name: settings
select set_config(name, case when name = 'default_transaction_isolation' then 'read committed' else '0' end, false)
  from pg_settings
 where name in ('statement_timeout', 'lock_timeout', 'transaction_timeout', 'idle_session_timeout',
                'default_transaction_isolation');


-- Of the session, and never waited for in the server: see index_builds.py. One key for all indexes: of two builds on one table,
-- the second would wait inside its statement.
-- name: try_lock
select pg_try_advisory_lock(hashtextextended('tasklib.index_builds', 0));


-- name: unlock
select pg_advisory_unlock(hashtextextended('tasklib.index_builds', 0));


-- For psql, which has no loop.
-- name: lock_or_fail
do $$
begin
    if not pg_try_advisory_lock(hashtextextended('tasklib.index_builds', 0)) then
        raise exception 'another migration builds indexes' using hint = 'Run this script again later.';
    end if;
end
$$;


-- The part that is done is of blocks while the table is read, of rows while they are sorted, of transactions while it waits.
-- name: progress
select build.pid, index.relname::text, build.phase,
       case when build.blocks_total > 0 then build.blocks_done::double precision / build.blocks_total
            when build.tuples_total > 0 then build.tuples_done::double precision / build.tuples_total
            when build.lockers_total > 0 then build.lockers_done::double precision / build.lockers_total end,
       case when build.current_locker_pid > 0
            then 'the transaction of pid ' || build.current_locker_pid || coalesce(
                ' (since ' || (select date_trunc('second', xact_start)::text from pg_catalog.pg_stat_activity as locker
                                where locker.pid = build.current_locker_pid) || ')', '') end
  from pg_catalog.pg_stat_progress_create_index as build
  left join pg_catalog.pg_class as made on made.oid = build.relid
  left join pg_catalog.pg_class as index on index.oid = build.index_relid
 where build.datname = pg_catalog.current_database()
   and coalesce(made.relnamespace = (select relnamespace from pg_class where oid = 'tasklib.tasks'::regclass), true);
