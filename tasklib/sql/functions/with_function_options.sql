-- The tasks of a JSON array, each with the options that it leaves out, of its function and of its queue. An option that is null counts
-- as left out. The order is: given, the function's own, the queue's default, the configuration of the workers that serve the function.
-- `otherwise` holds what the submitter's own configuration says, and counts last. For a task that is `resolved`, the submitter has
-- given the function's own options already.
create or replace function tasklib.with_function_options(tasks jsonb) returns jsonb
    language sql stable
    set search_path = pg_catalog, pg_temp
as $$
    select jsonb_agg(
               coalesce(nullif(element -> 'otherwise', 'null'), '{}')
               || jsonb_strip_nulls(jsonb_build_object(
                      'priority', said.priority, 'max_retries', said.max_retries, 'timeout_seconds', said.timeout_seconds))
               || jsonb_strip_nulls(jsonb_build_object(
                      'priority', queue.default_priority, 'max_retries', queue.default_max_retries,
                      'timeout_seconds', queue.default_timeout_seconds, 'audited', nullif(queue.audit, false)))
               || jsonb_strip_nulls(jsonb_build_object(
                      'queue', said.queue, 'store_result', said.store_result, 'on_crash', nullif(said.on_crash, 'retry'),
                      'priority', case when coalesce('priority' = any(said.own), true) then said.priority end,
                      'max_retries', case when coalesce('max_retries' = any(said.own), true) then said.max_retries end,
                      'timeout_seconds', case when coalesce('timeout_seconds' = any(said.own), true) then said.timeout_seconds end,
                      'deadline_seconds', case when element ->> 'deadline_at' is null then said.deadline_seconds end))
               || (element - array(select key from jsonb_each(element) where value = 'null'))
               order by place)
      from jsonb_array_elements(tasks) with ordinality as given (element, place)
      left join tasklib.task_functions as said
             on said.name = element ->> 'name' and not element @> '{"resolved": true}'
      left join tasklib.queues as queue on queue.name = coalesce(element ->> 'queue', said.queue, 'default')
$$;
revoke all on function tasklib.with_function_options(jsonb) from public;
