-- The task that stands in the way of a submit: the one with the same id (the submit is
-- repeated after an unknown commit) or with the same idempotency key. Raises if its
-- payload is another one; null if it has gone again. Its own statement, after the insert
-- came back empty, so that it sees a row that was committed while the insert waited.
create or replace function tasklib.submitted_before(
    task_id uuid, task_key text, task_name text, task_args jsonb, task_kwargs jsonb
) returns uuid
    language plpgsql volatile
    set search_path = pg_catalog, pg_temp
    -- A plan that was made while the table was small would scan it when it is large: 10 s for a thousand keys.
    set enable_seqscan = off
as $$
declare
    earlier record;
begin
    select task.id, task.idempotency_key,
           coalesce(task.payload_digest, tasklib.payload_digest(task.name, task.args, task.kwargs)) as payload_digest
      into earlier
      from tasklib.tasks as task
     where task.id = task_id or task.idempotency_key = task_key
     order by task.id = task_id desc
     limit 1;

    if earlier.payload_digest <> tasklib.payload_digest(task_name, task_args, task_kwargs)
       or earlier.id = task_id and earlier.idempotency_key is distinct from task_key then
        raise exception using
            errcode = 'TL409',
            message = case when earlier.id = task_id
                then format('task id %s belongs to a task with another payload or key', task_id)
                else format('idempotency key %L belongs to task %s, which has another payload', task_key, earlier.id)
            end,
            hint = 'Use a new key for new work; repeat a submit with the same task and arguments only.';
    end if;
    return earlier.id;
end
$$;
revoke all on function tasklib.submitted_before(uuid, text, text, jsonb, jsonb) from public;
