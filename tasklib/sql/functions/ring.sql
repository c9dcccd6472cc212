-- Wakes the workers of one queue, if any of them sleeps. Everything that makes a task runnable calls this and
-- nothing else sends these notifications. A ring is a hint to look, never the truth: the payload is empty, and equal
-- payloads collapse within a transaction.
--
-- Who sleeps holds a shared lock on its queue, or on '*' for all of them: see doorbell.sql. Nobody sleeps: nothing is sent,
-- because each notifying commit holds one instance-wide lock through its fsync. The other lock says until the end of
-- the transaction that somebody may be about to commit who has not seen the sleepers of a moment later: it comes first.
-- Nothing here ever waits. Locked and unlocked in one expression: a cancel between two statements would leave the lock
-- to the session. Several that try at once take each other for asleep, and ring in vain.
--
-- The setting is for users of prepared transactions, which must not notify. Its name is put together because it is the
-- same in every schema. No SET clause, and not in SQL: a submit would take 40 us longer.
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
