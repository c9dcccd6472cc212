-- Rings once per statement and queue, and not once per row: each commit that notifies holds one lock of the whole server
-- through its fsync. A task that is due within the minute rings too. A later one need not: every worker polls at least once a
-- minute, and so learns of it in time.
create or replace function tasklib.ring_on_insert() returns trigger
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform tasklib.ring(soon.queue)
    from (
        select distinct inserted.queue
        from inserted
        where inserted.ready
           or inserted.state = 'pending' and inserted.scheduled_at < clock_timestamp() + interval '1 minute'
           or inserted.next_retry_at < clock_timestamp() + interval '1 minute'
    ) as soon;
    return null;
end
$$;

create or replace trigger ring_on_insert after insert on tasklib.tasks
    referencing new table as inserted
    for each statement execute function tasklib.ring_on_insert();
