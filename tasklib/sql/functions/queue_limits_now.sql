-- What one queue allows now, as tasklib.queue_limits has it, for a statement that has just changed the queue. A volatile function
-- looks with a snapshot of its own; the statement itself would see the queue as it was.
create or replace function tasklib.queue_limits_now(queue text) returns setof tasklib.queue_limits
    language sql volatile rows 1
    set search_path = pg_catalog, pg_temp
as $$
    select * from tasklib.queue_limits as limits where limits.queue = queue_limits_now.queue
$$;
