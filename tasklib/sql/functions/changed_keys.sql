-- The part of one object that is not the same in another: what the audit keeps of a row.
create or replace function tasklib.changed_keys(of jsonb, compared_with jsonb) returns jsonb
    language sql immutable
    set search_path = pg_catalog, pg_temp
as $$
    select coalesce(jsonb_object_agg(key, value), '{}')
      from jsonb_each(of)
     where value is distinct from compared_with -> key and key not in ('changed_at', 'changed_by')
$$;
