-- Rings once per statement and queue, not once per row: every notifying commit holds
-- one instance-wide lock through its fsync. A task that is due within the minute rings
-- too, because no worker polls less often than that and so hears of it in time.
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
