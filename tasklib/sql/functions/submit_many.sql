-- Submits many tasks in one statement. `tasks` is a JSON array of objects, whose keys are the parameters of tasklib.submit,
-- and parent_id. One row comes back for each task; `ordinal` is its position in the array:
--
--     select * from tasklib.submit_many('[{"name": "resize", "kwargs": {"size": 64}}, {"name": "resize", "priority": 5}]');
--
-- An option that is left out has the value of the task's function, or else of its queue: see with_function_options. A submitter that
-- knows the function marks the task as `resolved`: then the function is not looked up. Queues are looked up only if one of them says
-- something. `otherwise` is an object of options that count after those of the function and of the queue.
--
-- The tasks are one JSON value, which is cheap on both sides: a client takes 35-45 us a task to write fifteen arrays of a
-- thousand values, and 3 us to write one JSON text. Only tasks that were not inserted are looped over: a loop over all of
-- them costs a tenth more.
-- Rows are inserted in the order of their keys and ids, byte by byte as Python sorts them, so that two overlapping batches
-- wait for each other and cannot deadlock. A row that was not inserted is left to tasklib.submit, which knows what to do about
-- an earlier task.
-- ON CONFLICT costs a quarter more, and without keys an earlier task is rare. So it is used only after a conflict. To go on
-- after a conflict takes a subtransaction. There is at most one in a transaction, as its first write: with more than 64, every
-- reader of the database has to look up which transaction they belong to.
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
        'timeout_seconds', 'tags', 'idempotency_key', 'store_result', 'on_crash', 'parent_id', 'id',
        'resolved', 'otherwise', 'deadline_at', 'deadline_seconds'];
    has_unknown boolean;
    has_unresolved boolean;
    has_twins boolean;
    may_exist boolean;
    has_rules boolean;
    inserted_count bigint;
    ids uuid[];
    refused bigint[] := '{}';
    task record;
begin
    select array_agg((element ->> 'id')::uuid order by place),
           count(distinct (element ->> 'id')::uuid) < count(element ->> 'id'),
           bool_or(element - parameters <> '{}'),
           bool_or(element ? 'idempotency_key'),
           not bool_and(element @> '{"resolved": true}')
      into ids, has_twins, has_unknown, may_exist, has_unresolved
      from jsonb_array_elements(tasks) with ordinality as given (element, place);
    -- jsonb_to_recordset would pass over a misspelt key in silence.
    if has_unknown then
        raise exception 'unknown key in submit_many: %', (
            select string_agg(distinct key, ', ')
              from jsonb_array_elements(tasks) as element, jsonb_object_keys(element - parameters) as key)
            using errcode = 'TL400', hint = 'Known keys: ' || array_to_string(parameters, ', ') || '.';
    end if;
    -- One of the two would be lost.
    if has_twins then
        raise exception 'submit_many was given the same id twice' using errcode = 'TL400';
    end if;
    if jsonb_path_exists(tasks, '$[*] ? (@.delay_seconds < 0 || @.delay_seconds > 0 && @.scheduled_at.type() == "string")')
    then
        raise exception 'delay_seconds must not be negative, nor be given together with scheduled_at'
            using errcode = 'TL400';
    end if;
    has_rules := pg_sequence_last_value('tasklib.submit_rules') is not null;
    if has_unresolved or has_rules then
        tasks := tasklib.with_function_options(tasks);
    end if;
    if has_rules then
        perform tasklib.refuse_unknown_queue(queue)
           from (select distinct coalesce(element ->> 'queue', 'default') from jsonb_array_elements(tasks) as element)
                as given (queue);
    end if;
    if array_position(ids, null) is not null then
        ids := array(
            select coalesce(given, tasklib.uuid7()) from unnest(ids) with ordinality as numbered (given, place)
             order by place);
    end if;

    if not may_exist and pg_current_xact_id_if_assigned() is null then
        begin
            insert into tasklib.tasks (
                id, name, args, kwargs, queue, priority, created_at, scheduled_at, ready, due_at, expires_at,
                max_retries, timeout_seconds, tags, store_result, on_crash, parent_id, deadline_at, audited)
            select id, name, args, kwargs, queue, priority, submitted_at, scheduled_at, scheduled_at <= submitted_at,
                   due_at, expires_at, max_retries, timeout_seconds, tags, store_result, on_crash, parent_id, deadline_at,
                   audited
              from tasklib.tasks_in_json(tasks, ids, submitted_at)
             order by id;
            get diagnostics inserted_count = row_count;
            if inserted_count < cardinality(ids) then
                raise unique_violation;  -- a trigger that is not ours has dropped a row: tasklib.submit reports it
            end if;
            return query select place, given, false from unnest(ids) with ordinality as numbered (given, place);
            return;
        exception when unique_violation then
            null;  -- they are inserted below, beside the earlier tasks
        end;
    end if;

    for task in
        with given as materialized (
            select * from tasklib.tasks_in_json(tasks, ids, submitted_at) order by idempotency_key collate "C", id
        ), inserted as (
            insert into tasklib.tasks (
                id, name, args, kwargs, queue, priority, created_at, scheduled_at, ready, due_at, expires_at,
                max_retries, timeout_seconds, tags, idempotency_key, store_result, on_crash, parent_id, deadline_at, audited)
            select id, name, args, kwargs, queue, priority, submitted_at, scheduled_at, scheduled_at <= submitted_at,
                   due_at, expires_at, max_retries, timeout_seconds, tags, idempotency_key, store_result, on_crash, parent_id,
                   deadline_at, audited
              from given
            on conflict do nothing
            returning id
        )
        select * from given where id not in (select id from inserted)
    loop
        select earlier.id, earlier.existed into id, existed
          from tasklib.submit(
              name => task.name, kwargs => task.kwargs, args => task.args, queue => task.queue,
              priority => task.priority, scheduled_at => task.scheduled_at, expires_at => task.expires_at,
              max_retries => task.max_retries, timeout_seconds => coalesce(task.timeout_seconds, 'infinity'), tags => task.tags,
              idempotency_key => task.idempotency_key, store_result => task.store_result,
              on_crash => task.on_crash, id => task.id, deadline_at => task.deadline_at) as earlier;
        ordinal := task.ordinal;
        refused := refused || ordinal;
        return next;
    end loop;
    return query
        select place, given, false from unnest(ids) with ordinality as numbered (given, place) where place <> all(refused);
end
$$;
revoke all on function tasklib.submit_many(jsonb) from public;
