-- Writes one row of the audit.
create or replace function tasklib.note_transition(
    verb text, task_id uuid, queue text, before jsonb, after jsonb, reason text, actor text default null
)
    returns void
    language sql
    set search_path = pg_catalog, pg_temp
as $$
    insert into tasklib.task_transitions (actor, verb, task_id, queue, before, after, reason)
    values (coalesce(actor, tasklib.caller()), verb, task_id, queue, before, after, nullif(reason, ''))
$$;
