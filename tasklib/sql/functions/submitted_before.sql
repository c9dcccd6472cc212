-- The earlier task that a submit has met: one with the same id (the submit was repeated after an unknown commit), or one with
-- the same idempotency key. Raises an error if the earlier payload is another one. The answer is null if the earlier task was
-- deleted meanwhile. This is a statement of its own, after the insert came back empty, so that it sees a row that was
-- committed while the insert waited.
--
-- A role that may not read tasks learns only that there is a conflict. For such a role, a key that another role has used is a
-- conflict whatever the payload: otherwise it could find out the other role's task by trying. An id is different: a role that
-- repeats one has made it, or was told it.
create or replace function tasklib.submitted_before(
    task_id uuid, task_key text, task_name text, task_args jsonb, task_kwargs jsonb
) returns uuid
    language plpgsql volatile
    set search_path = pg_catalog, pg_temp
    -- A plan that was made while the table was small would scan it when it is large: 10 s for a thousand keys.
    set enable_seqscan = off
as $$
declare
    payload constant bytea := tasklib.payload_digest(task_name, task_args, task_kwargs);
    earlier record;
    is_same boolean;
    may_read boolean;
begin
    select task.id, task.idempotency_key, task.payload_digest, task.name, task.args, task.kwargs
      into earlier
      from tasklib.tasks as task
     where task.id = task_id or task.idempotency_key = task_key
     order by task.id = task_id desc
     limit 1;
    if earlier.id is null then
        return null;
    end if;

    -- A digest of the payload alone is from an earlier version, which left out the role.
    is_same := coalesce(earlier.payload_digest in (payload, tasklib.keyed_digest(payload)), false);
    if not is_same then
        may_read := has_table_privilege(tasklib.caller(), 'tasklib.tasks', 'select');
        is_same := (may_read or earlier.id = task_id)
            and tasklib.payload_digest(earlier.name, earlier.args, earlier.kwargs) = payload;
    end if;
    if is_same and (earlier.id <> task_id or earlier.idempotency_key is not distinct from task_key) then
        return earlier.id;
    end if;
    if not coalesce(may_read, has_table_privilege(tasklib.caller(), 'tasklib.tasks', 'select')) then
        raise exception using
            errcode = 'TL409',
            message = case when earlier.id = task_id then format('conflict: task id %s is taken', task_id)
                else format('conflict: idempotency key %L is taken', task_key) end,
            hint = 'Use a new key for new work; only the role that used a key, or one that may read tasks, can repeat it.';
    end if;
    raise exception using
        errcode = 'TL409',
        message = case when earlier.id = task_id
            then format('task id %s belongs to a task with another payload or key', task_id)
            else format('idempotency key %L belongs to task %s, which has another payload', task_key, earlier.id)
        end,
        hint = 'Use a new key for new work; repeat a submit with the same task and arguments only.';
end
$$;
revoke all on function tasklib.submitted_before(uuid, text, text, jsonb, jsonb) from public;
