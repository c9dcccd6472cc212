-- Deletes the attempts of deleted tasks, once per DELETE and not once per row. Security definer, so that a role that may
-- delete tasks needs no right on attempts. The function refuses to be the trigger of another table. There, `id` could have a
-- type whose cast to uuid is a function of the table's owner, and that function would run with our owner's rights.
create or replace function tasklib.forget_attempts() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $$
begin
    if tg_relid <> 'tasklib.tasks'::regclass then
        raise exception 'tasklib.forget_attempts is the trigger of tasklib.tasks alone' using errcode = 'TL403';
    end if;
    delete from tasklib.attempts as attempt using deleted where attempt.task_id = deleted.id;
    return null;
end
$$;
revoke all on function tasklib.forget_attempts() from public;

create or replace trigger forget_attempts after delete on tasklib.tasks
    referencing old table as deleted
    for each statement execute function tasklib.forget_attempts();
