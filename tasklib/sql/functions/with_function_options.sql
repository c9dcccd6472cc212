-- The tasks of a JSON array, each with the options of its function that it leaves out. An option that is null counts as
-- left out. `otherwise` holds what the submitter's own configuration says, for names that no worker has served yet.
create or replace function tasklib.with_function_options(tasks jsonb) returns jsonb
    language sql stable
    set search_path = pg_catalog, pg_temp
as $$
    select jsonb_agg(
               case when element @> '{"resolved": true}' then element
                    else coalesce(nullif(element -> 'otherwise', 'null'), '{}') || coalesce(said.options, '{}')
                         || (element - array(select key from jsonb_each(element) where value = 'null'))
               end order by place)
      from jsonb_array_elements(tasks) with ordinality as given (element, place)
      left join lateral (
          select jsonb_strip_nulls(jsonb_build_object(
                     'queue', queue, 'priority', priority, 'max_retries', max_retries,
                     'timeout_seconds', timeout_seconds, 'store_result', store_result,
                     'on_crash', nullif(on_crash, 'retry'))) as options
            from tasklib.task_functions
           where task_functions.name = element ->> 'name') as said on true
$$;
revoke all on function tasklib.with_function_options(jsonb) from public;
