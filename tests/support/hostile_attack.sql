-- What the hostile role does, again and again: it calls every function of tasklib's with values of its own type, and makes
-- every trigger function a trigger of tables of its own. What it may not do is refused, and that is as good.

set search_path = pg_catalog, pg_temp;

-- Operators that fit tasklib's columns better than any other, if it may use their types.
do $do$
declare
    each record;
begin
    for each in
        select type.typname, format_type(type.typbasetype, null) as base, operator, shape,
               format('operator_%s_%s', type.typname, row_number() over ()) as name
          from pg_type as type, unnest(array['=', '<>', '<', '>', '<=', '>=', '~', '||', '@>', '->', '->>']) as operator,
               unnest(array['both', 'left', 'right']) as shape
         where type.typnamespace = 'tasklib'::regnamespace and type.typtype = 'd'
    loop
        perform public.attempt(format(
            'create function public.%I(%s, %s) returns %s language plpgsql as $f$ begin perform public.witness(%L); return null; end $f$',
            each.name,
            case each.shape when 'right' then each.base else 'tasklib.' || each.typname end,
            case each.shape when 'left' then each.base else 'tasklib.' || each.typname end,
            case when each.operator in ('||', '->', '->>') then each.base else 'boolean' end,
            'operator ' || each.operator || ' on ' || each.typname));
        perform public.attempt(format(
            'create operator public.%s (leftarg = %s, rightarg = %s, function = public.%I)', each.operator,
            case each.shape when 'right' then each.base else 'tasklib.' || each.typname end,
            case each.shape when 'left' then each.base else 'tasklib.' || each.typname end, each.name));
    end loop;
end
$do$;

-- Calls.
do $do$
declare
    each record;
begin
    for each in
        select proc.oid::regprocedure as signature, proc.proname, proc.pronargs
          from pg_proc as proc
         where proc.pronamespace = 'tasklib'::regnamespace and proc.prorettype <> 'trigger'::regtype
    loop
        perform public.attempt(format('select * from tasklib.%I(%s)', each.proname,
            (select string_agg('row(''x'')::public.bait', ', ') from generate_series(1, each.pronargs))));
        perform public.attempt(format('select * from tasklib.%I()', each.proname));
    end loop;
    perform public.attempt($c$select * from tasklib.submit(row('x')::public.bait, row('x')::public.bait, row('x')::public.bait)$c$);
    perform public.attempt($c$select * from tasklib.submit_many('[{"name": "attack"}]')$c$);
end
$do$;

-- Triggers, on tables with tasklib's columns: all of its own type; and with their own types, but for the id.
do $do$
declare
    each record;
    events record;
    kind text;
    made text;
begin
    foreach kind in array array['public.bait', null] loop
        for each in
            select proc.proname from pg_proc as proc
             where proc.pronamespace = 'tasklib'::regnamespace and proc.prorettype = 'trigger'::regtype
        loop
            for events in
                select * from (values
                    ('before insert or update or delete', '', 'row'),
                    ('after insert', 'referencing new table as inserted', 'statement'),
                    ('after update', 'referencing old table as deleted new table as inserted', 'statement'),
                    ('after delete', 'referencing old table as deleted', 'statement'),
                    ('after insert or update or delete', '', 'row')) as known (at, transition, level)
            loop
                made := format('bait_%s', pg_catalog.md5(each.proname || events::text || coalesce(kind, '')));
                perform public.attempt(format('drop table if exists pg_temp.%I', made));
                perform public.attempt(format('create temp table %I (%s)', made, (
                    select string_agg(format('%I %s', attname, coalesce(
                        kind, case attname when 'id' then 'public.bait' else format_type(coalesce(nullif(typbasetype, 0), atttypid), null) end)), ', ')
                      from (select distinct on (attname) attname, atttypid, typbasetype
                              from pg_attribute join pg_type on pg_type.oid = atttypid
                             where attrelid in ('tasklib.tasks'::regclass, 'tasklib.attempts'::regclass) and attnum > 0) as columns)));
                perform public.attempt(format('create trigger t %s on pg_temp.%I %s for each %s execute function tasklib.%I()',
                                           events.at, made, events.transition, events.level, each.proname));
                perform public.attempt(format('insert into pg_temp.%I (id) values (row(''x'')::public.bait)', made));
                perform public.attempt(format('update pg_temp.%I set id = id', made));
                perform public.attempt(format('delete from pg_temp.%I', made));
                perform public.attempt(format('drop table if exists pg_temp.%I', made));
            end loop;
        end loop;
    end loop;
end
$do$;
