-- For use_feature: a feature whose statements need an index is not switched on before the index is of use. Without it, each of
-- these statements would read the whole table. `tasklib migrate` builds it while everybody works.
create or replace function tasklib.require_index(index_name text) returns void
    language plpgsql stable
    set search_path = pg_catalog, pg_temp
as $$
begin
    if not exists (
        select from pg_index join pg_class on pg_class.oid = pg_index.indexrelid
         where pg_class.relname = require_index.index_name and pg_index.indisvalid and pg_index.indisready
           and pg_class.relnamespace = (select relnamespace from pg_class where oid = 'tasklib.tasks'::regclass))
    then
        raise exception 'the index % is not built yet', require_index.index_name using
            errcode = 'TL426', hint = 'Run `tasklib migrate`; it can take long. Then try again.';
    end if;
end
$$;
revoke all on function tasklib.require_index(text) from public;
