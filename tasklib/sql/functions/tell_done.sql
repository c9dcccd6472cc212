-- Notifies waiting clients that a task is final, whichever statement made it so. It notifies only if a client waits, because
-- each commit that notifies holds one lock of the whole server through its fsync. A waiting client holds a shared advisory
-- lock, and looks at its tasks once more after it has got the lock. The lock is tried here, and released in the same
-- expression: a cancel between two statements would leave it to the session.
-- It is tried in the WHEN clause, so that while no client waits no function is called and no row is read again. It is tried
-- once more in the function, at the end of the statement: several sessions that try it at the same moment take each other for
-- waiting clients, and would notify in vain.
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
