-- Attempts go with their task, once per DELETE and not once per row.
create or replace function tasklib.forget_attempts() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $$
begin
    delete from tasklib.attempts as attempt using deleted where attempt.task_id = deleted.id;
    return null;
end
$$;

create or replace trigger forget_attempts after delete on tasklib.tasks
    referencing old table as deleted
    for each statement execute function tasklib.forget_attempts();
