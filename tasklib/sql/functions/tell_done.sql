-- Tells who waits that a task is final, whoever made it so; and only if somebody does wait: each notifying commit holds
-- one instance-wide lock through its fsync. Who waits holds the lock that is tried here, shared, and looks once more
-- after it has it. Locked and unlocked in one expression: a cancel between two would leave the lock to the session.
-- Tried in the WHEN, so that nothing is called, and no row looked at again, while nobody waits; and once more in the
-- function, at the end of the statement: several that try at once take each other for waiting, and would tell in vain.
create or replace function tasklib.tell_done() returns trigger
    language plpgsql
as $$
begin
    if not (pg_catalog.pg_try_advisory_lock(pg_catalog.hashtextextended('tasklib.task_done', 0))
            and pg_catalog.pg_advisory_unlock(pg_catalog.hashtextextended('tasklib.task_done', 0))) then
        perform pg_catalog.pg_notify('task_done', new.id::pg_catalog.text);
    end if;
    return null;
end
$$;

create or replace trigger tell_done after update of completed_at on tasklib.tasks
    for each row when (
        old.completed_at is null and new.completed_at is not null
        and not (pg_catalog.pg_try_advisory_lock(pg_catalog.hashtextextended('tasklib.task_done', 0))
                 and pg_catalog.pg_advisory_unlock(pg_catalog.hashtextextended('tasklib.task_done', 0))))
    execute function tasklib.tell_done();
