-- Wakes the workers of one queue. Everything that makes a task runnable calls this and
-- nothing else sends these notifications. A ring is a hint to look, never the truth:
-- the payload is empty, and equal payloads collapse within a transaction.
create or replace function tasklib.ring(queue text) returns void
    language sql
    set search_path = pg_catalog, pg_temp
as $$
    select pg_notify('task_new', ''), pg_notify('task_queue_' || queue, '')
$$;
