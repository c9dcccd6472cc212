-- Submits many tasks in one statement. `tasks` is a JSON array of objects whose keys are
-- the parameters of tasklib.submit, and parent_id; one row comes back for each, told by its ordinal:
--
--     select * from tasklib.submit_many('[{"name": "resize", "kwargs": {"size": 64}}, {"name": "resize", "priority": 5}]');
--
-- One JSON value, because it is cheap on both sides: fifteen arrays of a thousand values
-- cost the client 35-45 us a task to write, one JSON text 3 us; in all it reaches
-- 0.55 of a bare COPY into the same table.
-- Inserts in the order of the keys and ids, byte by byte as Python sorts them, so that two
-- overlapping batches wait for each other and cannot deadlock. A row that came back empty
-- is left to tasklib.submit, which knows what to do about an earlier task.
create or replace function tasklib.submit_many(tasks jsonb)
    returns table (ordinal bigint, id uuid, existed boolean)
    language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    submitted_at constant timestamptz := clock_timestamp();
    parameters constant text[] := array[
        'name', 'kwargs', 'args', 'queue', 'priority', 'delay_seconds', 'scheduled_at', 'expires_at', 'max_retries',
        'timeout_seconds', 'tags', 'idempotency_key', 'store_result', 'on_crash', 'parent_id', 'id'];
    unknown text;
    task record;
    new_count bigint := 0;
begin
    -- jsonb_to_recordset would pass over a misspelt key in silence.
    select string_agg(distinct key, ', ') into unknown
      from jsonb_array_elements(tasks) as element, jsonb_object_keys(element - parameters) as key;
    if unknown is not null then
        raise exception 'unknown key in submit_many: %', unknown
            using errcode = 'TL400', hint = 'Known keys: ' || array_to_string(parameters, ', ') || '.';
    end if;
    if jsonb_path_exists(tasks, '$[*] ? (@.delay_seconds < 0 || @.delay_seconds > 0 && @.scheduled_at.type() == "string")')
    then
        raise exception 'delay_seconds must not be negative, nor be given together with scheduled_at'
            using errcode = 'TL400';
    end if;

    for task in
        with given as materialized (
            select ordinal, coalesce(id, tasklib.uuid7()) as id, name,
                   coalesce(kwargs, '{}') as kwargs, coalesce(args, '{}') as args,
                   coalesce(queue, 'default') as queue, coalesce(priority, 0) as priority,
                   coalesce(scheduled_at, submitted_at + coalesce(delay_seconds, 0) * interval '1 second') as scheduled_at,
                   expires_at, coalesce(max_retries, 3) as max_retries, timeout_seconds,
                   coalesce(tags, '{}') as tags, idempotency_key,
                   coalesce(store_result, true) as store_result, coalesce(on_crash, 'retry') as on_crash, parent_id
              from rows from (jsonb_to_recordset(tasks) as (
                       id uuid, name text, kwargs jsonb, args jsonb, queue text, priority integer,
                       delay_seconds double precision, scheduled_at timestamptz, expires_at timestamptz,
                       max_retries integer, timeout_seconds double precision, tags jsonb, idempotency_key text,
                       store_result boolean, on_crash text, parent_id uuid)
                   ) with ordinality as element (
                       id, name, kwargs, args, queue, priority, delay_seconds, scheduled_at, expires_at, max_retries,
                       timeout_seconds, tags, idempotency_key, store_result, on_crash, parent_id, ordinal)
             order by idempotency_key collate "C", id
        ), inserted as (
            insert into tasklib.tasks (
                id, name, args, kwargs, queue, priority, created_at, scheduled_at, ready, due_at, expires_at,
                max_retries, timeout_seconds, tags, idempotency_key, store_result, on_crash, parent_id)
            select id, name, args, kwargs, queue, priority, submitted_at, scheduled_at, scheduled_at <= submitted_at,
                   least(case when scheduled_at > submitted_at then scheduled_at end, expires_at), expires_at,
                   max_retries, timeout_seconds, tags, idempotency_key, store_result, on_crash, parent_id
              from given
            on conflict do nothing
            returning id
        )
        select given.*, inserted.id is not null as is_new, (select count(*) from inserted) as inserted_count
          from given left join inserted using (id)
    loop
        ordinal := task.ordinal;
        id := task.id;
        existed := false;
        if task.is_new then
            new_count := new_count + 1;
        else
            select earlier.id, earlier.existed into id, existed
              from tasklib.submit(
                  name => task.name, kwargs => task.kwargs, args => task.args, queue => task.queue,
                  priority => task.priority, scheduled_at => task.scheduled_at, expires_at => task.expires_at,
                  max_retries => task.max_retries, timeout_seconds => task.timeout_seconds, tags => task.tags,
                  idempotency_key => task.idempotency_key, store_result => task.store_result,
                  on_crash => task.on_crash, id => task.id) as earlier;
        end if;
        return next;
    end loop;
    -- Two rows with one id are both taken for the one that went in: one would be lost.
    if new_count > coalesce(task.inserted_count, 0) then
        raise exception 'submit_many was given the same id twice' using errcode = 'TL400';
    end if;
end
$$;
revoke all on function tasklib.submit_many(jsonb) from public;
