-- Statements of the migrator. $1 ... are put in as literals, so that `tasklib migrate --sql` prints
-- just what `tasklib migrate` runs.


-- name: set_lock_timeout
select set_config('lock_timeout', $1, true);


-- A migrator that is stopped, or cut off from the server, must not keep tables locked.
-- name: set_idle_timeout
select set_config('idle_in_transaction_session_timeout', $1, true);


-- One migrator at a time. The lock ends with the transaction, so that a crash cannot leave it behind. It is tried and not waited
-- for: a transaction that waits here would be one for whose end a concurrent index build waits.
-- name: try_lock
select pg_try_advisory_xact_lock(hashtextextended('tasklib.migrate', 0));


-- For psql, which has no loop.
-- name: lock
select pg_advisory_xact_lock(hashtextextended('tasklib.migrate', 0));


-- `create schema if not exists` would need the right to create a schema even if the schema exists.
-- name: bootstrap
do $$
begin
    if to_regnamespace($1) is null then
        execute format('create schema %I', $1);
    end if;
end
$$;
create table if not exists tasklib.schema_migrations (
    version integer not null primary key,
    name text not null,
    phase text not null constraint schema_migrations_phase_known check (phase in ('pre', 'post', 'functions')),
    revision integer not null default 0,
    checksum text not null,
    applied_at timestamptz not null default clock_timestamp(),
    applied_by text not null default session_user
);


-- This is a query and not to_regclass, which answers from the backend's cache: the cache does not know of a schema that was
-- created since this transaction began. Every name has its schema, because the search_path is not set yet.
-- name: exists
select exists (
    select from pg_catalog.pg_class as class
    join pg_catalog.pg_namespace as namespace on namespace.oid operator(pg_catalog.=) class.relnamespace
    where namespace.nspname operator(pg_catalog.=) $1 and class.relname operator(pg_catalog.=) 'schema_migrations');


-- Runs before the search_path is set, like `exists`.
-- name: applied
select version, name, phase, checksum, revision from tasklib.schema_migrations order by version;


-- The indexes in the schema, and whether they are of use. An index that is being built is invalid until its end.
-- name: indexes
select index.relname::pg_catalog.text, pg_index.indisvalid and pg_index.indisready
  from pg_catalog.pg_index
  join pg_catalog.pg_class as index on index.oid operator(pg_catalog.=) pg_index.indexrelid
  join pg_catalog.pg_namespace as namespace on namespace.oid operator(pg_catalog.=) index.relnamespace
 where namespace.nspname operator(pg_catalog.=) $1;


-- Who held a table of the schema for the whole time that a migration waited for it. Other roles' times are hidden from a role
-- without pg_read_all_stats, and a prepared transaction has no process.
-- name: blockers
select lock.pid, activity.usename::pg_catalog.text, activity.application_name, activity.state,
       extract(epoch from clock_timestamp() - activity.xact_start)::double precision,
       date_trunc('second', activity.query_start)::pg_catalog.text,
       string_agg(distinct class.relname::pg_catalog.text, ', ' order by class.relname::pg_catalog.text)
  from pg_locks as lock
  join pg_class as class on class.oid = lock.relation and class.relkind in ('r', 'v')
  join pg_namespace as namespace on namespace.oid = class.relnamespace and namespace.nspname = $1
  left join pg_stat_activity as activity on activity.pid = lock.pid
 where lock.granted and lock.pid is distinct from pg_backend_pid()
   and lock.database = (select oid from pg_database where datname = current_database())
   and coalesce(activity.xact_start < clock_timestamp() - interval $2, true)
 group by lock.pid, activity.usename, activity.application_name, activity.state, activity.xact_start, activity.query_start
 order by activity.xact_start nulls last
 limit 3;


-- name: record
insert into tasklib.schema_migrations (version, name, phase, checksum, revision)
values ($1, $2, $3, $4, $5)
on conflict (version) do update
    set checksum = excluded.checksum, revision = excluded.revision,
        applied_at = excluded.applied_at, applied_by = excluded.applied_by;


-- Everything in the schema, a line each, in words that are the same on every PostgreSQL version.
-- name: describe
with own as (
    select oid from pg_namespace where nspname = $1
), lines as (
    select 'domain ' || type.typname || ' ' || format_type(type.typbasetype, type.typtypmod)
           || case when type.typnotnull then ' not null' else '' end
           || coalesce(' ' || string_agg(pg_get_constraintdef(con.oid), ' ' order by con.conname), '') as line
    from pg_type as type left join pg_constraint as con on con.contypid = type.oid and con.contype <> 'n'
    where type.typnamespace in (select oid from own) and type.typtype = 'd'
    group by type.oid
    union all
    select 'table ' || class.relname || ' column ' || attribute.attname || ' '
           || format_type(attribute.atttypid, attribute.atttypmod)
           || case when attribute.attnotnull then ' not null' else '' end
           || case when attribute.attgenerated = 's' then ' generated ' else ' default ' end
           || coalesce(pg_get_expr(def.adbin, def.adrelid), 'null')
    from pg_class as class
    join pg_attribute as attribute on attribute.attrelid = class.oid and attnum > 0 and not attisdropped
    left join pg_attrdef as def on def.adrelid = class.oid and def.adnum = attribute.attnum
    where class.relnamespace in (select oid from own) and class.relkind in ('r', 'p')
    union all
    select 'table ' || class.relname || ' constraint ' || con.conname || ' ' || pg_get_constraintdef(con.oid)
    from pg_constraint as con join pg_class as class on class.oid = con.conrelid
    where con.connamespace in (select oid from own) and con.contype <> 'n'
    union all
    select 'table ' || class.relname || ' index ' || pg_get_indexdef(index.indexrelid)
    from pg_index as index join pg_class as class on class.oid = index.indrelid
    where class.relnamespace in (select oid from own)
    union all
    select 'table ' || class.relname || ' trigger ' || pg_get_triggerdef(trigger.oid)
    from pg_trigger as trigger join pg_class as class on class.oid = trigger.tgrelid
    where class.relnamespace in (select oid from own) and not trigger.tgisinternal
    union all
    select 'view ' || class.relname || ' ' || regexp_replace(pg_get_viewdef(class.oid), '\mtasks\.', '', 'g')
    from pg_class as class
    where class.relnamespace in (select oid from own) and class.relkind = 'v'
    union all
    select 'function ' || proc.proname || '(' || pg_get_function_arguments(proc.oid) || ') returns '
           || coalesce(pg_get_function_result(proc.oid), 'nothing')
           || case when proc.prosecdef then ' security definer' else '' end
           || coalesce(' ' || array_to_string(proc.proconfig, ' '), '')
           || case when exists (
                  select from aclexplode(coalesce(proc.proacl, acldefault('f', proc.proowner))) as acl
                  where acl.grantee = 0)
              then ' for public' else '' end
           || ' ' || md5(proc.prosrc)
    from pg_proc as proc
    where proc.pronamespace in (select oid from own)
)
select regexp_replace(line, '\s+', ' ', 'g') from lines order by line collate "C";
