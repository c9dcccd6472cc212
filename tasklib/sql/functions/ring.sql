-- Wakes the workers of one queue, if one of them sleeps. Every statement that makes a task ready calls this function, and
-- nothing else sends these notifications. A notification is only a hint to look. Its payload is empty, so that PostgreSQL
-- merges those of one transaction.
--
-- A sleeping worker holds a shared advisory lock on its queue, or on '*' for all queues: see doorbell.sql. If no worker
-- sleeps, nothing is sent, because each commit that notifies holds one lock of the whole server through its fsync.
-- The lock `flight` is taken first, and held until the end of the transaction. It tells a worker that falls asleep after this
-- function has looked for sleepers: a transaction may be about to commit that does not know of you.
-- Nothing here ever waits. A lock is taken and released in one expression: a cancel between two statements would leave it to
-- the session. Several sessions that try it at the same moment take each other for sleeping workers, and notify in vain.
--
-- The setting is for users of prepared transactions, which must not notify. Its name is put together from two parts, because
-- it is the same in every schema. The function has no SET clause and is not in SQL: a submit would take 40 us longer.
create or replace function tasklib.ring(queue text) returns void
    language plpgsql
as $$
begin
    if pg_catalog.current_setting('tasklib' operator(pg_catalog.||) '.doorbell', true) operator(pg_catalog.=) 'off' then
        return;
    end if;
    if pg_catalog.pg_try_advisory_xact_lock_shared(pg_catalog.hashtext('tasklib.flight'), 0) then
        if pg_catalog.pg_try_advisory_lock(pg_catalog.hashtext('tasklib.sleep'), pg_catalog.hashtext(queue))
           and pg_catalog.pg_advisory_unlock(pg_catalog.hashtext('tasklib.sleep'), pg_catalog.hashtext(queue))
           and pg_catalog.pg_try_advisory_lock(pg_catalog.hashtext('tasklib.sleep'), pg_catalog.hashtext('*'))
           and pg_catalog.pg_advisory_unlock(pg_catalog.hashtext('tasklib.sleep'), pg_catalog.hashtext('*')) then
            return;
        end if;
    end if;
    perform pg_catalog.pg_notify('task_new', ''), pg_catalog.pg_notify('task_queue_' operator(pg_catalog.||) queue, '');
end
$$;
