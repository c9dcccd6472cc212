-- What a hostile role may make, with no more than CREATE on public: everything of PostgreSQL's own once more, under the
-- same names, and operators that fit tasklib's columns better. Each of them notes who runs it. A search_path that begins
-- with public, or an operator that fits better, leads here. Run as `mallory`, before anything else in public is made.

set search_path = pg_catalog, pg_temp;

create table public.seen (who name not null, what text not null, at timestamptz not null default clock_timestamp());
grant insert on public.seen to public;
-- What is rolled back has happened all the same: a sequence remembers it.
create sequence public.others_seen;
grant usage on sequence public.others_seen to public;

create function public.witness(what text) returns boolean
    language plpgsql
as $$
begin
    if current_user operator(pg_catalog.<>) 'mallory' then
        perform pg_catalog.nextval('public.others_seen'::pg_catalog.regclass);
        raise log 'hostile: % ran as %', what, current_user;
    end if;
    insert into public.seen (who, what) values (current_user, what);
    return true;
end
$$;

create function public.attempt(command text) returns void
    language plpgsql
as $$
begin
    execute command;
exception when others then
    null;  -- PostgreSQL does not let everything be made: what it does is enough
end
$$;

-- Every function, for the same arguments.
do $do$
declare
    each record;
begin
    for each in
        select proname, oidvectortypes(proargtypes) as arguments, proretset,
               case when prorettype::regtype::text in ('record', 'void', 'internal', 'cstring', 'trigger', 'event_trigger')
                    then 'text' else format_type(prorettype, null) end as result
          from pg_proc
         where pronamespace = 'pg_catalog'::regnamespace and prokind = 'f'
           and not proargtypes::oid[] && array['internal'::regtype, 'cstring'::regtype, '"any"'::regtype]::oid[]
    loop
        perform public.attempt(format(
            'create function public.%I(%s) returns %s %s language plpgsql as $f$ begin perform public.witness(%L); return%s; end $f$',
            each.proname, each.arguments, case when each.proretset then 'setof' else '' end, each.result,
            'function ' || each.proname, case when each.proretset then '' else ' null' end));
    end loop;
end
$do$;

-- Every operator, for the same arguments.
do $do$
declare
    each record;
begin
    for each in
        select oid, oprname, oprleft, oprright, oprresult from pg_operator where oprnamespace = 'pg_catalog'::regnamespace
    loop
        perform public.attempt(format(
            'create function public.operator_%s(%s %s) returns %s language plpgsql as $f$ begin perform public.witness(%L); return null; end $f$',
            each.oid, case when each.oprleft <> 0 then format_type(each.oprleft, null) || ',' else '' end,
            format_type(each.oprright, null), format_type(each.oprresult, null), 'operator ' || each.oprname));
        perform public.attempt(format(
            'create operator public.%s (%s rightarg = %s, function = public.operator_%s)',
            each.oprname, case when each.oprleft <> 0 then 'leftarg = ' || format_type(each.oprleft, null) || ',' else '' end,
            format_type(each.oprright, null), each.oid));
    end loop;
end
$do$;

-- Relations of PostgreSQL's, and of tasklib's.
do $do$
declare
    each record;
begin
    for each in select relname from pg_class where relnamespace = 'pg_catalog'::regnamespace and relkind in ('r', 'v') loop
        perform public.attempt(format('create view public.%1$I as select * from pg_catalog.%1$I where public.witness(%2$L)',
                                   each.relname, 'relation ' || each.relname));
        perform public.attempt(format('grant select on public.%I to public', each.relname));
    end loop;
    for each in
        select * from unnest(array['tasks', 'attempts', 'task_attempts', 'folded_attempts', 'heartbeats', 'workers',
                                   'claims', 'elections', 'worker_states', 'task_rollups',
                                   'task_functions', 'schema_migrations']) as relname
    loop
        perform public.attempt(format('create view public.%I as select public.witness(%L)', each.relname, 'relation ' || each.relname));
        perform public.attempt(format('grant select on public.%I to public', each.relname));
    end loop;
end
$do$;

-- A type with a cast to every type that a parameter of tasklib's has.
create type public.bait as (inside text);
do $do$
declare
    target text;
begin
    foreach target in array array[
        'uuid', 'text', 'jsonb', 'integer', 'bigint', 'double precision', 'boolean', 'timestamptz', 'interval', 'bytea',
        'text[]', 'uuid[]', 'name']
    loop
        perform public.attempt(format(
            'create function public.%1$I(public.bait) returns %2$s language plpgsql as $f$ begin perform public.witness(%3$L); return %4$s; end $f$',
            'bait to ' || target, target, 'cast to ' || target,
            case target when 'uuid' then 'gen_random_uuid()' when 'text' then quote_literal('bait') when 'jsonb' then '''{}''::jsonb'
                else 'null' end));
        perform public.attempt(format('create cast (public.bait as %s) with function public.%I(public.bait) as implicit',
                                   target, 'bait to ' || target));
    end loop;
end
$do$;

-- Types of PostgreSQL's names, last: from here on `text` would be this one.
do $do$
declare
    each record;
begin
    for each in
        select typname from pg_type
         where typnamespace = 'pg_catalog'::regnamespace and typtype in ('b', 'r') and typname !~ '^_' and typname <> 'bait'
    loop
        perform public.attempt(format('create domain public.%1$I as pg_catalog.%1$I check (public.witness(%2$L))',
                                   each.typname, 'type ' || each.typname));
    end loop;
end
$do$;
