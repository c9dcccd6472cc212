-- Writes each change of an audited task's state. The queue's row decides at the submit whether a task is audited. The WHEN is one
-- column, because it is read and compiled anew for every statement that changes a task's state, of any queue.
-- Security definer, so that nobody who may change a task needs a right on the audit, and nobody can avoid it.
create or replace function tasklib.audit() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if new.state <> old.state then
        perform tasklib.note_transition(
            new.state, new.id, new.queue, jsonb_build_object('state', old.state, 'attempt', old.attempt),
            jsonb_strip_nulls(jsonb_build_object('state', new.state, 'attempt', new.attempt, 'error_code', new.error_code)),
            null, coalesce(new.worker_id, old.worker_id));
    end if;
    return null;
end
$$;
revoke all on function tasklib.audit() from public;

create or replace trigger audit after update of state on tasklib.tasks
    for each row when (new.audited) execute function tasklib.audit();
